//! Attaching: the start of a client in a channel, and the replay of what it missed.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::channel_position::{ChannelPosition, LocalOffset};
use super::channels::{Channel, Hub, State};
use super::delivery::MessageDelivery;
use super::replay_buffer::{ClusterBackfillState, ReplayBuffer, ReplayStart};
use crate::model::{ChannelKey, ForwardedMessages};

/// A completed attach.
#[derive(Debug)]
pub struct AttachResult {
    pub channel: Arc<Channel>,
    /// Includes everything delivered before; everything after it is delivered live.
    pub position: ChannelPosition,
    pub start: ResumeStart,
    /// Age of the first message that [`ResumeStart::Replay`] gives, in milliseconds; else 0.
    pub missed_ms: u64,
}

/// Way of bringing a client from its position to the channel's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ResumeStart {
    /// The client is up to date.
    Live,
    /// [`Channel::pull`] gives the messages after this offset. Unless exact, the client already has some of them.
    Replay { after: LocalOffset, is_exact: bool },
    /// Messages between are not in the replay buffer, or the position names an incarnation unknown here.
    Unknown,
}

/// A [`ResumeStart::Replay`] with the age of the first message that it gives.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AgedReplayStart {
    pub after: LocalOffset,
    pub is_exact: bool,
    pub missed_ms: u64,
}

/// The part of a rewind that the replay buffer can give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RewindStart {
    /// Offset before the first message; the channel's end when there is none.
    pub after: LocalOffset,
    pub found: usize,
    /// The replay buffer has everything that was asked for.
    pub is_complete: bool,
    /// A cluster backfill has completed: no node has more.
    pub is_cluster_wide: bool,
}

/// A page of missed messages.
#[derive(Debug)]
pub struct ReplayPage {
    /// Deliveries in order, without a gap; the first may contain messages before the requested offset.
    pub deliveries: Vec<Arc<MessageDelivery>>,
    /// Last page: every later message is delivered live.
    pub is_end: bool,
}

/// Missed messages that a peer gives to a client that resumes from there, and the local replay after them.
#[derive(Debug)]
pub struct ChannelBackfill {
    /// Each with the serial of a client that has it and everything before.
    pub deliveries: Vec<(MessageDelivery, Serial)>,
    /// Messages that the local replay leaves out.
    pub received: Serial,
}

impl Hub {
    /// The incarnation of this node.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Registers the target's interest. The position includes everything delivered before; everything after it is delivered.
    pub fn attach(&self, key: &ChannelKey, target: usize) -> (Arc<Channel>, ChannelPosition) {
        self.with_channel(key, |channel, state| (Arc::clone(channel), self.register(state, target)))
    }

    /// Attaches a client that has everything up to `position`.
    pub fn attach_resuming(&self, key: &ChannelKey, target: usize, position: &Serial) -> AttachResult {
        self.with_channel(key, |channel, state| {
            let (start, missed_ms) = self.start_and_age(state, position);
            let attach_position = self.register(state, target);
            AttachResult { channel: Arc::clone(channel), position: attach_position, start, missed_ms }
        })
    }

    /// Attaches a client that first wants the last `count` messages, none older than `since_ms`.
    pub fn attach_with_rewind(
        &self,
        key: &ChannelKey,
        target: usize,
        count: usize,
        since_ms: u64,
    ) -> (Arc<Channel>, ChannelPosition, RewindStart) {
        self.with_channel(key, |channel, state| {
            let recent = state.rewind(count, since_ms);
            (Arc::clone(channel), self.register(state, target), recent)
        })
    }

    /// The start that a client with this position would get; registers nothing.
    pub fn resume_start(&self, key: &ChannelKey, position: &Serial) -> ResumeStart {
        self.with_channel(key, |_, state| self.start(state, position))
    }

    /// The start in the replay buffer for a client with this position. None if the buffer does not reach back to it.
    pub fn replay_after(&self, key: &ChannelKey, position: &Serial) -> Option<AgedReplayStart> {
        let channel = self.live(key)?;
        let state = channel.state.lock();
        let (start, missed_ms) = self.start_and_age(&state, position);
        match start {
            ResumeStart::Live => Some(AgedReplayStart {
                after: LocalOffset::end(state.position.offset),
                is_exact: true,
                missed_ms,
            }),
            ResumeStart::Replay { after, is_exact } => Some(AgedReplayStart { after, is_exact, missed_ms }),
            ResumeStart::Unknown => None,
        }
    }

    fn start_and_age(&self, state: &State, position: &Serial) -> (ResumeStart, u64) {
        let start = self.start(state, position);
        let missed_ms = match (start, &state.replay_buffer) {
            (ResumeStart::Replay { after, .. }, Some(replay_buffer)) => {
                replay_buffer.age_ms(after.offset, self.now_ms())
            }
            _ => 0,
        };
        (start, missed_ms)
    }

    pub(super) fn register(&self, state: &mut State, target: usize) -> ChannelPosition {
        if let Some(replay_buffer) = &mut state.replay_buffer {
            replay_buffer.idle_ms = None;
        }
        state.attach_number = self.next_attach();
        state.targets |= 1 << target;
        state.position.clone()
    }

