//! The store that nodes share: ScyllaDB or Apache Cassandra.
//!
//! An answer is given when a quorum of the local replicas has the row. Every row has a key and a time of its own, so that a write
//! that is sent twice, or comes late, is the same row. What the database does not answer in time is `Failed`, and its outcome unknown.

mod buckets;
mod connection;
mod copy;
mod health;
mod ids;
mod index;
mod lookups;
mod marks;
mod members;
mod metrics;
mod node;
mod once;
mod policies;
mod queues;
mod reader;
mod reads;
mod revocations;
mod rows;
mod schema;
mod standing;
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

use crate::model::{AccountId, Clock, FormerMember, Limits, PresenceEvent, Published, Revocation};
use crate::origin::metering::MetricRow;
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::{StoreOperation, StoreTimes};

use super::{
    BoxFuture, Deliveries, Done, FormerRun, FoundIds, HistoryPage, HistoryQuery, HistoryStore, IdScope, Kept,
    KeptBy, Nonce, Queued, StoreError, StoredQueues,
};
use buckets::{Bounds, Buckets};
use connection::Database;
use health::Health;
use ids::GivenIds;
use lookups::Lookups;
use marks::Marks;
use members::MemberChange;
use policies::Policies;
use reads::Reads;
use rows::Content;
use time::DatabaseTime;
use values::{conditional, number, ttl_s, written_at};
use writes::Writes;

pub use connection::{Connection, ScyllaError, apply_schema};
pub(super) use copy::Copying;

const HOUR_MS: u64 = 3_600_000;
const DAY_MS: u64 = 24 * HOUR_MS;
/// Nonces, revocations and metrics that are under way; beyond it `Busy`.
const REQUESTS_MAX: usize = 4_096;
/// A nonce is remembered longer than it must be, since clocks differ.
const NONCE_SLACK_MS: u64 = 60_000;
/// Beyond what one request may take, for a stop.
const STOP_SLACK: Duration = Duration::from_secs(1);

/// What a node keeps in the shared store and how much may wait for it.
#[derive(Debug, Clone)]
pub struct ScyllaOptions {
    pub node_id: Arc<str>,
    /// Of a node that is alone; where there are others they know its members.
    pub keeps_members: bool,
    /// The keyspace and the tables are made where they are missing.
    pub makes_schema: bool,
    pub idempotency_window_ms: u64,
    pub nonce_memory_ms: u64,
    pub revocation_kept_ms: u64,
    /// For so long somebody may come back to what was delivered.
    pub resume_kept_ms: u64,
    /// What is not answered by then is `Failed`.
    pub wait: Duration,
    /// Messages, events and ids that wait; beyond it `Busy`, but for messages: of them no more are begun from seven eighths on.
    pub write_queue_rows: usize,
    pub write_queue_bytes: usize,
    /// What the node puts into one partition before it goes on with a narrower one.
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

/// The shared store. Cheap to ask; it works on the runtime that it was opened in.
pub struct Scylla {
    shared: Arc<Shared>,
}

struct Shared {
    options: ScyllaOptions,
    connection: Connection,
    clock: Clock,
    time: DatabaseTime,
    runtime: Handle,
    tasks: Tasks,
    database: RwLock<Arc<Database>>,
    health: Health,
    times: StoreTimes,
    writes: Writes,
    buckets: Buckets,
    marks: Marks,
    ids: GivenIds,
    lookups: Lookups,
    reads: Reads,
    requests: AtomicUsize,
    /// The highest time of a row of this node.
    highest_ms: AtomicU64,
    /// By which of two changes of a member, or of what is said of a run, the later is known.
    last_change: AtomicI64,
    noting: tokio::sync::Mutex<()>,
    policies: Policies,
    closed: AtomicBool,
}

impl Scylla {
    /// Connects, makes or checks the schema, and raises the clock above every time that this node has given to a row.
    pub async fn open(
        connection: Connection,
        options: ScyllaOptions,
        clock: Clock,
    ) -> Result<Self, ScyllaError> {
        let session = connection.first_session().await?;
        if options.makes_schema {
            schema::apply(&session, &connection).await?;
        } else {
            schema::check(&session, &connection.keyspace).await?;
        }
        let database = Database::over(session, &connection.keyspace).await?;
        let runtime = Handle::current();
        let shared = Arc::new(Shared {
            tasks: Tasks::new(runtime.clone()),
            runtime,
            database: RwLock::new(Arc::new(database)),
            health: Health::default(),
            times: StoreTimes::new("shared", &StoreOperation::ALL),
            writes: Writes::new(options.write_queue_rows, options.write_queue_bytes),
            buckets: Buckets::new(Bounds { rows: options.partition_rows, bytes: options.partition_bytes }),
            marks: Marks::new(),
            ids: GivenIds::new(options.idempotency_window_ms),
            lookups: Lookups::new(),
            reads: Reads::new(),
            requests: AtomicUsize::new(0),
            highest_ms: AtomicU64::new(0),
            last_change: AtomicI64::new(0),
            noting: tokio::sync::Mutex::default(),
            policies: Policies::default(),
            closed: AtomicBool::new(false),
            options,
            connection,
            clock,
            time: DatabaseTime::default(),
        });
        shared.time.ask(&shared.database()).await.map_err(ScyllaError::Read)?;
        marks::read(&shared).await.map_err(ScyllaError::Read)?;
        let (_, highest_ms) = node::read(&shared).await.map_err(ScyllaError::Read)?;
        if highest_ms > 0 {
            shared.wrote_up_to(highest_ms);
            shared.clock.raise(highest_ms + 1);
        }
        let watched = Arc::downgrade(&shared);
        shared.tasks.spawn("store watch", OnStop::Cancel, health::watch(watched.clone()));
        shared.tasks.spawn("store note", OnStop::Cancel, node::note(watched));
        Ok(Self { shared })
    }
}

impl HistoryStore for Scylla {
    fn is_shared(&self) -> bool {
        true
    }

