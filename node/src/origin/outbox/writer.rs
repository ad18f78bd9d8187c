//! The writer thread of the outbox: it commits all waiting jobs as one batch, then answers them.

mod trim;

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fjall::{OwnedWriteBatch, PersistMode};
use tokio::sync::oneshot;

use super::board::OutboxBoard;
use super::depth::{DepthChange, TargetDepths};
use super::event::{Addressee, OutboxEvent};
use super::store::{DeadLetter, EventBatch, FixedBatch, OutboxTables};
use super::{TargetId, keys};
use crate::model::Clock;
use crate::origin::disk::health::DiskHealth;
use crate::origin::disk::queue::{DiskQueue, DiskQueueBounds, QueueWeight};
use crate::origin::disk::{engine, tables};
use crate::origin::history::{StoreCallback, StoreError};
use crate::telemetry::{StoreOperation, StoreTimes};

/// Bounds of a group, as in the embedded store.
const GROUP: DiskQueueBounds = DiskQueueBounds { items: 4_096, bytes: 4 * 1024 * 1024 };
const LOOK_BYTES: usize = 1024 * 1024;
const JOURNAL_BYTES: usize = 64 * 1024 * 1024;
/// Approximate bytes of an event's rows beside its record.
const ROWS_BYTES: usize = 300;
/// Shortest interval between syncs that are made only for fixed batches.
const SYNC_EVERY: Duration = Duration::from_millis(100);

type OutboxReply = oneshot::Sender<Result<(), StoreError>>;

pub(super) enum OutboxJob {
    /// Stores the events of one publish; without events only the order of the callback counts.
    Put { events: Vec<OutboxEvent>, done: StoreCallback },
    /// Fixes the batch of a channel, which begins with the event `first`, before its first attempt. `Busy` if that event no longer waits.
    Fix { target: TargetId, channel: Box<str>, first: u64, fixed: FixedBatch, answer: OutboxReply },
    /// Settles a batch.
    Settle(BatchSettlement),
    /// Requeues dead letters of a target as new events; answers their number.
    Retry { target: TargetId, sequences: Vec<u64>, answer: oneshot::Sender<Result<u64, StoreError>> },
    /// Records whether a target is disabled, and under which of its settings.
    Disable { target: TargetId, settings: Option<u64>, answer: OutboxReply },
}

pub(super) struct BatchSettlement {
    target: TargetId,
    events: Vec<(u64, Arc<OutboxEvent>)>,
    /// Channel whose batch is fixed; `None` if the batch was sent without being fixed.
    fixed: Option<Box<str>>,
    /// Reason for which the events become dead letters; `None` if the target has received them.
    dead_reason: Option<Box<str>>,
    /// `None` if no task waits for the outcome.
    answer: Option<OutboxReply>,
}

impl BatchSettlement {
    pub(super) fn new(
        target: &TargetId,
        channel: &str,
        batch: &EventBatch,
        dead_reason: Option<Box<str>>,
        answer: Option<OutboxReply>,
    ) -> Self {
        let fixed = batch.fixed.as_ref().map(|_| channel.into());
        Self { target: target.clone(), events: batch.events.clone(), fixed, dead_reason, answer }
    }
}

/// Bounds of the bytes that one target may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct TargetBounds {
    pub(super) bytes: u64,
    pub(super) dead_bytes: u64,
}

pub(super) struct OutboxWriter {
    pub(super) tables: OutboxTables,
    pub(super) queue: Arc<DiskQueue<OutboxJob>>,
    pub(super) status: Arc<DiskHealth>,
    pub(super) times: StoreTimes,
    pub(super) depths: Arc<TargetDepths>,
    pub(super) board: Arc<OutboxBoard>,
    pub(super) bounds: TargetBounds,
    pub(super) clock: Clock,
    pub(super) next_sequence: u64,
    /// Sequence for each target below which no event waits, except in batches under way.
    pub(super) oldest: HashMap<TargetId, u64>,
    pub(super) unflushed: usize,
    /// Time of the last commit that survives a loss of power.
    pub(super) synced: Instant,
}

