//! When channels become occupied and vacated, for integrations that ask for it.
//!
//! The nodes agree on it by what they answer each other when they count a channel: a node that has told an integration that the channel
//! is occupied says so. A node whose first connection comes then knows that it was told, and the node whose last one goes leaves it to
//! the others.

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

/// Connections that come and go within this time is looked at together, so that a client that comes back at once is not told of.
const GATHER: Duration = Duration::from_secs(1);
/// How often all that was told is held against what is.
const VERIFY_EVERY: Duration = Duration::from_secs(60);
/// Beyond what other nodes are waited for.
const COUNT_WAIT: Duration = Duration::from_secs(3);
/// Channels that are asked for at once.
const CHANNELS_MAX: usize = 256;

/// The channels of a node that integrations are told of.
pub struct Occupations {
    state: Mutex<State>,
    noted: Notify,
    told: metrics::Gauge,
}

impl Default for Occupations {
    fn default() -> Self {
        let told = metrics::gauge!("fanfare_occupied_channels");
        Self { state: Mutex::default(), noted: Notify::new(), told }
    }
}

/// Each channel with the account as it was when it was noted last.
#[derive(Default)]
struct State {
    /// Connections have come or gone there. Bounded by what connections may attach within a second or so.
    noted: HashMap<ChannelKey, Arc<Account>>,
    /// Integrations were told that they are occupied, by this node or by another one. Bounded by what connections may attach.
    told: HashMap<ChannelKey, Arc<Account>>,
}

/// The event that follows from the counts of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Step {
    Nothing,
    Tell {
        is_occupied: bool,
    },
    /// Another node has told it.
    IsTold,
    /// Another node tells the end of it.
    LeaveToOthers,
    /// Another node is about to say that it knows.
    LookAgain,
}

/// `elsewhere`: none where another node has not answered.
fn step(here: AttachedCount, elsewhere: Option<AttachedCount>) -> Step {
    match (here.connections > 0, here.is_told, elsewhere) {
        (true, true, _) | (false, false, _) => Step::Nothing,
        (true, false, Some(AttachedCount { is_told: true, .. })) => Step::IsTold,
        (true, false, _) => Step::Tell { is_occupied: true },
        (false, true, None) => Step::LookAgain,
        (false, true, Some(AttachedCount { connections: 0, .. })) => Step::Tell { is_occupied: false },
        (false, true, Some(AttachedCount { is_told: true, .. })) => Step::LeaveToOthers,
        (false, true, Some(_)) => Step::LookAgain,
    }
}

impl Occupations {
    /// A connection has attached to the channel, or is attached no more.
    pub(super) fn note(&self, principal: &Principal, channel: &ChannelName) {
        let account = &principal.account;
        let is_asked_for = account.integrations.iter().any(|integration| {
            let mut patterns = integration.channels.iter();
            integration.occupancy && patterns.any(|pattern| pattern_matches(pattern, channel.as_str()))
        });
        if is_asked_for {
            let key = principal.channel(channel.clone());
            self.state.lock().noted.insert(key, Arc::clone(account));
            self.noted.notify_one();
        }
    }

    /// Says of each channel whether it is known to have been told.
    pub(super) fn mark(&self, keys: &[ChannelKey], counts: &mut [AttachedCount]) {
        let state = self.state.lock();
        if !state.told.is_empty() {
            keys.iter().zip(counts).for_each(|(key, count)| count.is_told = state.told.contains_key(key));
        }
    }

    /// Tells integrations, for as long as shards run.
    pub(super) async fn run(self: Arc<Self>, shards: Arc<Shards>, publisher: Publisher) {
        let mut verify = Instant::now() + VERIFY_EVERY;
        loop {
            // Either is a reason to look.
            timeout_at(verify, self.noted.notified()).await.ok();
            tokio::time::sleep(GATHER).await;
            if Instant::now() >= verify {
                verify = Instant::now() + VERIFY_EVERY;
                self.note_all_told();
            }
            let noted: Vec<_> = std::mem::take(&mut self.state.lock().noted).into_iter().collect();
            for channels in noted.chunks(CHANNELS_MAX) {
                let keys: Arc<[ChannelKey]> = channels.iter().map(|(key, _)| key.clone()).collect();
                let here = timeout(COUNT_WAIT, shards.attached(keys)).await;
                match here.ok().flatten() {
                    Some(here) => self.look(channels, &here, &publisher).await,
                    None => self.look_again(channels.iter().cloned()),
                }
            }
        }
    }

