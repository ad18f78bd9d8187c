//! The first events of a channel that wait for a target, in memory: what they hold is not read from the tables for each batch.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::TargetId;
use super::event::Event;
use super::store::{Batch, BatchBounds};

/// Of one channel.
const EVENTS_MAX: usize = 1_024;
/// Of all channels of all targets. An event counts once for each of its targets.
const BYTES_MAX: usize = 16 * 1024 * 1024;
/// About the bytes of an event beside its record.
const EVENT_BYTES: usize = 256;

/// The bytes that all channels share.
#[derive(Debug, Default)]
pub(super) struct Room {
    used: AtomicUsize,
}

impl Room {
    /// Half of it is left.
    pub(super) fn has_half(&self) -> bool {
        self.used.load(Ordering::Relaxed) < BYTES_MAX / 2
    }
}

/// The first events of one channel that wait, in the order of their sequences and without a gap.
#[derive(Debug)]
pub(super) struct Recent {
    events: VecDeque<(u64, Arc<Event>)>,
    /// No further event waits.
    is_whole: bool,
    room: Arc<Room>,
}

impl Recent {
    /// Of a channel without an event.
    pub(super) fn new(room: &Arc<Room>) -> Self {
        Self { events: VecDeque::new(), is_whole: true, room: Arc::clone(room) }
    }

    /// Events that were read from the tables; `is_whole`: no further one waits.
    pub(super) fn of(room: &Arc<Room>, events: Vec<(u64, Arc<Event>)>, is_whole: bool) -> Self {
        let mut recent = Self::new(room);
        events.iter().for_each(|(sequence, event)| recent.push(*sequence, event));
        recent.is_whole &= is_whole;
        recent
    }

    /// Adds the last event that waits, where there is room for it and nothing lacks before it.
    pub(super) fn push(&mut self, sequence: u64, event: &Arc<Event>) {
        // It was read from the tables before word of it came.
        let is_known = self.events.back().is_some_and(|(last, _)| *last >= sequence);
        if !self.is_whole || is_known {
            return;
        }
        let used = self.room.used.fetch_add(bytes(event), Ordering::Relaxed);
        self.is_whole = used + bytes(event) <= BYTES_MAX && self.events.len() < EVENTS_MAX;
        if self.is_whole {
            self.events.push_back((sequence, Arc::clone(event)));
        } else {
            self.room.used.fetch_sub(bytes(event), Ordering::Relaxed);
        }
    }

    /// Forgets those with lower sequences.
    pub(super) fn pass(&mut self, from: u64) {
        while let Some((_, event)) = self.events.pop_front_if(|(sequence, _)| *sequence < from) {
            self.room.used.fetch_sub(bytes(&event), Ordering::Relaxed);
        }
    }

    pub(super) fn len(&self) -> usize {
        self.events.len()
    }

    /// The batch that is to be sent next; none: it is to be read from the tables.
    pub(super) fn batch(&self, target: &TargetId, bounds: BatchBounds) -> Option<Batch> {
        if !self.is_whole && self.events.len() < bounds.events {
            return None;
        }
        let mut batch = Batch { has_more: !self.is_whole, ..Batch::default() };
        for (sequence, event) in &self.events {
            if !batch.take(*sequence, event, target, bounds) {
                break;
            }
        }
        Some(batch)
    }
}

impl Drop for Recent {
    fn drop(&mut self) {
        self.pass(u64::MAX);
    }
}

fn bytes(event: &Event) -> usize {
    event.record.len() + EVENT_BYTES
}
