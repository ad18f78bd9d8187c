//! Store backfill: reads messages that a down incarnation stored and this node has not received, from the store that all nodes share.
//!
//! Every message that an incarnation acknowledged on a channel with history is in the store. So after its failure, subscribers receive
//! the missing messages instead of a continuity loss. Resuming clients are served from the store once no write to it is pending.

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::serial::Serial;
use futures_util::StreamExt as _;
use futures_util::stream;
use tokio::time::Instant;

use super::super::inbound::{self, PeerAnswer, PeerRequest};
use super::{LocalNode, NodeFuture, Routing};
use crate::hub::Channel;
use crate::model::{ChannelKey, Stamp};
use crate::tasks::OnStop;

/// Time after which a pending write of a node is in the store, or is not acknowledged.
const SETTLE_WAIT: Duration = Duration::from_secs(3);
/// Time within which membership holds a failed node for down.
const UNREACHABLE_LATELY: Duration = Duration::from_secs(5);
const CONNECTED_CHECK_INTERVAL: Duration = Duration::from_millis(25);
/// Channels that are read at a time after a failure.
const READS_MAX: usize = 16;
/// Most channels that are read after a failure. In further ones, subscribers are told of a continuity loss.
const CHANNELS_MAX: usize = 10_000;

/// Query for the messages that an incarnation has stored of a channel after `sequence`, up to which none is missing.
#[derive(Debug, Clone)]
pub struct StoreBackfillQuery {
    pub key: ChannelKey,
    pub incarnation: u64,
    pub sequence: u64,
    /// Age limit: no message after `sequence` was numbered longer ago.
    pub since: Duration,
}

/// Effect of a failure on channels whose stored messages cannot be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LossEffect {
    /// Attached clients are told of a continuity loss.
    NotifyAttached,
    /// Attached clients are told, and no client can resume from an earlier position.
    InvalidatePositions,
}

impl Routing {
    pub(super) fn store(&self) -> Option<&Arc<dyn LocalNode>> {
        self.local.get().filter(|local| local.is_store_shared())
    }

    /// Incarnations that are alive or reachable, with that of this node. All of them are reachable while the node is fully connected.
    pub fn alive_incarnations(&self) -> Vec<u64> {
        let mut living = self.peers_alive();
        living.push(self.hub.incarnation());
        living
    }

    /// Peers that are alive or reachable. A reachable peer that gossip does not see may be taking publishes.
    pub(super) fn peers_alive(&self) -> Vec<u64> {
        let mut alive = self.expected.lock().clone();
        alive.extend(self.linked());
        alive.sort_unstable();
        alive.dedup();
        alive
    }

    /// True if every alive node is reachable; an unreachable one may just have failed.
    fn is_fully_connected(&self) -> bool {
        let expected = self.expected.lock().clone();
        expected.iter().all(|peer| self.is_up(*peer))
    }

    /// True if an alive node has become unreachable so recently that it may be about to be held for down. Called several times a second.
    pub fn has_recently_unreachable(&self) -> bool {
        let mut out_of_reach = self.expected.lock().clone();
        // The link to a failed node and its streams are not seen to end at the same moment.
        out_of_reach.retain(|peer| !self.is_up(*peer) || self.node_failures.lock().has_ended(*peer));
        let mut unreachable_since = self.unreachable_since.lock();
        unreachable_since.retain(|peer, _| out_of_reach.contains(peer));
        for peer in out_of_reach {
            unreachable_since.entry(peer).or_insert_with(Instant::now);
        }
        unreachable_since.values().any(|since| since.elapsed() < UNREACHABLE_LATELY)
    }

    /// Resolves when [`Routing::has_recently_unreachable`] is false. By then no failed node counts as alive, 1.5 s after its last sign of
    /// life.
    pub async fn until_failures_known(&self) {
        loop {
            let mut changed = std::pin::pin!(self.reach_changed.notified());
            // A change from here on is not missed.
            changed.as_mut().enable();
            if !self.has_recently_unreachable() {
                return;
            }
            // The state also ends by time alone, which need not be noticed at once.
            tokio::time::timeout(UNREACHABLE_LATELY / 10, changed).await.ok();
        }
    }

    /// Incarnations that have confirmed that they forward the channel to this node.
    pub fn confirmed_incarnations(&self, channel: &Channel) -> Vec<u64> {
        self.local_interest.lock().get(&channel.number()).map_or_else(Vec::new, |own| own.confirmed.clone())
    }

    /// Resolves when all that live nodes had numbered in the channel is here or in the store, or was refused. False if a node does not
    /// confirm.
    pub async fn settle(&self, key: &ChannelKey) -> bool {
        // By then the peers know of the same failures, and report the last sequences that they have of failed incarnations.
        self.all_settled().await && self.settled(key).await
    }

