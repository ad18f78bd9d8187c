//! A backup of a running node, made as fast as its reader takes it.

use std::fmt;
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::Stream;
use tokio::runtime::Handle;
use tokio::sync::{Semaphore, mpsc};
use tokio::task::JoinHandle;

use super::source::Source;
use crate::origin::history::StoreError;

/// Blocks that wait for the reader; where there are so many, the thread that makes them waits.
const BLOCKS: usize = 2;
/// A reader that takes nothing for so long holds the node's snapshots no longer.
const PATIENCE: Duration = Duration::from_secs(60);
const LAST: &str = "fanfare_last_backup_timestamp_seconds";

/// Makes one backup at a time.
pub struct Backups {
    room: Arc<Semaphore>,
}

/// Why a backup was not begun.
#[derive(Debug)]
pub enum BackupRefused {
    /// Another one is under way.
    Busy,
    Store(StoreError),
}

impl fmt::Display for BackupRefused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str("another backup is under way"),
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for BackupRefused {}

impl Default for Backups {
    fn default() -> Self {
        for outcome in Outcome::ALL {
            count(outcome, 0);
        }
        metrics::gauge!(LAST).set(0.0);
        Self { room: Arc::new(Semaphore::new(1)) }
    }
}

impl Backups {
    /// `take` runs on a thread that may block.
    pub async fn begin(
        &self,
        take: impl FnOnce() -> Result<Source, StoreError> + Send + 'static,
    ) -> Result<BackupStream, BackupRefused> {
        let place = Arc::clone(&self.room).try_acquire_owned().map_err(|_| BackupRefused::Busy)?;
        let taken = tokio::task::spawn_blocking(take).await;
        let source = taken.unwrap_or_else(|error| Err(StoreError::failed(error)));
        let source = source.map_err(BackupRefused::Store).inspect_err(|error| {
            tracing::error!(%error, "backup not begun");
            count(Outcome::Failed, 1);
        })?;
        let (sender, blocks) = mpsc::channel(BLOCKS);
        let run = Run { begun: Instant::now(), taken_ms: source.taken_ms(), bytes: 0, outcome: None };
        let is_whole = Arc::new(AtomicBool::new(false));
        let has_ended = Arc::clone(&is_whole);
        let mut reader = Reader { sender, runtime: Handle::current() };
        let walk = tokio::task::spawn_blocking(move || {
            let _place = place;
            let written = catch_unwind(AssertUnwindSafe(|| source.write(&mut reader)));
            let error = match written {
                Ok(Ok(_)) => return has_ended.store(true, Ordering::Release),
                Ok(Err(error)) => error.to_string(),
                Err(_) => "the storage engine panicked".to_owned(),
            };
            // It reaches a reader that is still there, so that its answer has no end.
            let failed =
                reader.runtime.block_on(reader.sender.send_timeout(Err(io::Error::other(error)), PATIENCE));
            drop(failed);
        });
        tracing::info!("backup started");
        Ok(BackupStream { blocks, is_whole, run, _walk: walk })
    }
}

/// The bytes of a backup. Dropping it ends the backup.
pub struct BackupStream {
    blocks: mpsc::Receiver<io::Result<Bytes>>,
    is_whole: Arc<AtomicBool>,
    run: Run,
    _walk: JoinHandle<()>,
}

impl Stream for BackupStream {
    type Item = io::Result<Bytes>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let next = ready!(self.blocks.poll_recv(context));
        let is_whole = self.is_whole.load(Ordering::Acquire);
        let run = &mut self.run;
        Poll::Ready(match next {
            Some(Ok(block)) => {
                run.bytes += block.len() as u64;
                Some(Ok(block))
            }
            Some(Err(error)) => {
                tracing::error!(%error, "backup failed");
                run.outcome = Some(Outcome::Failed);
                Some(Err(error))
            }
            None if is_whole => {
                run.outcome = Some(Outcome::Done);
                None
            }
            None if run.outcome.is_some() => None,
            // The thread has waited for too long and gone; an answer without an end tells the reader.
            None => {
                run.outcome = Some(Outcome::Aborted);
                Some(Err(io::Error::other("the backup was given up")))
            }
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Done,
    Failed,
    /// Its reader has gone, or took nothing any more.
    Aborted,
}

impl Outcome {
    const ALL: [Self; 3] = [Self::Done, Self::Failed, Self::Aborted];
}

/// Says how a backup has ended when it is dropped.
struct Run {
    begun: Instant,
    taken_ms: u64,
    bytes: u64,
    outcome: Option<Outcome>,
}

impl Drop for Run {
    fn drop(&mut self) {
        let outcome = self.outcome.unwrap_or(Outcome::Aborted);
        count(outcome, 1);
        let (bytes, ms) = (self.bytes, self.begun.elapsed().as_millis() as u64);
        match outcome {
            Outcome::Done => {
                metrics::gauge!(LAST).set(self.taken_ms as f64 / 1_000.0);
                tracing::info!(bytes, ms, "backup finished");
            }
            Outcome::Failed => {}
            Outcome::Aborted => tracing::warn!(bytes, ms, "backup aborted: its reader has gone"),
        }
    }
}

fn count(outcome: Outcome, by: u64) {
    let outcome = match outcome {
        Outcome::Done => "done",
        Outcome::Failed => "failed",
        Outcome::Aborted => "aborted",
    };
    metrics::counter!("fanfare_backups_total", "outcome" => outcome).increment(by);
}

/// Where the thread writes to.
struct Reader {
    sender: mpsc::Sender<io::Result<Bytes>>,
    runtime: Handle,
}

impl Write for Reader {
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
