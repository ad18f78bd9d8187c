//! The broker that holds the queues of all accounts.

use std::time::Duration;

use serde_json::{Map, Value, json};

use super::management::{Management, Policy};
use super::{BrokerError, BrokerQueue, DEAD};
use crate::model::AmqpUrl;
use crate::origin::targets::{Brokers, Delivery, Outcome, Publish, Published};

const CONFIRM: Duration = Duration::from_secs(30);
/// Dead letters of each queue; the broker drops the oldest beyond it.
const DEAD_BYTES_MAX: u64 = 256 * 1024 * 1024;
/// The policy of all queues of dead letters.
const DEAD_POLICY: &str = "fanfare-dead-letters";

pub(super) struct Broker {
    pub(super) brokers: Brokers,
    pub(super) url: AmqpUrl,
    pub(super) management: Management,
}

impl Broker {
    /// Makes the queue and that of its dead letters, as far as they are missing, and sets its bound.
    pub(super) async fn declare(&self, queue: &BrokerQueue) -> Result<(), BrokerError> {
        self.management.put_policy(&Self::bound_of_the_dead()).await?;
        self.management.put_queue(&queue.dead(), json!({})).await?;
        // Before the queue, so that it has its bound from the start.
        self.set_max_length(queue).await?;
        let arguments = Map::from_iter([
            ("x-dead-letter-exchange".to_owned(), Value::from("")),
            ("x-dead-letter-routing-key".to_owned(), Value::from(queue.dead())),
        ]);
        self.management.put_queue(&queue.physical, arguments.into()).await
    }

    /// By a policy, since the arguments of a queue cannot change. The oldest message goes to the dead letters.
    pub(super) async fn set_max_length(&self, queue: &BrokerQueue) -> Result<(), BrokerError> {
        match Self::bound(queue) {
            Some(policy) => self.management.put_policy(&policy).await,
            None => self.management.delete_policy(&Self::policy_name(queue)).await,
        }
    }

    /// The policy that bounds the queue; none: it has no bound.
    pub(super) fn bound(queue: &BrokerQueue) -> Option<Policy> {
        let definition = json!({ "max-length": queue.max_length?, "overflow": "drop-head" });
        // A queue's name holds no special character of a pattern but the dot.
        let pattern = format!("^{}$", queue.physical.replace('.', "\\."));
        Some(Policy::new(Self::policy_name(queue), pattern, definition))
    }

    /// The policy that bounds all queues of dead letters.
    pub(super) fn bound_of_the_dead() -> Policy {
        let pattern = format!("^[a-z0-9-]+:[A-Za-z0-9._-]+{DEAD}$");
        Policy::new(DEAD_POLICY.to_owned(), pattern, json!({ "max-length-bytes": DEAD_BYTES_MAX }))
    }

    pub(super) fn policy_name(queue: &BrokerQueue) -> String {
        format!("fanfare {}", queue.physical)
    }

    pub(super) async fn delete(&self, queue: &BrokerQueue) -> Result<(), BrokerError> {
        // First, since only this needs more than the right to the queues: a user without it is refused before anything is gone.
        self.management.delete_policy(&Self::policy_name(queue)).await?;
        self.management.delete_queue(&queue.physical).await?;
        self.management.delete_queue(&queue.dead()).await
    }

    /// Messages that wait, and consumers. A queue that somebody has deleted on the broker has none.
    pub(super) async fn count(&self, queue: &BrokerQueue) -> Result<(u64, u64), BrokerError> {
        let counted = self.brokers.count(&self.url, &queue.physical).await;
        counted.map(Option::unwrap_or_default).map_err(BrokerError)
    }

    /// Makes one attempt to send a batch to a queue; none: the broker does not have the queue.
    pub(super) async fn send(&self, queue: &BrokerQueue, delivery: &Delivery) -> Option<Outcome> {
        let publish = Publish { exchange: "", routing_key: &queue.physical, timeout: CONFIRM };
        match self.brokers.publish(&self.url, publish, delivery).await {
            Published::Confirmed => Some(Outcome::Delivered),
            Published::Refused(reason) => Some(Outcome::retry(reason)),
            Published::Unavailable { reason, after } => Some(Outcome::Unavailable { reason, after }),
            Published::Returned => None,
        }
    }
}
