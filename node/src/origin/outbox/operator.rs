//! Operator calls: waiting events of each target, its dead letters, and their retry.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::outbox::{EventPage, EventState, EventView, Retried, TargetState};
use serde_json::value::RawValue;

use super::depth::TargetDepth;
use super::dispatch::TargetLookup;
use super::event::OutboxEvent;
use super::store::{DeadLetter, OutboxTables};
use super::writer::OutboxJob;
use super::{EventOutbox, TargetId, keys};
use crate::origin::disk::queue::QueueWeight;
use crate::origin::disk::tables::Table;
use crate::origin::history::StoreError;

/// Dead letters that one commit requeues.
const CHUNK: usize = 500;
/// Approximate bytes of records on one page.
const PAGE_BYTES: usize = 1024 * 1024;

/// A query for a page of a target's events.
#[derive(Debug, Clone)]
pub struct EventQuery {
    pub state: EventState,
    /// End of the page before, as [`EventQuery::cursor`] returns it.
    pub after: Option<Vec<u8>>,
    pub limit: usize,
}

impl EventQuery {
    /// Parses the `next` of a page; `None` if the text is none.
    pub fn cursor(text: &str) -> Option<Vec<u8>> {
        URL_SAFE_NO_PAD.decode(text).ok()
    }
}

/// Reason why dead letters are not requeued.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RetryError {
    /// The queue was deleted, so its events would be discarded.
    Deleted,
    Store(StoreError),
}

impl fmt::Display for RetryError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Deleted => {
                f.write_str("the queue was deleted, and its dead letters have no target any more")
            }
            Self::Store(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for RetryError {}

impl From<StoreError> for RetryError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl EventOutbox {
    /// Returns whether the outbox has events of the target, or it is disabled, or the directory or the store of queues has it.
    pub fn knows(&self, target: &TargetId) -> bool {
        let engine = &self.engine;
        engine.depths.of(target) != TargetDepth::default()
            || engine.board.disabled(target).is_some()
            || matches!(engine.settings(target), TargetLookup::Settings(_))
    }

    /// Returns all targets with events, and the disabled ones, in the order of their names.
    pub async fn targets(&self) -> Vec<TargetState> {
        let mut targets = Vec::new();
        let mut depths = self.depths();
        let disabled = self.engine.board.all_disabled();
        for target in &disabled {
            if !depths.iter().any(|(other, _)| other == target) {
                depths.push((target.clone(), self.engine.depths.of(target)));
            }
        }
        depths.sort_by(|(one, _), (other, _)| one.cmp(other));
        for (target, depth) in depths {
            let oldest_ms = self.oldest_ms(&target, depth).await;
            targets.push(TargetState {
                kind: self
                    .kind(&target)
                    .filter(|_| !self.engine.is_absent(&target))
                    .map(|kind| kind.as_str().to_owned()),
                last_failure: self.engine.board.failure(&target).map(Into::into),
                target: target.to_string(),
                waiting_events: depth.events,
                waiting_bytes: depth.bytes,
                oldest_ms,
                dead_events: depth.dead_events,
                dead_bytes: depth.dead_bytes,
                disabled: disabled.contains(&target),
            });
        }
        targets
    }

    /// Reads a page of events: waiting ones channel by channel, dead letters in the order in which they were written.
    pub async fn events(&self, target: &TargetId, query: EventQuery) -> Result<EventPage, StoreError> {
        let target = target.clone();
        self.engine.read(move |tables| page(tables, &target, &query)).await
    }

    /// Requeues these dead letters of the target, or all it has now, after the events that wait already; also enables a disabled target.
    /// Stops once the outbox of the target is half full, or the disk refuses further writes.
    ///
    /// # Errors
    /// No dead letter was requeued: the queue was deleted, or the outbox cannot be read or written.
    pub async fn retry(&self, target: &TargetId, events: Option<Vec<u64>>) -> Result<Retried, RetryError> {
        if matches!(self.engine.settings(target), TargetLookup::Deleted) {
            return Err(RetryError::Deleted);
        }
        if self.engine.board.disabled(target).is_some() {
            self.engine.disable(&self.engine.board.lineup(target), None).await?;
        }
        let events = match events {
            Some(events) => events,
            None => self.dead_events(target).await?,
        };
        let mut retried = 0;
        for chunk in events.chunks(CHUNK) {
            if self.engine.depths.of(target).bytes > self.engine.bounds.bytes / 2 {
                break;
            }
            match self.engine.requeue(target, chunk.to_vec()).await {
                Ok(events) => {
                    metrics::counter!("fanfare_outbox_retried_total").increment(events);
                    retried += events;
                }
                Err(error) if retried == 0 => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(destination = %target, %error, "dead letter retry stopped early");
                    break;
                }
            }
        }
        let left = self.engine.depths.of(target).dead_events;
        tracing::info!(destination = %target, events = retried, left, "dead letters moved back to the outbox");
        Ok(Retried { events: retried, left })
    }

    /// Sequences of all dead letters of the target. Their bytes are bounded, and so is their number.
    async fn dead_events(&self, target: &TargetId) -> Result<Vec<u64>, StoreError> {
        let target = target.clone();
        self.engine
            .read(move |tables| {
                let rows = tables.dead.keyspace().prefix(keys::target(&target));
                let keys = rows.map(|row| row.key().map_err(StoreError::failed));
                keys.filter_map(|key| key.map(|key| Some(keys::parse_dead(&key)?.1)).transpose()).collect()
            })
            .await
    }
}

