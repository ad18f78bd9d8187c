//! The store on the local disk: one fjall database, one writer thread, and an fsync before every answer.
//!
//! A write is answered when the journal is on the disk, and its rows become visible to readers no earlier. When the disk refuses a write,
//! the whole group and all later writes are answered `Failed` until the node restarts. A write that had not begun, such as rows of a new
//! day whose table could not be created, is answered `Failed` alone.

mod export;
mod ids;
mod incarnations;
mod keys;
mod members;
mod metrics;
mod nonces;
mod open;
mod partitions;
mod queues;
mod reader;
mod revocations;
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
    AccountId, ClaimedNonce, Clock, Limits, NoncePage, PresenceEvent, PublishedMessages, RestoredMember,
    Revocation, Stamp, StampedIds,
};
use crate::origin::disk::snapshot::DiskSnapshot;
use crate::origin::disk::{engine, health, queue};
use crate::origin::metering::MetricRow;

use super::{
    BoxFuture, HistoryCoverage, HistoryPage, HistoryPosition, HistoryQuery, HistoryStore, IdLookupCallback,
    IdScope, Nonce, PreviousIncarnation, StoreCallback, StoreError, StoreQueueUsage, StoredQueues, record,
};
use health::DiskHealth;
use ids::{EmbeddedIdLookup, FinderRequest, IdRow, PendingIds};
use members::MemberRows;
use nonces::ImportedNonceRow;
use partitions::{PartitionKind, Partitions};
use queue::{DiskQueue, PushRefusal, QueueWeight};
use queues::QueueRows;
use reader::StoreReadRequest;
use revocations::RevocationRows;
use writer::{AppendJob, AppendRows, StoreJob};

pub use crate::origin::disk::tables;
pub(super) use export::StoreExport;
pub use open::StoreOpenError;
pub(in crate::origin) use snapshot::{
    STORE_FORMAT, is_dropped_by_restore, is_stored_table, stopped_snapshot,
};

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
const STATE: &str = "state";
/// Row of the keyspace `state` with the highest stored timestamp.
const HIGHEST: &str = "highest_timestamp_ms";
/// Row of the keyspace `state` with the incarnations and their policies.
const INCARNATIONS: &str = "runs";
/// Longest key that the store writes; fjall accepts 65 535 bytes.
const KEY_BYTES_MAX: usize = 60_000;

/// Settings of a store, and the bounds of its queues.
#[derive(Debug, Clone)]
pub struct EmbeddedOptions {
    /// If false, only client-given ids and nonces are kept, and `read` answers `Off`.
    pub history: bool,
    pub idempotency_window_ms: u64,
    pub nonce_memory_ms: u64,
    /// Nonces that are remembered at most for each interval of `nonce_memory_ms`.
    pub nonces: usize,
    pub revocation_kept_ms: u64,
    /// Messages, ids and nonces that wait for the disk or for their callback. Beyond this bound the answer is `Busy`, except for messages:
    /// new ones are refused from seven eighths on.
    pub write_queue_rows: usize,
    pub write_queue_bytes: usize,
    pub find_queue: usize,
    pub read_queue: usize,
    pub read_threads: usize,
}

impl EmbeddedOptions {
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
pub struct EmbeddedStore {
    history: bool,
    nonce_memory_ms: u64,
    clock: Clock,
    /// `None` once the store is shut down, so that the folder can be opened again.
    partitions: Mutex<Option<Arc<Partitions>>>,
    /// Like `partitions`: `None` once the store is shut down.
    members: Mutex<Option<MemberRows>>,
    queues: Mutex<Option<QueueRows>>,
    pending: Arc<PendingIds>,
    status: Arc<DiskHealth>,
    writes: Arc<DiskQueue<StoreJob>>,
    lookups: Arc<DiskQueue<FinderRequest>>,
    reads: Arc<DiskQueue<StoreReadRequest>>,
    /// Threads in the order in which they end: finder, writer, callbacks, readers.
    threads: Mutex<Vec<JoinHandle<()>>>,
}

impl HistoryStore for EmbeddedStore {
    fn is_full(&self) -> bool {
        self.writes.is_nearly_full()
    }

    fn queued(&self) -> StoreQueueUsage {
        let QueueWeight { items: rows, bytes } = self.writes.outstanding();
        StoreQueueUsage { rows, bytes }
    }

    fn append(&self, published: Arc<PublishedMessages>, retention_hours: Option<u32>, done: StoreCallback) {
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
            + ids.iter().map(|id| id.key.len() + HistoryPosition::BYTES).sum::<usize>();
        let weight = QueueWeight { items: messages.len() + ids.len(), bytes };
        self.pending.add(&ids);
        let timestamp_ms = published.timestamp_ms;
        let retention_hours = retention_hours.unwrap_or(0);
        let rows = AppendRows {
            kind: PartitionKind::Messages,
            timestamp_ms,
            retention_hours,
            rows: messages,
            ids,
            member: None,
        };
        let pushed = self.writes.push_admitted(weight, StoreJob::Append(AppendJob { rows, done }));
        self.refuse(pushed);
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: StoreCallback) {
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
        let weight = QueueWeight { items: 1, bytes };
        let rows = AppendRows {
            kind: PartitionKind::Presence,
            timestamp_ms: event.timestamp_ms,
            retention_hours: retention_hours.unwrap_or(0),
            rows,
            ids: Vec::new(),
            member: Some(Box::new((name, member))),
        };
        let pushed = self.writes.push(weight, StoreJob::Append(AppendJob { rows, done }));
        self.refuse(pushed);
    }

