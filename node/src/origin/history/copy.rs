//! Copies the content of one store into another, for installations that outgrow one machine.
//!
//! The source is read in a fixed order, in pieces. Writing a piece again gives the same rows, so a failed write is repeated. The progress
//! is saved beside the source, so that an interrupted copy continues there.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream};
use serde::{Deserialize, Serialize};
use tokio::sync::mpsc;

use super::embedded::{StoreExport, StoreOpenError};
use super::scylla::{CopyWriter, ScyllaStore};
use super::{HistoryPosition, RowKind, StoreError, StoredQueues};
use crate::data_file;
use crate::model::{ChannelKey, ClaimedNonce, IdScope, RestoredMember, Revocation, Stamp};
use crate::origin::metering::MetricRow;

/// Pieces that are read and not yet written.
const READ_MAX: usize = 16;
/// Pieces that are written concurrently.
const UNDER_WAY_MAX: usize = 32;
const SAVE_EVERY: Duration = Duration::from_secs(1);
/// Name of the progress file, in the data folder beside the store.
const PROGRESS_FILE: &str = "history-copy.json";

/// A part of what is copied, small enough for one write.
pub(super) enum CopyPiece {
    Ids(Vec<StoredId>),
    Nonces(Vec<ClaimedNonce>),
    Revocations(Vec<Revocation>),
    Members(Vec<RestoredMember>),
    Queues(Vec<StoredQueues>),
    Metrics(Vec<MetricRow>),
    Rows(CopiedChannelRows),
}

/// Rows of one channel, day and retention, oldest first.
pub(super) struct CopiedChannelRows {
    pub(super) kind: RowKind,
    pub(super) key: ChannelKey,
    pub(super) retention_ms: u64,
    /// Whether these are the first rows of their channel and day.
    pub(super) is_first_part: bool,
    pub(super) rows: Vec<(HistoryPosition, Box<str>)>,
}

/// An id that a client gave.
pub(super) struct StoredId {
    pub(super) scope: IdScope,
    pub(super) id: Box<str>,
    pub(super) stamp: Stamp,
    pub(super) timestamp_ms: u64,
}

/// Idempotency window and nonce memory of the source, with the time from which they count back.
#[derive(Debug, Clone, Copy)]
pub(super) struct DedupWindows {
    pub(super) ids_ms: u64,
    pub(super) nonces_ms: u64,
    pub(super) now_ms: u64,
}

/// Position up to which a source was read; everything before it in the order of the source is not read again.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct CopyCheckpoint {
    /// Name of the last partition that was begun, in the source.
    pub(super) stretch: String,
    /// Last channel of that partition that was finished.
    pub(super) channel: Option<Vec<u8>>,
}

/// A piece, its number of rows, and the checkpoint that holds once it and all pieces before are written.
pub(super) struct ExportedPiece {
    pub(super) piece: CopyPiece,
    pub(super) rows: u64,
    pub(super) checkpoint: Option<CopyCheckpoint>,
}

/// Content of the progress file of an interrupted copy.
#[derive(Serialize, Deserialize)]
struct SavedCopyProgress {
    /// Id of the target table; a table that was created again under the same name has another id.
    table: String,
    /// Latest time in the source. If it has increased, a node has used the source since.
    highest_ms: u64,
    rows: u64,
    #[serde(rename = "mark")]
    checkpoint: CopyCheckpoint,
}

/// Progress of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyProgress {
    /// Messages, presence events and metric rows copied so far, including those of an earlier interrupted copy.
    pub rows: u64,
    /// Estimated total of rows.
    pub of: u64,
    /// Rows that an earlier interrupted copy had written.
    pub before: u64,
}

/// Reason why a copy ended early.
#[derive(Debug)]
pub enum CopyError {
    Source(StoreError),
    Target(StoreError),
    ProgressFile { path: PathBuf, source: io::Error },
}