    /// Tells that the channels are vacated that this node alone had connections of. To be called when all connections have ended.
    pub async fn finish(&self, publisher: &Publisher) {
        let told: Vec<_> = self.state.lock().told.clone().into_iter().collect();
        for channels in told.chunks(CHANNELS_MAX) {
            let here = vec![AttachedCount { is_told: true, ..AttachedCount::default() }; channels.len()];
            self.look(channels, &here, publisher).await;
        }
    }

    async fn look(
        &self,
        channels: &[(ChannelKey, Arc<Account>)],
        here: &[AttachedCount],
        publisher: &Publisher,
    ) {
        let elsewhere = match publisher.routing() {
            Some(routing) => {
                let keys: Vec<ChannelKey> = channels.iter().map(|(key, _)| key.clone()).collect();
                routing.attached(&keys).await
            }
            None => Some(vec![AttachedCount::default(); channels.len()]),
        };
        let told = channels.iter().enumerate().map(async |(place, (key, account))| {
            let step = step(here[place], elsewhere.as_ref().map(|counts| counts[place]));
            self.take(step, key, account);
            let is_done = match step {
                Step::Tell { is_occupied } => publisher.tell_occupied(account, key, is_occupied).await,
                Step::LookAgain => false,
                Step::Nothing | Step::IsTold | Step::LeaveToOthers => true,
            };
            if !is_done {
                self.take_back(step, key, account);
            }
        });
        join_all(told).await;
        self.told.set(self.state.lock().told.len() as f64);
    }

    /// Before it is told: what another node hears of it from now on is what holds when it is.
    fn take(&self, step: Step, key: &ChannelKey, account: &Arc<Account>) {
        let told = &mut self.state.lock().told;
        match step {
            Step::Tell { is_occupied: true } | Step::IsTold => {
                drop(told.insert(key.clone(), Arc::clone(account)))
            }
            Step::Tell { is_occupied: false } | Step::LeaveToOthers => drop(told.remove(key)),
            Step::Nothing | Step::LookAgain => {}
        }
    }

    /// It was not told, and is looked at again.
    fn take_back(&self, step: Step, key: &ChannelKey, account: &Arc<Account>) {
        match step {
            Step::Tell { is_occupied: true } => drop(self.state.lock().told.remove(key)),
            Step::Tell { is_occupied: false } => self.take(Step::IsTold, key, account),
            Step::IsTold | Step::LeaveToOthers | Step::Nothing | Step::LookAgain => {}
        }
        self.look_again([(key.clone(), Arc::clone(account))]);
    }

    /// A note since then is newer.
    fn look_again(&self, channels: impl IntoIterator<Item = (ChannelKey, Arc<Account>)>) {
        let noted = &mut self.state.lock().noted;
        for (key, account) in channels {
            noted.entry(key).or_insert(account);
        }
        self.noted.notify_one();
    }

    fn note_all_told(&self) {
        let State { noted, told } = &mut *self.state.lock();
        for (key, account) in told {
            noted.entry(key.clone()).or_insert_with(|| Arc::clone(account));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(connections: u64, is_told: bool) -> AttachedCount {
        AttachedCount { connections, is_told, ..AttachedCount::default() }
    }

    #[test]
    fn first_and_last_connection_of_all_nodes_are_told() {
        let tell = |is_occupied| Step::Tell { is_occupied };
        for (here, elsewhere, expected) in [
            (count(0, false), Some(count(0, false)), Step::Nothing),
            (count(0, false), None, Step::Nothing),
            (count(1, false), Some(count(0, false)), tell(true)),
            (count(1, false), Some(count(5, false)), tell(true)),
            (count(1, false), None, tell(true)),
            (count(1, false), Some(count(5, true)), Step::IsTold),
            // Its last connection has just gone, and the channel is not vacated.
            (count(1, false), Some(count(0, true)), Step::IsTold),
            (count(2, true), Some(count(0, false)), Step::Nothing),
            (count(2, true), None, Step::Nothing),
            (count(0, true), Some(count(0, false)), tell(false)),
            (count(0, true), Some(count(0, true)), tell(false)),
            (count(0, true), Some(count(1, true)), Step::LeaveToOthers),
            (count(0, true), Some(count(1, false)), Step::LookAgain),
            (count(0, true), None, Step::LookAgain),
        ] {
            assert_eq!(step(here, elsewhere), expected, "{here:?} {elsewhere:?}");
        }
    }
}
