//! Connections that are asked to come back elsewhere, evenly over a time.

use std::collections::VecDeque;
use std::time::Duration;

use fanfare_proto::frame::{close, code};

use super::super::connection::Stage;
use super::Shard;

/// A client is asked to come back after at most this.
const RECONNECT_SPREAD_MS: u64 = 500;
/// After op 4 and its delay the client closes; the node does so when it has not.
const CLOSE_AFTER_MS: u64 = 1_000;
/// So much time for each of them is enough, however much there is.
const EACH_MS: u64 = 10;
/// Who is owed answers is asked when it has them, at the latest after this.
const OWED_MS: u64 = 1_000;
/// How often it is looked for that.
const OWED_LOOK_MS: u64 = 20;

/// Those that were not asked yet.
#[derive(Default)]
pub(super) struct Moving {
    /// Slot and generation. At most one for each connection.
    waiting: VecDeque<(u32, u32)>,
    count: u64,
    began_ms: u64,
    within_ms: u64,
    /// Whose turn has come while they were owed answers, and how long that is waited for.
    owed: VecDeque<(u32, u32, u64)>,
    /// All are to go, and whoever comes too.
    is_for_all: bool,
}

impl Moving {
    /// How many of them should have been asked by now.
    fn due(&self, now_ms: u64) -> u64 {
        let passed_ms = now_ms.saturating_sub(self.began_ms);
        if passed_ms >= self.within_ms { self.count } else { self.count * passed_ms / self.within_ms }
    }

    fn asked(&self) -> u64 {
        self.count - self.waiting.len() as u64
    }

    /// When there is something to do next.
    pub(super) fn next_ms(&self, now_ms: u64) -> Option<u64> {
        let owed = (!self.owed.is_empty()).then_some(now_ms + OWED_LOOK_MS);
        let next = (self.asked() + 1) * self.within_ms;
        let next = (!self.waiting.is_empty()).then(|| self.began_ms + next.div_ceil(self.count.max(1)));
        [owed, next].into_iter().flatten().min()
    }
}

impl Shard {
    /// Asks so many connections to come back elsewhere, all of them if there are not more, over at most `within`. Without a
    /// number it is all of them and whoever comes, whatever is asked later.
    pub(super) fn begin_moving(&mut self, count: Option<usize>, within: Duration) {
        if self.moving.is_for_all {
            return;
        }
        let is_for_all = count.is_none();
        let count = count.unwrap_or(usize::MAX);
        let open = |(slot, connection): (usize, &Option<Box<_>>)| {
            let connection: &super::super::connection::Connection = connection.as_deref()?;
            let slot = u32::try_from(slot).ok()?;
            matches!(connection.stage, Stage::Open(_)).then_some((slot, connection.generation))
        };
        let mut waiting: VecDeque<(u32, u32)> = self.slots.iter().enumerate().filter_map(open).collect();
        if waiting.len() > count {
            // Not always the same ones.
            let first = usize::from(u16::from_be_bytes(crate::model::random_bytes()));
            waiting.rotate_left(first % waiting.len().max(1));
            waiting.truncate(count);
        }
        let (count, began_ms) = (waiting.len() as u64, self.now_ms);
        let within_ms = u64::try_from(within.as_millis()).unwrap_or(u64::MAX).min(count * EACH_MS);
        self.moving = Moving { waiting, count, began_ms, within_ms, owed: VecDeque::new(), is_for_all };
    }

    /// Where all are to go, a connection that has opened is asked in the same turn, or when it has its first answers.
    pub(super) fn move_newcomer(&mut self, slot: u32, generation: u32) {
        if self.moving.is_for_all {
            self.moving.owed.push_back((slot, generation, self.now_ms + OWED_MS));
        }
    }

    pub(super) fn moving_turn(&mut self) {
        for _ in 0..self.moving.owed.len() {
            let Some((slot, generation, until_ms)) = self.moving.owed.pop_front() else { break };
            if self.now_ms < until_ms && self.is_owed(slot, generation) {
                self.moving.owed.push_back((slot, generation, until_ms));
            } else {
                self.ask_to_leave(slot, generation);
            }
        }
        let due = self.moving.due(self.now_ms);
        while self.moving.asked() < due {
            let Some((slot, generation)) = self.moving.waiting.pop_front() else { break };
            if self.is_owed(slot, generation) {
                self.moving.owed.push_back((slot, generation, self.now_ms + OWED_MS));
            } else {
                self.ask_to_leave(slot, generation);
            }
        }
    }

    /// A request of the connection is not answered yet.
    fn is_owed(&self, slot: u32, generation: u32) -> bool {
        let connection = self.slots.get(slot as usize).and_then(Option::as_deref);
        connection.filter(|connection| connection.generation == generation).is_some_and(
            |connection| matches!(&connection.stage, Stage::Open(open) if open.session.is_owed()),
        )
    }

    fn ask_to_leave(&mut self, slot: u32, generation: u32) {
        if !self.is_still(slot, generation) {
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
    fn they_are_asked_evenly_over_the_time() {
        let waiting: VecDeque<_> = (0..4).map(|slot| (slot, 0)).collect();
        let mut moving = Moving { waiting, count: 4, began_ms: 100, within_ms: 40, ..Moving::default() };
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
