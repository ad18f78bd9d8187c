//! How far apart what comes from peers comes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio::time::Instant;

/// Further apart than this is as good as alone, and soon forgotten where more comes.
const APART_MAX: Duration = Duration::from_millis(5);
/// One batch counts for so much of the mean.
const PART: u32 = 4;
/// Of a longer one more comes while its beginning is served, as of several that come at once.
const BYTES_ALONE: usize = 16 * 1024;

/// The batches of all peers together.
#[derive(Debug)]
pub(super) struct Batches {
    begun: Instant,
    /// When the last one came, in µs since then.
    last_us: AtomicU64,
    /// Between two of late, in the mean: one that is held up comes close to the next one.
    apart_us: AtomicU64,
}

impl Batches {
    pub(super) fn new() -> Self {
        let apart_us = micros(APART_MAX);
        Self { begun: Instant::now(), last_us: AtomicU64::new(0), apart_us: AtomicU64::new(apart_us) }
    }

    pub(super) fn came(&self, bytes: usize, now: Instant) {
        let now_us = micros(now.saturating_duration_since(self.begun));
        let last_us = self.last_us.swap(now_us, Ordering::Relaxed);
        let apart_us = if bytes <= BYTES_ALONE { now_us.saturating_sub(last_us) } else { 0 };
        let (apart, mean) = (Duration::from_micros(apart_us), self.apart());
        let mean = mean - mean / PART + apart.min(APART_MAX) / PART;
        self.apart_us.store(micros(mean), Ordering::Relaxed);
    }

    pub(super) fn apart(&self) -> Duration {
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
    fn the_last_ones_are_so_far_apart() {
        let batches = Batches::new();
        let mut at = batches.begun;
        let mut after = |each: Duration, bytes, count| {
            for _ in 0..count {
                at += each;
                batches.came(bytes, at);
            }
            batches.apart()
        };
        let ms = Duration::from_millis;
        assert_eq!(after(ms(60_000), 1, 3), APART_MAX);
        let often = after(ms(3), BYTES_ALONE, 40);
        assert!((ms(2)..=ms(3)).contains(&often), "{often:?}");
        let held_up = after(Duration::ZERO, 1, 1);
        assert!((ms(2)..ms(3)).contains(&held_up), "{held_up:?}");
        let at_once = after(Duration::from_micros(100), 1, 40);
        assert!(at_once < ms(1), "{at_once:?}");
        assert!(after(ms(60_000), 1, 1) > ms(1));
        let long = after(ms(10), BYTES_ALONE + 1, 40);
        assert!(long < ms(1), "{long:?}");
    }
}
