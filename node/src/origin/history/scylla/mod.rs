//! The store that several nodes share: ScyllaDB or Apache Cassandra.
//!
//! A write is answered when a quorum of the local replicas has the row. Every row has a key and a write time of its own, so a write that
//! is sent twice or arrives late gives the same row. A request that the database does not answer in time is `Failed`, with an unknown
//! outcome.

mod buckets;
mod connection;
mod continuations;
mod copy;
mod event_claims;
mod health;
mod ids;
mod index;
mod lookups;
mod members;
mod metrics;
mod node;
mod policies;
mod queues;
mod reachability;
mod reader;
mod reads;
mod revocations;
mod rows;
mod schema;
mod time;
mod values;
mod writes;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::RwLock;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use crate::model::{AccountId, Clock, Limits, PresenceEvent, PublishedMessages, RestoredMember, Revocation};
use crate::origin::metering::MetricRow;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::{StoreOperation, StoreTimes};

use super::{
    BoxFuture, Deliveries, HistoryCoverage, HistoryPage, HistoryQuery, HistoryStore, IdLookupCallback,
    IdScope, IncarnationPolicies, Nonce, PreviousIncarnation, StoreCallback, StoreError, StoreQueueUsage,
    StoredQueues,
};
use buckets::{BucketBounds, Buckets};
use connection::PreparedSession;
use continuations::Continuations;
use health::DatabaseHealth;
use ids::ScyllaIdClaims;
use lookups::IdLookups;
use members::MemberChange;
use policies::PolicyAnnouncements;
use reads::HistoryReads;
use rows::AppendContent;
use time::DatabaseTime;
use values::{conditional, number, ttl_s, written_at};
use writes::WriteQueues;

pub use connection::{ScyllaConnection, ScyllaError, apply_schema};
pub(super) use copy::CopyWriter;

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
/// Concurrent requests for nonces, revocations and metrics; beyond it `Busy`.
const REQUESTS_MAX: usize = 4_096;
/// Time that a nonce is remembered beyond its memory, since clocks differ.
const NONCE_SLACK_MS: u64 = 60_000;
/// Time that a stop waits beyond the time limit of its requests.
const STOP_SLACK: Duration = Duration::from_secs(1);

/// Settings of the shared store, and the bounds of its queues.
#[derive(Debug, Clone)]
pub struct ScyllaOptions {
    pub node_id: Arc<str>,
    /// Whether members are stored: only for a node without a cluster. In a cluster the other nodes know them.
    pub keeps_members: bool,
    /// Whether the keyspace and tables are created if they are missing.
    pub makes_schema: bool,
    pub idempotency_window_ms: u64,
    pub nonce_memory_ms: u64,
    pub revocation_kept_ms: u64,
    /// Longest time after a delivery in which clients may resume from it.
    pub resume_kept_ms: u64,
    /// Time limit of a request; after it the answer is `Failed`.
    pub wait: Duration,
    /// Messages, events and ids that wait. Beyond this bound the answer is `Busy`, except for messages: new ones are refused from seven
    /// eighths on.
    pub write_queue_rows: usize,
    pub write_queue_bytes: usize,
    /// Rows and bytes that the node writes to one partition before it goes on with a narrower one.
    pub partition_rows: u64,
    pub partition_bytes: u64,
}

impl ScyllaOptions {
    pub fn new(node_id: Arc<str>, limits: &Limits) -> Self {
        Self {
            node_id,
            keeps_members: true,
            makes_schema: true,
            idempotency_window_ms: limits.idempotency_window_ms,
            nonce_memory_ms: limits.nonce_memory_ms,
            revocation_kept_ms: limits.revocation_kept_ms(),
            resume_kept_ms: 2 * limits.resume_window_ms,
            wait: Duration::from_millis(limits.store_wait_ms),
            write_queue_rows: 131_072,
            write_queue_bytes: 64 * 1024 * 1024,
            partition_rows: 30_000,
            partition_bytes: 32 * 1024 * 1024,
        }
    }
}

/// The shared store. Its calls do not block; it runs on the runtime in which it was opened.
pub struct ScyllaStore {
    shared: Arc<ScyllaShared>,
}

struct ScyllaShared {
    options: ScyllaOptions,
    connection: ScyllaConnection,
    clock: Clock,
    time: DatabaseTime,
    runtime: Handle,
    tasks: Tasks,
    database: RwLock<Arc<PreparedSession>>,
    health: DatabaseHealth,
    times: StoreTimes,
    writes: WriteQueues,
    buckets: Buckets,
    continuations: Continuations,
    ids: ScyllaIdClaims,
    lookups: IdLookups,
    reads: HistoryReads,
    requests: AtomicUsize,
    /// Highest timestamp of this node's rows.
    highest_ms: AtomicU64,
    /// Number of the last change of a member or an incarnation; of two changes the one with the higher number is the later.
    last_change: AtomicI64,
    node_row_lock: tokio::sync::Mutex<()>,
    policies: PolicyAnnouncements,
    closed: AtomicBool,
}

