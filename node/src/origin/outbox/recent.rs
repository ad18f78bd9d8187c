//! Cache of a channel's first waiting events, so that not every batch is read from the tables.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::TargetId;
use super::event::OutboxEvent;
use super::store::{BatchBounds, EventBatch};

/// Cached events of one channel.
const EVENTS_MAX: usize = 1_024;
/// Cached bytes over all channels of all targets. An event counts once for each of its targets.
const BYTES_MAX: usize = 16 * 1024 * 1024;
/// Approximate bytes of an event beside its record.
const EVENT_BYTES: usize = 256;

/// Byte budget that all channels share.
#[derive(Debug, Default)]
pub(super) struct EventCacheBudget {
    used: AtomicUsize,
}

impl EventCacheBudget {
    /// Returns whether at least half of the budget is free.
    pub(super) fn has_half(&self) -> bool {
        self.used.load(Ordering::Relaxed) < BYTES_MAX / 2
    }
}

/// First waiting events of one channel, in the order of their sequences and without a gap.
#[derive(Debug)]
pub(super) struct CachedEvents {
    events: VecDeque<(u64, Arc<OutboxEvent>)>,
    /// The cache has all waiting events of the channel.
    is_complete: bool,
    budget: Arc<EventCacheBudget>,
}

impl CachedEvents {
    /// Creates the cache of a channel without events.
    pub(super) fn new(budget: &Arc<EventCacheBudget>) -> Self {
        Self { events: VecDeque::new(), is_complete: true, budget: Arc::clone(budget) }
    }

    /// Creates a cache of events that were read from the tables; `is_complete`: no further event waits.
    pub(super) fn of(
        budget: &Arc<EventCacheBudget>,
        events: Vec<(u64, Arc<OutboxEvent>)>,
        is_complete: bool,
    ) -> Self {
        let mut recent = Self::new(budget);
        events.iter().for_each(|(sequence, event)| recent.push(*sequence, event));
        recent.is_complete &= is_complete;
        recent
    }

    /// Adds the last waiting event, if the budget has space and no event before it is missing.
    pub(super) fn push(&mut self, sequence: u64, event: &Arc<OutboxEvent>) {
        // The event may have been read from the tables before this call.
        let is_known = self.events.back().is_some_and(|(last, _)| *last >= sequence);
        if !self.is_complete || is_known {
            return;
        }
        let used = self.budget.used.fetch_add(bytes(event), Ordering::Relaxed);
        self.is_complete = used + bytes(event) <= BYTES_MAX && self.events.len() < EVENTS_MAX;
        if self.is_complete {
            self.events.push_back((sequence, Arc::clone(event)));
        } else {
            self.budget.used.fetch_sub(bytes(event), Ordering::Relaxed);
        }
    }

    /// Drops the events with lower sequences.
    pub(super) fn drop_below(&mut self, from: u64) {
        while let Some((_, event)) = self.events.pop_front_if(|(sequence, _)| *sequence < from) {
            self.budget.used.fetch_sub(bytes(&event), Ordering::Relaxed);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// Builds the next batch; `None` if it must be read from the tables.
    pub(super) fn batch(&self, target: &TargetId, bounds: BatchBounds) -> Option<EventBatch> {
        if !self.is_complete && self.events.len() < bounds.events {
            return None;
        }
        let mut batch = EventBatch { has_more: !self.is_complete, ..EventBatch::default() };
        for (sequence, event) in &self.events {
            if !batch.push(*sequence, event, target, bounds) {
                break;
            }
        }
        Some(batch)
    }
}

impl Drop for CachedEvents {
    fn drop(&mut self) {
        self.drop_below(u64::MAX);
    }
}

fn bytes(event: &OutboxEvent) -> usize {
    event.record.len() + EVENT_BYTES
}
