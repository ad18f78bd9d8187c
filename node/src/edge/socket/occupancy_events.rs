//! Occupied and vacated events of channels, for integrations that ask for them.
//!
//! Nodes agree through their answers when they count a channel: a node that has reported the channel as occupied says so. A node with the
//! first local connection then knows that the event was sent. A node that loses its last connection leaves the vacated event to the others.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout, timeout_at};

use super::Shards;
use crate::accounts::Account;
use crate::auth::Principal;
use crate::model::{AttachedCount, ChannelKey, ChannelName, pattern_matches};
use crate::publish::Publisher;

/// Coalescing time: connections that come and go within it are evaluated together, so that a client that reconnects at once causes no
/// event.
const COALESCING_TIME: Duration = Duration::from_secs(1);
/// Interval at which all reported channels are verified.
const VERIFY_EVERY: Duration = Duration::from_secs(60);
/// Time limit of a count, longer than the wait for peers.
const COUNT_WAIT: Duration = Duration::from_secs(3);
/// Channels that are counted with one request.
const CHANNELS_MAX: usize = 256;

/// Notifier of integrations about occupied and vacated channels.
pub struct OccupancyNotifier {
    state: Mutex<State>,
    changed: Notify,
    reported: metrics::Gauge,
}

impl Default for OccupancyNotifier {
    fn default() -> Self {
        let reported = metrics::gauge!("fanfare_occupied_channels");
        Self { state: Mutex::default(), changed: Notify::new(), reported }
    }
}

/// Channels, each with its account as of the last change.
#[derive(Default)]
struct State {
    /// Channels whose connections have changed. Bounded by the attaches within about a second.
    changed: HashMap<ChannelKey, Arc<Account>>,
    /// Channels that were reported as occupied, by this node or by another one. Bounded by the attach limits of connections.
    reported: HashMap<ChannelKey, Arc<Account>>,
}

/// The event that follows from the counts of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OccupancyStep {
    Nothing,
    Notify {
        is_occupied: bool,
    },
    /// Occupied event sent by another node already.
    AlreadyReported,
    /// Vacated event left to another node.
    Forget,
    /// Evaluate again: another node is about to learn that the channel was reported.
    Recheck,
}

/// Evaluates the counts of this node and of its peers. No count of peers means that one of them has not answered.
fn step(here: AttachedCount, remote: Option<AttachedCount>) -> OccupancyStep {
    match (here.connections > 0, here.is_announced, remote) {
        (true, true, _) | (false, false, _) => OccupancyStep::Nothing,
        (true, false, Some(AttachedCount { is_announced: true, .. })) => OccupancyStep::AlreadyReported,
        (true, false, _) => OccupancyStep::Notify { is_occupied: true },
        (false, true, None) => OccupancyStep::Recheck,
        (false, true, Some(AttachedCount { connections: 0, .. })) => {
            OccupancyStep::Notify { is_occupied: false }
        }
        (false, true, Some(AttachedCount { is_announced: true, .. })) => OccupancyStep::Forget,
        (false, true, Some(_)) => OccupancyStep::Recheck,
    }
}

impl OccupancyNotifier {
    /// Notes that a connection has attached to or left the channel.
    pub(super) fn note(&self, principal: &Principal, channel: &ChannelName) {
        let account = &principal.account;
        let is_asked_for = account.integrations.iter().any(|integration| {
            let mut patterns = integration.channels.iter();
            integration.occupancy && patterns.any(|pattern| pattern_matches(pattern, channel.as_str()))
        });
        if is_asked_for {
            let key = principal.channel(channel.clone());
            self.state.lock().changed.insert(key, Arc::clone(account));
            self.changed.notify_one();
        }
    }

    /// Marks the channels that are known to be reported as occupied.
    pub(super) fn annotate_reported(&self, keys: &[ChannelKey], counts: &mut [AttachedCount]) {
        let state = self.state.lock();
        if !state.reported.is_empty() {
            keys.iter()
                .zip(counts)
                .for_each(|(key, count)| count.is_announced = state.reported.contains_key(key));
        }
    }

    /// Sends events for as long as shards run.
    pub(super) async fn run(self: Arc<Self>, shards: Arc<Shards>, publisher: Publisher) {
        let mut verify = Instant::now() + VERIFY_EVERY;
        loop {
            // Either a change or the periodic verification.
            timeout_at(verify, self.changed.notified()).await.ok();
            tokio::time::sleep(COALESCING_TIME).await;
            if Instant::now() >= verify {
                verify = Instant::now() + VERIFY_EVERY;
                self.requeue_all();
            }
            let changed: Vec<_> = std::mem::take(&mut self.state.lock().changed).into_iter().collect();
            for channels in changed.chunks(CHANNELS_MAX) {
                let keys: Arc<[ChannelKey]> = channels.iter().map(|(key, _)| key.clone()).collect();
                let here = timeout(COUNT_WAIT, shards.attached(keys)).await;
                match here.ok().flatten() {
                    Some(here) => self.evaluate(channels, &here, &publisher).await,
                    None => self.requeue(channels.iter().cloned()),
                }
            }
        }
    }

