//! A database as it was at one moment, read while others write to it.

use fjall::{Database, Keyspace, KvPair, Readable as _, Snapshot};

/// The rows of a database at one moment. As long as it is open, rows that were removed since stay on the disk.
pub struct DiskSnapshot {
    format: &'static str,
    snapshot: Snapshot,
    tables: Vec<(Box<str>, Keyspace)>,
    /// Last, so that it outlives its tables.
    _database: Database,
}

impl DiskSnapshot {
    /// `tables` is called when the moment is fixed. A table that is made later has no rows of it, and one that is dropped later keeps its
    /// files for as long as the snapshot has it.
    pub(in crate::origin) fn take(
        database: &Database,
        format: &'static str,
        tables: impl FnOnce() -> Vec<(Box<str>, Keyspace)>,
    ) -> Self {
        let snapshot = database.snapshot();
        Self { format, snapshot, tables: tables(), _database: database.clone() }
    }

    /// The version of what its rows mean.
    pub(in crate::origin) fn format(&self) -> &'static str {
        self.format
    }

    /// An estimate.
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
