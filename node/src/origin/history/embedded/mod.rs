//! The store on the local disk: one fjall database, one writer, and a fsync before every answer.
//!
//! An answer is given when the journal is on the disk, and rows become visible to readers not before. When the disk
//! refuses a write, the whole group and everything after it is answered `Failed` until the node is started again. What was
//! not begun to be written, such as the rows of a new day whose table could not be made, is only answered `Failed` itself.

mod export;
mod ids;
mod keys;
mod members;
mod metrics;
mod nonces;
mod open;
mod partitions;
mod queues;
mod reader;
mod revocations;
mod runs;
mod snapshot;
mod writer;

#[cfg(test)]
mod tests;

use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::thread::JoinHandle;

use parking_lot::Mutex;
use tokio::sync::oneshot;

use crate::model::{
    AccountId, Clock, FormerMember, KeptNonce, Limits, NoncePage, PresenceEvent, Published, Revocation,
    Stamp, StampedIds,
};
use crate::origin::disk::snapshot::DiskSnapshot;
use crate::origin::disk::{engine, health, queue};
use crate::origin::metering::MetricRow;

use super::{
    BoxFuture, Done, FormerRun, FoundIds, HistoryPage, HistoryQuery, HistoryStore, IdScope, Kept, Nonce,
    Position, Queued, StoreError, StoredQueues, record,
};
use health::Health;
use ids::{Find, Lookup, PendingIds, Remembered};
use members::Members;
use nonces::KeptRow;
use partitions::{Kind, Partitions};
use queue::{Queue, Refused, Weight};
use queues::QueueRows;
use reader::Read;
use revocations::Revocations;
use writer::{Append, Job, Rows};

pub use crate::origin::disk::tables;
pub(super) use export::Export;
pub use open::OpenError;
pub(in crate::origin) use snapshot::{STORE_FORMAT, ends_with_a_restore, is_stored_table, stopped_snapshot};

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
const STATE: &str = "state";
/// The row of the keyspace `state` that holds the highest timestamp stored.
const HIGHEST: &str = "highest_timestamp_ms";
/// The row of the same keyspace that holds the incarnation of the last run, and its policies.
const RUNS: &str = "runs";
/// fjall takes keys of 65 535 bytes.
const KEY_BYTES_MAX: usize = 60_000;

/// What a store keeps and how much may wait for it.
#[derive(Debug, Clone)]
pub struct Options {
    /// False: only client-given ids and nonces are kept, and `read` answers `Off`.
    pub history: bool,
    pub idempotency_window_ms: u64,
    pub nonce_memory_ms: u64,
    /// Remembered at most of each stretch of `nonce_memory_ms`.
    pub nonces: usize,
    pub revocation_kept_ms: u64,
    /// Messages, ids and nonces waiting for the disk or for their callback; beyond it `Busy`, but for messages: of them no more are begun
    /// from seven eighths on.
    pub write_queue_rows: usize,
    pub write_queue_bytes: usize,
    pub find_queue: usize,
    pub read_queue: usize,
    pub read_threads: usize,
}

impl Options {
    pub fn new(history: bool, limits: &Limits) -> Self {
        Self {
            history,
            idempotency_window_ms: limits.idempotency_window_ms,
            nonce_memory_ms: limits.nonce_memory_ms,
            nonces: limits.remembered_nonces,
            revocation_kept_ms: limits.revocation_kept_ms(),
            write_queue_rows: 131_072,
            write_queue_bytes: 64 * 1024 * 1024,
            find_queue: 65_536,
            read_queue: 1_024,
            read_threads: 2,
        }
    }
}

/// The embedded store. Dropping it shuts it down.
pub struct Embedded {
    history: bool,
    nonce_memory_ms: u64,
    clock: Clock,
    /// None once the store is shut down, so that the folder can be opened again.
    partitions: Mutex<Option<Arc<Partitions>>>,
    /// The same.
    members: Mutex<Option<Members>>,
    queues: Mutex<Option<QueueRows>>,
    pending: Arc<PendingIds>,
    status: Arc<Health>,
    writes: Arc<Queue<Job>>,
    lookups: Arc<Queue<Find>>,
    reads: Arc<Queue<Read>>,
    /// In the order in which they are to end: finder, writer, answers, readers.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl HistoryStore for Embedded {
    fn is_full(&self) -> bool {
        self.writes.is_nearly_full()
    }

