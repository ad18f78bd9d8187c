//! Token buckets.

const SECOND_NS: u64 = 1_000_000_000;

/// A bucket of `burst` permits that fills at `per_second`; a rate of 0 never refuses. One word in size, since each connection has two.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct RateLimit {
    /// Time at which the bucket is full again, in epoch nanoseconds.
    full_ns: u64,
}

impl RateLimit {
    /// Takes all `count` permits or none.
    pub(super) fn take(&mut self, count: usize, per_second: u32, burst: u32, now_ms: u64) -> bool {
        if per_second == 0 {
            return true;
        }
        let filling = |permits: u64| permits.saturating_mul(SECOND_NS) / u64::from(per_second);
        let now_ns = now_ms.saturating_mul(1_000_000);
        let empty_ns = now_ns.saturating_add(filling(u64::from(burst)));
        // After the clock was set back the bucket is empty at worst.
        self.full_ns = self.full_ns.clamp(now_ns, empty_ns);
        let full_ns = self.full_ns.saturating_add(filling(count as u64));
        let granted = full_ns <= empty_ns;
        if granted {
            self.full_ns = full_ns;
        }
        granted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rate_limit_grants_the_burst_and_then_the_rate() {
        let mut limit = RateLimit::default();
        assert!(limit.take(400, 200, 400, 0));
        assert!(!limit.take(1, 200, 400, 4));
        assert!(limit.take(1, 200, 400, 5));
        assert!(!limit.take(1, 200, 400, 5));
        assert!(!limit.take(401, 200, 400, 100_000), "more than the burst is never granted");
        assert!(limit.take(400, 200, 400, 100_000));
    }

    #[test]
    fn clock_that_is_set_back_refuses_only_briefly() {
        let mut limit = RateLimit::default();
        assert!(limit.take(400, 200, 400, 3_600_000));
        assert!(!limit.take(1, 200, 400, 0), "empty at worst");
        assert!(limit.take(1, 200, 400, 5));
    }

    #[test]
    fn rate_limit_without_a_rate_grants_everything() {
        assert!(RateLimit::default().take(usize::MAX, 0, 0, 0));
    }
}
