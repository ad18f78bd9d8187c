//! The outbox as a backup has it.

use std::path::Path;

use super::Outbox;
use super::store::{FORMAT_VERSION, MARKER, NAMES, Tables};
use crate::origin::disk::snapshot::DiskSnapshot;
use crate::origin::history::StoreError;

/// The version of the rows.
pub(in crate::origin) const FORMAT: &str = FORMAT_VERSION;

/// The outbox of a node that does not run; none: the folder has none. Blocks on the disk.
pub(in crate::origin) fn stopped_snapshot(folder: &Path) -> Result<Option<DiskSnapshot>, StoreError> {
    if !folder.join(MARKER).exists() {
        return Ok(None);
    }
    Ok(Some(Tables::open(folder)?.snapshot()))
}

/// An outbox of this version has a table of this name.
pub(in crate::origin) fn is_table(name: &str) -> bool {
    NAMES.contains(&name)
}

impl Outbox {
    /// All rows at this moment, with all that was answered before.
    pub fn snapshot(&self) -> DiskSnapshot {
        self.engine.tables.snapshot()
    }
}

impl Tables {
    fn snapshot(&self) -> DiskSnapshot {
        let tables =
            || NAMES.into_iter().map(Into::into).zip(self.all().map(|table| table.keyspace().clone()));
        DiskSnapshot::take(&self.database, FORMAT, || tables().collect())
    }
}
