//! Incarnations of the node that wrote into the store.

use fjall::OwnedWriteBatch;

use super::INCARNATIONS;
use super::tables::Table;
use crate::origin::history::{HistoryCoverage, PreviousIncarnation, incarnations};

/// Records the coverage of the present incarnation in `batch`, and returns the previous ones, the latest first. `last_ms` is the time of
/// the last row of all.
pub(super) fn begin_incarnation(
    state: &Table,
    batch: &mut OwnedWriteBatch,
    current: (u64, HistoryCoverage),
    now_ms: u64,
    last_ms: u64,
) -> fjall::Result<Vec<PreviousIncarnation>> {
    let found = state.keyspace().get(INCARNATIONS)?;
    let (record, previous) =
        incarnations::record_incarnation(found.as_deref().unwrap_or_default(), current, now_ms, last_ms);
    batch.insert(state.keyspace(), INCARNATIONS, record);
    Ok(previous)
}
