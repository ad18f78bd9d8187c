//! What one store holds, copied into another: for who outgrows one machine.
//!
//! The source is read in one order, in pieces, and each piece is written as often as it takes: it is the same rows then. How far
//! the copy has come is noted beside the source, so that one that was cut short goes on there.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::embedded::{Export, OpenError};
use super::scylla::{Copying, Scylla};
use super::{Position, RowKind, StoreError, StoredQueues};
use crate::data_file;
use crate::model::{ChannelKey, FormerMember, IdScope, KeptNonce, Revocation, Stamp};
use crate::origin::metering::MetricRow;

/// Pieces that are read and not written yet.
const READ_MAX: usize = 16;
/// Pieces that are written at a time.
const UNDER_WAY_MAX: usize = 32;
const NOTE_EVERY: Duration = Duration::from_secs(1);
/// Beside the store, in the data folder.
const NOTE_FILE: &str = "history-copy.json";

/// A part of what is copied, small enough for one write.
pub(super) enum Piece {
    Ids(Vec<StoredId>),
    Nonces(Vec<KeptNonce>),
    Revocations(Vec<Revocation>),
    Members(Vec<FormerMember>),
    Queues(Vec<StoredQueues>),
    Metrics(Vec<MetricRow>),
    Rows(ChannelRows),
}

/// Some rows of one channel that were stored on one day, and are kept equally long, oldest first.
pub(super) struct ChannelRows {
    pub(super) kind: RowKind,
    pub(super) key: ChannelKey,
    pub(super) kept_ms: u64,
    /// The first of them.
    pub(super) begins: bool,
    pub(super) rows: Vec<(Position, Box<str>)>,
}

/// An id that a client gave.
pub(super) struct StoredId {
    pub(super) scope: IdScope,
    pub(super) id: Box<str>,
    pub(super) stamp: Stamp,
    pub(super) timestamp_ms: u64,
}

/// How far back it counts what is remembered to refuse or recognise something, and from when.
#[derive(Debug, Clone, Copy)]
pub(super) struct Memory {
    pub(super) ids_ms: u64,
    pub(super) nonces_ms: u64,
    pub(super) now_ms: u64,
}

/// Up to where a source was read; what is before it in the order of the source is not read again.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Mark {
    /// The last stretch of time that was begun, by its name in the source.
    pub(super) stretch: String,
    /// In it, what was finished last.
    pub(super) channel: Option<Vec<u8>>,
}

/// A piece, its count of rows, and the mark that holds when it and all before it are written.
pub(super) struct Read {
    pub(super) piece: Piece,
    pub(super) rows: u64,
    pub(super) mark: Option<Mark>,
}

/// What stands in the file of a copy that was cut short.
#[derive(Serialize, Deserialize)]
struct Note {
    /// The table that was copied to: another one with its name is not it.
    table: String,
    /// The latest time in the source: if it has become later, a node has used the source since.
    highest_ms: u64,
    rows: u64,
    mark: Mark,
}

/// How far a copy is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Of messages, presence events and counts, also those that an earlier copy had written.
    pub rows: u64,
    /// About.
    pub of: u64,
    /// Those of an earlier copy.
    pub before: u64,
}

/// Why a copy ended early.
#[derive(Debug)]
pub enum CopyError {
    Source(StoreError),
    Target(StoreError),
    Note { path: PathBuf, source: io::Error },
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(_) => f.write_str("the store cannot be read"),
            Self::Target(_) => f.write_str("the database did not take it; run it again, it goes on"),
            Self::Note { path, .. } => write!(f, "cannot write {}", path.display()),
        }
    }
}

impl std::error::Error for CopyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Source(error) | Self::Target(error) => Some(error),
            Self::Note { source, .. } => Some(source),
        }
    }
}

/// The embedded store of a data folder that no node runs on.
pub struct Source {
    pub(super) export: Arc<Export>,
    note_file: PathBuf,
}

impl Source {
    /// Blocks on the disk.
    pub fn open(data_dir: &Path) -> Result<Self, OpenError> {
        let export = Arc::new(Export::open(&data_dir.join("store"))?);
        Ok(Self { export, note_file: data_dir.join(NOTE_FILE) })
    }

    fn read_note(&self, table: &str) -> Option<Note> {
        let text = std::fs::read_to_string(&self.note_file).ok()?;
        let note: Note = serde_json::from_str(&text).ok()?;
        (note.table == table && note.highest_ms == self.export.highest_ms()).then_some(note)
    }

    fn write_note(&self, note: &Note) -> Result<(), CopyError> {
        let text = serde_json::to_vec(note).map_err(io::Error::from);
        text.and_then(|text| data_file::write(&self.note_file, &text))
            .map_err(|source| CopyError::Note { path: self.note_file.clone(), source })
    }
}

/// Copies all that has not outlived its time. `told` is called about once a second, and at the end.
pub async fn copy(
    source: Source,
    target: &Scylla,
    mut told: impl FnMut(Progress),
) -> Result<Progress, CopyError> {
    let mut copying = Copying::new(target);
    let table = copying.table().await.map_err(CopyError::Target)?;
    let highest_ms = source.export.highest_ms();
    let note = source.read_note(&table);
    let mut note = note.unwrap_or(Note { table, highest_ms, rows: 0, mark: Mark::default() });
    let mut progress = Progress { rows: note.rows, of: source.export.rows(), before: note.rows };
    let (give, mut given) = mpsc::channel(READ_MAX);
    let (export, mark, memory) = (Arc::clone(&source.export), note.mark.clone(), copying.memory());
    let reading = tokio::task::spawn_blocking(move || {
        export.walk(&mark, memory, &mut |read| give.blocking_send(read).is_ok())
    });
    let pieces = stream::poll_fn(|context| given.poll_recv(context));
    let written = pieces.map(|Read { piece, rows, mark }| {
        let write = copying.begin(piece);
        async move { write.await.map(|()| (rows, mark)) }
    });
    let mut written = std::pin::pin!(written.buffered(UNDER_WAY_MAX));
    let mut noted = Instant::now();
    told(progress);
    while let Some(next) = written.next().await {
        let (rows, mark) = next.map_err(CopyError::Target)?;
        progress.rows += rows;
        if let Some(mark) = mark {
            (note.rows, note.mark) = (progress.rows, mark);
        }
        if noted.elapsed() >= NOTE_EVERY {
            noted = Instant::now();
            source.write_note(&note)?;
            told(progress);
        }
    }
    let read = reading.await.unwrap_or_else(|error| Err(StoreError::Failed(error.to_string())));
    read.map_err(CopyError::Source)?;
    Copying::new(target).finish(highest_ms, source.export.runs()).await.map_err(CopyError::Target)?;
    (note.rows, progress.of) = (progress.rows, progress.rows);
    source.write_note(&note)?;
    told(progress);
    Ok(progress)
}