/// Effects of a group beside its rows.
#[derive(Default)]
struct CommitEffects {
    put: Vec<StoreCallback>,
    answers: Vec<OutboxReply>,
    changes: HashMap<TargetId, DepthChange>,
    /// Events that are new with the group.
    arrived: Vec<(TargetId, u64, Arc<OutboxEvent>)>,
    /// Pairs of target and event that the group settles.
    settled: HashSet<(TargetId, u64)>,
    /// Pairs of target and event that have no row after the group.
    removed: HashSet<(TargetId, u64)>,
    /// Last events of the batches that the group fixes.
    fixed: HashMap<(TargetId, Box<str>), u64>,
    /// Replies to fixes whose first event no longer waits.
    late: Vec<OutboxReply>,
    /// Dead letters that the group removes.
    undone: HashSet<(TargetId, u64)>,
    /// Pairs of target and channel that have lost events because the target is full.
    trimmed: HashSet<(TargetId, Box<str>)>,
    /// Replies to retries, each with the number of events that it has requeued.
    counts: Vec<(oneshot::Sender<Result<u64, StoreError>>, u64)>,
    /// The group settles batches.
    has_settles: bool,
    /// The group has writes that must survive a loss of power.
    is_lasting: bool,
    dead: u64,
    dropped: u64,
}

impl CommitEffects {
    fn change(&mut self, target: &TargetId) -> &mut DepthChange {
        self.changes.entry(target.clone()).or_default()
    }
}

