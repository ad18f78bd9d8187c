//! The way of an event to the integrations and queues of its account: into the outbox, before it is acknowledged.
//!
//! A message whose id the client gave is stored only when its outbox has it, since a publisher that tries again is then answered from
//! the store alone. Any other is written to both at once. A later publish on its channel is stored behind it, so
//! that the store has a channel in its order.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::{Inner, both};
use crate::accounts::Account;
use crate::model::{ChannelKey, PresenceEvent, Published};
use crate::origin::history::{Done, StoreError};
use crate::origin::outbox::{Outbox, Routes, Source};

/// Stores an event, which then runs the callback.
type Store = Box<dyn FnOnce(Done) + Send>;

/// The outbox, from when it is open on.
#[derive(Default)]
pub(super) struct Targets {
    outbox: OnceLock<Outbox>,
    /// How many publishes of each channel wait for the outbox before they are stored.
    behind: Arc<Mutex<HashMap<ChannelKey, usize>>>,
}

/// Why nothing is published for a target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct NoRoom;

impl Targets {
    pub(super) fn open(&self, outbox: Outbox) {
        let _first = self.outbox.set(outbox);
    }

    /// The targets of an event on this channel.
    pub(super) fn of(&self, account: &Account, key: &ChannelKey, source: Source) -> Result<Routes, NoRoom> {
        let Some(outbox) = self.outbox.get() else {
            return if account.integrations.is_empty() { Ok(Routes::default()) } else { Err(NoRoom) };
        };
        let routes = outbox.routes(account, key, source);
        if !routes.is_empty() && outbox.is_full() { Err(NoRoom) } else { Ok(routes) }
    }

    /// The same, also when there is no room: of what cannot be refused any more.
    pub(super) fn of_begun(&self, account: &Account, key: &ChannelKey, source: Source) -> Routes {
        self.outbox.get().map_or_else(Routes::default, |outbox| outbox.routes(account, key, source))
    }

    pub(super) fn outbox(&self) -> Option<&Outbox> {
        self.outbox.get()
    }

    /// Whether something of the channel waits for the outbox before it is stored.
    fn is_behind(&self, key: &ChannelKey) -> bool {
        self.outbox.get().is_some() && self.behind.lock().contains_key(key)
    }

    /// A callback that runs `store` when the outbox has the event.
    fn first(&self, key: &ChannelKey, store: Store, done: Done) -> Done {
        *self.behind.lock().entry(key.clone()).or_default() += 1;
        let (behind, key) = (Arc::clone(&self.behind), key.clone());
        Box::new(move |result: Result<(), StoreError>| {
            match result {
                Ok(()) => store(done),
                Err(error) => done(Err(error)),
            }
            // Only now, so that what is published meanwhile is stored behind it.
            let mut behind = behind.lock();
            if let Some(count) = behind.get_mut(&key) {
                *count -= 1;
                if *count == 0 {
                    behind.remove(&key);
                }
            }
        })
    }
}

impl Inner {
    /// Writes the messages to the outbox and the store. Under the lock of the channel.
    pub(super) fn keep(
        self: &Arc<Self>,
        published: &Arc<Published>,
        routes: Routes,
        retention_hours: Option<u32>,
        done: Done,
    ) {
        let outbox = match self.targets.outbox.get() {
            Some(outbox) if !routes.is_empty() || self.targets.is_behind(&published.key) => outbox,
            _ => return self.store.append(Arc::clone(published), retention_hours, done),
        };
        let has_given_ids = published.messages.iter().any(|message| message.id_given);
        if has_given_ids || self.targets.is_behind(&published.key) {
            let (inner, stored) = (Arc::clone(self), Arc::clone(published));
            let store: Store = Box::new(move |done| inner.store.append(stored, retention_hours, done));
            let first = self.targets.first(&published.key, store, done);
            return match routes.is_empty() {
                true => outbox.pass(first),
                false => outbox.put_messages(published, &routes, first),
            };
        }
        let done = both(done, |confirmed| outbox.put_messages(published, &routes, confirmed));
        self.store.append(Arc::clone(published), retention_hours, done);
    }

    /// Writes the presence event to the outbox and the store; the same.
    pub(super) fn keep_presence(
        self: &Arc<Self>,
        event: &Arc<PresenceEvent>,
        routes: Routes,
        retention_hours: Option<u32>,
        done: Done,
    ) {
        let outbox = match self.targets.outbox.get() {
            Some(outbox) if !routes.is_empty() || self.targets.is_behind(&event.key) => outbox,
            _ => return self.store.append_presence(Arc::clone(event), retention_hours, done),
        };
        if self.targets.is_behind(&event.key) {
            let (inner, stored) = (Arc::clone(self), Arc::clone(event));
            let store: Store =
                Box::new(move |done| inner.store.append_presence(stored, retention_hours, done));
            let first = self.targets.first(&event.key, store, done);
            return match routes.is_empty() {
                true => outbox.pass(first),
                false => outbox.put_presence(event, &routes, first),
            };
        }
        let done = both(done, |confirmed| outbox.put_presence(event, &routes, confirmed));
        self.store.append_presence(Arc::clone(event), retention_hours, done);
    }
}
