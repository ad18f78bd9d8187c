//! The thread that writes the outbox: it commits all jobs that wait as one batch, then answers them.

mod trim;

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fjall::{OwnedWriteBatch, PersistMode};
use tokio::sync::oneshot;

use super::board::Board;
use super::depth::{Change, Depths};
use super::event::{Addressee, Event};
use super::store::{Batch, Dead, Fixed, Tables};
use super::{TargetId, keys};
use crate::model::Clock;
use crate::origin::disk::health::Health;
use crate::origin::disk::queue::{Bounds, Queue, Weight};
use crate::origin::disk::{engine, tables};
use crate::origin::history::{Done, StoreError};
use crate::telemetry::{StoreOperation, StoreTimes};

/// One group, as that of the embedded store.
const GROUP: Bounds = Bounds { items: 4_096, bytes: 4 * 1024 * 1024 };
const LOOK_BYTES: usize = 1024 * 1024;
const JOURNAL_BYTES: usize = 64 * 1024 * 1024;
/// About the bytes that the rows of an event take beside its record.
const ROWS_BYTES: usize = 300;
/// Batches that are fixed have no sync of their own more often than so.
const SYNC_EVERY: Duration = Duration::from_millis(100);

type Answer = oneshot::Sender<Result<(), StoreError>>;

pub(super) enum Job {
    /// Events of one publish; none where only the order of the callbacks counts.
    Put { events: Vec<Event>, done: Done },
    /// Fixes the batch of a channel, which begins with the event `first`, before its first attempt. `Busy` if that one does not wait any
    /// more.
    Fix { target: TargetId, channel: Box<str>, first: u64, fixed: Fixed, answer: Answer },
    /// Ends a batch.
    Settle(Settle),
    /// Lets dead letters of a target wait for it again, as new events; answers how many.
    Retry { target: TargetId, sequences: Vec<u64>, answer: oneshot::Sender<Result<u64, StoreError>> },
    /// Writes whether a target is disabled, and by which settings of it.
    Disable { target: TargetId, settings: Option<u64>, answer: Answer },
}

pub(super) struct Settle {
    target: TargetId,
    events: Vec<(u64, Arc<Event>)>,
    /// The channel whose batch is fixed; none: it was sent without being fixed.
    fixed: Option<Box<str>>,
    /// None: the target has them.
    dead_reason: Option<Box<str>>,
    /// None: nothing waits for it.
    answer: Option<Answer>,
}

impl Settle {
    pub(super) fn new(
        target: &TargetId,
        channel: &str,
        batch: &Batch,
        dead_reason: Option<Box<str>>,
        answer: Option<Answer>,
    ) -> Self {
        let fixed = batch.fixed.as_ref().map(|_| channel.into());
        Self { target: target.clone(), events: batch.events.clone(), fixed, dead_reason, answer }
    }
}

/// Bounds of what one target may have.
#[derive(Debug, Clone, Copy)]
pub(super) struct TargetBounds {
    pub(super) bytes: u64,
    pub(super) dead_bytes: u64,
}

pub(super) struct Writer {
    pub(super) tables: Tables,
    pub(super) queue: Arc<Queue<Job>>,
    pub(super) status: Arc<Health>,
    pub(super) times: StoreTimes,
    pub(super) depths: Arc<Depths>,
    pub(super) board: Arc<Board>,
    pub(super) bounds: TargetBounds,
    pub(super) clock: Clock,
    pub(super) next_sequence: u64,
    /// For each target the sequence below which no event waits for it that is in no batch under way.
    pub(super) oldest: HashMap<TargetId, u64>,
    pub(super) unflushed: usize,
    /// The last commit that outlasts a loss of power.
    pub(super) synced: Instant,
}

