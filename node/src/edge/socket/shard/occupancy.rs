//! How many connections of this shard are attached to a channel.

use std::collections::{HashMap, HashSet};

use tokio::sync::oneshot;

use super::super::connection::Connection;
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

impl Shard {
    /// After a change of what a connection is attached to.
    pub(super) fn count_silent(&mut self, connection: &mut Connection, slot: u32, channel: &ChannelName) {
        let Some(open) = connection.open_mut() else { return };
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
            count += AttachedCount { connections: silent, publishers: silent, subscribers: 0 };
            count
        };
        // Who asked may have gone meanwhile.
        reply.send(keys.iter().map(count).collect()).ok();
    }
}
