//! Content of a backup, and its writer.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use super::format::{BlockKind, BlockWriter};
use super::{BackupDatabase, BackupHeader, BackupTotals, DiskSnapshot};
use crate::origin::history::{StoreError, StoreOpenError, stopped_snapshot};
use crate::origin::outbox;

/// Approximate bytes of rows in one block.
const BLOCK_BYTES: usize = 512 * 1024;
/// File with the id of a node that has neither a configured id nor a host name.
const NODE_ID: &str = "node-id";

/// Origin of a backup.
#[derive(Debug, Clone)]
pub struct BackupOrigin {
    pub node_id: String,
    pub taken_ms: u64,
}

/// Snapshots of a node's databases, and the files that belong to them.
pub struct BackupSource {
    origin: BackupOrigin,
    databases: Vec<(BackupDatabase, DiskSnapshot)>,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl BackupSource {
    /// Takes the snapshot of the store first, then that of the outbox. A message with a client-given id is stored only after its events
    /// are in the outbox. So the second snapshot has the events of every message in the first one, unless their targets have received
    /// them.
    ///
    /// In the other order a message could be stored without its events, and a publisher that retries would be answered from the store. A
    /// message that has events and is not stored was not acknowledged before the backup.
    pub fn take<E>(
        origin: BackupOrigin,
        data_dir: &Path,
        store: impl FnOnce() -> Result<Option<DiskSnapshot>, E>,
        outbox: impl FnOnce() -> Result<Option<DiskSnapshot>, E>,
    ) -> Result<Self, E> {
        let store = store()?.map(|store| (BackupDatabase::Store, store));
        let outbox = outbox()?.map(|outbox| (BackupDatabase::Outbox, outbox));
        let node_id = std::fs::read(data_dir.join(NODE_ID)).ok().map(|content| (NODE_ID, content));
        let databases = store.into_iter().chain(outbox).collect();
        Ok(Self { origin, databases, files: node_id.into_iter().collect() })
    }

    pub(super) fn taken_ms(&self) -> u64 {
        self.origin.taken_ms
    }

    /// Writes the whole backup. Blocks on the disk and on `out`.
    pub fn write(&self, out: impl Write) -> Result<BackupTotals, BackupWriteError> {
        let mut blocks = BlockWriter::begin(out)?;
        blocks.put(BlockKind::Header, &json(&self.header())?)?;
        for (name, content) in &self.files {
            blocks.put(BlockKind::File, &[name.as_bytes(), b"\n", content].concat())?;
        }
        let mut totals = BackupTotals::default();
        for (database, snapshot) in &self.databases {
            match write_rows(&mut blocks, *database, snapshot, &mut totals) {
                Err(BackupWriteError::Unread(error)) => {
                    blocks.put(BlockKind::GaveUp, error.to_string().as_bytes())?;
                    return Err(BackupWriteError::Unread(error));
                }
                written => written?,
            }
        }
        blocks.put(BlockKind::End, &json(&totals)?)?;
        blocks.finish()?;
        Ok(totals)
    }

    fn header(&self) -> BackupHeader {
        let of = |sought| self.databases.iter().find(|(database, _)| *database == sought);
        let format = |database| of(database).map(|(_, snapshot)| snapshot.format().to_owned());
        BackupHeader {
            node_version: env!("CARGO_PKG_VERSION").to_owned(),
            node_id: self.origin.node_id.clone(),
            taken_ms: self.origin.taken_ms,
            store_format: format(BackupDatabase::Store),
            outbox_format: format(BackupDatabase::Outbox),
            rows_about: self.databases.iter().map(|(_, snapshot)| snapshot.rows_about()).sum(),
        }
    }
}

/// The data folder of a stopped node, opened for a backup.
pub struct StoppedNodeSource(BackupSource);

impl StoppedNodeSource {
    /// Opens the databases of a data folder; the store only if `with_store`, since another store may have replaced it. Blocks on the disk.
    ///
    /// # Errors
    /// The folder has neither database, or a node runs on it.
    pub fn open(origin: BackupOrigin, data_dir: &Path, with_store: bool) -> Result<Self, StoppedError> {
        let [store, outbox] =
            [BackupDatabase::Store, BackupDatabase::Outbox].map(|database| data_dir.join(database.name()));
        let opened = BackupSource::take(
            origin,
            data_dir,
            || match stopped_snapshot(&store) {
                _ if !with_store => Ok(None),
                Err(StoreOpenError::Missing(_)) => Ok(None),
                opened => opened.map(Some).map_err(StoppedError::Store),
            },
            || outbox::stopped_snapshot(&outbox).map_err(StoppedError::Outbox),
        )?;
        if opened.databases.is_empty() { Err(StoppedError::Empty) } else { Ok(Self(opened)) }
    }

    pub fn write(&self, out: impl Write) -> Result<BackupTotals, BackupWriteError> {
        self.0.write(out)
    }
}

/// Reason why a data folder was not opened.
#[derive(Debug)]
pub enum StoppedError {
    Empty,
    Store(StoreOpenError),
    Outbox(StoreError),
}

impl fmt::Display for StoppedError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("it has neither a store nor an outbox"),
            Self::Store(_) => f.write_str("cannot open the store"),
            Self::Outbox(_) => f.write_str("cannot open the outbox"),
        }
    }
}

impl std::error::Error for StoppedError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Empty => None,
            Self::Store(error) => Some(error),
            Self::Outbox(error) => Some(error),
        }
    }
}

/// Reason why a backup was not written to its end.
#[derive(Debug)]
pub enum BackupWriteError {
    /// A database could not be read. The backup ends with a block that says so.
    Unread(StoreError),
    /// The output failed. The backup ends without an end block.
    Unsent(io::Error),
}

impl From<io::Error> for BackupWriteError {
    fn from(error: io::Error) -> Self {
        Self::Unsent(error)
    }
}

impl fmt::Display for BackupWriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unread(error) => error.fmt(f),
            Self::Unsent(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for BackupWriteError {}

fn json(value: &impl serde::Serialize) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(io::Error::from)
}

fn write_rows(
    blocks: &mut BlockWriter<impl Write>,
    database: BackupDatabase,
    snapshot: &DiskSnapshot,
    totals: &mut BackupTotals,
) -> Result<(), BackupWriteError> {
    let mut block = Vec::new();
    for (name, rows) in snapshot.tables() {
        blocks.put(BlockKind::Table, format!("{}/{name}", database.name()).as_bytes())?;
        totals.tables += 1;
        for row in rows {
            let (key, value) = row.map_err(|error| BackupWriteError::Unread(StoreError::failed(error)))?;
            let (key_length, value_length) = lengths(&key, &value)?;
            block.extend_from_slice(&key_length.to_be_bytes());
            block.extend_from_slice(&value_length.to_be_bytes());
            block.extend_from_slice(&key);
            block.extend_from_slice(&value);
            totals.rows += 1;
            totals.row_bytes += (key.len() + value.len()) as u64;
            if block.len() >= BLOCK_BYTES {
                blocks.put(BlockKind::Rows, &block)?;
                block.clear();
            }
        }
        if !block.is_empty() {
            blocks.put(BlockKind::Rows, &block)?;
            block.clear();
        }
    }
    Ok(())
}

/// Converts the lengths of a row to the types by which the storage engine bounds them.
fn lengths(key: &[u8], value: &[u8]) -> Result<(u16, u32), BackupWriteError> {
    match (key.len().try_into(), value.len().try_into()) {
        (Ok(key), Ok(value)) => Ok((key, value)),
        _ => Err(BackupWriteError::Unread(StoreError::failed("a row is too long for a backup"))),
    }
}
