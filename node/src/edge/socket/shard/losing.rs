//! What follows cannot be given any more: the client is told, and delivery goes on.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::super::backlog::Question;
use super::super::connection::Connection;
use super::Shard;
use super::replay::{After, NOT_READ, Replay};
use crate::hub::{Channel, Mark, Spot, Subscriber};
use crate::session::{AttachReply, Standing};
use crate::telemetry::count_loss;

impl Shard {
    /// The store does not have it.
    pub(super) fn give_up(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        replay: &Replay,
        reply: Option<&AttachReply>,
    ) {
        let Some(reply) = reply else { return self.lose(connection, slot, &replay.channel) };
        let position = self.go_live(slot, replay);
        let warning = reply.is_rewind().then_some(NOT_READ);
        if !reply.is_rewind() {
            count_loss();
        }
        self.say_attached(connection, slot, reply, &Standing { position, resumed: false, warning });
    }

    /// Something is missing before `mark` for all who are attached to a channel, by its number.
    pub(super) fn lose_all(&mut self, number: u64, mark: &Mark) {
        let Some(channel) = self.subscribers.channel(number).cloned() else { return };
        let Some((_, subscribers, _)) = self.subscribers.all_mut(number) else { return };
        let subscribers = subscribers.iter().filter(|one| one.messages);
        let all: Vec<(u32, u64)> = subscribers.map(|one| (one.slot, one.after_place)).collect();
        for (slot, after) in all {
            let Some(mut connection) = self.slots[slot as usize].take() else { continue };
            match after {
                Subscriber::IN_REPLAY => self.lose(&mut connection, slot, &channel),
                // Whoever began behind it has nothing of what is delivered in between.
                after if after > mark.place => {
                    self.lose_before(
                        &mut connection,
                        slot,
                        &channel,
                        after,
                        channel.position_at(Spot::end(after)),
                    );
                }
                _ => self.lose_before(&mut connection, slot, &channel, mark.place, mark.serial()),
            }
            self.slots[slot as usize] = Some(connection);
        }
    }

    /// What follows is not there any more: the client is told, and delivery goes on from here.
    pub(super) fn lose(&mut self, connection: &mut Connection, slot: u32, channel: &Arc<Channel>) {
        let mark = channel.mark();
        self.lose_before(connection, slot, channel, mark.place, mark.serial());
    }

    /// The same, from this place on.
    fn lose_before(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        channel: &Arc<Channel>,
        place: u64,
        position: Serial,
    ) {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return };
        let turn = open.replays.iter().position(|replay| replay.channel.number() == channel.number());
        if turn.is_some_and(|turn| open.replays[turn].waits_for_a_loss()) {
            return;
        }
        let mut replay = turn.map(|turn| open.replays.swap_remove(turn));
        if let Some(Replay { after: After::Position { position, .. }, .. }) = &replay {
            // The client is told when positions on this node include what it has. Its next resume would else begin before that.
            let question = Question::Lost { position: position.clone() };
            let reply = replay.as_mut().and_then(Replay::take_reply);
            let source = self.ask(open, (slot, generation), channel, question, reply);
            open.replays.extend(replay.map(|replay| Replay { source, ..replay }));
            return;
        }
        self.subscribers.go_live(channel.number(), slot, place);
        if let Some(reply) = replay.and_then(|mut replay| replay.take_reply()) {
            let standing = Standing { position, resumed: false, warning: None };
            return self.say_attached(connection, slot, &reply, &standing);
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
