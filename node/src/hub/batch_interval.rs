//! Mean time between the message batches that peers send.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Gaps above this are clamped: a batch that far from the previous one counts as alone.
const APART_MAX: Duration = Duration::from_millis(5);
/// Weight of one batch in the mean: 1 / `PART`.
const PART: u32 = 4;
/// Size from which a batch counts as several that arrive at once: a longer one arrives while its beginning is
/// delivered.
const BYTES_ALONE: usize = 16 * 1024;

/// Running mean over the batches of all peers together.
#[derive(Debug)]
pub(super) struct PeerBatchInterval {
    begun: Instant,
    /// Arrival of the last batch, in µs since `begun`.
    last_us: AtomicU64,
    /// Mean gap between recent batches, in µs. A delayed batch arrives close to the next one, so delays cancel out.
    apart_us: AtomicU64,
}

impl PeerBatchInterval {
    pub(super) fn new() -> Self {
        let apart_us = micros(APART_MAX);
        Self { begun: Instant::now(), last_us: AtomicU64::new(0), apart_us: AtomicU64::new(apart_us) }
    }

    pub(super) fn record(&self, bytes: usize, now: Instant) {
        let now_us = micros(now.saturating_duration_since(self.begun));
        let last_us = self.last_us.swap(now_us, Ordering::Relaxed);
        let apart_us = if bytes <= BYTES_ALONE { now_us.saturating_sub(last_us) } else { 0 };
        let (apart, mean) = (Duration::from_micros(apart_us), self.mean());
        let mean = mean - mean / PART + apart.min(APART_MAX) / PART;
        self.apart_us.store(micros(mean), Ordering::Relaxed);
    }

    pub(super) fn mean(&self) -> Duration {
        Duration::from_micros(self.apart_us.load(Ordering::Relaxed))
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batch_interval_is_that_of_the_last_batches() {
        let batches = PeerBatchInterval::new();
        let mut at = batches.begun;
        let mut after = |each: Duration, bytes, count| {
            for _ in 0..count {
                at += each;
                batches.record(bytes, at);
            }
            batches.mean()
        };
        let ms = Duration::from_millis;
        assert_eq!(after(ms(60_000), 1, 3), APART_MAX);
        let frequent = after(ms(3), BYTES_ALONE, 40);
        assert!((ms(2)..=ms(3)).contains(&frequent), "{frequent:?}");
        let held_up = after(Duration::ZERO, 1, 1);
        assert!((ms(2)..ms(3)).contains(&held_up), "{held_up:?}");
        let at_once = after(Duration::from_micros(100), 1, 40);
        assert!(at_once < ms(1), "{at_once:?}");
        assert!(after(ms(60_000), 1, 1) > ms(1));
        let long = after(ms(10), BYTES_ALONE + 1, 40);
        assert!(long < ms(1), "{long:?}");
    }
}
