//! The clock over restarts: its state is kept in the data folder, and steps are logged.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use metrics::{Counter, counter};
use serde::{Deserialize, Serialize};

use crate::data_file;
use crate::model::{Clock, ClockCheckpoint, ClockState, ClockStepCause, STEP_MS, since_boot_ms};
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::RATE_LIMITED;

const FILE: &str = "clock.json";
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Interval of the writes. After a restart on the same boot, the age of the file does not matter.
const KEEP_EVERY: Duration = Duration::from_secs(60);

static STEPS: LazyLock<Counter> = LazyLock::new(|| counter!("fanfare_clock_steps_total"));

/// Times are milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ClockFile {
    /// The system's id of the boot; none if it has none.
    boot: Option<Box<str>>,
    since_boot_ms: u64,
    /// The time by which rows expire, at that moment.
    expiry_ms: u64,
    /// The system clock while it is off the expiry line, and the time since it left the line.
    stepped: Option<(u64, u64)>,
    #[serde(default)]
    away: bool,
}

/// Restores the clock state of the previous incarnation, and watches the clock from then on. To be called after the store has raised the
/// clock, and before anything expires.
pub(super) fn begin(clock: &Clock, data_dir: &Path, hold_ms: u64, tasks: &Tasks) {
    let boot = boot();
    let stored_ms = clock.lower_bound_ms();
    let left = read(data_dir).map(|kept| {
        let left = ClockCheckpoint {
            boot_ms: kept.since_boot_ms,
            line_ms: kept.expiry_ms,
            stepped: kept.stepped,
            is_away: kept.away,
        };
        (left, boot.is_some() && kept.boot == boot)
    });
    // Without the file, the newest row gives the last known time.
    let of_store =
        || ClockCheckpoint { boot_ms: since_boot_ms(), line_ms: stored_ms, stepped: None, is_away: false };
    clock.begin(left.or_else(|| (stored_ms > 0).then(|| (of_store(), false))), hold_ms);
    let now_ms = clock.now_ms();
    if stored_ms > now_ms.saturating_add(STEP_MS) {
        let by_s = (stored_ms - now_ms) / 1_000;
        tracing::warn!(by_s, "newest stored row is ahead of the system clock");
    }
    log_change(&ClockState::default(), &clock.state(), hold_ms);
    let keeper = Arc::new(ClockRecorder { clock: clock.clone(), data_dir: data_dir.to_owned(), boot });
    keeper.keep();
    tasks.spawn("clock", OnStop::Cancel, watch(keeper, hold_ms));
}

/// Keeps the clock state in the data folder, also when dropped: a step in progress continues in the next incarnation.
struct ClockRecorder {
    clock: Clock,
    data_dir: PathBuf,
    boot: Option<Box<str>>,
}

/// Watches the clock; never returns.
async fn watch(keeper: Arc<ClockRecorder>, hold_ms: u64) {
    let clock = keeper.clock.clone();
    let (mut before, mut since_kept) = (clock.state(), Duration::ZERO);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        since_kept += LOOK_EVERY;
        let state = clock.state();
        log_change(&before, &state, hold_ms);
        if since_kept >= KEEP_EVERY || before.apart.is_some() != state.apart.is_some() {
            since_kept = Duration::ZERO;
            let keeper = Arc::clone(&keeper);
            // A failed write is logged, and the next round tries again.
            tokio::task::spawn_blocking(move || keeper.keep()).await.ok();
        }
        before = state;
    }
}

/// Whether nothing expires by the system clock, because it was set or is wrong.
pub(super) fn is_apart(clock: &Clock) -> bool {
    matches!(clock.state().apart, Some((_, ClockStepCause::Stepped)))
}

/// Logs a change of the clock state.
fn log_change(before: &ClockState, state: &ClockState, hold_ms: u64) {
    let steps = state.steps - before.steps;
    STEPS.increment(steps);
    let hold_s = hold_ms / 1_000;
    match (before.apart, state.apart) {
        (_, Some((ahead_ms, cause))) if steps > 0 || before.apart.is_none() => {
            let ahead_s = ahead_ms / 1_000;
            match cause {
                ClockStepCause::Stepped => tracing::warn!(
                    target: RATE_LIMITED,
                    ahead_s,
                    hold_s,
                    "system clock stepped: expiry on hold"
                ),
                ClockStepCause::Away => {
                    tracing::info!(ahead_s, hold_s, "machine rebooted since the last start: expiry on hold")
                }
            }
        }
        (Some((ahead_ms, _)), None) => {
            let ahead_s = ahead_ms / 1_000;
            tracing::info!(ahead_s, "expiry follows the system clock again");
        }
        _ if steps > 0 => {
            tracing::warn!(target: RATE_LIMITED, steps, "system clock stepped and returned");
        }
        _ => {}
    }
}

fn boot() -> Option<Box<str>> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(boot.trim().into())
}

/// Reads the file; none if it is missing or damaged.
fn read(data_dir: &Path) -> Option<ClockFile> {
    let file = data_dir.join(FILE);
    let text = match std::fs::read(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        read => read,
    };
    let kept = text.and_then(|text| serde_json::from_slice(&text).map_err(io::Error::from));
    kept.inspect_err(|error| tracing::warn!(%error, file = %file.display(), "clock file not read")).ok()
}

impl ClockRecorder {
    fn keep(&self) {
        let ClockCheckpoint { boot_ms, line_ms, stepped, is_away } = self.clock.checkpoint();
        let kept = ClockFile {
            boot: self.boot.clone(),
            since_boot_ms: boot_ms,
            expiry_ms: line_ms,
            stepped,
            away: is_away,
        };
        if let Err(error) = write(&self.data_dir, &kept) {
            tracing::warn!(target: RATE_LIMITED, %error, "clock file not written");
        }
    }
}

impl Drop for ClockRecorder {
    fn drop(&mut self) {
        self.keep();
    }
}

/// Writes the file atomically: a start reads the former content or this one.
fn write(data_dir: &Path, kept: &ClockFile) -> io::Result<()> {
    data_file::write(&data_dir.join(FILE), &serde_json::to_vec(kept)?)
}
