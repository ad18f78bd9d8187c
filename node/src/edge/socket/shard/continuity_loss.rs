//! Continuity loss: the client is told, and delivery continues.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::super::backlog::BacklogQuery;
use super::super::connection::SocketConnection;
use super::Shard;
use super::replay::{NOT_READ, Replay, ReplayPosition};
use crate::hub::{Channel, ChannelPosition, LocalOffset, Subscriber};
use crate::session::{AttachOutcome, AttachReply};
use crate::telemetry::count_loss;

impl Shard {
    /// Ends a replay whose messages the store does not have.
    pub(super) fn give_up(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        replay: &Replay,
        reply: Option<&AttachReply>,
    ) {
        let Some(reply) = reply else { return self.signal_loss(connection, slot, &replay.channel) };
        let position = self.go_live(slot, replay);
        let warning = reply.is_rewind().then_some(NOT_READ);
        if !reply.is_rewind() {
            count_loss();
        }
        self.send_attached(connection, slot, reply, &AttachOutcome { position, resumed: false, warning });
    }

    /// Tells a continuity loss before this position to all clients attached to a channel, by its number.
    pub(super) fn signal_loss_to_all(&mut self, number: u64, position: &ChannelPosition) {
        let Some(channel) = self.subscribers.channel(number).cloned() else { return };
        let Some((_, subscribers, _)) = self.subscribers.all_mut(number) else { return };
        let subscribers = subscribers.iter().filter(|one| one.messages);
        let all: Vec<(u32, u64)> = subscribers.map(|one| (one.slot, one.after_offset)).collect();
        for (slot, after) in all {
            let Some(mut connection) = self.slots[slot as usize].take() else { continue };
            match after {
                Subscriber::IN_REPLAY => self.signal_loss(&mut connection, slot, &channel),
                // A client that attached after that position misses nothing between the two.
                after if after > position.offset => {
                    self.signal_loss_before(
                        &mut connection,
                        slot,
                        &channel,
                        after,
                        channel.position_at(LocalOffset::end(after)),
                    );
                }
                _ => self.signal_loss_before(
                    &mut connection,
                    slot,
                    &channel,
                    position.offset,
                    position.serial(),
                ),
            }
            self.slots[slot as usize] = Some(connection);
        }
    }

    /// Tells the client a continuity loss; delivery continues from the channel's present position.
    pub(super) fn signal_loss(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &Arc<Channel>,
    ) {
        let position = channel.position();
        self.signal_loss_before(connection, slot, channel, position.offset, position.serial());
    }

    /// Tells the client a continuity loss; delivery continues from this local offset.
    fn signal_loss_before(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &Arc<Channel>,
        offset: u64,
        position: Serial,
    ) {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return };
        let turn = open.replays.iter().position(|replay| replay.channel.number() == channel.number());
        if turn.is_some_and(|turn| open.replays[turn].is_loss_pending()) {
            return;
        }
        let mut replay = turn.map(|turn| open.replays.swap_remove(turn));
        if let Some(Replay { after: ReplayPosition::Cluster { position, .. }, .. }) = &replay {
            // The client is told once positions on this node include what it has. Otherwise its next resume would begin before that.
            let question = BacklogQuery::ContinuityLost { position: position.clone() };
            let reply = replay.as_mut().and_then(Replay::take_reply);
            let source = self.ask(open, (slot, generation), channel, question, reply);
            open.replays.extend(replay.map(|replay| Replay { source, ..replay }));
            return;
        }
        self.subscribers.go_live(channel.number(), slot, offset);
        if let Some(reply) = replay.and_then(|mut replay| replay.take_reply()) {
            let outcome = AttachOutcome { position, resumed: false, warning: None };
            return self.send_attached(connection, slot, &reply, &outcome);
        }
        let name = channel.key().name();
        let mut outputs = Vec::new();
        let presence = self.set_modes(connection, slot, name);
        if let Some(open) = connection.open_mut() {
            open.session.continuity_lost(name, position, presence, &mut outputs);
        }
        self.run_outputs(connection, slot, outputs);
    }
}
