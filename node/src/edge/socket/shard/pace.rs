//! How long a busy shard lets what comes gather.

use std::time::{Duration, Instant};

/// A turn that hands out fewer deliveries than this has no use of company.
const BUSY_DELIVERIES: u64 = 16;

/// What comes first within a window after a busy turn waits for one: the shard neither reads nor writes meanwhile. What has come by then is
/// served in one go, and a connection gets in one write all that was published for it.
#[derive(Debug)]
pub(super) struct Pace {
    window: Duration,
    handed: u64,
    /// When the last turn ended, if it was a busy one.
    busy: Option<Instant>,
}

impl Pace {
    /// With a window of 0 the shard never waits.
    pub(super) fn new(window: Duration) -> Self {
        Self { window, handed: 0, busy: None }
    }

    /// Counts what was put into outboxes.
    pub(super) fn handed(&mut self, deliveries: u64) {
        self.handed += deliveries;
    }

    /// All that was handed out is written.
    pub(super) fn written(&mut self, now: Instant) {
        let is_busy = std::mem::take(&mut self.handed) >= BUSY_DELIVERIES;
        self.busy = is_busy.then_some(now);
    }

    /// Something has come: how long to let more gather.
    pub(super) fn rest(&mut self, now: Instant) -> Duration {
        let is_busy = |written| now.saturating_duration_since(written) <= self.window;
        if self.busy.take().is_some_and(is_busy) { self.window } else { Duration::ZERO }
    }

    /// Of what comes so far apart nothing more comes within a window.
    pub(super) fn is_alone(&self, apart: Duration) -> bool {
        apart > self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_millis(1);

    /// One that has written at this moment what it handed out.
    fn after(window: Duration, deliveries: u64) -> (Pace, Instant) {
        let (mut pace, now) = (Pace::new(window), Instant::now());
        pace.handed(deliveries - 1);
        pace.handed(1);
        pace.written(now);
        (pace, now)
    }

    #[test]
    fn delivery_soon_after_busy_turn_waits_for_a_window() {
        let (mut pace, now) = after(WINDOW, BUSY_DELIVERIES);
        assert_eq!(pace.rest(now + WINDOW), WINDOW);
        assert_eq!(pace.rest(now + WINDOW), Duration::ZERO, "each counts for itself");
        pace.written(now);
        assert_eq!(pace.rest(now), Duration::ZERO, "nothing was handed out since");
    }

    #[test]
    fn delivery_further_apart_than_window_is_alone() {
        let pace = Pace::new(WINDOW);
        assert!(pace.is_alone(WINDOW + Duration::from_nanos(1)) && !pace.is_alone(WINDOW));
    }

    #[test]
    fn at_rest_nothing_waits() {
        let (mut pace, now) = after(WINDOW, BUSY_DELIVERIES - 1);
        assert_eq!(pace.rest(now), Duration::ZERO);
        let (mut pace, now) = after(WINDOW, BUSY_DELIVERIES);
        assert_eq!(pace.rest(now + WINDOW + Duration::from_nanos(1)), Duration::ZERO);
    }

    #[test]
    fn a_window_of_0_never_waits() {
        let (mut pace, now) = after(Duration::ZERO, 10_000);
        assert_eq!(pace.rest(now), Duration::ZERO);
    }
}
