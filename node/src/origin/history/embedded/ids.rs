//! Client-given message ids: those being written, those stored, and the thread that looks them up.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use fjall::{OwnedWriteBatch, Slice};
use parking_lot::{Condvar, Mutex};

use crate::model::{ChannelKey, ClientId, Clock, Stamp};
use crate::origin::history::{FoundIds, IdScope, StoreError};
use crate::telemetry::{StoreOperation, StoreTimes};

use super::partitions::{Kind, Partition, Partitions};
use super::queue::{Queue, Weight};
use super::{failed, keys};

/// Partitions narrower than this would cost more to make than they save.
const WIDTH_MS_MIN: u64 = 60_000;

pub(super) struct Remembered {
    pub(super) key: Slice,
    pub(super) stamp: Stamp,
}

/// Ids handed to `append` and not yet on the disk.
pub(super) struct PendingIds {
    ids: Mutex<HashMap<Slice, Pending>>,
    settled: Condvar,
    finder: Arc<Queue<Find>>,
}

#[derive(Default)]
struct Pending {
    writes: usize,
    /// Whose first lookup waits. An id belongs to one lane.
    awaited_by: Option<Lane>,
}

impl PendingIds {
    pub(super) fn new(finder: Arc<Queue<Find>>) -> Self {
        Self { ids: Mutex::default(), settled: Condvar::new(), finder }
    }

    pub(super) fn add(&self, added: &[Remembered]) {
        if added.is_empty() {
            return;
        }
        let mut ids = self.ids.lock();
        for id in added {
            ids.entry(id.key.clone()).or_default().writes += 1;
        }
    }

    pub(super) fn settle(&self, settled: &[Remembered]) {
        if settled.is_empty() {
            return;
        }
        let mut ids = self.ids.lock();
        for id in settled {
            let Entry::Occupied(mut pending) = ids.entry(id.key.clone()) else { continue };
            pending.get_mut().writes -= 1;
            if pending.get().writes == 0
                && let Some(lane) = pending.remove().awaited_by
            {
                self.finder.push_next(Find::Settled(lane));
            }
        }
        self.settled.notify_all();
    }