    /// Asks all nodes to settle. Callers that come during a request share the next one.
    async fn all_settled(&self) -> bool {
        let (answered, is_first) = self.settling.ask();
        if is_first && let Some(routing) = self.this.upgrade() {
            self.tasks.spawn("settling", OnStop::Cancel, async move {
                routing.settling.run(|| routing.ask_all_to_settle()).await;
            });
        }
        answered.await.unwrap_or(false)
    }

    async fn ask_all_to_settle(&self) -> bool {
        let Some(local) = self.store() else { return false };
        let peers = self.peers_alive();
        let stored = async {
            let mut answers = self.ask(peers.clone(), 0, &PeerRequest::Settle);
            let mut settled = 0;
            while let Some(answer) = answers.next().await {
                settled += usize::from(answer == PeerAnswer::Done);
            }
            settled == peers.len()
        };
        let both = async { tokio::join!(local.settled(), stored) };
        matches!(tokio::time::timeout(SETTLE_WAIT, both).await, Ok((Some(()), true)))
    }

    /// Answers once the pending writes of this node are in the store and it knows of every failure that the asking node knows of.
    pub(super) fn settled_for_peer(self: Arc<Self>, local: &dyn LocalNode) -> NodeFuture<Option<PeerAnswer>> {
        let settled = local.settled();
        Box::pin(async move {
            while !self.is_fully_connected() {
                tokio::time::sleep(CONNECTED_CHECK_INTERVAL).await;
            }
            settled.await.map(|()| PeerAnswer::Done)
        })
    }

    /// Delivers messages that down incarnations have stored of the channel and this node should have received. Returns the incarnations
    /// that were read; None if the store cannot tell for one of them.
    pub async fn complete_from_store(&self, key: &ChannelKey, position: &Serial) -> Option<Vec<u64>> {
        let channel = self.hub.live(key)?;
        let (living, mut read) = (self.alive_incarnations(), Vec::new());
        for incarnation in self
            .confirmed_incarnations(&channel)
            .into_iter()
            .filter(|incarnation| !living.contains(incarnation))
        {
            let is_ahead = position
                .sequence_of(incarnation)
                .is_some_and(|sequence| sequence > channel.received_sequence(incarnation));
            // An incarnation that may take publishes must be read each time.
            let is_known = !self.may_be_publishing(incarnation)
                && self.node_failures.lock().is_complete(incarnation, channel.number());
            let since = self.node_failures.lock().troubled_for(incarnation);
            if is_ahead || !is_known {
                if !self.complete_one(&channel, incarnation, since).await {
                    return None;
                }
                read.push(incarnation);
            }
        }
        // Messages that peers received and that are not stored were not acknowledged.
        let retired = self.local_interest.lock().get(&channel.number()).map(|own| own.retired.clone());
        let retired = retired.unwrap_or_default();
        let of_down = Stamp::all_of(&retired).filter(|stamp| !living.contains(&stamp.incarnation));
        channel.learn_sequences(&of_down.collect::<Vec<_>>());
        Some(read)
    }

    async fn complete_one(&self, channel: &Arc<Channel>, incarnation: u64, since: Duration) -> bool {
        let may_go_on = || self.may_be_publishing(incarnation);
        let is_complete = self.deliver_stored(channel, incarnation, since, may_go_on).await;
        if is_complete {
            self.node_failures.lock().completed(incarnation, channel.number());
        }
        is_complete
    }

    /// Delivers messages that the incarnation has stored after the last one that was received here. False if the store cannot tell.
    pub(super) async fn deliver_stored(
        &self,
        channel: &Arc<Channel>,
        incarnation: u64,
        since: Duration,
        may_go_on: impl FnOnce() -> bool,
    ) -> bool {
        let Some(local) = self.store() else { return false };
        let sequence = channel.received_sequence(incarnation);
        let behind = StoreBackfillQuery { key: channel.key().clone(), incarnation, sequence, since };
        let Some(stored) = local.stored(behind).await else { return false };
        self.hub.apply_store_backfill(
            channel,
            incarnation,
            inbound::stored(channel.key(), stored),
            may_go_on(),
        );
        true
    }

    /// True if the incarnation is in doubt or unreachable, and may be taking publishes.
    fn may_be_publishing(&self, incarnation: u64) -> bool {
        self.node_failures.lock().may_be_publishing(incarnation)
            || self.unreachable.lock().unreachable().any(|unreachable| unreachable == incarnation)
    }

