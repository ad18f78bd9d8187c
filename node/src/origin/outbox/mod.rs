//! The outbox: events that integrations have yet to receive, on the disk of the node at which they entered.
//!
//! A publish writes its events here before it is acknowledged. `writer` is the one thread that writes, `dispatch` sends the events of each
//! target, and `board` holds the channels that have some. A batch is fixed on the disk before its first attempt, so each attempt, also
//! after a restart, sends the same bytes under the same id.

mod board;
mod depth;
mod dispatch;
mod event;
mod keys;
mod operator;
mod recent;
mod routes;
mod settings;
mod snapshot;
mod store;
#[cfg(test)]
mod tests;
mod traced;
mod writer;

use std::collections::HashMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::http::write_occupancy_record;
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::disk::health::DiskHealth;
use super::disk::queue::{DiskQueue, DiskQueueBounds, QueueWeight};
use super::history::{BoxFuture, StoreCallback, StoreError, record};
use super::queues::QueueCatalog;
use super::targets::{DeliveryOutcome, TargetDelivery, TargetEndpoint, TargetKind};
use crate::accounts::{Account, Accounts};
use crate::model::{
    AccountId, ChannelKey, Clock, Limits, PresenceEvent, PublishedMessages, pattern_matches, random_bytes,
};
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::{Repeats, StoreOperation, StoreTimes};
use board::OutboxBoard;
pub use depth::TargetDepth;
use depth::TargetDepths;
pub use event::{Addressee, EventSource, OutboxEvent, TargetId};
pub use operator::{EventQuery, RetryError};
pub use routes::Routes;
pub(super) use snapshot::{FORMAT, is_table, stopped_snapshot};
use store::{FixedBatch, OutboxTables};
use writer::{BatchSettlement, OutboxJob, OutboxWriter, TargetBounds};

/// Bounds of the write queue; beyond seven eighths of them a publish is refused.
const QUEUE: DiskQueueBounds = DiskQueueBounds { items: 131_072, bytes: 64 * 1024 * 1024 };
/// Interval at which a stop checks whether all events are sent.
const LOOK: Duration = Duration::from_millis(50);
/// Events that a search for a target's oldest waiting event reads.
const OLDEST_STEPS: usize = 20_000;
/// Time without progress after which a stop no longer waits for the targets.
const NO_PROGRESS: Duration = Duration::from_secs(2);

/// Sends one batch to one target.
pub trait TargetTransport: Send + Sync + 'static {
    fn send<'a>(
        &'a self,
        endpoint: &'a TargetEndpoint,
        delivery: &'a TargetDelivery,
    ) -> BoxFuture<'a, DeliveryOutcome>;
}

/// The outbox of a node. Cheap to clone.
#[derive(Clone)]
pub struct EventOutbox {
    engine: Arc<OutboxEngine>,
    node_id: Arc<str>,
}

