//! Opening of a store's database, with clear errors.

use std::collections::HashMap;
use std::fmt;
use std::fs::{self, File};
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::thread::{self, JoinHandle};

use fjall::{Database, PersistMode};
use parking_lot::Mutex;

use crate::model::Clock;
use crate::telemetry::{StoreOperation, StoreTimes};

use super::health::DiskHealth;
use super::ids::{IdFinder, IdPartitions, PendingIds};
use super::members::MemberRows;
use super::nonces::Nonces;
use super::partitions::Partitions;
use super::queue::{DiskQueue, DiskQueueBounds};
use super::queues::QueueRows;
use super::revocations::RevocationRows;
use super::tables::{self, Table};
use super::writer::{StoreWriter, run_callbacks};
use super::{EmbeddedOptions, EmbeddedStore, HIGHEST, STATE, engine, reader};

/// Number of full lookup queues that it takes to fill the finder's queue.
const LOOKUP_QUEUES_MIN: usize = 16;
const FORMAT: &str = "format";
/// Small bound, since a journal stays until every keyspace in it is flushed, and each group writes a row to this one.
const STATE_UNSEALED_BYTES_MAX: u64 = 1024 * 1024;
/// Small bound for the same reason, but large enough that members who come and go do not cause constant flushes.
const MEMBERS_UNSEALED_BYTES_MAX: u64 = 8 * 1024 * 1024;
pub(super) const FORMAT_VERSION: &str = "fanfare 1";
/// Tables without a time range.
pub(super) const TABLES: [&str; 3] = [STATE, "members", "queues"];
/// File by which fjall recognises its own folder; it is written last when a database is created.
pub(super) const MARKER: &str = "version";

/// Reason why the store could not be opened; the text names the folder.
#[derive(Debug)]
pub enum StoreOpenError {
    /// The folder has no store, and one was expected.
    Missing(PathBuf),
    Locked(PathBuf),
    Foreign(PathBuf),
    /// Another version of this program wrote the store.
    Version {
        path: PathBuf,
        found: String,
    },
    Damaged {
        path: PathBuf,
        reason: String,
    },
    Io {
        path: PathBuf,
        error: io::Error,
    },
}

impl fmt::Display for StoreOpenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(path) => write!(f, "{} holds no store", path.display()),
            Self::Locked(path) => {
                write!(
                    f,
                    "{} is in use by another process: each node needs its own data folder",
                    path.display()
                )
            }
            Self::Foreign(path) => {
                write!(f, "{} holds something else than a store of this program", path.display())
            }
            Self::Version { path, found } => {
                write!(
                    f,
                    "the store in {} has the format '{found}', which this version cannot read",
                    path.display()
                )
            }
            Self::Damaged { path, reason } => {
                write!(f, "the store in {} is damaged: {reason}", path.display())
            }
            Self::Io { path, error: _ } => write!(f, "the store in {} cannot be opened", path.display()),
        }
    }
}

impl std::error::Error for StoreOpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl EmbeddedStore {
    /// Opens or creates the store in the folder `path`, and raises the clock above every timestamp in it.
    pub fn open(path: &Path, options: &EmbeddedOptions, clock: Clock) -> Result<Self, StoreOpenError> {
        let io_error = |error| StoreOpenError::Io { path: path.to_owned(), error };
        clear_unfinished(path).map_err(io_error)?;
        if is_foreign(path).map_err(io_error)? {
            return Err(StoreOpenError::Foreign(path.to_owned()));
        }
        let opened = OpenedStore::open(path)?;
        if opened.highest_ms > 0 {
            clock.raise(opened.highest_ms + 1);
        }
        opened.start(path, options, clock).map_err(io_error)
    }
}

pub(super) struct OpenedStore {
    database: Database,
    pub(super) state: Table,
    pub(super) partitions: Partitions,
    pub(super) members: MemberRows,
    pub(super) queues: QueueRows,
    pub(super) highest_ms: u64,
    journal_bytes: u64,
}

