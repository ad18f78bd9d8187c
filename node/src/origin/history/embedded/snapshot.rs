//! The store as a backup has it.

use std::path::Path;

use super::open::{FORMAT_VERSION, MARKER, OpenError, Opened, TABLES};
use super::partitions::Partition;
use super::{Embedded, RUNS, STATE, failed};
use crate::origin::disk::snapshot::DiskSnapshot;
use crate::origin::history::StoreError;

/// The version of the rows.
pub(in crate::origin) const STORE_FORMAT: &str = FORMAT_VERSION;

/// The store of a node that does not run. Blocks on the disk.
pub(in crate::origin) fn stopped_snapshot(path: &Path) -> Result<DiskSnapshot, OpenError> {
    if !path.join(MARKER).exists() {
        return Err(OpenError::Missing(path.to_owned()));
    }
    let taken = Opened::open(path)?.partitions.snapshot(STORE_FORMAT, &TABLES);
    taken.map_err(|error| OpenError::Damaged { path: path.to_owned(), reason: error.to_string() })
}

/// A store of this version may have a table of this name.
pub(in crate::origin) fn is_stored_table(name: &str) -> bool {
    TABLES.contains(&name) || Partition::parse(name).is_some_and(|partition| partition.name() == name)
}

/// The row is not restored: it says of the runs before that all they have delivered is stored, and whatever came after the backup is
/// not. So nobody is resumed from them.
pub(in crate::origin) fn ends_with_a_restore(table: &str, key: &[u8]) -> bool {
    table == STATE && key == RUNS.as_bytes()
}

impl Embedded {
    pub(super) fn take_snapshot(&self) -> Result<DiskSnapshot, StoreError> {
        let partitions = self.partitions.lock().clone().ok_or(StoreError::ShutDown)?;
        partitions.snapshot(STORE_FORMAT, &TABLES).map_err(failed)
    }
}
