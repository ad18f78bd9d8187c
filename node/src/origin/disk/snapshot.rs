//! Snapshot of a database, read while other threads write to the database.

use fjall::{Database, Keyspace, KvPair, Readable as _, Snapshot};

/// Rows of a database at one moment. While a snapshot is open, rows that were removed since stay on the disk.
pub struct DiskSnapshot {
    format: &'static str,
    snapshot: Snapshot,
    tables: Vec<(Box<str>, Keyspace)>,
    /// Last field, so that the database outlives its tables.
    _database: Database,
}

impl DiskSnapshot {
    /// Takes a snapshot; `tables` is called once its moment is fixed. A table that is created later has no rows in it. A table that is
    /// dropped later keeps its files until the snapshot is closed.
    pub(in crate::origin) fn take(
        database: &Database,
        format: &'static str,
        tables: impl FnOnce() -> Vec<(Box<str>, Keyspace)>,
    ) -> Self {
        let snapshot = database.snapshot();
        Self { format, snapshot, tables: tables(), _database: database.clone() }
    }

    /// Version of the row format.
    pub(in crate::origin) fn format(&self) -> &'static str {
        self.format
    }

    /// Estimated number of rows.
    pub(in crate::origin) fn rows_about(&self) -> u64 {
        self.tables.iter().map(|(_, keyspace)| keyspace.approximate_len() as u64).sum()
    }

    /// Each table by its name, with its rows in the order of their keys.
    pub(in crate::origin) fn tables(
        &self,
    ) -> impl Iterator<Item = (&str, impl Iterator<Item = fjall::Result<KvPair>>)> {
        self.tables.iter().map(|(name, keyspace)| {
            let rows = self.snapshot.iter(keyspace).map(fjall::Guard::into_inner);
            (&**name, rows)
        })
    }
}
