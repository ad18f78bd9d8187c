//! The outbox: events that integrations have yet to receive, on the disk of the node at which they entered.
//!
//! A publish writes its events here before it is acknowledged. `writer` is the one thread that writes; `dispatch` sends for each target
//! what waits for it, and `board` holds which channels those are. A batch is fixed on the disk before its first attempt, so that each
//! attempt, also after a restart, sends the same bytes under the same id.

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

use super::disk::health::Health;
use super::disk::queue::{Bounds, Queue, Weight};
use super::history::{BoxFuture, Done, StoreError, record};
use super::queues::Catalog;
use super::targets::{Delivery, Endpoint, Outcome, TargetKind};
use crate::accounts::{Account, Accounts};
use crate::model::{
    AccountId, ChannelKey, Clock, Limits, PresenceEvent, Published, pattern_matches, random_bytes,
};
use crate::tasks::{OnStop, Tasks};
use crate::telemetry::{Repeats, StoreOperation, StoreTimes};
use board::Board;
pub use depth::Depth;
use depth::Depths;
pub use event::{Addressee, Event, Source, TargetId};
pub use operator::{EventQuery, RetryError};
pub use routes::Routes;
pub(super) use snapshot::{FORMAT, is_table, stopped_snapshot};
use store::{Fixed, Tables};
use writer::{Job, Settle, TargetBounds, Writer};

/// The bounds of the queue before the disk; beyond seven eighths of it a publish is refused.
const QUEUE: Bounds = Bounds { items: 131_072, bytes: 64 * 1024 * 1024 };
/// How often a stop looks whether all is sent.
const LOOK: Duration = Duration::from_millis(50);
/// Events that are looked at for the oldest one that waits for a target.
const OLDEST_STEPS: usize = 20_000;
/// A stop does not wait longer for targets that take nothing.
const NO_PROGRESS: Duration = Duration::from_secs(2);

/// Sends one batch to one target.
pub trait Transport: Send + Sync + 'static {
    fn send<'a>(&'a self, endpoint: &'a Endpoint, delivery: &'a Delivery) -> BoxFuture<'a, Outcome>;
}

/// The outbox of a node. Cheap to clone.
#[derive(Clone)]
pub struct Outbox {
    engine: Arc<Engine>,
    node_id: Arc<str>,
}

struct Engine {
    tables: Tables,
    queue: Arc<Queue<Job>>,
    status: Arc<Health>,
    depths: Arc<Depths>,
    board: Arc<Board>,
    accounts: Arc<Accounts>,
    /// None: no broker has queues.
    queues: Option<Catalog>,
    transport: Arc<dyn Transport>,
    /// Failures by target.
    told: Repeats,
    clock: Clock,
    bounds: TargetBounds,
    /// From the writing of an event on; an attempt that fails later is the last.
    retry_ms: u64,
    /// From where the oldest event of each target is looked for.
    oldest: Mutex<HashMap<TargetId, u64>>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
}

