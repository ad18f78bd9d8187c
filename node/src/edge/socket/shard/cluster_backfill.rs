//! Cluster backfill: messages that a client missed in a channel of several nodes, from a peer's replay buffer or from the shared store.

use std::collections::VecDeque;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::super::backlog::{BacklogQuery, SharedStoreCursor};
use super::super::connection::{OpenSocket, SocketConnection, SocketSubscription};
use super::Shard;
use super::replay::{CUT_BY_CAPABILITY, PULL_BYTES, Replay, ReplayPosition, ReplaySource};
use crate::hub::{Channel, ChannelBackfill, ChannelPosition, LocalOffset, MessageDelivery};
use crate::model::{Amount, ForwardedMessages};
use crate::session::{AttachOutcome, AttachReply, Rewind};

/// Missed messages from peers.
#[derive(Debug)]
pub(super) struct MissedDeliveries {
    /// Missed deliveries, each with the position of a client that has received it and all earlier ones.
    deliveries: VecDeque<(MessageDelivery, Serial)>,
    /// Position after all of them, including what this node had delivered up to the replay's local offset.
    position: Serial,
}

impl Shard {
    /// Starts a cluster backfill after this position; then this node's messages after the attach position follow. `back_ms` limits the age
    /// of the missed messages; none if the client had access to all of them before.
    pub(super) fn replay_from_cluster(
        &mut self,
        open: &OpenSocket,
        at: (u32, u32),
        channel: &Arc<Channel>,
        (position, attach_position, back_ms): (Serial, ChannelPosition, Option<u64>),
        reply: Option<AttachReply>,
    ) -> Replay {
        let after = ReplayPosition::Cluster {
            position: position.clone(),
            offset: LocalOffset::end(attach_position.offset),
        };
        let question =
            BacklogQuery::ClusterAfter { position, attach_position: attach_position.serial(), back_ms };
        let source = self.ask(open, at, channel, question, reply);
        Replay { channel: Arc::clone(channel), after, source }
    }

    /// Starts a cluster backfill of the last messages before the attach position.
    pub(super) fn rewind_from_cluster(
        &mut self,
        open: &OpenSocket,
        at: (u32, u32),
        channel: &Arc<Channel>,
        (rewind, attach_position): (Rewind, &ChannelPosition),
        reply: AttachReply,
    ) -> Replay {
        let after = ReplayPosition::Cluster {
            position: Serial::default(),
            offset: LocalOffset::end(attach_position.offset),
        };
        let question = BacklogQuery::ClusterRewind { rewind, attach_position: attach_position.serial() };
        let source = self.ask(open, at, channel, question, Some(reply));
        Replay { channel: Arc::clone(channel), after, source }
    }

    /// Starts to read pages from the shared store, once the start is known.
    pub(super) fn begin_shared_replay(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        mut replay: Replay,
        reply: Option<&AttachReply>,
        (reading, is_cut): (Box<SharedStoreCursor>, bool),
    ) {
        let ReplayPosition::Cluster { position, .. } = &mut replay.after else { return };
        position.clone_from(&reading.position);
        let position = reading.position.clone();
        let Some(open) = connection.open_mut() else { return };
        replay.source = ReplaySource::SharedStore(reading);
        open.replays.push(replay);
        if let Some(reply) = reply {
            let warning = is_cut.then_some(CUT_BY_CAPABILITY);
            let outcome = AttachOutcome { position, resumed: !reply.is_rewind(), warning };
            self.send_attached(connection, slot, reply, &outcome);
        }
    }

    /// Handles the end of a page. After the last page the recent messages of this node follow.
    pub(super) fn continue_shared_replay(
        &mut self,
        connection: &mut SocketConnection,
        mut replay: Replay,
        reading: Box<SharedStoreCursor>,
        is_end: bool,
    ) {
        let ReplayPosition::Cluster { position, offset } = &mut replay.after else { return };
        let Some(open) = connection.open_mut() else { return };
        if is_end {
            open.replays.push(Replay::from_replay_buffer(&replay.channel, *offset, reading.end(), false));
            return;
        }
        position.clone_from(&reading.position);
        replay.source = ReplaySource::SharedStore(reading);
        open.replays.push(replay);
    }

