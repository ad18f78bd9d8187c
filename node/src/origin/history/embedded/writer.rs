//! The writer thread: it commits all waiting jobs with one fsync. A second thread runs the callbacks, so that the next group is on its way
//! to the disk meanwhile.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, mpsc};
use std::time::Instant;

use fjall::{Database, OwnedWriteBatch, PersistMode};
use tokio::sync::oneshot;

use crate::model::{Clock, Revocation};
use crate::origin::history::{HistoryCoverage, PreviousIncarnation, StoreCallback, StoreError, StoredQueues};
use crate::origin::metering::MetricRow;
use crate::telemetry::{StoreOperation, StoreTimes};

use super::health::DiskHealth;
use super::ids::{IdPartitions, IdRow, PendingIds};
use super::members::{MemberRow, MemberRows};
use super::nonces::{ClaimTimes, ImportedNonceRow, Nonces};
use super::partitions::{Partition, PartitionKind, Partitions};
use super::queue::{DiskQueue, DiskQueueBounds, QueueWeight};
use super::queues::QueueRows;
use super::revocations::RevocationRows;
use super::tables::{self, Table};
use super::{DAY_MS, HIGHEST, HOUR_MS, engine, incarnations, metrics};

/// Bounds of a group: enough rows to amortise the fsync, and few enough for short waits.
const GROUP: DiskQueueBounds = DiskQueueBounds { items: 4_096, bytes: 4 * 1024 * 1024 };

/// Bytes that are written between two checks of the tables' memory.
const LOOK_BYTES: usize = 1024 * 1024;
/// Bytes that are written at most without a flush. Only a flush lets fjall begin a new journal and remove old ones, and tables that are
/// dropped before they are full would never cause one.
const JOURNAL_BYTES: usize = 64 * 1024 * 1024;
/// Approximate overhead of a row beside its key and value, in bytes.
const ROW_BYTES: usize = 100;

/// Sender of a job's outcome.
type StoreReply<T> = oneshot::Sender<Result<T, StoreError>>;

pub(super) enum StoreJob {
    Append(AppendJob),
    Claim {
        key: Vec<u8>,
        answer: StoreReply<bool>,
    },
    /// Stores nonces that were claimed on other nodes.
    Keep {
        nonces: Vec<ImportedNonceRow>,
        answer: StoreReply<()>,
    },
    Revoke {
        revocation: Revocation,
        answer: StoreReply<()>,
    },
    Metrics {
        rows: Vec<MetricRow>,
        answer: StoreReply<()>,
    },
    /// Answers whether the row replaced the previous revision.
    PutQueues {
        row: StoredQueues,
        answer: StoreReply<bool>,
    },
    /// Answers with the previous incarnations.
    Begin {
        incarnation: u64,
        coverage: HistoryCoverage,
        answer: StoreReply<Vec<PreviousIncarnation>>,
    },
    /// Answers when all jobs before are written.
    Settle {
        answer: StoreReply<()>,
    },
}

pub(super) struct AppendJob {
    pub(super) rows: AppendRows,
    pub(super) done: StoreCallback,
}

/// Rows of one publish or presence event.
pub(super) struct AppendRows {
    /// Kind of `rows`: messages or presence.
    pub(super) kind: PartitionKind,
    pub(super) timestamp_ms: u64,
    pub(super) retention_hours: u32,
    pub(super) rows: Vec<(fjall::Slice, fjall::Slice)>,
    pub(super) ids: Vec<IdRow>,
    pub(super) member: Option<Box<MemberRow>>,
}

/// Outcome of a group, on its way to the callback thread.
pub(super) struct GroupReplies {
    result: Result<(), StoreError>,
    weight: QueueWeight,
    appended: Vec<StoreCallback>,
    claimed: Vec<(StoreReply<bool>, Result<bool, StoreError>)>,
    queues_put: Vec<(StoreReply<bool>, Result<bool, StoreError>)>,
    written: Vec<StoreReply<()>>,
    previous_incarnations: Option<(StoreReply<Vec<PreviousIncarnation>>, Vec<PreviousIncarnation>)>,
}

pub(super) struct StoreWriter {
    pub(super) database: Database,
    pub(super) partitions: Arc<Partitions>,
    pub(super) state: Table,
    pub(super) ids: IdPartitions,
    pub(super) pending: Arc<PendingIds>,
    pub(super) nonces: Nonces,
    pub(super) revocations: RevocationRows,
    pub(super) members: MemberRows,
    pub(super) queues: QueueRows,
    pub(super) clock: Clock,
    pub(super) queue: Arc<DiskQueue<StoreJob>>,
    pub(super) answers: mpsc::Sender<GroupReplies>,
    pub(super) status: Arc<DiskHealth>,
    pub(super) times: Arc<StoreTimes>,
    pub(super) highest_ms: u64,
    /// Bytes written to the journal since the last flush.
    pub(super) unflushed: usize,
}

impl StoreWriter {
    /// Commits jobs until the queue is closed and empty.
    pub(super) fn run(mut self) {
        let queue = Arc::clone(&self.queue);
        let mut group = Vec::new();
        let mut unlooked = LOOK_BYTES;
        while let Some(weight) = queue.take_group(GROUP, &mut group) {
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
            Err(error) => tracing::error!(%error, "store flush failed"),
        }
    }

