//! One attempt to send a batch to Lambda or SNS.

mod answer;
mod call;
mod roles;
mod sign;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fanfare_proto::path::encode_channel;
use fanfare_proto::webhook as wire;
use form_urlencoded::Serializer;
use sha2::{Digest as _, Sha256};
use tokio::time::{Instant, timeout_at};

use super::client::TargetClients;
use super::{DeliveryOutcome, TargetDelivery};
use crate::accounts::{AwsAccess, LambdaTarget, SnsTarget};
use crate::model::Clock;
use call::{AwsCaller, AwsRequest};
use roles::RoleSessions;
use sign::SigningService;

/// Type of each message attribute.
const STRING: &str = "String";
/// Longest message group that SNS accepts, in bytes.
const GROUP_BYTES_MAX: usize = 128;

/// Client that invokes functions and publishes to topics.
pub struct AwsClient {
    caller: AwsCaller,
    roles: RoleSessions,
}

impl AwsClient {
    pub fn new(clients: Arc<TargetClients>) -> Self {
        Self::with(clients, Clock::system())
    }

    pub(super) fn with(clients: Arc<TargetClients>, clock: Clock) -> Self {
        Self { caller: AwsCaller::new(clients, clock), roles: RoleSessions::default() }
    }

    /// Makes one asynchronous invocation, which ends within the target's `timeout`. It may be dropped at any time.
    pub async fn invoke(&self, target: &LambdaTarget, delivery: &TargetDelivery) -> DeliveryOutcome {
        if let Err(reason) = fits(delivery.body.len(), LambdaTarget::ENVELOPE_BYTES_MAX, "Lambda") {
            return DeliveryOutcome::Rejected { reason };
        }
        let mut path = format!("/2015-03-31/functions/{}/invocations", encode_channel(&target.function));
        if let Some(qualifier) = &target.qualifier {
            path = format!("{path}?Qualifier={}", encode_channel(qualifier));
        }
        let Ok(url) = target.access.endpoint.url().join(&path) else {
            return DeliveryOutcome::Rejected { reason: "the function has no address".to_owned() };
        };
        let headers = &[("content-type", "application/json"), ("x-amz-invocation-type", "Event")];
        let request =
            AwsRequest { service: SigningService::Lambda, url: &url, headers, body: delivery.body.clone() };
        self.deliver(&target.access, request, target.batching.timeout).await
    }

    /// Publishes one message, which ends within the target's `timeout`. It may be dropped at any time.
    pub async fn publish(&self, target: &SnsTarget, delivery: &TargetDelivery) -> DeliveryOutcome {
        let body = match message(target, delivery) {
            Ok(body) => body,
            Err(reason) => return DeliveryOutcome::Rejected { reason },
        };
        let url = target.access.endpoint.url();
        let request = AwsRequest { service: SigningService::Sns, url, headers: call::FORM, body };
        self.deliver(&target.access, request, target.batching.timeout).await
    }

    async fn deliver(
        &self,
        access: &AwsAccess,
        request: AwsRequest<'_>,
        timeout: Duration,
    ) -> DeliveryOutcome {
        let deadline = Instant::now() + timeout;
        let late = || DeliveryOutcome::retry(format!("no answer within {} ms", timeout.as_millis()));
        let keys = match timeout_at(deadline, self.roles.keys(&self.caller, access, deadline)).await {
            Ok(Ok(keys)) => keys,
            Ok(Err(reason)) => return DeliveryOutcome::retry(format!("cannot assume the role: {reason}")),
            Err(_) => return late(),
        };
        let reply = self.caller.ask(&access.endpoint, &access.region, &keys, request, deadline).await;
        match reply {
            Ok(answer) => {
                if answer.is_of_bad_keys() {
                    self.roles.forget(access, &keys);
                }
                answer.outcome()
            }
            Err(call::AwsCallError::Late) => late(),
            Err(call::AwsCallError::Other(reason)) => DeliveryOutcome::retry(reason),
        }
    }
}

fn fits(bytes: usize, most: usize, service: &str) -> Result<(), String> {
    let reason = || format!("too large: {bytes} bytes, and {service} takes {most}");
    if bytes > most { Err(reason()) } else { Ok(()) }
}

/// Builds the form of one Publish call.
///
/// # Errors
/// SNS would refuse the message.
fn message(target: &SnsTarget, delivery: &TargetDelivery) -> Result<Bytes, String> {
    let channel = encode_channel(&delivery.channel);
    let attributes = [
        (wire::ACCOUNT_ID, delivery.account_id.as_str()),
        (wire::CHANNEL, &channel),
        (wire::SOURCE, delivery.source),
        (wire::EVENT_ID, &delivery.event_id),
        (wire::RULE_ID, &delivery.rule_id),
    ];
    let attribute_bytes: usize =
        attributes.iter().map(|(name, value)| name.len() + STRING.len() + value.len()).sum();
    let bytes = delivery.body.len() + attribute_bytes;
    fits(bytes, SnsTarget::MESSAGE_BYTES_MAX, "SNS")?;
    let message = std::str::from_utf8(&delivery.body).map_err(|_| "the envelope is not UTF-8".to_owned())?;
    let mut form = Serializer::new(String::with_capacity(bytes * 2));
    form.append_pair("Action", "Publish").append_pair("Version", "2010-03-31");
    form.append_pair("TopicArn", &target.topic_arn).append_pair("Message", message);
    for (number, (name, value)) in (1..).zip(attributes) {
        let entry = format!("MessageAttributes.entry.{number}");
        form.append_pair(&format!("{entry}.Name"), name);
        form.append_pair(&format!("{entry}.Value.DataType"), STRING);
        form.append_pair(&format!("{entry}.Value.StringValue"), value);
    }
    if target.is_fifo() {
        form.append_pair("MessageGroupId", &group(channel));
        form.append_pair("MessageDeduplicationId", &delivery.event_id);
    }
    Ok(form.finish().into())
}

/// Message group within which a topic keeps the order: the channel, or its digest if SNS would refuse the channel.
fn group(channel: String) -> String {
    if channel.len() <= GROUP_BYTES_MAX {
        return channel;
    }
    let digest = Sha256::digest(channel);
    digest.iter().fold("sha256-".to_owned(), |text, byte| format!("{text}{byte:02x}"))
}
