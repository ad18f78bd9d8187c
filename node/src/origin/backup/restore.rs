//! Restores a backup into an empty data folder.
//!
//! All data is written under `restoring/` and moved at the end. While that folder exists, no node starts on the data folder, and a restore
//! starts from the beginning. The interrupted restore was alone in the folder, so all files with the names of `MOVED` are left-overs of
//! it.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fjall::{OwnedWriteBatch, PersistMode};
use serde::{Deserialize, Serialize};

use super::error::BackupError;
use super::read::{BackupPart, BlockRows, read};
use super::{BackupDatabase, BackupHeader, BackupSummary};
use crate::accounts::development::make_private_folder;
use crate::data_file;
use crate::origin::disk::engine;
use crate::origin::disk::tables::{self, Table, UNSEALED_BYTES_MAX};
use crate::origin::history;

const RESTORE_FOLDER: &str = "restoring";
/// Folder that exists on a new volume.
const LOST_AND_FOUND: &str = "lost+found";
const RESTORED: &str = "restored.json";
/// Files of the data folder that a backup may bring.
const FILES: [&str; 1] = ["node-id"];
/// Everything that a restore leaves in the data folder, in the order in which it is moved there.
const MOVED: [&str; 4] = ["node-id", RESTORED, "outbox", "store"];
/// Bytes of one write, after which the memory of the tables is checked.
const LOOK_BYTES: usize = 1024 * 1024;
/// Overhead of a row beside its key and value while it is written, in bytes.
const ROW_BYTES: usize = 128;
/// Initial row capacity of a write.
const ROWS: usize = 1024;

/// Origin of the data of a folder. Times are epoch milliseconds of the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RestoreRecord {
    /// Start of the backup. The folder lacks everything later, including used nonces and revocations.
    pub taken_ms: u64,
    /// End of the restore.
    pub restored_ms: u64,
}

/// Reads the record that a restore has left in the data folder; `None` if the folder was not restored.
///
/// # Errors
/// The file cannot be read.
pub fn restore_record(data_dir: &Path) -> io::Result<Option<RestoreRecord>> {
    match fs::read(data_dir.join(RESTORED)) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::from),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether a restore into the folder is under way or was interrupted.
pub fn is_unfinished(data_dir: &Path) -> bool {
    data_dir.join(RESTORE_FOLDER).exists()
}

/// Fills the data folder, which must be empty or missing. Reports the rows written so far and their estimated total.
///
/// # Errors
/// The folder is not empty, the backup is incomplete, or the disk refuses writes. No restored data stays in place then.
pub fn restore(
    from: impl Read,
    data_dir: &Path,
    now_ms: impl FnOnce() -> u64,
    on_progress: impl FnMut(u64, u64),
) -> Result<BackupSummary, BackupError> {
    let aside = RestoreFolder::open(data_dir)?;
    let outcome = fill(&aside, from, on_progress).and_then(|summary| {
        let restored = RestoreRecord {
            taken_ms: summary.header.taken_ms,
            restored_ms: now_ms().max(summary.header.taken_ms),
        };
        aside.finish(restored)?;
        Ok(summary)
    });
    outcome.inspect_err(|_| aside.discard())
}

fn fill(
    aside: &RestoreFolder,
    from: impl Read,
    on_progress: impl FnMut(u64, u64),
) -> Result<BackupSummary, BackupError> {
    let mut targets: Vec<RestoreTarget> = Vec::new();
    let begin = |_: &BackupHeader| Ok(());
    let summary = read(from, on_progress, begin, |part| match part {
        BackupPart::File(name, content) if FILES.contains(&name) => {
            let path = aside.path(name);
            data_file::write_private(&path, content).map_err(unwritten(&path))
        }
        // A file of a later version is skipped: if that version needed it, the backup would have another format number.
        BackupPart::File(..) => Ok(()),
        BackupPart::Table(database, name) => {
            if targets.last().is_none_or(|target| target.of != database) {
                targets.push(RestoreTarget::make(database, &aside.path(database.name()))?);
            }
            targets.last_mut().map_or(Ok(()), |target| target.begin(name))
        }
        BackupPart::Rows(rows) => targets.last_mut().map_or(Ok(()), |target| target.put(rows)),
    })?;
    targets.into_iter().try_for_each(RestoreTarget::finish)?;
    Ok(summary)
}

/// The folder in which a restore is made.
struct RestoreFolder {
    data_dir: PathBuf,
    /// Lock, held for the whole restore.
    _lock: File,
}

impl RestoreFolder {
    fn open(data_dir: &Path) -> Result<Self, BackupError> {
        let folder = data_dir.join(RESTORE_FOLDER);
        only_own(data_dir)?;
        make_private_folder(&folder).map_err(unwritten(&folder))?;
        let path = folder.join("lock");
        let lock = File::options().write(true).create(true).truncate(false).open(&path);
        let lock = lock.map_err(unwritten(&path))?;
        lock.try_lock().map_err(|_| BackupError::Busy(data_dir.to_owned()))?;
        let aside = Self { data_dir: data_dir.to_owned(), _lock: lock };
        for name in MOVED {
            for path in [aside.path(name), data_dir.join(name)] {
                remove(&path).map_err(unwritten(&path))?;
            }
        }
        Ok(aside)
    }

    fn path(&self, name: &str) -> PathBuf {
        self.data_dir.join(RESTORE_FOLDER).join(name)
    }

