//! Depth of the outbox for each target: waiting events and dead letters.

use std::collections::HashMap;

use parking_lot::Mutex;

use super::store::{DeadLetter, OutboxTables};
use super::{TargetId, keys};
use crate::origin::history::StoreError;

/// Events of one target: their numbers, and the bytes that are stored for them.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TargetDepth {
    pub events: u64,
    pub bytes: u64,
    pub dead_events: u64,
    pub dead_bytes: u64,
}

/// The depths of all targets with events.
#[derive(Debug, Default)]
pub(super) struct TargetDepths {
    targets: Mutex<HashMap<TargetId, TargetDepth>>,
}

/// The changes that a commit makes to one target.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct DepthChange {
    pub(super) events: i64,
    pub(super) bytes: i64,
    pub(super) dead_events: i64,
    pub(super) dead_bytes: i64,
}

impl TargetDepths {
    /// Counts the rows of the tables.
    pub(super) fn read(tables: &OutboxTables) -> Result<Self, StoreError> {
        let mut targets: HashMap<TargetId, TargetDepth> = HashMap::new();
        for row in tables.waiting.keyspace().iter() {
            let (key, value) = row.into_inner().map_err(StoreError::failed)?;
            if let Some((target, _, _)) = keys::parse_waiting(&key) {
                let depth = targets.entry(target).or_default();
                depth.events += 1;
                depth.bytes += value.first_chunk().copied().map_or(0, u32::from_be_bytes) as u64;
            }
        }
        for row in tables.dead.keyspace().iter() {
            let (key, value) = row.into_inner().map_err(StoreError::failed)?;
            if let Some((target, _)) = keys::parse_dead(&key) {
                let depth = targets.entry(target).or_default();
                depth.dead_events += 1;
                depth.dead_bytes += DeadLetter::decode(&value).map_or(0, |dead| u64::from(dead.bytes));
            }
        }
        Ok(Self { targets: Mutex::new(targets) })
    }

    pub(super) fn of(&self, target: &TargetId) -> TargetDepth {
        self.targets.lock().get(target).copied().unwrap_or_default()
    }

    pub(super) fn all(&self) -> Vec<(TargetId, TargetDepth)> {
        self.targets.lock().iter().map(|(target, depth)| (target.clone(), *depth)).collect()
    }

    pub(super) fn apply(&self, changes: &HashMap<TargetId, DepthChange>) {
        let mut targets = self.targets.lock();
        for (target, change) in changes {
            let depth = targets.entry(target.clone()).or_default();
            depth.events = depth.events.saturating_add_signed(change.events);
            depth.bytes = depth.bytes.saturating_add_signed(change.bytes);
            depth.dead_events = depth.dead_events.saturating_add_signed(change.dead_events);
            depth.dead_bytes = depth.dead_bytes.saturating_add_signed(change.dead_bytes);
            if *depth == TargetDepth::default() {
                targets.remove(target);
            }
        }
    }
}