    fn queued(&self) -> Queued {
        let Weight { items: rows, bytes } = self.writes.held();
        Queued { rows, bytes }
    }

    fn append(&self, published: Arc<Published>, retention_hours: Option<u32>, done: Done) {
        let retention_hours = retention_hours.filter(|_| self.history);
        let messages = retention_hours.map_or_else(Vec::new, |_| message_rows(&published));
        let ids = given_rows(&published);
        if messages.is_empty() && ids.is_empty() {
            return done(Ok(()));
        }
        if let Err(error) = self.status.usable() {
            return done(Err(error));
        }
        if ids.iter().any(|id| id.key.len() > KEY_BYTES_MAX) {
            return done(Err(failed("a message id is too long to be stored")));
        }
        let bytes = messages.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
            + ids.iter().map(|id| id.key.len() + Position::BYTES).sum::<usize>();
        let weight = Weight { items: messages.len() + ids.len(), bytes };
        self.pending.add(&ids);
        let timestamp_ms = published.timestamp_ms;
        let retention_hours = retention_hours.unwrap_or(0);
        let rows =
            Rows { kind: Kind::Messages, timestamp_ms, retention_hours, rows: messages, ids, member: None };
        let pushed = self.writes.push_begun(weight, Job::Append(Append { rows, done }));
        self.refuse(pushed);
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: Done) {
        if !self.history {
            return done(Ok(()));
        }
        if let Err(error) = self.status.usable() {
            return done(Err(error));
        }
        let rows: Vec<_> = retention_hours.iter().map(|_| presence_row(&event)).collect();
        let (name, member) = SCRATCH.with_borrow_mut(|scratch| members::row(&event, scratch));
        let bytes = rows.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>()
            + name.len()
            + member.as_ref().map_or(0, |member| member.len());
        let weight = Weight { items: 1, bytes };
        let rows = Rows {
            kind: Kind::Presence,
            timestamp_ms: event.timestamp_ms,
            retention_hours: retention_hours.unwrap_or(0),
            rows,
            ids: Vec::new(),
            member: Some(Box::new((name, member))),
        };
        let pushed = self.writes.push(weight, Job::Append(Append { rows, done }));
        self.refuse(pushed);
    }

    fn former_members(&self) -> Result<Vec<FormerMember>, StoreError> {
        if !self.history {
            return Ok(Vec::new());
        }
        let members = self.members.lock().clone().ok_or(StoreError::ShutDown)?;
        members.all().map_err(failed)
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: FoundIds) {
        let bytes = ids.iter().map(|id| id.len()).sum();
        let lookup = Find::Lookup(Lookup { scope, ids, found });
        if let Err((refused, Find::Lookup(lookup))) = self.lookups.push(Weight { items: 1, bytes }, lookup) {
            (lookup.found)(Err(refused.into()));
        }
    }

    fn keep_ids(&self, scope: IdScope, ids: StampedIds, done: Done) {
        if let Err(error) = self.status.usable() {
            return done(Err(error));
        }
        let mut ids = id_rows(&scope, ids.iter().map(|(id, stamp)| (&**id, *stamp)));
        ids.retain(|id| id.key.len() <= KEY_BYTES_MAX);
        let bytes = ids.iter().map(|id| id.key.len() + Position::BYTES).sum();
        let weight = Weight { items: ids.len(), bytes };
        self.pending.add(&ids);
        let (kind, timestamp_ms) = (Kind::Messages, self.clock.line_ms());
        let rows = Rows { kind, timestamp_ms, retention_hours: 0, rows: Vec::new(), ids, member: None };
        let pushed = self.writes.push(weight, Job::Append(Append { rows, done }));
        self.refuse(pushed);
    }