    /// Moves all data into place. A crash between two moves leaves `restoring/` behind.
    fn finish(&self, restored: RestoreRecord) -> Result<(), BackupError> {
        let file = self.path(RESTORED);
        let text = serde_json::to_vec(&restored).map_err(io::Error::from);
        text.and_then(|text| data_file::write_private(&file, &text)).map_err(unwritten(&file))?;
        let data_dir = &self.data_dir;
        let moved = || {
            self.give_to_owner()?;
            for name in MOVED {
                match fs::rename(self.path(name), data_dir.join(name)) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                }
            }
            sync(data_dir)?;
            fs::remove_dir_all(data_dir.join(RESTORE_FOLDER))?;
            sync(data_dir)
        };
        moved().map_err(unwritten(data_dir))
    }

    /// Gives all restored files to the owner of the data folder, as whom the node runs, if root runs the restore.
    fn give_to_owner(&self) -> io::Result<()> {
        let owner = fs::metadata(&self.data_dir)?;
        let own = fs::metadata(self.data_dir.join(RESTORE_FOLDER))?;
        if own.uid() != 0 || (owner.uid(), owner.gid()) == (own.uid(), own.gid()) {
            return Ok(());
        }
        let mut waiting = MOVED.map(|name| self.path(name)).to_vec();
        while let Some(path) = waiting.pop() {
            let found = match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                found => found?,
            };
            if found.is_dir() {
                for entry in fs::read_dir(&path)? {
                    waiting.push(entry?.path());
                }
            }
            std::os::unix::fs::lchown(&path, Some(owner.uid()), Some(owner.gid()))?;
        }
        Ok(())
    }

    /// Removes all restored files after an error. The next restore finds files that cannot be removed.
    fn discard(&self) {
        for name in MOVED {
            remove(&self.data_dir.join(name)).ok();
        }
        fs::remove_dir_all(self.data_dir.join(RESTORE_FOLDER)).ok();
    }
}

/// Checks that the folder holds nothing but left-overs of an interrupted restore.
fn only_own(data_dir: &Path) -> Result<(), BackupError> {
    let entries = match fs::read_dir(data_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(unwritten(data_dir))?,
    };
    let is_begun = is_unfinished(data_dir);
    for entry in entries {
        let name = entry.map_err(unwritten(data_dir))?.file_name();
        let is_own = name == RESTORE_FOLDER || is_begun && MOVED.iter().any(|own| name == *own);
        if !is_own && name != LOST_AND_FOUND {
            let found = name.to_string_lossy().into_owned();
            return Err(BackupError::NotEmpty { folder: data_dir.to_owned(), found });
        }
    }
    Ok(())
}

fn remove(path: &Path) -> io::Result<()> {
    let removed = if path.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Syncs a folder, so that the names in it survive a loss of power.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn unwritten<E: fmt::Display>(path: &Path) -> impl FnOnce(E) -> BackupError + use<E> {
    let path = path.to_owned();
    move |error| BackupError::Unwritten { path, reason: error.to_string() }
}

/// A database that a restore is filling.
struct RestoreTarget {
    of: BackupDatabase,
    folder: PathBuf,
    database: fjall::Database,
    tables: Vec<Table>,
    table: Box<str>,
    unlooked: usize,
}

impl RestoreTarget {
    fn make(of: BackupDatabase, folder: &Path) -> Result<Self, BackupError> {
        engine::listen();
        make_private_folder(folder).map_err(unwritten(folder))?;
        let database = tables::database(folder).open().map_err(failed(folder))?;
        let (tables, table) = (Vec::new(), "".into());
        Ok(Self { of, folder: folder.to_owned(), database, tables, table, unlooked: 0 })
    }

    fn begin(&mut self, name: &str) -> Result<(), BackupError> {
        let opened = Table::open(&self.database, name, UNSEALED_BYTES_MAX);
        self.tables.push(opened.map_err(failed(&self.folder))?);
        self.table = name.into();
        Ok(())
    }

    fn put(&mut self, rows: BlockRows<'_>) -> Result<(), BackupError> {
        let written = self.try_put(rows);
        written.map_err(failed(&self.folder))
    }

    fn try_put(&mut self, rows: BlockRows<'_>) -> fjall::Result<()> {
        let Some(table) = self.tables.last() else { return Ok(()) };
        let keyspace = table.keyspace();
        let mut batch = OwnedWriteBatch::with_capacity(self.database.clone(), ROWS);
        for (key, value) in rows {
            if self.of == BackupDatabase::Store && history::is_dropped_by_restore(&self.table, key) {
                continue;
            }
            batch.insert(keyspace, key, value);
            self.unlooked += key.len() + value.len() + ROW_BYTES;
            if self.unlooked >= LOOK_BYTES {
                self.unlooked = 0;
                let next = OwnedWriteBatch::with_capacity(self.database.clone(), ROWS);
                std::mem::replace(&mut batch, next).commit()?;
                tables::seal_full(&self.tables)?;
            }
        }
        batch.commit()
    }

    fn finish(self) -> Result<(), BackupError> {
        self.database.persist(PersistMode::SyncAll).map_err(failed(&self.folder))
    }
}

fn failed(folder: &Path) -> impl FnOnce(fjall::Error) -> BackupError + use<> {
    let path = folder.to_owned();
    move |error| BackupError::Unwritten { path, reason: engine::reason(&error) }
}