impl ScyllaStore {
    /// Connects, creates or checks the schema, and raises the clock above every timestamp that this node has stored.
    pub async fn open(
        connection: ScyllaConnection,
        options: ScyllaOptions,
        clock: Clock,
    ) -> Result<Self, ScyllaError> {
        let session = connection.first_session().await?;
        if options.makes_schema {
            schema::apply(&session, &connection).await?;
        } else {
            schema::check(&session, &connection.keyspace).await?;
        }
        let database = PreparedSession::from_session(session, &connection.keyspace).await?;
        let runtime = Handle::current();
        let shared = Arc::new(ScyllaShared {
            tasks: Tasks::new(runtime.clone()),
            runtime,
            database: RwLock::new(Arc::new(database)),
            health: DatabaseHealth::default(),
            times: StoreTimes::new("shared", &StoreOperation::ALL),
            writes: WriteQueues::new(options.write_queue_rows, options.write_queue_bytes),
            buckets: Buckets::new(BucketBounds {
                rows: options.partition_rows,
                bytes: options.partition_bytes,
            }),
            continuations: Continuations::new(),
            ids: ScyllaIdClaims::new(options.idempotency_window_ms),
            lookups: IdLookups::new(),
            reads: HistoryReads::new(),
            requests: AtomicUsize::new(0),
            highest_ms: AtomicU64::new(0),
            last_change: AtomicI64::new(0),
            node_row_lock: tokio::sync::Mutex::default(),
            policies: PolicyAnnouncements::default(),
            closed: AtomicBool::new(false),
            options,
            connection,
            clock,
            time: DatabaseTime::default(),
        });
        shared.time.ask(&shared.database()).await.map_err(ScyllaError::Read)?;
        continuations::read(&shared).await.map_err(ScyllaError::Read)?;
        let (_, highest_ms) = node::read(&shared).await.map_err(ScyllaError::Read)?;
        if highest_ms > 0 {
            shared.wrote_up_to(highest_ms);
            shared.clock.raise(highest_ms + 1);
        }
        let watched = Arc::downgrade(&shared);
        shared.tasks.spawn("store watch", OnStop::Cancel, health::watch(watched.clone()));
        shared.tasks.spawn("store incarnation", OnStop::Cancel, node::save_periodically(watched));
        Ok(Self { shared })
    }
}

impl HistoryStore for ScyllaStore {
    fn is_shared(&self) -> bool {
        true
    }

    fn is_full(&self) -> bool {
        self.shared.writes.is_nearly_full()
    }

    fn queued(&self) -> StoreQueueUsage {
        self.shared.writes.queued()
    }

    fn append(&self, published: Arc<PublishedMessages>, retention_hours: Option<u32>, done: StoreCallback) {
        if let Err(error) = self.shared.usable() {
            return done(Err(error));
        }
        let content = AppendContent::of_messages(&published, retention_hours);
        if content.is_empty() {
            return done(Ok(()));
        }
        writes::begin(&self.shared, &published.key, content, done);
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: StoreCallback) {
        let shared = &self.shared;
        if let Err(error) = shared.usable() {
            return done(Err(error));
        }
        if shared.writes.is_full() {
            return done(Err(StoreError::Busy));
        }
        let change = || MemberChange::of(&event, shared.next_change(event.timestamp_ms));
        let member = shared.options.keeps_members.then(change);
        let content = AppendContent::of_presence(&event, retention_hours, member);
        if content.is_empty() {
            return done(Ok(()));
        }
        writes::begin(shared, &event.key, content, done);
    }

    fn stored_members(&self) -> Result<Vec<RestoredMember>, StoreError> {
        if !self.shared.options.keeps_members {
            return Ok(Vec::new());
        }
        self.shared.usable()?;
        self.shared.runtime.block_on(members::all(&self.shared))
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: IdLookupCallback) {
        if let Err(error) = self.shared.usable() {
            return found(Err(error));
        }
        lookups::look_up(&self.shared, scope, ids, found);
    }

    fn set_deliveries(&self, deliveries: Arc<dyn Deliveries>) {
        self.shared.ids.set_deliveries(deliveries);
    }

