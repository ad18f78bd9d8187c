//! Entry of presence: checks, numbers, hands over to the hub and to the origin's store.

use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;

use super::{Publisher, PublisherInner};
use crate::accounts::Account;
use crate::hub::{PresenceChange, PresenceRefusal};
use crate::model::{ChannelKey, MemberId, PresenceAction, PresenceEvent, UsageKind, message_bytes};
use crate::origin::history::StoreCallback;
use crate::origin::outbox::{EventSource, Routes};
use crate::stall_detector;
use crate::telemetry::{Limit, RATE_LIMITED};

/// A presence action of a client on a channel, under a principal whose capability was checked.
#[derive(Debug)]
pub struct PresenceRequest {
    pub key: ChannelKey,
    pub account: Arc<Account>,
    pub member: MemberId,
    pub epoch: u64,
    pub action: PresenceAction,
    /// Data as JSON text.
    pub data: Option<Box<RawValue>>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PresenceError {
    /// Nothing was changed.
    DataTooLarge { bytes: usize, bytes_max: usize },
    /// Nothing was changed.
    Refused(PresenceRefusal),
    /// Nothing was changed: too much waits for the store.
    Busy,
    /// The change was made, and is not known to be stored.
    Unavailable,
}

impl fmt::Display for PresenceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::DataTooLarge { bytes, bytes_max } => {
                write!(f, "presence data of {bytes} bytes is over the limit of {bytes_max}")
            }
            Self::Refused(refused) => refused.fmt(f),
            Self::Busy => f.write_str("the store is busy, nothing was changed"),
            Self::Unavailable => f.write_str("it was not confirmed in time, and may have been done"),
        }
    }
}

impl std::error::Error for PresenceError {}

pub type PresenceDone = Box<dyn FnOnce(Result<(), PresenceError>) + Send>;

impl Publisher {
    /// Carries out a presence request. `done` runs exactly once, on any thread: at once if nothing changes, else when
    /// the event is stored and peers have it. The change is made and on its way when this returns.
    pub fn present(&self, request: PresenceRequest, done: PresenceDone) {
        stall_detector::halt_if_stalled();
        let inner = &self.inner;
        let bytes = request.data.as_ref().map_or(0, |data| data.get().len());
        let bytes_max = inner.limits.presence_data_bytes;
        if bytes > bytes_max {
            Limit::PresenceDataBytes.hit();
            return done(Err(PresenceError::DataTooLarge { bytes, bytes_max }));
        }
        let retention_hours = inner.retention_hours(&request.account, &request.key);
        if retention_hours.is_some() && inner.store.is_full() {
            return done(Err(PresenceError::Busy));
        }
        let Ok(routes) = inner.targets.of(&request.account, &request.key, EventSource::Presence) else {
            return done(Err(PresenceError::Busy));
        };
        let PresenceRequest { key, account, member, epoch, action, data } = request;
        let change = PresenceChange { member: member.clone(), epoch, action, data: data.map(Arc::from) };
        let mut waiting = Some((done, routes));
        let presented = inner.hub.present(&key, change, &inner.limits, |action, data, stamp| {
            let event = PresenceEvent::new(key.clone(), member, epoch, action, data, stamp);
            if let Some((done, routes)) = waiting.take() {
                inner.store_presence(&event, &account, routes, retention_hours, done);
            }
            event
        });
        if let Err(refused) = &presented {
            limit_of(refused).hit();
        }
        if let Some((done, _)) = waiting {
            done(presented.map_err(PresenceError::Refused));
        }
    }
}

impl PublisherInner {
    /// The retention of the channel; none if it keeps no history.
    pub(super) fn retention_hours(&self, account: &Account, key: &ChannelKey) -> Option<u32> {
        let policy = account.policy(key.channel());
        policy.history.then_some(policy.retention_hours)
    }

    pub(super) fn store_presence(
        self: &Arc<Self>,
        event: &Arc<PresenceEvent>,
        account: &Account,
        routes: Routes,
        retention_hours: Option<u32>,
        done: PresenceDone,
    ) {
        self.presence.increment(1);
        let usage = Arc::clone(&account.usage);
        let client_id = event.member.client_id.as_str();
        let bytes = message_bytes(None, event.data.as_deref(), None, Some(client_id)) as u64;
        let stored: StoreCallback = Box::new(move |result| match result {
            Err(error) if retention_hours.is_some() => {
                tracing::warn!(target: RATE_LIMITED, %error, "presence event not stored");
                done(Err(PresenceError::Unavailable));
            }
            _ => {
                // A channel without history promises only that members survive a restart, where the store can.
                usage.count(UsageKind::Presence, 1, bytes);
                done(Ok(()));
            }
        });
        let stored = self.forward_presence(event, stored);
        self.keep_presence(event, routes, retention_hours, stored);
    }
}

fn limit_of(refused: &PresenceRefusal) -> Limit {
    match refused {
        PresenceRefusal::Channel { .. } => Limit::PresenceMembers,
        PresenceRefusal::Connection { .. } => Limit::PresenceConnectionMembers,
        PresenceRefusal::Node { .. } => Limit::PresenceBytes,
    }
}
