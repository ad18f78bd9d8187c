//! One signed request to a service of AWS, and its answer.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Method, Response};
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::super::client::{Clients, failure};
use super::answer::Answer;
use super::sign::{Service, Unsigned, signature};
use crate::accounts::{AwsEndpoint, AwsKeys};
use crate::model::Clock;

/// More of an answer is not read, and costs the connection.
const ANSWER_BYTES: usize = 64 * 1024;
/// The rest of an answer, after its head.
const ANSWER: Duration = Duration::from_secs(1);

/// The headers of a call in the form of the query API.
pub(super) const FORM: &[(&str, &str)] =
    &[("content-type", "application/x-www-form-urlencoded; charset=utf-8")];

/// A POST that is not signed yet.
pub(super) struct Request<'a> {
    pub(super) service: Service,
    pub(super) url: &'a Url,
    pub(super) headers: &'static [(&'static str, &'static str)],
    pub(super) body: Bytes,
}

/// There is no answer.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Failed {
    /// By the deadline.
    Late,
    Other(String),
}

pub(super) struct Caller {
    clients: Arc<Clients>,
    pub(super) clock: Clock,
}

impl Caller {
    pub(super) fn new(clients: Arc<Clients>, clock: Clock) -> Self {
        Self { clients, clock }
    }

    /// Signs the request and sends it once.
    ///
    /// # Errors
    /// Why there is no answer; it holds no secret.
    pub(super) async fn ask(
        &self,
        endpoint: &AwsEndpoint,
        region: &str,
        keys: &AwsKeys,
        request: Request<'_>,
        deadline: Instant,
    ) -> Result<Answer, Failed> {
        let client = match endpoint {
            AwsEndpoint::OfRegion(_) => self.clients.unguarded(),
            AwsEndpoint::Given(url) => {
                self.clients.guarded(url).map_err(|failed| Failed::Other(failed.to_string()))?
            }
        };
        let Request { service, url, headers, body } = request;
        let unsigned = Unsigned { method: Method::POST.as_str(), url: url.as_str(), headers, body: &body };
        let mut signed = signature(unsigned, keys, service, region, self.clock.now_ms())
            .map_err(|error| Failed::Other(format!("the request cannot be signed: {error}")))?;
        for (name, value) in headers {
            signed.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let sent = client.post(url.clone()).headers(signed).body(body).send();
        match timeout_at(deadline, sent).await {
            Err(_) => Err(Failed::Late),
            Ok(Err(error)) => Err(Failed::Other(failure(&error))),
            Ok(Ok(mut response)) => {
                let until = deadline.min(Instant::now() + ANSWER);
                let text = read(&mut response, until).await;
                Ok(Answer::of(response.status().as_u16(), response.headers(), text, self.clock.now_ms()))
            }
        }
    }
}

/// The part of the body that comes in time, up to [`ANSWER_BYTES`]. The status has decided, whatever comes after it.
async fn read(response: &mut Response, until: Instant) -> String {
    let mut body = Vec::new();
    while let Ok(Ok(Some(part))) = timeout_at(until, response.chunk()).await {
        let room = ANSWER_BYTES - body.len();
        body.extend_from_slice(&part[..part.len().min(room)]);
        if part.len() >= room {
            break;
        }
    }
    String::from_utf8_lossy(&body).into_owned()
}
