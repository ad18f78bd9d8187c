//! Lines of the log that are told apart by what they are about, such as a reason and a key: each is told once in a while.

use std::hash::{BuildHasher as _, Hash, RandomState};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// One subject is logged once in this time.
const EVERY: Duration = Duration::from_secs(10);
/// Subjects that are told apart; further ones share a place, so at most so many lines come in `EVERY`.
const PLACES: usize = 256;

/// The subjects that were logged lately.
pub struct Repeats {
    places: Box<[Mutex<Place>]>,
    hasher: RandomState,
}

#[derive(Default)]
struct Place {
    logged: Option<Instant>,
    held_back: u64,
}

impl Default for Repeats {
    fn default() -> Self {
        Self { places: (0..PLACES).map(|_| Mutex::default()).collect(), hasher: RandomState::new() }
    }
}

impl Repeats {
    /// How many lines of the subject were held back since the last one, where a line is due.
    pub fn happens(&self, subject: &impl Hash) -> Option<u64> {
        let place = self.hasher.hash_one(subject) as usize % PLACES;
        self.places[place].lock().happens(Instant::now())
    }
}

impl Place {
    fn happens(&mut self, now: Instant) -> Option<u64> {
        if self.logged.is_some_and(|logged| now.duration_since(logged) < EVERY) {
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
    fn a_place_logs_once_in_a_while_and_says_how_many_were_held_back() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut place = Place::default();
        assert_eq!(place.happens(begun), Some(0));
        assert_eq!((place.happens(at(1)), place.happens(at(9))), (None, None));
        assert_eq!(place.happens(at(10)), Some(2));
        assert_eq!(place.happens(at(20)), Some(0));
    }

    #[test]
    fn subjects_are_held_back_apart() {
        let repeats = Repeats::default();
        let due = (0..100).filter(|number| repeats.happens(number).is_some()).count();
        assert!(due > 50, "{due} of 100");
        assert_eq!(repeats.happens(&0), None);
    }
}