    fn claim_nonce(&self, nonce: Nonce) -> BoxFuture<'static, Result<bool, StoreError>> {
        let key = keys::nonce_key(&nonce);
        if key.len() > KEY_BYTES_MAX {
            return Box::pin(std::future::ready(Err(failed("a nonce is too long to be stored"))));
        }
        let (answer, answered) = oneshot::channel();
        let weight = Weight { items: 1, bytes: key.len() };
        if let Err((refused, _)) = self.writes.push(weight, Job::Claim { key, answer }) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn nonces(&self, after: Option<Box<[u8]>>) -> BoxFuture<'static, Result<NoncePage, StoreError>> {
        let (memory_ms, now_ms) = (self.nonce_memory_ms, self.clock.expiry_ms());
        self.asked(|answer| Read::Nonces { after, memory_ms, now_ms, answer })
    }

    fn keep_nonces(&self, nonces: Vec<KeptNonce>) -> BoxFuture<'static, Result<(), StoreError>> {
        let row = |kept: KeptNonce| KeptRow { key: keys::nonce_key(&kept.nonce), age_ms: kept.age_ms };
        let rows = nonces.into_iter().map(row).filter(|row| row.key.len() <= KEY_BYTES_MAX);
        let nonces: Vec<KeptRow> = rows.collect();
        let bytes = nonces.iter().map(|row| row.key.len()).sum();
        let weight = Weight { items: nonces.len(), bytes };
        self.written(weight, |answer| Job::Keep { nonces, answer })
    }

    fn revoke_tokens(&self, revocation: Revocation) -> BoxFuture<'static, Result<(), StoreError>> {
        let bytes = size_of::<Revocation>() + revocation.client_id.as_ref().map_or(0, |id| id.as_str().len());
        self.written(Weight { items: 1, bytes }, |answer| Job::Revoke { revocation, answer })
    }

    fn begin(&self, incarnation: u64, kept: Kept) -> BoxFuture<'static, Result<Vec<FormerRun>, StoreError>> {
        let kept =
            if self.history { kept } else { Kept { policies: Kept::UNLIKE_ALL, is_all: false, ..kept } };
        let (answer, answered) = oneshot::channel();
        let begin = Job::Begin { incarnation, kept, answer };
        if let Err((refused, _)) = self.writes.push(Weight { items: 1, bytes: 0 }, begin) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError> {
        let partitions = self.partitions.lock().clone().ok_or(StoreError::ShutDown)?;
        Revocations::all(&partitions).map_err(failed)
    }

    fn settled(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        self.written(Weight { items: 1, bytes: 0 }, |answer| Job::Settle { answer })
    }

    fn read(&self, query: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
        if !self.history {
            return Box::pin(std::future::ready(Err(StoreError::Off)));
        }
        self.asked(|answer| Read::Page { query, answer })
    }

    fn put_metrics(&self, rows: Vec<MetricRow>) -> BoxFuture<'static, Result<(), StoreError>> {
        if !self.history {
            return Box::pin(std::future::ready(Err(StoreError::Off)));
        }
        let (answer, answered) = oneshot::channel();
        let weight = Weight { items: rows.len(), bytes: rows.len() * size_of::<MetricRow>() };
        if let Err((refused, _)) = self.writes.push(weight, Job::Metrics { rows, answer }) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn read_metrics(
        &self,
        account: AccountId,
        from_ms: u64,
        rows_max: usize,
    ) -> BoxFuture<'static, Result<Vec<MetricRow>, StoreError>> {
        if !self.history {
            return Box::pin(std::future::ready(Err(StoreError::Off)));
        }
        self.asked(|answer| Read::Metrics { account, from_ms, rows_max, answer })
    }

    fn queues(&self, known: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        if !self.history {
            return Err(StoreError::Off);
        }
        let queues = self.queues.lock().clone().ok_or(StoreError::ShutDown)?;
        queues.changed(known)
    }

    fn put_queues(&self, row: StoredQueues) -> BoxFuture<'static, Result<bool, StoreError>> {
        if !self.history {
            return Box::pin(std::future::ready(Err(StoreError::Off)));
        }
        let (answer, answered) = oneshot::channel();
        let weight = Weight { items: 1, bytes: row.definitions.len() };
        if let Err((refused, _)) = self.writes.push(weight, Job::PutQueues { row, answer }) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn sweep(&self, now_ms: u64) -> Result<(), StoreError> {
        let partitions = self.partitions.lock().clone().ok_or(StoreError::ShutDown)?;
        let dropped = partitions.drop_expired(now_ms).map_err(failed)?;
        if dropped > 0 {
            tracing::info!(partitions = dropped, "store dropped what has expired");
        }
        Ok(())
    }

    fn snapshot(&self) -> Result<Option<DiskSnapshot>, StoreError> {
        self.take_snapshot().map(Some)
    }

    fn health(&self) -> Result<(), StoreError> {
        self.status.state()
    }

    fn shutdown(&self) {
        // Lookups end first: their callbacks may still append, and wait for what is being written.
        self.lookups.close();
        self.reads.close();
        let mut threads = self.threads.lock().drain(..).collect::<Vec<_>>().into_iter();
        join(threads.next());
        self.writes.close();
        threads.for_each(|thread| join(Some(thread)));
        *self.partitions.lock() = None;
        *self.members.lock() = None;
        *self.queues.lock() = None;
    }
}