/// The effects of a group beside its rows.
#[derive(Default)]
struct Effects {
    put: Vec<Done>,
    answers: Vec<Answer>,
    changes: HashMap<TargetId, Change>,
    /// New events.
    arrived: Vec<(TargetId, u64, Arc<Event>)>,
    /// Pairs of target and event that the group settles.
    settled: HashSet<(TargetId, u64)>,
    /// Those of them without a row after the group.
    removed: HashSet<(TargetId, u64)>,
    /// The last events of the batches that the group fixes.
    fixed: HashMap<(TargetId, Box<str>), u64>,
    /// Fixes that cannot be.
    late: Vec<Answer>,
    /// Dead letters that the group removes.
    undone: HashSet<(TargetId, u64)>,
    /// Channels of which a full target has lost events.
    trimmed: HashSet<(TargetId, Box<str>)>,
    /// How many of them each one asked for.
    counts: Vec<(oneshot::Sender<Result<u64, StoreError>>, u64)>,
    /// Batches end with the group.
    has_settles: bool,
    /// Something that must outlast a loss of power.
    is_lasting: bool,
    dead: u64,
    dropped: u64,
}

impl Effects {
    fn change(&mut self, target: &TargetId) -> &mut Change {
        self.changes.entry(target.clone()).or_default()
    }
}

