//! Why a backup cannot be read or restored.

use std::fmt;
use std::io;
use std::path::PathBuf;

use super::format::FORMAT;

/// Where in a backup something was found.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Place {
    /// Where the block begins.
    pub byte: u64,
    /// From 0.
    pub block: u64,
    /// Database and name, of rows.
    pub table: Option<Box<str>>,
}

/// Why a backup was not read to its end, or not restored.
#[derive(Debug)]
pub enum BackupError {
    /// It does not begin as a backup.
    Foreign,
    Version {
        found: String,
    },
    /// Of the rows of a database.
    Rows {
        database: &'static str,
        found: String,
        known: &'static str,
        node_version: String,
    },
    /// It ends before its end.
    Cut(Place),
    Damaged {
        place: Place,
        reason: &'static str,
    },
    /// Whoever wrote it says that it is not whole.
    GaveUp {
        place: Place,
        reason: String,
    },
    Unread(io::Error),
    /// The data folder has something in it.
    NotEmpty {
        folder: PathBuf,
        found: String,
    },
    /// Another restore fills the folder.
    Busy(PathBuf),
    Unwritten {
        path: PathBuf,
        reason: String,
    },
}

impl fmt::Display for Place {
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
            Self::Cut(place) => write!(f, "the backup is cut short: it ends within the block at {place}"),
            Self::Damaged { place, reason } => {
                write!(f, "the backup is damaged in the block at {place}: {reason}")
            }
            Self::GaveUp { place, reason } => {
                write!(f, "the backup is not whole: at {place} its writer gave up, because {reason}")
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
