//! Session ownership in a shard: takeover by another socket, loss, and the final close.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use fanfare_proto::frame::{close, code};

use super::super::connection::{SocketConnection, SocketSubscription};
use super::super::session_registry::{OpenedSession, ResumableSession};
use super::Shard;
use super::lifecycle::{CLOSE_AFTER_MS, refused_ms};
use crate::model::{
    ClosedSession, QUOTA_SLOTS_SETTLE, SessionLocation, SessionOwnership, SessionTakeover, SocketlessTakeover,
};

impl Shard {
    /// Opens the session of a fresh socket. Returns its ownership, and whether it was resumed.
    pub(super) fn begin_session(
        &mut self,
        connection: &SocketConnection,
        slot: u32,
        previous: Option<ResumableSession>,
    ) -> (SessionOwnership, bool) {
        let location = SessionLocation {
            incarnation: self.services.hub.incarnation(),
            shard: u16::try_from(self.index).expect("a node has at most 64 shards"),
            slot,
            generation: connection.generation,
        };
        let OpenedSession { ownership, previous, has_quota_slot } =
            self.services.session_registry.open_session(previous, location);
        if !has_quota_slot {
            let due_ms = self.now_ms + u64::try_from(QUOTA_SLOTS_SETTLE.as_millis()).unwrap_or(u64::MAX);
            self.quota_slot_checks.push_back((due_ms, ownership));
        }
        if let Some(previous) = previous {
            self.services.publisher.take_over_session(&SessionTakeover { ownership, previous });
        }
        (ownership, previous.is_some())
    }

    /// Ends a session's socket; unless closed for good the session may be resumed within the resume window.
    pub(super) fn end_session(
        &self,
        ownership: &SessionOwnership,
        for_good: bool,
        subscriptions: &[SocketSubscription],
    ) {
        let taking =
            subscriptions.iter().filter(|subscription| subscription.since != SocketSubscription::NEVER);
        let held = taking.map(|subscription| (subscription.number, subscription.since)).collect();
        if self.services.session_registry.end(ownership, for_good, held) && for_good {
            let over = ClosedSession { connection_id: ownership.connection_id, owner: ownership.owner() };
            self.services.publisher.announce_closed_session(&over);
        }
    }

    /// Ends a connection whose session was taken over by another socket.
    pub(super) fn end_for_takeover(&mut self, slot: u32, generation: u32) {
        if self.is_current(slot, generation) {
            self.with_session(slot, |session, _, out| {
                session.fail("taken up by another socket", code::TAKEN_OVER, close::CREDENTIAL, out);
            });
        }
    }

    /// Time of the next check for a missing quota slot.
    pub(super) fn quota_check_ms(&self) -> Option<u64> {
        self.quota_slot_checks.front().map(|(due_ms, _)| *due_ms)
    }

    pub(super) fn check_quota_slots(&mut self) {
        while self.quota_check_ms().is_some_and(|due_ms| due_ms <= self.now_ms) {
            let Some((_, SessionOwnership { connection_id, epoch, location })) =
                self.quota_slot_checks.pop_front()
            else {
                return;
            };
            if self.services.session_registry.is_open(location) {
                self.close_if_over_quota(location.slot, location.generation);
            } else {
                // A node that has taken the session over since has no quota slot by it either.
                let takeover = self
                    .services
                    .session_registry
                    .handle_takeover_miss(SocketlessTakeover { connection_id, epoch });
                self.services.publisher.announce_socketless_takeover(takeover);
            }
        }
    }

    /// Closes a connection that was admitted in place of a socket that did not exist, if its tenant is over the limit.
    pub(super) fn close_if_over_quota(&mut self, slot: u32, generation: u32) {
        if !self.is_current(slot, generation) {
            return;
        }
        let connections = Arc::clone(&self.services.connections);
        self.with_session(slot, |session, _, out| {
            if connections.is_over_limit(&session.principal().account) {
                metrics::counter!("fanfare_connection_limit_refusals_total").increment(1);
                let spread_ms = refused_ms();
                session.disconnect_at_ceiling(spread_ms, spread_ms + CLOSE_AFTER_MS, out);
            }
        });
    }
}
