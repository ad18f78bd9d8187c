//! Handoff: a draining node gives its replay buffers to a peer, for the clients that resume there.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::channel_position::ChannelPosition;
use super::channels::{Channel, Hub, State};
use super::delivery::MessageDelivery;
use super::interest::AttachWaiter;
use super::replay_buffer::{ClusterBackfillState, ReplayBuffer};
use crate::model::{ChannelKey, ForwardedMessages, Stamp};

/// The recent messages of a channel, in the order in which one node delivered them, without a gap.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplayHandoff<M> {
    /// Position of the channel before the messages.
    pub begin: Serial,
    /// Position of the channel after the messages.
    pub end: Serial,
    /// Messages with their age in milliseconds since delivery.
    pub messages: Vec<(M, u64)>,
}

impl<M> ReplayHandoff<M> {
    /// Clamps both positions to the last real messages, as far as this node knows the sequence gaps.
    fn clamped_to(self, state: &State) -> Self {
        let known = |position: &Serial| state.clamp_position(position).into_owned();
        Self { begin: known(&self.begin), end: known(&self.end), ..self }
    }
}

impl Hub {
    /// The channels that have subscribers, or had some lately.
    pub fn active_channels(&self) -> Vec<Arc<Channel>> {
        let mut channels = self.all();
        channels.retain(|channel| channel.state.lock().is_active());
        channels
    }

    /// The latest messages of a channel, about `bytes_max` of them. None while an incarnation is in doubt or the channel is inactive.
    pub fn make_handoff(
        &self,
        key: &ChannelKey,
        bytes_max: usize,
    ) -> Option<ReplayHandoff<Arc<MessageDelivery>>> {
        let channel = self.live(key)?;
        let state = channel.state.lock();
        if !state.in_doubt.is_empty() || !state.is_active() {
            return None;
        }
        let here = state.position.serial();
        let end = state.contiguous.join_into(here.clone());
        let latest =
            state.replay_buffer.as_ref().map(|replay_buffer| replay_buffer.latest(bytes_max, self.now_ms()));
        let (begin, messages) = latest.unwrap_or_else(|| (here, Vec::new()));
        Some(ReplayHandoff { begin, end, messages })
    }

    /// Keeps a channel as if a client had been attached until now. Returns the channel if all peers forward it already; otherwise the
    /// result of `waiter` runs once they do. None also when there is no memory for another replay buffer.
    pub fn retain_channel(
        &self,
        key: &ChannelKey,
        waiter: impl FnOnce() -> AttachWaiter,
    ) -> Option<Arc<Channel>> {
        self.with_channel(key, |channel, state| {
            let now_ms = self.now_ms();
            if state.replay_buffer.is_none() {
                state.replay_buffer = ReplayBuffer::open(state.position.clone(), &self.replay_budget);
                state.attach_number = self.next_attach();
            }
            let is_attached = state.targets != 0;
            state.replay_buffer.as_mut()?.idle_ms = (!is_attached).then_some(now_ms);
            self.enter_barrier(channel, state, waiter)
        })
    }

    /// Puts the messages of a handoff before the channel's own ones. `has_left` says which incarnations send nothing more. False when the
    /// two do not meet, or when a message of the handoff has neither arrived here nor is on its way: no client can be resumed across that
    /// gap.
    pub fn accept_handoff(
        &self,
        channel: &Arc<Channel>,
        handed: ReplayHandoff<ForwardedMessages>,
        has_left: impl Fn(u64) -> bool,
    ) -> bool {
        let mut state = channel.state.lock();
        if !state.in_doubt.is_empty() || state.replay_buffer.is_none() {
            return false;
        }
        let is_lacking = |one: &ForwardedMessages| {
            let stamp = Stamp { incarnation: one.incarnation, sequence: one.last };
            // An incarnation that does not forward to this node has nothing on its way here.
            let comes = !has_left(one.incarnation) && state.contiguous.contains(one.incarnation);
            !comes && !state.accounts_for(stamp)
        };
        let is_lacking = handed.messages.iter().any(|(one, _)| is_lacking(one));
        let handed = handed.clamped_to(&state);
        for stamp in Stamp::all_of(&handed.end) {
            let Stamp { incarnation, .. } = stamp;
            if !has_left(incarnation) || state.position.includes(stamp) {
                continue;
            }
            let before =
                handed.begin.sequence_of(incarnation).map(|sequence| Stamp { incarnation, sequence });
            let before = before.filter(|stamp| !state.position.includes(*stamp));
            // Serials of clients from there include it, and a client that lacks what precedes it is not resumed.
            state.position.receive(stamp, 0);
            if let (Some(before), Some(replay_buffer)) = (before, &mut state.replay_buffer) {
                replay_buffer.require_received(&[before]);
            }
        }
        if is_lacking {
            self.break_continuity(channel, &mut state);
            return false;
        }
        let is_taken = self.prepend_handoff(channel, &mut state, handed, &Serial::default());
        drop(state);
        self.enforce_budget();
        is_taken
    }

    /// Marks the start of a cluster backfill; `Hub::end_cluster_backfill` ends it.
    pub fn begin_cluster_backfill(&self, channel: &Channel) {
        let mut state = channel.state.lock();
        self.ensure_replay_buffer(&mut state);
        if let Some(replay_buffer) = &mut state.replay_buffer {
            replay_buffer.cluster_backfill = ClusterBackfillState::Asking;
        }
    }

