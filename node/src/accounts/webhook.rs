//! Webhooks: their settings, and how these are read.

use std::fmt;
use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use url::Url;

use super::reader::{DirectoryMistakes, DirectoryValue, TableReader};
use super::secret::Secret;

const URL_BYTES_MAX: usize = 2048;
const HEADERS_MAX: usize = 32;
const HEADER_BYTES_MAX: usize = 4096;

/// Headers that the sender sets itself, or that belong to the connection.
const RESERVED_HEADERS: [&str; 15] = [
    "connection",
    "content-encoding",
    "content-length",
    "content-type",
    "cookie",
    "expect",
    "host",
    "keep-alive",
    "proxy-authorization",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
    "user-agent",
];

/// Prefix of every header of the service.
const SERVICE_HEADERS: &str = "x-service-";

/// The address to which batches of events are posted, and how.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookTarget {
    /// Address: `http` or `https`, with a host and without a fragment; user, password and query are secrets.
    pub url: Url,
    /// Key of the signature of each attempt.
    pub secret: Secret,
    /// Headers in addition to those of the service.
    pub headers: HeaderMap,
    /// Maximal number of events in one batch.
    pub batch_events: usize,
    /// Maximal size of one batch in bytes; a larger event is a batch of its own.
    pub batch_bytes: usize,
    /// Time for which the first event of a batch waits for others.
    pub linger: Duration,
    /// Time from the start of an attempt to the end of its answer.
    pub timeout: Duration,
    /// Channels with unanswered batches at a time.
    pub parallel: usize,
}

/// Written by hand, so that only the host of the address reaches a log.
impl fmt::Debug for WebhookTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookTarget").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}

/// Reads the rest of an integration's table and reports its mistakes.
pub(super) fn read(
    mut table: TableReader<'_, '_>,
    secret: Option<Secret>,
    mistakes: &mut DirectoryMistakes<'_>,
) -> Option<WebhookTarget> {
    let url = table.required("url", mistakes).and_then(|found| read_url(&found, mistakes));
    let headers = table.get("headers").map_or(Some(HeaderMap::new()), |found| read_headers(&found, mistakes));
    let mut number = |name, range, default: u64| table.integer(name, range, mistakes).unwrap_or(default);
    let batch_events = number("batch_events", 1..=1000, 100);
    let batch_bytes = number("batch_bytes", 1024..=4 * 1024 * 1024, 256 * 1024);
    let linger = Duration::from_millis(number("linger_ms", 0..=60_000, 0));
    let timeout = Duration::from_millis(number("timeout_ms", 100..=60_000, 10_000));
    let parallel = number("parallel", 1..=64, 8);
    if let (Some(url), Some(headers)) = (&url, &headers)
        && has_user(url)
        && headers.contains_key(http::header::AUTHORIZATION)
    {
        let reason = "must not hold authorization beside a user in the url, which is sent as one";
        mistakes.add(&table.span, &table.key("headers"), reason);
    }
    table.finish(mistakes);
    let size = |number: u64| usize::try_from(number).ok();
    Some(WebhookTarget {
        url: url?,
        secret: secret?,
        headers: headers?,
        batch_events: size(batch_events)?,
        batch_bytes: size(batch_bytes)?,
        linger,
        timeout,
        parallel: size(parallel)?,
    })
}

fn has_user(url: &Url) -> bool {
    !url.username().is_empty() || url.password().is_some()
}

/// Reads the URL. No reported reason shows the text, which may contain secrets.
fn read_url(found: &DirectoryValue<'_, '_>, mistakes: &mut DirectoryMistakes<'_>) -> Option<Url> {
    let text = found.text(mistakes)?;
    let checked = match Url::parse(text) {
        _ if text.len() > URL_BYTES_MAX => Err(format!("must not be longer than {URL_BYTES_MAX} bytes")),
        Err(error) => Err(format!("must be a URL such as https://example.com/hook: {error}")),
        Ok(url) if !matches!(url.scheme(), "http" | "https") => {
            Err("must begin with https:// or http://".to_owned())
        }
        Ok(url) if url.host_str().is_none_or(str::is_empty) => Err("must name a host".to_owned()),
        Ok(url) if url.port() == Some(0) => Err("must not have port 0".to_owned()),
        Ok(url) if url.fragment().is_some() => {
            Err("must not have a fragment (#…), which is never sent".to_owned())
        }
        Ok(url) => Ok(url),
    };
    checked.map_err(|reason| mistakes.add(&found.span, &found.key, reason)).ok()
}

fn read_headers(found: &DirectoryValue<'_, '_>, mistakes: &mut DirectoryMistakes<'_>) -> Option<HeaderMap> {
    let Some(table) = found.value.as_table() else {
        mistakes.add(&found.span, &found.key, "must be a table of names and values");
        return None;
    };
    if table.len() > HEADERS_MAX {
        mistakes.add(&found.span, &found.key, format!("must not be more than {HEADERS_MAX}"));
    }
    let mut headers = HeaderMap::new();
    for (name, value) in table.iter() {
        let key = format!("{}.{:?}", found.key, name.get_ref());
        let value = DirectoryValue { value: value.get_ref(), span: value.span(), key };
        let Some(text) = value.text(mistakes) else { continue };
        match header(name.get_ref(), text) {
            Ok((name, _)) if headers.contains_key(&name) => {
                mistakes.add(&value.span, &value.key, "repeats a header; upper and lower case do not differ");
            }
            Ok((name, text)) => drop(headers.insert(name, text)),
            Err(reason) => mistakes.add(&value.span, &value.key, reason),
        }
    }
    // A header with a mistake is reported, so the incomplete map is never used.
    Some(headers)
}

fn header(name: &str, text: &str) -> Result<(HeaderName, HeaderValue), &'static str> {
    let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| "is no name of a header")?;
    if RESERVED_HEADERS.contains(&name.as_str()) || name.as_str().starts_with(SERVICE_HEADERS) {
        return Err("is a header that the node sets itself");
    }
    if text.len() > HEADER_BYTES_MAX {
        return Err("must not be longer than 4096 bytes");
    }
    let mut value = HeaderValue::from_str(text).map_err(|_| "must be printable ASCII")?;
    value.set_sensitive(true);
    Ok((name, value))
}

#[cfg(test)]
mod tests;
