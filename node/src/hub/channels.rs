//! The node's channels: numbering and interest under one small lock each.

use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use dashmap::DashMap;
use fanfare_proto::serial::Serial;
use parking_lot::Mutex;
use tokio::time::Instant;

use super::batch_interval::PeerBatchInterval;
use super::channel_position::ChannelPosition;
use super::contiguous::ContiguousSequences;
use super::delivery::MessageDelivery;
use super::incarnation_set::IncarnationSet;
use super::interest::{BarrierState, InterestAnnouncer};
use super::member_bytes::MemberBytes;
use super::members::ChannelMembers;
use super::presence::PresenceDelivery;
use super::replay_budget::ReplayBudget;
use super::replay_buffer::ReplayBuffer;
use super::retired::RetiredPositions;
use super::roster::Roster;
use crate::model::{ChannelKey, Clock, ForwardedMessages, Limits, PublishedMessages, Stamp};

/// A consumer of a channel's frames: a shard of sockets. `deliver` must not block.
pub trait DeliveryTarget: Send + Sync {
    fn deliver(&self, delivery: Arc<MessageDelivery>);
    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>);
    /// Reports a continuity loss: a message is missing that precedes the deliveries of this channel after this position.
    fn lose_continuity(&self, channel: u64, position: &ChannelPosition);
    /// Whether the target's queue is over its bound.
    fn congested(&self) -> bool;
}

/// A channel with subscribers on this node now or lately, with members, or with a publish in progress.
pub struct Channel {
    pub(super) number: u64,
    key: ChannelKey,
    pub(super) state: Mutex<State>,
}

pub(super) struct State {
    /// Position of the channel: the last sequence given in this incarnation, and the last received of other incarnations.
    pub(super) position: ChannelPosition,
    /// Bit set of the targets that have subscribers.
    pub(super) targets: u64,
    /// The number of the last attach, over all channels from 1.
    pub(super) attach_number: u64,
    /// Replay buffer: from the first message while a client is attached, or from the last detach, until the channel had no subscriber for
    /// twice the resume window; earlier if memory is scarce.
    pub(super) replay_buffer: Option<Box<ReplayBuffer>>,
    /// Members of the channel; none while nobody is present. A channel with members stays alive.
    pub(super) members: Option<Box<ChannelMembers>>,
    /// Retired incarnations, which have been removed from the position.
    pub(super) retired: RetiredPositions,
    /// Incarnations that lost a message and have not announced their last sequence since.
    pub(super) in_doubt: IncarnationSet,
    /// Incarnations that announced their sequence, with the sequence up to which nothing of theirs is missing.
    pub(super) contiguous: ContiguousSequences,
    /// Progress of the attach barrier: whether the peers forward the channel.
    pub(super) attach_barrier: BarrierState,
    /// Set when the channel was removed from the map; a holder of the `Arc` must look the key up again.
    pub(super) removed: bool,
}

impl State {
    /// Whether a client is attached, or was lately.
    pub(super) fn is_active(&self) -> bool {
        self.targets != 0 || self.replay_buffer.is_some()
    }

    /// Reserves a sequence without a message, so that no earlier position counts as up to date.
    pub(super) fn invalidate_positions(&mut self) {
        self.position.own.sequence += 1;
        self.position.offset += 1;
        if let Some(replay_buffer) = &mut self.replay_buffer {
            replay_buffer.restart(&self.position);
        }
    }

    fn is_unused(&self) -> bool {
        // A client in the attach barrier is not attached yet.
        let is_awaited = matches!(self.attach_barrier, BarrierState::Waiting(_));
        self.targets == 0 && self.replay_buffer.is_none() && self.members.is_none() && !is_awaited
    }
}

impl Channel {
    pub fn number(&self) -> u64 {
        self.number
    }

    pub fn key(&self) -> &ChannelKey {
        &self.key
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Channel").field("number", &self.number).finish_non_exhaustive()
    }
}

/// The incarnation, sequence and time that a publish gets under the channel's lock.
#[derive(Debug, Clone, Copy)]
pub struct Numbering {
    pub incarnation: u64,
    pub first_sequence: u64,
    pub timestamp_ms: u64,
}

/// Distance of a channel's first offset above its sequence in a cluster: leaves room below for the messages of a handoff.
pub(super) const OFFSETS_BEFORE: u64 = 1 << 32;

/// All channels of this node, for all accounts.
///
/// A channel without members and recent subscribers is forgotten after the publish. Its next life continues above the highest sequence ever
/// given, so that a sequence is never used twice in one incarnation; while a channel lives, its sequences rise by one.
pub struct Hub {
    pub(super) channels: DashMap<ChannelKey, Arc<Channel>>,
    pub(super) targets: Vec<Arc<dyn DeliveryTarget>>,
    pub(super) replay_budget: Arc<ReplayBudget>,
    started: Instant,
    batch_interval: PeerBatchInterval,
    pub(super) incarnation: u64,
    next_number: AtomicU64,
    attaches: AtomicU64,
    sequence_base: AtomicU64,
    /// Set when a sequence without a message was reserved and the peers have not been told.
    pub(super) has_unannounced_gap: AtomicBool,
    /// The last number given to a presence event, over all channels.
    pub(super) presence_sequence: AtomicU64,
    pub(super) roster: Roster,
    pub(super) member_bytes: MemberBytes,
    pub(super) clock: Clock,
    pub(super) interest: OnceLock<Arc<dyn InterestAnnouncer>>,
}

