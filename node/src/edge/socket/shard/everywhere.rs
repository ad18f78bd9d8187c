//! What a client missed of a channel of several nodes: from the recent messages of another node, or from the store that they share.

use std::collections::VecDeque;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::super::backlog::{Question, Reading};
use super::super::connection::{Connection, Open, Subscription};
use super::Shard;
use super::replay::{After, CUT_BY_CAPABILITY, PULL_BYTES, Replay, Source};
use crate::hub::{Channel, Delivery, Mark, Refill, Spot};
use crate::model::{Amount, Forwarded};
use crate::session::{AttachReply, Rewind, Standing};

/// What another node had.
#[derive(Debug)]
pub(super) struct Missed {
    /// Each with the position of who has it and all before it.
    deliveries: VecDeque<(Delivery, Serial)>,
    /// Of who has it all, and what this node had handed on by the place behind it.
    has: Serial,
}

impl Shard {
    /// A replay of what is elsewhere after this position, and then of what this node has after the mark; nothing of the first that
    /// is so old, unless the client was let in to all of it.
    pub(super) fn replay_of_others(
        &mut self,
        open: &Open,
        at: (u32, u32),
        channel: &Arc<Channel>,
        (position, mark, back_ms): (Serial, Mark, Option<u64>),
        reply: Option<AttachReply>,
    ) -> Replay {
        let after = After::Position { position: position.clone(), place: Spot::end(mark.place) };
        let question = Question::Elsewhere { position, stands: mark.serial(), back_ms };
        let source = self.ask(open, at, channel, question, reply);
        Replay { channel: Arc::clone(channel), after, source }
    }

    /// The same of the last messages before the mark.
    pub(super) fn rewind_everywhere(
        &mut self,
        open: &Open,
        at: (u32, u32),
        channel: &Arc<Channel>,
        (rewind, mark): (Rewind, &Mark),
        reply: AttachReply,
    ) -> Replay {
        let after = After::Position { position: Serial::default(), place: Spot::end(mark.place) };
        let question = Question::BackElsewhere { rewind, stands: mark.serial() };
        let source = self.ask(open, at, channel, question, Some(reply));
        Replay { channel: Arc::clone(channel), after, source }
    }

    /// It is known where a reading of the store begins.
    pub(super) fn begin_reading(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        mut replay: Replay,
        reply: Option<&AttachReply>,
        (reading, is_cut): (Box<Reading>, bool),
    ) {
        let After::Position { position, .. } = &mut replay.after else { return };
        position.clone_from(&reading.has);
        let position = reading.has.clone();
        let Some(open) = connection.open_mut() else { return };
        replay.source = Source::Reading(reading);
        open.replays.push(replay);
        if let Some(reply) = reply {
            let warning = is_cut.then_some(CUT_BY_CAPABILITY);
            let standing = Standing { position, resumed: !reply.is_rewind(), warning };
            self.say_attached(connection, slot, reply, &standing);
        }
    }

    /// A page of it is at hand. At its end the recent messages of this node follow.
    pub(super) fn read_on(
        &mut self,
        connection: &mut Connection,
        mut replay: Replay,
        reading: Box<Reading>,
        is_end: bool,
    ) {
        let After::Position { position, place } = &mut replay.after else { return };
        let Some(open) = connection.open_mut() else { return };
        if is_end {
            open.replays.push(Replay::from_ring(&replay.channel, *place, reading.end(), false));
            return;
        }
        position.clone_from(&reading.has);
        replay.source = Source::Reading(reading);
        open.replays.push(replay);
    }

    /// The recent messages of this node reach back to where the replay stands by now.
    pub(super) fn replay_recent_of_others(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        replay: &Replay,
        reply: Option<&AttachReply>,
        (after, is_exact): (Spot, bool),
    ) {
        let Some(open) = connection.open_mut() else { return };
        let position = replay.position();
        open.replays.push(Replay::from_ring(&replay.channel, after, position.clone(), is_exact));
        if let Some(reply) = reply {
            let standing = Standing { position, resumed: true, warning: None };
            self.say_attached(connection, slot, reply, &standing);
        }
    }

    /// A rewind begins with the recent messages after this place, by now also with those of other nodes.
    pub(super) fn rewind_recent(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        replay: &Replay,
        reply: Option<&AttachReply>,
        (after, warning): (Spot, Option<&'static str>),
    ) {
        let Some(open) = connection.open_mut() else { return };
        if let Some(subscription) = open.subscription_mut(replay.channel.key().name())
            && subscription.since != Subscription::NEVER
        {
            subscription.since = subscription.since.min(after.place);
        }
        let replay = Replay::from_ring(&replay.channel, after, Serial::default(), true);
        let position = replay.position();
        open.replays.push(replay);
        if let Some(reply) = reply {
            self.say_attached(connection, slot, reply, &Standing { position, resumed: false, warning });
        }
    }

    /// What was missed is at hand, up to the place where the replay stands; what follows that is in the ring.
    pub(super) fn replay_elsewhere(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        replay: Replay,
        reply: Option<&AttachReply>,
        missed: Vec<Forwarded>,
    ) {
        let After::Position { position, place } = &replay.after else { return };
        let Some(Refill { deliveries, has }) = replay.channel.refill(position, *place, missed) else {
            return self.give_up(connection, slot, &replay, reply);
        };
        let Some(open) = connection.open_mut() else { return };
        let position = position.clone();
        let source = Source::Missed(Box::new(Missed { deliveries: deliveries.into(), has }));
        open.replays.push(Replay { source, ..replay });
        if let Some(reply) = reply {
            let standing = Standing { position, resumed: true, warning: None };
            self.say_attached(connection, slot, reply, &standing);
        }
    }

    /// Some of it, and behind the last of it the recent messages of this node.
    pub(super) fn replay_missed(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        mut replay: Replay,
        mut missed: Box<Missed>,
    ) {
        let After::Position { position, place } = &mut replay.after else { return };
        let Some(open) = connection.open_mut() else { return };
        let (format, own, echo) = (open.session.format(), open.session.connection_id(), open.echo);
        let (mut frames, mut bytes, mut handed) = (Vec::new(), 0, Amount::default());
        while bytes < PULL_BYTES
            && let Some((delivery, has)) = missed.deliveries.pop_front()
        {
            if echo || delivery.connection_id() != own {
                handed.add(Amount { count: delivery.count(), bytes: delivery.counted_bytes() });
                let frame = delivery.frame_beside(format, &has);
                bytes += frame.len();
                frames.push(frame);
            }
            *position = has;
        }
        if missed.deliveries.is_empty() {
            replay = Replay::from_ring(&replay.channel, *place, missed.has, false);
        } else {
            replay.source = Source::Missed(missed);
        }
        open.replays.push(replay);
        self.hand(connection, slot, frames, handed);
    }
}