struct OutboxEngine {
    tables: OutboxTables,
    queue: Arc<DiskQueue<OutboxJob>>,
    status: Arc<DiskHealth>,
    depths: Arc<TargetDepths>,
    board: Arc<OutboxBoard>,
    accounts: Arc<Accounts>,
    /// Catalog of queues; `None` if no broker holds queues.
    queues: Option<QueueCatalog>,
    transport: Arc<dyn TargetTransport>,
    /// Rate limit of logged failures, by target.
    logged_failures: Repeats,
    clock: Clock,
    bounds: TargetBounds,
    /// Time from the writing of an event in which its attempts are repeated; an attempt that fails later is the last.
    retry_ms: u64,
    /// Sequences from which the oldest waiting event of each target is searched.
    oldest: Mutex<HashMap<TargetId, u64>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl EventOutbox {
    /// Opens the outbox in the folder, or creates it. Blocks on the disk.
    pub fn open(
        folder: &Path,
        limits: &Limits,
        clock: &Clock,
        node_id: &Arc<str>,
        (accounts, queues): (&Arc<Accounts>, Option<QueueCatalog>),
        transport: Arc<dyn TargetTransport>,
    ) -> Result<Self, StoreError> {
        let tables = OutboxTables::open(folder)?;
        let depths = Arc::new(TargetDepths::read(&tables)?);
        let board = Arc::new(OutboxBoard::default());
        for (target, depth) in depths.all() {
            if depth.events > 0 {
                board.lineup(&target).set_overflowed();
            }
        }
        for (target, settings) in tables.disabled()? {
            tracing::warn!(destination = %target, "target is disabled since it answered 410");
            board.lineup(&target).set_disabled(Some(settings));
        }
        let (queue, status) = (Arc::new(DiskQueue::new(QUEUE)), Arc::new(DiskHealth::new(folder)));
        let bounds =
            TargetBounds { bytes: limits.integration_bytes, dead_bytes: limits.integration_dead_bytes };
        let writer = OutboxWriter {
            next_sequence: tables.next_sequence()?,
            tables: tables.clone(),
            queue: Arc::clone(&queue),
            status: Arc::clone(&status),
            times: StoreTimes::new("outbox", &[StoreOperation::Append]),
            depths: Arc::clone(&depths),
            board: Arc::clone(&board),
            bounds,
            clock: clock.clone(),
            oldest: HashMap::new(),
            unflushed: 0,
            synced: std::time::Instant::now(),
        };
        let thread = std::thread::Builder::new().name("outbox-writer".to_owned()).spawn(move || writer.run());
        let engine = OutboxEngine {
            tables,
            queue,
            status,
            depths,
            board,
            accounts: Arc::clone(accounts),
            queues,
            transport,
            logged_failures: Repeats::default(),
            clock: clock.clone(),
            bounds,
            retry_ms: limits.integration_retry_ms,
            oldest: Mutex::default(),
            thread: Mutex::new(Some(thread.map_err(StoreError::failed)?)),
        };
        Ok(Self { engine: Arc::new(engine), node_id: Arc::clone(node_id) })
    }

    /// Starts to send the waiting events and all later ones.
    pub fn begin(&self, tasks: &Arc<Tasks>) {
        let (engine, own) = (Arc::clone(&self.engine), Arc::clone(tasks));
        tasks.spawn("outbox", OnStop::Cancel, async move {
            loop {
                for lineup in engine.board.take_unstarted() {
                    own.spawn("outbox target", OnStop::Cancel, dispatch::run(Arc::clone(&engine), lineup));
                }
                engine.board.has_new.notified().await;
            }
        });
    }

    /// Returns whether the write queue is nearly full; a publish that has targets is then refused.
    pub fn is_full(&self) -> bool {
        self.engine.queue.is_nearly_full()
    }

    /// Returns `Failed` while the disk refuses writes.
    pub fn health(&self) -> Result<(), StoreError> {
        self.engine.status.state()
    }

    /// Returns the targets that the channel's events may have.
    pub fn routes(&self, account: &Account, key: &ChannelKey, source: EventSource) -> Routes {
        let matching = account.integrations.iter().filter(|integration| {
            let is_source = match source {
                EventSource::Message => integration.messages,
                EventSource::Presence => integration.presence,
                EventSource::Occupied | EventSource::Vacated => integration.occupancy,
            };
            is_source && integration.channels.iter().any(|pattern| pattern_matches(pattern, key.channel()))
        });
        let with_ids = matching.map(|integration| (TargetId::new(&account.id, &integration.id), integration));
        let enabled = with_ids.filter(|(target, integration)| {
            let is_disabled = self.engine.board.disabled(target) == Some(integration.settings_hash);
            if is_disabled {
                metrics::counter!("fanfare_outbox_skipped_total").increment(1);
            }
            !is_disabled
        });
        let integrations = enabled.map(|(target, _)| target).collect();
        let queues =
            self.engine.queues.as_ref().map(|queues| queues.feeds(&account.id, key.channel(), source));
        Routes { integrations, queues: queues.unwrap_or_default(), trace: None }
    }

    /// Writes the messages for the targets of each; `done(Ok)` means that the events survive a loss of power. Callbacks run in the
    /// order of the calls.
    pub fn put_messages(&self, published: &PublishedMessages, routes: &Routes, done: StoreCallback) {
        let connection_id = published.connection_id.to_string();
        let events = published.messages.iter().filter_map(|message| {
            let targets = routes.of(message.name.as_deref());
            if targets.is_empty() {
                return None;
            }
            let mut text = Vec::new();
            record::write_message(&mut text, published, message, &connection_id);
            Some(OutboxEvent {
                trace: routes.trace.clone(),
                ..self.event(&published.key, EventSource::Message, targets, text)
            })
        });
        self.put(events.collect(), done);
    }

    /// Writes the presence event for its targets; `done` as for [`EventOutbox::put_messages`].
    pub fn put_presence(&self, event: &PresenceEvent, routes: &Routes, done: StoreCallback) {
        let targets = routes.of(Some(event.action.as_str()));
        if targets.is_empty() {
            return self.pass(done);
        }
        let mut text = Vec::new();
        record::write_presence_with(&mut text, event, Some(&event.id()));
        self.put(vec![self.event(&event.key, EventSource::Presence, targets, text)], done);
    }

    /// Writes for these targets that the channel has become occupied or vacated; `done` as for [`EventOutbox::put_messages`].
    pub fn put_occupancy(&self, key: &ChannelKey, source: EventSource, routes: &Routes, done: StoreCallback) {
        let (mut text, id) = (Vec::new(), URL_SAFE_NO_PAD.encode(random_bytes::<16>()));
        write_occupancy_record(&mut text, key.channel(), &format!("occ_{id}"), self.engine.clock.now_ms());
        self.put(vec![self.event(key, source, routes.of(None), text)], done);
    }

    /// Runs the callback after those of all calls before.
    pub fn pass(&self, done: StoreCallback) {
        self.put(Vec::new(), done);
    }

    fn event(
        &self,
        key: &ChannelKey,
        source: EventSource,
        targets: Vec<Addressee>,
        record: Vec<u8>,
    ) -> OutboxEvent {
        OutboxEvent {
            written_ms: self.engine.clock.line_ms(),
            source,
            node_id: Arc::clone(&self.node_id),
            account: key.account().clone(),
            channel: key.channel().into(),
            targets,
            trace: None,
            record: record.into(),
        }
    }

    fn put(&self, events: Vec<OutboxEvent>, done: StoreCallback) {
        if let Err(error) = self.engine.status.usable() {
            return done(Err(error));
        }
        let bytes = events.iter().map(OutboxEvent::encoded_bytes).sum();
        let weight = QueueWeight { items: events.len().max(1), bytes };
        let pushed = self.engine.queue.push_admitted(weight, OutboxJob::Put { events, done });
        if let Err((refused, OutboxJob::Put { done, .. })) = pushed {
            done(Err(refused.into()));
        }
    }

    pub fn depths(&self) -> Vec<(TargetId, TargetDepth)> {
        self.engine.depths.all()
    }

    /// Returns the kind of the target; `None` for an integration that the directory does not have.
    pub fn kind(&self, target: &TargetId) -> Option<TargetKind> {
        if target.queue_id().is_some() {
            return Some(TargetKind::Queue);
        }
        let (account, integration) = target.parts();
        let directory = self.engine.accounts.current();
        let account = directory.account(&AccountId::new(account))?;
        account.integrations.iter().find(|found| *found.id == *integration).map(|found| found.kind.into())
    }

    /// Sets the gauges of each kind: waiting events and bytes, dead letters, and the age of the oldest waiting event. Also sets the gauge
    /// of events whose target is absent.
    pub async fn measure(&self) {
        let mut kinds = [(); TargetKind::ALL.len()].map(|()| (TargetDepth::default(), 0_u64));
        let mut absent = 0;
        for (target, depth) in self.depths() {
            absent += if self.engine.is_absent(&target) { depth.events } else { 0 };
            let Some(kind) = self.kind(&target) else { continue };
            let oldest_ms = self.oldest_ms(&target, depth).await;
            let age_ms =
                oldest_ms.map_or(0, |oldest_ms| self.engine.clock.line_ms().saturating_sub(oldest_ms));
            let (sum, oldest) = &mut kinds[kind as usize];
            sum.events += depth.events;
            sum.bytes += depth.bytes;
            sum.dead_events += depth.dead_events;
            *oldest = age_ms.max(*oldest);
        }
        metrics::gauge!("fanfare_outbox_absent_events").set(absent as f64);
        for (kind, (depth, age_ms)) in TargetKind::ALL.into_iter().zip(kinds) {
            let kind = kind.as_str();
            metrics::gauge!("fanfare_outbox_events", "kind" => kind).set(depth.events as f64);
            metrics::gauge!("fanfare_outbox_bytes", "kind" => kind).set(depth.bytes as f64);
            metrics::gauge!("fanfare_outbox_dead_letters", "kind" => kind).set(depth.dead_events as f64);
            metrics::gauge!("fanfare_outbox_oldest_seconds", "kind" => kind).set(age_ms as f64 / 1_000.0);
        }
    }

    async fn oldest_ms(&self, target: &TargetId, depth: TargetDepth) -> Option<u64> {
        if depth.events == 0 {
            return None;
        }
        let from = self.engine.oldest.lock().get(target).copied().unwrap_or(0);
        let of = target.clone();
        let (next, oldest_ms) =
            self.engine.read(move |tables| tables.oldest(&of, from, OLDEST_STEPS)).await.ok()?;
        self.engine.oldest.lock().insert(target.clone(), next);
        oldest_ms
    }

    /// Waits until all events are sent, there is no progress, or the time is over. Returns the number of events that are left.
    pub async fn drain(&self, within: Duration) -> u64 {
        let left = || self.depths().iter().map(|(_, depth)| depth.events).sum::<u64>();
        let sent = async {
            let (mut before, mut since) = (left(), Instant::now());
            while before > 0 && since.elapsed() < NO_PROGRESS {
                tokio::time::sleep(LOOK).await;
                let now = left();
                if now != before {
                    (before, since) = (now, Instant::now());
                }
            }
        };
        let _in_time = tokio::time::timeout(within, sent).await;
        left()
    }

    /// Stops the writer after all queued jobs. Blocks.
    pub fn shutdown(&self) {
        self.engine.queue.close();
        let thread = self.engine.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("outbox thread panicked");
        }
    }
}

