//! The path of an event to the integrations and queues of its account: into the outbox, before it is acknowledged.
//!
//! A message with a client-given id is stored only once the outbox has it, since a retry is then answered from the store alone. Any other
//! message is written to both at once. A later publish on the channel is stored after it, so that the store keeps the channel's order.

use std::collections::HashMap;
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;

use super::{PublisherInner, after_both};
use crate::accounts::Account;
use crate::model::{ChannelKey, PresenceEvent, PublishedMessages};
use crate::origin::history::{StoreCallback, StoreError};
use crate::origin::outbox::{EventOutbox, EventSource, Routes};

/// An append that stores an event and then runs the callback.
type StoreAppend = Box<dyn FnOnce(StoreCallback) + Send>;

/// The outbox, once it is open.
#[derive(Default)]
pub(super) struct PublishTargets {
    outbox: OnceLock<EventOutbox>,
    /// Number of publishes of each channel that wait for the outbox before they are stored.
    behind: Arc<Mutex<HashMap<ChannelKey, usize>>>,
}

/// Refusal of a publish because the outbox of a target is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct OutboxFull;

impl PublishTargets {
    pub(super) fn open(&self, outbox: EventOutbox) {
        let _first = self.outbox.set(outbox);
    }

    /// The targets of an event on this channel.
    pub(super) fn of(
        &self,
        account: &Account,
        key: &ChannelKey,
        source: EventSource,
    ) -> Result<Routes, OutboxFull> {
        let Some(outbox) = self.outbox.get() else {
            return if account.integrations.is_empty() { Ok(Routes::default()) } else { Err(OutboxFull) };
        };
        let routes = outbox.routes(account, key, source);
        if !routes.is_empty() && outbox.is_full() { Err(OutboxFull) } else { Ok(routes) }
    }

    /// The targets of an event that cannot be refused any more, even if the outbox is full.
    pub(super) fn of_accepted(&self, account: &Account, key: &ChannelKey, source: EventSource) -> Routes {
        self.outbox.get().map_or_else(Routes::default, |outbox| outbox.routes(account, key, source))
    }

    pub(super) fn outbox(&self) -> Option<&EventOutbox> {
        self.outbox.get()
    }

    /// Whether a publish of the channel waits for the outbox before it is stored.
    fn is_behind(&self, key: &ChannelKey) -> bool {
        self.outbox.get().is_some() && self.behind.lock().contains_key(key)
    }

    /// A callback that runs `store` once the outbox has the event.
    fn first(&self, key: &ChannelKey, store: StoreAppend, done: StoreCallback) -> StoreCallback {
        *self.behind.lock().entry(key.clone()).or_default() += 1;
        let (behind, key) = (Arc::clone(&self.behind), key.clone());
        Box::new(move |result: Result<(), StoreError>| {
            match result {
                Ok(()) => store(done),
                Err(error) => done(Err(error)),
            }
            // Not earlier, so that publishes made meanwhile are stored after it.
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

impl PublisherInner {
    /// Writes the messages to the outbox and the store, under the channel's lock.
    pub(super) fn keep(
        self: &Arc<Self>,
        published: &Arc<PublishedMessages>,
        routes: Routes,
        retention_hours: Option<u32>,
        done: StoreCallback,
    ) {
        let outbox = match self.targets.outbox.get() {
            Some(outbox) if !routes.is_empty() || self.targets.is_behind(&published.key) => outbox,
            _ => return self.store.append(Arc::clone(published), retention_hours, done),
        };
        let has_given_ids = published.messages.iter().any(|message| message.id_given);
        if has_given_ids || self.targets.is_behind(&published.key) {
            let (inner, stored) = (Arc::clone(self), Arc::clone(published));
            let store: StoreAppend = Box::new(move |done| inner.store.append(stored, retention_hours, done));
            let first = self.targets.first(&published.key, store, done);
            return match routes.is_empty() {
                true => outbox.pass(first),
                false => outbox.put_messages(published, &routes, first),
            };
        }
        let done = after_both(done, |confirmed| outbox.put_messages(published, &routes, confirmed));
        self.store.append(Arc::clone(published), retention_hours, done);
    }

    /// Writes the presence event to the outbox and the store, under the channel's lock.
    pub(super) fn keep_presence(
        self: &Arc<Self>,
        event: &Arc<PresenceEvent>,
        routes: Routes,
        retention_hours: Option<u32>,
        done: StoreCallback,
    ) {
        let outbox = match self.targets.outbox.get() {
            Some(outbox) if !routes.is_empty() || self.targets.is_behind(&event.key) => outbox,
            _ => return self.store.append_presence(Arc::clone(event), retention_hours, done),
        };
        if self.targets.is_behind(&event.key) {
            let (inner, stored) = (Arc::clone(self), Arc::clone(event));
            let store: StoreAppend =
                Box::new(move |done| inner.store.append_presence(stored, retention_hours, done));
            let first = self.targets.first(&event.key, store, done);
            return match routes.is_empty() {
                true => outbox.pass(first),
                false => outbox.put_presence(event, &routes, first),
            };
        }
        let done = after_both(done, |confirmed| outbox.put_presence(event, &routes, confirmed));
        self.store.append_presence(Arc::clone(event), retention_hours, done);
    }
}