impl fmt::Display for CopyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Source(_) => f.write_str("the store cannot be read"),
            Self::Target(_) => f.write_str("the database did not take it; run it again, it goes on"),
            Self::ProgressFile { path, .. } => write!(f, "cannot write {}", path.display()),
        }
    }
}

impl std::error::Error for CopyError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        match self {
            Self::Source(error) | Self::Target(error) => Some(error),
            Self::ProgressFile { source, .. } => Some(source),
        }
    }
}

/// The embedded store of a data folder that no node runs on.
pub struct CopySource {
    pub(super) export: Arc<StoreExport>,
    progress_file: PathBuf,
}

impl CopySource {
    /// Opens the store in the data folder. Blocks on the disk.
    pub fn open(data_dir: &Path) -> Result<Self, StoreOpenError> {
        let export = Arc::new(StoreExport::open(&data_dir.join("store"))?);
        Ok(Self { export, progress_file: data_dir.join(PROGRESS_FILE) })
    }

    fn load_progress(&self, table: &str) -> Option<SavedCopyProgress> {
        let text = std::fs::read_to_string(&self.progress_file).ok()?;
        let note: SavedCopyProgress = serde_json::from_str(&text).ok()?;
        (note.table == table && note.highest_ms == self.export.highest_ms()).then_some(note)
    }

    fn save_progress(&self, note: &SavedCopyProgress) -> Result<(), CopyError> {
        let text = serde_json::to_vec(note).map_err(io::Error::from);
        text.and_then(|text| data_file::write(&self.progress_file, &text))
            .map_err(|source| CopyError::ProgressFile { path: self.progress_file.clone(), source })
    }
}

/// Copies all rows that have not expired. Reports the progress about once a second and at the end.
pub async fn copy(
    source: CopySource,
    target: &ScyllaStore,
    mut on_progress: impl FnMut(CopyProgress),
) -> Result<CopyProgress, CopyError> {
    let mut copying = CopyWriter::new(target);
    let table = copying.table().await.map_err(CopyError::Target)?;
    let highest_ms = source.export.highest_ms();
    let note = source.load_progress(&table);
    let mut note = note.unwrap_or(SavedCopyProgress {
        table,
        highest_ms,
        rows: 0,
        checkpoint: CopyCheckpoint::default(),
    });
    let mut progress = CopyProgress { rows: note.rows, of: source.export.rows(), before: note.rows };
    let (give, mut given) = mpsc::channel(READ_MAX);
    let (export, checkpoint, memory) =
        (Arc::clone(&source.export), note.checkpoint.clone(), copying.dedup_windows());
    let reading = tokio::task::spawn_blocking(move || {
        export.walk(&checkpoint, memory, &mut |read| give.blocking_send(read).is_ok())
    });
    let pieces = stream::poll_fn(|context| given.poll_recv(context));
    let written = pieces.map(|ExportedPiece { piece, rows, checkpoint }| {
        let write = copying.begin(piece);
        async move { write.await.map(|()| (rows, checkpoint)) }
    });
    let mut written = std::pin::pin!(written.buffered(UNDER_WAY_MAX));
    let mut saved_at = Instant::now();
    on_progress(progress);
    while let Some(next) = written.next().await {
        let (rows, checkpoint) = next.map_err(CopyError::Target)?;
        progress.rows += rows;
        if let Some(checkpoint) = checkpoint {
            (note.rows, note.checkpoint) = (progress.rows, checkpoint);
        }
        if saved_at.elapsed() >= SAVE_EVERY {
            saved_at = Instant::now();
            source.save_progress(&note)?;
            on_progress(progress);
        }
    }
    let read = reading.await.unwrap_or_else(|error| Err(StoreError::Failed(error.to_string())));
    read.map_err(CopyError::Source)?;
    CopyWriter::new(target)
        .finish(highest_ms, source.export.incarnations())
        .await
        .map_err(CopyError::Target)?;
    (note.rows, progress.of) = (progress.rows, progress.rows);
    source.save_progress(&note)?;
    on_progress(progress);
    Ok(progress)
}
