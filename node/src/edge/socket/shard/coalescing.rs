//! Coalescing of a busy shard's input.

use std::time::{Duration, Instant};

/// Deliveries in a turn below which coalescing does not pay.
const BUSY_DELIVERIES: u64 = 16;

/// Coalescing policy: after a busy turn, input that arrives within a window waits for one window. The shard neither reads nor writes
/// meanwhile. All input is then served at once, and each connection gets its messages in one write.
#[derive(Debug)]
pub(super) struct CoalescingPolicy {
    window: Duration,
    handed: u64,
    /// End of the last turn, if the shard was busy in it.
    busy: Option<Instant>,
}

impl CoalescingPolicy {
    /// Creates the policy. With a window of 0 the shard never waits.
    pub(super) fn new(window: Duration) -> Self {
        Self { window, handed: 0, busy: None }
    }

    /// Counts deliveries that were put into outboxes.
    pub(super) fn handed(&mut self, deliveries: u64) {
        self.handed += deliveries;
    }

    /// Notes the end of a turn, after its deliveries were written.
    pub(super) fn written(&mut self, now: Instant) {
        let is_busy = std::mem::take(&mut self.handed) >= BUSY_DELIVERIES;
        self.busy = is_busy.then_some(now);
    }

    /// Delay for input that has just arrived.
    pub(super) fn delay(&mut self, now: Instant) -> Duration {
        let is_busy = |written| now.saturating_duration_since(written) <= self.window;
        if self.busy.take().is_some_and(is_busy) { self.window } else { Duration::ZERO }
    }

    /// True if batches come so far apart that no further one is expected within a window.
    pub(super) fn is_alone(&self, apart: Duration) -> bool {
        apart > self.window
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WINDOW: Duration = Duration::from_millis(1);

    /// A policy after a turn that has written this number of deliveries.
    fn after(window: Duration, deliveries: u64) -> (CoalescingPolicy, Instant) {
        let (mut pace, now) = (CoalescingPolicy::new(window), Instant::now());
        pace.handed(deliveries - 1);
        pace.handed(1);
        pace.written(now);
        (pace, now)
    }

    #[test]
    fn delivery_soon_after_busy_turn_waits_for_a_window() {
        let (mut pace, now) = after(WINDOW, BUSY_DELIVERIES);
        assert_eq!(pace.delay(now + WINDOW), WINDOW);
        assert_eq!(pace.delay(now + WINDOW), Duration::ZERO, "each counts for itself");
        pace.written(now);
        assert_eq!(pace.delay(now), Duration::ZERO, "nothing was handed out since");
    }

    #[test]
    fn delivery_further_apart_than_window_is_alone() {
        let pace = CoalescingPolicy::new(WINDOW);
        assert!(pace.is_alone(WINDOW + Duration::from_nanos(1)) && !pace.is_alone(WINDOW));
    }

    #[test]
    fn idle_shard_delays_no_delivery() {
        let (mut pace, now) = after(WINDOW, BUSY_DELIVERIES - 1);
        assert_eq!(pace.delay(now), Duration::ZERO);
        let (mut pace, now) = after(WINDOW, BUSY_DELIVERIES);
        assert_eq!(pace.delay(now + WINDOW + Duration::from_nanos(1)), Duration::ZERO);
    }

    #[test]
    fn a_window_of_0_never_waits() {
        let (mut pace, now) = after(Duration::ZERO, 10_000);
        assert_eq!(pace.delay(now), Duration::ZERO);
    }
}