    fn write(&mut self, jobs: impl Iterator<Item = StoreJob>, weight: QueueWeight) -> GroupReplies {
        let mut rows = Vec::new();
        let (appended, claimed, queues_put, written) = Default::default();
        let mut answers = GroupReplies {
            result: Ok(()),
            weight,
            appended,
            claimed,
            queues_put,
            written,
            previous_incarnations: None,
        };
        let commit = catch_unwind(AssertUnwindSafe(|| self.commit(jobs, weight, &mut rows, &mut answers)));
        answers.result = commit.unwrap_or_else(|_| Err(self.status.broke("the storage engine panicked")));
        if let Err(error) = &answers.result {
            tracing::error!(%error, rows = weight.items, "store write failed");
        }
        for rows in &rows {
            self.pending.settle(&rows.ids);
        }
        answers
    }

    /// Commits a group. All jobs are taken apart before anything can fail, so that each gets its answer.
    fn commit(
        &mut self,
        jobs: impl Iterator<Item = StoreJob>,
        weight: QueueWeight,
        rows: &mut Vec<AppendRows>,
        answers: &mut GroupReplies,
    ) -> Result<(), StoreError> {
        let (mut claims, mut revocations, mut metric_rows) = (Vec::new(), Vec::new(), Vec::new());
        let (mut kept, mut begins, mut queue_rows) = (Vec::new(), None, Vec::new());
        for job in jobs {
            match job {
                StoreJob::Append(append) => {
                    answers.appended.push(append.done);
                    rows.push(append.rows);
                }
                StoreJob::Claim { key, answer } => {
                    answers.claimed.push((answer, Ok(false)));
                    claims.push(key);
                }
                StoreJob::Keep { nonces, answer } => {
                    answers.written.push(answer);
                    kept.extend(nonces);
                }
                StoreJob::Revoke { revocation, answer } => {
                    answers.written.push(answer);
                    revocations.push(revocation);
                }
                StoreJob::Metrics { rows, answer } => {
                    answers.written.push(answer);
                    metric_rows.extend(rows);
                }
                StoreJob::PutQueues { row, answer } => {
                    answers.queues_put.push((answer, Ok(false)));
                    queue_rows.push(row);
                }
                StoreJob::Begin { incarnation, coverage, answer } => {
                    answers.previous_incarnations = Some((answer, Vec::new()));
                    begins = Some((incarnation, coverage));
                }
                StoreJob::Settle { answer } => answers.written.push(answer),
            }
        }
        self.status.usable()?;
        let no_nonces = claims.is_empty() && kept.is_empty();
        let is_empty = rows.is_empty() && no_nonces && revocations.is_empty() && metric_rows.is_empty();
        if is_empty && begins.is_none() && queue_rows.is_empty() {
            return Ok(());
        }
        let status = Arc::clone(&self.status);
        let not_taken = |error: fjall::Error| status.write_error(&engine::reason(&error));
        let batch = OwnedWriteBatch::with_capacity(self.database.clone(), weight.items + 1);
        let mut batch = batch.durability(Some(PersistMode::SyncData));
        if let (Some(begun), Some((_, previous))) = (begins, &mut answers.previous_incarnations) {
            // Before any row of this incarnation.
            let now_ms = self.clock.highest_ms();
            *previous =
                incarnations::begin_incarnation(&self.state, &mut batch, begun, now_ms, self.highest_ms)
                    .map_err(not_taken)?;
        }
        self.add_rows(&mut batch, rows).map_err(not_taken)?;
        let now = ClaimTimes { claims_ms: self.clock.now_ms(), expiry_ms: self.clock.expiry_ms() };
        let outcomes = self.nonces.add(&mut batch, kept, claims, now).map_err(not_taken)?;
        answers.claimed.iter_mut().zip(outcomes).for_each(|((_, answer), outcome)| *answer = outcome);
        self.revocations.add(&mut batch, revocations).map_err(not_taken)?;
        metrics::insert(&self.partitions, &mut batch, &metric_rows).map_err(not_taken)?;
        let put = self.queues.put(&mut batch, queue_rows).map_err(not_taken)?;
        answers.queues_put.iter_mut().zip(put).for_each(|((_, answer), is_put)| *answer = Ok(is_put));
        batch.commit().map_err(|error| status.broke(&engine::reason(&error)))
    }

    /// Moves the rows into the batch; the ids stay, since they are pending until the commit.
    fn add_rows(&mut self, batch: &mut OwnedWriteBatch, rows: &mut [AppendRows]) -> fjall::Result<()> {
        let mut last: Option<(Partition, Table)> = None;
        let members = rows.iter_mut().filter_map(|rows| rows.member.take());
        self.members.add(batch, members.map(|row| *row));
        // The time of the write, since the timestamp of a message may be ahead.
        let line_ms = self.clock.line_ms();
        for AppendRows { kind, timestamp_ms, retention_hours, rows, ids, .. } in rows {
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

/// Runs the callbacks, group after group. Their jobs count against the queue until then.
pub(super) fn run_callbacks(answers: &mpsc::Receiver<GroupReplies>, queue: &DiskQueue<StoreJob>) {
    for group in answers {
        queue.release(group.weight);
        for done in group.appended {
            let result = group.result.clone();
            if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
                tracing::error!("store callback panicked");
            }
        }
        for (answer, is_new) in group.claimed.into_iter().chain(group.queues_put) {
            // The caller may have dropped its receiver.
            let _ = answer.send(group.result.clone().and(is_new));
        }
        for answer in group.written {
            let _ = answer.send(group.result.clone());
        }
        if let Some((answer, previous)) = group.previous_incarnations {
            let _ = answer.send(group.result.map(|()| previous));
        }
    }
}