    /// Sends vacated events for channels that only this node had connections of. Must be called when all connections have ended.
    pub async fn finish(&self, publisher: &Publisher) {
        let reported: Vec<_> = self.state.lock().reported.clone().into_iter().collect();
        for channels in reported.chunks(CHANNELS_MAX) {
            let here = vec![AttachedCount { is_announced: true, ..AttachedCount::default() }; channels.len()];
            self.evaluate(channels, &here, publisher).await;
        }
    }

    async fn evaluate(
        &self,
        channels: &[(ChannelKey, Arc<Account>)],
        here: &[AttachedCount],
        publisher: &Publisher,
    ) {
        let remote = match publisher.routing() {
            Some(routing) => {
                let keys: Vec<ChannelKey> = channels.iter().map(|(key, _)| key.clone()).collect();
                routing.attached(&keys).await
            }
            None => Some(vec![AttachedCount::default(); channels.len()]),
        };
        let steps = channels.iter().enumerate().map(async |(index, (key, account))| {
            let step = step(here[index], remote.as_ref().map(|counts| counts[index]));
            self.apply_step(step, key, account);
            let is_done = match step {
                OccupancyStep::Notify { is_occupied } => {
                    publisher.announce_occupancy(account, key, is_occupied).await
                }
                OccupancyStep::Recheck => false,
                OccupancyStep::Nothing | OccupancyStep::AlreadyReported | OccupancyStep::Forget => true,
            };
            if !is_done {
                self.revert_step(step, key, account);
            }
        });
        join_all(steps).await;
        self.reported.set(self.state.lock().reported.len() as f64);
    }

    /// Applies a step before its event is sent, so that peers that count meanwhile already see the new state.
    fn apply_step(&self, step: OccupancyStep, key: &ChannelKey, account: &Arc<Account>) {
        let reported = &mut self.state.lock().reported;
        match step {
            OccupancyStep::Notify { is_occupied: true } | OccupancyStep::AlreadyReported => {
                drop(reported.insert(key.clone(), Arc::clone(account)))
            }
            OccupancyStep::Notify { is_occupied: false } | OccupancyStep::Forget => {
                drop(reported.remove(key))
            }
            OccupancyStep::Nothing | OccupancyStep::Recheck => {}
        }
    }

    /// Reverts a step whose event could not be sent, and queues the channel again.
    fn revert_step(&self, step: OccupancyStep, key: &ChannelKey, account: &Arc<Account>) {
        match step {
            OccupancyStep::Notify { is_occupied: true } => drop(self.state.lock().reported.remove(key)),
            OccupancyStep::Notify { is_occupied: false } => {
                self.apply_step(OccupancyStep::AlreadyReported, key, account)
            }
            OccupancyStep::AlreadyReported
            | OccupancyStep::Forget
            | OccupancyStep::Nothing
            | OccupancyStep::Recheck => {}
        }
        self.requeue([(key.clone(), Arc::clone(account))]);
    }

    /// Queues channels again, unless a newer change is queued already.
    fn requeue(&self, channels: impl IntoIterator<Item = (ChannelKey, Arc<Account>)>) {
        let changed = &mut self.state.lock().changed;
        for (key, account) in channels {
            changed.entry(key).or_insert(account);
        }
        self.changed.notify_one();
    }

    fn requeue_all(&self) {
        let State { changed, reported } = &mut *self.state.lock();
        for (key, account) in reported {
            changed.entry(key.clone()).or_insert_with(|| Arc::clone(account));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(connections: u64, is_announced: bool) -> AttachedCount {
        AttachedCount { connections, is_announced, ..AttachedCount::default() }
    }

    #[test]
    fn first_and_last_connection_of_all_nodes_are_reported() {
        let notify = |is_occupied| OccupancyStep::Notify { is_occupied };
        for (here, remote, expected) in [
            (count(0, false), Some(count(0, false)), OccupancyStep::Nothing),
            (count(0, false), None, OccupancyStep::Nothing),
            (count(1, false), Some(count(0, false)), notify(true)),
            (count(1, false), Some(count(5, false)), notify(true)),
            (count(1, false), None, notify(true)),
            (count(1, false), Some(count(5, true)), OccupancyStep::AlreadyReported),
            // The last connection here has just gone, and the channel is not vacated.
            (count(1, false), Some(count(0, true)), OccupancyStep::AlreadyReported),
            (count(2, true), Some(count(0, false)), OccupancyStep::Nothing),
            (count(2, true), None, OccupancyStep::Nothing),
            (count(0, true), Some(count(0, false)), notify(false)),
            (count(0, true), Some(count(0, true)), notify(false)),
            (count(0, true), Some(count(1, true)), OccupancyStep::Forget),
            (count(0, true), Some(count(1, false)), OccupancyStep::Recheck),
            (count(0, true), None, OccupancyStep::Recheck),
        ] {
            assert_eq!(step(here, remote), expected, "{here:?} {remote:?}");
        }
    }
}