    /// True if messages of the incarnation may still come: it may be taking publishes, or it has an open stream to this node.
    pub fn may_still_deliver(&self, incarnation: u64) -> bool {
        self.may_be_publishing(incarnation) || self.node_failures.lock().has_open_streams(incarnation)
    }

    /// Marks the incarnation in doubt in these channels: no client is resumed there until it is known whether messages are missing.
    fn mark_in_doubt_until_read(&self, incarnation: u64, numbers: &HashSet<u64>) {
        let own = self.local_interest.lock();
        let key_of = |number: &u64| Some((*number, own.get(number)?.key.clone()));
        let keys: Vec<_> = numbers.iter().filter_map(key_of).collect();
        drop(own);
        for (number, key) in keys {
            self.hub.mark_in_doubt_in(&key, number, incarnation, || true);
        }
    }

    /// Returns those of these channels in which a down incarnation may have stored messages that are not here. It has confirmed none of
    /// them, mostly since the link of a failed process and its streams do not end at the same moment, and then nothing is missing.
    async fn incomplete_channels(
        &self,
        incarnation: u64,
        since: Duration,
        mut numbers: HashSet<u64>,
    ) -> HashSet<u64> {
        let Some(local) = self.store() else { return numbers };
        let queried: Vec<_> = {
            let own = self.local_interest.lock();
            let of = |number: &u64| own.get(number).map(|own| (*number, own.key.clone(), own.let_in));
            numbers.iter().filter_map(of).take(CHANNELS_MAX).collect()
        };
        let complete = stream::iter(queried)
            .map(async |(number, key, let_in)| {
                let channel = self.hub.live(&key).filter(|channel| channel.number() == number)?;
                // The position of a resuming client may be that old.
                let let_in = let_in.map_or(Duration::ZERO, |let_in| let_in.elapsed());
                let since = since.max(let_in + self.hub.retention());
                let sequence = channel.received_sequence(incarnation);
                let stored = local.stored(StoreBackfillQuery { key, incarnation, sequence, since }).await?;
                if stored.is_empty() {
                    let may_go_on = self.may_be_publishing(incarnation);
                    self.hub.apply_store_backfill(&channel, incarnation, Vec::new(), may_go_on);
                }
                stored.is_empty().then_some(number)
            })
            .buffer_unordered(READS_MAX)
            .filter_map(std::future::ready)
            .collect::<HashSet<u64>>()
            .await;
        numbers.retain(|number| !complete.contains(number));
        numbers
    }

    /// Recovers from the failure of an incarnation: delivers its stored messages. In channels that cannot be read, or that the
    /// incarnation never confirmed, clients are told of a continuity loss. If it `is_in_doubt`, also reads channels in which nothing of
    /// it was received. False without a shared store.
    pub(super) fn recover(
        &self,
        (incarnation, since): (u64, Duration),
        unconfirmed: HashSet<u64>,
        is_in_doubt: bool,
        leaves: LossEffect,
    ) -> bool {
        let Some(routing) = self.store().and_then(|_| self.this.upgrade()) else { return false };
        if !is_in_doubt {
            self.mark_in_doubt_until_read(incarnation, &unconfirmed);
        }
        self.tasks.spawn("recovery", OnStop::Cancel, async move {
            let mut channels = routing.hub.channels_received_from(incarnation);
            if is_in_doubt {
                channels.extend(routing.hub.channels_silent_from(incarnation));
            }
            channels.retain(|channel| !unconfirmed.contains(&channel.number()));
            // In unconfirmed channels it is not known from where on messages are missing.
            let mut lacking = unconfirmed;
            if !is_in_doubt {
                lacking = routing.incomplete_channels(incarnation, since, lacking).await;
            }
            routing.hub.abandon_incarnation_in(incarnation, &lacking);
            routing.restore_in_doubt(incarnation);
            let mut lost = HashSet::new();
            lost.extend(channels.iter().skip(CHANNELS_MAX).map(|channel| channel.number()));
            channels.truncate(CHANNELS_MAX);
            let count = channels.len();
            let failed = stream::iter(channels)
                .map(async |channel| {
                    let is_complete = routing.complete_one(&channel, incarnation, since).await;
                    (!is_complete).then(|| channel.number())
                })
                .buffer_unordered(READS_MAX)
                .filter_map(std::future::ready)
                .collect::<Vec<u64>>()
                .await;
            lost.extend(failed);
            tracing::info!(channels = count, lost = lost.len(), "store backfill finished");
            match leaves {
                LossEffect::NotifyAttached => routing.hub.report_node_failure_in(&lost),
                LossEffect::InvalidatePositions => routing.hub.abandon_incarnation_in(incarnation, &lost),
            }
        });
        true
    }
}
