//! Clock: separate notions of time for credentials, timestamps and expiry.

mod line;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, Ordering};

use parking_lot::Mutex;

use super::ChannelKey;
use line::ExpiryLine;
pub use line::{ClockCheckpoint, ClockStepCause, STEP_MS};

/// Channels whose last timestamp is remembered while the system clock is ahead. Beyond this number all channels follow the highest.
const AHEAD_MAX: usize = 65_536;

/// The clock of the node. All times are epoch milliseconds.
///
/// * [`Clock::now_ms`] is the system clock, which may be set in both directions: for everything that is valid until a time.
/// * [`Clock::stamp_ms`] never goes back within a channel: for stored messages.
/// * [`Clock::expiry_ms`] and [`Clock::line_ms`] follow a step of the system clock only after it has held for a time: for rows that are
///   deleted, or must not be forgotten too early.
#[derive(Clone, Debug)]
pub struct Clock(Arc<ClockInner>);

#[derive(Debug)]
struct ClockInner {
    readings: Readings,
    highest_ms: AtomicU64,
    line: Mutex<ExpiryLine>,
    /// Offset of the line, readable without its lock.
    offset_ms: AtomicI64,
    ahead: Mutex<AheadStamps>,
    is_some_ahead: AtomicBool,
}

#[derive(Debug)]
enum Readings {
    System,
    /// The system clock and the time since boot, for tests.
    Manual(AtomicU64, AtomicU64),
}

/// The last timestamps of channels that were published to while the system clock was ahead of the line.
#[derive(Debug, Default)]
struct AheadStamps {
    last_ms: HashMap<ChannelKey, u64>,
    latest_ms: u64,
}

/// The state of the clock for operators.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ClockState {
    /// Steps of the system clock by more than [`STEP_MS`] since the start.
    pub steps: u64,
    /// The lead of the system clock over the expiry line, while the line does not follow it.
    pub apart: Option<(i64, ClockStepCause)>,
}

impl Clock {
    pub fn system() -> Self {
        Self::over(Readings::System)
    }

    /// A clock that stays at `now_ms` until it is moved; for tests.
    pub fn manual(now_ms: u64) -> Self {
        Self::over(Readings::Manual(AtomicU64::new(now_ms), AtomicU64::new(0)))
    }

    fn over(readings: Readings) -> Self {
        let (wall_ms, boot_ms) = readings.both();
        let line = ExpiryLine::new(wall_ms, boot_ms, 0);
        Self(Arc::new(ClockInner {
            readings,
            highest_ms: AtomicU64::new(0),
            offset_ms: AtomicI64::new(line.offset_ms()),
            line: Mutex::new(line),
            ahead: Mutex::default(),
            is_some_ahead: AtomicBool::new(false),
        }))
    }

    /// The system clock.
    pub fn now_ms(&self) -> u64 {
        self.0.readings.wall_ms()
    }

    /// The timestamp of a message that enters the channel now. Not below the channel's last one, nor below any given while the system clock
    /// was on the line.
    pub fn stamp_ms(&self, key: &ChannelKey) -> u64 {
        let (wall_ms, boot_ms) = self.0.readings.both();
        let line_ms = signed(boot_ms).saturating_add(self.0.offset_ms.load(Ordering::Relaxed));
        let is_ahead = signed(wall_ms).saturating_sub(line_ms) > signed(STEP_MS);
        if is_ahead || self.0.is_some_ahead.load(Ordering::Acquire) {
            return self.stamp_apart(key, wall_ms, is_ahead);
        }
        self.raised(wall_ms)
    }

    #[cold]
    fn stamp_apart(&self, key: &ChannelKey, wall_ms: u64, is_ahead: bool) -> u64 {
        let mut ahead = self.0.ahead.lock();
        if !is_ahead && wall_ms >= ahead.latest_ms {
            *ahead = AheadStamps::default();
            self.0.is_some_ahead.store(false, Ordering::Release);
            return self.raised(wall_ms);
        }
        let least_ms = if is_ahead {
            wall_ms.max(self.0.highest_ms.load(Ordering::Relaxed))
        } else {
            self.raised(wall_ms)
        };
        let stamp_ms = ahead.last_ms.get(key).map_or(least_ms, |last_ms| least_ms.max(*last_ms));
        if is_ahead {
            ahead.last_ms.insert(key.clone(), stamp_ms);
            ahead.latest_ms = stamp_ms.max(ahead.latest_ms);
            self.0.is_some_ahead.store(true, Ordering::Release);
            if ahead.last_ms.len() > AHEAD_MAX {
                self.raise(ahead.latest_ms);
                *ahead = AheadStamps::default();
            }
        }
        stamp_ms
    }

