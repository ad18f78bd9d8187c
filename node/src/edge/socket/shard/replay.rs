//! Attaching, and what a client that comes back is given of what it missed, as fast as its socket takes it.

use std::sync::Arc;
use std::time::Instant;

use fanfare_proto::serial::Serial;

use super::super::connection::{Connection, Stage};
use super::{SLICE, Shard};
use crate::hub::{Channel, Pulled, Start, Subscriber};
use crate::model::{Amount, ChannelName, Stamp, UsageKind};
use crate::session::{Begin, Standing};

/// What one pull takes from a ring.
const PULL_BYTES: usize = 64 * 1024;
/// More is pulled once less than this waits for the socket.
const LOW_BYTES: usize = 32 * 1024;

/// Of a connection that has ended meanwhile.
const NOWHERE: Stamp = Stamp { incarnation: 0, sequence: 0 };

/// A channel of which a connection is given what it missed; until it has that, deliveries pass it by.
#[derive(Debug)]
pub(in crate::edge::socket) struct Replay {
    channel: Arc<Channel>,
    /// It has all up to here.
    after: u64,
}

impl Shard {
    /// Where the channel stands for this connection: the position before the first frame that follows.
    pub(super) fn subscribe(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        channel: &ChannelName,
        delivers: bool,
        begin: Begin,
    ) -> Standing {
        match begin {
            Begin::Now => standing(self.subscribe_now(connection, slot, channel, delivers), false),
            Begin::Kept => standing(self.subscribe_now(connection, slot, channel, delivers), true),
            Begin::After(position) => self.subscribe_after(connection, slot, channel, delivers, position),
        }
    }

    fn subscribe_now(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        channel: &ChannelName,
        delivers: bool,
    ) -> Stamp {
        let Some(open) = connection.open_mut() else { return NOWHERE };
        let key = open.session.principal().channel(channel.clone());
        let present = open.subscriptions.iter().find(|(name, _)| name == channel).map(|(_, number)| *number);
        match (present, delivers) {
            (Some(number), true) => {
                let replay = open.replays.iter().find(|replay| replay.channel.number() == number);
                let own = replay.map(|replay| replay.after);
                let own = own.or_else(|| self.subscribers.position(number, slot));
                let position = self.services.hub.position(&key);
                Stamp { sequence: own.unwrap_or(position.sequence), ..position }
            }
            (None, true) => {
                let (channel_state, mark) = self.services.hub.attach(&key, self.index);
                open.subscriptions.push((channel.clone(), channel_state.number()));
                self.subscribers.add(&channel_state, Subscriber::new(slot, mark.sequence));
                mark
            }
            (_, false) => {
                self.unsubscribe(connection, slot, channel);
                self.services.hub.position(&key)
            }
        }
    }

    fn subscribe_after(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        channel: &ChannelName,
        delivers: bool,
        position: Serial,
    ) -> Standing {
        let Some(open) = connection.open_mut() else {
            return standing(NOWHERE, false);
        };
        let key = open.session.principal().channel(channel.clone());
        let (messages, _) = open.session.takes(channel);
        if !delivers {
            let mark = self.services.hub.position(&key);
            return match self.services.hub.look_after(&key, &position) {
                Start::Live | Start::Replay { .. } => Standing { position, resumed: true, warning: None },
                Start::Unknown => standing(mark, false),
            };
        }
        let joined = self.services.hub.attach_after(&key, self.index, &position);
        let number = joined.channel.number();
        open.subscriptions.push((channel.clone(), number));
        let mut subscriber = Subscriber::new(slot, joined.mark.sequence);
        let standing = match joined.start {
            Start::Live => Standing { position, resumed: true, warning: None },
            // What it missed is messages, which it does not take.
            Start::Replay { .. } if !messages => Standing { position, resumed: true, warning: None },
            Start::Unknown => standing(joined.mark, false),
            Start::Replay { after } => {
                subscriber.after_sequence = Subscriber::IN_REPLAY;
                open.replays.push(Replay { channel: Arc::clone(&joined.channel), after });
                Standing { position, resumed: true, warning: None }
            }
        };
        self.subscribers.add(&joined.channel, subscriber);
        self.want_replay(connection, slot);
        standing
    }