impl Outbox {
    /// Opens the folder, which is made where it is missing. Blocks on the disk.
    pub fn open(
        folder: &Path,
        limits: &Limits,
        clock: &Clock,
        node_id: &Arc<str>,
        (accounts, queues): (&Arc<Accounts>, Option<Catalog>),
        transport: Arc<dyn Transport>,
    ) -> Result<Self, StoreError> {
        let tables = Tables::open(folder)?;
        let depths = Arc::new(Depths::read(&tables)?);
        let board = Arc::new(Board::default());
        for (target, depth) in depths.all() {
            if depth.events > 0 {
                board.lineup(&target).set_overflowed();
            }
        }
        for (target, settings) in tables.disabled()? {
            tracing::warn!(destination = %target, "target is disabled, since it has answered 410: nothing is kept for it");
            board.lineup(&target).set_disabled(Some(settings));
        }
        let (queue, status) = (Arc::new(Queue::new(QUEUE)), Arc::new(Health::new(folder)));
        let bounds =
            TargetBounds { bytes: limits.integration_bytes, dead_bytes: limits.integration_dead_bytes };
        let writer = Writer {
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
        let engine = Engine {
            tables,
            queue,
            status,
            depths,
            board,
            accounts: Arc::clone(accounts),
            queues,
            transport,
            told: Repeats::default(),
            clock: clock.clone(),
            bounds,
            retry_ms: limits.integration_retry_ms,
            oldest: Mutex::default(),
            thread: Mutex::new(Some(thread.map_err(StoreError::failed)?)),
        };
        Ok(Self { engine: Arc::new(engine), node_id: Arc::clone(node_id) })
    }

    /// Begins to send what waits, and what comes.
    pub fn begin(&self, tasks: &Arc<Tasks>) {
        let (engine, own) = (Arc::clone(&self.engine), Arc::clone(tasks));
        tasks.spawn("outbox", OnStop::Cancel, async move {
            loop {
                for lineup in engine.board.not_begun() {
                    own.spawn("outbox target", OnStop::Cancel, dispatch::run(Arc::clone(&engine), lineup));
                }
                engine.board.has_new.notified().await;
            }
        });
    }

    /// True when more waits for the disk than is good: nothing is published for a target then.
    pub fn is_full(&self) -> bool {
        self.engine.queue.is_nearly_full()
    }

    /// `Failed` while the disk does not take what is written.
    pub fn health(&self) -> Result<(), StoreError> {
        self.engine.status.state()
    }

    /// The targets that events of the channel may be for.
    pub fn routes(&self, account: &Account, key: &ChannelKey, source: Source) -> Routes {
        let wanted = account.integrations.iter().filter(|integration| {
            let is_source = match source {
                Source::Message => integration.messages,
                Source::Presence => integration.presence,
                Source::Occupied | Source::Vacated => integration.occupancy,
            };
            is_source && integration.channels.iter().any(|pattern| pattern_matches(pattern, key.channel()))
        });
        let with_ids = wanted.map(|integration| (TargetId::new(&account.id, &integration.id), integration));
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
    pub fn put_messages(&self, published: &Published, routes: &Routes, done: Done) {
        let connection_id = published.connection_id.to_string();
        let events = published.messages.iter().filter_map(|message| {
            let targets = routes.of(message.name.as_deref());
            if targets.is_empty() {
                return None;
            }
            let mut text = Vec::new();
            record::write_message(&mut text, published, message, &connection_id);
            Some(Event {
                trace: routes.trace.clone(),
                ..self.event(&published.key, Source::Message, targets, text)
            })
        });
        self.put(events.collect(), done);
    }

    /// Writes the presence event for its targets; the same.
    pub fn put_presence(&self, event: &PresenceEvent, routes: &Routes, done: Done) {
        let targets = routes.of(Some(event.action.as_str()));
        if targets.is_empty() {
            return self.pass(done);
        }
        let mut text = Vec::new();
        record::write_presence_with(&mut text, event, Some(&event.id()));
        self.put(vec![self.event(&event.key, Source::Presence, targets, text)], done);
    }

    /// Writes for these targets that the channel has become occupied, or vacated; the same.
    pub fn put_occupancy(&self, key: &ChannelKey, source: Source, routes: &Routes, done: Done) {
        let (mut text, id) = (Vec::new(), URL_SAFE_NO_PAD.encode(random_bytes::<16>()));
        write_occupancy_record(&mut text, key.channel(), &format!("occ_{id}"), self.engine.clock.now_ms());
        self.put(vec![self.event(key, source, routes.of(None), text)], done);
    }

    /// Runs the callback behind those of all calls before.
    pub fn pass(&self, done: Done) {
        self.put(Vec::new(), done);
    }

    fn event(&self, key: &ChannelKey, source: Source, targets: Vec<Addressee>, record: Vec<u8>) -> Event {
        Event {
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

    fn put(&self, events: Vec<Event>, done: Done) {
        if let Err(error) = self.engine.status.usable() {
            return done(Err(error));
        }
        let bytes = events.iter().map(Event::encoded_bytes).sum();
        let weight = Weight { items: events.len().max(1), bytes };
        let pushed = self.engine.queue.push_begun(weight, Job::Put { events, done });
        if let Err((refused, Job::Put { done, .. })) = pushed {
            done(Err(refused.into()));
        }
    }

    pub fn depths(&self) -> Vec<(TargetId, Depth)> {
        self.engine.depths.all()
    }

    /// The kind of the target; none: an integration that the directory does not have.
    pub fn kind(&self, target: &TargetId) -> Option<TargetKind> {
        if target.queue_id().is_some() {
            return Some(TargetKind::Queue);
        }
        let (account, integration) = target.parts();
        let directory = self.engine.accounts.current();
        let account = directory.account(&AccountId::new(account))?;
        account.integrations.iter().find(|found| *found.id == *integration).map(|found| found.kind.into())
    }

    /// Sets the gauges of each kind: events and bytes that wait, dead letters, and the age of the oldest event that waits; and that of the
    /// events whose target is not there.
    pub async fn measure(&self) {
        let mut kinds = [(); TargetKind::ALL.len()].map(|()| (Depth::default(), 0_u64));
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

    async fn oldest_ms(&self, target: &TargetId, depth: Depth) -> Option<u64> {
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

    /// Waits until all events are sent, nothing was sent for a while, or the time is over; returns how many are left.
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

    /// Ends the writer, when all that was handed to it is written. Blocks.
    pub fn shutdown(&self) {
        self.engine.queue.close();
        let thread = self.engine.thread.lock().take();
        if thread.is_some_and(|thread| thread.join().is_err()) {
            tracing::error!("the thread of the outbox panicked");
        }
    }
}

impl Engine {
    /// Reads on a thread that may block.
    async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&Tables) -> Result<T, StoreError> + Send + 'static,
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
        fixed: Fixed,
    ) -> Result<(), StoreError> {
        let (target, channel) = (target.clone(), channel.into());
        self.job(1, |answer| Job::Fix { target, channel, first, fixed, answer }).await
    }

    async fn written(
        &self,
        settle: impl FnOnce(oneshot::Sender<Result<(), StoreError>>) -> Settle,
    ) -> Result<(), StoreError> {
        self.job(1, |answer| Job::Settle(settle(answer))).await
    }

    /// Writes that the target is disabled while it has these settings; none: that it is not.
    async fn disable(&self, lineup: &board::Lineup, settings: Option<u64>) -> Result<(), StoreError> {
        let target = lineup.target.clone();
        self.job(1, |answer| Job::Disable { target, settings, answer }).await?;
        lineup.set_disabled(settings);
        Ok(())
    }

    async fn job(
        &self,
        items: usize,
        job: impl FnOnce(oneshot::Sender<Result<(), StoreError>>) -> Job,
    ) -> Result<(), StoreError> {
        let (answer, answered) = oneshot::channel();
        let pushed = self.queue.push_begun(Weight { items, bytes: 0 }, job(answer));
        if let Err((refused, _)) = pushed {
            return Err(refused.into());
        }
        answered.await.unwrap_or(Err(StoreError::ShutDown))
    }
}

/// Before the name of a disabled target in the table `state`.
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
