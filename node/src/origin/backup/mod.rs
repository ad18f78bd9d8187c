//! Backups of what a node keeps on its own disk: the embedded store, the outbox, and the files that go on with them.
//!
//! `source` takes the moment of each database and writes its rows, `read` reads a backup and finds whatever is wrong with it, `restore`
//! fills an empty data folder, and `stream` makes a backup of a running node as fast as its reader takes it.

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
pub use error::{BackupError, Place};
pub use read::check;
pub use restore::{Restored, is_unfinished, restore, restored};
pub use source::{Origin, Source, Stopped, StoppedError, WriteError};
pub use stream::{BackupRefused, BackupStream, Backups};

/// The databases of a node, as a backup names them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Database {
    Store,
    Outbox,
}

impl Database {
    /// Also that of its folder.
    fn name(self) -> &'static str {
        match self {
            Self::Store => "store",
            Self::Outbox => "outbox",
        }
    }
}

/// What a backup says of itself first.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Header {
    /// Of the program that wrote it.
    pub node_version: String,
    pub node_id: String,
    /// The system clock when it was begun: all that was acknowledged before is in it.
    pub taken_ms: u64,
    /// The versions of the rows; none: the database is not in it.
    pub store_format: Option<String>,
    pub outbox_format: Option<String>,
    /// An estimate, for who watches.
    pub rows_about: u64,
}

/// What a backup holds, as it says last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Totals {
    pub tables: u64,
    pub rows: u64,
    /// Of keys and values.
    pub row_bytes: u64,
}

/// A backup that was read to its end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Summary {
    pub header: Header,
    pub totals: Totals,
    /// Of the backup itself.
    pub bytes: u64,
}
