//! Health of the disk writer: whether the disk accepts writes, and the reason if it does not.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::origin::history::StoreError;

/// Time after which a group in progress counts as hung. It is longer than the writer waits for a flush and any publisher for an ack.
const STANDSTILL: Duration = Duration::from_secs(3);
/// Marker: no group is being written.
const IDLE: u64 = u64::MAX;

pub(in crate::origin) struct DiskHealth {
    folder: PathBuf,
    opened: Instant,
    /// Start of the current group, in milliseconds since `opened`.
    started_ms: AtomicU64,
    /// Error of the last group, if it was not written.
    refused: Mutex<Option<StoreError>>,
    /// Reason why the journal accepts no more writes.
    broken: OnceLock<StoreError>,
}

impl DiskHealth {
    pub(in crate::origin) fn new(folder: &Path) -> Self {
        let (refused, broken) = Default::default();
        let started_ms = AtomicU64::new(IDLE);
        Self { folder: folder.to_owned(), opened: Instant::now(), started_ms, refused, broken }
    }

    pub(in crate::origin) fn begin(&self) {
        self.started_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(in crate::origin) fn end(&self) {
        self.started_ms.store(IDLE, Ordering::Relaxed);
    }

    pub(in crate::origin) fn wrote(&self, result: &Result<(), StoreError>) {
        *self.refused.lock() = result.as_ref().err().cloned();
    }

    /// Stops all further writes. The first reason is kept.
    pub(in crate::origin) fn broke(&self, reason: &str) -> StoreError {
        self.broken.get_or_init(|| self.write_error(&format!("{reason}; restart the node"))).clone()
    }

    pub(in crate::origin) fn write_error(&self, reason: &str) -> StoreError {
        StoreError::failed(format_args!(
            "the disk of {} did not take a write: {reason}",
            self.folder.display()
        ))
    }

    /// Returns `Failed` once the journal accepts no more writes.
    pub(in crate::origin) fn usable(&self) -> Result<(), StoreError> {
        self.broken.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns `Failed` also while the disk hangs, and from a failed write until the next successful one.
    pub(in crate::origin) fn state(&self) -> Result<(), StoreError> {
        self.usable()?;
        let begun_ms = self.started_ms.load(Ordering::Relaxed);
        let stood = Duration::from_millis(self.now_ms().saturating_sub(begun_ms));
        if stood >= STANDSTILL {
            let folder = self.folder.display();
            return Err(StoreError::failed(format_args!(
                "the disk of {folder} has not answered for {stood:?}"
            )));
        }
        self.refused.lock().clone().map_or(Ok(()), Err)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.opened.elapsed().as_millis()).unwrap_or(IDLE)
    }
}
