//! What a client is given of what was published before it attached, as fast as its socket takes it: from the recent
//! messages of the channel while they reach back so far, else from the store.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use fanfare_proto::serial::Serial;

use super::super::backlog::{Ask, Found, Place, Question, Reading, Reply};
use super::super::connection::{Connection, Open, Stage, Subscription};
use super::attach::cut;
use super::everywhere::Missed;
use super::{SLICE, Shard, context};
use crate::hub::{Channel, Pulled, Spot};
use crate::model::{Amount, Stamp, UsageKind};
use crate::session::{AttachReply, Standing};

/// What one pull takes from a ring.
pub(super) const PULL_BYTES: usize = 64 * 1024;
/// More is pulled once less than this waits for the socket.
const LOW_BYTES: usize = 32 * 1024;
/// Why a rewind gave less than was asked for.
pub(super) const CUT_BY_CAPABILITY: &str =
    "rewind was cut to the resume window: the capability has no history here";
pub(super) const NOT_READ: &str = "rewind was cut: the history could not be read";

/// A channel of which a connection is given what it missed; until it has that, deliveries pass it by.
#[derive(Debug)]
pub(in crate::edge::socket) struct Replay {
    pub(super) channel: Arc<Channel>,
    pub(super) after: After,
    pub(super) source: Source,
}

/// It has all up to here.
#[derive(Debug, Clone)]
pub(super) enum After {
    /// In the channel on this node, which is this position. `has` covers some of what follows.
    Place { place: Spot, position: Serial, has: Option<Arc<Serial>> },
    /// This position. What comes before the place is to be had elsewhere.
    Position { position: Serial, place: Spot },
    /// In the store, of a node that is alone: there the sequences of this run are the places.
    Stored(Stamp),
}

#[derive(Debug)]
pub(super) enum Source {
    /// The recent messages of the channel.
    Ring,
    /// The store, from this place on.
    Stored(Box<Place>),
    /// Another node, which has given it.
    Missed(Box<Missed>),
    /// The store that nodes share.
    Reading(Box<Reading>),
    /// The store has a question.
    Asked(Box<Asked>),
}

#[derive(Debug)]
pub(super) struct Asked {
    ticket: u64,
    is_page: bool,
    /// The client is told a loss, whatever the answer.
    is_loss: bool,
    /// The attach that is answered once it is known where it begins.
    reply: Option<AttachReply>,
}

impl Replay {
    /// For who has all of this position, and some that is behind the place unless that `is_exact`.
    pub(super) fn from_ring(channel: &Arc<Channel>, place: Spot, has: Serial, is_exact: bool) -> Self {
        let here = channel.position_at(place);
        let (position, has) = match is_exact {
            true => (if here.is_empty() { has } else { here }, None),
            false => (here.join(&has), Some(Arc::new(has))),
        };
        let after = After::Place { place, position, has };
        Self { channel: Arc::clone(channel), after, source: Source::Ring }
    }

    /// Up to where the client has everything.
    pub(super) fn position(&self) -> Serial {
        match &self.after {
            After::Place { position, .. } | After::Position { position, .. } => position.clone(),
            After::Stored(stamp) => Serial::single(stamp.incarnation, stamp.sequence),
        }
    }

    /// Where it stands in the channel on this node, of this run.
    fn place(&self, incarnation: u64) -> Option<Spot> {
        match &self.after {
            After::Place { place, .. } => Some(*place),
            After::Position { .. } => None,
            After::Stored(stamp) => {
                let is_own = stamp.incarnation == incarnation;
                is_own.then(|| Spot::end(self.channel.place_of(stamp.sequence)))
            }
        }
    }

    /// The client is told a loss when the question has its answer.
    pub(super) fn waits_for_a_loss(&self) -> bool {
        matches!(&self.source, Source::Asked(asked) if asked.is_loss)
    }

    /// The attach that waits for it.
    pub(super) fn take_reply(&mut self) -> Option<AttachReply> {
        match &mut self.source {
            Source::Asked(asked) => asked.reply.take(),
            Source::Ring | Source::Stored(_) | Source::Missed(_) | Source::Reading(_) => None,
        }
    }
}

impl Open {
    /// Up to where it has been given the messages of a channel, while it is given what it missed.
    pub(super) fn replay_position(&self, channel: u64) -> Option<Serial> {
        self.replays.iter().find(|replay| replay.channel.number() == channel).map(Replay::position)
    }

