//! One attempt to post a batch.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::path::encode_channel;
use fanfare_proto::webhook as wire;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use reqwest::redirect::Policy;
use reqwest::{Client, Response};
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore};
use tokio::time::{Instant, timeout, timeout_at};
use url::{Host, Url};

use super::answer;
use super::guard::Guard;
use super::names::{Failed, Guarded, Names};
use super::{Delivery, Outcome};
use crate::accounts::WebhookTarget;
use crate::model::{AllowRule, Clock};

const USER_AGENT: &str = concat!("fanfare/", env!("CARGO_PKG_VERSION"));
/// A connection in use was checked by the guard when it was opened; a change of its name holds after this.
const IDLE: Duration = Duration::from_secs(30);
const IDLE_CONNECTIONS: usize = 16;
/// An attempt that was given up does not go on to connect for longer.
const CONNECT: Duration = Duration::from_secs(10);
/// An answer is read to its end so that its connection can be used again; one that is larger or slower costs the connection.
const ANSWER_BYTES: usize = 16 * 1024;
const ANSWER: Duration = Duration::from_secs(1);
const REASON_CHARACTERS: usize = 200;

/// Posts to webhooks: connections are shared, and the guard looks at each address before it is connected to.
pub struct Webhooks {
    /// For each port that a rule names, with the rules of that port alone.
    of_ports: BTreeMap<u16, Poster>,
    /// For every other port.
    other: Poster,
    clock: Clock,
}

struct Poster {
    client: Client,
    guard: Guard,
}

/// Webhooks cannot be posted to on this machine.
#[derive(Debug)]
pub struct Unusable(String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot make an HTTP client: {}", self.0)
    }
}

impl std::error::Error for Unusable {}

impl Webhooks {
    /// Reads the CA certificates of the platform (or of `SSL_CERT_FILE`), which blocks on the disk.
    ///
    /// # Errors
    /// The TLS or HTTP client cannot be made.
    pub fn new(allow: &[AllowRule]) -> Result<Self, Unusable> {
        Self::with(allow, tls(native_roots())?, Names::of_system())
    }

    pub(super) fn with(allow: &[AllowRule], tls: ClientConfig, names: Names) -> Result<Self, Unusable> {
        let poster = |port| {
            let guard = Guard::of(allow, port);
            let resolver = Guarded { names: names.clone(), guard: guard.clone() };
            let client = Client::builder()
                .use_preconfigured_tls(tls.clone())
                .dns_resolver(Arc::new(resolver))
                .http1_only()
                .redirect(Policy::none())
                .no_proxy()
                .referer(false)
                .user_agent(USER_AGENT)
                .connect_timeout(CONNECT)
                .pool_idle_timeout(IDLE)
                .pool_max_idle_per_host(IDLE_CONNECTIONS)
                .build();
            client.map(|client| Poster { client, guard }).map_err(|error| Unusable(cause(&error)))
        };
        let named = allow.iter().filter_map(|rule| rule.port());
        let of_ports = named.chain([SMTP]).map(|port| Ok((port, poster(port)?))).collect::<Result<_, _>>()?;
        // No rule names port 0, so this one has the rules without a port.
        Ok(Self { of_ports, other: poster(0)?, clock: Clock::system() })
    }

    /// Makes one attempt, which is over within the target's `timeout`. It may be dropped at any time.
    pub async fn send(&self, target: &WebhookTarget, delivery: &Delivery) -> Outcome {
        let poster = target.url.port_or_known_default().and_then(|port| self.of_ports.get(&port));
        let poster = poster.unwrap_or(&self.other);
        if literal(&target.url).is_some_and(|address| !poster.guard.allows(address)) {
            return Outcome::retry(Failed::NotAllowed.to_string());
        }
        let Some(headers) = headers(target, delivery, self.clock.now_ms()) else {
            return Outcome::Rejected { reason: "an id of the event cannot stand in a header".to_owned() };
        };
        let deadline = Instant::now() + target.timeout;
        let request = poster.client.post(target.url.clone()).headers(headers).body(delivery.body.clone());
        match timeout_at(deadline, request.send()).await {
            Err(_) => Outcome::retry(format!("no answer within {} ms", target.timeout.as_millis())),
            Ok(Err(error)) => Outcome::retry(failure(&error)),
            Ok(Ok(response)) => {
                let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                let outcome = answer::outcome(response.status().as_u16(), retry_after, self.clock.now_ms());
                // The status has decided; what comes after it changes nothing.
                timeout_at(deadline, timeout(ANSWER, discard(response))).await.ok();
                outcome
            }
        }
    }
}

/// The port that only a rule with it opens, so it has rules of its own.
const SMTP: u16 = 25;

/// TLS to servers that the CA certificates of the platform (or of `SSL_CERT_FILE`) vouch for. Blocks on the disk.
///
/// # Errors
/// This machine cannot do TLS.
pub fn client_tls() -> Result<ClientConfig, Unusable> {
    tls(native_roots())
}

fn native_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        tracing::warn!("no CA certificates on this machine, so no https target is trusted");
    }
    roots
}

pub(super) fn tls(roots: RootCertStore) -> Result<ClientConfig, Unusable> {
    let versions = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Unusable(error.to_string()))?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

/// An address in the URL, which no resolver sees.
fn literal(url: &Url) -> Option<IpAddr> {
    match url.host()? {
        Host::Ipv4(address) => Some(address.into()),
        Host::Ipv6(address) => Some(address.into()),
        Host::Domain(_) => None,
    }
}

fn headers(target: &WebhookTarget, delivery: &Delivery, now_ms: u64) -> Option<HeaderMap> {
    let timestamp = now_ms.to_string();
    let signature = wire::signature(target.secret.as_bytes(), &timestamp, &delivery.body);
    let mut headers = target.headers.clone();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    for (name, value) in [
        (wire::ACCOUNT_ID, delivery.account_id.as_str()),
        (wire::CHANNEL, &encode_channel(&delivery.channel)),
        (wire::SOURCE, delivery.source),
        (wire::EVENT_ID, &delivery.event_id),
        (wire::RULE_ID, &delivery.rule_id),
        (wire::TIMESTAMP, &timestamp),
        (wire::SIGNATURE, &signature),
    ] {
        headers.insert(HeaderName::from_static(name), HeaderValue::from_str(value).ok()?);
    }
    Some(headers)
}

/// Reads to the end, or gives the connection up by dropping the answer.
async fn discard(mut answer: Response) {
    if answer.content_length().is_some_and(|length| length > ANSWER_BYTES as u64) {
        return;
    }
    let mut read = 0;
    while let Ok(Some(part)) = answer.chunk().await {
        read += part.len();
        if read > ANSWER_BYTES {
            return;
        }
    }
}

/// Without the URL, which may hold secrets.
fn failure(error: &reqwest::Error) -> String {
    let cause = cause(error);
    if cause == Failed::NotAllowed.to_string() {
        cause
    } else if error.is_connect() {
        format!("cannot connect: {cause}")
    } else {
        format!("no answer: {cause}")
    }
}

/// The innermost error, which no layer has put the URL into.
fn cause(error: &reqwest::Error) -> String {
    let mut innermost: &dyn std::error::Error = match error.source() {
        Some(source) => source,
        None => return "the request could not be made".to_owned(),
    };
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text = innermost.to_string();
    text.chars().filter(|character| !character.is_control()).take(REASON_CHARACTERS).collect()
}