impl Embedded {
    /// The outcome of a job, when the writer is done with it and all before it.
    fn written(
        &self,
        weight: Weight,
        job: impl FnOnce(oneshot::Sender<Result<(), StoreError>>) -> Job,
    ) -> BoxFuture<'static, Result<(), StoreError>> {
        let (answer, answered) = oneshot::channel();
        if let Err((refused, _)) = self.writes.push(weight, job(answer)) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    /// What a reader finds.
    fn asked<T: Send + 'static>(
        &self,
        read: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> Read,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let (answer, answered) = oneshot::channel();
        if let Err((refused, _)) = self.reads.push(Weight { items: 1, bytes: 0 }, read(answer)) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn refuse(&self, pushed: Result<(), (Refused, Job)>) {
        if let Err((refused, Job::Append(append))) = pushed {
            self.pending.settle(&append.rows.ids);
            (append.done)(Err(refused.into()));
        }
    }
}

impl Drop for Embedded {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl fmt::Debug for Embedded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded").field("history", &self.history).finish_non_exhaustive()
    }
}

/// A callback may drop the last handle to the store, on a thread that would then wait for itself.
fn join(thread: Option<JoinHandle<()>>) {
    let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) else {
        return;
    };
    if thread.join().is_err() {
        tracing::error!("a thread of the store panicked");
    }
}

thread_local! {
    /// Where keys and values are written before it is known how long they are.
    static SCRATCH: RefCell<(Vec<u8>, Vec<u8>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

fn message_rows(published: &Published) -> Vec<(fjall::Slice, fjall::Slice)> {
    SCRATCH.with_borrow_mut(|(key, record)| {
        keys::channel_prefix(&published.key, key);
        let prefix = key.len();
        let connection_id = published.connection_id.to_string();
        let rows = published.messages.iter().map(|message| {
            let Published { incarnation, timestamp_ms, .. } = *published;
            key.truncate(prefix);
            let position = Position { timestamp_ms, sequence: message.sequence, incarnation };
            key.extend_from_slice(&keys::position_suffix(position));
            record.clear();
            record::write_message(record, published, message, &connection_id);
            (fjall::Slice::from(key.as_slice()), fjall::Slice::from(record.as_slice()))
        });
        rows.collect()
    })
}

fn presence_row(event: &PresenceEvent) -> (fjall::Slice, fjall::Slice) {
    SCRATCH.with_borrow_mut(|(key, record)| {
        let PresenceEvent { incarnation, timestamp_ms, sequence, .. } = *event;
        keys::channel_prefix(&event.key, key);
        key.extend_from_slice(&keys::position_suffix(Position { timestamp_ms, sequence, incarnation }));
        record.clear();
        record::write_presence(record, event);
        (key.as_slice().into(), record.as_slice().into())
    })
}

fn given_rows(published: &Published) -> Vec<Remembered> {
    if !published.messages.iter().any(|message| message.id_given) {
        return Vec::new();
    }
    let scope = IdScope {
        key: published.key.clone(),
        key_name: published.key_name.clone(),
        client_id: published.client_id.clone(),
    };
    let given = published.messages.iter().filter(|message| message.id_given);
    let stamp = |sequence| Stamp { incarnation: published.incarnation, sequence };
    id_rows(&scope, given.map(|message| (&*message.id, stamp(message.sequence))))
}

fn id_rows<'a>(scope: &IdScope, ids: impl Iterator<Item = (&'a str, Stamp)>) -> Vec<Remembered> {
    let mut key = Vec::new();
    keys::id_prefix(scope, &mut key);
    let prefix = key.len();
    let rows = ids.map(|(id, stamp)| {
        key.truncate(prefix);
        key.extend_from_slice(id.as_bytes());
        Remembered { key: key.as_slice().into(), stamp }
    });
    rows.collect()
}

fn failed(error: impl fmt::Display) -> StoreError {
    StoreError::failed(error)
}
