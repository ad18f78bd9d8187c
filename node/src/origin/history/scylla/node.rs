//! The database's record of this node: its incarnations, and the highest timestamp of its rows.

use std::sync::Weak;
use std::time::{Duration, Instant};

use super::values::{natural, number, written_at};
use super::{ScyllaShared, failed, policies};
use crate::origin::history::{HistoryCoverage, PreviousIncarnation, StoreError, incarnations};

/// Interval of saves. After a crash, the node's clock may start this much behind its last row.
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// Interval of time synchronisation. The clocks of node and database drift apart by less than a millisecond in it.
const TIME_EVERY: Duration = Duration::from_secs(60);

/// Reads the stored incarnations and the highest timestamp.
pub(super) async fn read(shared: &ScyllaShared) -> Result<(Vec<u8>, u64), StoreError> {
    let database = shared.database();
    let values = (&*shared.options.node_id,);
    let found = database.session.execute_unpaged(&database.statements.node, values).await.map_err(failed)?;
    let rows = found.into_rows_result().map_err(failed)?;
    let row = rows.maybe_first_row::<(Option<Vec<u8>>, Option<i64>)>().map_err(failed)?;
    let (record, highest_ms) = row.unwrap_or_default();
    Ok((record.unwrap_or_default(), highest_ms.map_or(0, natural)))
}

pub(super) async fn begin_incarnation(
    shared: &ScyllaShared,
    incarnation: u64,
    kept: HistoryCoverage,
) -> Result<Vec<PreviousIncarnation>, StoreError> {
    let _one_at_a_time = shared.node_row_lock.lock().await;
    let (stored, highest_ms) = read(shared).await?;
    let highest_ms = highest_ms.max(shared.highest_ms());
    let (record, previous) =
        incarnations::record_incarnation(&stored, (incarnation, kept), shared.clock.highest_ms(), highest_ms);
    let database = shared.database();
    let values = (&*shared.options.node_id, record);
    database.session.execute_unpaged(&database.statements.set_incarnations, values).await.map_err(failed)?;
    policies::announce(shared, incarnation, kept.policies).await?;
    Ok(previous)
}

/// Imports the incarnations that another store has of this node, unless the node has already begun here.
pub(super) async fn import_incarnations(
    shared: &ScyllaShared,
    incarnations: Vec<u8>,
) -> Result<(), StoreError> {
    let _one_at_a_time = shared.node_row_lock.lock().await;
    let (stored, _) = read(shared).await?;
    if !stored.is_empty() {
        return Ok(());
    }
    let database = shared.database();
    let values = (&*shared.options.node_id, incarnations);
    let written = database.session.execute_unpaged(&database.statements.set_incarnations, values).await;
    written.map(drop).map_err(failed)
}

pub(super) async fn save_highest(shared: &ScyllaShared) -> Result<(), StoreError> {
    let highest_ms = shared.highest_ms();
    if highest_ms == 0 {
        return Ok(());
    }
    let database = shared.database();
    // The higher value wins, whichever write arrives last.
    let values = (&*shared.options.node_id, number(highest_ms), written_at(highest_ms));
    let written = database.session.execute_unpaged(&database.statements.set_highest, values).await;
    written.map(drop).map_err(failed)
}

/// Saves the highest timestamp periodically, until the store is dropped.
pub(super) async fn save_periodically(shared: Weak<ScyllaShared>) {
    let (mut saved_ms, mut last_read) = (0, Instant::now());
    loop {
        tokio::time::sleep(SAVE_EVERY).await;
        let Some(shared) = shared.upgrade() else { return };
        let highest_ms = shared.highest_ms();
        // A failed save is repeated in the next round.
        if highest_ms > saved_ms && save_highest(&shared).await.is_ok() {
            saved_ms = highest_ms;
        }
        if last_read.elapsed() >= TIME_EVERY && shared.time.ask(&shared.database()).await.is_ok() {
            last_read = Instant::now();
        }
        let _one_at_a_time = shared.node_row_lock.lock().await;
        policies::renew_announcement(&shared).await;
    }
}
