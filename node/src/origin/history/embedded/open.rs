//! Opening the database of a store, and saying plainly why it cannot be.

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

use super::health::Health;
use super::ids::{Finder, IdPartitions, PendingIds};
use super::members::Members;
use super::nonces::Nonces;
use super::partitions::Partitions;
use super::queue::{Bounds, Queue};
use super::queues::QueueRows;
use super::revocations::Revocations;
use super::tables::{self, Table};
use super::writer::{Writer, answer};
use super::{Embedded, HIGHEST, Options, STATE, engine, reader};

/// So many lanes of lookups must be full before the queue of all is.
const LANES_MIN: usize = 16;
const FORMAT: &str = "format";
/// Small, since a journal stays until every keyspace in it is flushed, and each group has a row here.
const STATE_UNSEALED_BYTES_MAX: u64 = 1024 * 1024;
/// Small for the same reason, and not so small that a crowd that comes and goes is flushed all the time.
const MEMBERS_UNSEALED_BYTES_MAX: u64 = 8 * 1024 * 1024;
pub(super) const FORMAT_VERSION: &str = "fanfare 1";
/// Those without a stretch of time.
pub(super) const TABLES: [&str; 3] = [STATE, "members", "queues"];
/// The file by which fjall knows its own folder; written last when a database is made.
pub(super) const MARKER: &str = "version";

/// Why the store could not be opened; the text names the folder.
#[derive(Debug)]
pub enum OpenError {
    /// There is none where one was expected.
    Missing(PathBuf),
    Locked(PathBuf),
    Foreign(PathBuf),
    /// Written by another version of this program.
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

impl fmt::Display for OpenError {
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

impl std::error::Error for OpenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Io { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl Embedded {
    /// Opens the store in the folder `path`, or makes it, and raises the clock above every timestamp in it.
    pub fn open(path: &Path, options: &Options, clock: Clock) -> Result<Self, OpenError> {
        let io_error = |error| OpenError::Io { path: path.to_owned(), error };
        clear_unfinished(path).map_err(io_error)?;
        if is_foreign(path).map_err(io_error)? {
            return Err(OpenError::Foreign(path.to_owned()));
        }
        let opened = Opened::open(path)?;
        if opened.highest_ms > 0 {
            clock.raise(opened.highest_ms + 1);
        }
        opened.start(path, options, clock).map_err(io_error)
    }
}

pub(super) struct Opened {
    database: Database,
    pub(super) state: Table,
    pub(super) partitions: Partitions,
    pub(super) members: Members,
    pub(super) queues: QueueRows,
    pub(super) highest_ms: u64,
    journal_bytes: u64,
}

impl Opened {
    pub(super) fn open(path: &Path) -> Result<Self, OpenError> {
        engine::listen();
        let opened = catch_unwind(AssertUnwindSafe(|| Self::try_open(path)));
        let damaged = |_| OpenError::Damaged {
            path: path.to_owned(),
            reason: "its files contradict each other".into(),
        };
        opened.unwrap_or_else(|panic| Err(damaged(panic)))
    }

    fn try_open(path: &Path) -> Result<Self, OpenError> {
        let explain = |error| explain(path, error);
        let database = tables::database(path).open().map_err(explain)?;
        let is_new = database.keyspace_count() == 0;
        // A new journal is as large as it will be, and empty.
        let journal_bytes = if is_new { 0 } else { database.journal_disk_space().map_err(explain)? };
        let state = Table::open(&database, STATE, STATE_UNSEALED_BYTES_MAX).map_err(explain)?;
        let found = state.keyspace().get(FORMAT).map_err(explain)?;
        match found.as_deref() {
            Some(known) if known == FORMAT_VERSION.as_bytes() => {}
            // A store whose making was cut short has this one keyspace and nothing in it.
            None if is_new || database.keyspace_count() == 1 => {
                state.keyspace().insert(FORMAT, FORMAT_VERSION).map_err(explain)?;
                database.persist(PersistMode::SyncAll).map_err(explain)?;
            }
            None => return Err(OpenError::Foreign(path.to_owned())),
            Some(other) => {
                let found = String::from_utf8_lossy(other).into_owned();
                return Err(OpenError::Version { path: path.to_owned(), found });
            }
        }
        let highest_ms = state.keyspace().get(HIGHEST).map_err(explain)?;
        let highest_ms =
            highest_ms.and_then(|value| value.first_chunk().copied()).map_or(0, u64::from_be_bytes);
        let partitions = Partitions::open(database.clone()).map_err(explain)?;
        let members = Table::open(&database, "members", MEMBERS_UNSEALED_BYTES_MAX).map_err(explain)?;
        let queues = Table::open(&database, "queues", STATE_UNSEALED_BYTES_MAX).map_err(explain)?;
        let (members, queues) = (Members(members), QueueRows(queues));
        Ok(Self { database, state, partitions, members, queues, highest_ms, journal_bytes })
    }

