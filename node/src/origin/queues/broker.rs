//! The broker that holds the queues of all accounts.

use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::management::{ManagementApi, QueuePolicy};
use super::{BrokerError, BrokerQueue, DEAD};
use crate::model::AmqpUrl;
use crate::origin::targets::{AmqpBrokers, AmqpPublish, AmqpPublishOutcome, DeliveryOutcome, TargetDelivery};

/// Time after which counts of the management API are left out.
const STATISTICS: Duration = Duration::from_secs(2);
const CONFIRM: Duration = Duration::from_secs(30);
/// Bytes of dead letters of each queue, beyond which the broker drops the oldest.
const DEAD_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// Name of the policy of all dead-letter queues.
const DEAD_POLICY: &str = "fanfare-dead-letters";

pub(super) struct QueueBroker {
    pub(super) brokers: AmqpBrokers,
    pub(super) url: AmqpUrl,
    pub(super) management: ManagementApi,
}

/// Messages and consumers of a queue; `None` for what the broker has not counted.
#[derive(Debug, Clone, Copy)]
pub(super) struct QueueCounts {
    /// Messages that wait for a consumer.
    pub(super) ready: u64,
    pub(super) consumers: u64,
    /// Messages that consumers have received and not confirmed.
    pub(super) unacknowledged: Option<u64>,
    /// Messages in the dead-letter queue.
    pub(super) dead_letters: Option<u64>,
}

impl QueueBroker {
    /// Creates the queue and its dead-letter queue, as far as they are missing, and sets the bound.
    pub(super) async fn declare(&self, queue: &BrokerQueue) -> Result<(), BrokerError> {
        self.management.put_policy(&Self::dead_letter_bound()).await?;
        self.management.put_queue(&queue.dead(), json!({})).await?;
        // Set before the queue is created, so that it has its bound from the start.
        self.set_max_length(queue).await?;
        let arguments = Map::from_iter([
            ("x-dead-letter-exchange".to_owned(), Value::from("")),
            ("x-dead-letter-routing-key".to_owned(), Value::from(queue.dead())),
        ]);
        self.management.put_queue(&queue.physical, arguments.into()).await
    }

    /// Sets the bound by a policy, since the arguments of a queue cannot change. Beyond it, the oldest message goes to the dead letters.
    pub(super) async fn set_max_length(&self, queue: &BrokerQueue) -> Result<(), BrokerError> {
        match Self::bound(queue) {
            Some(policy) => self.management.put_policy(&policy).await,
            None => self.management.delete_policy(&Self::policy_name(queue)).await,
        }
    }

    /// Policy that bounds the queue; `None` if it has no bound.
    pub(super) fn bound(queue: &BrokerQueue) -> Option<QueuePolicy> {
        let definition = json!({ "max-length": queue.max_length?, "overflow": "drop-head" });
        // A queue's name holds no special character of a pattern but the dot.
        let pattern = format!("^{}$", queue.physical.replace('.', "\\."));
        Some(QueuePolicy::new(Self::policy_name(queue), pattern, definition))
    }

    /// Policy that bounds all dead-letter queues.
    pub(super) fn dead_letter_bound() -> QueuePolicy {
        let pattern = format!("^[a-z0-9-]+:[A-Za-z0-9._-]+{DEAD}$");
        QueuePolicy::new(DEAD_POLICY.to_owned(), pattern, json!({ "max-length-bytes": DEAD_BYTES_MAX }))
    }

    pub(super) fn policy_name(queue: &BrokerQueue) -> String {
        format!("fanfare {}", queue.physical)
    }

    pub(super) async fn delete(&self, queue: &BrokerQueue) -> Result<(), BrokerError> {
        // First, since only this call needs more than the right to the queues: a user without it is refused before anything is deleted.
        self.management.delete_policy(&Self::policy_name(queue)).await?;
        self.management.delete_queue(&queue.physical).await?;
        self.management.delete_queue(&queue.dead()).await
    }

    /// Counts messages and consumers. A queue that was deleted on the broker counts as empty.
    pub(super) async fn count(&self, queue: &BrokerQueue) -> Result<QueueCounts, BrokerError> {
        let dead = queue.dead();
        let (counted, dead, unacknowledged) = tokio::join!(
            self.brokers.count(&self.url, &queue.physical),
            self.brokers.count(&self.url, &dead),
            timeout(STATISTICS, self.management.unacknowledged(&queue.physical)),
        );
        let (ready, consumers) = counted.map_err(BrokerError)?.unwrap_or_default();
        let dead_letters = dead.ok().flatten().map(|(ready, _)| ready);
        Ok(QueueCounts { ready, consumers, unacknowledged: unacknowledged.ok().flatten(), dead_letters })
    }

    /// Makes one attempt to send a batch to a queue; `None` if the broker does not have the queue.
    pub(super) async fn send(
        &self,
        queue: &BrokerQueue,
        delivery: &TargetDelivery,
    ) -> Option<DeliveryOutcome> {
        let publish = AmqpPublish { exchange: "", routing_key: &queue.physical, timeout: CONFIRM };
        match self.brokers.publish(&self.url, publish, delivery).await {
            AmqpPublishOutcome::Confirmed => Some(DeliveryOutcome::Delivered),
            AmqpPublishOutcome::Refused(reason) => Some(DeliveryOutcome::retry(reason)),
            AmqpPublishOutcome::Unavailable { reason, after } => {
                Some(DeliveryOutcome::Unavailable { reason, after })
            }
            AmqpPublishOutcome::Returned => None,
        }
    }
}
