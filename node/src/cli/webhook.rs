//! `fanfare webhook listen`: a receiver to try a webhook with.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::State;
use axum::http::{HeaderMap, Request, Response};
use clap::{Args, Command};
use fanfare_proto::{path, webhook as wire};
use serde::Deserialize;
use serde_json::value::RawValue;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use super::failure::{CommandOutcome, Failure};
use super::output::{self, printable, report};
use super::runtime::interruptible;
use crate::model::{Clock, bare_secret};

/// Bound of a request, above the largest batch of a webhook.
const BODY_BYTES_MAX: usize = 16 * 1024 * 1024;
/// Tolerance of a request's age in both directions: beyond it the request may be a recorded one.
const AGE_MS_MAX: u64 = 5 * 60 * 1000;

#[derive(Args)]
pub(super) struct WebhookArguments {
    /// Address to listen on; port 0 takes a free one
    #[arg(long, value_name = "HOST:PORT", default_value = "127.0.0.1:9000")]
    listen: SocketAddr,

    /// The secret with which the webhook signs
    #[arg(long, value_name = "SECRET")]
    secret: Option<String>,

    /// Holds the secret
    #[arg(long, value_name = "FILE", conflicts_with = "secret")]
    secret_file: Option<PathBuf>,

    /// The status with which each request is answered; one that --secret does not verify is answered with 401
    #[arg(long, value_name = "STATUS", default_value_t = 204, value_parser = clap::value_parser!(u16).range(200..=599))]
    status: u16,

    /// Also print the items of each event, one a line
    #[arg(long)]
    verbose: bool,

    /// Taken by every command; this one uses none
    #[arg(long, value_name = "DIR")]
    data_dir: Option<PathBuf>,
}

pub(super) fn command() -> Command {
    Command::new("webhook")
        .about("Webhooks")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(WebhookArguments::augment_args(Command::new("listen").about(
            "Receives webhooks, verifies their signatures and prints a line for each, to try one without a server",
        )))
}

/// Listens until it is interrupted, or the reader of its output has gone.
pub(super) fn listen(arguments: WebhookArguments) -> Result<CommandOutcome, Failure> {
    let secret = secret(&arguments)?;
    interruptible(async move {
        let cannot = |error| Failure::because(&format!("cannot listen on {}", arguments.listen), &error);
        let listener = TcpListener::bind(arguments.listen).await.map_err(cannot)?;
        let address = listener.local_addr().map_err(cannot)?;
        report(&format!("listening on http://{address}"));
        if secret.is_none() {
            report("signatures are not verified without --secret or --secret-file");
        }
        let unread = CancellationToken::new();
        let printer = WebhookPrinter {
            secret,
            status: arguments.status,
            verbose: arguments.verbose,
            clock: Clock::system(),
            unread: unread.clone(),
        };
        let serve = axum::serve(listener, Router::new().fallback(receive).with_state(printer));
        tokio::select! {
            ended = serve => ended.map(|()| CommandOutcome::Done).map_err(|error| Failure::because("cannot serve", &error)),
            () = unread.cancelled() => Ok(CommandOutcome::Done),
        }
    })
}

fn secret(arguments: &WebhookArguments) -> Result<Option<Arc<[u8]>>, Failure> {
    let Some(file) = &arguments.secret_file else {
        return Ok(arguments.secret.as_deref().map(|secret| secret.as_bytes().into()));
    };
    let shown = file.display();
    let text = std::fs::read_to_string(file)
        .map_err(|error| Failure::usage(format!("--secret-file: cannot read {shown}: {error}")))?;
    let bare = bare_secret(&text);
    let bare =
        bare.map_err(|reason| Failure::usage(format!("--secret-file: what {shown} holds {reason}")))?;
    Ok(Some(bare.as_bytes().into()))
}

#[derive(Clone)]
struct WebhookPrinter {
    secret: Option<Arc<[u8]>>,
    status: u16,
    verbose: bool,
    clock: Clock,
    /// Cancelled when the reader of the output has gone.
    unread: CancellationToken,
}

/// The fields of an envelope that are used.
#[derive(Deserialize)]
struct Envelope<'a> {
    #[serde(borrow)]
    items: Vec<&'a RawValue>,
}

async fn receive(State(printer): State<WebhookPrinter>, request: Request<Body>) -> Response<Body> {
    let (head, body) = request.into_parts();
    let status = match to_bytes(body, BODY_BYTES_MAX).await {
        Ok(body) => {
            if !matches!(output::write(&printer.lines(&head.headers, &body)), Ok(true)) {
                printer.unread.cancel();
            }
            let is_refused =
                printer.secret.is_some() && printer.signature_error(&head.headers, &body).is_some();
            if is_refused { 401 } else { printer.status }
        }
        // Cut short, or larger than any batch.
        Err(_) => 413,
    };
    let answer = Response::builder().status(status).body(Body::empty());
    answer.unwrap_or_default()
}

