//! One signed request to an AWS service, and its response.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{HeaderName, HeaderValue};
use reqwest::{Method, Response};
use tokio::time::{Instant, timeout_at};
use url::Url;

use super::super::client::{TargetClients, failure};
use super::answer::AwsAnswer;
use super::sign::{SigningService, UnsignedRequest, signature};
use crate::accounts::{AwsEndpoint, AwsKeys};
use crate::model::Clock;

/// Bytes of a response that are read; a longer one costs the connection.
const ANSWER_BYTES: usize = 64 * 1024;
/// Time limit for the body of a response, after its head.
const ANSWER: Duration = Duration::from_secs(1);

/// Headers of a call in the format of the query API.
pub(super) const FORM: &[(&str, &str)] =
    &[("content-type", "application/x-www-form-urlencoded; charset=utf-8")];

/// A POST request that is not signed yet.
pub(super) struct AwsRequest<'a> {
    pub(super) service: SigningService,
    pub(super) url: &'a Url,
    pub(super) headers: &'static [(&'static str, &'static str)],
    pub(super) body: Bytes,
}

/// Error of a call without a response.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum AwsCallError {
    /// The deadline has passed.
    Late,
    Other(String),
}

pub(super) struct AwsCaller {
    clients: Arc<TargetClients>,
    pub(super) clock: Clock,
}

impl AwsCaller {
    pub(super) fn new(clients: Arc<TargetClients>, clock: Clock) -> Self {
        Self { clients, clock }
    }

    /// Signs the request and sends it once.
    ///
    /// # Errors
    /// The call has no response; the reason holds no secret.
    pub(super) async fn ask(
        &self,
        endpoint: &AwsEndpoint,
        region: &str,
        keys: &AwsKeys,
        request: AwsRequest<'_>,
        deadline: Instant,
    ) -> Result<AwsAnswer, AwsCallError> {
        let client = match endpoint {
            AwsEndpoint::OfRegion(_) => self.clients.unguarded(),
            AwsEndpoint::Given(url) => {
                self.clients.guarded(url).map_err(|failed| AwsCallError::Other(failed.to_string()))?
            }
        };
        let AwsRequest { service, url, headers, body } = request;
        let unsigned =
            UnsignedRequest { method: Method::POST.as_str(), url: url.as_str(), headers, body: &body };
        let mut signed = signature(unsigned, keys, service, region, self.clock.now_ms())
            .map_err(|error| AwsCallError::Other(format!("the request cannot be signed: {error}")))?;
        for (name, value) in headers {
            signed.insert(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        let sent = client.post(url.clone()).headers(signed).body(body).send();
        match timeout_at(deadline, sent).await {
            Err(_) => Err(AwsCallError::Late),
            Ok(Err(error)) => Err(AwsCallError::Other(failure(&error))),
            Ok(Ok(mut response)) => {
                let until = deadline.min(Instant::now() + ANSWER);
                let text = read(&mut response, until).await;
                Ok(AwsAnswer::of(response.status().as_u16(), response.headers(), text, self.clock.now_ms()))
            }
        }
    }
}

/// Reads the body that arrives in time, up to [`ANSWER_BYTES`]. The status has decided the outcome already.
async fn read(response: &mut Response, until: Instant) -> String {
    let mut body = Vec::new();
    while let Ok(Ok(Some(part))) = timeout_at(until, response.chunk()).await {
        let left_bytes = ANSWER_BYTES - body.len();
        body.extend_from_slice(&part[..part.len().min(left_bytes)]);
        if part.len() >= left_bytes {
            break;
        }
    }
    String::from_utf8_lossy(&body).into_owned()
}