    pub(super) fn start(&self, state: &State, position: &Serial) -> ResumeStart {
        let offset = state.position.offset;
        // An empty position states nothing, not even that the client has no message.
        if !state.in_doubt.is_empty() || position.is_empty() {
            return ResumeStart::Unknown;
        }
        let position = state.clamp_position(position);
        let position = position.as_ref();
        if state.position.others.is_some() {
            let here = state.retired.join_into(&state.position.serial());
            let position = &state.retired.complete(position, self.incarnation);
            // The position may name unknown incarnations, or be ahead of this node.
            if !here.includes(position) {
                return ResumeStart::Unknown;
            }
            if position.includes(&here) {
                return ResumeStart::Live;
            }
            let replay = |replay_buffer: &ReplayBuffer| {
                let ReplayStart { after, is_exact } = replay_buffer.find(position)?;
                Some(ResumeStart::Replay { after: replay_buffer.local_offset(after), is_exact })
            };
            return state.replay_buffer.as_deref().and_then(replay).unwrap_or(ResumeStart::Unknown);
        }
        // No message of another incarnation was received.
        let own = position
            .entries()
            .iter()
            .all(|(incarnation, sequence)| *incarnation == self.incarnation || *sequence == 0);
        // The client was attached at a node that forwards completely, before a message was numbered here.
        let is_contiguous = |(incarnation, _): &(u64, u64)| state.contiguous.contains(*incarnation);
        let is_of_others = !position.entries().is_empty() && position.entries().iter().all(is_contiguous);
        let sequence = position.sequence_of(self.incarnation).or(is_of_others.then_some(0)).filter(|_| own);
        match (sequence.map(|sequence| state.position.offset_of(sequence)), &state.replay_buffer) {
            (Some(after), _) if after == offset => ResumeStart::Live,
            (Some(after), Some(replay_buffer)) if after < offset && replay_buffer.reaches_back_to(after) => {
                ResumeStart::Replay { after: replay_buffer.local_offset(after), is_exact: true }
            }
            _ => ResumeStart::Unknown,
        }
    }
}

impl State {
    fn rewind(&self, count: usize, since_ms: u64) -> RewindStart {
        let replay_buffer = self.replay_buffer.as_deref();
        let back = replay_buffer.map(|replay_buffer| replay_buffer.rewind(count, since_ms));
        let after = replay_buffer
            .zip(back)
            .and_then(|(replay_buffer, back)| Some(replay_buffer.local_offset(back.after?)));
        RewindStart {
            after: after.unwrap_or(LocalOffset::end(self.position.offset)),
            found: back.map_or(0, |back| back.found),
            is_complete: back.is_some_and(|back| back.is_complete),
            is_cluster_wide: replay_buffer
                .is_some_and(|replay_buffer| replay_buffer.cluster_backfill == ClusterBackfillState::Yes),
        }
    }
}

impl Channel {
    /// The start of a rewind of `count` messages, none older than `since_ms`.
    pub fn rewind(&self, count: usize, since_ms: u64) -> RewindStart {
        self.state.lock().rewind(count, since_ms)
    }

    /// Reads about `bytes_max` of the messages after an offset; none when the replay buffer does not reach back to it, or other messages
    /// have taken that offset.
    pub fn pull(&self, after: LocalOffset, bytes_max: usize) -> Option<ReplayPage> {
        let state = self.state.lock();
        if after.offset == state.position.offset {
            return Some(ReplayPage { deliveries: Vec::new(), is_end: true });
        }
        let replay_buffer = state.replay_buffer.as_ref().filter(|replay_buffer| {
            replay_buffer.is_valid(after) && replay_buffer.reaches_back_to(after.offset)
        })?;
        let deliveries = replay_buffer.after(after.offset, bytes_max);
        let is_end = deliveries.last().is_some_and(|last| last.offset() == state.position.offset);
        Some(ReplayPage { deliveries, is_end })
    }

    /// Builds the backfill from `position` to a local offset out of a peer's messages. None if by then a message arrived here that the peer
    /// lacks, of an incarnation that it cannot receive any more.
    pub fn backfill(
        &self,
        position: &Serial,
        local_offset: LocalOffset,
        missed: Vec<ForwardedMessages>,
    ) -> Option<ChannelBackfill> {
        let mut received = position.clone();
        let mut deliveries = Vec::with_capacity(missed.len());
        for delivery in missed.into_iter().map(MessageDelivery::backfilled) {
            received = received.join(&delivery.position().serial());
            deliveries.push((delivery, received.clone()));
        }
        let here = self.position_at(local_offset);
        // The peer has everything that was published here, except sequence gaps by design.
        let own = self.state.lock().position.own.incarnation;
        received.advance(own, here.sequence_of(own).unwrap_or(0));
        received.keeps_up_with(&here).then(|| ChannelBackfill { deliveries, received: received.join(&here) })
    }

    /// Whether [`Channel::pull`] can continue after this offset.
    pub fn can_replay_from(&self, offset: u64) -> bool {
        let state = self.state.lock();
        offset == state.position.offset || reaches(&state, offset)
    }

    /// The offset of an own message, valid while there are none of other incarnations.
    pub fn offset_of(&self, sequence: u64) -> u64 {
        self.state.lock().position.offset_of(sequence)
    }

    /// The current position of the channel.
    pub fn position(&self) -> ChannelPosition {
        self.state.lock().position.clone()
    }

    /// The channel's position at an offset between two deliveries. An empty serial if it is not known any more, from which no client can be
    /// resumed.
    pub fn position_at(&self, local_offset: LocalOffset) -> Serial {
        let state = self.state.lock();
        let State { position, replay_buffer, .. } = &*state;
        if local_offset.offset == position.offset {
            return position.serial();
        }
        if position.others.is_none() {
            return Serial::single(position.own.incarnation, position.sequence_at(local_offset.offset));
        }
        let known = replay_buffer.as_ref().and_then(|replay_buffer| replay_buffer.position_at(local_offset));
        known.map(ChannelPosition::serial).unwrap_or_default()
    }
}

fn reaches(state: &State, after: u64) -> bool {
    state.replay_buffer.as_ref().is_some_and(|replay_buffer| replay_buffer.reaches_back_to(after))
}
