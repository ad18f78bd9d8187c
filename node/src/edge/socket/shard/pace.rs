//! How long a busy shard lets what comes gather.

use std::time::Duration;

/// A turn that hands out fewer deliveries than this has no use of company.
const BUSY_DELIVERIES: u64 = 16;

/// After a busy turn the shard neither reads nor writes for a window. What came meanwhile is served in one go, and a
/// connection gets in one write all that was published for it.
#[derive(Debug)]
pub(super) struct Pace {
    window: Duration,
    handed: u64,
}

impl Pace {
    /// With a window of 0 the shard never waits.
    pub(super) fn new(window: Duration) -> Self {
        Self { window, handed: 0 }
    }

    /// Counts what was put into outboxes.
    pub(super) fn handed(&mut self, deliveries: u64) {
        self.handed += deliveries;
    }

    /// All that was handed out is written: how long to let what comes gather.
    pub(super) fn rest(&mut self) -> Duration {
        let busy = std::mem::take(&mut self.handed) >= BUSY_DELIVERIES;
        if busy { self.window } else { Duration::ZERO }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_millis(1);

    #[test]
    fn a_busy_turn_is_followed_by_a_window() {
        let mut pace = Pace::new(WINDOW);
        pace.handed(BUSY_DELIVERIES - 1);
        pace.handed(1);
        assert_eq!(pace.rest(), WINDOW);
        assert_eq!(pace.rest(), Duration::ZERO, "each counts for itself");
    }

    #[test]
    fn at_rest_nothing_waits() {
        let mut pace = Pace::new(WINDOW);
        pace.handed(BUSY_DELIVERIES - 1);
        assert_eq!(pace.rest(), Duration::ZERO);
    }

    #[test]
    fn a_window_of_0_never_waits() {
        let mut pace = Pace::new(Duration::ZERO);
        pace.handed(10_000);
        assert_eq!(pace.rest(), Duration::ZERO);
    }
}