    fn claim_nonce(&self, nonce: Nonce) -> BoxFuture<'static, Result<bool, StoreError>> {
        let shared = Arc::clone(&self.shared);
        self.shared.request("store nonce", StoreOperation::Claim, async move {
            let Nonce { key_name, timestamp_ms, nonce } = nonce;
            let database = shared.database();
            let memory_ms = shared.options.nonce_memory_ms + NONCE_SLACK_MS;
            let ttl = ttl_s(memory_ms, 0).unwrap_or(i32::MAX);
            let values = (&*key_name, number(timestamp_ms), &*nonce, ttl);
            let claimed = conditional(&database.session, &database.statements.claim_nonce, values).await?;
            Ok(claimed.applied)
        })
    }

    fn revoke_tokens(&self, revocation: Revocation) -> BoxFuture<'static, Result<(), StoreError>> {
        let shared = Arc::clone(&self.shared);
        self.shared.request("store revocation", StoreOperation::Other, async move {
            revocations::write(&shared, revocation).await
        })
    }

    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError> {
        self.shared.usable()?;
        self.shared.runtime.block_on(revocations::all(&self.shared))
    }

    fn queues(&self, known: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        self.shared.usable()?;
        self.shared.runtime.block_on(queues::changed(&self.shared, known))
    }

    fn put_queues(&self, row: StoredQueues) -> BoxFuture<'static, Result<bool, StoreError>> {
        let shared = Arc::clone(&self.shared);
        self.shared.request(
            "store queues",
            StoreOperation::Other,
            async move { queues::put(&shared, row).await },
        )
    }

    fn begin_incarnation(
        &self,
        incarnation: u64,
        kept: HistoryCoverage,
    ) -> BoxFuture<'static, Result<Vec<PreviousIncarnation>, StoreError>> {
        let shared = Arc::clone(&self.shared);
        self.shared.request("store run", StoreOperation::Other, async move {
            node::begin_incarnation(&shared, incarnation, kept).await
        })
    }

    fn recent_policies(&self) -> BoxFuture<'static, Result<IncarnationPolicies, StoreError>> {
        match self.shared.usable() {
            Ok(()) => policies::read_recent(&self.shared),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn announced_policies(&self) -> Option<u64> {
        self.shared.policies.announced()
    }

    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            shared.usable()?;
            shared.writes.flush().await;
            Ok(())
        })
    }

    fn read(&self, query: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>> {
        if let Err(error) = self.shared.usable() {
            return Box::pin(std::future::ready(Err(error)));
        }
        reads::ask(&self.shared, query)
    }

    fn put_metrics(&self, rows: Vec<MetricRow>) -> BoxFuture<'static, Result<(), StoreError>> {
        let shared = Arc::clone(&self.shared);
        self.shared.request("store metrics", StoreOperation::Other, async move {
            metrics::write(&shared, rows).await
        })
    }

    fn read_metrics(
        &self,
        account: AccountId,
        from_ms: u64,
        rows_max: usize,
    ) -> BoxFuture<'static, Result<Vec<MetricRow>, StoreError>> {
        let shared = Arc::clone(&self.shared);
        let read = async move { metrics::read(&shared, &account, from_ms, rows_max).await };
        self.shared.request("store metrics", StoreOperation::Read, read)
    }

    /// Nothing to do: rows expire by themselves.
    fn sweep(&self, _now_ms: u64) -> Result<(), StoreError> {
        self.shared.usable()
    }

    fn health(&self) -> Result<(), StoreError> {
        self.shared.health.state()
    }

    fn shutdown(&self) {
        let shared = &self.shared;
        if shared.closed.swap(true, Ordering::SeqCst) {
            return;
        }
        shared.runtime.block_on(async {
            // A write of ids makes at most three requests.
            shared.tasks.stop(3 * shared.options.wait + STOP_SLACK).await;
            if let Err(error) = node::save_highest(shared).await {
                tracing::warn!(%error, "highest row time not stored");
            }
            policies::end_announcement(shared).await;
        });
    }
}

impl fmt::Debug for ScyllaStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scylla").field("connection", &self.shared.connection).finish_non_exhaustive()
    }
}

impl ScyllaShared {
    fn database(&self) -> Arc<PreparedSession> {
        Arc::clone(&self.database.read())
    }

    fn usable(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::SeqCst) { Err(StoreError::ShutDown) } else { Ok(()) }
    }

    fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(name, OnStop::Finish, task);
    }

    /// Starts a request at once, even if its future is never polled.
    fn request<T: Send + 'static>(
        self: &Arc<Self>,
        name: &'static str,
        operation: StoreOperation,
        work: impl Future<Output = Result<T, StoreError>> + Send + 'static,
    ) -> BoxFuture<'static, Result<T, StoreError>> {
        let refused = self.usable().err().or_else(|| {
            let is_full = self.requests.fetch_add(1, Ordering::Relaxed) >= REQUESTS_MAX;
            is_full.then(|| {
                self.requests.fetch_sub(1, Ordering::Relaxed);
                StoreError::Busy
            })
        });
        if let Some(refused) = refused {
            return Box::pin(std::future::ready(Err(refused)));
        }
        let (answer, answered) = oneshot::channel();
        let shared = Arc::clone(self);
        self.spawn(name, async move {
            let begun = Instant::now();
            let result = work.await;
            shared.times.ended(operation, begun);
            shared.requests.fetch_sub(1, Ordering::Relaxed);
            // The caller may have dropped its receiver.
            let _ = answer.send(result);
        });
        Box::pin(async { answered.await.unwrap_or(Err(StoreError::ShutDown)) })
    }

    fn highest_ms(&self) -> u64 {
        self.highest_ms.load(Ordering::Relaxed)
    }

    fn wrote_up_to(&self, timestamp_ms: u64) {
        self.highest_ms.fetch_max(timestamp_ms, Ordering::Relaxed);
    }

    fn next_change(&self, timestamp_ms: u64) -> i64 {
        let least = written_at(timestamp_ms);
        let next = |last: i64| Some(least.max(last + 1));
        let previous = self.last_change.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        least.max(previous.unwrap_or_default() + 1)
    }
}

fn failed(error: impl fmt::Display) -> StoreError {
    StoreError::Failed(error.to_string())
}
