//! Token buckets.

/// A bucket of `burst` permits that fills at `per_second`; a rate of 0 never refuses.
#[derive(Debug, Clone, Copy)]
pub(super) struct RateLimit {
    /// Thousandths of a permit.
    level: u64,
    filled_ms: u64,
}

impl RateLimit {
    pub(super) fn full(burst: u32, now_ms: u64) -> Self {
        Self { level: u64::from(burst) * 1000, filled_ms: now_ms }
    }

    /// Takes all `count` permits or none.
    pub(super) fn take(&mut self, count: usize, per_second: u32, burst: u32, now_ms: u64) -> bool {
        if per_second == 0 {
            return true;
        }
        let gained = now_ms.saturating_sub(self.filled_ms).saturating_mul(u64::from(per_second));
        self.level = self.level.saturating_add(gained).min(u64::from(burst) * 1000);
        self.filled_ms = self.filled_ms.max(now_ms);
        let wanted = (count as u64).saturating_mul(1000);
        let granted = wanted <= self.level;
        if granted {
            self.level -= wanted;
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_burst_then_the_rate() {
        let mut limit = RateLimit::full(400, 0);
        assert!(limit.take(400, 200, 400, 0));
        assert!(!limit.take(1, 200, 400, 4));
        assert!(limit.take(1, 200, 400, 5));
        assert!(!limit.take(1, 200, 400, 5));
        assert!(!limit.take(401, 200, 400, 100_000), "more than the burst is never granted");
        assert!(limit.take(400, 200, 400, 100_000));
    }

    #[test]
    fn no_rate_no_limit() {
        assert!(RateLimit::full(0, 0).take(usize::MAX, 0, 0, 0));
    }
}