    fn stored_members(&self) -> Result<Vec<RestoredMember>, StoreError> {
        if !self.history {
            return Ok(Vec::new());
        }
        let members = self.members.lock().clone().ok_or(StoreError::ShutDown)?;
        members.all().map_err(failed)
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: IdLookupCallback) {
        let bytes = ids.iter().map(|id| id.len()).sum();
        let lookup = FinderRequest::Lookup(EmbeddedIdLookup { scope, ids, callback: found });
        if let Err((refused, FinderRequest::Lookup(lookup))) =
            self.lookups.push(QueueWeight { items: 1, bytes }, lookup)
        {
            (lookup.callback)(Err(refused.into()));
        }
    }

    fn keep_ids(&self, scope: IdScope, ids: StampedIds, done: StoreCallback) {
        if let Err(error) = self.status.usable() {
            return done(Err(error));
        }
        let mut ids = id_rows(&scope, ids.iter().map(|(id, stamp)| (&**id, *stamp)));
        ids.retain(|id| id.key.len() <= KEY_BYTES_MAX);
        let bytes = ids.iter().map(|id| id.key.len() + HistoryPosition::BYTES).sum();
        let weight = QueueWeight { items: ids.len(), bytes };
        self.pending.add(&ids);
        let (kind, timestamp_ms) = (PartitionKind::Messages, self.clock.line_ms());
        let rows = AppendRows { kind, timestamp_ms, retention_hours: 0, rows: Vec::new(), ids, member: None };
        let pushed = self.writes.push(weight, StoreJob::Append(AppendJob { rows, done }));
        self.refuse(pushed);
    }

    fn claim_nonce(&self, nonce: Nonce) -> BoxFuture<'static, Result<bool, StoreError>> {
        let key = keys::nonce_key(&nonce);
        if key.len() > KEY_BYTES_MAX {
            return Box::pin(std::future::ready(Err(failed("a nonce is too long to be stored"))));
        }
        let (answer, answered) = oneshot::channel();
        let weight = QueueWeight { items: 1, bytes: key.len() };
        if let Err((refused, _)) = self.writes.push(weight, StoreJob::Claim { key, answer }) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn nonces(&self, after: Option<Box<[u8]>>) -> BoxFuture<'static, Result<NoncePage, StoreError>> {
        let (memory_ms, now_ms) = (self.nonce_memory_ms, self.clock.expiry_ms());
        self.submit_read(|answer| StoreReadRequest::Nonces { after, memory_ms, now_ms, answer })
    }

