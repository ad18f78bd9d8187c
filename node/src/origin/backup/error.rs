//! Errors while a backup is read or restored.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::format::FORMAT;

/// Location of a finding in a backup.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockLocation {
    /// Byte offset at which the block begins.
    pub byte: u64,
    /// Number of the block, from 0.
    pub block: u64,
    /// Database and name of the table, for blocks of rows.
    pub table: Option<Box<str>>,
}

/// Reason why a backup was not read to its end, or not restored.
#[derive(Debug)]
pub enum BackupError {
    /// The file does not begin like a backup.
    Foreign,
    Version {
        found: String,
    },
    /// The format of a database's rows is not one that this version restores.
    Rows {
        database: &'static str,
        found: String,
        known: &'static str,
        node_version: String,
    },
    /// The backup is truncated.
    Cut(BlockLocation),
    Damaged {
        location: BlockLocation,
        reason: &'static str,
    },
    /// The writer has recorded in the backup that it gave up, so the backup is incomplete.
    GaveUp {
        location: BlockLocation,
        reason: String,
    },
    Unread(io::Error),
    /// The data folder is not empty.
    NotEmpty {
        folder: PathBuf,
        found: String,
    },
    /// Another restore is filling the folder.
    Busy(PathBuf),
    Unwritten {
        path: PathBuf,
        reason: String,
    },
}

impl fmt::Display for BlockLocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} (block {}", self.byte, self.block)?;
        if let Some(table) = &self.table {
            write!(f, " of {table}")?;
        }
        f.write_str(")")
    }
}

impl fmt::Display for BackupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Foreign => f.write_str("this is no backup of Fanfare"),
            Self::Version { found } => {
                write!(f, "the backup has the format {found}, and this version reads the format {FORMAT:04}")
            }
            Self::Rows { database, found, known, node_version } => write!(
                f,
                "the {database} in the backup has the format '{found}', and this version reads '{known}': restore it \
                 with the version that wrote it, {node_version}"
            ),
            Self::Cut(location) => {
                write!(f, "the backup is cut short: it ends within the block at {location}")
            }
            Self::Damaged { location, reason } => {
                write!(f, "the backup is damaged in the block at {location}: {reason}")
            }
            Self::GaveUp { location, reason } => {
                write!(f, "the backup is not whole: at {location} its writer gave up, because {reason}")
            }
            Self::Unread(_) => f.write_str("the backup cannot be read"),
            Self::NotEmpty { folder, found } => write!(
                f,
                "{} is not empty, it has {found}: a backup is restored into an empty folder only",
                folder.display()
            ),
            Self::Busy(folder) => write!(f, "another restore fills {}", folder.display()),
            Self::Unwritten { path, reason } => write!(f, "cannot write {}: {reason}", path.display()),
        }
    }
}

impl std::error::Error for BackupError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Unread(error) => Some(error),
            _ => None,
        }
    }
}
