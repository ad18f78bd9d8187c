//! Client-given message ids: pending ones, stored ones, and the thread that looks them up.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use fjall::{OwnedWriteBatch, Slice};
use parking_lot::{Condvar, Mutex};

use crate::model::{ChannelKey, ClientId, Clock, Stamp};
use crate::origin::history::{IdLookupCallback, IdScope, StoreError};
use crate::telemetry::{StoreOperation, StoreTimes};

use super::partitions::{Partition, PartitionKind, Partitions};
use super::queue::{DiskQueue, QueueWeight};
use super::{failed, keys};

/// Narrowest partition of ids; narrower ones would cost more to create than they save.
const WIDTH_MS_MIN: u64 = 60_000;

pub(super) struct IdRow {
    pub(super) key: Slice,
    pub(super) stamp: Stamp,
}

/// Ids that were handed to `append` and are not on the disk yet.
pub(super) struct PendingIds {
    ids: Mutex<HashMap<Slice, EmbeddedPendingId>>,
    settled: Condvar,
    finder: Arc<DiskQueue<FinderRequest>>,
}

#[derive(Default)]
struct EmbeddedPendingId {
    writes: usize,
    /// Queue whose first lookup waits for the id. An id belongs to one queue.
    awaited_by: Option<EmbeddedLookupKey>,
}

impl PendingIds {
    pub(super) fn new(finder: Arc<DiskQueue<FinderRequest>>) -> Self {
        Self { ids: Mutex::default(), settled: Condvar::new(), finder }
    }

    pub(super) fn add(&self, added: &[IdRow]) {
        if added.is_empty() {
            return;
        }
        let mut ids = self.ids.lock();
        for id in added {
            ids.entry(id.key.clone()).or_default().writes += 1;
        }
    }

    pub(super) fn settle(&self, settled: &[IdRow]) {
        if settled.is_empty() {
            return;
        }
        let mut ids = self.ids.lock();
        for id in settled {
            let Entry::Occupied(mut pending) = ids.entry(id.key.clone()) else { continue };
            pending.get_mut().writes -= 1;
            if pending.get().writes == 0
                && let Some(queue) = pending.remove().awaited_by
            {
                self.finder.push_next(FinderRequest::Settled(queue));
            }
        }
        self.settled.notify_all();
    }

    /// Returns whether the id is not being written. If it is, the finder is told of the queue once the write ends.
    fn is_settled(&self, key: &[u8], queue: &EmbeddedLookupKey) -> bool {
        let mut ids = self.ids.lock();
        let pending = ids.get_mut(key);
        let settled = pending.is_none();
        if let Some(pending) = pending {
            pending.awaited_by = Some(queue.clone());
        }
        settled
    }

    fn wait_for(&self, key: &[u8]) {
        let mut ids = self.ids.lock();
        while ids.contains_key(key) {
            self.settled.wait(&mut ids);
        }
    }
}

/// Partitions of stored ids. The value is the first stamp and its write time: incarnation, sequence, epoch milliseconds of
/// [`Clock::line_ms`].
#[derive(Clone)]
pub(super) struct IdPartitions {
    pub(super) partitions: Arc<Partitions>,
    pub(super) window_ms: u64,
}

impl IdPartitions {
    pub(super) fn insert(
        &self,
        batch: &mut OwnedWriteBatch,
        written_ms: u64,
        id: &IdRow,
    ) -> fjall::Result<()> {
        let width_ms = self.window_ms.max(WIDTH_MS_MIN);
        let partition = Partition::containing(PartitionKind::Ids, written_ms, width_ms, self.window_ms);
        let numbers = [id.stamp.incarnation, id.stamp.sequence, written_ms];
        let value = numbers.map(u64::to_be_bytes);
        let table = self.partitions.get_or_create(partition)?;
        batch.insert(table.keyspace(), id.key.clone(), value.as_flattened());
        Ok(())
    }

    fn find(&self, key: &[u8], now_ms: u64) -> fjall::Result<Option<Stamp>> {
        let oldest_ms = now_ms.saturating_sub(self.window_ms);
        for (_, keyspace) in self.partitions.overlapping(PartitionKind::Ids, oldest_ms, u64::MAX) {
            let Some(value) = keyspace.get(key)? else { continue };
            let field = |at: usize| value.get(at..)?.first_chunk().copied().map(u64::from_be_bytes);
            if let (Some(incarnation), Some(sequence), Some(written_ms)) = (field(0), field(8), field(16))
                && written_ms >= oldest_ms
            {
                return Ok(Some(Stamp { incarnation, sequence }));
            }
        }
        Ok(None)
    }
}

pub(super) struct EmbeddedIdLookup {
    pub(super) scope: IdScope,
    pub(super) ids: Vec<Box<str>>,
    pub(super) callback: IdLookupCallback,
}

impl EmbeddedIdLookup {
    fn queue_key(&self) -> EmbeddedLookupKey {
        EmbeddedLookupKey { key: self.scope.key.clone(), client_id: self.scope.client_id.clone() }
    }
}