impl OutboxEngine {
    /// Reads the tables on a thread that may block.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&OutboxTables) -> Result<T, StoreError> + Send + 'static,
    ) -> Result<T, StoreError> {
        let tables = self.tables.clone();
        let read = tokio::task::spawn_blocking(move || read(&tables)).await;
        read.unwrap_or_else(|error| Err(StoreError::failed(error)))
    }

    async fn fix_batch(
        &self,
        target: &TargetId,
        channel: &str,
        first: u64,
        fixed: FixedBatch,
    ) -> Result<(), StoreError> {
        let (target, channel) = (target.clone(), channel.into());
        self.job(1, |answer| OutboxJob::Fix { target, channel, first, fixed, answer }).await
    }

    async fn written(
        &self,
        settle: impl FnOnce(oneshot::Sender<Result<(), StoreError>>) -> BatchSettlement,
    ) -> Result<(), StoreError> {
        self.job(1, |answer| OutboxJob::Settle(settle(answer))).await
    }

    /// Records that the target is disabled while it has these settings; with `None`, that it is not disabled.
    async fn disable(&self, lineup: &board::TargetLineup, settings: Option<u64>) -> Result<(), StoreError> {
        let target = lineup.target.clone();
        self.job(1, |answer| OutboxJob::Disable { target, settings, answer }).await?;
        lineup.set_disabled(settings);
        Ok(())
    }

    async fn job(
        &self,
        items: usize,
        job: impl FnOnce(oneshot::Sender<Result<(), StoreError>>) -> OutboxJob,
    ) -> Result<(), StoreError> {
        let (answer, answered) = oneshot::channel();
        let pushed = self.queue.push_admitted(QueueWeight { items, bytes: 0 }, job(answer));
        if let Err((refused, _)) = pushed {
            return Err(refused.into());
        }
        answered.await.unwrap_or(Err(StoreError::ShutDown))
    }
}

/// Prefix of a disabled target's key in the table `state`.
const DISABLED: &str = "disabled:";

fn disabled_key(target: &TargetId) -> String {
    format!("{DISABLED}{target}")
}

fn new_event_id() -> Box<str> {
    format!("evt_{}", URL_SAFE_NO_PAD.encode(random_bytes::<16>())).into()
}

fn count_dead(dead: u64, dropped: u64) {
    if dead > 0 {
        metrics::counter!("fanfare_outbox_dead_letters_total").increment(dead);
    }
    if dropped > 0 {
        metrics::counter!("fanfare_outbox_dead_letters_dropped_total").increment(dropped);
    }
}

fn count_attempt(kind: &'static str, is_delivered: bool, is_retry: bool, events: u64) {
    let outcome = if is_delivered { "delivered" } else { "failed" };
    metrics::counter!("fanfare_integration_events_total", "kind" => kind, "outcome" => outcome)
        .increment(events);
    if is_retry {
        metrics::counter!("fanfare_integration_retries_total", "kind" => kind).increment(1);
    }
}
