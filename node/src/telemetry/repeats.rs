//! Rate-limited log lines that are distinguished by their subject, such as a reason and a key.

use std::collections::HashMap;
use std::hash::{BuildHasher as _, Hash, RandomState};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Interval within which one subject is logged at most once.
const EVERY: Duration = Duration::from_secs(10);
/// Subjects distinguished at a time; further ones share an entry, so about this many lines come in `EVERY`.
const SUBJECTS_MAX: usize = 256;

/// The subjects that were logged lately.
#[derive(Default)]
pub struct Repeats {
    /// Subjects by hash.
    subjects: Mutex<HashMap<u64, SubjectRepeats>>,
    shared: Mutex<SubjectRepeats>,
    hasher: RandomState,
}

#[derive(Default)]
struct SubjectRepeats {
    logged: Option<Instant>,
    held_back: u64,
}

impl Repeats {
    /// The number of lines of the subject held back since the last one, if a line is due.
    pub fn happens(&self, subject: &impl Hash) -> Option<u64> {
        self.happens_at(self.hasher.hash_one(subject), Instant::now())
    }

    fn happens_at(&self, subject: u64, now: Instant) -> Option<u64> {
        let mut subjects = self.subjects.lock();
        if subjects.len() >= SUBJECTS_MAX && !subjects.contains_key(&subject) {
            subjects.retain(|_, repeats| repeats.is_resting(now));
            if subjects.len() >= SUBJECTS_MAX {
                return self.shared.lock().happens(now);
            }
        }
        subjects.entry(subject).or_default().happens(now)
    }
}

impl SubjectRepeats {
    fn is_resting(&self, now: Instant) -> bool {
        self.logged.is_some_and(|logged| now.duration_since(logged) < EVERY)
    }

    fn happens(&mut self, now: Instant) -> Option<u64> {
        if self.is_resting(now) {
            self.held_back += 1;
            return None;
        }
        self.logged = Some(now);
        Some(std::mem::take(&mut self.held_back))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn call_site_logs_at_bounded_rate_with_suppressed_count() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut repeats = SubjectRepeats::default();
        assert_eq!(repeats.happens(begun), Some(0));
        assert_eq!((repeats.happens(at(1)), repeats.happens(at(9))), (None, None));
        assert_eq!(repeats.happens(at(10)), Some(2));
        assert_eq!(repeats.happens(at(20)), Some(0));
    }

    #[test]
    fn subjects_are_held_back_apart_within_a_bound() {
        let (repeats, begun) = (Repeats::default(), Instant::now());
        let due = |subjects: std::ops::Range<u64>, seconds| {
            let now = begun + Duration::from_secs(seconds);
            subjects.filter(|subject| repeats.happens_at(*subject, now).is_some()).count()
        };
        assert_eq!(due(0..256, 0), 256);
        assert_eq!(due(0..256, 9), 0);
        assert_eq!(due(256..1_000, 9), 1, "they share a place");
        assert_eq!(due(1_000..1_256, 10), 256, "the first ones have made room");
        assert_eq!(repeats.subjects.lock().len(), SUBJECTS_MAX);
    }
}
