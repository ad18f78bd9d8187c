//! The upkeep of the queues on the broker: those that are missing there are made anew, and bounds that differ there are set again.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::Ordering;
use std::time::Duration;

use super::broker::Broker;
use super::management::Policy;
use super::service::{Inner, Queues};
use super::{BrokerQueue, Catalog, QueueError};
use crate::accounts::Directory;
use crate::model::random_bytes;
use crate::telemetry::OFTEN;

const ROUND: Duration = Duration::from_secs(30);
/// A round ends after so many failures; the next one begins behind them.
const FAILURES_MAX: usize = 8;

impl Queues {
    /// Never returns.
    pub async fn keep_up(self) {
        loop {
            tokio::time::sleep(ROUND).await;
            if let Err(error) = self.inner.keep_up().await {
                tracing::warn!(target: OFTEN, %error, "queues on the broker were not all looked at");
            }
        }
    }
}

impl Inner {
    /// Makes one round.
    pub(super) async fn keep_up(&self) -> Result<(), QueueError> {
        let unsettled = self.unsettled.lock().clone();
        let settled = self.settle(unsettled).await;
        if let Err(QueueError::Store(_)) = &settled {
            return settled;
        }
        // Before the broker is asked, so that each has been declared there.
        let mut queues = self.catalog.all();
        let management = &self.broker()?.management;
        let names = management.queues().await?.into_iter().collect();
        let policies = management.policies().await?;
        let policies = policies.into_iter().map(|policy| (policy.name.clone(), policy)).collect();
        let found = Found { names, policies };
        let (mut outcome, mut failures) = (settled, 0);
        if !queues.is_empty() {
            outcome = outcome.and(self.keep_policy_of_the_dead(&found).await);
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
        self.tell_strays(&found);
        outcome
    }

    /// A queue that another node is making or deleting looks like a stray for a moment, but not in two rounds.
    fn tell_strays(&self, found: &Found) {
        // By now, so that those that were stored since the round began are not among them.
        let now: HashSet<Box<str>> =
            found.strays(&self.accounts.current(), &self.catalog).map(Box::from).collect();
        let before = std::mem::replace(&mut *self.strays.lock(), now.clone());
        let strays: Vec<_> = now.intersection(&before).collect();
        metrics::gauge!("fanfare_queue_strays").set(strays.len() as f64);
        if let Some(queue) = strays.first() {
            let count = strays.len();
            tracing::warn!(target: OFTEN, %queue, count, "queues on the broker are named like those of accounts, and the store does not have them");
        }
    }

    async fn keep_up_one(&self, queue: &BrokerQueue, found: &Found) -> Result<(), QueueError> {
        if !found.has(queue) {
            if self.make_anew(queue).await? {
                tell_repaired("queue", queue);
            }
            return Ok(());
        }
        // By now: a change may have come since the round began.
        let Some(present) = self.catalog.by_physical(&queue.physical) else { return Ok(()) };
        if found.policies.get(&*Broker::policy_name(&present)) == Broker::bound(&present).as_ref() {
            return Ok(());
        }
        self.broker()?.set_max_length(&present).await?;
        tell_repaired("policy", queue);
        Ok(())
    }

    async fn keep_policy_of_the_dead(&self, found: &Found) -> Result<(), QueueError> {
        let expected = Broker::bound_of_the_dead();
        if found.policies.get(&expected.name) != Some(&expected) {
            self.broker()?.management.put_policy(&expected).await?;
        }
        Ok(())
    }

    /// Makes a queue that the broker lacks, with the bound of now. False: it was deleted, and is not on the broker.
    ///
    /// Another node that deletes a queue does so on the broker before it changes the store, and once more afterwards. So a queue that the
    /// store still has once it is made is either to stay, or is deleted by that node later.
    pub(super) async fn make_anew(&self, queue: &BrokerQueue) -> Result<bool, QueueError> {
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

    /// Deletes those of these queues on the broker, which were made anew there, that the store does not have; the upkeep looks again at
    /// those of which this is not known, or which the broker did not delete.
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
            // Made once more meanwhile: the store is to be asked again.
            if unsettled.get(&physical) == Some(&times) {
                unsettled.remove(&physical);
            }
        }
        outcome
    }
}

/// The queues and policies of the broker at the beginning of a round.
struct Found {
    names: HashSet<String>,
    policies: HashMap<String, Policy>,
}

impl Found {
    /// The broker has the queue and that of its dead letters.
    fn has(&self, queue: &BrokerQueue) -> bool {
        self.names.contains(&*queue.physical) && self.names.contains(&queue.dead())
    }

    /// Queues with dead letters that are named like one of an account, and are none. A call that ended half-way leaves one, and somebody may
    /// have made one by hand.
    fn strays(&self, directory: &Directory, catalog: &Catalog) -> impl Iterator<Item = &str> {
        let is_stray = move |name: &&str| {
            let queue = BrokerQueue::unbound((*name).into());
            let account = BrokerQueue::parse(name).map(|(account, _)| account);
            account.is_some_and(|account| directory.account(&account).is_some())
                && self.has(&queue)
                && catalog.by_physical(name).is_none()
        };
        self.names.iter().map(String::as_str).filter(is_stray)
    }
}

pub(super) fn tell_repaired(kind: &'static str, queue: &BrokerQueue) {
    metrics::counter!("fanfare_queue_repairs_total", "kind" => kind).increment(1);
    tracing::warn!(target: OFTEN, kind, queue = %queue.physical, "queue on the broker was missing or changed, and is repaired");
}
