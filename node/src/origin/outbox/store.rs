//! The outbox's database: its tables, and the reads on them.

use std::path::Path;
use std::sync::Arc;

use fjall::{Database, PersistMode};

use super::event::OutboxEvent;
use super::{TargetId, keys};
use crate::origin::disk::engine;
use crate::origin::disk::tables::{self, Table, UNSEALED_BYTES_MAX};
use crate::origin::history::StoreError;

const FORMAT: &str = "format";
/// Version of the row format.
pub(super) const FORMAT_VERSION: &str = "1";
/// File by which the storage engine recognises its own folder.
pub(super) const MARKER: &str = "version";
/// Names of the tables, in the order of [`OutboxTables::all`].
pub(super) const NAMES: [&str; 5] = ["events", "waiting", "batches", "dead", "state"];
const SMALL_UNSEALED_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// The tables; `keys` describes their rows.
#[derive(Clone)]
pub(super) struct OutboxTables {
    pub(super) database: Database,
    /// [`OutboxEvent`]s by sequence, kept while one of their targets has a row of `waiting` or `dead`.
    pub(super) events: Table,
    /// Stored bytes of each event that a target has yet to receive.
    pub(super) waiting: Table,
    /// The batch of a channel that was sent to a target and is not settled yet.
    pub(super) batches: Table,
    /// Events that a target will not receive any more.
    pub(super) dead: Table,
    /// Format version, and the disabled targets.
    pub(super) state: Table,
}

/// A batch that was sent: each attempt sends the same events under the same id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct FixedBatch {
    pub(super) event_id: Box<str>,
    /// Sequence of its last event.
    pub(super) last: u64,
}

impl FixedBatch {
    pub(super) fn encode(&self) -> Vec<u8> {
        [&self.last.to_be_bytes()[..], self.event_id.as_bytes()].concat()
    }

    pub(super) fn decode(value: &[u8]) -> Option<Self> {
        let (last, id) = value.split_first_chunk::<8>()?;
        Some(Self { event_id: std::str::from_utf8(id).ok()?.into(), last: u64::from_be_bytes(*last) })
    }
}

/// A row of `dead`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DeadLetter {
    pub(super) at_ms: u64,
    pub(super) bytes: u32,
    pub(super) reason: Box<str>,
}

impl DeadLetter {
    pub(super) fn encode(&self) -> Vec<u8> {
        [&self.at_ms.to_be_bytes()[..], &self.bytes.to_be_bytes(), self.reason.as_bytes()].concat()
    }

    pub(super) fn decode(value: &[u8]) -> Option<Self> {
        let (at_ms, rest) = value.split_first_chunk::<8>()?;
        let (bytes, reason) = rest.split_first_chunk::<4>()?;
        let reason = std::str::from_utf8(reason).ok()?.into();
        Some(Self { at_ms: u64::from_be_bytes(*at_ms), bytes: u32::from_be_bytes(*bytes), reason })
    }
}

/// The oldest events of a channel that a target has yet to receive.
#[derive(Debug, Default)]
pub(super) struct EventBatch {
    pub(super) events: Vec<(u64, Arc<OutboxEvent>)>,
    /// Bytes of the events' records.
    pub(super) bytes: usize,
    /// The fixed batch, if it was sent before.
    pub(super) fixed: Option<FixedBatch>,
    /// Further events of the channel wait.
    pub(super) has_more: bool,
}

impl EventBatch {
    /// Sequence after the last event.
    pub(super) fn end(&self) -> u64 {
        self.events.last().map_or(0, |(last, _)| last + 1)
    }

    /// Adds the next event of the channel; returns false if it belongs to another batch.
    pub(super) fn push(
        &mut self,
        sequence: u64,
        event: &Arc<OutboxEvent>,
        target: &TargetId,
        bounds: BatchBounds,
    ) -> bool {
        let bytes = self.bytes + event.record.len();
        let is_full = match (&self.fixed, self.events.first()) {
            (Some(fixed), _) => sequence > fixed.last,
            (None, None) => false,
            (None, Some((_, first))) => {
                self.events.len() >= bounds.events
                    || bytes > bounds.bytes
                    || (event.source, &event.node_id) != (first.source, &first.node_id)
                    || event.rule_id(target) != first.rule_id(target)
            }
        };
        if is_full {
            self.has_more = true;
            return false;
        }
        self.bytes = bytes;
        self.events.push((sequence, Arc::clone(event)));
        true
    }
}