    /// The replay whose turn it is. Of pages from the store one is under way at a time.
    fn next_replay(&self) -> Option<usize> {
        let awaits_page = |replay: &Replay| matches!(&replay.source, Source::Asked(asked) if asked.is_page);
        let awaits_page = self.replays.iter().any(awaits_page);
        self.replays.iter().position(|replay| match &replay.source {
            Source::Ring | Source::Missed(_) => true,
            Source::Stored(_) | Source::Reading(_) => !awaits_page,
            Source::Asked(_) => false,
        })
    }
}

impl Shard {
    /// Tells the client where it stands, after its subscription.
    pub(super) fn say_attached(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        reply: &AttachReply,
        standing: &Standing,
    ) {
        let presence = self.set_modes(connection, slot, &reply.channel);
        let mut outputs = Vec::new();
        if let Some(open) = connection.open_mut() {
            let cx = context(&self.services, self.epoch_ms);
            open.session.attached(cx, reply, standing, presence, &mut outputs);
        }
        self.run_outputs(connection, slot, outputs);
        self.watch_occupancy(connection, slot, &reply.channel);
    }

    /// A replay from the store that begins with a question where to begin.
    pub(super) fn replay_stored(
        &mut self,
        open: &Open,
        (slot, generation): (u32, u32),
        channel: &Arc<Channel>,
        question: Question,
        reply: Option<AttachReply>,
    ) -> Replay {
        let after = match &question {
            Question::After { after, .. } => *after,
            Question::Back { mark, .. } => {
                Stamp { incarnation: self.services.hub.incarnation(), sequence: *mark }
            }
            Question::Page { place, .. } => place.after,
            Question::Elsewhere { .. }
            | Question::BackElsewhere { .. }
            | Question::Read { .. }
            | Question::Lost { .. } => channel.mark().own,
        };
        let source = self.ask(open, (slot, generation), channel, question, reply);
        Replay { channel: Arc::clone(channel), after: After::Stored(after), source }
    }

    pub(super) fn ask(
        &mut self,
        open: &Open,
        (slot, generation): (u32, u32),
        channel: &Arc<Channel>,
        question: Question,
        reply: Option<AttachReply>,
    ) -> Source {
        self.next_question += 1;
        let ticket = self.next_question;
        let is_page = matches!(question, Question::Page { .. } | Question::Read { .. });
        let is_loss = matches!(question, Question::Lost { .. });
        let asked = Asked { ticket, is_page, is_loss, reply };
        let policy = open.session.principal().account.policy(channel.key().channel());
        let reply = Reply::new(Arc::clone(&self.handle), slot, generation, ticket);
        self.services.backlog.ask(Ask { channel: Arc::clone(channel), policy, question, reply });
        Source::Asked(Box::new(asked))
    }

    /// The connection takes no messages of the channel any more.
    pub(super) fn end_replay(&mut self, connection: &mut Connection, slot: u32, number: u64) {
        let Some(open) = connection.open_mut() else { return };
        let Some(place) = open.replays.iter().position(|replay| replay.channel.number() == number) else {
            return;
        };
        let mut replay = open.replays.swap_remove(place);
        let position = self.go_live(slot, &replay);
        if let Some(reply) = replay.take_reply() {
            // What it missed is messages, which it does not take.
            self.say_attached(connection, slot, &reply, &Standing { position, resumed: true, warning: None });
        }
    }

    /// Delivery goes on with what is published from now on.
    pub(super) fn go_live(&mut self, slot: u32, replay: &Replay) -> Serial {
        let mark = replay.channel.mark();
        self.subscribers.go_live(replay.channel.number(), slot, mark.place);
        mark.serial()
    }

