//! Backups of a node's local disk: the embedded store, the outbox, and the files that belong to them.
//!
//! `source` takes a snapshot of each database and writes its rows, and `read` reads and verifies a backup. `restore` fills an empty data
//! folder, and `stream` makes a backup of a running node as fast as its reader takes it.

mod error;
mod format;
mod read;
mod restore;
mod source;
mod stream;
#[cfg(test)]
mod tests;

use serde::{Deserialize, Serialize};

pub use super::disk::snapshot::DiskSnapshot;
pub use error::{BackupError, BlockLocation};
pub use read::check;
pub use restore::{RestoreRecord, is_unfinished, restore, restore_record};
pub use source::{BackupOrigin, BackupSource, BackupWriteError, StoppedError, StoppedNodeSource};
pub use stream::{BackupRefusal, BackupStream, Backups};

/// The databases of a node, as a backup names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackupDatabase {
    Store,
    Outbox,
}

impl BackupDatabase {
    /// The database's name, which is also the name of its folder.
    fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Outbox => "outbox",
        }
    }
}

/// First block of a backup: its origin and formats.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupHeader {
    /// Version of the program that wrote the backup.
    pub node_version: String,
    pub node_id: String,
    /// System clock at the beginning of the backup, in epoch milliseconds. All writes acknowledged before are in the backup.
    pub taken_ms: u64,
    /// Format of the store's rows; `None` if the backup has no store.
    pub store_format: Option<String>,
    pub outbox_format: Option<String>,
    /// Estimated number of rows, for progress display.
    pub rows_about: u64,
}

/// Last block of a backup: its totals.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct BackupTotals {
    pub tables: u64,
    pub rows: u64,
    /// Bytes of all keys and values.
    pub row_bytes: u64,
}

/// A backup that was read to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BackupSummary {
    pub header: BackupHeader,
    pub totals: BackupTotals,
    /// Size of the backup file in bytes.
    pub bytes: u64,
}