    /// False: it is being written, and the finder will be told of the lane when it is not any more.
    fn is_settled(&self, key: &[u8], lane: &Lane) -> bool {
        let mut ids = self.ids.lock();
        let pending = ids.get_mut(key);
        let settled = pending.is_none();
        if let Some(pending) = pending {
            pending.awaited_by = Some(lane.clone());
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

/// Stored ids. The value is the first stamp and when it was written: incarnation, sequence, epoch milliseconds of [`Clock::line_ms`].
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
        id: &Remembered,
    ) -> fjall::Result<()> {
        let width_ms = self.window_ms.max(WIDTH_MS_MIN);
        let partition = Partition::containing(Kind::Ids, written_ms, width_ms, self.window_ms);
        let numbers = [id.stamp.incarnation, id.stamp.sequence, written_ms];
        let value = numbers.map(u64::to_be_bytes);
        let table = self.partitions.get_or_create(partition)?;
        batch.insert(table.keyspace(), id.key.clone(), value.as_flattened());
        Ok(())
    }

    fn find(&self, key: &[u8], now_ms: u64) -> fjall::Result<Option<Stamp>> {
        let oldest_ms = now_ms.saturating_sub(self.window_ms);
        for (_, keyspace) in self.partitions.overlapping(Kind::Ids, oldest_ms, u64::MAX) {
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

pub(super) struct Lookup {
    pub(super) scope: IdScope,
    pub(super) ids: Vec<Box<str>>,
    pub(super) found: FoundIds,
}

impl Lookup {
    fn lane(&self) -> Lane {
        Lane { key: self.scope.key.clone(), client_id: self.scope.client_id.clone() }
    }
}

/// Within which lookups are answered in order: wider than a scope, since a connection may change its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lane {
    key: ChannelKey,
    client_id: Option<ClientId>,
}

pub(super) enum Find {
    Lookup(Lookup),
    /// What the lane's first lookup waits for is written, or was refused.
    Settled(Lane),
}

/// Whether a lookup that meets an id that is being written leaves the thread to others.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Patience {
    Parks,
    Waits,
}

pub(super) struct Finder {
    pub(super) queue: Arc<Queue<Find>>,
    pub(super) stored: IdPartitions,
    pub(super) pending: Arc<PendingIds>,
    pub(super) clock: Clock,
    pub(super) times: Arc<StoreTimes>,
    /// Lookups that wait for an id that is being written, and those behind them. None is empty.
    pub(super) lanes: HashMap<Lane, VecDeque<(Weight, Lookup)>>,
    /// Of one lane; beyond it `Busy`, so that no lane fills the queue.
    pub(super) lane_max: usize,
}

impl Finder {
    /// Until the queue is closed and empty.
    pub(super) fn run(mut self) {
        while let Some((weight, find)) = self.queue.next() {
            match find {
                Find::Lookup(lookup) => self.begin(weight, lookup),
                Find::Settled(lane) => self.go_on(lane),
            }
        }
        for (weight, lookup) in std::mem::take(&mut self.lanes).into_values().flatten() {
            self.look_up(weight, lookup, Patience::Waits);
        }
    }

    fn begin(&mut self, weight: Weight, lookup: Lookup) {
        if !self.lanes.is_empty()
            && let Some(lane) = self.lanes.get_mut(&lookup.lane())
        {
            if lane.len() < self.lane_max {
                lane.push_back((weight, lookup));
            } else {
                self.answer(weight, lookup.found, Err(StoreError::Busy));
            }
        } else if let Some(lookup) = self.look_up(weight, lookup, Patience::Parks) {
            self.lanes.insert(lookup.lane(), VecDeque::from([(weight, lookup)]));
        }
    }

    fn go_on(&mut self, lane: Lane) {
        let Some(mut lookups) = self.lanes.remove(&lane) else { return };
        while let Some((weight, lookup)) = lookups.pop_front() {
            if let Some(lookup) = self.look_up(weight, lookup, Patience::Parks) {
                lookups.push_front((weight, lookup));
                self.lanes.insert(lane, lookups);
                return;
            }
        }
    }

    /// Gives the lookup back when it has to wait.
    fn look_up(&self, weight: Weight, lookup: Lookup, patience: Patience) -> Option<Lookup> {
        let begun = Instant::now();
        let found = catch_unwind(AssertUnwindSafe(|| self.find(&lookup, patience)));
        let found = found.unwrap_or_else(|_| Err(failed("the storage engine panicked")));
        let Some(found) = found.transpose() else { return Some(lookup) };
        if !lookup.ids.is_empty() {
            self.times.ended(StoreOperation::FindIds, begun);
        }
        self.answer(weight, lookup.found, found);
        None
    }

    fn answer(&self, weight: Weight, found: FoundIds, answer: Result<Vec<Option<Stamp>>, StoreError>) {
        self.queue.release(weight);
        if catch_unwind(AssertUnwindSafe(|| found(answer))).is_err() {
            tracing::error!("a callback of the store panicked");
        }
    }

    /// None: an id is being written.
    fn find(&self, lookup: &Lookup, patience: Patience) -> Result<Option<Vec<Option<Stamp>>>, StoreError> {
        if lookup.ids.is_empty() {
            return Ok(Some(Vec::new()));
        }
        let mut key = Vec::new();
        keys::id_prefix(&lookup.scope, &mut key);
        let (prefix, lane) = (key.len(), lookup.lane());
        let mut stamps = Vec::with_capacity(lookup.ids.len());
        for id in &lookup.ids {
            key.truncate(prefix);
            key.extend_from_slice(id.as_bytes());
            match patience {
                Patience::Parks if !self.pending.is_settled(&key, &lane) => return Ok(None),
                Patience::Parks => {}
                Patience::Waits => self.pending.wait_for(&key),
            }
            stamps.push(self.stored.find(&key, self.clock.line_ms()).map_err(failed)?);
        }
        Ok(Some(stamps))
    }
}