impl OpenedStore {
    pub(super) fn open(path: &Path) -> Result<Self, StoreOpenError> {
        engine::listen();
        let opened = catch_unwind(AssertUnwindSafe(|| Self::try_open(path)));
        let damaged = |_| StoreOpenError::Damaged {
            path: path.to_owned(),
            reason: "its files contradict each other".into(),
        };
        opened.unwrap_or_else(|panic| Err(damaged(panic)))
    }

    fn try_open(path: &Path) -> Result<Self, StoreOpenError> {
        let explain = |error| explain(path, error);
        let database = tables::database(path).open().map_err(explain)?;
        let is_new = database.keyspace_count() == 0;
        // A new journal is empty, but preallocated to its full size.
        let journal_bytes = if is_new { 0 } else { database.journal_disk_space().map_err(explain)? };
        let state = Table::open(&database, STATE, STATE_UNSEALED_BYTES_MAX).map_err(explain)?;
        let found = state.keyspace().get(FORMAT).map_err(explain)?;
        match found.as_deref() {
            Some(known) if known == FORMAT_VERSION.as_bytes() => {}
            // A store whose creation was interrupted has this one keyspace and nothing in it.
            None if is_new || database.keyspace_count() == 1 => {
                state.keyspace().insert(FORMAT, FORMAT_VERSION).map_err(explain)?;
                database.persist(PersistMode::SyncAll).map_err(explain)?;
            }
            None => return Err(StoreOpenError::Foreign(path.to_owned())),
            Some(other) => {
                let found = String::from_utf8_lossy(other).into_owned();
                return Err(StoreOpenError::Version { path: path.to_owned(), found });
            }
        }
        let highest_ms = state.keyspace().get(HIGHEST).map_err(explain)?;
        let highest_ms =
            highest_ms.and_then(|value| value.first_chunk().copied()).map_or(0, u64::from_be_bytes);
        let partitions = Partitions::open(database.clone()).map_err(explain)?;
        let members = Table::open(&database, "members", MEMBERS_UNSEALED_BYTES_MAX).map_err(explain)?;
        let queues = Table::open(&database, "queues", STATE_UNSEALED_BYTES_MAX).map_err(explain)?;
        let (members, queues) = (MemberRows(members), QueueRows(queues));
        Ok(Self { database, state, partitions, members, queues, highest_ms, journal_bytes })
    }

