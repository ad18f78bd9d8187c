//! Upkeep of the queues on the broker: missing ones are recreated, and wrong bounds are set again.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::broker::QueueBroker;
use super::management::QueuePolicy;
use super::service::{Queues, QueuesInner};
use super::{BrokerQueue, QueueCatalog, QueueError};
use crate::accounts::Directory;
use crate::model::random_bytes;
use crate::telemetry::RATE_LIMITED;

const ROUND: Duration = Duration::from_secs(30);
/// Failures that end a round; the next round continues after them.
const FAILURES_MAX: usize = 8;

impl Queues {
    /// Runs rounds of upkeep; never returns.
    pub async fn keep_up(self) {
        loop {
            tokio::time::sleep(ROUND).await;
            if let Err(error) = self.inner.keep_up().await {
                tracing::warn!(target: RATE_LIMITED, %error, "broker queue check failed");
            }
        }
    }
}

impl QueuesInner {
    /// Makes one round.
    pub(super) async fn keep_up(&self) -> Result<(), QueueError> {
        let unsettled = self.unsettled.lock().clone();
        let settled = self.settle(unsettled).await;
        if let Err(QueueError::Store(_)) = &settled {
            return settled;
        }
        // Taken before the broker's list, so that each of these queues has been declared there.
        let mut queues = self.catalog.all();
        let management = &self.broker()?.management;
        let names = management.queues().await?.into_iter().collect();
        let policies = management.policies().await?;
        let policies = policies.into_iter().map(|policy| (policy.name.clone(), policy)).collect();
        let found = BrokerInventory { names, policies };
        let (mut outcome, mut failures) = (settled, 0);
        if !queues.is_empty() {
            outcome = outcome.and(self.keep_dead_letter_policy(&found).await);
            queues.sort_unstable_by(|one, other| one.physical.cmp(&other.physical));
            let start = self.looked_at.load(Ordering::Relaxed) % queues.len();
            queues.rotate_left(start);
        }
        for queue in queues {
            self.looked_at.fetch_add(1, Ordering::Relaxed);
            if let Err(error) = self.keep_up_one(&queue, &found).await {
                (outcome, failures) = (Err(error), failures + 1);
            }
            if failures == FAILURES_MAX {
                break;
            }
        }
        self.report_strays(&found);
        outcome
    }

    /// Logs queues that look like strays in two successive rounds. A queue that another node is creating or deleting looks so only for a
    /// moment.
    fn report_strays(&self, found: &BrokerInventory) {
        // With the present catalog, so that queues stored since the round began are left out.
        let now: HashSet<Box<str>> =
            found.strays(&self.accounts.current(), &self.catalog).map(Box::from).collect();
        let before = std::mem::replace(&mut *self.strays.lock(), now.clone());
        let strays: Vec<_> = now.intersection(&before).collect();
        metrics::gauge!("fanfare_queue_strays").set(strays.len() as f64);
        if let Some(queue) = strays.first() {
            let count = strays.len();
            tracing::warn!(target: RATE_LIMITED, %queue, count, "stray queues on the broker");
        }
    }

    async fn keep_up_one(&self, queue: &BrokerQueue, found: &BrokerInventory) -> Result<(), QueueError> {
        if !found.has_queue(queue) {
            if self.recreate(queue).await? {
                report_repaired("queue", queue);
            }
            return Ok(());
        }
        // The definition may have changed since the round began.
        let Some(present) = self.catalog.by_physical(&queue.physical) else { return Ok(()) };
        if found.policies.get(&*QueueBroker::policy_name(&present)) == QueueBroker::bound(&present).as_ref() {
            return Ok(());
        }
        self.broker()?.set_max_length(&present).await?;
        report_repaired("policy", queue);
        Ok(())
    }

    async fn keep_dead_letter_policy(&self, found: &BrokerInventory) -> Result<(), QueueError> {
        let expected = QueueBroker::dead_letter_bound();
        if found.policies.get(&expected.name) != Some(&expected) {
            self.broker()?.management.put_policy(&expected).await?;
        }
        Ok(())
    }

    /// Recreates a queue that the broker lacks, with its present bound. Returns false if the queue was deleted, and then removes it from
    /// the broker.
    ///
    /// Another node that deletes a queue does so on the broker before it changes the store, and once more afterwards. So if the store
    /// still has the queue after this call has created it, the queue either stays, or that node deletes it later.
    pub(super) async fn recreate(&self, queue: &BrokerQueue) -> Result<bool, QueueError> {
        let broker = self.broker()?;
        let made = match self.catalog.by_physical(&queue.physical) {
            Some(present) => broker.declare(&present).await,
            None => Ok(()),
        };
        let times = {
            let mut unsettled = self.unsettled.lock();
            let times = unsettled.entry(queue.physical.clone()).or_default();
            *times += 1;
            *times
        };
        self.settle(HashMap::from([(queue.physical.clone(), times)])).await?;
        made?;
        Ok(self.catalog.by_physical(&queue.physical).is_some())
    }

    /// Deletes recreated queues on the broker that the store does not have. The next round retries those for which the store did not
    /// answer, or which the broker did not delete.
    async fn settle(&self, unsettled: HashMap<Box<str>, u64>) -> Result<(), QueueError> {
        if unsettled.is_empty() {
            return Ok(());
        }
        self.refresh().await?;
        let mut unsettled: Vec<_> = unsettled.into_iter().collect();
        let start = usize::from_ne_bytes(random_bytes()) % unsettled.len();
        unsettled.rotate_left(start);
        let (mut outcome, mut failures) = (Ok(()), 0);
        for (physical, times) in unsettled {
            if self.catalog.by_physical(&physical).is_none()
                && let Err(error) = self.broker()?.delete(&BrokerQueue::unbound(physical.clone())).await
            {
                (outcome, failures) = (Err(error.into()), failures + 1);
                if failures == FAILURES_MAX {
                    break;
                }
                continue;
            }
            let mut unsettled = self.unsettled.lock();
            // If the queue was recreated once more meanwhile, the store must be asked again.
            if unsettled.get(&physical) == Some(&times) {
                unsettled.remove(&physical);
            }
        }
        outcome
    }
}

/// Queues and policies of the broker at the beginning of a round.
struct BrokerInventory {
    names: HashSet<String>,
    policies: HashMap<String, QueuePolicy>,
}

impl BrokerInventory {
    /// Returns whether the broker has the queue and its dead-letter queue.
    fn has_queue(&self, queue: &BrokerQueue) -> bool {
        self.names.contains(&*queue.physical) && self.names.contains(&queue.dead())
    }

    /// Returns queues with a dead-letter queue that are named like those of an account and that the store does not have. An interrupted
    /// call leaves one, and an operator may have created one by hand.
    fn strays(&self, directory: &Directory, catalog: &QueueCatalog) -> impl Iterator<Item = &str> {
        let is_stray = move |name: &&str| {
            let queue = BrokerQueue::unbound((*name).into());
            let account = BrokerQueue::parse(name).map(|(account, _)| account);
            account.is_some_and(|account| directory.account(&account).is_some())
                && self.has_queue(&queue)
                && catalog.by_physical(name).is_none()
        };
        self.names.iter().map(String::as_str).filter(is_stray)
    }
}

pub(super) fn report_repaired(kind: &'static str, queue: &BrokerQueue) {
    metrics::counter!("fanfare_queue_repairs_total", "kind" => kind).increment(1);
    tracing::warn!(target: RATE_LIMITED, kind, queue = %queue.physical, "broker queue repaired");
}
