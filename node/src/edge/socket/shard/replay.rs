//! Replay: messages published before an attach, sent as fast as the socket takes them. They come from the channel's replay buffer as far as
//! it reaches back, or else from the store.

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use fanfare_proto::serial::Serial;

use super::super::backlog::{
    BacklogCursor, BacklogQuery, BacklogRequest, BacklogResponder, BacklogResponse, SharedStoreCursor,
};
use super::super::connection::{ConnectionStage, OpenSocket, SocketConnection, SocketSubscription};
use super::attach::cut;
use super::cluster_backfill::MissedDeliveries;
use super::{SLICE, Shard, context};
use crate::hub::{Channel, LocalOffset, ReplayPage};
use crate::model::{Amount, Stamp, UsageKind};
use crate::session::{AttachOutcome, AttachReply};

/// Size of one pull from a replay buffer.
pub(super) const PULL_BYTES: usize = 64 * 1024;
/// Outbox size below which more is pulled.
const LOW_BYTES: usize = 32 * 1024;
/// Warning for a rewind that returned less than was asked for.
pub(super) const CUT_BY_CAPABILITY: &str =
    "rewind was cut to the resume window: the capability has no history here";
pub(super) const NOT_READ: &str = "rewind was cut: the history could not be read";

/// A channel whose missed messages are being sent to a connection; until that is done, the connection gets no deliveries of it.
#[derive(Debug)]
pub(in crate::edge::socket) struct Replay {
    pub(super) channel: Arc<Channel>,
    pub(super) after: ReplayPosition,
    pub(super) source: ReplaySource,
}

/// Progress of a replay: the client has all messages up to here.
#[derive(Debug, Clone)]
pub(super) enum ReplayPosition {
    /// Local offset on this node, and its position. `received` includes some of the messages that follow.
    Local { offset: LocalOffset, position: Serial, received: Option<Arc<Serial>> },
    /// Channel position. Messages up to the offset come from peers or from the shared store.
    Cluster { position: Serial, offset: LocalOffset },
    /// Position in the store of a single node, where the sequences of this incarnation are the offsets.
    Stored(Stamp),
}

#[derive(Debug)]
pub(super) enum ReplaySource {
    /// Replay buffer of the channel.
    ReplayBuffer,
    /// Store, from this cursor on.
    Stored(Box<BacklogCursor>),
    /// Messages fetched from peers.
    Peers(Box<MissedDeliveries>),
    /// Store that nodes share.
    SharedStore(Box<SharedStoreCursor>),
    /// Backlog query under way.
    Pending(Box<PendingBacklogQuery>),
}

#[derive(Debug)]
pub(super) struct PendingBacklogQuery {
    ticket: u64,
    is_page: bool,
    /// True if the client is told a continuity loss, whatever the answer.
    is_loss: bool,
    /// Attach that is answered once its start is known.
    reply: Option<AttachReply>,
}

impl Replay {
    /// Replay from the replay buffer. The client has all messages of this position, and unless `is_exact` some after the offset.
    pub(super) fn from_replay_buffer(
        channel: &Arc<Channel>,
        offset: LocalOffset,
        received: Serial,
        is_exact: bool,
    ) -> Self {
        let here = channel.position_at(offset);
        let (position, received) = match is_exact {
            true => (if here.is_empty() { received } else { here }, None),
            false => (here.join(&received), Some(Arc::new(received))),
        };
        let after = ReplayPosition::Local { offset, position, received };
        Self { channel: Arc::clone(channel), after, source: ReplaySource::ReplayBuffer }
    }

    /// Position up to which the client has all messages.
    pub(super) fn position(&self) -> Serial {
        match &self.after {
            ReplayPosition::Local { position, .. } | ReplayPosition::Cluster { position, .. } => {
                position.clone()
            }
            ReplayPosition::Stored(stamp) => Serial::single(stamp.incarnation, stamp.sequence),
        }
    }

    /// Local offset of the replay, if it has one.
    fn local_offset(&self, incarnation: u64) -> Option<LocalOffset> {
        match &self.after {
            ReplayPosition::Local { offset, .. } => Some(*offset),
            ReplayPosition::Cluster { .. } => None,
            ReplayPosition::Stored(stamp) => {
                let is_own = stamp.incarnation == incarnation;
                is_own.then(|| LocalOffset::end(self.channel.offset_of(stamp.sequence)))
            }
        }
    }

    /// True if the client is told a continuity loss when the query is answered.
    pub(super) fn is_loss_pending(&self) -> bool {
        matches!(&self.source, ReplaySource::Pending(pending) if pending.is_loss)
    }

