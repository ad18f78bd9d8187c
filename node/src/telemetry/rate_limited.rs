//! Rate-limited logging, for lines that may come by the thousand, such as one for each request while the database is away: the first is
//! logged at once, repeats are counted.

use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Subscriber};
use tracing_subscriber::layer::{Context, Layer};

/// Target of rate-limited lines.
pub const RATE_LIMITED: &str = "fanfare::often";
/// Target of the lines that report counts.
const AGAIN: &str = "fanfare::often::again";
/// Target prefix of the database driver, whose warnings are rate-limited too.
const DRIVER: &str = "scylla";
/// Interval within which one kind is logged at most once.
const EVERY: Duration = Duration::from_secs(10);

static KINDS: Mutex<Option<HashMap<Identifier, LineRepeats>>> = Mutex::new(None);

/// Repeats of one line, by its place in the code.
struct LineRepeats {
    logged_at: Instant,
    /// Repeats held back since `logged_at`.
    held_back: u64,
    text: String,
}

impl LineRepeats {
    fn new(now: Instant) -> Self {
        Self { logged_at: now, held_back: 0, text: String::new() }
    }

    /// Counts an occurrence; true if it is to be logged.
    fn happens(&mut self, is_first: bool, now: Instant) -> bool {
        if is_first || (self.held_back == 0 && now.duration_since(self.logged_at) >= EVERY) {
            self.logged_at = now;
            return true;
        }
        self.held_back += 1;
        false
    }

    /// The number of repeats, if a report is due.
    fn sum(&mut self, now: Instant) -> Option<u64> {
        if self.held_back == 0 || now.duration_since(self.logged_at) < EVERY {
            return None;
        }
        self.logged_at = now;
        Some(std::mem::take(&mut self.held_back))
    }
}

/// A layer that holds repeats back.
pub(super) struct RateLimitLayer;

impl<S: Subscriber> Layer<S> for RateLimitLayer {
    fn event_enabled(&self, event: &Event<'_>, _: Context<'_, S>) -> bool {
        let metadata = event.metadata();
        let is_of_driver = metadata.target().starts_with(DRIVER) && *metadata.level() <= Level::WARN;
        if metadata.target() != RATE_LIMITED && !is_of_driver {
            return true;
        }
        let now = Instant::now();
        let mut kinds = KINDS.lock();
        let kinds = kinds.get_or_insert_default();
        let is_first = !kinds.contains_key(&metadata.callsite());
        let kind = kinds.entry(metadata.callsite()).or_insert_with(|| LineRepeats::new(now));
        let is_logged = kind.happens(is_first, now);
        if is_logged {
            event.record(&mut MessageVisitor(&mut kind.text));
        }
        is_logged
    }
}

struct MessageVisitor<'a>(&'a mut String);

impl Visit for MessageVisitor<'_> {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            *self.0 = format!("{value:?}");
        }
    }
}

/// Logs the numbers of held back repeats; to be called every few seconds.
pub fn log_held_back() {
    let now = Instant::now();
    let sums: Vec<(u64, String)> = {
        let mut kinds = KINDS.lock();
        let kinds = kinds.iter_mut().flatten();
        kinds.filter_map(|(_, kind)| Some((kind.sum(now)?, kind.text.clone()))).collect()
    };
    for (times, what) in sums {
        tracing::warn!(target: AGAIN, times, what, "log line repeated");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_event_is_logged_once_then_as_count() {
        let begun = Instant::now();
        let at = |seconds: u64| begun + Duration::from_secs(seconds);
        let mut kind = LineRepeats::new(begun);
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
