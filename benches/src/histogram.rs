//! Times in buckets of less than two percent width, so that millions of them cost a few kilobytes.

const STEPS_LOG2: u32 = 6;
const STEPS: usize = 1 << STEPS_LOG2;

pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
    highest_ns: u64,
}

impl Default for Histogram {
    fn default() -> Self {
        Self { counts: vec![0; STEPS * (64 - STEPS_LOG2 as usize + 1)], total: 0, highest_ns: 0 }
    }
}

impl Histogram {
    pub fn record(&mut self, ns: u64) {
        self.counts[bucket(ns)] += 1;
        self.total += 1;
        self.highest_ns = self.highest_ns.max(ns);
    }

    /// Adds all that another histogram has recorded.
    pub fn add(&mut self, other: &Self) {
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
        self.total += other.total;
        self.highest_ns = self.highest_ns.max(other.highest_ns);
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    pub fn highest_ms(&self) -> f64 {
        to_ms(self.highest_ns)
    }

    /// Gives the time in milliseconds that `share` (0 to 1) of the recorded times did not exceed; 0 for an empty
    /// histogram.
    pub fn quantile_ms(&self, share: f64) -> f64 {
        let rank = ((self.total as f64 * share).ceil() as u64).max(1);
        let mut seen = 0;
        for (index, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return to_ms(upper_ns(index).min(self.highest_ns));
            }
        }
        0.0
    }
}

fn to_ms(ns: u64) -> f64 {
    ns as f64 / 1e6
}

/// Gives the bucket of a value. Values below `STEPS` have a bucket each; above, every power of two is cut into `STEPS`.
fn bucket(ns: u64) -> usize {
    if ns < STEPS as u64 {
        return ns as usize;
    }
    let shift = ns.ilog2() - STEPS_LOG2;
    (shift as usize + 1) * STEPS + ((ns >> shift) as usize - STEPS)
}

fn upper_ns(bucket: usize) -> u64 {
    if bucket < STEPS {
        return bucket as u64;
    }
    let shift = bucket / STEPS - 1;
    let step = (bucket % STEPS + STEPS) as u64;
    ((u128::from(step) + 1) << shift).saturating_sub(1).min(u128::from(u64::MAX)) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bucket_holds_its_values_within_two_percent() {
        for ns in [0, 1, 63, 64, 65, 1_000, 123_456, 987_654_321, u64::MAX / 3, u64::MAX] {
            let upper = upper_ns(bucket(ns));
            assert!(upper >= ns, "{ns} is above its bucket's {upper}");
            assert!((upper - ns) as f64 <= ns as f64 * 0.02, "{ns} is told as {upper}");
        }
    }

    #[test]
    fn quantiles_are_of_what_was_recorded() {
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|ms| histogram.record(ms * 1_000_000));
        assert!((histogram.quantile_ms(0.5) - 500.0).abs() <= 10.0);
        assert!((histogram.quantile_ms(0.99) - 990.0).abs() <= 20.0);
        assert_eq!(histogram.quantile_ms(1.0), 1000.0);
    }

    #[test]
    fn nothing_recorded_is_zero() {
        assert_eq!(Histogram::default().quantile_ms(0.99), 0.0);
    }
}
