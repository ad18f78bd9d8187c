//! How the writer fares: whether the disk takes what it is given, and if not, why not.

use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::origin::history::StoreError;

/// Longer than the writer waits for a flush, and than anybody waits for an ack.
const STANDSTILL: Duration = Duration::from_secs(3);
/// No group is being written.
const IDLE: u64 = u64::MAX;

pub(in crate::origin) struct Health {
    folder: PathBuf,
    opened: Instant,
    /// When the group being written was begun, in milliseconds since `opened`.
    begun_ms: AtomicU64,
    /// Why the last group was not written.
    refused: Mutex<Option<StoreError>>,
    /// Why the journal takes no more.
    broken: OnceLock<StoreError>,
}

impl Health {
    pub(in crate::origin) fn new(folder: &Path) -> Self {
        let (refused, broken) = Default::default();
        let begun_ms = AtomicU64::new(IDLE);
        Self { folder: folder.to_owned(), opened: Instant::now(), begun_ms, refused, broken }
    }

    pub(in crate::origin) fn begin(&self) {
        self.begun_ms.store(self.now_ms(), Ordering::Relaxed);
    }

    pub(in crate::origin) fn end(&self) {
        self.begun_ms.store(IDLE, Ordering::Relaxed);
    }

    pub(in crate::origin) fn wrote(&self, result: &Result<(), StoreError>) {
        *self.refused.lock() = result.as_ref().err().cloned();
    }

    /// Nothing is written from here on. The first reason stays.
    pub(in crate::origin) fn broke(&self, reason: &str) -> StoreError {
        self.broken.get_or_init(|| self.not_taken(&format!("{reason}; restart the node"))).clone()
    }

    pub(in crate::origin) fn not_taken(&self, reason: &str) -> StoreError {
        StoreError::failed(format_args!(
            "the disk of {} did not take a write: {reason}",
            self.folder.display()
        ))
    }

    /// `Failed` once the journal takes no more.
    pub(in crate::origin) fn usable(&self) -> Result<(), StoreError> {
        self.broken.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// `Failed` also while the disk hangs, and until a write succeeds after one that did not.
    pub(in crate::origin) fn state(&self) -> Result<(), StoreError> {
        self.usable()?;
        let begun_ms = self.begun_ms.load(Ordering::Relaxed);
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
