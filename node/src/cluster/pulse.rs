//! Whether this process runs at all, as several of its threads know together.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tokio_util::sync::CancellationToken;

/// How often each of the threads is to say that it runs.
pub(super) const EVERY: Duration = Duration::from_millis(100);
/// A process that stood still for so long is dead for its cluster.
const DEAD_AFTER_MS: u64 = 2_000;

/// When any of some threads of the process ran last. One that is held up alone says nothing of the others.
#[derive(Debug, Default)]
pub struct Pulse {
    /// 0 as long as none ran.
    last_ms: AtomicU64,
    stood_still: CancellationToken,
}

impl Pulse {
    /// The thread of the caller runs.
    pub(super) fn beat(&self) {
        self.beat_at(now_ms());
    }

    fn beat_at(&self, now_ms: u64) {
        let last_ms = self.last_ms.fetch_max(now_ms, Ordering::Relaxed);
        let paused_ms = now_ms.saturating_sub(last_ms);
        if last_ms > 0 && paused_ms >= DEAD_AFTER_MS {
            // First, since who reads the log may stand still as well.
            self.stood_still.cancel();
            tracing::warn!(paused_ms, "this node stood still as a whole");
        }
    }

    /// For a runtime of its own: says that its threads run, until it is dropped.
    pub async fn beats(self: Arc<Self>) {
        loop {
            self.beat();
            tokio::time::sleep(EVERY).await;
        }
    }

    pub(super) fn is_dead(&self) -> bool {
        self.stood_still.is_cancelled()
    }

    /// Resolves when none of the threads has run for 2 s: the process is to go on as another run.
    pub async fn stood_still(&self) {
        self.stood_still.cancelled().await;
    }
}

/// Since some moment; goes on while the machine is suspended, where the system has such a clock.
#[expect(unsafe_code, reason = "there is no safe call for this clock")]
fn now_ms() -> u64 {
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
    use super::*;

    /// Whether it was found to stand still when it beat at these times.
    fn stood_still(beats_ms: &[u64]) -> bool {
        let pulse = Pulse::default();
        beats_ms.iter().for_each(|beat_ms| pulse.beat_at(*beat_ms));
        pulse.stood_still.is_cancelled()
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
    fn who_was_held_up_with_a_time_that_it_had_read_changes_nothing() {
        assert!(!stood_still(&[7_000, 9_000 - 1, 7_100, 10_900]));
        assert!(!stood_still(&[9_000, 6_000, 9_100]));
    }

    #[test]
    fn what_it_takes_to_start_is_no_pause() {
        assert!(!stood_still(&[1_000_000]));
    }

    #[tokio::test]
    async fn it_beats_by_itself() {
        let pulse = Arc::new(Pulse::default());
        let began_ms = now_ms();
        let last_ms = || pulse.last_ms.load(Ordering::Relaxed);
        tokio::select! {
            () = Arc::clone(&pulse).beats() => {}
            () = async {
                while last_ms() <= began_ms {
                    tokio::time::sleep(EVERY).await;
                }
            } => {}
        }
        assert!((began_ms..=now_ms()).contains(&last_ms()));
        pulse.beat_at(last_ms() + DEAD_AFTER_MS);
        pulse.stood_still().await;
    }
}
