//! The runs of a node that wrote into its store, as one value.

use super::{FormerRun, Kept};

/// Before the present one. A node that restarts more often within a resume window resumes nobody of the runs before.
const FORMER_MAX: usize = 16;
/// Incarnation, policies, flags, begin and last row, big-endian.
const ENTRY_BYTES: usize = 5 * 8;

/// What is stored once `kept` is said of the present run, and the runs before, the latest first. `last_ms` is the time of the
/// last row of all.
pub(super) fn note(
    stored: &[u8],
    (incarnation, kept): (u64, Kept),
    now_ms: u64,
    last_ms: u64,
) -> (Vec<u8>, Vec<FormerRun>) {
    let mut runs: Vec<FormerRun> = stored.as_chunks().0.iter().map(read).collect();
    match runs.first_mut() {
        Some(own) if own.incarnation == incarnation => own.kept = kept,
        before => {
            if let Some(before) = before {
                before.last_ms = last_ms;
            }
            runs.insert(0, FormerRun { incarnation, kept, began_ms: now_ms, last_ms: 0 });
            runs.truncate(1 + FORMER_MAX);
        }
    }
    runs.truncate(if kept.outlasts { 1 } else { usize::MAX });
    (runs.iter().flat_map(write).collect(), runs.split_off(1))
}

fn write(run: &FormerRun) -> Vec<u8> {
    let FormerRun { incarnation, kept, began_ms, last_ms } = *run;
    let Kept { policies, has_changed, is_all, outlasts } = kept;
    let policies = if has_changed { Kept::UNLIKE_ALL } else { policies };
    let flags = u64::from(is_all) | u64::from(outlasts) << 1;
    [incarnation, policies, flags, began_ms, last_ms].map(u64::to_be_bytes).concat()
}

fn read(entry: &[u8; ENTRY_BYTES]) -> FormerRun {
    let field = |place: usize| u64::from_be_bytes(std::array::from_fn(|byte| entry[8 * place + byte]));
    let (policies, has_changed) = (field(1), field(1) == Kept::UNLIKE_ALL);
    let kept = Kept { policies, has_changed, is_all: field(2) & 1 != 0, outlasts: field(2) & 2 != 0 };
    FormerRun { incarnation: field(0), kept, began_ms: field(3), last_ms: field(4) }
}
