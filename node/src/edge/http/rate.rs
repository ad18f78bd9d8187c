//! Publish rate of each key over HTTP.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::model::KeyName;

/// Buckets of the keys that published lately; each holds one second's worth of messages.
pub(super) struct KeyRates {
    per_second: u32,
    buckets: Mutex<HashMap<KeyName, KeyBucket>>,
}

/// Bucket, by the time at which it is full again. Until then the missing permits are the remaining time times the rate.
struct KeyBucket {
    full_at: Instant,
}

/// Size of the table from which on full buckets are dropped.
const BUCKETS_SWEPT_AT: usize = 1024;

impl KeyRates {
    /// Creates the buckets. `per_second` 0: no limit.
    pub(super) fn new(per_second: u32) -> Self {
        Self { per_second, buckets: Mutex::new(HashMap::new()) }
    }

    /// Takes `messages` at once, or returns in how many seconds they may pass. More messages than a bucket holds pass if it is full, and
    /// delay later publishes, so that a large array is slow and not impossible.
    pub(super) fn take(&self, key: &KeyName, messages: usize, now: Instant) -> Result<(), u64> {
        if self.per_second == 0 {
            return Ok(());
        }
        let cost = Duration::from_secs_f64(messages as f64 / f64::from(self.per_second));
        let mut buckets = self.buckets.lock();
        if buckets.len() >= BUCKETS_SWEPT_AT {
            buckets.retain(|_, bucket| bucket.full_at > now);
        }
        let bucket = buckets.entry(key.clone()).or_insert(KeyBucket { full_at: now });
        let missing = bucket.full_at.saturating_duration_since(now);
        let delay_max = Duration::from_secs(1).saturating_sub(cost);
        if missing > delay_max {
            return Err((missing - delay_max).as_secs_f64().ceil() as u64);
        }
        bucket.full_at = now + missing + cost;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(name: &str) -> KeyName {
        name.into()
    }

    #[test]
    fn a_second_holds_the_rate_and_no_more() {
        let rates = KeyRates::new(5);
        let start = Instant::now();
        for _ in 0..5 {
            assert_eq!(rates.take(&key("a"), 1, start), Ok(()));
        }
        assert_eq!(rates.take(&key("a"), 1, start), Err(1));
        assert_eq!(rates.take(&key("b"), 1, start), Ok(()), "each key has its own");
        assert_eq!(rates.take(&key("a"), 1, start + Duration::from_millis(201)), Ok(()));
    }

    #[test]
    fn array_beyond_the_rate_passes_without_a_rate_debt() {
        let rates = KeyRates::new(2);
        let start = Instant::now();
        assert_eq!(rates.take(&key("a"), 10, start), Ok(()));
        assert_eq!(rates.take(&key("a"), 1, start), Err(5));
        assert_eq!(rates.take(&key("a"), 1, start + Duration::from_secs(5)), Ok(()));
    }

    #[test]
    fn key_rate_of_zero_is_no_limit() {
        let rates = KeyRates::new(0);
        assert_eq!(rates.take(&key("a"), 1_000_000, Instant::now()), Ok(()));
        assert!(rates.buckets.lock().is_empty());
    }
}