impl Hub {
    /// Creates the hub of at most 64 targets.
    pub fn new(targets: Vec<Arc<dyn DeliveryTarget>>, clock: Clock, limits: &Limits) -> Self {
        assert!(targets.len() <= 64, "a channel keeps its targets in one word");
        let incarnation =
            u64::from_be_bytes(crate::model::random_bytes()) >> (u64::BITS - Serial::INCARNATION_BITS);
        Self {
            channels: DashMap::new(),
            targets,
            replay_budget: ReplayBudget::new(limits),
            started: Instant::now(),
            batch_interval: PeerBatchInterval::new(),
            incarnation,
            next_number: AtomicU64::new(0),
            attaches: AtomicU64::new(0),
            sequence_base: AtomicU64::new(0),
            has_unannounced_gap: AtomicBool::new(false),
            presence_sequence: AtomicU64::new(0),
            roster: Roster::new(incarnation),
            member_bytes: MemberBytes::default(),
            clock,
            interest: OnceLock::new(),
        }
    }

    #[cfg(test)]
    pub(crate) fn with_incarnation(self, incarnation: u64) -> Self {
        Self { incarnation, roster: Roster::new(incarnation), ..self }
    }

    /// The number of live channels: with subscribers now or lately, with members, or in the middle of a publish.
    pub fn channel_count(&self) -> usize {
        self.channels.len()
    }

    /// Whether some target's queue is over its bound: readers then wait before they read more.
    pub fn congested(&self) -> bool {
        self.targets.iter().any(|target| target.congested())
    }

    /// Numbers `count` messages and delivers the result of `build` to every target with subscribers.
    ///
    /// `build` runs under the channel's lock, so everything that it queues is in the order of the sequences.
    pub fn publish(
        &self,
        key: &ChannelKey,
        count: u64,
        build: impl FnOnce(Numbering) -> Arc<PublishedMessages>,
    ) -> Arc<PublishedMessages> {
        let published = self.with_channel(key, |channel, state| {
            self.ensure_replay_buffer(state);
            let first_sequence = state.position.own.sequence + 1;
            state.position.own.sequence += count;
            state.position.offset += count;
            let timestamp_ms = self.clock.stamp_ms(key);
            let published = build(Numbering { incarnation: self.incarnation, first_sequence, timestamp_ms });
            if state.is_active() {
                let delivery =
                    MessageDelivery::own(channel.number, state.position.clone(), Arc::clone(&published));
                self.deliver(channel, state, delivery);
            }
            published
        });
        self.enforce_budget();
        published
    }

    /// Records the arrival of a peer's batch of `bytes`, before its delivery.
    pub fn record_peer_batch(&self, bytes: usize) {
        self.batch_interval.record(bytes, Instant::now());
    }

    /// The mean time between the recent batches of all peers.
    pub fn peer_batch_interval(&self) -> Duration {
        self.batch_interval.mean()
    }

    /// Delivers messages that entered at another node to every target with subscribers. Messages received before are skipped.
    pub fn deliver_forwarded(&self, forwarded: ForwardedMessages) {
        // No subscriber here. The peer announces its last sequence when the channel gets one.
        let Some(channel) = self.live(&forwarded.key) else { return };
        let mut state = channel.state.lock();
        // Messages that arrive before the incarnation has announced its sequence count as missed, so that the received ones have no gap.
        let is_contiguous = matches!(state.attach_barrier, BarrierState::NotStarted)
            || state.contiguous.contains(forwarded.incarnation);
        if state.removed || !is_contiguous || state.position.includes(forwarded.last()) {
            return;
        }
        self.deliver_new(&channel, &mut state, forwarded);
        drop(state);
        self.enforce_budget();
    }

    /// Delivers the messages that are new here: the beginning of a publish may already have come by a store backfill.
    pub(super) fn deliver_new(
        &self,
        channel: &Arc<Channel>,
        state: &mut State,
        mut forwarded: ForwardedMessages,
    ) {
        self.ensure_replay_buffer(state);
        let received =
            state.position.others.as_ref().and_then(|others| others.sequence_of(forwarded.incarnation));
        forwarded.cut(received.unwrap_or(0));
        state.position.receive(forwarded.last(), forwarded.messages.len() as u64);
        if state.is_active() {
            let delivery = MessageDelivery::forwarded(channel.number, state.position.clone(), forwarded);
            self.deliver(channel, state, delivery);
        }
    }

    /// Opens the replay buffer, with the first message after a client has attached.
    pub(super) fn ensure_replay_buffer(&self, state: &mut State) {
        if state.targets != 0 && state.replay_buffer.is_none() {
            state.replay_buffer = ReplayBuffer::open(state.position.clone(), &self.replay_budget);
        }
    }

