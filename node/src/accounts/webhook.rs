//! Webhooks: their settings, and how these are read.

use std::fmt;
use std::time::Duration;

use http::header::{HeaderMap, HeaderName, HeaderValue};
use url::Url;

use super::reader::{Found, Mistakes, TableReader};
use super::secret::Secret;

const URL_BYTES_MAX: usize = 2048;
const HEADERS_MAX: usize = 32;
const HEADER_BYTES_MAX: usize = 4096;

/// The sender sets these itself, or they belong to the connection.
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

/// Every header of the service begins so.
const SERVICE_HEADERS: &str = "x-service-";

/// The address to which batches of events are posted, and how.
#[derive(Clone, PartialEq, Eq)]
pub struct WebhookTarget {
    /// `http` or `https`, with a host and without a fragment; it may hold a user, a password and a query, which are secrets.
    pub url: Url,
    /// Signs each attempt.
    pub secret: Secret,
    /// Sent beside the headers of the service.
    pub headers: HeaderMap,
    /// Events of one batch at most.
    pub batch_events: usize,
    /// Bytes of one batch at most; an event that is larger is a batch of its own.
    pub batch_bytes: usize,
    /// How long the first event of a batch waits for others.
    pub linger: Duration,
    /// From the begin of an attempt to the end of its answer.
    pub timeout: Duration,
    /// Channels whose batches are under way at a time.
    pub parallel: usize,
}

/// By hand, so that nothing of the address but its host reaches a log.
impl fmt::Debug for WebhookTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WebhookTarget").field("host", &self.url.host_str()).finish_non_exhaustive()
    }
}

/// Reads what is left of an integration's table; what was wrong is reported.
pub(super) fn read(
    mut table: TableReader<'_, '_>,
    secret: Option<Secret>,
    mistakes: &mut Mistakes<'_>,
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

/// No reason shows the text, which may hold secrets.
fn read_url(found: &Found<'_, '_>, mistakes: &mut Mistakes<'_>) -> Option<Url> {
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

fn read_headers(found: &Found<'_, '_>, mistakes: &mut Mistakes<'_>) -> Option<HeaderMap> {
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
        let value = Found { value: value.get_ref(), span: value.span(), key };
        let Some(text) = value.text(mistakes) else { continue };
        match header(name.get_ref(), text) {
            Ok((name, _)) if headers.contains_key(&name) => {
                mistakes.add(&value.span, &value.key, "repeats a header; upper and lower case do not differ");
            }
            Ok((name, text)) => drop(headers.insert(name, text)),
            Err(reason) => mistakes.add(&value.span, &value.key, reason),
        }
    }
    // A header with a mistake is reported, so what is left out here is never used.
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