impl super::OutboxEngine {
    async fn requeue(&self, target: &TargetId, sequences: Vec<u64>) -> Result<u64, StoreError> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let weight = QueueWeight { items: sequences.len().max(1), bytes: 0 };
        let job = OutboxJob::Retry { target: target.clone(), sequences, answer };
        if let Err((refused, _)) = self.queue.push_admitted(weight, job) {
            return Err(refused.into());
        }
        answered.await.unwrap_or(Err(StoreError::ShutDown))
    }
}

fn page(tables: &OutboxTables, target: &TargetId, query: &EventQuery) -> Result<EventPage, StoreError> {
    let table: &Table = match query.state {
        EventState::Waiting => &tables.waiting,
        EventState::Dead => &tables.dead,
    };
    let prefix = keys::target(target);
    let mut from = prefix.clone();
    if let Some(after) = &query.after {
        from.extend_from_slice(after);
        // Continues at the next possible key.
        from.push(0);
    }
    let (mut events, mut bytes) = (Vec::new(), 0);
    let mut last = Vec::new();
    for row in table.keyspace().range(from..) {
        let (key, value) = row.into_inner().map_err(StoreError::failed)?;
        let Some(rest) = key.strip_prefix(&*prefix) else { break };
        if events.len() >= query.limit || bytes >= PAGE_BYTES {
            let next = Some(URL_SAFE_NO_PAD.encode(&last));
            return Ok(EventPage { events, next });
        }
        last = rest.to_vec();
        let Some(sequence) = rest.last_chunk::<8>().copied().map(u64::from_be_bytes) else { continue };
        let Some(event) = tables.event(sequence)? else { continue };
        let dead = if query.state == EventState::Dead { DeadLetter::decode(&value) } else { None };
        bytes += event.record.len();
        events.push(view(sequence, query.state, &event, dead)?);
    }
    Ok(EventPage { events, next: None })
}

fn view(
    sequence: u64,
    state: EventState,
    event: &OutboxEvent,
    dead: Option<DeadLetter>,
) -> Result<EventView, StoreError> {
    let text = String::from_utf8(event.record.to_vec()).map_err(StoreError::failed)?;
    Ok(EventView {
        event: sequence,
        state,
        channel: event.channel.to_string(),
        source: event.source.as_str().to_owned(),
        written_ms: event.written_ms,
        dead_ms: dead.as_ref().map(|dead| dead.at_ms),
        reason: dead.map(|dead| dead.reason.into()),
        item: RawValue::from_string(text).map_err(StoreError::failed)?,
    })
}