/// First waiting events of a channel.
#[derive(Debug)]
pub(super) struct PrefetchedEvents {
    pub(super) events: Vec<(u64, Arc<OutboxEvent>)>,
    /// Whether no further event waits.
    pub(super) is_complete: bool,
}

/// Bounds of a batch that is not fixed yet. A batch has at least one event.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchBounds {
    pub(super) events: usize,
    pub(super) bytes: usize,
}

impl OutboxTables {
    pub(super) fn open(folder: &Path) -> Result<Self, StoreError> {
        engine::listen();
        Self::try_open(folder).map_err(|error| {
            StoreError::failed(format_args!("{}: {}", folder.display(), engine::reason(&error)))
        })?
    }

    fn try_open(folder: &Path) -> fjall::Result<Result<Self, StoreError>> {
        let database = tables::database(folder).open()?;
        let table = |name, unsealed_max| Table::open(&database, name, unsealed_max);
        let state = table("state", SMALL_UNSEALED_BYTES_MAX)?;
        match state.keyspace().get(FORMAT)?.as_deref() {
            Some(known) if known == FORMAT_VERSION.as_bytes() => {}
            None => {
                state.keyspace().insert(FORMAT, FORMAT_VERSION)?;
                database.persist(PersistMode::SyncAll)?;
            }
            Some(other) => {
                let (found, folder) = (String::from_utf8_lossy(other), folder.display());
                return Ok(Err(StoreError::failed(format_args!(
                    "{folder} has the format {found}, which this version does not know"
                ))));
            }
        }
        let (events, waiting) = (table("events", UNSEALED_BYTES_MAX)?, table("waiting", UNSEALED_BYTES_MAX)?);
        let (batches, dead) =
            (table("batches", SMALL_UNSEALED_BYTES_MAX)?, table("dead", SMALL_UNSEALED_BYTES_MAX)?);
        Ok(Ok(Self { events, waiting, batches, dead, state, database }))
    }

    pub(super) fn all(&self) -> [Table; 5] {
        [&self.events, &self.waiting, &self.batches, &self.dead, &self.state].map(Clone::clone)
    }

    /// Disabled targets, with the hash of their settings.
    pub(super) fn disabled(&self) -> Result<Vec<(TargetId, u64)>, StoreError> {
        let mut disabled = Vec::new();
        for row in self.state.keyspace().prefix(super::DISABLED) {
            let (key, value) = row.into_inner().map_err(StoreError::failed)?;
            let target = std::str::from_utf8(&key).ok().and_then(|key| key.strip_prefix(super::DISABLED));
            let settings = value.first_chunk().copied().map(u64::from_be_bytes);
            disabled.extend(target.map(TargetId::from_text).zip(settings));
        }
        Ok(disabled)
    }

    pub(super) fn next_sequence(&self) -> Result<u64, StoreError> {
        let Some(last) = self.events.keyspace().last_key_value() else { return Ok(0) };
        let key = last.key().map_err(StoreError::failed)?;
        Ok(keys::parse_sequence(&key).map_or(0, |last| last + 1))
    }

    pub(super) fn event(&self, sequence: u64) -> Result<Option<OutboxEvent>, StoreError> {
        let found = self.events.keyspace().get(keys::sequence(sequence)).map_err(StoreError::failed)?;
        found.map(|value| OutboxEvent::decode(&value)).transpose()
    }

    pub(super) fn fixed(&self, target: &TargetId, channel: &str) -> Result<Option<FixedBatch>, StoreError> {
        let found =
            self.batches.keyspace().get(keys::channel(target, channel)).map_err(StoreError::failed)?;
        Ok(found.and_then(|value| FixedBatch::decode(&value)))
    }

    pub(super) fn is_waiting(
        &self,
        target: &TargetId,
        channel: &str,
        sequence: u64,
    ) -> Result<bool, StoreError> {
        self.waiting
            .keyspace()
            .contains_key(keys::waiting(target, channel, sequence))
            .map_err(StoreError::failed)
    }

