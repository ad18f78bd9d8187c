//! The runs of the node that wrote into the store.

use fjall::OwnedWriteBatch;

use super::RUNS;
use super::tables::Table;
use crate::origin::history::{FormerRun, Kept, runs};

/// Notes what is said of the present run in `batch`, and gives the former ones, the latest first. `last_ms` is the time of
/// the last row of all.
pub(super) fn begin(
    state: &Table,
    batch: &mut OwnedWriteBatch,
    said: (u64, Kept),
    now_ms: u64,
    last_ms: u64,
) -> fjall::Result<Vec<FormerRun>> {
    let found = state.keyspace().get(RUNS)?;
    let (noted, former) = runs::note(found.as_deref().unwrap_or_default(), said, now_ms, last_ms);
    batch.insert(state.keyspace(), RUNS, noted);
    Ok(former)
}
