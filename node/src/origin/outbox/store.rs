//! The outbox's database: its tables, and what is read of them.

use std::path::Path;
use std::sync::Arc;

use fjall::{Database, PersistMode};

use super::event::Event;
use super::{TargetId, keys};
use crate::origin::disk::engine;
use crate::origin::disk::tables::{self, Table, UNSEALED_BYTES_MAX};
use crate::origin::history::StoreError;

const FORMAT: &str = "format";
/// The version of the rows.
pub(super) const FORMAT_VERSION: &str = "1";
/// The file by which the storage engine knows its own folder.
pub(super) const MARKER: &str = "version";
/// As [`Tables::all`] gives them.
pub(super) const NAMES: [&str; 5] = ["events", "waiting", "batches", "dead", "state"];
const SMALL_UNSEALED_BYTES_MAX: u64 = 4 * 1024 * 1024;

/// The tables; `keys` describes their rows.
#[derive(Clone)]
pub(super) struct Tables {
    pub(super) database: Database,
    /// [`Event`]s by their sequence, for as long as one of their targets has a row of `waiting` or `dead`.
    pub(super) events: Table,
    /// The bytes of each event that a target has yet to receive.
    pub(super) waiting: Table,
    /// The batch of a channel that was sent to a target and is not settled.
    pub(super) batches: Table,
    /// Events that a target will not receive any more.
    pub(super) dead: Table,
    /// The version of the format, and which targets are disabled.
    pub(super) state: Table,
}

/// The events of a batch that was sent: each attempt sends the same ones under the same id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Fixed {
    pub(super) event_id: Box<str>,
    /// The sequence of its last event.
    pub(super) last: u64,
}

impl Fixed {
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
pub(super) struct Dead {
    pub(super) at_ms: u64,
    pub(super) bytes: u32,
    pub(super) reason: Box<str>,
}

impl Dead {
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
pub(super) struct Batch {
    pub(super) events: Vec<(u64, Arc<Event>)>,
    /// The bytes of their records.
    pub(super) bytes: usize,
    /// The batch was sent before.
    pub(super) fixed: Option<Fixed>,
    /// Further events of the channel wait.
    pub(super) has_more: bool,
}

impl Batch {
    /// The sequence behind its last event.
    pub(super) fn end(&self) -> u64 {
        self.events.last().map_or(0, |(last, _)| last + 1)
    }

    /// Adds the next event of the channel. False: it belongs to a further batch.
    pub(super) fn take(
        &mut self,
        sequence: u64,
        event: &Arc<Event>,
        target: &TargetId,
        bounds: BatchBounds,
    ) -> bool {
        let bytes = self.bytes + event.record.len();
        let is_over = match (&self.fixed, self.events.first()) {
            (Some(fixed), _) => sequence > fixed.last,
            (None, None) => false,
            (None, Some((_, first))) => {
                self.events.len() >= bounds.events
                    || bytes > bounds.bytes
                    || (event.source, &event.node_id) != (first.source, &first.node_id)
                    || event.rule_id(target) != first.rule_id(target)
            }
        };
        if is_over {
            self.has_more = true;
            return false;
        }
        self.bytes = bytes;
        self.events.push((sequence, Arc::clone(event)));
        true
    }
}

/// The first events of a channel that wait.
#[derive(Debug)]
pub(super) struct Ahead {
    pub(super) events: Vec<(u64, Arc<Event>)>,
    /// There is no further one.
    pub(super) is_whole: bool,
}

/// Bounds of a batch that is not fixed yet; it has one event at least.
#[derive(Debug, Clone, Copy)]
pub(super) struct BatchBounds {
    pub(super) events: usize,
    pub(super) bytes: usize,
}

impl Tables {
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

    /// The disabled targets, and their settings.
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

    pub(super) fn event(&self, sequence: u64) -> Result<Option<Event>, StoreError> {
        let found = self.events.keyspace().get(keys::sequence(sequence)).map_err(StoreError::failed)?;
        found.map(|value| Event::decode(&value)).transpose()
    }

    pub(super) fn fixed(&self, target: &TargetId, channel: &str) -> Result<Option<Fixed>, StoreError> {
        let found =
            self.batches.keyspace().get(keys::channel(target, channel)).map_err(StoreError::failed)?;
        Ok(found.and_then(|value| Fixed::decode(&value)))
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

    /// The batch of the channel that is to be sent next, of which no event waits below `from`: the fixed one, else the oldest events of one source, node and rule.
    pub(super) fn batch(
        &self,
        target: &TargetId,
        (channel, from): (&str, u64),
        bounds: BatchBounds,
    ) -> Result<Batch, StoreError> {
        // One that was sent and is about to be settled is none any more.
        let fixed = self.fixed(target, channel)?.filter(|fixed| fixed.last >= from);
        let mut batch = Batch { fixed, ..Batch::default() };
        let (first, last) = (keys::waiting(target, channel, from), keys::waiting(target, channel, u64::MAX));
        for row in self.waiting.keyspace().range(first..=last) {
            let key = row.key().map_err(StoreError::failed)?;
            let Some((_, _, sequence)) = keys::parse_waiting(&key) else { continue };
            let Some(event) = self.event(sequence)? else { continue };
            // A row that outlived its events fixes nothing.
            batch.fixed = batch.fixed.filter(|fixed| !batch.events.is_empty() || sequence <= fixed.last);
            if !batch.take(sequence, &Arc::new(event), target, bounds) {
                break;
            }
        }
        Ok(batch)
    }

    /// The first events of the channel that wait from a sequence on, within the bounds. None: a batch is fixed.
    pub(super) fn ahead(
        &self,
        target: &TargetId,
        (channel, from): (&str, u64),
        bounds: BatchBounds,
    ) -> Result<Option<Ahead>, StoreError> {
        if self.fixed(target, channel)?.is_some_and(|fixed| fixed.last >= from) {
            return Ok(None);
        }
        let (mut events, mut bytes) = (Vec::new(), 0);
        let (first, last) = (keys::waiting(target, channel, from), keys::waiting(target, channel, u64::MAX));
        for row in self.waiting.keyspace().range(first..=last) {
            if events.len() >= bounds.events || bytes >= bounds.bytes {
                return Ok(Some(Ahead { events, is_whole: false }));
            }
            let key = row.key().map_err(StoreError::failed)?;
            let Some((_, _, sequence)) = keys::parse_waiting(&key) else { continue };
            let Some(event) = self.event(sequence)? else { continue };
            bytes += event.record.len();
            events.push((sequence, Arc::new(event)));
        }
        Ok(Some(Ahead { events, is_whole: true }))
    }

    /// When the oldest event for the target was written, looked for from a sequence on; and from where to look the next time. At most
    /// `steps` events are looked at.
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
            let event = Event::decode(&value)?;
            if event.addressee(target).is_some() && self.is_waiting(target, &event.channel, sequence)? {
                return Ok((sequence, Some(event.written_ms)));
            }
            next = sequence + 1;
        }
        Ok((next, None))
    }

    /// Channels with events for the target, in the order of their keys behind `after`, and at most `count` of them.
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