impl Writer {
    /// Until the queue is closed and empty.
    pub(super) fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        let mut group = Vec::new();
        let mut unlooked = LOOK_BYTES;
        while let Some(weight) = queue.take(GROUP, &mut group) {
            self.status.begin();
            let begun = Instant::now();
            let mut effects = Effects::default();
            let commit =
                catch_unwind(AssertUnwindSafe(|| self.commit(group.drain(..), weight, &mut effects)));
            let result = commit.unwrap_or_else(|_| Err(self.status.broke("the storage engine panicked")));
            let result = match result {
                // A batch that was settled would wait, and count, until the next start.
                Err(error) if effects.has_settles => Err(self.status.broke(&error.to_string())),
                result => result,
            };
            if let Err(error) = &result {
                tracing::error!(%error, rows = weight.items, "outbox did not write");
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

    fn answer(&mut self, result: Result<(), StoreError>, effects: Effects) {
        if result.is_ok() {
            self.depths.apply(&effects.changes);
            self.oldest.retain(|target, _| {
                !effects.changes.contains_key(target) || self.depths.of(target).events > 0
            });
            super::count_dead(effects.dead, effects.dropped);
            for (target, sequence, event) in effects.arrived {
                self.board.arrived(&target, sequence, &event);
            }
            for (target, channel) in effects.trimmed {
                self.board.lost(&target, &channel);
            }
        }
        for done in effects.put {
            let result = result.clone();
            if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
                tracing::error!("a callback of the outbox panicked");
            }
        }
        for late in effects.late {
            let _ = late.send(Err(StoreError::Busy));
        }
        for (answer, count) in effects.counts {
            let _ = answer.send(result.clone().map(|()| count));
        }
        for answer in effects.answers {
            // A caller that has gone needs no answer.
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
            Err(error) => tracing::error!(%error, "outbox did not seal its tables"),
        }
    }

    fn commit(
        &mut self,
        jobs: impl Iterator<Item = Job>,
        weight: Weight,
        effects: &mut Effects,
    ) -> Result<(), StoreError> {
        let (mut events, mut fixes, mut settles, mut disabled, mut retries) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new(), Vec::new());
        // All jobs are taken apart before anything can fail, so that each has its answer.
        for job in jobs {
            match job {
                Job::Put { events: put, done } => {
                    effects.put.push(done);
                    events.extend(put);
                }
                Job::Fix { target, channel, first, fixed, answer } => {
                    if self.tables.is_waiting(&target, &channel, first).unwrap_or(false) {
                        effects.answers.push(answer);
                        fixes.push((target, channel, fixed));
                    } else {
                        effects.late.push(answer);
                    }
                }
                Job::Settle(mut settle) => {
                    effects.has_settles = true;
                    effects.answers.extend(settle.answer.take());
                    settles.push(settle);
                }
                Job::Retry { target, sequences, answer } => {
                    effects.counts.push((answer, 0));
                    retries.push((effects.counts.len() - 1, target, sequences));
                }
                Job::Disable { target, settings, answer } => {
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
        // A row that one commit writes twice has no order, and a channel fixes its next batch after it has settled one.
        let fixed_rows: HashSet<Vec<u8>> =
            fixes.iter().map(|(target, channel, _)| keys::channel(target, channel)).collect();
        for Settle { target, events, fixed, dead_reason, .. } in settles {
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
        // Written to the system, a batch outlasts the process; a loss of power may take the last ones that were fixed.
        effects.is_lasting |= !fixes.is_empty() && self.synced.elapsed() >= SYNC_EVERY;
        for (target, channel, fixed) in fixes {
            batch.insert(self.tables.batches.keyspace(), keys::channel(&target, &channel), fixed.encode());
            effects.fixed.insert((target, channel), fixed.last);
        }
        for (index, target, sequences) in retries {
            effects.counts[index].1 = self.give_back(&mut batch, &target, &sequences, effects)?;
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

    fn put(&mut self, batch: &mut OwnedWriteBatch, event: Event, effects: &mut Effects) {
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
            // After a start events may have waited before: the oldest is not known then.
            let is_first = || self.depths.of(target).events == 0;
            self.oldest.entry(target.clone()).or_insert_with(|| if is_first() { sequence } else { 0 });
            effects.arrived.push((target.clone(), sequence, Arc::clone(&event)));
        }
    }

    /// Removes events of a target from those that wait; with a reason they become dead letters.
    fn settle(
        &self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        events: &[(u64, Arc<Event>)],
        dead_reason: Option<&str>,
        effects: &mut Effects,
    ) -> Result<(), StoreError> {
        for &(sequence, ref event) in events {
            if !effects.settled.insert((target.clone(), sequence)) {
                continue;
            }
            if !self.tables.is_waiting(target, &event.channel, sequence)? {
                // A full target may have lost it while it was sent.
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
                let dead = Dead { at_ms: self.clock.line_ms(), bytes, reason: reason.into() };
                batch.insert(self.tables.dead.keyspace(), keys::dead(target, sequence), dead.encode());
            } else {
                effects.removed.insert((target.clone(), sequence));
                self.forget(batch, target, sequence, event, effects)?;
            }
        }
        Ok(())
    }

    /// Removes the event if no other target has it.
    fn forget(
        &self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        sequence: u64,
        event: &Event,
        effects: &Effects,
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

    /// Removes a dead letter of the target. False: it has no such one.
    fn remove_dead(
        &self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        sequence: u64,
        effects: &mut Effects,
    ) -> Result<bool, StoreError> {
        let row = keys::dead(target, sequence);
        let found = self.tables.dead.keyspace().get(&row).map_err(StoreError::failed)?;
        let Some(dead) = found.and_then(|value| Dead::decode(&value)) else { return Ok(false) };
        if !effects.undone.insert((target.clone(), sequence)) {
            return Ok(false);
        }
        batch.remove(self.tables.dead.keyspace(), row);
        let change = effects.change(target);
        change.dead_events -= 1;
        change.dead_bytes -= i64::from(dead.bytes);
        effects.removed.insert((target.clone(), sequence));
        // One that cannot be read stays, and is not in the way of others.
        if let Ok(Some(event)) = self.tables.event(sequence) {
            self.forget(batch, target, sequence, &event, effects)?;
        }
        Ok(true)
    }

    /// Puts dead letters of a target as new events for it alone, so that they change no batch that is fixed; returns how many it has.
    fn give_back(
        &mut self,
        batch: &mut OwnedWriteBatch,
        target: &TargetId,
        sequences: &[u64],
        effects: &mut Effects,
    ) -> Result<u64, StoreError> {
        let mut count = 0;
        for &sequence in sequences {
            let Ok(Some(event)) = self.tables.event(sequence) else { continue };
            let Some(addressee) = event.addressee(target).cloned() else { continue };
            if !self.remove_dead(batch, target, sequence, effects)? {
                continue;
            }
            let written_ms = self.clock.line_ms();
            self.put(batch, Event { written_ms, targets: vec![addressee], ..event }, effects);
            count += 1;
        }
        Ok(count)
    }
}
