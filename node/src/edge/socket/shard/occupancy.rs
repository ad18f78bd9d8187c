//! How many connections of this shard are attached to a channel, and who of them is told how many there are in all.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fanfare_proto::frame::Format;
use tokio::sync::oneshot;

use super::super::connection::{Connection, Stage};
use super::super::occupancy::Told;
use super::Shard;
use crate::model::{AttachedCount, ChannelKey, ChannelName};
use crate::session::Session;

/// Connections that are attached to channels of which nothing is delivered to them, by their slots. All of them may publish.
#[derive(Debug, Default)]
pub(super) struct Silent(HashMap<ChannelKey, HashSet<u32>>);

impl Silent {
    fn set(&mut self, key: ChannelKey, slot: u32, is_silent: bool) {
        if is_silent {
            self.0.entry(key).or_default().insert(slot);
        } else if let Some(slots) = self.0.get_mut(&key)
            && slots.remove(&slot)
            && slots.is_empty()
        {
            self.0.remove(&key);
        }
    }

    /// The connection of the slot is gone.
    pub(super) fn end(&mut self, session: &Session, slot: u32) {
        if self.0.is_empty() {
            return;
        }
        for channel in session.channels().filter(|channel| session.is_silent(channel)) {
            self.set(session.principal().channel(channel.clone()), slot, false);
        }
    }

    fn count(&self, key: &ChannelKey) -> u64 {
        self.0.get(key).map_or(0, |slots| slots.len() as u64)
    }
}

/// Connections that are told how many are at a channel.
#[derive(Debug, Default)]
pub(super) struct Watching(HashMap<ChannelKey, Watchers>);

#[derive(Debug, Default)]
struct Watchers {
    slots: HashSet<u32>,
    /// The count that all of them were told last.
    told: Option<Arc<Told>>,
}

impl Watching {
    /// False when the slot was the last one of the channel.
    fn remove(&mut self, key: &ChannelKey, slot: u32) -> bool {
        let Some(watchers) = self.0.get_mut(key) else { return true };
        watchers.slots.remove(&slot);
        let are_left = !watchers.slots.is_empty();
        if !are_left {
            self.0.remove(key);
        }
        are_left
    }

    /// The connection of the slot is gone; `unwatched` is given the channels of which it was the last.
    pub(super) fn end(&mut self, session: &Session, slot: u32, unwatched: impl Fn(&ChannelKey)) {
        if self.0.is_empty() {
            return;
        }
        for channel in session.channels().filter(|channel| session.watches(channel)) {
            let key = session.principal().channel(channel.clone());
            if !self.remove(&key, slot) {
                unwatched(&key);
            }
        }
    }
}

impl Shard {
    /// After op 9 or 11, or a change of what the credential grants: the client is told how many are at the channel, if it asks for that.
    pub(super) fn watch_occupancy(&mut self, connection: &mut Connection, slot: u32, channel: &ChannelName) {
        let Some(open) = connection.open_mut() else { return };
        let (watches, format) = (open.session.watches(channel), open.session.format());
        if !watches && self.watching.0.is_empty() {
            return;
        }
        let key = open.session.principal().channel(channel.clone());
        if !watches {
            if !self.watching.remove(&key, slot) {
                self.handle.watches.end(&key, self.index);
            }
            return;
        }
        let begin = || Watchers { slots: HashSet::new(), told: self.handle.watches.begin(&key, self.index) };
        let watchers = self.watching.0.entry(key.clone()).or_insert_with(begin);
        watchers.slots.insert(slot);
        // Else it comes when it is counted.
        if let Some(frame) = watchers.told.as_ref().map(|told| told.frame(format)) {
            self.send(connection, slot, frame);
        }
    }

    pub(super) fn tell_occupancy(&mut self, told: Arc<Told>) {
        let Some(watchers) = self.watching.0.get_mut(told.key()) else { return };
        // It was on its way when the last client went, and another one came since.
        if watchers.told.as_ref().is_some_and(|newer| !told.is_after(newer)) {
            return;
        }
        let [json, msgpack] = [Format::Json, Format::MsgPack].map(|format| told.frame(format));
        let mut over = Vec::new();
        watchers.told = Some(told);
        for slot in &watchers.slots {
            let Some(connection) = self.slots[*slot as usize].as_deref_mut() else { continue };
            let Stage::Open(open) = &connection.stage else { continue };
            let frame = match open.session.format() {
                Format::Json => &json,
                Format::MsgPack => &msgpack,
            };
            connection.outbox.push(frame.clone());
            if connection.outbox.live_bytes() > self.services.limits.outbox_bytes {
                over.push(*slot);
            }
            if !connection.in_dirty && connection.blocked_ms.is_none() {
                connection.in_dirty = true;
                self.dirty.push_back(*slot);
            }
        }
        for slot in over {
            self.flush(slot);
            self.check_outbox(slot, 0);
        }
    }

    /// After a change of what a connection is attached to.
    pub(super) fn note_attachment(&mut self, connection: &mut Connection, slot: u32, channel: &ChannelName) {
        let Some(open) = connection.open_mut() else { return };
        self.handle.occupations.note(open.session.principal(), channel);
        let is_silent = open.session.is_silent(channel);
        if is_silent || !self.silent.0.is_empty() {
            self.silent.set(open.session.principal().channel(channel.clone()), slot, is_silent);
        }
    }

    /// After a change of what the credential grants on a channel of which something is delivered.
    pub(super) fn recount(&mut self, connection: &mut Connection, slot: u32, channel: &ChannelName) {
        let Some(open) = connection.open_mut() else { return };
        let publishes = open.session.publishes(channel);
        if let Some(number) = open.subscription_mut(channel).map(|subscription| subscription.number) {
            self.subscribers.set(number, slot, |own| own.publishes = publishes);
        }
    }

    pub(super) fn count_attached(&self, keys: &[ChannelKey], reply: oneshot::Sender<Vec<AttachedCount>>) {
        let count = |key: &ChannelKey| {
            let live = self.services.hub.live(key);
            let mut count = live.map(|channel| self.subscribers.count(channel.number())).unwrap_or_default();
            let silent = self.silent.count(key);
            count += AttachedCount { connections: silent, publishers: silent, ..AttachedCount::default() };
            count
        };
        // The asker may have gone meanwhile.
        reply.send(keys.iter().map(count).collect()).ok();
    }
}
