//! The broker that holds the queues of all accounts.

use std::time::Duration;

use serde_json::{Map, Value, json};
use tokio::time::timeout;

use super::management::{Management, Policy};
use super::{BrokerError, BrokerQueue, DEAD};
use crate::model::AmqpUrl;
use crate::origin::targets::{Brokers, Delivery, Outcome, Publish, Published};

/// Counts that the management API does not give in this time are left out.
const STATISTICS: Duration = Duration::from_secs(2);
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

/// The messages and the consumers of a queue; none where the broker has not counted them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    /// That wait for a consumer.
    pub(super) ready: u64,
    pub(super) consumers: u64,
    /// That a consumer has and has not confirmed.
    pub(super) unacknowledged: Option<u64>,
    /// In the queue of the dead letters.
    pub(super) dead_letters: Option<u64>,
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

    /// A queue that somebody has deleted on the broker has no messages and no consumers.
    pub(super) async fn count(&self, queue: &BrokerQueue) -> Result<Counts, BrokerError> {
        let dead = queue.dead();
        let (counted, dead, unacknowledged) = tokio::join!(
            self.brokers.count(&self.url, &queue.physical),
            self.brokers.count(&self.url, &dead),
            timeout(STATISTICS, self.management.unacknowledged(&queue.physical)),
        );
        let (ready, consumers) = counted.map_err(BrokerError)?.unwrap_or_default();
        let dead_letters = dead.ok().flatten().map(|(ready, _)| ready);
        Ok(Counts { ready, consumers, unacknowledged: unacknowledged.ok().flatten(), dead_letters })
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
