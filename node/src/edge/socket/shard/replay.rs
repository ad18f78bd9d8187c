//! What a client is given of what was published before it attached, as fast as its socket takes it: from the recent
//! messages of the channel while they reach back so far, else from the store.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use fanfare_proto::serial::Serial;

use super::super::backlog::{Ask, Found, Place, Question, Reply};
use super::super::connection::{Connection, Open, Stage, Subscription};
use super::{SLICE, Shard, context};
use crate::hub::{Channel, Pulled};
use crate::model::{Amount, Stamp, UsageKind};
use crate::session::{AttachReply, Standing};

/// What one pull takes from a ring.
const PULL_BYTES: usize = 64 * 1024;
/// More is pulled once less than this waits for the socket.
const LOW_BYTES: usize = 32 * 1024;
/// Why a rewind gave less than was asked for.
pub(super) const CUT_BY_CAPABILITY: &str =
    "rewind was cut to the resume window: the capability has no history here";
const NOT_READ: &str = "rewind was cut: the history could not be read";

/// A channel of which a connection is given what it missed; until it has that, deliveries pass it by.
#[derive(Debug)]
pub(in crate::edge::socket) struct Replay {
    pub(super) channel: Arc<Channel>,
    /// It has all up to here.
    pub(super) after: Stamp,
    pub(super) source: Source,
}

#[derive(Debug)]
pub(super) enum Source {
    /// The recent messages of the channel.
    Ring,
    /// The store, from this place on.
    Stored(Box<Place>),
    /// The store has a question.
    Asked(Box<Asked>),
}

#[derive(Debug)]
pub(super) struct Asked {
    ticket: u64,
    is_page: bool,
    /// The attach that is answered once it is known where it begins.
    reply: Option<AttachReply>,
}

impl Replay {
    pub(super) fn from_ring(channel: &Arc<Channel>, after: Stamp) -> Self {
        Self { channel: Arc::clone(channel), after, source: Source::Ring }
    }

    /// The attach that waits for it.
    pub(super) fn take_reply(&mut self) -> Option<AttachReply> {
        match &mut self.source {
            Source::Asked(asked) => asked.reply.take(),
            Source::Ring | Source::Stored(_) => None,
        }
    }
}

impl Open {
    /// Up to where it has been given the messages of a channel, while it is given what it missed.
    pub(super) fn replay_position(&self, channel: u64) -> Option<Stamp> {
        self.replays.iter().find(|replay| replay.channel.number() == channel).map(|replay| replay.after)
    }

