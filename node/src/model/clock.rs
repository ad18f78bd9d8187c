//! Wall-clock time that never goes back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Epoch milliseconds, never lower than any value given before or than the floor it was raised to.
#[derive(Clone, Debug)]
pub struct Clock(Arc<Source>);

#[derive(Debug)]
struct Source {
    highest_ms: AtomicU64,
    manual: bool,
}

impl Clock {
    pub fn system() -> Self {
        Self(Arc::new(Source { highest_ms: AtomicU64::new(0), manual: false }))
    }

    /// A clock that stands at `now_ms` until it is raised; for tests.
    pub fn manual(now_ms: u64) -> Self {
        Self(Arc::new(Source { highest_ms: AtomicU64::new(now_ms), manual: true }))
    }

    pub fn now_ms(&self) -> u64 {
        if self.0.manual {
            return self.0.highest_ms.load(Ordering::Relaxed);
        }
        let now_ms = system_ms();
        now_ms.max(self.0.highest_ms.fetch_max(now_ms, Ordering::Relaxed))
    }

    /// No later reading is below `floor_ms`.
    pub fn raise(&self, floor_ms: u64) {
        self.0.highest_ms.fetch_max(floor_ms, Ordering::Relaxed);
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that reads the system clock")]
fn system_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}