    /// The connection's socket has room for more of what it missed, if it missed something.
    pub(super) fn want_replay(&mut self, connection: &mut Connection, slot: u32) {
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

    /// One pull for one of the connection's replays; the others have their turn after it.
    fn replay(&mut self, connection: &mut Connection, slot: u32) {
        if connection.outbox.bytes() >= LOW_BYTES {
            return;
        }
        let generation = connection.generation;
        let Stage::Open(open) = &mut connection.stage else { return };
        let Some(turn) = open.next_replay() else { return };
        let mut replay = open.replays.remove(turn);
        let incarnation = self.services.hub.incarnation();
        let place = replay.place(incarnation);
        let pulled = place.and_then(|place| Some((place, replay.channel.pull(place, PULL_BYTES)?)));
        let source = std::mem::replace(&mut replay.source, Source::Ring);
        match (pulled, source) {
            (Some((place, pulled)), _) => {
                if !matches!(replay.after, After::Place { .. }) {
                    replay = Replay::from_ring(&replay.channel, place, replay.position(), true);
                }
                replay.source = Source::Ring;
                self.replay_recent(connection, slot, replay, &pulled);
            }
            (None, Source::Stored(place)) => {
                let format = open.session.format();
                let without = (!open.echo).then(|| open.session.connection_id());
                let question = Question::Page { place: *place, format, without };
                replay.source = self.ask(open, (slot, generation), &replay.channel, question, None);
                open.replays.push(replay);
            }
            (None, Source::Missed(missed)) => self.replay_missed(connection, slot, replay, missed),
            (None, Source::Reading(reading)) => {
                let format = open.session.format();
                let without = (!open.echo).then(|| open.session.connection_id());
                let question = Question::Read { reading, format, without };
                replay.source = self.ask(open, (slot, generation), &replay.channel, question, None);
                open.replays.push(replay);
            }
            // It fell behind what is kept.
            (None, Source::Ring | Source::Asked(_)) if self.services.hub.is_clustered() => {
                let (channel, position) = (Arc::clone(&replay.channel), replay.position());
                if position.is_empty() {
                    return self.lose(connection, slot, &channel);
                }
                // It was let in to all of this before.
                let from = (position, channel.mark(), None);
                let replay = self.replay_of_others(open, (slot, generation), &channel, from, None);
                open.replays.push(replay);
            }
            (None, Source::Ring | Source::Asked(_)) => {
                let channel = replay.channel;
                if open.session.principal().account.policy(channel.key().channel()).history {
                    // It was let in to all of this before.
                    let after = match replay.after {
                        After::Place { position, .. } | After::Position { position, .. } => {
                            let sequence = position.sequence_of(incarnation).unwrap_or(0);
                            Stamp { incarnation, sequence }
                        }
                        After::Stored(after) => after,
                    };
                    let mark = channel.mark().own.sequence;
                    let question = Question::After { after, mark, back_ms: None };
                    let stored = self.replay_stored(open, (slot, generation), &channel, question, None);
                    open.replays.push(stored);
                } else {
                    self.lose(connection, slot, &channel);
                }
            }
        }
        if connection.outbox.is_empty() {
            self.want_replay(connection, slot);
        }
    }

    fn replay_recent(&mut self, connection: &mut Connection, slot: u32, mut replay: Replay, pulled: &Pulled) {
        let Stage::Open(open) = &mut connection.stage else { return };
        let Pulled { deliveries, is_end } = pulled;
        let (format, own) = (open.session.format(), open.session.connection_id());
        let After::Place { place, position, has } = &mut replay.after else { return };
        let (after, has) = (place.place, has.as_deref());
        if let Some(last) = deliveries.last() {
            place.place = last.place();
            *position = has.map_or_else(|| last.mark().serial(), |has| last.mark().serial().join(has));
        }
        let heard = deliveries.iter().filter(|one| open.echo || one.connection_id() != own);
        let mut handed = Amount::default();
        let frames: Vec<Bytes> = heard
            .filter(|one| has.is_none_or(|has| !one.is_covered(has)))
            .map(|one| {
                handed.add(one.amount_after(after));
                match has {
                    None => one.frame_after(format, after),
                    Some(has) => one.frame_beside(format, has),
                }
            })
            .collect();
        if *is_end {
            self.subscribers.go_live(replay.channel.number(), slot, place.place);
        } else {
            open.replays.push(replay);
        }
        self.hand(connection, slot, frames, handed);
    }

    /// Puts what was missed into the outbox.
    pub(super) fn hand(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        frames: Vec<Bytes>,
        handed: Amount,
    ) {
        let Stage::Open(open) = &mut connection.stage else { return };
        connection.outbox.push_replay(frames.into_iter());
        self.metrics.deliveries.increment(handed.count);
        let usage = &open.session.principal().account.usage;
        usage.count(UsageKind::Deliver, handed.count, handed.bytes);
        if !connection.outbox.is_empty() && !connection.in_dirty && connection.blocked_ms.is_none() {
            connection.in_dirty = true;
            self.dirty.push_back(slot);
        }
    }

    /// An answer of the store.
    pub(super) fn found(&mut self, slot: u32, generation: u32, ticket: u64, found: Found) {
        if !self.is_still(slot, generation) {
            return;
        }
        let Some(mut connection) = self.slots[slot as usize].take() else { return };
        self.take_found(&mut connection, slot, ticket, found);
        self.want_replay(&mut connection, slot);
        self.unpause(&mut connection, slot);
        self.slots[slot as usize] = Some(connection);
    }

    fn take_found(&mut self, connection: &mut Connection, slot: u32, ticket: u64, found: Found) {
        let Some(open) = connection.open_mut() else { return };
        // Detached meanwhile, it has no use for the answer.
        let waits =
            |replay: &Replay| matches!(&replay.source, Source::Asked(asked) if asked.ticket == ticket);
        let Some(turn) = open.replays.iter().position(waits) else { return };
        let mut replay = open.replays.remove(turn);
        let reply = replay.take_reply();
        let (place, is_cut, page) = match found {
            Found::Nothing => return self.give_up(connection, slot, &replay, reply.as_ref()),
            Found::Recent { after, is_exact } => {
                return self.replay_recent_of_others(
                    connection,
                    slot,
                    &replay,
                    reply.as_ref(),
                    (after, is_exact),
                );
            }
            Found::Back { recent, is_cut, is_stored } => {
                let warning = if is_stored { Some(NOT_READ) } else { cut(&recent, is_cut) };
                return self.rewind_recent(
                    connection,
                    slot,
                    &replay,
                    reply.as_ref(),
                    (recent.after, warning),
                );
            }
            Found::Elsewhere(missed) => {
                return self.replay_elsewhere(connection, slot, replay, reply.as_ref(), missed);
            }
            Found::Reading { reading, is_cut } => {
                return self.begin_reading(connection, slot, replay, reply.as_ref(), (reading, is_cut));
            }
            Found::Read { frames, amount, reading, is_end } => {
                self.read_on(connection, replay, reading, is_end);
                return self.hand(connection, slot, frames, amount);
            }
            Found::Begin { place, is_cut } => (place, is_cut, None),
            Found::Page(page) => (page.place, false, Some((page.frames, page.amount))),
        };
        replay.after = After::Stored(place.after);
        if page.is_none()
            && let Some(subscription) = open.subscription_mut(replay.channel.key().name())
            && subscription.since != Subscription::NEVER
        {
            let is_own = place.after.incarnation == self.services.hub.incarnation();
            let since = if is_own { place.after.sequence } else { 0 };
            subscription.since = subscription.since.min(since);
        }
        replay.source = Source::Stored(Box::new(place));
        open.replays.push(replay);
        if let Some(reply) = reply {
            let position = Serial::single(place.after.incarnation, place.after.sequence);
            let warning = is_cut.then_some(CUT_BY_CAPABILITY);
            let standing = Standing { position, resumed: !reply.is_rewind(), warning };
            self.say_attached(connection, slot, &reply, &standing);
        }
        if let Some((frames, amount)) = page {
            self.hand(connection, slot, frames, amount);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::{Hub, Numbering};
    use crate::model::{AccountId, ChannelKey, ChannelName, Clock, ConnectionId, Limits, Message, Published};

    const THERE: u64 = 77;

    /// Keeps no recent messages, so that positions of before are not known here any more.
    fn attached() -> (Hub, ChannelKey, Arc<Channel>) {
        let limits = Limits { rings_bytes: 0, ..Limits::default() };
        let hub = Hub::new(Vec::new(), Clock::system(), &limits);
        let key = ChannelKey::new(AccountId::new("acme"), ChannelName::of("a"));
        let (channel, _) = hub.attach(&key, 0);
        hub.heard(&key, channel.number(), Stamp { incarnation: THERE, sequence: 5 });
        (hub, key, channel)
    }

    fn publish(hub: &Hub, key: &ChannelKey) {
        let from = ConnectionId::from_bytes([1; 16]);
        hub.publish(key, 1, |Numbering { incarnation, first_sequence: sequence, timestamp_ms }| {
            let message =
                Message { id: "m".into(), id_given: false, sequence, name: None, data: None, extras: None };
            Published::new(key.clone(), incarnation, timestamp_ms, from, None, "k".into(), vec![message])
        });
    }

    #[test]
    fn client_takes_channel_position_or_keeps_own_if_unknown() {
        let (hub, key, channel) = attached();
        let before = channel.mark();
        let at = Spot::end(before.place);
        let has = Serial::single(THERE, 5);
        let replay = || Replay::from_ring(&channel, at, has.clone(), true);
        assert_eq!(replay().position(), before.serial());
        publish(&hub, &key);
        assert_eq!(channel.position_at(at), Serial::default(), "it is not known any more");
        assert_eq!(replay().position(), has);
    }

    #[test]
    fn client_with_part_of_what_follows_gets_joined_position() {
        let (_hub, _key, channel) = attached();
        let before = channel.mark();
        let has = Serial::single(THERE, 7);
        let replay = Replay::from_ring(&channel, Spot::end(before.place), has.clone(), false);
        assert_eq!(replay.position(), before.serial().join(&has));
        assert!(matches!(&replay.after, After::Place { has: Some(kept), .. } if **kept == has));
    }
}