    fn start(self, path: &Path, options: &EmbeddedOptions, clock: Clock) -> io::Result<EmbeddedStore> {
        let partitions = Arc::new(self.partitions);
        let status = Arc::new(DiskHealth::new(path));
        let queue_bytes = options.write_queue_bytes;
        let writes =
            Arc::new(DiskQueue::new(DiskQueueBounds { items: options.write_queue_rows, bytes: queue_bytes }));
        let lookups =
            Arc::new(DiskQueue::new(DiskQueueBounds { items: options.find_queue, bytes: queue_bytes }));
        let pending = Arc::new(PendingIds::new(lookups.clone()));
        let reads =
            Arc::new(DiskQueue::new(DiskQueueBounds { items: options.read_queue, bytes: usize::MAX }));
        let ids = IdPartitions { partitions: partitions.clone(), window_ms: options.idempotency_window_ms };
        let (answers, answered) = mpsc::channel();
        let operations = [StoreOperation::Append, StoreOperation::Read, StoreOperation::FindIds];
        let times = Arc::new(StoreTimes::new("embedded", &operations));
        let finder = IdFinder {
            queue: lookups.clone(),
            stored: ids.clone(),
            pending: pending.clone(),
            clock: clock.clone(),
            times: times.clone(),
            parked: HashMap::new(),
            parked_max: (options.find_queue / LOOKUP_QUEUES_MIN).max(1),
        };
        let writer = StoreWriter {
            database: self.database,
            partitions: partitions.clone(),
            state: self.state,
            ids,
            pending: pending.clone(),
            nonces: Nonces {
                partitions: partitions.clone(),
                memory_ms: options.nonce_memory_ms,
                rows_max: options.nonces,
                rows: None,
            },
            revocations: RevocationRows {
                partitions: partitions.clone(),
                retention_ms: options.revocation_kept_ms,
            },
            members: self.members.clone(),
            queues: self.queues.clone(),
            clock: clock.clone(),
            queue: writes.clone(),
            answers,
            status: status.clone(),
            times: times.clone(),
            highest_ms: self.highest_ms,
            unflushed: usize::try_from(self.journal_bytes).unwrap_or(usize::MAX),
        };
        let threads = Mutex::default();
        // Created first, so that an error while starting a thread also ends the threads started before.
        let store = EmbeddedStore {
            history: options.history,
            nonce_memory_ms: options.nonce_memory_ms,
            clock,
            partitions: Mutex::new(Some(partitions.clone())),
            members: Mutex::new(Some(self.members)),
            queues: Mutex::new(Some(self.queues)),
            pending,
            status,
            writes: writes.clone(),
            lookups,
            reads: reads.clone(),
            threads,
        };
        let start = |name: &str, run: Box<dyn FnOnce() + Send>| -> io::Result<()> {
            store.threads.lock().push(spawn(name, run)?);
            Ok(())
        };
        start("store-ids", Box::new(move || finder.run()))?;
        start("store-writer", Box::new(move || writer.run()))?;
        start("store-answers", Box::new(move || run_callbacks(&answered, &writes)))?;
        for _ in 0..options.read_threads.max(1) {
            let (reads, partitions, times) = (reads.clone(), partitions.clone(), times.clone());
            start("store-reader", Box::new(move || reader::run(&reads, &partitions, &times)))?;
        }
        Ok(store)
    }
}

fn spawn(name: &str, run: Box<dyn FnOnce() + Send>) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(run)
}

/// Removes the journal that a process leaves if it is killed while it creates the database; it would block the next attempt.
fn clear_unfinished(path: &Path) -> io::Result<()> {
    let (lock, journal) = (path.join("lock"), path.join("0.jnl"));
    if path.join(MARKER).exists() || !lock.exists() || !journal.exists() {
        return Ok(());
    }
    let lock = File::options().write(true).open(lock)?;
    // If another process holds the lock, it is creating the database now.
    if lock.try_lock().is_ok() {
        fs::remove_file(journal)?;
    }
    Ok(())
}

/// Returns whether the folder holds other files and no database.
fn is_foreign(path: &Path) -> io::Result<bool> {
    if !path.exists() || path.join(MARKER).exists() {
        return Ok(false);
    }
    for entry in fs::read_dir(path)? {
        let name = entry?.file_name();
        if name != "lock" && name != "keyspaces" && name != "0.jnl" {
            return Ok(true);
        }
    }
    Ok(false)
}

fn explain(path: &Path, error: fjall::Error) -> StoreOpenError {
    let path = path.to_owned();
    match error {
        fjall::Error::Locked => StoreOpenError::Locked(path),
        fjall::Error::Io(error) => StoreOpenError::Io { path, error },
        fjall::Error::InvalidVersion(_) => StoreOpenError::Foreign(path),
        other => match of_system(&other) {
            Some(code) => StoreOpenError::Io { path, error: io::Error::from_raw_os_error(code) },
            None => StoreOpenError::Damaged { path, reason: other.to_string() },
        },
    }
}

/// Returns the system error behind another error, if nothing more could be opened or written. The files of the store are then unchanged.
fn of_system(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    std::iter::successors(Some(error), |error| error.source())
        .filter_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error())
        .find(|code| {
            matches!(*code, libc::EMFILE | libc::ENFILE | libc::ENOSPC | libc::EDQUOT | libc::ENOMEM)
        })
}
