//! Rebalancing: connections that are asked to reconnect elsewhere, evenly over a time.

use std::collections::VecDeque;
use std::time::Duration;

use fanfare_proto::frame::{close, code};

use super::super::connection::ConnectionStage;
use super::Shard;

/// Longest delay after which a client is asked to reconnect.
const RECONNECT_SPREAD_MS: u64 = 500;
/// After op 4 and its delay the client closes. Otherwise the node closes after this time.
const CLOSE_AFTER_MS: u64 = 1_000;
/// Interval between two requests, if the time allows.
const EACH_MS: u64 = 10;
/// Longest time that a request waits for a connection's pending answers.
const UNANSWERED_WAIT_MS: u64 = 1_000;
/// Interval of the check for pending answers.
const UNANSWERED_LOOK_MS: u64 = 20;

/// Connections that are still to be asked.
#[derive(Default)]
pub(super) struct Rebalancing {
    /// Slot and generation. At most one entry for each connection.
    waiting: VecDeque<(u32, u32)>,
    count: u64,
    began_ms: u64,
    within_ms: u64,
    /// Connections whose turn came while answers were pending, with the deadline of each.
    unanswered: VecDeque<(u32, u32, u64)>,
    /// True if all connections must go, new ones included.
    is_for_all: bool,
}

impl Rebalancing {
    /// Number of connections that should have been asked by now.
    fn due(&self, now_ms: u64) -> u64 {
        let passed_ms = now_ms.saturating_sub(self.began_ms);
        if passed_ms >= self.within_ms { self.count } else { self.count * passed_ms / self.within_ms }
    }

    fn asked(&self) -> u64 {
        self.count - self.waiting.len() as u64
    }

    /// Time of the next action.
    pub(super) fn next_ms(&self, now_ms: u64) -> Option<u64> {
        let recheck = (!self.unanswered.is_empty()).then_some(now_ms + UNANSWERED_LOOK_MS);
        let next = (self.asked() + 1) * self.within_ms;
        let next = (!self.waiting.is_empty()).then(|| self.began_ms + next.div_ceil(self.count.max(1)));
        [recheck, next].into_iter().flatten().min()
    }
}

impl Shard {
    /// Asks `count` connections, or all if there are fewer, to reconnect elsewhere within `within`. Without a count all connections are
    /// asked, new ones included, whatever is requested later.
    pub(super) fn begin_rebalancing(&mut self, count: Option<usize>, within: Duration) {
        if self.rebalancing.is_for_all {
            return;
        }
        let is_for_all = count.is_none();
        let count = count.unwrap_or(usize::MAX);
        let open = |(slot, connection): (usize, &Option<Box<_>>)| {
            let connection: &super::super::connection::SocketConnection = connection.as_deref()?;
            let slot = u32::try_from(slot).ok()?;
            matches!(connection.stage, ConnectionStage::Open(_)).then_some((slot, connection.generation))
        };
        let mut waiting: VecDeque<(u32, u32)> = self.slots.iter().enumerate().filter_map(open).collect();
        if waiting.len() > count {
            // A random start, so that it is not always the same connections.
            let first = usize::from(u16::from_be_bytes(crate::model::random_bytes()));
            waiting.rotate_left(first % waiting.len().max(1));
            waiting.truncate(count);
        }
        let (count, began_ms) = (waiting.len() as u64, self.now_ms);
        let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX).min(count * EACH_MS);
        self.rebalancing =
            Rebalancing { waiting, count, began_ms, within_ms, unanswered: VecDeque::new(), is_for_all };
    }

    /// Schedules a new connection, if all must go: it is asked in the same turn, or when its first requests are answered.
    pub(super) fn ask_new_connection(&mut self, slot: u32, generation: u32) {
        if self.rebalancing.is_for_all {
            self.rebalancing.unanswered.push_back((slot, generation, self.now_ms + UNANSWERED_WAIT_MS));
        }
    }

    pub(super) fn rebalancing_turn(&mut self) {
        for _ in 0..self.rebalancing.unanswered.len() {
            let Some((slot, generation, until_ms)) = self.rebalancing.unanswered.pop_front() else { break };
            if self.now_ms < until_ms && self.has_unanswered(slot, generation) {
                self.rebalancing.unanswered.push_back((slot, generation, until_ms));
            } else {
                self.ask_to_reconnect(slot, generation);
            }
        }
        let due = self.rebalancing.due(self.now_ms);
        while self.rebalancing.asked() < due {
            let Some((slot, generation)) = self.rebalancing.waiting.pop_front() else { break };
            if self.has_unanswered(slot, generation) {
                self.rebalancing.unanswered.push_back((slot, generation, self.now_ms + UNANSWERED_WAIT_MS));
            } else {
                self.ask_to_reconnect(slot, generation);
            }
        }
    }

    /// True if a request of the connection is not answered yet.
    fn has_unanswered(&self, slot: u32, generation: u32) -> bool {
        let connection = self.slots.get(slot as usize).and_then(Option::as_deref);
        connection.filter(|connection| connection.generation == generation).is_some_and(
            |connection| matches!(&connection.stage, ConnectionStage::Open(open) if open.session.has_unanswered()),
        )
    }

    fn ask_to_reconnect(&mut self, slot: u32, generation: u32) {
        if !self.is_current(slot, generation) {
            return;
        }
        let after_ms = u64::from(u16::from_be_bytes(crate::model::random_bytes())) % RECONNECT_SPREAD_MS;
        let (code, close) = (code::UNAVAILABLE, close::DRAINING);
        self.with_session(slot, |session, _, out| {
            session.disconnect(
                "come back to another node",
                code,
                close,
                after_ms,
                after_ms + CLOSE_AFTER_MS,
                out,
            );
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_are_asked_evenly_over_the_time() {
        let waiting: VecDeque<_> = (0..4).map(|slot| (slot, 0)).collect();
        let mut moving =
            Rebalancing { waiting, count: 4, began_ms: 100, within_ms: 40, ..Rebalancing::default() };
        for (now_ms, due, next_ms) in
            [(100, 0, 110), (109, 0, 110), (110, 1, 120), (125, 2, 130), (139, 3, 140)]
        {
            assert_eq!(moving.due(now_ms), due, "{now_ms}");
            while moving.asked() < due {
                moving.waiting.pop_front();
            }
            assert_eq!(moving.next_ms(now_ms), Some(next_ms), "{now_ms}");
        }
        assert_eq!(moving.due(140), 4);
        moving.waiting.clear();
        assert_eq!(moving.next_ms(140), None);
    }
}