    fn raised(&self, ms: u64) -> u64 {
        ms.max(self.0.highest_ms.fetch_max(ms, Ordering::Relaxed))
    }

    /// The system clock, but not below any timestamp given while it was on the line: for values that only have to rise.
    pub fn highest_ms(&self) -> u64 {
        self.now_ms().max(self.0.highest_ms.load(Ordering::Relaxed))
    }

    /// The highest time that was raised to, or given as a timestamp while the system clock was on the line.
    pub fn lower_bound_ms(&self) -> u64 {
        self.0.highest_ms.load(Ordering::Relaxed)
    }

    /// Keeps later timestamps from being below `minimum_ms`.
    pub fn raise(&self, minimum_ms: u64) {
        self.0.highest_ms.fetch_max(minimum_ms, Ordering::Relaxed);
    }

    /// The time by which rows expire: the system clock, but not ahead of the line.
    pub fn expiry_ms(&self) -> u64 {
        let mut line = self.0.line.lock();
        // Read under the lock, so that two readings come in their order.
        let (wall_ms, boot_ms) = self.0.readings.both();
        let expiry_ms = line.see(wall_ms, boot_ms);
        self.0.offset_ms.store(line.offset_ms(), Ordering::Relaxed);
        expiry_ms
    }

    /// The expiry line, for measuring durations: continues evenly over a step of the system clock until the step has held.
    pub fn line_ms(&self) -> u64 {
        self.expiry_ms();
        self.0.line.lock().at(self.0.readings.both().1)
    }

    /// Continues the line of the previous incarnation. `hold_ms` is the time for which a step must hold. To be called before anything
    /// expires.
    pub fn begin(&self, left: Option<(ClockCheckpoint, bool)>, hold_ms: u64) {
        let mut line = self.0.line.lock();
        let (wall_ms, boot_ms) = self.0.readings.both();
        *line = match left {
            Some((left, is_same_boot)) => ExpiryLine::after(left, is_same_boot, (wall_ms, boot_ms), hold_ms),
            None => ExpiryLine::new(wall_ms, boot_ms, hold_ms),
        };
        self.0.offset_ms.store(line.offset_ms(), Ordering::Relaxed);
    }

    /// The state from which the next start continues.
    pub fn checkpoint(&self) -> ClockCheckpoint {
        self.expiry_ms();
        self.0.line.lock().checkpoint(self.0.readings.both().1)
    }

    pub fn state(&self) -> ClockState {
        self.expiry_ms();
        let line = self.0.line.lock();
        ClockState { steps: line.steps(), apart: line.stepped() }
    }

    /// Lets time pass until the system clock is at `now_ms`; for tests.
    pub fn pass_to(&self, now_ms: u64) {
        if let Readings::Manual(wall, boot) = &self.0.readings {
            let before_ms = wall.fetch_max(now_ms, Ordering::Relaxed);
            boot.fetch_add(now_ms.saturating_sub(before_ms), Ordering::Relaxed);
        }
    }

    /// Sets the system clock; for tests.
    pub fn set(&self, now_ms: u64) {
        if let Readings::Manual(wall, _) = &self.0.readings {
            wall.store(now_ms, Ordering::Relaxed);
        }
    }
}

impl Readings {
    fn wall_ms(&self) -> u64 {
        match self {
            Self::System => system_ms(),
            Self::Manual(wall, _) => wall.load(Ordering::Relaxed),
        }
    }

    /// The system clock, and the time since boot.
    fn both(&self) -> (u64, u64) {
        let boot_ms = match self {
            Self::System => since_boot_ms(),
            Self::Manual(_, boot) => boot.load(Ordering::Relaxed),
        };
        (self.wall_ms(), boot_ms)
    }
}

fn signed(ms: u64) -> i64 {
    i64::try_from(ms).unwrap_or(i64::MAX)
}

