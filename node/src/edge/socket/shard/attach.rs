//! Attach: the position at which a connection begins in a channel.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::super::Input;
use super::super::backlog::BacklogQuery;
use super::super::connection::SocketConnection;
use super::Shard;
use super::replay::{CUT_BY_CAPABILITY, Replay};
use crate::hub::{AttachWaiter, LocalOffset, ResumeStart, RewindStart, Subscriber};
use crate::model::{ChannelKey, ChannelName, Operation};
use crate::session::{AttachOutcome, AttachReply, DeliveryStart, Rewind};
use crate::telemetry::count_loss;

/// Warning for a rewind that returned less than was asked for.
const NOT_KEPT: &str = "rewind was cut: the channel keeps no history";

/// An attach that waits for its outcome.
#[derive(Debug, Clone)]
pub struct PendingAttach {
    pub(super) reply: AttachReply,
    pub(super) delivers: bool,
    pub(super) begin: DeliveryStart,
}

impl Shard {
    /// Attaches at once, or when the peers forward the channel. The client is answered when its starting position is known.
    pub(super) fn attach(&mut self, connection: &mut SocketConnection, slot: u32, attaching: PendingAttach) {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return };
        let is_new = open.subscription_mut(&attaching.reply.channel).is_none();
        if attaching.delivers && is_new && self.services.hub.is_clustered() {
            let key = open.session.principal().channel(attaching.reply.channel.clone());
            let waiter = || {
                let (handle, key) = (Arc::clone(&self.handle), key.clone());
                let attaching = Box::new(attaching.clone());
                Box::new(move || handle.push(Input::AttachReady { slot, generation, key, attaching }))
                    as AttachWaiter
            };
            if self.services.hub.join(&key, self.index, waiter).is_none() {
                return;
            }
        }
        let PendingAttach { reply, delivers, begin } = attaching;
        let outcome = self.subscribe(connection, slot, &reply, delivers, begin);
        self.note_attachment(connection, slot, &reply.channel);
        if let Some(outcome) = outcome {
            self.send_attached(connection, slot, &reply, &outcome);
        }
    }

    /// Continues an attach that waited for the peers.
    pub(super) fn continue_attach(
        &mut self,
        slot: u32,
        generation: u32,
        key: &ChannelKey,
        mut attaching: PendingAttach,
    ) {
        attaching.delivers = false;
        if self.is_current(slot, generation)
            && let Some(mut connection) = self.slots[slot as usize].take()
        {
            if let Some(open) = connection.open_mut() {
                // Its modes may have been changed or withdrawn meanwhile.
                attaching.delivers = open.session.is_delivered(&attaching.reply.channel);
                let is_there = open.subscription_mut(&attaching.reply.channel).is_some();
                if is_there && attaching.begin != DeliveryStart::Unchanged {
                    attaching.begin = DeliveryStart::Now;
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

    /// Subscribes the connection. Returns the position before the first frame that follows. None if a backlog query must find it, whose
    /// answer then completes the attach.
    pub(super) fn subscribe(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        reply: &AttachReply,
        delivers: bool,
        begin: DeliveryStart,
    ) -> Option<AttachOutcome> {
        match begin {
            DeliveryStart::Now => {
                Some(attach_outcome(self.subscribe_now(connection, slot, &reply.channel, delivers), false))
            }
            DeliveryStart::Unchanged => {
                Some(attach_outcome(self.subscribe_now(connection, slot, &reply.channel, delivers), true))
            }
            DeliveryStart::After(position) => {
                let outcome = self.subscribe_after(connection, slot, reply, delivers, position);
                if outcome.as_ref().is_some_and(|outcome| !outcome.resumed) {
                    count_loss();
                }
                outcome
            }
            DeliveryStart::Rewind(rewind) => self.subscribe_back(connection, slot, reply, rewind),
        }
    }

    fn subscribe_now(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &ChannelName,
        delivers: bool,
    ) -> Serial {
        // The session has ended meanwhile.
        let Some(open) = connection.open_mut() else { return Serial::default() };
        let key = open.session.principal().channel(channel.clone());
        let present = open.subscription_mut(channel).map(|subscription| subscription.number);
        match (present, delivers) {
            (Some(number), true) => {
                if let Some(own) = open.replay_position(number) {
                    return own;
                }
                let own =
                    self.subscribers.channel(number).zip(self.subscribers.delivered_offset(number, slot));
                own.map_or_else(
                    || self.services.hub.position(&key).serial(),
                    |(channel, offset)| channel.position_at(LocalOffset::end(offset)),
                )
            }
            (None, true) => {
                let (channel_state, attach_position) = self.services.hub.attach(&key, self.index);
                open.add_subscription(channel.clone(), channel_state.number(), attach_position.offset);
                let publishes = open.session.publishes(channel);
                let subscriber = Subscriber { publishes, ..Subscriber::new(slot, attach_position.offset) };
                self.subscribers.add(&channel_state, subscriber);
                attach_position.serial()
            }
            (_, false) => {
                self.unsubscribe(connection, slot, channel);
                self.services.hub.position(&key).serial()
            }
        }
    }

    fn subscribe_after(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        reply: &AttachReply,
        delivers: bool,
        position: Serial,
    ) -> Option<AttachOutcome> {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return Some(attach_outcome(Serial::default(), false)) };
        let account = &open.session.principal().account;
        let policy = account.policy(reply.channel.as_str());
        let key = open.session.principal().channel(reply.channel.clone());
        let (messages, _) = open.session.takes(&reply.channel);
        let history = open.session.principal().allows(reply.channel.as_str(), Operation::History);
        let connection_id = open.session.connection_id();
        if !delivers {
            let attach_position = self.services.hub.position(&key);
            return Some(match self.services.hub.resume_start(&key, &position) {
                ResumeStart::Live | ResumeStart::Replay { .. } => {
                    AttachOutcome { position, resumed: true, warning: None }
                }
                ResumeStart::Unknown => attach_outcome(attach_position.serial(), false),
            });
        }
        let joined = self.services.hub.attach_resuming(&key, self.index, &position);
        let (channel, attach_position, services) = (joined.channel, joined.position, &self.services);
        // A connection that had access to all of the missed messages before may have them, however old they are.
        let is_own = |after| {
            let since = services.session_registry.retained_since(connection_id, channel.number());
            since.is_some_and(|since| since <= after)
        };
        let back_ms = services.backlog.back_ms(history);
        let mut since = attach_position.offset;
        let publishes = open.session.publishes(&reply.channel);
        let mut subscriber = Subscriber { publishes, ..Subscriber::new(slot, attach_position.offset) };
        let resumed = Some(AttachOutcome { position: position.clone(), resumed: true, warning: None });
        let (outcome, replay) = match joined.start {
            ResumeStart::Live => (resumed, None),
            // Only messages were missed, and this connection takes none.
            ResumeStart::Replay { .. } if !messages => (resumed, None),
            ResumeStart::Replay { after, is_exact }
                if joined.missed_ms <= back_ms || is_own(after.offset) =>
            {
                since = after.offset;
                (resumed, Some(Replay::from_replay_buffer(&channel, after, position, is_exact)))
            }
            ResumeStart::Replay { .. } => (Some(attach_outcome(attach_position.serial(), false)), None),
            ResumeStart::Unknown if messages && services.hub.is_clustered() && !position.is_empty() => {
                let from = (position, attach_position, Some(back_ms));
                let at = (slot, generation);
                (None, Some(self.replay_from_cluster(open, at, &channel, from, Some(reply.clone()))))
            }
            ResumeStart::Unknown => match services.backlog.follows(&position, policy).filter(|_| messages) {
                None => (Some(attach_outcome(attach_position.serial(), false)), None),
                Some(after) => {
                    let is_own =
                        after.incarnation == attach_position.own.incarnation && is_own(after.sequence);
                    since = if is_own { after.sequence } else { since };
                    let back_ms = (!is_own).then_some(back_ms);
                    let question =
                        BacklogQuery::After { after, until_sequence: attach_position.own.sequence, back_ms };
                    let at = (slot, generation);
                    let replay = self.replay_stored(open, at, &channel, question, Some(reply.clone()));
                    (None, Some(replay))
                }
            },
        };
        open.add_subscription(reply.channel.clone(), channel.number(), since);
        if let Some(replay) = replay {
            subscriber.after_offset = Subscriber::IN_REPLAY;
            open.replays.push(replay);
        }
        self.subscribers.add(&channel, subscriber);
        self.schedule_replay(connection, slot);
        outcome
    }

    fn subscribe_back(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        reply: &AttachReply,
        rewind: Rewind,
    ) -> Option<AttachOutcome> {
        let generation = connection.generation;
        let Some(open) = connection.open_mut() else { return Some(attach_outcome(Serial::default(), false)) };
        let policy = open.session.principal().account.policy(reply.channel.as_str());
        let key = open.session.principal().channel(reply.channel.clone());
        let (channel, attach_position, recent) =
            self.services.hub.attach_with_rewind(&key, self.index, rewind.count, rewind.since_ms);
        let is_stored = policy.history && !recent.is_complete;
        let asks_peers = self.services.hub.is_clustered() && !recent.is_complete;
        let asks_peers = asks_peers && (is_stored || !recent.is_cluster_wide);
        let since = if is_stored || asks_peers { attach_position.offset } else { recent.after.offset };
        open.add_subscription(reply.channel.clone(), channel.number(), since);
        let (outcome, replay) = if asks_peers {
            let at = (slot, generation);
            (None, self.rewind_from_cluster(open, at, &channel, (rewind, &attach_position), reply.clone()))
        } else if is_stored {
            let question = BacklogQuery::Rewind { rewind, until_sequence: attach_position.own.sequence };
            let at = (slot, generation);
            (None, self.replay_stored(open, at, &channel, question, Some(reply.clone())))
        } else {
            let is_cut = rewind.is_cut && recent.found < rewind.count;
            let replay = Replay::from_replay_buffer(&channel, recent.after, Serial::default(), true);
            let outcome =
                AttachOutcome { warning: cut(&recent, is_cut), ..attach_outcome(replay.position(), false) };
            (Some(outcome), replay)
        };
        open.replays.push(replay);
        let publishes = open.session.publishes(&reply.channel);
        let subscriber = Subscriber { publishes, ..Subscriber::new(slot, Subscriber::IN_REPLAY) };
        self.subscribers.add(&channel, subscriber);
        self.schedule_replay(connection, slot);
        outcome
    }

    pub(super) fn unsubscribe(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &ChannelName,
    ) {
        let Some(open) = connection.open_mut() else { return };
        let index = open.subscriptions.iter().position(|subscription| subscription.name == *channel);
        let Some(index) = index else { return };
        let number = open.subscriptions.swap_remove(index).number;
        let replay = open.replays.iter().position(|replay| replay.channel.number() == number);
        let replay = replay.map(|index| open.replays.remove(index));
        open.syncs.retain(|(channel, _)| *channel != number);
        self.remove_subscriber(number, slot);
        if let Some(mut replay) = replay
            && let Some(reply) = replay.take_reply()
        {
            self.send_attached(connection, slot, &reply, &attach_outcome(replay.position(), false));
        }
    }
}

/// Warning for a rewind that the replay buffer alone answers; none if it is complete.
pub(super) fn cut(recent: &RewindStart, is_cut: bool) -> Option<&'static str> {
    match (is_cut, recent.is_complete) {
        (_, false) => Some(NOT_KEPT),
        (true, true) => Some(CUT_BY_CAPABILITY),
        (false, true) => None,
    }
}

fn attach_outcome(position: Serial, resumed: bool) -> AttachOutcome {
    AttachOutcome { position, resumed, warning: None }
}
