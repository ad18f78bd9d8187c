//! Incarnations of a node that wrote into its store, as one value.

use super::{HistoryCoverage, PreviousIncarnation};

/// Previous incarnations that are kept. A node that restarts more often within a resume window cannot resume clients of older
/// incarnations.
const PREVIOUS_MAX: usize = 16;
/// Incarnation, policies, flags, begin and last row, big-endian.
const ENTRY_BYTES: usize = 5 * 8;

/// Records the coverage of the present incarnation. Returns the value to store, and the previous incarnations, the latest first. `last_ms`
/// is the time of the last row of all.
pub(super) fn record_incarnation(
    stored: &[u8],
    (incarnation, coverage): (u64, HistoryCoverage),
    now_ms: u64,
    last_ms: u64,
) -> (Vec<u8>, Vec<PreviousIncarnation>) {
    let mut incarnations: Vec<PreviousIncarnation> = stored.as_chunks().0.iter().map(read).collect();
    match incarnations.first_mut() {
        Some(own) if own.incarnation == incarnation => own.coverage = coverage,
        before => {
            if let Some(before) = before {
                before.last_ms = last_ms;
            }
            incarnations
                .insert(0, PreviousIncarnation { incarnation, coverage, began_ms: now_ms, last_ms: 0 });
            incarnations.truncate(1 + PREVIOUS_MAX);
        }
    }
    incarnations.truncate(if coverage.outlasts_resume_window { 1 } else { usize::MAX });
    (incarnations.iter().flat_map(write).collect(), incarnations.split_off(1))
}

fn write(previous: &PreviousIncarnation) -> Vec<u8> {
    let PreviousIncarnation { incarnation, coverage, began_ms, last_ms } = *previous;
    let HistoryCoverage { policies, has_changed, is_complete: is_all, outlasts_resume_window: outlasts } =
        coverage;
    let policies = if has_changed { HistoryCoverage::UNMATCHED_POLICIES } else { policies };
    let flags = u64::from(is_all) | u64::from(outlasts) << 1;
    [incarnation, policies, flags, began_ms, last_ms].map(u64::to_be_bytes).concat()
}

fn read(entry: &[u8; ENTRY_BYTES]) -> PreviousIncarnation {
    let field = |index: usize| u64::from_be_bytes(std::array::from_fn(|byte| entry[8 * index + byte]));
    let (policies, has_changed) = (field(1), field(1) == HistoryCoverage::UNMATCHED_POLICIES);
    let coverage = HistoryCoverage {
        policies,
        has_changed,
        is_complete: field(2) & 1 != 0,
        outlasts_resume_window: field(2) & 2 != 0,
    };
    PreviousIncarnation { incarnation: field(0), coverage, began_ms: field(3), last_ms: field(4) }
}
