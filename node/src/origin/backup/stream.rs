//! A backup of a running node, made as fast as its reader takes it.

use std::fmt;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::Stream;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::source::{BackupSource, BackupWriteError};
use crate::origin::history::StoreError;

/// Blocks that may wait for the reader; the thread that makes them then blocks.
const BLOCKS: usize = 2;
/// Time after which a reader that takes no block loses the backup, so that it no longer holds the node's snapshots.
const PATIENCE: Duration = Duration::from_secs(60);
const LAST: &str = "fanfare_last_backup_timestamp_seconds";

/// Backups of a running node, one at a time.
pub struct Backups {
    permits: Arc<Semaphore>,
}

/// Reason why a backup was not begun.
#[derive(Debug)]
pub enum BackupRefusal {
    /// Another one is under way.
    Busy,
    Store(StoreError),
}

impl fmt::Display for BackupRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str("another backup is under way"),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for BackupRefusal {}

impl Default for Backups {
    fn default() -> Self {
        for outcome in BackupOutcome::ALL {
            count(outcome, 0);
        }
        metrics::gauge!(LAST).set(0.0);
        Self { permits: Arc::new(Semaphore::new(1)) }
    }
}

impl Backups {
    /// Begins a backup; `take` runs on a thread that may block.
    pub async fn begin(
        &self,
        take: impl FnOnce() -> Result<BackupSource, StoreError> + Send + 'static,
    ) -> Result<BackupStream, BackupRefusal> {
        let permit = Arc::clone(&self.permits).try_acquire_owned().map_err(|_| BackupRefusal::Busy)?;
        let taken = tokio::task::spawn_blocking(take).await;
        let source = taken.unwrap_or_else(|error| Err(StoreError::failed(error)));
        let source = source.map_err(BackupRefusal::Store).inspect_err(|error| {
            tracing::error!(%error, "backup not started");
            count(BackupOutcome::Failed, 1);
        })?;
        let (sender, blocks) = mpsc::channel(BLOCKS);
        let tracker = Arc::new(BackupTracker::begin(source.taken_ms()));
        let own = Arc::clone(&tracker);
        let mut reader = BlockSender { sender, runtime: Handle::current() };
        let walk = tokio::task::spawn_blocking(move || {
            let written = catch_unwind(AssertUnwindSafe(|| source.write(&mut reader)));
            // The node can begin another backup, whatever this reader does.
            drop((source, permit));
            let error = match written {
                Ok(Ok(_)) => return own.is_complete.store(true, Ordering::Release),
                Ok(Err(BackupWriteError::Unsent(_))) => return own.end(BackupOutcome::Aborted),
                Ok(Err(BackupWriteError::Unread(error))) => error.to_string(),
                Err(_) => "the storage engine panicked".to_owned(),
            };
            tracing::error!(%error, "backup failed");
            own.end(BackupOutcome::Failed);
            // A reader that is still connected gets this error, so its response is cut off and does not end normally.
            let failed =
                reader.runtime.block_on(reader.sender.send_timeout(Err(io::Error::other(error)), PATIENCE));
            drop(failed);
        });
        tracing::info!("backup started");
        Ok(BackupStream { blocks, tracker, _walk: walk })
    }
}

/// The bytes of a backup. Dropping it ends the backup.
pub struct BackupStream {
    blocks: mpsc::Receiver<io::Result<Bytes>>,
    tracker: Arc<BackupTracker>,
    _walk: JoinHandle<()>,
}

impl Stream for BackupStream {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.blocks.poll_recv(context));
        let tracker = &self.tracker;
        Poll::Ready(match next {
            Some(Ok(block)) => {
                tracker.bytes.fetch_add(block.len() as u64, Ordering::Relaxed);
                Some(Ok(block))
            }
            None if tracker.is_complete.load(Ordering::Acquire) => {
                tracker.end(BackupOutcome::Done);
                None
            }
            // The thread has ended early. The reader notices because its response has no proper end.
            None => Some(Err(io::Error::other("the backup was given up"))),
            failed => failed,
        })
    }
}

impl Drop for BackupStream {
    fn drop(&mut self) {
        self.tracker.end(BackupOutcome::Aborted);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum BackupOutcome {
    Done,
    Failed,
    /// The reader has disconnected, or stopped taking blocks.
    Aborted,
}

impl BackupOutcome {
    const ALL: [Self; 3] = [Self::Done, Self::Failed, Self::Aborted];
}

/// Progress of a backup. Its end is reported once.
struct BackupTracker {
    begun: Instant,
    taken_ms: u64,
    /// Bytes that the reader has taken.
    bytes: AtomicU64,
    /// The whole backup waits for the reader, or was taken.
    is_complete: AtomicBool,
    has_ended: AtomicBool,
}

impl BackupTracker {
    fn begin(taken_ms: u64) -> Self {
        let (is_complete, has_ended) = (AtomicBool::new(false), AtomicBool::new(false));
        Self { begun: Instant::now(), taken_ms, bytes: AtomicU64::new(0), is_complete, has_ended }
    }

    fn end(&self, outcome: BackupOutcome) {
        if self.has_ended.swap(true, Ordering::Relaxed) {
            return;
        }
        count(outcome, 1);
        let (bytes, ms) = (self.bytes.load(Ordering::Relaxed), self.begun.elapsed().as_millis() as u64);
        match outcome {
            BackupOutcome::Done => {
                metrics::gauge!(LAST).set(self.taken_ms as f64 / 1_000.0);
                tracing::info!(bytes, ms, "backup finished");
            }
            BackupOutcome::Failed => {}
            BackupOutcome::Aborted => {
                tracing::warn!(bytes, ms, "backup aborted: reader gone or too slow")
            }
        }
    }
}

fn count(outcome: BackupOutcome, by: u64) {
    let outcome = match outcome {
        BackupOutcome::Done => "done",
        BackupOutcome::Failed => "failed",
        BackupOutcome::Aborted => "aborted",
    };
    metrics::counter!("fanfare_backups_total", "outcome" => outcome).increment(by);
}

/// Output of the thread, which sends blocks to the reader.
struct BlockSender {
    sender: mpsc::Sender<io::Result<Bytes>>,
    runtime: Handle,
}

impl Write for BlockSender {
    fn write(&mut self, block: &[u8]) -> io::Result<usize> {
        let sent = self.sender.send_timeout(Ok(Bytes::copy_from_slice(block)), PATIENCE);
        match self.runtime.block_on(sent) {
            Ok(()) => Ok(block.len()),
            Err(_) => Err(io::Error::other("its reader has gone, or has taken nothing for a minute")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
