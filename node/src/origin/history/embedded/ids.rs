//! Client-given message ids: those being written, those stored, and the thread that looks them up.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fjall::{OwnedWriteBatch, Slice};
use parking_lot::{Condvar, Mutex};

use crate::model::{Clock, Stamp};
use crate::origin::history::{FoundIds, IdScope, StoreError};

use super::partitions::{Kind, Partition, Partitions};
use super::queue::Queue;
use super::{failed, keys};

/// Partitions narrower than this would cost more to make than they save.
const WIDTH_MS_MIN: u64 = 60_000;

pub(super) struct Remembered {
    pub(super) key: Slice,
    pub(super) stamp: Stamp,
}

/// Ids handed to `append` and not yet on the disk.
#[derive(Default)]
pub(super) struct PendingIds {
    keys: Mutex<HashMap<Slice, usize>>,
    settled: Condvar,
}

impl PendingIds {
    pub(super) fn add(&self, ids: &[Remembered]) {
        if ids.is_empty() {
            return;
        }
        let mut keys = self.keys.lock();
        for id in ids {
            *keys.entry(id.key.clone()).or_default() += 1;
        }
    }

    pub(super) fn settle(&self, ids: &[Remembered]) {
        if ids.is_empty() {
            return;
        }
        let mut keys = self.keys.lock();
        for id in ids {
            if let Some(count) = keys.get_mut(&id.key) {
                *count -= 1;
                if *count == 0 {
                    keys.remove(&id.key);
                }
            }
        }
        self.settled.notify_all();
    }

    fn wait_for(&self, key: &[u8]) {
        let mut keys = self.keys.lock();
        while keys.contains_key(key) {
            self.settled.wait(&mut keys);
        }
    }
}

/// Stored ids. The value is the first stamp and its timestamp: incarnation, sequence, epoch milliseconds.
#[derive(Clone)]
pub(super) struct IdPartitions {
    pub(super) partitions: Arc<Partitions>,
    pub(super) window_ms: u64,
}

impl IdPartitions {
    pub(super) fn insert(
        &self,
        batch: &mut OwnedWriteBatch,
        timestamp_ms: u64,
        id: &Remembered,
    ) -> fjall::Result<()> {
        let width_ms = self.window_ms.max(WIDTH_MS_MIN);
        let partition = Partition::containing(Kind::Ids, timestamp_ms, width_ms, self.window_ms);
        let numbers = [id.stamp.incarnation, id.stamp.sequence, timestamp_ms];
        let value = numbers.map(u64::to_be_bytes);
        self.partitions.get_or_create(partition)?.insert(batch, id.key.clone(), value.as_flattened());
        Ok(())
    }

    fn find(&self, key: &[u8], now_ms: u64) -> fjall::Result<Option<Stamp>> {
        let oldest_ms = now_ms.saturating_sub(self.window_ms);
        for (_, keyspace) in self.partitions.overlapping(Kind::Ids, oldest_ms, u64::MAX) {
            let Some(value) = keyspace.get(key)? else { continue };
            let field = |at: usize| value.get(at..)?.first_chunk().copied().map(u64::from_be_bytes);
            if let (Some(incarnation), Some(sequence), Some(timestamp_ms)) = (field(0), field(8), field(16))
                && timestamp_ms >= oldest_ms
            {
                return Ok(Some(Stamp { incarnation, sequence }));
            }
        }
        Ok(None)
    }
}

pub(super) struct Lookup {
    pub(super) scope: IdScope,
    pub(super) ids: Vec<Box<str>>,
    pub(super) found: FoundIds,
}

pub(super) struct Finder {
    pub(super) queue: Arc<Queue<Lookup>>,
    pub(super) stored: IdPartitions,
    pub(super) pending: Arc<PendingIds>,
    pub(super) clock: Clock,
}

impl Finder {
    /// One lookup after another, until the queue is closed and empty.
    pub(super) fn run(self) {
        let mut key = Vec::new();
        while let Some(Lookup { scope, ids, found }) = self.queue.take_one() {
            let answer = catch_unwind(AssertUnwindSafe(|| self.find(&scope, &ids, &mut key)));
            let answer = answer.unwrap_or_else(|_| Err(failed("the storage engine panicked")));
            if catch_unwind(AssertUnwindSafe(|| found(answer))).is_err() {
                tracing::error!("a callback of the store panicked");
            }
        }
    }

    fn find(
        &self,
        scope: &IdScope,
        ids: &[Box<str>],
        key: &mut Vec<u8>,
    ) -> Result<Vec<Option<Stamp>>, StoreError> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        keys::id_prefix(scope, key);
        let prefix = key.len();
        let mut stamps = Vec::with_capacity(ids.len());
        for id in ids {
            key.truncate(prefix);
            key.extend_from_slice(id.as_bytes());
            self.pending.wait_for(key);
            stamps.push(self.stored.find(key, self.clock.now_ms()).map_err(failed)?);
        }
        Ok(stamps)
    }
}
