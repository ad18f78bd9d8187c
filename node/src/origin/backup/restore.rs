//! A backup into an empty data folder.
//!
//! All of it is written under `restoring/` and moved at its end. As long as that folder is there a node does not start on the data folder,
//! and a restore begins anew: it was alone there, so whatever else it finds of its own names is of the restore that was cut short.

use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fjall::{OwnedWriteBatch, PersistMode};
use serde::{Deserialize, Serialize};

use super::error::BackupError;
use super::read::{Part, Rows, read};
use super::{Database, Header, Summary};
use crate::accounts::development::make_private_folder;
use crate::data_file;
use crate::origin::disk::engine;
use crate::origin::disk::tables::{self, Table, UNSEALED_BYTES_MAX};
use crate::origin::history;

const ASIDE: &str = "restoring";
/// What a new volume has.
const LOST_AND_FOUND: &str = "lost+found";
const RESTORED: &str = "restored.json";
/// Files of the data folder that a backup may bring.
const FILES: [&str; 1] = ["node-id"];
/// All that a restore leaves in the data folder, in the order in which it is moved there.
const MOVED: [&str; 4] = ["node-id", RESTORED, "outbox", "store"];
/// Rows of one write, after which comes a look at what the tables hold in memory.
const LOOK_BYTES: usize = 1024 * 1024;
/// A row takes so much beside its key and value while it is written.
const ROW_BYTES: usize = 128;
/// Rows that a write has room for at first.
const ROWS: usize = 1024;

/// Where the data of a folder is from. Times are epoch milliseconds of the system clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Restored {
    /// When the backup was begun. What came later is not known here: used nonces and revocations too.
    pub taken_ms: u64,
    /// When the restore ended.
    pub restored_ms: u64,
}

/// What a restore has left in the data folder; none: it was not restored.
///
/// # Errors
/// The file cannot be read.
pub fn restored(data_dir: &Path) -> io::Result<Option<Restored>> {
    match fs::read(data_dir.join(RESTORED)) {
        Ok(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::from),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// A restore into the folder is under way, or was cut short.
pub fn is_unfinished(data_dir: &Path) -> bool {
    data_dir.join(ASIDE).exists()
}

/// Fills the data folder, which is empty or missing. `told` hears how many rows were written, of about how many.
///
/// # Errors
/// The folder has something in it, the backup is not whole, or the disk takes no more. Nothing is left in place then.
pub fn restore(
    from: impl Read,
    data_dir: &Path,
    now_ms: impl FnOnce() -> u64,
    told: impl FnMut(u64, u64),
) -> Result<Summary, BackupError> {
    let aside = Aside::open(data_dir)?;
    let outcome = fill(&aside, from, told).and_then(|summary| {
        let restored = Restored {
            taken_ms: summary.header.taken_ms,
            restored_ms: now_ms().max(summary.header.taken_ms),
        };
        aside.finish(restored)?;
        Ok(summary)
    });
    outcome.inspect_err(|_| aside.discard())
}

fn fill(aside: &Aside, from: impl Read, told: impl FnMut(u64, u64)) -> Result<Summary, BackupError> {
    let mut targets: Vec<Target> = Vec::new();
    let begin = |_: &Header| Ok(());
    let summary = read(from, told, begin, |part| match part {
        Part::File(name, content) if FILES.contains(&name) => {
            let path = aside.path(name);
            data_file::write_private(&path, content).map_err(unwritten(&path))
        }
        // Of a later version, which says by its format where one cannot go on without.
        Part::File(..) => Ok(()),
        Part::Table(database, name) => {
            if targets.last().is_none_or(|target| target.of != database) {
                targets.push(Target::make(database, &aside.path(database.name()))?);
            }
            targets.last_mut().map_or(Ok(()), |target| target.begin(name))
        }
        Part::Rows(rows) => targets.last_mut().map_or(Ok(()), |target| target.put(rows)),
    })?;
    targets.into_iter().try_for_each(Target::finish)?;
    Ok(summary)
}

/// The folder in which a restore is made.
struct Aside {
    data_dir: PathBuf,
    /// Held as long as the restore goes on.
    _lock: File,
}

impl Aside {
    fn open(data_dir: &Path) -> Result<Self, BackupError> {
        let folder = data_dir.join(ASIDE);
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
        self.data_dir.join(ASIDE).join(name)
    }

    /// Moves it all into place. A kill between two moves leaves `restoring/`.
    fn finish(&self, restored: Restored) -> Result<(), BackupError> {
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
            fs::remove_dir_all(data_dir.join(ASIDE))?;
            sync(data_dir)
        };
        moved().map_err(unwritten(data_dir))
    }

    /// Who restores as root leaves it all to the owner of the data folder, as whom the node runs.
    fn give_to_owner(&self) -> io::Result<()> {
        let owner = fs::metadata(&self.data_dir)?;
        let own = fs::metadata(self.data_dir.join(ASIDE))?;
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

    /// After an error. What cannot be removed is found by the next restore.
    fn discard(&self) {
        for name in MOVED {
            remove(&self.data_dir.join(name)).ok();
        }
        fs::remove_dir_all(self.data_dir.join(ASIDE)).ok();
    }
}

/// Nothing but what a restore that was cut short has left.
fn only_own(data_dir: &Path) -> Result<(), BackupError> {
    let entries = match fs::read_dir(data_dir) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        entries => entries.map_err(unwritten(data_dir))?,
    };
    let is_begun = is_unfinished(data_dir);
    for entry in entries {
        let name = entry.map_err(unwritten(data_dir))?.file_name();
        let is_own = name == ASIDE || is_begun && MOVED.iter().any(|own| name == *own);
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

/// The names in a folder outlast a loss of power.
fn sync(folder: &Path) -> io::Result<()> {
    File::open(folder)?.sync_all()
}

fn unwritten<E: fmt::Display>(path: &Path) -> impl FnOnce(E) -> BackupError + use<E> {
    let path = path.to_owned();
    move |error| BackupError::Unwritten { path, reason: error.to_string() }
}

/// A database that is filled.
struct Target {
    of: Database,
    folder: PathBuf,
    database: fjall::Database,
    tables: Vec<Table>,
    table: Box<str>,
    unlooked: usize,
}

impl Target {
    fn make(of: Database, folder: &Path) -> Result<Self, BackupError> {
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

    fn put(&mut self, rows: Rows<'_>) -> Result<(), BackupError> {
        let written = self.try_put(rows);
        written.map_err(failed(&self.folder))
    }

    fn try_put(&mut self, rows: Rows<'_>) -> fjall::Result<()> {
        let Some(table) = self.tables.last() else { return Ok(()) };
        let keyspace = table.keyspace();
        let mut batch = OwnedWriteBatch::with_capacity(self.database.clone(), ROWS);
        for (key, value) in rows {
            if self.of == Database::Store && history::ends_with_a_restore(&self.table, key) {
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