    /// Takes the attach that waits for the query.
    pub(super) fn take_reply(&mut self) -> Option<AttachReply> {
        match &mut self.source {
            ReplaySource::Pending(pending) => pending.reply.take(),
            ReplaySource::ReplayBuffer
            | ReplaySource::Stored(_)
            | ReplaySource::Peers(_)
            | ReplaySource::SharedStore(_) => None,
        }
    }
}

impl OpenSocket {
    /// Position up to which a replay has sent the messages of a channel; none without a replay.
    pub(super) fn replay_position(&self, channel: u64) -> Option<Serial> {
        self.replays.iter().find(|replay| replay.channel.number() == channel).map(Replay::position)
    }

    /// Index of the replay whose turn it is. At most one store page is under way at a time.
    fn next_replay(&self) -> Option<usize> {
        let awaits_page =
            |replay: &Replay| matches!(&replay.source, ReplaySource::Pending(pending) if pending.is_page);
        let awaits_page = self.replays.iter().any(awaits_page);
        self.replays.iter().position(|replay| match &replay.source {
            ReplaySource::ReplayBuffer | ReplaySource::Peers(_) => true,
            ReplaySource::Stored(_) | ReplaySource::SharedStore(_) => !awaits_page,
            ReplaySource::Pending(_) => false,
        })
    }
}

impl Shard {
    /// Sends the client its position in the channel, after subscribing.
    pub(super) fn send_attached(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        reply: &AttachReply,
        outcome: &AttachOutcome,
    ) {
        let presence = self.set_modes(connection, slot, &reply.channel);
        let mut outputs = Vec::new();
        if let Some(open) = connection.open_mut() {
            let cx = context(&self.services, self.epoch_ms);
            open.session.attached(cx, reply, outcome, presence, &mut outputs);
        }
        self.run_outputs(connection, slot, outputs);
        self.watch_occupancy(connection, slot, &reply.channel);
    }

    /// Replay from the store, whose start is found by a query.
    pub(super) fn replay_stored(
        &mut self,
        open: &OpenSocket,
        (slot, generation): (u32, u32),
        channel: &Arc<Channel>,
        question: BacklogQuery,
        reply: Option<AttachReply>,
    ) -> Replay {
        let after = match &question {
            BacklogQuery::After { after, .. } => *after,
            BacklogQuery::Rewind { until_sequence, .. } => {
                Stamp { incarnation: self.services.hub.incarnation(), sequence: *until_sequence }
            }
            BacklogQuery::Page { cursor, .. } => cursor.after,
            BacklogQuery::ClusterAfter { .. }
            | BacklogQuery::ClusterRewind { .. }
            | BacklogQuery::SharedPage { .. }
            | BacklogQuery::ContinuityLost { .. } => channel.position().own,
        };
        let source = self.ask(open, (slot, generation), channel, question, reply);
        Replay { channel: Arc::clone(channel), after: ReplayPosition::Stored(after), source }
    }

    pub(super) fn ask(
        &mut self,
        open: &OpenSocket,
        (slot, generation): (u32, u32),
        channel: &Arc<Channel>,
        question: BacklogQuery,
        reply: Option<AttachReply>,
    ) -> ReplaySource {
        self.next_question += 1;
        let ticket = self.next_question;
        let is_page = matches!(question, BacklogQuery::Page { .. } | BacklogQuery::SharedPage { .. });
        let is_loss = matches!(question, BacklogQuery::ContinuityLost { .. });
        let pending = PendingBacklogQuery { ticket, is_page, is_loss, reply };
        let policy = open.session.principal().account.policy(channel.key().channel());
        let reply = BacklogResponder::new(Arc::clone(&self.handle), slot, generation, ticket);
        self.services.backlog.ask(BacklogRequest { channel: Arc::clone(channel), policy, question, reply });
        ReplaySource::Pending(Box::new(pending))
    }

    /// Ends a replay when the connection takes no more messages of the channel.
    pub(super) fn end_replay(&mut self, connection: &mut SocketConnection, slot: u32, number: u64) {
        let Some(open) = connection.open_mut() else { return };
        let Some(index) = open.replays.iter().position(|replay| replay.channel.number() == number) else {
            return;
        };
        let mut replay = open.replays.swap_remove(index);
        let position = self.go_live(slot, &replay);
        if let Some(reply) = replay.take_reply() {
            // Only messages were missed, and this connection takes none now.
            self.send_attached(
                connection,
                slot,
                &reply,
                &AttachOutcome { position, resumed: true, warning: None },
            );
        }
    }

    /// Switches to live delivery. Returns the channel's present position.
    pub(super) fn go_live(&mut self, slot: u32, replay: &Replay) -> Serial {
        let position = replay.channel.position();
        self.subscribers.go_live(replay.channel.number(), slot, position.offset);
        position.serial()
    }