    pub(super) fn is_dead(&self, target: &TargetId, sequence: u64) -> Result<bool, StoreError> {
        self.dead.keyspace().contains_key(keys::dead(target, sequence)).map_err(StoreError::failed)
    }

    /// Reads the next batch of the channel, whose events do not wait below `from`: the fixed one, else the oldest events of one source,
    /// node and rule.
    pub(super) fn batch(
        &self,
        target: &TargetId,
        (channel, from): (&str, u64),
        bounds: BatchBounds,
    ) -> Result<EventBatch, StoreError> {
        // A batch that was sent and is about to be settled no longer counts.
        let fixed = self.fixed(target, channel)?.filter(|fixed| fixed.last >= from);
        let mut batch = EventBatch { fixed, ..EventBatch::default() };
        let (first, last) = (keys::waiting(target, channel, from), keys::waiting(target, channel, u64::MAX));
        for row in self.waiting.keyspace().range(first..=last) {
            let key = row.key().map_err(StoreError::failed)?;
            let Some((_, _, sequence)) = keys::parse_waiting(&key) else { continue };
            let Some(event) = self.event(sequence)? else { continue };
            // A fixed batch without events is ignored.
            batch.fixed = batch.fixed.filter(|fixed| !batch.events.is_empty() || sequence <= fixed.last);
            if !batch.push(sequence, &Arc::new(event), target, bounds) {
                break;
            }
        }
        Ok(batch)
    }

    /// Reads the channel's first waiting events from a sequence on, within the bounds; `None` if a batch is fixed.
    pub(super) fn prefetch(
        &self,
        target: &TargetId,
        (channel, from): (&str, u64),
        bounds: BatchBounds,
    ) -> Result<Option<PrefetchedEvents>, StoreError> {
        if self.fixed(target, channel)?.is_some_and(|fixed| fixed.last >= from) {
            return Ok(None);
        }
        let (mut events, mut bytes) = (Vec::new(), 0);
        let (first, last) = (keys::waiting(target, channel, from), keys::waiting(target, channel, u64::MAX));
        for row in self.waiting.keyspace().range(first..=last) {
            if events.len() >= bounds.events || bytes >= bounds.bytes {
                return Ok(Some(PrefetchedEvents { events, is_complete: false }));
            }
            let key = row.key().map_err(StoreError::failed)?;
            let Some((_, _, sequence)) = keys::parse_waiting(&key) else { continue };
            let Some(event) = self.event(sequence)? else { continue };
            bytes += event.record.len();
            events.push((sequence, Arc::new(event)));
        }
        Ok(Some(PrefetchedEvents { events, is_complete: true }))
    }

    /// Searches the oldest waiting event of the target from a sequence on, in at most `steps` events. Returns the sequence from which to
    /// continue, and the time at which the event was written.
    pub(super) fn oldest(
        &self,
        target: &TargetId,
        from: u64,
        steps: usize,
    ) -> Result<(u64, Option<u64>), StoreError> {
        let mut next = from;
        for row in self.events.keyspace().range(keys::sequence(from)..).take(steps) {
            let (key, value) = row.into_inner().map_err(StoreError::failed)?;
            let Some(sequence) = keys::parse_sequence(&key) else { continue };
            let event = OutboxEvent::decode(&value)?;
            if event.addressee(target).is_some() && self.is_waiting(target, &event.channel, sequence)? {
                return Ok((sequence, Some(event.written_ms)));
            }
            next = sequence + 1;
        }
        Ok((next, None))
    }

    /// Reads at most `count` channels with events for the target, in the order of their keys after `after`.
    pub(super) fn channels(
        &self,
        target: &TargetId,
        after: Option<&str>,
        count: usize,
    ) -> Result<Vec<Box<str>>, StoreError> {
        let prefix = keys::target(target);
        let mut from =
            after.map_or_else(|| prefix.clone(), |channel| keys::waiting(target, channel, u64::MAX));
        let mut channels = Vec::new();
        while channels.len() < count {
            let Some(row) = self.waiting.keyspace().range(from..).next() else { break };
            let key = row.key().map_err(StoreError::failed)?;
            let Some((_, channel, _)) = keys::parse_waiting(&key).filter(|_| key.starts_with(&prefix)) else {
                break;
            };
            from = keys::waiting(target, channel, u64::MAX);
            channels.push(channel.into());
        }
        Ok(channels)
    }
}
