//! What may be told by the thousand, for each request while the database is away for example: the first is told at once, those
//! that follow are counted.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// The target of what is counted.
pub const OFTEN: &str = "fanfare::often";
/// Of how often.
const AGAIN: &str = "fanfare::often::again";
/// What warnings of the driver of the database begin with: they are counted, too.
const DRIVER: &str = "scylla";
/// Of one kind no more than a line is told in this time.
const EVERY: Duration = Duration::from_secs(10);

static KINDS: Mutex<Option<HashMap<Identifier, Kind>>> = Mutex::new(None);

/// What one line of the program tells.
struct Kind {
    told: Instant,
    /// Since then.
    untold: u64,
    text: String,
}

impl Kind {
    fn new(now: Instant) -> Self {
        Self { told: now, untold: 0, text: String::new() }
    }

    /// One more; true when it is to be told.
    fn happens(&mut self, is_first: bool, now: Instant) -> bool {
        if is_first || (self.untold == 0 && now.duration_since(self.told) >= EVERY) {
            self.told = now;
            return true;
        }
        self.untold += 1;
        false
    }

    /// How many are to be told as a number.
    fn sum(&mut self, now: Instant) -> Option<u64> {
        if self.untold == 0 || now.duration_since(self.told) < EVERY {
            return None;
        }
        self.told = now;
        Some(std::mem::take(&mut self.untold))
    }
}

/// Holds back what was told already.
pub(super) struct Once;

impl<S: Subscriber> Layer<S> for Once {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let is_of_driver = metadata.target().starts_with(DRIVER) && *metadata.level() <= Level::WARN;
        if metadata.target() != OFTEN && !is_of_driver {
            return true;
        }
        let now = Instant::now();
        let mut kinds = KINDS.lock();
        let kinds = kinds.get_or_insert_default();
        let is_first = !kinds.contains_key(&metadata.callsite());
        let kind = kinds.entry(metadata.callsite()).or_insert_with(|| Kind::new(now));
        let is_told = kind.happens(is_first, now);
        if is_told {
            event.record(&mut Text(&mut kind.text));
        }
        is_told
    }
}

struct Text<'a>(&'a mut String);

impl Visit for Text<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            *self.0 = format!("{value:?}");
        }
    }
}

/// Tells of what was held back; to be called every few seconds.
pub fn tell_held_back() {
    let now = Instant::now();
    let sums: Vec<(u64, String)> = {
        let mut kinds = KINDS.lock();
        let kinds = kinds.iter_mut().flatten();
        kinds.filter_map(|(_, kind)| Some((kind.sum(now)?, kind.text.clone()))).collect()
    };
    for (times, what) in sums {
        tracing::warn!(target: AGAIN, times, what, "the same again");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_event_is_logged_once_then_as_count() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut kind = Kind::new(begun);
        assert!(kind.happens(true, begun));
        assert_eq!(kind.sum(at(60)), None, "all of it is told");
        for second in 0..8 {
            assert!(!kind.happens(false, at(second)));
        }
        assert_eq!(kind.sum(at(9)), None, "not yet");
        assert!(!kind.happens(false, at(11)), "the number comes first");
        assert_eq!(kind.sum(at(11)), Some(9));
        assert!(!kind.happens(false, at(12)));
        assert_eq!(kind.sum(at(21)), Some(1));
        assert!(kind.happens(false, at(31)), "what begins anew is told at once");
    }
}