    /// The replay whose turn it is. Of pages from the store one is under way at a time.
    fn next_replay(&self) -> Option<usize> {
        let awaits_page = |replay: &Replay| matches!(&replay.source, Source::Asked(asked) if asked.is_page);
        let awaits_page = self.replays.iter().any(awaits_page);
        self.replays.iter().position(|replay| match &replay.source {
            Source::Ring => true,
            Source::Stored(_) => !awaits_page,
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
        };
        let source = self.ask(open, (slot, generation), channel, question, reply);
        Replay { channel: Arc::clone(channel), after, source }
    }

    fn ask(
        &mut self,
        open: &Open,
        (slot, generation): (u32, u32),
        channel: &Arc<Channel>,
        question: Question,
        reply: Option<AttachReply>,
    ) -> Source {
        self.next_question += 1;
        let ticket = self.next_question;
        let asked = Asked { ticket, is_page: matches!(question, Question::Page { .. }), reply };
        let policy = open.session.principal().account.policy(channel.key().channel());
        let reply = Reply::new(Arc::clone(&self.handle), slot, generation, ticket);
        let (channel, retention_hours) = (Arc::clone(channel), policy.retention_hours);
        self.services.backlog.ask(Ask { channel, retention_hours, question, reply });
        Source::Asked(Box::new(asked))
    }

    /// The connection takes no messages of the channel any more.
    pub(super) fn end_replay(&mut self, connection: &mut Connection, slot: u32, number: u64) {
        let Some(open) = connection.open_mut() else { return };
        let Some(place) = open.replays.iter().position(|replay| replay.channel.number() == number) else {
            return;
        };
        let mut replay = open.replays.swap_remove(place);
        let mark = self.go_live(slot, &replay);
        if let Some(reply) = replay.take_reply() {
            // What it missed is messages, which it does not take.
            let position = Serial::single(mark.incarnation, mark.sequence);
            self.say_attached(connection, slot, &reply, &Standing { position, resumed: true, warning: None });
        }
    }

    /// Delivery goes on with what is published from now on.
    fn go_live(&mut self, slot: u32, replay: &Replay) -> Stamp {
        let sequence = replay.channel.sequence();
        self.subscribers.go_live(replay.channel.number(), slot, sequence);
        Stamp { incarnation: self.services.hub.incarnation(), sequence }
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
        let is_own = replay.after.incarnation == self.services.hub.incarnation();
        let pulled = is_own.then(|| replay.channel.pull(replay.after.sequence, PULL_BYTES)).flatten();
        match (pulled, replay.source) {
            (Some(pulled), _) => {
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
            // It fell behind what is kept.
            (None, Source::Ring | Source::Asked(_)) => {
                let (channel, after) = (replay.channel, replay.after);
                if open.session.principal().account.policy(channel.key().channel()).history {
                    // It was let in to all of this before.
                    let question = Question::After { after, mark: channel.sequence(), back_ms: None };
                    let stored = self.replay_stored(open, (slot, generation), &channel, question, None);
                    open.replays.push(stored);
                } else {
                    self.lose(connection, slot, &Replay::from_ring(&channel, after));
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
        let after = replay.after.sequence;
        replay.after.sequence = deliveries.last().map_or(after, |last| last.last().sequence);
        let heard = deliveries.iter().filter(|one| open.echo || one.published.connection_id != own);
        let mut handed = Amount::default();
        let frames: Vec<Bytes> = heard
            .map(|one| {
                handed.add(one.published.amount_after(after));
                one.frame_after(format, after)
            })
            .collect();
        if *is_end {
            self.subscribers.go_live(replay.channel.number(), slot, replay.after.sequence);
        } else {
            open.replays.push(replay);
        }
        self.hand(connection, slot, frames, handed);
    }

    /// Puts what was missed into the outbox.
    fn hand(&mut self, connection: &mut Connection, slot: u32, frames: Vec<Bytes>, handed: Amount) {
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
        let same = |connection: &Connection| connection.generation == generation;
        if !self.slots.get(slot as usize).and_then(Option::as_deref).is_some_and(same) {
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
            Found::Begin { place, is_cut } => (place, is_cut, None),
            Found::Page(page) => (page.place, false, Some((page.frames, page.amount))),
        };
        replay.after = place.after;
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

    /// The store does not have it.
    fn give_up(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        replay: &Replay,
        reply: Option<&AttachReply>,
    ) {
        let Some(reply) = reply else { return self.lose(connection, slot, replay) };
        let mark = self.go_live(slot, replay);
        let position = Serial::single(mark.incarnation, mark.sequence);
        let warning = reply.is_rewind().then_some(NOT_READ);
        self.say_attached(connection, slot, reply, &Standing { position, resumed: false, warning });
    }

    /// What follows is not there any more: the client is told, and delivery goes on from here.
    fn lose(&mut self, connection: &mut Connection, slot: u32, replay: &Replay) {
        let mark = self.go_live(slot, replay);
        let position = Serial::single(mark.incarnation, mark.sequence);
        let mut outputs = Vec::new();
        let presence = self.set_modes(connection, slot, replay.channel.key().name());
        if let Some(open) = connection.open_mut() {
            let name = replay.channel.key().name();
            open.session.continuity_lost(name, position, presence, &mut outputs);
        }
        self.run_outputs(connection, slot, outputs);
    }
}
