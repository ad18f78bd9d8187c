//! Occupancy in a shard: counts of attached connections, and the clients that are notified.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use fanfare_proto::frame::Format;
use tokio::sync::oneshot;

use super::super::connection::{ConnectionStage, SocketConnection};
use super::super::occupancy::OccupancyNotice;
use super::Shard;
use crate::model::{AttachedCount, ChannelKey, ChannelName};
use crate::session::Session;

/// Connections attached to channels without any delivery, by slot. All of them may publish.
#[derive(Debug, Default)]
pub(super) struct SilentAttachments(HashMap<ChannelKey, HashSet<u32>>);

impl SilentAttachments {
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

    /// Removes the slot of a connection that has ended.
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

/// Connections that watch the occupancy of channels.
#[derive(Debug, Default)]
pub(super) struct OccupancyWatchers(HashMap<ChannelKey, ChannelWatchers>);

#[derive(Debug, Default)]
struct ChannelWatchers {
    slots: HashSet<u32>,
    /// The last notice for all of these clients.
    last_notice: Option<Arc<OccupancyNotice>>,
}

impl OccupancyWatchers {
    /// Removes a slot. False when it was the last one of the channel.
    fn remove(&mut self, key: &ChannelKey, slot: u32) -> bool {
        let Some(watchers) = self.0.get_mut(key) else { return true };
        watchers.slots.remove(&slot);
        let are_left = !watchers.slots.is_empty();
        if !are_left {
            self.0.remove(key);
        }
        are_left
    }

    /// Removes the slot of a connection that has ended; `unwatched` is called for each channel without further watchers.
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
    /// Updates the watcher after op 9 or 11, or after a change of the capability. A new watcher is sent the last notice.
    pub(super) fn watch_occupancy(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &ChannelName,
    ) {
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
        let begin = || ChannelWatchers {
            slots: HashSet::new(),
            last_notice: self.handle.watches.begin(&key, self.index),
        };
        let watchers = self.watching.0.entry(key.clone()).or_insert_with(begin);
        watchers.slots.insert(slot);
        // Without a notice yet the client is told after the next count.
        if let Some(frame) = watchers.last_notice.as_ref().map(|notice| notice.frame(format)) {
            self.send(connection, slot, frame);
        }
    }

    pub(super) fn send_occupancy(&mut self, notice: Arc<OccupancyNotice>) {
        let Some(watchers) = self.watching.0.get_mut(notice.key()) else { return };
        // The notice was on its way when the last watcher left, and a new one came since.
        if watchers.last_notice.as_ref().is_some_and(|newer| !notice.is_after(newer)) {
            return;
        }
        let [json, msgpack] = [Format::Json, Format::MsgPack].map(|format| notice.frame(format));
        let mut over = Vec::new();
        watchers.last_notice = Some(notice);
        for slot in &watchers.slots {
            let Some(connection) = self.slots[*slot as usize].as_deref_mut() else { continue };
            let ConnectionStage::Open(open) = &connection.stage else { continue };
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

    /// Updates the counts after an attach or detach.
    pub(super) fn note_attachment(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &ChannelName,
    ) {
        let Some(open) = connection.open_mut() else { return };
        self.handle.occupancy_notifier.note(open.session.principal(), channel);
        let is_silent = open.session.is_silent(channel);
        if is_silent || !self.silent.0.is_empty() {
            self.silent.set(open.session.principal().channel(channel.clone()), slot, is_silent);
        }
    }

    /// Updates the publish count after a change of the capability on a channel with delivery.
    pub(super) fn refresh_publishes(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        channel: &ChannelName,
    ) {
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
