//! The embedded store in backups.

use std::path::Path;

use super::open::{FORMAT_VERSION, MARKER, OpenedStore, StoreOpenError, TABLES};
use super::partitions::Partition;
use super::{EmbeddedStore, INCARNATIONS, STATE, failed};
use crate::origin::disk::snapshot::DiskSnapshot;
use crate::origin::history::StoreError;

/// Version of the row format.
pub(in crate::origin) const STORE_FORMAT: &str = FORMAT_VERSION;

/// Opens the store of a stopped node for a snapshot. Blocks on the disk.
pub(in crate::origin) fn stopped_snapshot(path: &Path) -> Result<DiskSnapshot, StoreOpenError> {
    if !path.join(MARKER).exists() {
        return Err(StoreOpenError::Missing(path.to_owned()));
    }
    let taken = OpenedStore::open(path)?.partitions.snapshot(STORE_FORMAT, &TABLES);
    taken.map_err(|error| StoreOpenError::Damaged { path: path.to_owned(), reason: error.to_string() })
}

/// Returns whether a store of this version may have a table of this name.
pub(in crate::origin) fn is_stored_table(name: &str) -> bool {
    TABLES.contains(&name) || Partition::parse(name).is_some_and(|partition| partition.name() == name)
}

/// Returns whether a restore drops the row, which is that of the incarnations. The row says that all their deliveries are stored, but
/// messages after the backup are not. So no client resumes from these incarnations.
pub(in crate::origin) fn is_dropped_by_restore(table: &str, key: &[u8]) -> bool {
    table == STATE && key == INCARNATIONS.as_bytes()
}

impl EmbeddedStore {
    pub(super) fn take_snapshot(&self) -> Result<DiskSnapshot, StoreError> {
        let partitions = self.partitions.lock().clone().ok_or(StoreError::ShutDown)?;
        partitions.snapshot(STORE_FORMAT, &TABLES).map_err(failed)
    }
}