/// Key of a queue, within which lookups are answered in order. It is wider than a scope, since a connection may change its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct EmbeddedLookupKey {
    key: ChannelKey,
    client_id: Option<ClientId>,
}

pub(super) enum FinderRequest {
    Lookup(EmbeddedIdLookup),
    /// The id that the queue's first lookup waits for is written, or its write was refused.
    Settled(EmbeddedLookupKey),
}

/// Behaviour of a lookup that meets a pending id: it parks and frees the thread, or blocks it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PendingIdPolicy {
    Park,
    Block,
}

pub(super) struct IdFinder {
    pub(super) queue: Arc<DiskQueue<FinderRequest>>,
    pub(super) stored: IdPartitions,
    pub(super) pending: Arc<PendingIds>,
    pub(super) clock: Clock,
    pub(super) times: Arc<StoreTimes>,
    /// Queues of lookups that wait for a pending id, or behind such a lookup. No queue is empty.
    pub(super) parked: HashMap<EmbeddedLookupKey, VecDeque<(QueueWeight, EmbeddedIdLookup)>>,
    /// Lookups that one queue holds; more are answered `Busy`, so that no queue fills the whole finder.
    pub(super) parked_max: usize,
}

impl IdFinder {
    /// Serves lookups until the queue is closed and empty.
    pub(super) fn run(mut self) {
        while let Some((weight, find)) = self.queue.next() {
            match find {
                FinderRequest::Lookup(lookup) => self.begin(weight, lookup),
                FinderRequest::Settled(queue) => self.resume_queue(queue),
            }
        }
        for (weight, lookup) in std::mem::take(&mut self.parked).into_values().flatten() {
            self.look_up(weight, lookup, PendingIdPolicy::Block);
        }
    }

    fn begin(&mut self, weight: QueueWeight, lookup: EmbeddedIdLookup) {
        if !self.parked.is_empty()
            && let Some(queue) = self.parked.get_mut(&lookup.queue_key())
        {
            if queue.len() < self.parked_max {
                queue.push_back((weight, lookup));
            } else {
                self.answer(weight, lookup.callback, Err(StoreError::Busy));
            }
        } else if let Some(lookup) = self.look_up(weight, lookup, PendingIdPolicy::Park) {
            self.parked.insert(lookup.queue_key(), VecDeque::from([(weight, lookup)]));
        }
    }

    fn resume_queue(&mut self, queue: EmbeddedLookupKey) {
        let Some(mut lookups) = self.parked.remove(&queue) else { return };
        while let Some((weight, lookup)) = lookups.pop_front() {
            if let Some(lookup) = self.look_up(weight, lookup, PendingIdPolicy::Park) {
                lookups.push_front((weight, lookup));
                self.parked.insert(queue, lookups);
                return;
            }
        }
    }

    /// Answers the lookup, or returns it if it has to wait.
    fn look_up(
        &self,
        weight: QueueWeight,
        lookup: EmbeddedIdLookup,
        patience: PendingIdPolicy,
    ) -> Option<EmbeddedIdLookup> {
        let begun = Instant::now();
        let found = catch_unwind(AssertUnwindSafe(|| self.find(&lookup, patience)));
        let found = found.unwrap_or_else(|_| Err(failed("the storage engine panicked")));
        let Some(found) = found.transpose() else { return Some(lookup) };
        if !lookup.ids.is_empty() {
            self.times.ended(StoreOperation::FindIds, begun);
        }
        self.answer(weight, lookup.callback, found);
        None
    }

    fn answer(
        &self,
        weight: QueueWeight,
        found: IdLookupCallback,
        answer: Result<Vec<Option<Stamp>>, StoreError>,
    ) {
        self.queue.release(weight);
        if catch_unwind(AssertUnwindSafe(|| found(answer))).is_err() {
            tracing::error!("store callback panicked");
        }
    }

    /// Returns `None` if an id is being written.
    fn find(
        &self,
        lookup: &EmbeddedIdLookup,
        patience: PendingIdPolicy,
    ) -> Result<Option<Vec<Option<Stamp>>>, StoreError> {
        if lookup.ids.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let mut key = Vec::new();
        keys::id_prefix(&lookup.scope, &mut key);
        let (prefix, queue) = (key.len(), lookup.queue_key());
        let mut stamps = Vec::with_capacity(lookup.ids.len());
        for id in &lookup.ids {
            key.truncate(prefix);
            key.extend_from_slice(id.as_bytes());
            match patience {
                PendingIdPolicy::Park if !self.pending.is_settled(&key, &queue) => return Ok(None),
                PendingIdPolicy::Park => {}
                PendingIdPolicy::Block => self.pending.wait_for(&key),
            }
            stamps.push(self.stored.find(&key, self.clock.line_ms()).map_err(failed)?);
        }
        Ok(Some(stamps))
    }
}