impl WebhookPrinter {
    fn lines(&self, headers: &HeaderMap, body: &[u8]) -> String {
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or("-");
        let channel = path::decode(header(wire::CHANNEL)).unwrap_or_else(|_| "-".to_owned());
        let [id, channel, source] = [header(wire::EVENT_ID), &channel, header(wire::SOURCE)].map(printable);
        let items = serde_json::from_slice(body).map(|Envelope { items }| items);
        let count = match &items {
            Ok(items) if items.len() == 1 => "1 item".to_owned(),
            Ok(items) => format!("{} items", items.len()),
            Err(_) => "no envelope".to_owned(),
        };
        let verdict = match self.signature_error(headers, body) {
            None => "verified".to_owned(),
            Some(signature_error) => format!("not verified: {signature_error}"),
        };
        let mut lines = format!("{id} {channel} {source} {count}, {verdict}\n");
        for item in items.iter().flatten().filter(|_| self.verbose) {
            lines.push_str(&format!("  {}\n", printable(item.get())));
        }
        lines
    }

    /// Gives the reason why the request may not be from the service; `None` if it is.
    fn signature_error(&self, headers: &HeaderMap, body: &[u8]) -> Option<String> {
        let Some(secret) = &self.secret else { return Some("no secret is given".to_owned()) };
        let header = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let Some(signature) = header(wire::SIGNATURE) else { return Some("it has no signature".to_owned()) };
        let Some(timestamp) = header(wire::TIMESTAMP) else { return Some("it has no timestamp".to_owned()) };
        if !wire::is_signed(secret, timestamp, body, signature) {
            return Some("the signature is not of this secret, timestamp and body".to_owned());
        }
        match timestamp.parse::<u64>().map(|timestamp| self.clock.now_ms().abs_diff(timestamp)) {
            Ok(age_ms) if age_ms <= AGE_MS_MAX => None,
            Ok(age_ms) => Some(format!("its time is {} s off", age_ms / 1000)),
            Err(_) => Some("its timestamp is no number".to_owned()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW_MS: u64 = 1_764_324_000_000;
    const BODY: &str = r#"{"items":[{"data":1},{"data":"\u001b"}]}"#;

    fn printer(secret: Option<&[u8]>, verbose: bool) -> WebhookPrinter {
        let (secret, clock) = (secret.map(Arc::from), Clock::manual(NOW_MS));
        WebhookPrinter { secret, status: 204, verbose, clock, unread: CancellationToken::new() }
    }

    fn headers(timestamp: &str, secret: &[u8]) -> HeaderMap {
        let signature = wire::signature(secret, timestamp, BODY.as_bytes());
        let headers = [
            (wire::EVENT_ID, "e1"),
            (wire::CHANNEL, "a%20b%0A"),
            (wire::SOURCE, "channel.message"),
            (wire::TIMESTAMP, timestamp),
            (wire::SIGNATURE, &signature),
        ];
        let parsed = headers.map(|(name, value)| {
            (name.parse().expect("a header name"), value.parse().expect("visible ASCII"))
        });
        parsed.into_iter().collect()
    }

    #[test]
    fn a_line_says_whether_the_event_is_verified() {
        let now = NOW_MS.to_string();
        let line = "e1 a b\\u{a} channel.message 2 items, ";
        for (timestamp, secret, verdict) in [
            (now.as_str(), &b"s"[..], "verified"),
            ("1764323700000", b"s", "verified"),
            ("1764324300000", b"s", "verified"),
            ("1764323699000", b"s", "not verified: its time is 301 s off"),
            ("1764324301000", b"s", "not verified: its time is 301 s off"),
            ("soon", b"s", "not verified: its timestamp is no number"),
            (&now, b"t", "not verified: the signature is not of this secret, timestamp and body"),
        ] {
            let lines = printer(Some(b"s"), false).lines(&headers(timestamp, secret), BODY.as_bytes());
            assert_eq!(lines, format!("{line}{verdict}\n"), "{timestamp}");
        }
        for (absent, verdict) in [
            (wire::SIGNATURE, "not verified: it has no signature"),
            (wire::TIMESTAMP, "not verified: it has no timestamp"),
        ] {
            let mut headers = headers(&now, b"s");
            headers.remove(absent);
            let lines = printer(Some(b"s"), false).lines(&headers, BODY.as_bytes());
            assert_eq!(lines, format!("{line}{verdict}\n"));
        }
        let lines = printer(None, false).lines(&headers(&now, b"s"), BODY.as_bytes());
        assert_eq!(lines, format!("{line}not verified: no secret is given\n"));
    }

    #[test]
    fn items_are_printed_as_they_came() {
        let lines = printer(None, true).lines(&headers("1", b"s"), BODY.as_bytes());
        let items: Vec<_> = lines.lines().skip(1).collect();
        assert_eq!(items, [r#"  {"data":1}"#, r#"  {"data":"\u001b"}"#]);
        for other in ["", "[]", r#"{"items":1}"#, "\u{1b}"] {
            let lines = printer(None, true).lines(&HeaderMap::new(), other.as_bytes());
            assert_eq!(lines, "- - - no envelope, not verified: no secret is given\n");
        }
    }
}