    fn start(self, path: &Path, options: &Options, clock: Clock) -> io::Result<Embedded> {
        let partitions = Arc::new(self.partitions);
        let status = Arc::new(Health::new(path));
        let queue_bytes = options.write_queue_bytes;
        let writes = Arc::new(Queue::new(Bounds { items: options.write_queue_rows, bytes: queue_bytes }));
        let lookups = Arc::new(Queue::new(Bounds { items: options.find_queue, bytes: queue_bytes }));
        let pending = Arc::new(PendingIds::new(lookups.clone()));
        let reads = Arc::new(Queue::new(Bounds { items: options.read_queue, bytes: usize::MAX }));
        let ids = IdPartitions { partitions: partitions.clone(), window_ms: options.idempotency_window_ms };
        let (answers, answered) = mpsc::channel();
        let operations = [StoreOperation::Append, StoreOperation::Read, StoreOperation::FindIds];
        let times = Arc::new(StoreTimes::new("embedded", &operations));
        let finder = Finder {
            queue: lookups.clone(),
            stored: ids.clone(),
            pending: pending.clone(),
            clock: clock.clone(),
            times: times.clone(),
            lanes: HashMap::new(),
            lane_max: (options.find_queue / LANES_MIN).max(1),
        };
        let writer = Writer {
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
            revocations: Revocations { partitions: partitions.clone(), kept_ms: options.revocation_kept_ms },
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
        // Made first, so that a thread that cannot be started ends those that were.
        let store = Embedded {
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
        start("store-answers", Box::new(move || answer(&answered, &writes)))?;
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

/// A process killed while it made the database leaves a journal that stands in the way of the next one.
fn clear_unfinished(path: &Path) -> io::Result<()> {
    let (lock, journal) = (path.join("lock"), path.join("0.jnl"));
    if path.join(MARKER).exists() || !lock.exists() || !journal.exists() {
        return Ok(());
    }
    let lock = File::options().write(true).open(lock)?;
    // Held by another process: that one is making it right now.
    if lock.try_lock().is_ok() {
        fs::remove_file(journal)?;
    }
    Ok(())
}

/// The folder has no database in it but other things.
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

fn explain(path: &Path, error: fjall::Error) -> OpenError {
    let path = path.to_owned();
    match error {
        fjall::Error::Locked => OpenError::Locked(path),
        fjall::Error::Io(error) => OpenError::Io { path, error },
        fjall::Error::InvalidVersion(_) => OpenError::Foreign(path),
        other => match of_system(&other) {
            Some(code) => OpenError::Io { path, error: io::Error::from_raw_os_error(code) },
            None => OpenError::Damaged { path, reason: other.to_string() },
        },
    }
}

/// The error of the system that lies behind another one, if it is that nothing more could be opened or written: the files of
/// the store are as they were.
fn of_system(error: &(dyn std::error::Error + 'static)) -> Option<i32> {
    std::iter::successors(Some(error), |error| error.source())
        .filter_map(|error| error.downcast_ref::<io::Error>()?.raw_os_error())
        .find(|code| {
            matches!(*code, libc::EMFILE | libc::ENFILE | libc::ENOSPC | libc::EDQUOT | libc::ENOMEM)
        })
}
