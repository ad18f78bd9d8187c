//! How long a busy shard lets what comes gather.

use std::time::Duration;

/// A turn that hands out fewer deliveries than this has no use of company.
const BUSY_DELIVERIES: u64 = 16;

/// After a busy turn the shard neither reads nor writes until the window is over that began with it. What came
/// meanwhile is served in one go, and a connection gets in one write all that was published for it.
/// Times are those since the shard began.
#[derive(Debug)]
pub(super) struct Pace {
    window: Duration,
    handed: u64,
    /// When the turn began in which the first of them were handed out.
    since: Duration,
}

impl Pace {
    /// With a window of 0 the shard never waits.
    pub(super) fn new(window: Duration) -> Self {
        Self { window, handed: 0, since: Duration::ZERO }
    }

    pub(super) fn begin_turn(&mut self, now: Duration) {
        if self.handed == 0 {
            self.since = now;
        }
    }

    /// Counts what was put into outboxes.
    pub(super) fn handed(&mut self, deliveries: u64) {
        self.handed += deliveries;
    }

    /// All that was handed out is written: what is left of its window.
    pub(super) fn rest(&mut self, now: Duration) -> Duration {
        let busy = std::mem::take(&mut self.handed) >= BUSY_DELIVERIES;
        if busy { (self.since + self.window).saturating_sub(now) } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_millis(1);
    const START: Duration = Duration::from_secs(7);
    const TURN: Duration = Duration::from_micros(300);

    #[test]
    fn a_busy_turn_is_followed_by_the_rest_of_its_window() {
        let mut pace = Pace::new(WINDOW);
        pace.begin_turn(START);
        pace.handed(BUSY_DELIVERIES - 1);
        pace.handed(1);
        assert_eq!(pace.rest(START + TURN), WINDOW - TURN);
        pace.begin_turn(START + WINDOW);
        assert_eq!(pace.rest(START + WINDOW), Duration::ZERO, "each counts for itself");
    }

    #[test]
    fn the_window_of_work_over_several_turns_begins_with_the_first() {
        let mut pace = Pace::new(WINDOW);
        pace.begin_turn(START);
        pace.handed(BUSY_DELIVERIES);
        pace.begin_turn(START + TURN);
        assert_eq!(pace.rest(START + 2 * TURN), WINDOW - 2 * TURN);
    }

    #[test]
    fn at_rest_nothing_waits() {
        let mut pace = Pace::new(WINDOW);
        pace.begin_turn(START);
        pace.handed(BUSY_DELIVERIES - 1);
        assert_eq!(pace.rest(START + TURN), Duration::ZERO);
    }

    #[test]
    fn work_longer_than_the_window_is_followed_at_once() {
        let mut pace = Pace::new(WINDOW);
        pace.begin_turn(START);
        pace.handed(10_000);
        assert_eq!(pace.rest(START + 3 * WINDOW), Duration::ZERO);
    }

    #[test]
    fn a_window_of_0_never_waits() {
        let mut pace = Pace::new(Duration::ZERO);
        pace.begin_turn(START);
        pace.handed(10_000);
        assert_eq!(pace.rest(START), Duration::ZERO);
    }
}
