//! The delay before the next attempt to connect.

use std::time::Duration;

use crate::Reconnect;

/// Delays that double from the least to the greatest.
#[derive(Debug)]
pub(crate) struct Backoff {
    options: Reconnect,
    next: Duration,
    last: Duration,
}

impl Backoff {
    pub(crate) fn new(options: Reconnect) -> Self {
        Self { next: options.delay_min, last: Duration::ZERO, options }
    }

    /// Gives a delay between the half and the whole of the present one, so that clients that were lost
    /// together do not come back together.
    pub(crate) fn wait(&mut self, random: u16) -> Duration {
        let whole = self.next.min(self.options.delay_max);
        self.next = whole.saturating_mul(2).min(self.options.delay_max);
        self.last = whole / 2 + whole / 2 * u32::from(random) / u32::from(u16::MAX);
        self.last
    }

    /// Notes the duration of a connection. Gives `true`, and starts again with the least delay, if that was
    /// longer than the last delay.
    pub(crate) fn has_held(&mut self, time: Duration) -> bool {
        let held = time >= self.last.max(self.options.delay_min);
        if held {
            self.next = self.options.delay_min;
        }
        held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: fn(u64) -> Duration = Duration::from_millis;

    #[test]
    fn delays_double_up_to_the_greatest_and_vary_by_half() {
        let options = Reconnect { delay_min: MS(100), delay_max: MS(1_000) };
        let mut backoff = Backoff::new(options);
        let longest: Vec<_> = (0..6).map(|_| backoff.wait(u16::MAX).as_millis()).collect();
        assert_eq!(longest, [100, 200, 400, 800, 1_000, 1_000]);
        let mut backoff = Backoff::new(options);
        let shortest: Vec<_> = (0..6).map(|_| backoff.wait(0).as_millis()).collect();
        assert_eq!(shortest, [50, 100, 200, 400, 500, 500]);
    }

    #[test]
    fn only_a_connection_that_held_resets_the_delays() {
        let mut backoff = Backoff::new(Reconnect { delay_min: MS(100), delay_max: MS(1_000) });
        for expected in [100, 200, 400] {
            assert!(!backoff.has_held(MS(10)));
            assert_eq!(backoff.wait(u16::MAX), MS(expected));
        }
        assert!(backoff.has_held(MS(400)));
        assert_eq!(backoff.wait(u16::MAX), MS(100));
    }
}
