//! A connection is taken up by another socket, lost, or over.

#[cfg(test)]
mod tests;

use std::sync::Arc;

use fanfare_proto::frame::{close, code};

use super::super::connection::{Connection, Subscription};
use super::super::identities::{Begun, Former};
use super::Shard;
use super::lifecycle::{CLOSE_AFTER_MS, refused_ms};
use crate::model::{NotOpen, Over, Place, SEATS_SETTLE, TakenUp, Tenure};

impl Shard {
    /// Whose connection a fresh socket carries on, and whether it was another's before.
    pub(super) fn begin_tenure(
        &mut self,
        connection: &Connection,
        slot: u32,
        former: Option<Former>,
    ) -> (Tenure, bool) {
        let place = Place {
            incarnation: self.services.hub.incarnation(),
            shard: u16::try_from(self.index).expect("a node has at most 64 shards"),
            slot,
            generation: connection.generation,
        };
        let Begun { tenure, former, is_seated } = self.services.identities.begin(former, place);
        if !is_seated {
            let due_ms = self.now_ms + u64::try_from(SEATS_SETTLE.as_millis()).unwrap_or(u64::MAX);
            self.unseated.push_back((due_ms, tenure));
        }
        if let Some(former) = former {
            self.services.publisher.taken_up(&TakenUp { tenure, former });
        }
        (tenure, former.is_some())
    }

    /// The socket is gone; unless its connection is over it may come back within the resume window.
    pub(super) fn end_tenure(&self, tenure: &Tenure, for_good: bool, subscriptions: &[Subscription]) {
        let taking = subscriptions.iter().filter(|subscription| subscription.since != Subscription::NEVER);
        let held = taking.map(|subscription| (subscription.number, subscription.since)).collect();
        if self.services.identities.end(tenure, for_good, held) && for_good {
            let over = Over { connection_id: tenure.connection_id, owner: tenure.owner() };
            self.services.publisher.is_over(&over);
        }
    }

    /// Another socket goes on with the connection of this one.
    pub(super) fn taken_up(&mut self, slot: u32, generation: u32) {
        if self.is_still(slot, generation) {
            self.with_session(slot, |session, _, out| {
                session.fail("taken up by another socket", code::TAKEN_UP, close::CREDENTIAL, out);
            });
        }
    }

    /// When the first of those is to be looked at that may have no seat.
    pub(super) fn seat_look_ms(&self) -> Option<u64> {
        self.unseated.front().map(|(due_ms, _)| *due_ms)
    }

    pub(super) fn look_at_seats(&mut self) {
        while self.seat_look_ms().is_some_and(|due_ms| due_ms <= self.now_ms) {
            let Some((_, Tenure { connection_id, epoch, place })) = self.unseated.pop_front() else { return };
            if self.services.identities.is_open(place) {
                self.keep_if_seated(place.slot, place.generation);
            } else {
                // Whoever has taken it up since has no seat by it either.
                let told = self.services.identities.not_open(NotOpen { connection_id, epoch });
                self.services.publisher.tell_not_open(told);
            }
        }
    }

    /// It was admitted in the place of a socket that was not there, so it goes if its tenant is over the ceiling.
    pub(super) fn keep_if_seated(&mut self, slot: u32, generation: u32) {
        if !self.is_still(slot, generation) {
            return;
        }
        let connections = Arc::clone(&self.services.connections);
        self.with_session(slot, |session, _, out| {
            if connections.is_over(&session.principal().account) {
                metrics::counter!("fanfare_connection_limit_refusals_total").increment(1);
                let spread_ms = refused_ms();
                session.disconnect_at_ceiling(spread_ms, spread_ms + CLOSE_AFTER_MS, out);
            }
        });
    }
}