    fn is_full(&self) -> bool {
        self.shared.writes.is_nearly_full()
    }

    fn queued(&self) -> Queued {
        self.shared.writes.queued()
    }

    fn append(&self, published: Arc<Published>, retention_hours: Option<u32>, done: Done) {
        if let Err(error) = self.shared.usable() {
            return done(Err(error));
        }
        let content = Content::of_messages(&published, retention_hours);
        if content.is_empty() {
            return done(Ok(()));
        }
        writes::begin(&self.shared, &published.key, content, done);
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: Done) {
        let shared = &self.shared;
        if let Err(error) = shared.usable() {
            return done(Err(error));
        }
        if shared.writes.is_full() {
            return done(Err(StoreError::Busy));
        }
        let change = || MemberChange::of(&event, shared.next_change(event.timestamp_ms));
        let member = shared.options.keeps_members.then(change);
        let content = Content::of_presence(&event, retention_hours, member);
        if content.is_empty() {
            return done(Ok(()));
        }
        writes::begin(shared, &event.key, content, done);
    }

    fn former_members(&self) -> Result<Vec<FormerMember>, StoreError> {
        if !self.shared.options.keeps_members {
            return Ok(Vec::new());
        }
        self.shared.usable()?;
        self.shared.runtime.block_on(members::all(&self.shared))
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: FoundIds) {
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

    fn begin(&self, incarnation: u64, kept: Kept) -> BoxFuture<'static, Result<Vec<FormerRun>, StoreError>> {
        let shared = Arc::clone(&self.shared);
        self.shared.request("store run", StoreOperation::Other, async move {
            node::begin(&shared, incarnation, kept).await
        })
    }

    fn lately_kept(&self) -> BoxFuture<'static, Result<KeptBy, StoreError>> {
        match self.shared.usable() {
            Ok(()) => policies::ask(&self.shared),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    fn told_policies(&self) -> Option<u64> {
        self.shared.policies.told()
    }

    fn settled(&self) -> BoxFuture<'static, Result<(), StoreError>> {
        let shared = Arc::clone(&self.shared);
        Box::pin(async move {
            shared.usable()?;
            shared.writes.settled().await;
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

    /// Rows end by themselves.
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
            // A write of ids asks three times at most.
            shared.tasks.stop(3 * shared.options.wait + STOP_SLACK).await;
            if let Err(error) = node::note_highest(shared).await {
                tracing::warn!(%error, "the time of the last row was not noted");
            }
            policies::end(shared).await;
        });
    }
}

impl fmt::Debug for Scylla {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Scylla").field("connection", &self.shared.connection).finish_non_exhaustive()
    }
}

impl Shared {
    fn database(&self) -> Arc<Database> {
        Arc::clone(&self.database.read())
    }

    fn usable(&self) -> Result<(), StoreError> {
        if self.closed.load(Ordering::SeqCst) { Err(StoreError::ShutDown) } else { Ok(()) }
    }

    fn spawn(&self, name: &'static str, task: impl Future<Output = ()> + Send + 'static) {
        self.tasks.spawn(name, OnStop::Finish, task);
    }

    /// Begins at once, whether the answer is waited for or not.
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
            // A caller that has gone needs no answer.
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
        let former = self.last_change.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        least.max(former.unwrap_or_default() + 1)
    }
}

fn failed(error: impl fmt::Display) -> StoreError {
    StoreError::Failed(error.to_string())
}
