//! The clock of the node over restarts: what it knows of the time is kept in the data folder, and a step is told.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, LazyLock};
use std::time::Duration;

use metrics::{Counter, counter};
use serde::{Deserialize, Serialize};

use crate::data_file;
use crate::model::{Cause, Clock, ClockState, Left, STEP_MS, since_boot_ms};
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::OFTEN;

const FILE: &str = "clock.json";
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// On the same boot the file says as much however old it is.
const KEEP_EVERY: Duration = Duration::from_secs(60);

static STEPS: LazyLock<Counter> = LazyLock::new(|| counter!("fanfare_clock_steps_total"));

/// Times are milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kept {
    /// As the system names it; none where it does not.
    boot: Option<Box<str>>,
    since_boot_ms: u64,
    /// The time by which rows expire, at that moment.
    expiry_ms: u64,
    /// The system clock where that is apart, and for how long it has been so.
    stepped: Option<(u64, u64)>,
    #[serde(default)]
    away: bool,
}

/// Takes up what the incarnation before has left, and watches the clock from then on. To be called when the store has raised the clock, and before anything expires.
pub(super) fn begin(clock: &Clock, data_dir: &Path, hold_ms: u64, tasks: &Tasks) {
    let boot = boot();
    let stored_ms = clock.floor_ms();
    let left = read(data_dir).map(|kept| {
        let left = Left {
            boot_ms: kept.since_boot_ms,
            line_ms: kept.expiry_ms,
            stepped: kept.stepped,
            is_away: kept.away,
        };
        (left, boot.is_some() && kept.boot == boot)
    });
    // Without the file the newest row is the last that is known of the time.
    let of_store = || Left { boot_ms: since_boot_ms(), line_ms: stored_ms, stepped: None, is_away: false };
    clock.begin(left.or_else(|| (stored_ms > 0).then(|| (of_store(), false))), hold_ms);
    let now_ms = clock.now_ms();
    if stored_ms > now_ms.saturating_add(STEP_MS) {
        let by_s = (stored_ms - now_ms) / 1_000;
        tracing::warn!(
            by_s,
            "the newest stored row is ahead of the system clock: timestamps go on from there until it has passed"
        );
    }
    tell(&ClockState::default(), &clock.state(), hold_ms);
    let keeper = Arc::new(Keeper { clock: clock.clone(), data_dir: data_dir.to_owned(), boot });
    keeper.keep();
    tasks.spawn("clock", OnStop::Cancel, watch(keeper, hold_ms));
}

/// Keeps what is known of the time in the data folder, also when it is dropped: a step that is under way goes on in the next incarnation.
struct Keeper {
    clock: Clock,
    data_dir: PathBuf,
    boot: Option<Box<str>>,
}

/// Never returns.
async fn watch(keeper: Arc<Keeper>, hold_ms: u64) {
    let clock = keeper.clock.clone();
    let (mut before, mut since_kept) = (clock.state(), Duration::ZERO);
    loop {
        tokio::time::sleep(LOOK_EVERY).await;
        since_kept += LOOK_EVERY;
        let state = clock.state();
        tell(&before, &state, hold_ms);
        if since_kept >= KEEP_EVERY || before.apart.is_some() != state.apart.is_some() {
            since_kept = Duration::ZERO;
            let keeper = Arc::clone(&keeper);
            // A failed write says so, and the next round tries again.
            tokio::task::spawn_blocking(move || keeper.keep()).await.ok();
        }
        before = state;
    }
}

/// Nothing expires by the system clock, since that has been set or is wrong.
pub(super) fn is_apart(clock: &Clock) -> bool {
    matches!(clock.state().apart, Some((_, Cause::Stepped)))
}

/// Says what has changed.
fn tell(before: &ClockState, state: &ClockState, hold_ms: u64) {
    let steps = state.steps - before.steps;
    STEPS.increment(steps);
    let hold_s = hold_ms / 1_000;
    match (before.apart, state.apart) {
        (_, Some((ahead_ms, cause))) if steps > 0 || before.apart.is_none() => {
            let ahead_s = ahead_ms / 1_000;
            match cause {
                Cause::Stepped => tracing::warn!(
                    target: OFTEN,
                    ahead_s,
                    hold_s,
                    "the system clock has stepped: nothing expires by its new time until that has held"
                ),
                Cause::Away => tracing::info!(
                    ahead_s,
                    hold_s,
                    "this machine has booted since the node ran: nothing expires by the system clock until it has held"
                ),
            }
        }
        (Some((ahead_ms, _)), None) => {
            let ahead_s = ahead_ms / 1_000;
            tracing::info!(ahead_s, "the system clock and the time by which rows expire are one again");
        }
        _ if steps > 0 => {
            tracing::warn!(target: OFTEN, steps, "the system clock has stepped, and gone back: nothing has expired by it");
        }
        _ => {}
    }
}

fn boot() -> Option<Box<str>> {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    Some(boot.trim().into())
}

/// None: there is none, or it is damaged.
fn read(data_dir: &Path) -> Option<Kept> {
    let file = data_dir.join(FILE);
    let text = match std::fs::read(&file) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return None,
        read => read,
    };
    let kept = text.and_then(|text| serde_json::from_slice(&text).map_err(io::Error::from));
    kept.inspect_err(|error| tracing::warn!(%error, file = %file.display(), "the kept time was not read"))
        .ok()
}

impl Keeper {
    fn keep(&self) {
        let Left { boot_ms, line_ms, stepped, is_away } = self.clock.left();
        let kept = Kept {
            boot: self.boot.clone(),
            since_boot_ms: boot_ms,
            expiry_ms: line_ms,
            stepped,
            away: is_away,
        };
        if let Err(error) = write(&self.data_dir, &kept) {
            tracing::warn!(target: OFTEN, %error, "the time was not kept in the data folder");
        }
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        self.keep();
    }
}

/// Written whole: a start reads the former file or this one.
fn write(data_dir: &Path, kept: &Kept) -> io::Result<()> {
    data_file::write(&data_dir.join(FILE), &serde_json::to_vec(kept)?)
}