    fn keep_nonces(&self, nonces: Vec<ClaimedNonce>) -> BoxFuture<'static, Result<(), StoreError>> {
        let row =
            |kept: ClaimedNonce| ImportedNonceRow { key: keys::nonce_key(&kept.nonce), age_ms: kept.age_ms };
        let rows = nonces.into_iter().map(row).filter(|row| row.key.len() <= KEY_BYTES_MAX);
        let nonces: Vec<ImportedNonceRow> = rows.collect();
        let bytes = nonces.iter().map(|row| row.key.len()).sum();
        let weight = QueueWeight { items: nonces.len(), bytes };
        self.submit_job(weight, |answer| StoreJob::Keep { nonces, answer })
    }

    fn revoke_tokens(&self, revocation: Revocation) -> BoxFuture<'static, Result<(), StoreError>> {
        let bytes = size_of::<Revocation>() + revocation.client_id.as_ref().map_or(0, |id| id.as_str().len());
        self.submit_job(QueueWeight { items: 1, bytes }, |answer| StoreJob::Revoke { revocation, answer })
    }

    fn begin_incarnation(
        &self,
        incarnation: u64,
        coverage: HistoryCoverage,
    ) -> BoxFuture<'static, Result<Vec<PreviousIncarnation>, StoreError>> {
        let coverage = if self.history {
            coverage
        } else {
            HistoryCoverage { policies: HistoryCoverage::UNMATCHED_POLICIES, is_complete: false, ..coverage }
        };
        let (answer, answered) = oneshot::channel();
        let begin = StoreJob::Begin { incarnation, coverage, answer };
        if let Err((refused, _)) = self.writes.push(QueueWeight { items: 1, bytes: 0 }, begin) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError> {
        let partitions = self.partitions.lock().clone().ok_or(StoreError::ShutDown)?;
        RevocationRows::all(&partitions).map_err(failed)
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        self.submit_job(QueueWeight { items: 1, bytes: 0 }, |answer| StoreJob::Settle { answer })
    }

    fn read(&self, query: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
        if !self.history {
            return Box::pin(std::future::ready(Err(StoreError::Off)));
        }
        self.submit_read(|answer| StoreReadRequest::Page { query, answer })
    }

    fn put_metrics(&self, rows: Vec<MetricRow>) -> BoxFuture<'static, Result<(), StoreError>> {
        if !self.history {
            return Box::pin(std::future::ready(Err(StoreError::Off)));
        }
        let (answer, answered) = oneshot::channel();
        let weight = QueueWeight { items: rows.len(), bytes: rows.len() * size_of::<MetricRow>() };
        if let Err((refused, _)) = self.writes.push(weight, StoreJob::Metrics { rows, answer }) {
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
        self.submit_read(|answer| StoreReadRequest::Metrics { account, from_ms, rows_max, answer })
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
        let weight = QueueWeight { items: 1, bytes: row.definitions.len() };
        if let Err((refused, _)) = self.writes.push(weight, StoreJob::PutQueues { row, answer }) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn sweep(&self, now_ms: u64) -> Result<(), StoreError> {
        let partitions = self.partitions.lock().clone().ok_or(StoreError::ShutDown)?;
        let dropped = partitions.drop_expired(now_ms).map_err(failed)?;
        if dropped > 0 {
            tracing::info!(partitions = dropped, "expired history deleted");
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
        // Lookups end first: their callbacks may still append, and a lookup may wait for a write.
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

impl EmbeddedStore {
    /// Submits a job and resolves with its outcome, once the writer has finished it and all jobs before.
    fn submit_job(
        &self,
        weight: QueueWeight,
        job: impl FnOnce(oneshot::Sender<Result<(), StoreError>>) -> StoreJob,
    ) -> BoxFuture<'static, Result<(), StoreError>> {
        let (answer, answered) = oneshot::channel();
        if let Err((refused, _)) = self.writes.push(weight, job(answer)) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    /// Submits a read and resolves with its result.
    fn submit_read<T: Send + 'static>(
        &self,
        read: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> StoreReadRequest,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let (answer, answered) = oneshot::channel();
        if let Err((refused, _)) = self.reads.push(QueueWeight { items: 1, bytes: 0 }, read(answer)) {
            return Box::pin(std::future::ready(Err(refused.into())));
        }
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn refuse(&self, pushed: Result<(), (PushRefusal, StoreJob)>) {
        if let Err((refused, StoreJob::Append(append))) = pushed {
            self.pending.settle(&append.rows.ids);
            (append.done)(Err(refused.into()));
        }
    }
}

impl Drop for EmbeddedStore {
    fn drop(&mut self) {
        self.shutdown();
    }
}

impl fmt::Debug for EmbeddedStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Embedded").field("history", &self.history).finish_non_exhaustive()
    }
}

/// Joins a thread, unless it is the current one: a callback may drop the last handle of the store on a thread of the store.
fn join(thread: Option<JoinHandle<()>>) {
    let Some(thread) = thread.filter(|thread| thread.thread().id() != std::thread::current().id()) else {
        return;
    };
    if thread.join().is_err() {
        tracing::error!("store thread panicked");
    }
}

thread_local! {
    /// Buffers for keys and values whose length is not known beforehand.
    static SCRATCH: RefCell<(Vec<u8>, Vec<u8>)> = const { RefCell::new((Vec::new(), Vec::new())) };
}

fn message_rows(published: &PublishedMessages) -> Vec<(fjall::Slice, fjall::Slice)> {
    SCRATCH.with_borrow_mut(|(key, record)| {
        keys::channel_prefix(&published.key, key);
        let prefix = key.len();
        let connection_id = published.connection_id.to_string();
        let rows = published.messages.iter().map(|message| {
            let PublishedMessages { incarnation, timestamp_ms, .. } = *published;
            key.truncate(prefix);
            let position = HistoryPosition { timestamp_ms, sequence: message.sequence, incarnation };
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
        key.extend_from_slice(&keys::position_suffix(HistoryPosition {
            timestamp_ms,
            sequence,
            incarnation,
        }));
        record.clear();
        record::write_presence(record, event);
        (key.as_slice().into(), record.as_slice().into())
    })
}

fn given_rows(published: &PublishedMessages) -> Vec<IdRow> {
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

fn id_rows<'a>(scope: &IdScope, ids: impl Iterator<Item = (&'a str, Stamp)>) -> Vec<IdRow> {
    let mut key = Vec::new();
    keys::id_prefix(scope, &mut key);
    let prefix = key.len();
    let rows = ids.map(|(id, stamp)| {
        key.truncate(prefix);
        key.extend_from_slice(id.as_bytes());
        IdRow { key: key.as_slice().into(), stamp }
    });
    rows.collect()
}

fn failed(error: impl fmt::Display) -> StoreError {
    StoreError::failed(error)
}
