//! The one thread that writes: it takes everything that waits, commits it with one fsync, and hands the answers
//! to a second thread, so that the next group is on its way to the disk while callbacks run.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use fjall::{Database, OwnedWriteBatch, PersistMode};
use tokio::sync::oneshot;

use crate::model::{Clock, Revocation};
use crate::origin::history::{Done, FormerRun, Kept, StoreError, StoredQueues};
use crate::origin::metering::MetricRow;
use crate::telemetry::{StoreOperation, StoreTimes};

use super::health::Health;
use super::ids::{IdPartitions, PendingIds, Remembered};
use super::members::{MemberRow, Members};
use super::nonces::{KeptRow, Nonces, Now};
use super::partitions::{Kind, Partition, Partitions};
use super::queue::{Bounds, Queue, Weight};
use super::queues::QueueRows;
use super::revocations::Revocations;
use super::tables::{self, Table};
use super::{DAY_MS, HIGHEST, HOUR_MS, engine, metrics, runs};

/// One group: large enough that the fsync is spread over many rows, small enough that nobody waits long behind it.
const GROUP: Bounds = Bounds { items: 4_096, bytes: 4 * 1024 * 1024 };

/// How much is written between two looks at what the tables hold in memory.
const LOOK_BYTES: usize = 1024 * 1024;
/// How much is written at most without a flush: only then does fjall begin a new journal, and clear away old ones. Tables of days
/// that are dropped before they are full would never bring one about.
const JOURNAL_BYTES: usize = 64 * 1024 * 1024;
/// What a row takes beside its key and value, about.
const ROW_BYTES: usize = 100;

/// Where the outcome of a job goes.
type Answer<T> = oneshot::Sender<Result<T, StoreError>>;

pub(super) enum Job {
    Append(Append),
    Claim {
        key: Vec<u8>,
        answer: Answer<bool>,
    },
    /// Of nonces that were claimed elsewhere.
    Keep {
        nonces: Vec<KeptRow>,
        answer: Answer<()>,
    },
    Revoke {
        revocation: Revocation,
        answer: Answer<()>,
    },
    Metrics {
        rows: Vec<MetricRow>,
        answer: Answer<()>,
    },
    /// Answered with whether it took the place of the revision before.
    PutQueues {
        row: StoredQueues,
        answer: Answer<bool>,
    },
    /// Answered with the runs before.
    Begin {
        incarnation: u64,
        kept: Kept,
        answer: Answer<Vec<FormerRun>>,
    },
    /// Answered when all before it is written.
    Settle {
        answer: Answer<()>,
    },
}

pub(super) struct Append {
    pub(super) rows: Rows,
    pub(super) done: Done,
}

/// What one publish or presence event leaves in the store.
pub(super) struct Rows {
    /// Of `rows`: messages or presence.
    pub(super) kind: Kind,
    pub(super) timestamp_ms: u64,
    pub(super) retention_hours: u32,
    pub(super) rows: Vec<(fjall::Slice, fjall::Slice)>,
    pub(super) ids: Vec<Remembered>,
    pub(super) member: Option<Box<MemberRow>>,
}

/// What became of a group, on its way to the thread that runs the callbacks.
pub(super) struct Answers {
    result: Result<(), StoreError>,
    weight: Weight,
    appended: Vec<Done>,
    claimed: Vec<(Answer<bool>, Result<bool, StoreError>)>,
    queues_put: Vec<(Answer<bool>, Result<bool, StoreError>)>,
    written: Vec<Answer<()>>,
    begun: Option<(Answer<Vec<FormerRun>>, Vec<FormerRun>)>,
}