    /// Ends a cluster backfill. `is_here`: what the peers had now precedes the recent messages; ignored if the buffer restarted meanwhile.
    pub fn end_cluster_backfill(&self, channel: &Channel, is_here: bool) {
        if let Some(replay_buffer) = &mut channel.state.lock().replay_buffer
            && replay_buffer.cluster_backfill == ClusterBackfillState::Asking
        {
            replay_buffer.cluster_backfill =
                if is_here { ClusterBackfillState::Yes } else { ClusterBackfillState::No };
        }
    }

    /// Accepts the replay buffer of a peer that stays; to be called once all that the peer had at that time has arrived here. False when
    /// the peer did not have all that precedes its messages here, or when one side has messages that the other lacks. Incarnations that
    /// `have_gone` and of which nothing arrived here do not count: they are added to the positions.
    pub fn accept_peer_buffer(
        &self,
        channel: &Arc<Channel>,
        handed: ReplayHandoff<ForwardedMessages>,
        have_ended: impl Fn(u64) -> bool,
    ) -> bool {
        let mut state = channel.state.lock();
        self.ensure_replay_buffer(&mut state);
        let handed = handed.clamped_to(&state);
        let begins =
            state.replay_buffer.as_ref().map(|replay_buffer| replay_buffer.start_position().serial());
        let meets = begins.is_some_and(|begins| handed.end.includes(&begins));
        let mut unreceived = handed.end.clone();
        unreceived.retain(|incarnation| !state.knows_incarnation(incarnation) && have_ended(incarnation));
        let known = state.position.serial().join(&unreceived);
        let is_contiguous = state.in_doubt.is_empty() && known.includes(&handed.end);
        let is_taken =
            is_contiguous && meets && self.prepend_handoff(channel, &mut state, handed, &unreceived);
        drop(state);
        self.enforce_budget();
        is_taken
    }

    fn prepend_handoff(
        &self,
        channel: &Arc<Channel>,
        state: &mut State,
        handed: ReplayHandoff<ForwardedMessages>,
        unreceived: &Serial,
    ) -> bool {
        let now_ms = self.now_ms();
        let State { replay_buffer, attach_number: attached, position, .. } = state;
        let Some(replay_buffer) = replay_buffer else { return false };
        let mut from = replay_buffer.start_position().clone();
        // The peer has no older messages than this buffer, except those of unknown incarnations.
        let is_behind = handed.begin.includes(&from.serial());
        if is_behind && unreceived.is_empty() {
            return true;
        }
        let mut begin = handed.begin;
        if is_behind {
            begin.retain(|incarnation| unreceived.sequence_of(incarnation).is_some());
            begin = begin.join(&from.serial());
        }
        let unreceived: Vec<Stamp> = Stamp::all_of(unreceived).collect();
        unreceived.iter().for_each(|stamp| from.receive(*stamp, 0));
        let reached = from.serial();
        let mut earlier = handed.messages;
        earlier.retain(|(one, _)| reached.includes_one(one.incarnation, one.last));
        let count: u64 = earlier.iter().map(|(one, _)| one.messages.len() as u64).sum();
        let Some(offset) = from.offset.checked_sub(count).filter(|_| reached.includes(&begin)) else {
            return false;
        };
        if earlier.is_empty() && !unreceived.is_empty() {
            return true;
        }
        let mut before = HandoffPosition { own: from.own.incarnation, offset, received: begin };
        let begin = before.position();
        let mut deliveries = Vec::with_capacity(earlier.len());
        for (one, age_ms) in earlier {
            before.received.advance(one.incarnation, one.last);
            before.offset += one.messages.len() as u64;
            let delivery_position =
                if before.offset == from.offset { from.clone() } else { before.position() };
            let delivery = MessageDelivery::forwarded(channel.number(), delivery_position, one);
            deliveries.push((Arc::new(delivery), now_ms.saturating_sub(age_ms)));
        }
        replay_buffer.add_to_positions(&unreceived);
        replay_buffer.prepend(begin, deliveries, now_ms);
        unreceived.iter().for_each(|stamp| position.receive(*stamp, 0));
        // A sequence gap by design may lie between, so that offsets no longer follow from sequences.
        if position.own.sequence > 0 {
            position.others.get_or_insert_default();
        }
        if replay_buffer.is_listed(0) {
            replay_buffer.list(channel, *attached);
        }
        true
    }

    /// Whether the replay buffer has space for earlier messages.
    pub fn can_prepend(&self, key: &ChannelKey) -> bool {
        let has_space = |channel: Arc<Channel>| {
            channel
                .state
                .lock()
                .replay_buffer
                .as_ref()
                .is_none_or(|replay_buffer| replay_buffer.is_half_empty())
        };
        self.live(key).is_some_and(has_space)
    }
}

/// Position while the messages of a handoff are counted through.
struct HandoffPosition {
    own: u64,
    offset: u64,
    received: Serial,
}

impl HandoffPosition {
    fn position(&self) -> ChannelPosition {
        let sequence = self.received.sequence_of(self.own).unwrap_or(0);
        let own = Stamp { incarnation: self.own, sequence };
        ChannelPosition { offset: self.offset, own, others: Some(Arc::new(self.received.clone())) }
    }
}
