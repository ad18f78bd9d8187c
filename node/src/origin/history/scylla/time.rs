//! Time of the database. It decides when a row expires, so a node whose own clock is wrong uses it, and expires no rows of other nodes.

use std::sync::atomic::{AtomicI64, Ordering};

use super::connection::PreparedSession;
use super::failed;
use super::values::{natural, number};
use crate::model::since_boot_ms;
use crate::origin::history::StoreError;

/// Offset from the time since boot to the database's time.
#[derive(Default)]
pub(super) struct DatabaseTime {
    offset_ms: AtomicI64,
}

impl DatabaseTime {
    /// Epoch milliseconds of the database, accurate to half the duration of the last request for it.
    pub(super) fn now_ms(&self) -> u64 {
        natural(number(since_boot_ms()).saturating_add(self.offset_ms.load(Ordering::Relaxed)))
    }

    pub(super) async fn ask(&self, database: &PreparedSession) -> Result<(), StoreError> {
        let before_ms = since_boot_ms();
        let found = database.session.execute_unpaged(&database.statements.now, ()).await.map_err(failed)?;
        let after_ms = since_boot_ms();
        let rows = found.into_rows_result().map_err(failed)?;
        let (now_ms,) = rows.first_row::<(i64,)>().map_err(failed)?;
        let requested_ms = before_ms + (after_ms - before_ms) / 2;
        self.offset_ms.store(now_ms.saturating_sub(number(requested_ms)), Ordering::Relaxed);
        Ok(())
    }
}