    fn deliver(&self, channel: &Arc<Channel>, state: &mut State, delivery: MessageDelivery) {
        let delivery = Arc::new(delivery);
        if let Some(replay_buffer) = &mut state.replay_buffer {
            replay_buffer.push(Arc::clone(&delivery), self.now_ms());
            if replay_buffer.is_listed(0) {
                replay_buffer.list(channel, state.attach_number);
            }
        }
        for (bit, target) in self.targets.iter().enumerate() {
            if state.targets & (1 << bit) != 0 {
                target.deliver(Arc::clone(&delivery));
            }
        }
    }

    /// The current position of the channel, for an attach without delivery.
    pub fn position(&self, key: &ChannelKey) -> ChannelPosition {
        self.live(key).map_or_else(|| self.unknown_position(), |channel| channel.position())
    }

    /// The position of a channel that the node does not know any more.
    fn unknown_position(&self) -> ChannelPosition {
        let sequence = self.sequence_base.load(Ordering::SeqCst);
        ChannelPosition::own(Stamp { incarnation: self.incarnation, sequence })
    }

    /// Removes the interest of a target whose last subscriber of the channel has left.
    pub fn detach(&self, channel: &Arc<Channel>, target: usize) {
        let mut state = channel.state.lock();
        state.targets &= !(1 << target);
        if state.targets == 0 {
            let now_ms = self.now_ms();
            if state.replay_buffer.is_none() {
                state.replay_buffer = ReplayBuffer::open(state.position.clone(), &self.replay_budget);
            }
            if let Some(replay_buffer) = &mut state.replay_buffer {
                replay_buffer.idle_ms = Some(now_ms);
            }
        }
        self.remove_if_unused(channel, &mut state);
        drop(state);
        self.enforce_budget();
    }

    /// Time for which missed messages are kept and positions can be resumed.
    pub fn retention(&self) -> Duration {
        Duration::from_millis(self.replay_budget.keep_ms)
    }

    /// Counts one more attach and returns its number.
    pub(super) fn next_attach(&self) -> u64 {
        self.attaches.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Milliseconds of a monotonic clock, which starts above the retention, so that no message counts as too old at the start. Independent
    /// of changes of the system clock.
    pub(super) fn now_ms(&self) -> u64 {
        let since_ms = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        since_ms.saturating_add(self.replay_budget.keep_ms).saturating_add(1)
    }

    pub(super) fn with_channel<R>(
        &self,
        key: &ChannelKey,
        act: impl FnOnce(&Arc<Channel>, &mut State) -> R,
    ) -> R {
        loop {
            let channel = self.lookup(key);
            let mut state = channel.state.lock();
            if state.removed {
                continue;
            }
            let result = act(&channel, &mut state);
            self.remove_if_unused(&channel, &mut state);
            return result;
        }
    }

    /// The live channels, to be locked one by one: forgetting a channel takes the channel's lock before that of the map.
    pub(super) fn all(&self) -> Vec<Arc<Channel>> {
        self.channels.iter().map(|entry| Arc::clone(&entry)).collect()
    }

    /// The channel, if it is live.
    pub fn live(&self, key: &ChannelKey) -> Option<Arc<Channel>> {
        self.channels.get(key).map(|channel| Arc::clone(&channel))
    }

    /// The position of a new channel.
    fn initial_position(&self) -> ChannelPosition {
        let position = self.unknown_position();
        let before = if self.is_clustered() { OFFSETS_BEFORE } else { 0 };
        ChannelPosition { offset: position.offset + before, ..position }
    }

    fn lookup(&self, key: &ChannelKey) -> Arc<Channel> {
        if let Some(channel) = self.channels.get(key) {
            return Arc::clone(&channel);
        }
        Arc::clone(&self.channels.entry(key.clone()).or_insert_with(|| {
            Arc::new(Channel {
                number: self.next_number.fetch_add(1, Ordering::Relaxed),
                key: key.clone(),
                state: Mutex::new(State {
                    position: self.initial_position(),
                    targets: 0,
                    attach_number: 0,
                    replay_buffer: None,
                    members: None,
                    retired: RetiredPositions::default(),
                    in_doubt: IncarnationSet::default(),
                    contiguous: ContiguousSequences::default(),
                    attach_barrier: BarrierState::default(),
                    removed: false,
                }),
            })
        }))
    }

    pub(super) fn remove_if_unused(&self, channel: &Arc<Channel>, state: &mut State) {
        if state.is_unused() && !state.removed {
            state.removed = true;
            if let (BarrierState::Passed, Some(interest)) = (&state.attach_barrier, self.interest.get()) {
                interest.withdraw(&channel.key, channel.number);
                // A position of now must not be accepted in the channel's next life, since this node does not receive the channel from here
                // on.
                state.position.own.sequence += 1;
            }
            self.sequence_base.fetch_max(state.position.own.sequence, Ordering::SeqCst);
            self.channels.remove(&channel.key);
        }
    }
}

impl fmt::Debug for Hub {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Hub").field("channels", &self.channels.len()).finish_non_exhaustive()
    }
}