impl OutboxWriter {
    /// Commits jobs until the queue is closed and empty.
    pub(super) fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        let mut group = Vec::new();
        let mut unlooked = LOOK_BYTES;
        while let Some(weight) = queue.take_group(GROUP, &mut group) {
            self.status.begin();
            let begun = Instant::now();
            let mut effects = CommitEffects::default();
            let commit =
                catch_unwind(AssertUnwindSafe(|| self.commit(group.drain(..), weight, &mut effects)));
            let result = commit.unwrap_or_else(|_| Err(self.status.broke("the storage engine panicked")));
            let result = match result {
                // Otherwise the events of a settled batch would wait, and count, until the next start.
                Err(error) if effects.has_settles => Err(self.status.broke(&error.to_string())),
                result => result,
            };
            if let Err(error) = &result {
                tracing::error!(%error, rows = weight.items, "outbox write failed");
            }
            self.times.ended(StoreOperation::Append, begun);
            self.status.wrote(&result);
            let written = weight.bytes + weight.items * ROWS_BYTES;
            unlooked += written;
            self.unflushed = self.unflushed.saturating_add(written);
            if unlooked >= LOOK_BYTES {
                unlooked = 0;
                self.seal();
            }
            self.status.end();
            self.answer(result, effects);
            queue.release(weight);
        }
    }

    fn answer(&mut self, result: Result<(), StoreError>, effects: CommitEffects) {
        if result.is_ok() {
            self.depths.apply(&effects.changes);
            self.oldest.retain(|target, _| {
                !effects.changes.contains_key(target) || self.depths.of(target).events > 0
            });
            super::count_dead(effects.dead, effects.dropped);
            for (target, sequence, event) in effects.arrived {
                self.board.add_event(&target, sequence, &event);
            }
            for (target, channel) in effects.trimmed {
                self.board.drop_cached(&target, &channel);
            }
        }
        for done in effects.put {
            let result = result.clone();
            if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
                tracing::error!("outbox callback panicked");
            }
        }
        for late in effects.late {
            let _ = late.send(Err(StoreError::Busy));
        }
        for (answer, count) in effects.counts {
            let _ = answer.send(result.clone().map(|()| count));
        }
        for answer in effects.answers {
            // The caller may have dropped its receiver.
            let _ = answer.send(result.clone());
        }
    }

    fn seal(&mut self) {
        let sealed = tables::seal_full(&self.tables.all()).and_then(|sealed| {
            let due = !sealed && self.unflushed >= JOURNAL_BYTES;
            if due {
                self.tables.all().iter().try_for_each(|table| table.seal())?;
            }
            Ok(sealed || due)
        });
        match sealed {
            Ok(true) => self.unflushed = 0,
            Ok(false) => {}
            Err(error) => tracing::error!(%error, "outbox flush failed"),
        }
    }

    fn commit(
        &mut self,
        jobs: impl Iterator<Item = OutboxJob>,
        weight: QueueWeight,
        effects: &mut CommitEffects,
    ) -> Result<(), StoreError> {
        let (mut events, mut fixes, mut settles, mut disabled, mut retries) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        // All jobs are taken apart before anything can fail, so that each gets its answer.
        for job in jobs {
            match job {
                OutboxJob::Put { events: put, done } => {
                    effects.put.push(done);
                    events.extend(put);
                }
                OutboxJob::Fix { target, channel, first, fixed, answer } => {
                    if self.tables.is_waiting(&target, &channel, first).unwrap_or(false) {
                        effects.answers.push(answer);
                        fixes.push((target, channel, fixed));
                    } else {
                        effects.late.push(answer);
                    }
                }
                OutboxJob::Settle(mut settle) => {
                    effects.has_settles = true;
                    effects.answers.extend(settle.answer.take());
                    settles.push(settle);
                }
                OutboxJob::Retry { target, sequences, answer } => {
                    effects.counts.push((answer, 0));
                    retries.push((effects.counts.len() - 1, target, sequences));
                }
                OutboxJob::Disable { target, settings, answer } => {
                    effects.answers.push(answer);
                    disabled.push((target, settings));
                }
            }
        }
        self.status.usable()?;
        let first_new = self.next_sequence;
        let has_rows = !(events.is_empty() && fixes.is_empty() && settles.is_empty() && disabled.is_empty());
        if !has_rows && retries.is_empty() {
            return Ok(());
        }
        let mut batch = OwnedWriteBatch::with_capacity(self.tables.database.clone(), weight.items * 3);
        // Writes of one key in a commit have no order, and a channel may settle a batch and fix the next one in the same commit.
        let fixed_rows: HashSet<Vec<u8>> =
            fixes.iter().map(|(target, channel, _)| keys::channel(target, channel)).collect();
        for BatchSettlement { target, events, fixed, dead_reason, .. } in settles {
            let row = fixed.map(|channel| keys::channel(&target, &channel));
            if let Some(row) = row.filter(|row| !fixed_rows.contains(row)) {
                batch.remove(self.tables.batches.keyspace(), row);
            }
            self.settle(&mut batch, &target, &events, dead_reason.as_deref(), effects)?;
        }
        for (target, settings) in disabled {
            effects.is_lasting = true;
            let state = self.tables.state.keyspace();
            match settings {
                Some(settings) => batch.insert(state, super::disabled_key(&target), settings.to_be_bytes()),
                None => batch.remove(state, super::disabled_key(&target)),
            }
        }
        // A fixed batch that was written to the system survives a crash of the process. A loss of power may lose the most recent ones.
        effects.is_lasting |= !fixes.is_empty() && self.synced.elapsed() >= SYNC_EVERY;
        for (target, channel, fixed) in fixes {
            batch.insert(self.tables.batches.keyspace(), keys::channel(&target, &channel), fixed.encode());
            effects.fixed.insert((target, channel), fixed.last);
        }
        for (index, target, sequences) in retries {
            effects.counts[index].1 = self.requeue(&mut batch, &target, &sequences, effects)?;
        }
        for event in events {
            self.put(&mut batch, event, effects);
        }
        self.trim(&mut batch, first_new, effects)?;
        let mode = if effects.is_lasting { PersistMode::SyncData } else { PersistMode::Buffer };
        if effects.is_lasting {
            self.synced = Instant::now();
        }
        let committed = batch.durability(Some(mode)).commit();
        committed.map_err(|error| self.status.broke(&engine::reason(&error)))
    }

    fn put(&mut self, batch: &mut OwnedWriteBatch, event: OutboxEvent, effects: &mut CommitEffects) {
        effects.is_lasting = true;
        let event = Arc::new(event);
        let (sequence, value) = (self.next_sequence, event.encode());
        self.next_sequence += 1;
        let bytes = u32::try_from(value.len()).unwrap_or(u32::MAX);
        batch.insert(self.tables.events.keyspace(), keys::sequence(sequence), value);
        for Addressee { target, .. } in &event.targets {
            let key = keys::waiting(target, &event.channel, sequence);
            batch.insert(self.tables.waiting.keyspace(), key, bytes.to_be_bytes());
            let change = effects.change(target);
            change.events += 1;
            change.bytes += i64::from(bytes);
            // After a start, earlier events may wait, so the oldest one is not known.
            let is_first = || self.depths.of(target).events == 0;
            self.oldest.entry(target.clone()).or_insert_with(|| if is_first() { sequence } else { 0 });
            effects.arrived.push((target.clone(), sequence, Arc::clone(&event)));
        }
    }

    /// Removes a target's events from the waiting ones; with a reason they become dead letters.
    fn settle(
        &self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        events: &[(u64, Arc<OutboxEvent>)],
        dead_reason: Option<&str>,
        effects: &mut CommitEffects,
    ) -> Result<(), StoreError> {
        for &(sequence, ref event) in events {
            if !effects.settled.insert((target.clone(), sequence)) {
                continue;
            }
            if !self.tables.is_waiting(target, &event.channel, sequence)? {
                // The full target may have lost the event while it was being sent.
                if dead_reason.is_none() {
                    self.remove_dead(batch, target, sequence, effects)?;
                }
                continue;
            }
            let bytes = u32::try_from(event.encoded_bytes()).unwrap_or(u32::MAX);
            batch.remove(self.tables.waiting.keyspace(), keys::waiting(target, &event.channel, sequence));
            let change = effects.change(target);
            change.events -= 1;
            change.bytes -= i64::from(bytes);
            if let Some(reason) = dead_reason {
                change.dead_events += 1;
                change.dead_bytes += i64::from(bytes);
                effects.dead += 1;
                let dead = DeadLetter { at_ms: self.clock.line_ms(), bytes, reason: reason.into() };
                batch.insert(self.tables.dead.keyspace(), keys::dead(target, sequence), dead.encode());
            } else {
                effects.removed.insert((target.clone(), sequence));
                self.forget(batch, target, sequence, event, effects)?;
            }
        }
        Ok(())
    }

    /// Removes the event if no other target needs it.
    fn forget(
        &self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        sequence: u64,
        event: &OutboxEvent,
        effects: &CommitEffects,
    ) -> Result<(), StoreError> {
        for other in event.targets.iter().map(|other| &other.target).filter(|other| *other != target) {
            let has_row = self.tables.is_dead(other, sequence)?
                || self.tables.is_waiting(other, &event.channel, sequence)?;
            if has_row && !effects.removed.contains(&(other.clone(), sequence)) {
                return Ok(());
            }
        }
        batch.remove(self.tables.events.keyspace(), keys::sequence(sequence));
        Ok(())
    }

    /// Removes a dead letter of the target; returns false if there is none.
    fn remove_dead(
        &self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        sequence: u64,
        effects: &mut CommitEffects,
    ) -> Result<bool, StoreError> {
        let row = keys::dead(target, sequence);
        let found = self.tables.dead.keyspace().get(&row).map_err(StoreError::failed)?;
        let Some(dead) = found.and_then(|value| DeadLetter::decode(&value)) else { return Ok(false) };
        if !effects.undone.insert((target.clone(), sequence)) {
            return Ok(false);
        }
        batch.remove(self.tables.dead.keyspace(), row);
        let change = effects.change(target);
        change.dead_events -= 1;
        change.dead_bytes -= i64::from(dead.bytes);
        effects.removed.insert((target.clone(), sequence));
        // An event that cannot be read stays, and does not block others.
        if let Ok(Some(event)) = self.tables.event(sequence) {
            self.forget(batch, target, sequence, &event, effects)?;
        }
        Ok(true)
    }

    /// Requeues dead letters of a target as new events for it alone, so that no fixed batch changes; returns their number.
    fn requeue(
        &mut self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        sequences: &[u64],
        effects: &mut CommitEffects,
    ) -> Result<u64, StoreError> {
        let mut count = 0;
        for &sequence in sequences {
            let Ok(Some(event)) = self.tables.event(sequence) else { continue };
            let Some(addressee) = event.addressee(target).cloned() else { continue };
            if !self.remove_dead(batch, target, sequence, effects)? {
                continue;
            }
            let written_ms = self.clock.line_ms();
            self.put(batch, OutboxEvent { written_ms, targets: vec![addressee], ..event }, effects);
            count += 1;
        }
        Ok(count)
    }
}