    /// Schedules the next pull of a connection's replays, if its outbox has space.
    pub(super) fn schedule_replay(&mut self, connection: &mut SocketConnection, slot: u32) {
        if connection.in_replaying || connection.outbox.bytes() >= LOW_BYTES {
            return;
        }
        if connection.open_mut().is_some_and(|open| open.next_replay().is_some()) {
            connection.in_replaying = true;
            self.replaying.push_back(slot);
        }
    }

    pub(super) fn replay_turn(&mut self) {
        let until = Instant::now() + SLICE;
        while let Some(slot) = self.replaying.pop_front() {
            let Some(mut connection) = self.slots[slot as usize].take() else { continue };
            connection.in_replaying = false;
            self.replay(&mut connection, slot);
            self.slots[slot as usize] = Some(connection);
            if Instant::now() >= until {
                return;
            }
        }
    }

    /// One pull for one of the connection's replays; the others follow in turn.
    fn replay(&mut self, connection: &mut SocketConnection, slot: u32) {
        if connection.outbox.bytes() >= LOW_BYTES {
            return;
        }
        let generation = connection.generation;
        let ConnectionStage::Open(open) = &mut connection.stage else { return };
        let Some(turn) = open.next_replay() else { return };
        let mut replay = open.replays.remove(turn);
        let incarnation = self.services.hub.incarnation();
        let local_offset = replay.local_offset(incarnation);
        let pulled = local_offset
            .and_then(|local_offset| Some((local_offset, replay.channel.pull(local_offset, PULL_BYTES)?)));
        let source = std::mem::replace(&mut replay.source, ReplaySource::ReplayBuffer);
        match (pulled, source) {
            (Some((local_offset, pulled)), _) => {
                if !matches!(replay.after, ReplayPosition::Local { .. }) {
                    replay =
                        Replay::from_replay_buffer(&replay.channel, local_offset, replay.position(), true);
                }
                replay.source = ReplaySource::ReplayBuffer;
                self.replay_recent(connection, slot, replay, &pulled);
            }
            (None, ReplaySource::Stored(cursor)) => {
                let format = open.session.format();
                let without = (!open.echo).then(|| open.session.connection_id());
                let question = BacklogQuery::Page { cursor: *cursor, format, without };
                replay.source = self.ask(open, (slot, generation), &replay.channel, question, None);
                open.replays.push(replay);
            }
            (None, ReplaySource::Peers(missed)) => self.replay_missed(connection, slot, replay, missed),
            (None, ReplaySource::SharedStore(reading)) => {
                let format = open.session.format();
                let without = (!open.echo).then(|| open.session.connection_id());
                let question = BacklogQuery::SharedPage { reading, format, without };
                replay.source = self.ask(open, (slot, generation), &replay.channel, question, None);
                open.replays.push(replay);
            }
            // The replay has fallen behind the replay buffer.
            (None, ReplaySource::ReplayBuffer | ReplaySource::Pending(_))
                if self.services.hub.is_clustered() =>
            {
                let (channel, position) = (Arc::clone(&replay.channel), replay.position());
                if position.is_empty() {
                    return self.signal_loss(connection, slot, &channel);
                }
                // The client had access to all of these messages before.
                let from = (position, channel.position(), None);
                let replay = self.replay_from_cluster(open, (slot, generation), &channel, from, None);
                open.replays.push(replay);
            }
            (None, ReplaySource::ReplayBuffer | ReplaySource::Pending(_)) => {
                let channel = replay.channel;
                if open.session.principal().account.policy(channel.key().channel()).history {
                    // The client had access to all of these messages before.
                    let after = match replay.after {
                        ReplayPosition::Local { position, .. } | ReplayPosition::Cluster { position, .. } => {
                            let sequence = position.sequence_of(incarnation).unwrap_or(0);
                            Stamp { incarnation, sequence }
                        }
                        ReplayPosition::Stored(after) => after,
                    };
                    let until_sequence = channel.position().own.sequence;
                    let question = BacklogQuery::After { after, until_sequence, back_ms: None };
                    let stored = self.replay_stored(open, (slot, generation), &channel, question, None);
                    open.replays.push(stored);
                } else {
                    self.signal_loss(connection, slot, &channel);
                }
            }
        }
        if connection.outbox.is_empty() {
            self.schedule_replay(connection, slot);
        }
    }

