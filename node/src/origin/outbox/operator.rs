//! For operators: what waits for each target, its dead letters, and sending these again.

use std::fmt;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::outbox::{EventPage, EventState, EventView, Retried, TargetState};
use serde_json::value::RawValue;

use super::depth::Depth;
use super::dispatch::Known;
use super::event::Event;
use super::store::{Dead, Tables};
use super::writer::Job;
use super::{Outbox, TargetId, keys};
use crate::origin::disk::queue::Weight;
use crate::origin::disk::tables::Table;
use crate::origin::history::StoreError;

/// Dead letters that one commit gives back.
const CHUNK: usize = 500;
/// Records of one page, about.
const PAGE_BYTES: usize = 1024 * 1024;

/// A page of a target's events.
#[derive(Debug, Clone)]
pub struct EventQuery {
    pub state: EventState,
    /// The end of the page before: what [`EventQuery::cursor`] reads.
    pub after: Option<Vec<u8>>,
    pub limit: usize,
}

impl EventQuery {
    /// None: it is no `next` of a page.
    pub fn cursor(text: &str) -> Option<Vec<u8>> {
        URL_SAFE_NO_PAD.decode(text).ok()
    }
}

/// Why dead letters are not sent again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RetryError {
    /// Their queue was deleted: they would be discarded.
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

impl Outbox {
    /// The outbox has events of the target, or it is disabled, or the directory or the store of queues has it.
    pub fn knows(&self, target: &TargetId) -> bool {
        let engine = &self.engine;
        engine.depths.of(target) != Depth::default()
            || engine.board.disabled(target).is_some()
            || matches!(engine.settings(target), Known::Settings(_))
    }

    /// All targets with events, and the disabled ones, in the order of their names.
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

    /// Events that wait come channel by channel, dead letters in the order in which they were written.
    pub async fn events(&self, target: &TargetId, query: EventQuery) -> Result<EventPage, StoreError> {
        let target = target.clone();
        self.engine.read(move |tables| page(tables, &target, &query)).await
    }

    /// Lets these dead letters of the target, or all it has now, wait for it again, behind what waits already; a disabled target is enabled. Stops
    /// where the outbox of the target is half full, or where the disk takes no more after some.
    ///
    /// # Errors
    /// None waits again: the queue was deleted, or the outbox cannot be read or written.
    pub async fn retry(&self, target: &TargetId, events: Option<Vec<u64>>) -> Result<Retried, RetryError> {
        if matches!(self.engine.settings(target), Known::Deleted) {
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
            match self.engine.give_back(target, chunk.to_vec()).await {
                Ok(events) => {
                    metrics::counter!("fanfare_outbox_retried_total").increment(events);
                    retried += events;
                }
                Err(error) if retried == 0 => return Err(error.into()),
                Err(error) => {
                    tracing::warn!(destination = %target, %error, "further dead letters are not sent again");
                    break;
                }
            }
        }
        let left = self.engine.depths.of(target).dead_events;
        tracing::info!(destination = %target, events = retried, left, "dead letters are sent again");
        Ok(Retried { events: retried, left })
    }

    /// The numbers of all its dead letters; their bytes are bounded, and so are these.
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

impl super::Engine {
    async fn give_back(&self, target: &TargetId, sequences: Vec<u64>) -> Result<u64, StoreError> {
        let (answer, answered) = tokio::sync::oneshot::channel();
        let weight = Weight { items: sequences.len().max(1), bytes: 0 };
        let job = Job::Retry { target: target.clone(), sequences, answer };
        if let Err((refused, _)) = self.queue.push_begun(weight, job) {
            return Err(refused.into());
        }
        answered.await.unwrap_or(Err(StoreError::ShutDown))
    }
}

fn page(tables: &Tables, target: &TargetId, query: &EventQuery) -> Result<EventPage, StoreError> {
    let table: &Table = match query.state {
        EventState::Waiting => &tables.waiting,
        EventState::Dead => &tables.dead,
    };
    let prefix = keys::target(target);
    let mut from = prefix.clone();
    if let Some(after) = &query.after {
        from.extend_from_slice(after);
        // The key that follows it.
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
        let dead = if query.state == EventState::Dead { Dead::decode(&value) } else { None };
        bytes += event.record.len();
        events.push(view(sequence, query.state, &event, dead)?);
    }
    Ok(EventPage { events, next: None })
}

fn view(
    sequence: u64,
    state: EventState,
    event: &Event,
    dead: Option<Dead>,
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