    pub(super) fn unsubscribe(&mut self, connection: &mut Connection, slot: u32, channel: &ChannelName) {
        let Some(open) = connection.open_mut() else { return };
        let Some(place) = open.subscriptions.iter().position(|(name, _)| name == channel) else { return };
        let (_, number) = open.subscriptions.swap_remove(place);
        open.replays.retain(|replay| replay.channel.number() != number);
        open.syncs.retain(|(channel, _)| *channel != number);
        self.remove_subscriber(number, slot);
    }

    /// The connection takes no messages of the channel any more.
    pub(super) fn end_replay(&mut self, connection: &mut Connection, slot: u32, number: u64) {
        let Some(open) = connection.open_mut() else { return };
        let Some(place) = open.replays.iter().position(|replay| replay.channel.number() == number) else {
            return;
        };
        let replay = open.replays.swap_remove(place);
        self.subscribers.go_live(number, slot, replay.channel.sequence());
    }

    /// The connection's socket has room for more of what it missed, if it missed something.
    pub(super) fn want_replay(&mut self, connection: &mut Connection, slot: u32) {
        if connection.in_replaying || connection.outbox.bytes() >= LOW_BYTES {
            return;
        }
        if connection.open_mut().is_some_and(|open| !open.replays.is_empty()) {
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

    /// One pull for the first of the connection's replays; the others have their turn after it.
    fn replay(&mut self, connection: &mut Connection, slot: u32) {
        if connection.outbox.bytes() >= LOW_BYTES {
            return;
        }
        let Stage::Open(open) = &mut connection.stage else { return };
        if open.replays.is_empty() {
            return;
        }
        let mut replay = open.replays.remove(0);
        let number = replay.channel.number();
        match replay.channel.pull(replay.after, PULL_BYTES) {
            None => self.lose(connection, slot, &replay),
            Some(Pulled { deliveries, is_end }) => {
                let (format, own) = (open.session.format(), open.session.connection_id());
                let after = replay.after;
                replay.after = deliveries.last().map_or(after, |last| last.last().sequence);
                let heard = deliveries.iter().filter(|one| open.echo || one.published.connection_id != own);
                let mut handed = Amount::default();
                let frames = heard.map(|one| {
                    handed.add(one.published.amount_after(after));
                    one.frame_after(format, after)
                });
                connection.outbox.push_replay(frames);
                self.metrics.deliveries.increment(handed.count);
                let usage = &open.session.principal().account.usage;
                usage.count(UsageKind::Deliver, handed.count, handed.bytes);
                if is_end {
                    self.subscribers.go_live(number, slot, replay.after);
                } else {
                    open.replays.push(replay);
                }
                if !connection.outbox.is_empty() && !connection.in_dirty && connection.blocked_ms.is_none() {
                    connection.in_dirty = true;
                    self.dirty.push_back(slot);
                }
            }
        }
        if connection.outbox.is_empty() {
            self.want_replay(connection, slot);
        }
    }

    /// What follows is not there any more: the client is told, and delivery goes on from here.
    fn lose(&mut self, connection: &mut Connection, slot: u32, replay: &Replay) {
        let sequence = replay.channel.sequence();
        self.subscribers.go_live(replay.channel.number(), slot, sequence);
        let position = Serial::single(self.services.hub.incarnation(), sequence);
        let mut outputs = Vec::new();
        let presence = self.set_modes(connection, slot, replay.channel.key().name());
        if let Some(open) = connection.open_mut() {
            let name = replay.channel.key().name();
            open.session.continuity_lost(name, position, presence, &mut outputs);
        }
        self.run_outputs(connection, slot, outputs);
    }
}

fn standing(position: Stamp, resumed: bool) -> Standing {
    let position = Serial::single(position.incarnation, position.sequence);
    Standing { position, resumed, warning: None }
}