#[expect(clippy::disallowed_methods, reason = "the one place that reads the system clock")]
fn system_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

/// Milliseconds since some moment, independent of the system clock. Includes suspends of the machine, where the system has such a clock.
#[expect(unsafe_code, reason = "there is no safe call for this clock")]
pub fn since_boot_ms() -> u64 {
    #[cfg(target_os = "linux")]
    const CLOCK: libc::clockid_t = libc::CLOCK_BOOTTIME;
    #[cfg(not(target_os = "linux"))]
    const CLOCK: libc::clockid_t = libc::CLOCK_MONOTONIC;
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call gets a valid pointer to a time that lives here.
    unsafe { libc::clock_gettime(CLOCK, &raw mut now) };
    let [seconds, nanoseconds] = [now.tv_sec, now.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    seconds * 1_000 + nanoseconds / 1_000_000
}

#[cfg(test)]
mod tests {
    use super::super::{AccountId, ChannelName};
    use super::*;

    const NOW_MS: u64 = 1_767_225_600_000;
    const DAY_MS: u64 = 24 * 3_600_000;

    fn channel(name: &str) -> ChannelKey {
        ChannelKey::new(AccountId::new("acme"), ChannelName::of(name))
    }

    #[test]
    fn timestamps_of_a_channel_never_go_back() {
        let clock = Clock::manual(NOW_MS);
        let (a, b) = (channel("a"), channel("b"));
        assert_eq!(clock.stamp_ms(&a), NOW_MS);
        clock.set(NOW_MS - 5);
        assert_eq!(clock.stamp_ms(&b), NOW_MS);
        clock.set(NOW_MS + 5 * DAY_MS);
        assert_eq!(clock.stamp_ms(&a), NOW_MS + 5 * DAY_MS);
        clock.set(NOW_MS + 1);
        assert_eq!(clock.stamp_ms(&a), NOW_MS + 5 * DAY_MS);
        assert_eq!(clock.now_ms(), NOW_MS + 1);
    }

    #[test]
    fn reverted_clock_step_leaves_other_channels_alone() {
        let clock = Clock::manual(NOW_MS);
        let (a, b) = (channel("a"), channel("b"));
        clock.set(NOW_MS + 5 * DAY_MS);
        assert_eq!(clock.stamp_ms(&a), NOW_MS + 5 * DAY_MS);
        clock.set(NOW_MS);
        assert_eq!(clock.stamp_ms(&b), NOW_MS);
        clock.pass_to(NOW_MS + 7);
        assert_eq!(clock.stamp_ms(&b), NOW_MS + 7);
        assert_eq!(clock.stamp_ms(&a), NOW_MS + 5 * DAY_MS);
        clock.pass_to(NOW_MS + 5 * DAY_MS + 1);
        assert_eq!(clock.stamp_ms(&a), NOW_MS + 5 * DAY_MS + 1);
        assert!(clock.0.ahead.lock().last_ms.is_empty(), "time has passed them");
    }

    #[test]
    fn too_many_channels_ahead_raise_all() {
        let clock = Clock::manual(NOW_MS);
        clock.set(NOW_MS + DAY_MS);
        for number in 0..=AHEAD_MAX {
            clock.stamp_ms(&channel(&number.to_string()));
        }
        clock.set(NOW_MS);
        assert_eq!(clock.stamp_ms(&channel("new")), NOW_MS + DAY_MS);
        assert!(clock.0.ahead.lock().last_ms.len() <= 1);
    }

    #[test]
    fn nothing_expires_by_a_step_before_it_has_held() {
        let clock = Clock::manual(NOW_MS);
        clock.begin(None, 3_600_000);
        clock.set(NOW_MS + 5 * DAY_MS);
        assert_eq!((clock.expiry_ms(), clock.line_ms()), (NOW_MS, NOW_MS));
        assert_eq!(clock.state().apart, Some(((5 * DAY_MS).cast_signed(), ClockStepCause::Stepped)));
        clock.pass_to(NOW_MS + 5 * DAY_MS + 3_600_000);
        assert_eq!(clock.expiry_ms(), NOW_MS + 5 * DAY_MS + 3_600_000);
        clock.set(NOW_MS);
        assert_eq!(clock.expiry_ms(), NOW_MS);
        assert_eq!(clock.state().steps, 2);
    }
}
