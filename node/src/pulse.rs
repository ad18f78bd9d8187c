//! Whether this process runs at all. One that stood still is dead for its cluster, and does nothing more before it begins another run.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::model::since_boot_ms;

/// How often some of the threads say that they run, also where there is nothing to do.
pub const EVERY: Duration = Duration::from_millis(100);
/// A process that stood still for so long is dead for its cluster.
const DEAD_AFTER_MS: u64 = 2_000;

/// Of a process that is a node of a cluster: of another one nobody can have taken anything while it stood still.
static PROCESS: OnceLock<Pulse> = OnceLock::new();

/// From now on it counts whether this process stands still.
pub fn watch() {
    PROCESS.get_or_init(Pulse::default);
}

/// The thread of the caller runs. From the first beat on pauses count: what it takes to start is none.
pub fn beat() {
    if let Some(process) = PROCESS.get() {
        process.begin(since_boot_ms());
        pass();
    }
}

/// Beats until it is dropped.
pub async fn beats() {
    loop {
        beat();
        tokio::time::sleep(EVERY).await;
    }
}

/// Returns only if the process has not stood still. To be called before anything is done for a client or a peer, whatever was begun
/// before: others may have told its clients, let its members leave, or taken its connections meanwhile.
pub fn pass() {
    let Some(process) = PROCESS.get() else { return };
    if process.stands_still_at(since_boot_ms()) {
        loop {
            std::thread::park();
        }
    }
}

/// Resolves when none of the threads has run for 2 s: the process is to go on as another run.
pub async fn stood_still() {
    match PROCESS.get() {
        Some(process) => process.stood_still.cancelled().await,
        None => std::future::pending().await,
    }
}

/// When any of some threads ran last. One that is held up alone says nothing of the others.
#[derive(Debug, Default)]
struct Pulse {
    /// 0 as long as none ran.
    last_ms: AtomicU64,
    /// Read by all threads before all they do: the token has a lock, for which they would wait for each other.
    has_stood_still: AtomicBool,
    stood_still: CancellationToken,
}

impl Pulse {
    fn begin(&self, now_ms: u64) {
        // The second and later beats change nothing here.
        self.last_ms.compare_exchange(0, now_ms, Ordering::Relaxed, Ordering::Relaxed).ok();
    }

    /// The caller reads `now_ms` before the call, so a thread that is held up in between finds nothing. Every thread after the pause
    /// finds it, because none notes a time behind it.
    fn stands_still_at(&self, now_ms: u64) -> bool {
        let last_ms = self.last_ms.load(Ordering::Relaxed);
        let paused_ms = now_ms.saturating_sub(last_ms);
        if last_ms > 0 && paused_ms >= DEAD_AFTER_MS {
            let is_first = !self.has_stood_still.swap(true, Ordering::SeqCst);
            self.stood_still.cancel();
            if is_first {
                // Last, since who reads the log may stand still as well.
                tracing::warn!(paused_ms, "this node stood still as a whole");
            }
            return true;
        }
        if last_ms > 0 && paused_ms > 0 {
            self.last_ms.fetch_max(now_ms, Ordering::Relaxed);
        }
        self.has_stood_still.load(Ordering::SeqCst)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether it was found to stand still when its threads ran at these times.
    fn stood_still(ran_ms: &[u64]) -> bool {
        let pulse = Pulse::default();
        pulse.begin(ran_ms[0]);
        ran_ms.iter().any(|ran_ms| pulse.stands_still_at(*ran_ms))
    }

    #[test]
    fn a_process_of_which_no_thread_ran_for_two_seconds_stood_still() {
        for (pause_ms, is_dead) in [(100, false), (1_999, false), (2_000, true), (3_600_000, true)] {
            assert_eq!(stood_still(&[7_000, 7_000 + pause_ms]), is_dead, "{pause_ms}");
        }
    }

    #[test]
    fn one_thread_that_runs_is_enough() {
        assert!(!stood_still(&[7_000, 8_500, 10_000, 11_500]));
    }

    #[test]
    fn stall_detector_ignores_thread_with_outdated_time() {
        assert!(!stood_still(&[7_000, 9_000 - 1, 7_100, 10_900]));
        assert!(!stood_still(&[9_000, 6_000, 9_100]));
    }

    #[test]
    fn stall_detector_counts_no_stall_before_start() {
        let pulse = Pulse::default();
        assert!(!pulse.stands_still_at(1_000_000));
        assert!(!pulse.stands_still_at(1_009_000), "nothing beats yet");
    }

    #[tokio::test]
    async fn no_thread_passes_after_the_pause() {
        let pulse = Pulse::default();
        pulse.begin(7_000);
        for ran_ms in [9_000, 9_001, 9_500] {
            assert!(pulse.stands_still_at(ran_ms), "{ran_ms}");
        }
        assert!(pulse.stands_still_at(8_000), "its time was read before, and it is known by now");
        pulse.stood_still.cancelled().await;
    }

    #[test]
    fn of_a_process_that_is_not_in_a_cluster_nothing_is_known() {
        beat();
        pass();
        assert!(PROCESS.get().is_none());
    }
}
