//! Detection of stalls of the whole process. A process that stalled is down for its cluster: it does nothing more until it restarts in
//! place as a new incarnation.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::model::since_boot_ms;

/// Interval at which some threads call [`beat`], even without other work.
pub const BEAT_INTERVAL: Duration = Duration::from_millis(100);
/// A process that stalled for at least this long counts as down for its cluster.
const STALL_AFTER_MS: u64 = 2_000;

/// The detector of this process, set if the process is a node of a cluster. Without peers nobody can take anything over during a stall.
static PROCESS: OnceLock<StallDetector> = OnceLock::new();

/// Enables the stall detector.
pub fn watch() {
    PROCESS.get_or_init(StallDetector::default);
}

/// Notes that the calling thread runs. Stalls count from the first beat, so a slow start is none.
pub fn beat() {
    if let Some(process) = PROCESS.get() {
        process.begin(since_boot_ms());
        halt_if_stalled();
    }
}

/// Calls [`beat`] every [`BEAT_INTERVAL`] until the future is dropped.
pub async fn keep_beating() {
    loop {
        beat();
        tokio::time::sleep(BEAT_INTERVAL).await;
    }
}

/// Returns only if the process has not stalled; otherwise parks the thread for good. Must be called before any effect on a client or a
/// peer, whenever that work began: during a stall the peers may have reported a loss to the node's clients, removed its members, or taken
/// over its sessions.
pub fn halt_if_stalled() {
    let Some(process) = PROCESS.get() else { return };
    if process.is_stalled_at(since_boot_ms()) {
        loop {
            std::thread::park();
        }
    }
}

/// Resolves when no thread has run for 2 s: the process then restarts in place as a new incarnation.
pub async fn stalled() {
    match PROCESS.get() {
        Some(process) => process.stalled.cancelled().await,
        None => std::future::pending().await,
    }
}

/// Detector that knows when the last of several threads ran. A single thread that is held up is no stall.
#[derive(Debug, Default)]
struct StallDetector {
    /// Time of the last beat, in milliseconds since boot. 0 before the first beat.
    last_ms: AtomicU64,
    /// Copy of `stalled` that every thread can read without contention: the token has a lock.
    has_stalled: AtomicBool,
    stalled: CancellationToken,
}

impl StallDetector {
    fn begin(&self, now_ms: u64) {
        // The second and later beats change nothing here.
        self.last_ms.compare_exchange(0, now_ms, Ordering::Relaxed, Ordering::Relaxed).ok();
    }

    /// True if the process has stalled. The caller reads `now_ms` before the call, so a thread that is held up in between finds no stall.
    /// Every thread that runs after the stall finds it, because no thread stores an earlier time.
    fn is_stalled_at(&self, now_ms: u64) -> bool {
        let last_ms = self.last_ms.load(Ordering::Relaxed);
        let paused_ms = now_ms.saturating_sub(last_ms);
        if last_ms > 0 && paused_ms >= STALL_AFTER_MS {
            let is_first = !self.has_stalled.swap(true, Ordering::SeqCst);
            self.stalled.cancel();
            if is_first {
                // Last, since the thread that reads the log may be stalled as well.
                tracing::warn!(paused_ms, "process stall detected");
            }
            return true;
        }
        if last_ms > 0 && paused_ms > 0 {
            self.last_ms.fetch_max(now_ms, Ordering::Relaxed);
        }
        self.has_stalled.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// True if threads that ran at these times are found to have stalled.
    fn is_stalled(ran_ms: &[u64]) -> bool {
        let detector = StallDetector::default();
        detector.begin(ran_ms[0]);
        ran_ms.iter().any(|ran_ms| detector.is_stalled_at(*ran_ms))
    }

    #[test]
    fn process_without_a_running_thread_for_two_seconds_stalled() {
        for (pause_ms, expected) in [(100, false), (1_999, false), (2_000, true), (3_600_000, true)] {
            assert_eq!(is_stalled(&[7_000, 7_000 + pause_ms]), expected, "{pause_ms}");
        }
    }

    #[test]
    fn one_thread_that_runs_is_enough() {
        assert!(!is_stalled(&[7_000, 8_500, 10_000, 11_500]));
    }

    #[test]
    fn stall_detector_ignores_thread_with_outdated_time() {
        assert!(!is_stalled(&[7_000, 9_000 - 1, 7_100, 10_900]));
        assert!(!is_stalled(&[9_000, 6_000, 9_100]));
    }

    #[test]
    fn stall_detector_counts_no_stall_before_start() {
        let detector = StallDetector::default();
        assert!(!detector.is_stalled_at(1_000_000));
        assert!(!detector.is_stalled_at(1_009_000), "nothing beats yet");
    }

    #[tokio::test]
    async fn no_thread_passes_after_the_pause() {
        let detector = StallDetector::default();
        detector.begin(7_000);
        for ran_ms in [9_000, 9_001, 9_500] {
            assert!(detector.is_stalled_at(ran_ms), "{ran_ms}");
        }
        assert!(detector.is_stalled_at(8_000), "its time was read before, and it is known by now");
        detector.stalled.cancelled().await;
    }

    #[test]
    fn process_outside_a_cluster_has_no_stall_detector() {
        beat();
        halt_if_stalled();
        assert!(PROCESS.get().is_none());
    }
}
