//! What goes into a backup, and how it is written.

use std::fmt;
use std::io::{self, Write};
use std::path::Path;

use super::format::{BlockWriter, Kind};
use super::{Database, DiskSnapshot, Header, Totals};
use crate::origin::history::{OpenError, StoreError, stopped_snapshot};
use crate::origin::outbox;

/// Rows of one block, about.
const BLOCK_BYTES: usize = 512 * 1024;
/// A node without a configured id or a name of its host has its id here.
const NODE_ID: &str = "node-id";

/// Where a backup is from.
#[derive(Debug, Clone)]
pub struct Origin {
    pub node_id: String,
    pub taken_ms: u64,
}

/// The databases of a node at one moment, and the files that go on with them.
pub struct Source {
    origin: Origin,
    databases: Vec<(Database, DiskSnapshot)>,
    files: Vec<(&'static str, Vec<u8>)>,
}

impl Source {
    /// Takes the moment of the store first, then that of the outbox. A message with a client's id is stored only when the outbox has its events:
    /// so whatever the first snapshot has stored, the second one owes, or its targets have it. The other way around a message could be
    /// stored and not owed, and a publisher that tries again would be answered from the store. What is owed and not stored was not
    /// acknowledged before.
    pub fn take<E>(
        origin: Origin,
        data_dir: &Path,
        store: impl FnOnce() -> Result<Option<DiskSnapshot>, E>,
        outbox: impl FnOnce() -> Result<Option<DiskSnapshot>, E>,
    ) -> Result<Self, E> {
        let store = store()?.map(|store| (Database::Store, store));
        let outbox = outbox()?.map(|outbox| (Database::Outbox, outbox));
        let node_id = std::fs::read(data_dir.join(NODE_ID)).ok().map(|content| (NODE_ID, content));
        let databases = store.into_iter().chain(outbox).collect();
        Ok(Self { origin, databases, files: node_id.into_iter().collect() })
    }

    pub(super) fn taken_ms(&self) -> u64 {
        self.origin.taken_ms
    }

    /// Writes the whole backup. Blocks on the disk and on `out`.
    pub fn write(&self, out: impl Write) -> Result<Totals, WriteError> {
        let mut blocks = BlockWriter::begin(out)?;
        blocks.put(Kind::Header, &json(&self.header())?)?;
        for (name, content) in &self.files {
            blocks.put(Kind::File, &[name.as_bytes(), b"\n", content].concat())?;
        }
        let mut totals = Totals::default();
        for (database, snapshot) in &self.databases {
            match write_rows(&mut blocks, *database, snapshot, &mut totals) {
                Err(WriteError::Unread(error)) => {
                    blocks.put(Kind::GaveUp, error.to_string().as_bytes())?;
                    return Err(WriteError::Unread(error));
                }
                written => written?,
            }
        }
        blocks.put(Kind::End, &json(&totals)?)?;
        blocks.finish()?;
        Ok(totals)
    }

    fn header(&self) -> Header {
        let of = |wanted| self.databases.iter().find(|(database, _)| *database == wanted);
        let format = |database| of(database).map(|(_, snapshot)| snapshot.format().to_owned());
        Header {
            node_version: env!("CARGO_PKG_VERSION").to_owned(),
            node_id: self.origin.node_id.clone(),
            taken_ms: self.origin.taken_ms,
            store_format: format(Database::Store),
            outbox_format: format(Database::Outbox),
            rows_about: self.databases.iter().map(|(_, snapshot)| snapshot.rows_about()).sum(),
        }
    }
}

/// The data folder of a node that does not run, opened for a backup.
pub struct Stopped(Source);

impl Stopped {
    /// The store only `with_store`: another one may have taken its place. Blocks on the disk.
    ///
    /// # Errors
    /// The folder has neither, or a node runs on it.
    pub fn open(origin: Origin, data_dir: &Path, with_store: bool) -> Result<Self, StoppedError> {
        let [store, outbox] =
            [Database::Store, Database::Outbox].map(|database| data_dir.join(database.name()));
        let opened = Source::take(
            origin,
            data_dir,
            || match stopped_snapshot(&store) {
                _ if !with_store => Ok(None),
                Err(OpenError::Missing(_)) => Ok(None),
                opened => opened.map(Some).map_err(StoppedError::Store),
            },
            || outbox::stopped_snapshot(&outbox).map_err(StoppedError::Outbox),
        )?;
        if opened.databases.is_empty() { Err(StoppedError::Empty) } else { Ok(Self(opened)) }
    }

    pub fn write(&self, out: impl Write) -> Result<Totals, WriteError> {
        self.0.write(out)
    }
}

/// Why a data folder was not opened.
#[derive(Debug)]
pub enum StoppedError {
    Empty,
    Store(OpenError),
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

/// Why a backup was not written to its end.
#[derive(Debug)]
pub enum WriteError {
    /// The backup says so.
    Unread(StoreError),
    /// It ends without an end.
    Unsent(io::Error),
}

impl From<io::Error> for WriteError {
    fn from(error: io::Error) -> Self {
        Self::Unsent(error)
    }
}

impl fmt::Display for WriteError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unread(error) => error.fmt(f),
            Self::Unsent(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for WriteError {}

fn json(value: &impl serde::Serialize) -> io::Result<Vec<u8>> {
    serde_json::to_vec(value).map_err(io::Error::from)
}

fn write_rows(
    blocks: &mut BlockWriter<impl Write>,
    database: Database,
    snapshot: &DiskSnapshot,
    totals: &mut Totals,
) -> Result<(), WriteError> {
    let mut block = Vec::new();
    for (name, rows) in snapshot.tables() {
        blocks.put(Kind::Table, format!("{}/{name}", database.name()).as_bytes())?;
        totals.tables += 1;
        for row in rows {
            let (key, value) = row.map_err(|error| WriteError::Unread(StoreError::failed(error)))?;
            let (key_length, value_length) = lengths(&key, &value)?;
            block.extend_from_slice(&key_length.to_be_bytes());
            block.extend_from_slice(&value_length.to_be_bytes());
            block.extend_from_slice(&key);
            block.extend_from_slice(&value);
            totals.rows += 1;
            totals.row_bytes += (key.len() + value.len()) as u64;
            if block.len() >= BLOCK_BYTES {
                blocks.put(Kind::Rows, &block)?;
                block.clear();
            }
        }
        if !block.is_empty() {
            blocks.put(Kind::Rows, &block)?;
            block.clear();
        }
    }
    Ok(())
}

/// As the storage engine bounds them.
fn lengths(key: &[u8], value: &[u8]) -> Result<(u16, u32), WriteError> {
    match (key.len().try_into(), value.len().try_into()) {
        (Ok(key), Ok(value)) => Ok((key, value)),
        _ => Err(WriteError::Unread(StoreError::failed("a row is too long for a backup"))),
    }
}
