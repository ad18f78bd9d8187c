//! One attempt to post a batch.

use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::path::encode_channel;
use fanfare_proto::trace::{TRACEPARENT, TRACESTATE};
use fanfare_proto::webhook as wire;
use reqwest::Response;
use reqwest::header::{CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER};
use tokio::time::{Instant, timeout, timeout_at};

use super::answer;
use super::client::{TargetClients, failure};
use super::{DeliveryOutcome, TargetDelivery};
use crate::accounts::WebhookTarget;
use crate::model::Clock;

/// Bytes and time within which a response is read to its end, so that its connection can be reused. A longer or slower response costs the
/// connection.
const ANSWER_BYTES: usize = 16 * 1024;
const ANSWER: Duration = Duration::from_secs(1);

/// Sender of webhook deliveries.
pub struct Webhooks {
    clients: Arc<TargetClients>,
    clock: Clock,
}

impl Webhooks {
    pub fn new(clients: Arc<TargetClients>) -> Self {
        Self { clients, clock: Clock::system() }
    }

    /// Makes one attempt, which ends within the target's `timeout`. It may be dropped at any time.
    pub async fn send(&self, target: &WebhookTarget, delivery: &TargetDelivery) -> DeliveryOutcome {
        let client = match self.clients.guarded(&target.url) {
            Ok(client) => client,
            Err(failed) => return DeliveryOutcome::retry(failed.to_string()),
        };
        let Some(headers) = headers(target, delivery, self.clock.now_ms()) else {
            return DeliveryOutcome::Rejected {
                reason: "an id of the event cannot stand in a header".to_owned(),
            };
        };
        let deadline = Instant::now() + target.timeout;
        let request = client.post(target.url.clone()).headers(headers).body(delivery.body.clone());
        match timeout_at(deadline, request.send()).await {
            Err(_) => DeliveryOutcome::retry(format!("no answer within {} ms", target.timeout.as_millis())),
            Ok(Err(error)) => DeliveryOutcome::retry(failure(&error)),
            Ok(Ok(response)) => {
                let retry_after = response.headers().get(RETRY_AFTER).and_then(|value| value.to_str().ok());
                let outcome = answer::outcome(response.status().as_u16(), retry_after, self.clock.now_ms());
                // The status has decided the outcome already.
                timeout_at(deadline, timeout(ANSWER, discard(response))).await.ok();
                outcome
            }
        }
    }
}

fn headers(target: &WebhookTarget, delivery: &TargetDelivery, now_ms: u64) -> Option<HeaderMap> {
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
    if let Some(trace) = &delivery.trace {
        headers.insert(TRACEPARENT, HeaderValue::from_str(&trace.parent()).ok()?);
        if !trace.state.is_empty() {
            headers.insert(TRACESTATE, HeaderValue::from_str(&trace.state).ok()?);
        }
    }
    Some(headers)
}

/// Reads the response to its end, or drops it together with its connection.
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