    fn replay_recent(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        mut replay: Replay,
        pulled: &ReplayPage,
    ) {
        let ConnectionStage::Open(open) = &mut connection.stage else { return };
        let ReplayPage { deliveries, is_end } = pulled;
        let (format, own) = (open.session.format(), open.session.connection_id());
        let ReplayPosition::Local { offset: local_offset, position, received } = &mut replay.after else {
            return;
        };
        let (after, received) = (local_offset.offset, received.as_deref());
        if let Some(last) = deliveries.last() {
            local_offset.offset = last.offset();
            *position = received
                .map_or_else(|| last.position().serial(), |received| last.position().serial().join(received));
        }
        let eligible = deliveries.iter().filter(|one| open.echo || one.connection_id() != own);
        let mut handed = Amount::default();
        let frames: Vec<Bytes> = eligible
            .filter(|one| received.is_none_or(|received| !one.is_included_in(received)))
            .map(|one| {
                handed.add(one.amount_after(after));
                match received {
                    None => one.frame_after(format, after),
                    Some(received) => one.frame_including(format, received),
                }
            })
            .collect();
        if *is_end {
            self.subscribers.go_live(replay.channel.number(), slot, local_offset.offset);
        } else {
            open.replays.push(replay);
        }
        self.push_missed(connection, slot, frames, handed);
    }

    /// Puts missed messages into the outbox.
    pub(super) fn push_missed(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        frames: Vec<Bytes>,
        handed: Amount,
    ) {
        let ConnectionStage::Open(open) = &mut connection.stage else { return };
        connection.outbox.push_replay(frames.into_iter());
        self.metrics.deliveries.increment(handed.count);
        let usage = &open.session.principal().account.usage;
        usage.count(UsageKind::Deliver, handed.count, handed.bytes);
        if !connection.outbox.is_empty() && !connection.in_dirty && connection.blocked_ms.is_none() {
            connection.in_dirty = true;
            self.dirty.push_back(slot);
        }
    }

    /// Handles the answer to a backlog query.
    pub(super) fn handle_backlog_response(
        &mut self,
        slot: u32,
        generation: u32,
        ticket: u64,
        found: BacklogResponse,
    ) {
        if !self.is_current(slot, generation) {
            return;
        }
        let Some(mut connection) = self.slots[slot as usize].take() else { return };
        self.apply_backlog_response(&mut connection, slot, ticket, found);
        self.schedule_replay(&mut connection, slot);
        self.unpause(&mut connection, slot);
        self.slots[slot as usize] = Some(connection);
    }

    fn apply_backlog_response(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        ticket: u64,
        found: BacklogResponse,
    ) {
        let Some(open) = connection.open_mut() else { return };
        // A channel that was detached meanwhile needs no answer.
        let waits = |replay: &Replay| matches!(&replay.source, ReplaySource::Pending(pending) if pending.ticket == ticket);
        let Some(turn) = open.replays.iter().position(waits) else { return };
        let mut replay = open.replays.remove(turn);
        let reply = replay.take_reply();
        let (cursor, is_cut, page) = match found {
            BacklogResponse::Nothing => return self.give_up(connection, slot, &replay, reply.as_ref()),
            BacklogResponse::Recent { after, is_exact } => {
                return self.replay_from_buffer(connection, slot, &replay, reply.as_ref(), (after, is_exact));
            }
            BacklogResponse::RecentRewind { recent, is_cut, is_stored } => {
                let warning = if is_stored { Some(NOT_READ) } else { cut(&recent, is_cut) };
                return self.rewind_recent(
                    connection,
                    slot,
                    &replay,
                    reply.as_ref(),
                    (recent.after, warning),
                );
            }
            BacklogResponse::FromPeers(missed) => {
                return self.begin_missed_replay(connection, slot, replay, reply.as_ref(), missed);
            }
            BacklogResponse::SharedBegin { reading, is_cut } => {
                return self.begin_shared_replay(connection, slot, replay, reply.as_ref(), (reading, is_cut));
            }
            BacklogResponse::SharedPage { frames, amount, reading, is_end } => {
                self.continue_shared_replay(connection, replay, reading, is_end);
                return self.push_missed(connection, slot, frames, amount);
            }
            BacklogResponse::Begin { cursor, is_cut } => (cursor, is_cut, None),
            BacklogResponse::Page(page) => (page.cursor, false, Some((page.frames, page.amount))),
        };
        replay.after = ReplayPosition::Stored(cursor.after);
        if page.is_none()
            && let Some(subscription) = open.subscription_mut(replay.channel.key().name())
            && subscription.since != SocketSubscription::NEVER
        {
            let is_own = cursor.after.incarnation == self.services.hub.incarnation();
            let since = if is_own { cursor.after.sequence } else { 0 };
            subscription.since = subscription.since.min(since);
        }
        replay.source = ReplaySource::Stored(Box::new(cursor));
        open.replays.push(replay);
        if let Some(reply) = reply {
            let position = Serial::single(cursor.after.incarnation, cursor.after.sequence);
            let warning = is_cut.then_some(CUT_BY_CAPABILITY);
            let outcome = AttachOutcome { position, resumed: !reply.is_rewind(), warning };
            self.send_attached(connection, slot, &reply, &outcome);
        }
        if let Some((frames, amount)) = page {
            self.push_missed(connection, slot, frames, amount);
        }
    }
}
