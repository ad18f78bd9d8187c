//! How far apart what comes from peers comes.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// The batches of all peers together.
#[derive(Debug)]
pub(super) struct Batches {
    begun: Instant,
    /// The last one, in µs since then.
    last_us: AtomicU64,
    /// Between the last two.
    apart_us: AtomicU64,
}

impl Batches {
    pub(super) fn new() -> Self {
        Self { begun: Instant::now(), last_us: AtomicU64::new(0), apart_us: AtomicU64::new(u64::MAX) }
    }

    pub(super) fn came(&self, now: Instant) {
        let now_us = now.saturating_duration_since(self.begun).as_micros();
        let now_us = u64::try_from(now_us).unwrap_or(u64::MAX);
        let last_us = self.last_us.swap(now_us, Ordering::Relaxed);
        self.apart_us.store(now_us.saturating_sub(last_us), Ordering::Relaxed);
    }

    pub(super) fn apart(&self) -> Duration {
        Duration::from_micros(self.apart_us.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_two_are_so_far_apart() {
        let (batches, begun) = (Batches::new(), Instant::now());
        for (at_ms, apart_ms) in [(10, None), (13, Some(3)), (13, Some(0)), (1_013, Some(1_000))] {
            batches.came(begun + Duration::from_millis(at_ms));
            let apart = batches.apart();
            assert!(apart_ms.is_none_or(|ms| apart.as_millis() == ms), "{apart:?} at {at_ms} ms");
        }
    }
}