pub(super) struct Writer {
    pub(super) database: Database,
    pub(super) partitions: Arc<Partitions>,
    pub(super) state: Table,
    pub(super) ids: IdPartitions,
    pub(super) pending: Arc<PendingIds>,
    pub(super) nonces: Nonces,
    pub(super) revocations: Revocations,
    pub(super) members: Members,
    pub(super) queues: QueueRows,
    pub(super) clock: Clock,
    pub(super) queue: Arc<Queue<Job>>,
    pub(super) answers: mpsc::Sender<Answers>,
    pub(super) status: Arc<Health>,
    pub(super) times: Arc<StoreTimes>,
    pub(super) highest_ms: u64,
    /// Bytes of the journal since a flush.
    pub(super) unflushed: usize,
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
            let answers = self.write(group.drain(..), weight);
            self.times.ended(StoreOperation::Append, begun);
            self.status.wrote(&answers.result);
            if self.answers.send(answers).is_err() {
                return;
            }
            let written = weight.bytes + weight.items * ROW_BYTES;
            unlooked += written;
            self.unflushed = self.unflushed.saturating_add(written);
            if unlooked >= LOOK_BYTES {
                unlooked = 0;
                self.seal();
            }
            self.status.end();
        }
    }

    fn seal(&mut self) {
        let mut tables = self.partitions.tables();
        tables.extend([self.state.clone(), self.members.0.clone(), self.queues.0.clone()]);
        let sealed = tables::seal_full(&tables).and_then(|sealed| {
            let due = !sealed && self.unflushed >= JOURNAL_BYTES;
            if due {
                self.state.seal()?;
            }
            Ok(sealed || due)
        });
        match sealed {
            Ok(true) => self.unflushed = 0,
            Ok(false) => {}
            Err(error) => tracing::error!(%error, "store did not seal its tables"),
        }
    }

    fn write(&mut self, jobs: impl Iterator<Item = Job>, weight: Weight) -> Answers {
        let mut rows = Vec::new();
        let (appended, claimed, queues_put, written) = Default::default();
        let mut answers =
            Answers { result: Ok(()), weight, appended, claimed, queues_put, written, begun: None };
        let commit = catch_unwind(AssertUnwindSafe(|| self.commit(jobs, weight, &mut rows, &mut answers)));
        answers.result = commit.unwrap_or_else(|_| Err(self.status.broke("the storage engine panicked")));
        if let Err(error) = &answers.result {
            tracing::error!(%error, rows = weight.items, "store did not write");
        }
        for rows in &rows {
            self.pending.settle(&rows.ids);
        }
        answers
    }

    /// Takes every job apart before anything that can fail, so that each gets its answer.
    fn commit(
        &mut self,
        jobs: impl Iterator<Item = Job>,
        weight: Weight,
        rows: &mut Vec<Rows>,
        answers: &mut Answers,
    ) -> Result<(), StoreError> {
        let (mut claims, mut revocations, mut metric_rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut kept, mut begins, mut queue_rows) = (Vec::new(), None, Vec::new());
        for job in jobs {
            match job {
                Job::Append(append) => {
                    answers.appended.push(append.done);
                    rows.push(append.rows);
                }
                Job::Claim { key, answer } => {
                    answers.claimed.push((answer, Ok(false)));
                    claims.push(key);
                }
                Job::Keep { nonces, answer } => {
                    answers.written.push(answer);
                    kept.extend(nonces);
                }
                Job::Revoke { revocation, answer } => {
                    answers.written.push(answer);
                    revocations.push(revocation);
                }
                Job::Metrics { rows, answer } => {
                    answers.written.push(answer);
                    metric_rows.extend(rows);
                }
                Job::PutQueues { row, answer } => {
                    answers.queues_put.push((answer, Ok(false)));
                    queue_rows.push(row);
                }
                Job::Begin { incarnation, kept, answer } => {
                    answers.begun = Some((answer, Vec::new()));
                    begins = Some((incarnation, kept));
                }
                Job::Settle { answer } => answers.written.push(answer),
            }
        }
        self.status.usable()?;
        let no_nonces = claims.is_empty() && kept.is_empty();
        let is_empty = rows.is_empty() && no_nonces && revocations.is_empty() && metric_rows.is_empty();
        if is_empty && begins.is_none() && queue_rows.is_empty() {
            return Ok(());
        }
        let status = Arc::clone(&self.status);
        let not_taken = |error: fjall::Error| status.not_taken(&engine::reason(&error));
        let batch = OwnedWriteBatch::with_capacity(self.database.clone(), weight.items + 1);
        let mut batch = batch.durability(Some(PersistMode::SyncData));
        if let (Some(run), Some((_, former))) = (begins, &mut answers.begun) {
            // Before any row of this run.
            let now_ms = self.clock.highest_ms();
            *former =
                runs::begin(&self.state, &mut batch, run, now_ms, self.highest_ms).map_err(not_taken)?;
        }
        self.add_rows(&mut batch, rows).map_err(not_taken)?;
        let now = Now { claims_ms: self.clock.now_ms(), expiry_ms: self.clock.expiry_ms() };
        let outcomes = self.nonces.add(&mut batch, kept, claims, now).map_err(not_taken)?;
        answers.claimed.iter_mut().zip(outcomes).for_each(|((_, answer), outcome)| *answer = outcome);
        self.revocations.add(&mut batch, revocations).map_err(not_taken)?;
        metrics::insert(&self.partitions, &mut batch, &metric_rows).map_err(not_taken)?;
        let put = self.queues.put(&mut batch, queue_rows).map_err(not_taken)?;
        answers.queues_put.iter_mut().zip(put).for_each(|((_, answer), is_put)| *answer = Ok(is_put));
        batch.commit().map_err(|error| status.broke(&engine::reason(&error)))
    }

    /// Moves the rows into the batch; the ids stay, since they are pending until the commit.
    fn add_rows(&mut self, batch: &mut OwnedWriteBatch, rows: &mut [Rows]) -> fjall::Result<()> {
        let mut last: Option<(Partition, Table)> = None;
        let members = rows.iter_mut().filter_map(|rows| rows.member.take());
        self.members.add(batch, members.map(|row| *row));
        // Not the timestamp of their message, which may be ahead.
        let line_ms = self.clock.line_ms();
        for Rows { kind, timestamp_ms, retention_hours, rows, ids, .. } in rows {
            self.highest_ms = self.highest_ms.max(*timestamp_ms);
            for id in ids {
                self.ids.insert(batch, line_ms, id)?;
            }
            if rows.is_empty() {
                continue;
            }
            let keep_ms = u64::from(*retention_hours) * HOUR_MS;
            let partition = Partition::containing(*kind, *timestamp_ms, DAY_MS, keep_ms);
            let table = match &last {
                Some((same, table)) if *same == partition => table,
                _ => &last.insert((partition, self.partitions.get_or_create(partition)?)).1,
            };
            for (key, value) in rows.drain(..) {
                batch.insert(table.keyspace(), key, value);
            }
        }
        batch.insert(self.state.keyspace(), HIGHEST, self.highest_ms.to_be_bytes());
        Ok(())
    }
}

/// Runs the callbacks, group after group. What they answer counts against the queue until here.
pub(super) fn answer(answers: &mpsc::Receiver<Answers>, queue: &Queue<Job>) {
    for group in answers {
        queue.release(group.weight);
        for done in group.appended {
            let result = group.result.clone();
            if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
                tracing::error!("a callback of the store panicked");
            }
        }
        for (answer, is_new) in group.claimed.into_iter().chain(group.queues_put) {
            // A caller that has gone needs no answer.
            let _ = answer.send(group.result.clone().and(is_new));
        }
        for answer in group.written {
            let _ = answer.send(group.result.clone());
        }
        if let Some((answer, former)) = group.begun {
            let _ = answer.send(group.result.map(|()| former));
        }
    }
}
