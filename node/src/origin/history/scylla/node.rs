//! What the database keeps of this node by itself: its runs, and the highest time that it has given to a row.

use std::sync::Weak;
use std::time::{Duration, Instant};

use super::values::{natural, number, written_at};
use super::{Shared, failed, policies};
use crate::origin::history::{FormerRun, Kept, StoreError, runs};

/// A node that is killed may start with a clock that is so much behind its last row.
const NOTE_EVERY: Duration = Duration::from_secs(1);
/// Its clock and the database's drift by less than a millisecond in this time.
const TIME_EVERY: Duration = Duration::from_secs(60);

/// The runs as they were noted, and the highest time.
pub(super) async fn read(shared: &Shared) -> Result<(Vec<u8>, u64), StoreError> {
    let database = shared.database();
    let asked = (&*shared.options.node_id,);
    let found = database.session.execute_unpaged(&database.statements.node, asked).await.map_err(failed)?;
    let rows = found.into_rows_result().map_err(failed)?;
    let row = rows.maybe_first_row::<(Option<Vec<u8>>, Option<i64>)>().map_err(failed)?;
    let (noted, highest_ms) = row.unwrap_or_default();
    Ok((noted.unwrap_or_default(), highest_ms.map_or(0, natural)))
}

pub(super) async fn begin(
    shared: &Shared,
    incarnation: u64,
    kept: Kept,
) -> Result<Vec<FormerRun>, StoreError> {
    let _one_at_a_time = shared.noting.lock().await;
    let (stored, highest_ms) = read(shared).await?;
    let highest_ms = highest_ms.max(shared.highest_ms());
    let (noted, former) = runs::note(&stored, (incarnation, kept), shared.clock.highest_ms(), highest_ms);
    let database = shared.database();
    let values = (&*shared.options.node_id, noted);
    database.session.execute_unpaged(&database.statements.set_runs, values).await.map_err(failed)?;
    policies::say(shared, incarnation, kept.policies).await?;
    Ok(former)
}

/// Notes runs of another store of this node, unless it has begun here.
pub(super) async fn take_over(shared: &Shared, runs: Vec<u8>) -> Result<(), StoreError> {
    let _one_at_a_time = shared.noting.lock().await;
    let (stored, _) = read(shared).await?;
    if !stored.is_empty() {
        return Ok(());
    }
    let database = shared.database();
    let values = (&*shared.options.node_id, runs);
    let noted = database.session.execute_unpaged(&database.statements.set_runs, values).await;
    noted.map(drop).map_err(failed)
}

pub(super) async fn note_highest(shared: &Shared) -> Result<(), StoreError> {
    let highest_ms = shared.highest_ms();
    if highest_ms == 0 {
        return Ok(());
    }
    let database = shared.database();
    // The higher one stays, whichever comes last.
    let values = (&*shared.options.node_id, number(highest_ms), written_at(highest_ms));
    let noted = database.session.execute_unpaged(&database.statements.set_highest, values).await;
    noted.map(drop).map_err(failed)
}

/// Never returns before the store is dropped.
pub(super) async fn note(shared: Weak<Shared>) {
    let (mut noted_ms, mut asked) = (0, Instant::now());
    loop {
        tokio::time::sleep(NOTE_EVERY).await;
        let Some(shared) = shared.upgrade() else { return };
        let highest_ms = shared.highest_ms();
        // What fails is tried again.
        if highest_ms > noted_ms && note_highest(&shared).await.is_ok() {
            noted_ms = highest_ms;
        }
        if asked.elapsed() >= TIME_EVERY && shared.time.ask(&shared.database()).await.is_ok() {
            asked = Instant::now();
        }
        let _one_at_a_time = shared.noting.lock().await;
        policies::say_again(&shared).await;
    }
}