    /// Replays from this node's replay buffer, which now reaches back to the position.
    pub(super) fn replay_from_buffer(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        replay: &Replay,
        reply: Option<&AttachReply>,
        (after, is_exact): (LocalOffset, bool),
    ) {
        let Some(open) = connection.open_mut() else { return };
        let position = replay.position();
        open.replays.push(Replay::from_replay_buffer(&replay.channel, after, position.clone(), is_exact));
        if let Some(reply) = reply {
            let outcome = AttachOutcome { position, resumed: true, warning: None };
            self.send_attached(connection, slot, reply, &outcome);
        }
    }

    /// Rewinds from this offset of the replay buffer, which by now also has the messages of other nodes.
    pub(super) fn rewind_recent(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        replay: &Replay,
        reply: Option<&AttachReply>,
        (after, warning): (LocalOffset, Option<&'static str>),
    ) {
        let Some(open) = connection.open_mut() else { return };
        if let Some(subscription) = open.subscription_mut(replay.channel.key().name())
            && subscription.since != SocketSubscription::NEVER
        {
            subscription.since = subscription.since.min(after.offset);
        }
        let replay = Replay::from_replay_buffer(&replay.channel, after, Serial::default(), true);
        let position = replay.position();
        open.replays.push(replay);
        if let Some(reply) = reply {
            self.send_attached(connection, slot, reply, &AttachOutcome { position, resumed: false, warning });
        }
    }

    /// Starts the replay of messages from peers, up to the replay's local offset; the replay buffer has the rest.
    pub(super) fn begin_missed_replay(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        replay: Replay,
        reply: Option<&AttachReply>,
        missed: Vec<ForwardedMessages>,
    ) {
        let ReplayPosition::Cluster { position, offset } = &replay.after else { return };
        let Some(ChannelBackfill { deliveries, received }) =
            replay.channel.backfill(position, *offset, missed)
        else {
            return self.give_up(connection, slot, &replay, reply);
        };
        let Some(open) = connection.open_mut() else { return };
        let position = position.clone();
        let source = ReplaySource::Peers(Box::new(MissedDeliveries {
            deliveries: deliveries.into(),
            position: received,
        }));
        open.replays.push(Replay { source, ..replay });
        if let Some(reply) = reply {
            let outcome = AttachOutcome { position, resumed: true, warning: None };
            self.send_attached(connection, slot, reply, &outcome);
        }
    }

    /// Sends some of the missed messages. After the last one the recent messages of this node follow.
    pub(super) fn replay_missed(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        mut replay: Replay,
        mut missed: Box<MissedDeliveries>,
    ) {
        let ReplayPosition::Cluster { position, offset } = &mut replay.after else { return };
        let Some(open) = connection.open_mut() else { return };
        let (format, own, echo) = (open.session.format(), open.session.connection_id(), open.echo);
        let (mut frames, mut bytes, mut handed) = (Vec::new(), 0, Amount::default());
        while bytes < PULL_BYTES
            && let Some((delivery, received)) = missed.deliveries.pop_front()
        {
            if echo || delivery.connection_id() != own {
                handed.add(Amount { count: delivery.count(), bytes: delivery.counted_bytes() });
                let frame = delivery.frame_including(format, &received);
                bytes += frame.len();
                frames.push(frame);
            }
            *position = received;
        }
        if missed.deliveries.is_empty() {
            replay = Replay::from_replay_buffer(&replay.channel, *offset, missed.position, false);
        } else {
            replay.source = ReplaySource::Peers(missed);
        }
        open.replays.push(replay);
        self.push_missed(connection, slot, frames, handed);
    }
}
