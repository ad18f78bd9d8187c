//! Attaching: where a connection begins in a channel.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::super::Input;
use super::super::backlog::Question;
use super::super::connection::Connection;
use super::Shard;
use super::replay::{CUT_BY_CAPABILITY, Replay};
use crate::hub::{Recent, Spot, Start, Subscriber, Waiter};
use crate::model::{ChannelKey, ChannelName, Operation};
use crate::session::{AttachReply, Begin, Rewind, Standing};
use crate::telemetry::count_loss;

/// Why a rewind gave less than was asked for.
const NOT_KEPT: &str = "rewind was cut: the channel keeps no history";

/// An attach on its way.
#[derive(Debug, Clone)]
pub struct Attaching {
    pub(super) reply: AttachReply,
    pub(super) delivers: bool,
    pub(super) begin: Begin,
}

impl Shard {
    /// Attaches, at once or when the other nodes forward the channel, and answers when it is known where it begins.
    pub(super) fn attach(&mut self, connection: &mut Connection, slot: u32, attaching: Attaching) {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return };
        let is_new = open.subscription_mut(&attaching.reply.channel).is_none();
        if attaching.delivers && is_new && self.services.hub.is_clustered() {
            let key = open.session.principal().channel(attaching.reply.channel.clone());
            let waiter = || {
                let (handle, key) = (Arc::clone(&self.handle), key.clone());
                let attaching = Box::new(attaching.clone());
                Box::new(move || handle.push(Input::Joined { slot, generation, key, attaching })) as Waiter
            };
            if self.services.hub.join(&key, self.index, waiter).is_none() {
                return;
            }
        }
        let Attaching { reply, delivers, begin } = attaching;
        let standing = self.subscribe(connection, slot, &reply, delivers, begin);
        self.note_attachment(connection, slot, &reply.channel);
        if let Some(standing) = standing {
            self.say_attached(connection, slot, &reply, &standing);
        }
    }

    /// An attach that waited for other nodes goes on.
    pub(super) fn joined(&mut self, slot: u32, generation: u32, key: &ChannelKey, mut attaching: Attaching) {
        attaching.delivers = false;
        if self.is_still(slot, generation)
            && let Some(mut connection) = self.slots[slot as usize].take()
        {
            if let Some(open) = connection.open_mut() {
                // Meanwhile its modes may have been changed, or taken away.
                attaching.delivers = open.session.is_delivered(&attaching.reply.channel);
                let is_there = open.subscription_mut(&attaching.reply.channel).is_some();
                if is_there && attaching.begin != Begin::Kept {
                    attaching.begin = Begin::Now;
                }
                self.attach(&mut connection, slot, attaching.clone());
            }
            self.unpause(&mut connection, slot);
            self.slots[slot as usize] = Some(connection);
        }
        if !attaching.delivers
            && let Some(channel) = self.services.hub.live(key)
            && self.subscribers.channel(channel.number()).is_none()
        {
            self.services.hub.detach(&channel, self.index);
        }
    }

    /// Where the channel stands for this connection: the position before the first frame that follows. None when that is
    /// asked of the store, which answers the attach.
    pub(super) fn subscribe(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        reply: &AttachReply,
        delivers: bool,
        begin: Begin,
    ) -> Option<Standing> {
        match begin {
            Begin::Now => {
                Some(standing(self.subscribe_now(connection, slot, &reply.channel, delivers), false))
            }
            Begin::Kept => {
                Some(standing(self.subscribe_now(connection, slot, &reply.channel, delivers), true))
            }
            Begin::After(position) => {
                let standing = self.subscribe_after(connection, slot, reply, delivers, position);
                if standing.as_ref().is_some_and(|standing| !standing.resumed) {
                    count_loss();
                }
                standing
            }
            Begin::Back(rewind) => self.subscribe_back(connection, slot, reply, rewind),
        }
    }

    fn subscribe_now(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        channel: &ChannelName,
        delivers: bool,
    ) -> Serial {
        // It has ended meanwhile.
        let Some(open) = connection.open_mut() else { return Serial::default() };
        let key = open.session.principal().channel(channel.clone());
        let present = open.subscription_mut(channel).map(|subscription| subscription.number);
        match (present, delivers) {
            (Some(number), true) => {
                if let Some(own) = open.replay_position(number) {
                    return own;
                }
                let own = self.subscribers.channel(number).zip(self.subscribers.position(number, slot));
                own.map_or_else(
                    || self.services.hub.position(&key).serial(),
                    |(channel, place)| channel.position_at(Spot::end(place)),
                )
            }
            (None, true) => {
                let (channel_state, mark) = self.services.hub.attach(&key, self.index);
                open.add_subscription(channel.clone(), channel_state.number(), mark.place);
                let publishes = open.session.publishes(channel);
                let subscriber = Subscriber { publishes, ..Subscriber::new(slot, mark.place) };
                self.subscribers.add(&channel_state, subscriber);
                mark.serial()
            }
            (_, false) => {
                self.unsubscribe(connection, slot, channel);
                self.services.hub.position(&key).serial()
            }
        }
    }

    fn subscribe_after(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        reply: &AttachReply,
        delivers: bool,
        position: Serial,
    ) -> Option<Standing> {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return Some(standing(Serial::default(), false)) };
        let account = &open.session.principal().account;
        let policy = account.policy(reply.channel.as_str());
        let key = open.session.principal().channel(reply.channel.clone());
        let (messages, _) = open.session.takes(&reply.channel);
        let history = open.session.principal().allows(reply.channel.as_str(), Operation::History);
        let connection_id = open.session.connection_id();
        if !delivers {
            let mark = self.services.hub.position(&key);
            return Some(match self.services.hub.look_after(&key, &position) {
                Start::Live | Start::Replay { .. } => Standing { position, resumed: true, warning: None },
                Start::Unknown => standing(mark.serial(), false),
            });
        }
        let joined = self.services.hub.attach_after(&key, self.index, &position);
        let (channel, mark, services) = (joined.channel, joined.mark, &self.services);
        // Whose connection was let in to all that it asks for may have it however old it is.
        let is_own = |after| {
            let since = services.identities.since(connection_id, channel.number());
            since.is_some_and(|since| since <= after)
        };
        let back_ms = services.backlog.back_ms(history);
        let mut since = mark.place;
        let publishes = open.session.publishes(&reply.channel);
        let mut subscriber = Subscriber { publishes, ..Subscriber::new(slot, mark.place) };
        let resumed = Some(Standing { position: position.clone(), resumed: true, warning: None });
        let (standing, replay) = match joined.start {
            Start::Live => (resumed, None),
            // What it missed is messages, which it does not take.
            Start::Replay { .. } if !messages => (resumed, None),
            Start::Replay { after, is_exact } if joined.missed_ms <= back_ms || is_own(after.place) => {
                since = after.place;
                (resumed, Some(Replay::from_ring(&channel, after, position, is_exact)))
            }
            Start::Replay { .. } => (Some(standing(mark.serial(), false)), None),
            Start::Unknown if messages && services.hub.is_clustered() && !position.is_empty() => {
                let from = (position, mark, Some(back_ms));
                let at = (slot, generation);
                (None, Some(self.replay_of_others(open, at, &channel, from, Some(reply.clone()))))
            }
            Start::Unknown => match services.backlog.follows(&position, policy).filter(|_| messages) {
                None => (Some(standing(mark.serial(), false)), None),
                Some(after) => {
                    let is_own = after.incarnation == mark.own.incarnation && is_own(after.sequence);
                    since = if is_own { after.sequence } else { since };
                    let back_ms = (!is_own).then_some(back_ms);
                    let question = Question::After { after, mark: mark.own.sequence, back_ms };
                    let at = (slot, generation);
                    let replay = self.replay_stored(open, at, &channel, question, Some(reply.clone()));
                    (None, Some(replay))
                }
            },
        };
        open.add_subscription(reply.channel.clone(), channel.number(), since);
        if let Some(replay) = replay {
            subscriber.after_place = Subscriber::IN_REPLAY;
            open.replays.push(replay);
        }
        self.subscribers.add(&channel, subscriber);
        self.want_replay(connection, slot);
        standing
    }

    fn subscribe_back(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        reply: &AttachReply,
        rewind: Rewind,
    ) -> Option<Standing> {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return Some(standing(Serial::default(), false)) };
        let policy = open.session.principal().account.policy(reply.channel.as_str());
        let key = open.session.principal().channel(reply.channel.clone());
        let (channel, mark, recent) =
            self.services.hub.attach_back(&key, self.index, rewind.count, rewind.since_ms);
        let is_stored = policy.history && !recent.is_whole;
        let is_elsewhere = self.services.hub.is_clustered() && !recent.is_whole;
        let is_elsewhere = is_elsewhere && (is_stored || !recent.is_of_all);
        let since = if is_stored || is_elsewhere { mark.place } else { recent.after.place };
        open.add_subscription(reply.channel.clone(), channel.number(), since);
        let (standing, replay) = if is_elsewhere {
            let at = (slot, generation);
            (None, self.rewind_everywhere(open, at, &channel, (rewind, &mark), reply.clone()))
        } else if is_stored {
            let question = Question::Back { rewind, mark: mark.own.sequence };
            let at = (slot, generation);
            (None, self.replay_stored(open, at, &channel, question, Some(reply.clone())))
        } else {
            let is_cut = rewind.is_cut && recent.found < rewind.count;
            let replay = Replay::from_ring(&channel, recent.after, Serial::default(), true);
            let standing = Standing { warning: cut(&recent, is_cut), ..standing(replay.position(), false) };
            (Some(standing), replay)
        };
        open.replays.push(replay);
        let publishes = open.session.publishes(&reply.channel);
        let subscriber = Subscriber { publishes, ..Subscriber::new(slot, Subscriber::IN_REPLAY) };
        self.subscribers.add(&channel, subscriber);
        self.want_replay(connection, slot);
        standing
    }

    pub(super) fn unsubscribe(&mut self, connection: &mut Connection, slot: u32, channel: &ChannelName) {
        let Some(open) = connection.open_mut() else { return };
        let place = open.subscriptions.iter().position(|subscription| subscription.name == *channel);
        let Some(place) = place else { return };
        let number = open.subscriptions.swap_remove(place).number;
        let replay = open.replays.iter().position(|replay| replay.channel.number() == number);
        let replay = replay.map(|place| open.replays.remove(place));
        open.syncs.retain(|(channel, _)| *channel != number);
        self.remove_subscriber(number, slot);
        if let Some(mut replay) = replay
            && let Some(reply) = replay.take_reply()
        {
            self.say_attached(connection, slot, &reply, &standing(replay.position(), false));
        }
    }
}

/// Why the recent messages of a channel that keeps no others are not all that a rewind asks for.
pub(super) fn cut(recent: &Recent, is_cut: bool) -> Option<&'static str> {
    match (is_cut, recent.is_whole) {
        (_, false) => Some(NOT_KEPT),
        (true, true) => Some(CUT_BY_CAPABILITY),
        (false, true) => None,
    }
}

fn standing(position: Serial, resumed: bool) -> Standing {
    Standing { position, resumed, warning: None }
}
