//! The outbox in backups.

use std::path::Path;

use super::EventOutbox;
use super::store::{FORMAT_VERSION, MARKER, NAMES, OutboxTables};
use crate::origin::disk::snapshot::DiskSnapshot;
use crate::origin::history::StoreError;

/// Version of the row format.
pub(in crate::origin) const FORMAT: &str = FORMAT_VERSION;

/// Opens the outbox of a stopped node for a snapshot; `None` if the folder has none. Blocks on the disk.
pub(in crate::origin) fn stopped_snapshot(folder: &Path) -> Result<Option<DiskSnapshot>, StoreError> {
    if !folder.join(MARKER).exists() {
        return Ok(None);
    }
    Ok(Some(OutboxTables::open(folder)?.snapshot()))
}

/// Returns whether an outbox of this version has a table of this name.
pub(in crate::origin) fn is_table(name: &str) -> bool {
    NAMES.contains(&name)
}

impl EventOutbox {
    /// Takes a snapshot of all rows, including everything answered before.
    pub fn snapshot(&self) -> DiskSnapshot {
        self.engine.tables.snapshot()
    }
}

impl OutboxTables {
    fn snapshot(&self) -> DiskSnapshot {
        let tables =
            || NAMES.into_iter().map(Into::into).zip(self.all().map(|table| table.keyspace().clone()));
        DiskSnapshot::take(&self.database, FORMAT, || tables().collect())
    }
}
