//! The events of a channel that wait for a target, in memory as long as all of them are: then nothing is read from the tables for a batch.

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

/// All events of one channel that wait, in the order of their sequences.
#[derive(Debug)]
pub(super) struct Recent {
    events: VecDeque<(u64, Arc<Event>)>,
    room: Arc<Room>,
}

impl Recent {
    pub(super) fn new(room: &Arc<Room>) -> Self {
        Self { events: VecDeque::new(), room: Arc::clone(room) }
    }

    /// False: there is no room for it, and this has not all events any more.
    pub(super) fn push(&mut self, sequence: u64, event: &Arc<Event>) -> bool {
        let used = self.room.used.fetch_add(bytes(event), Ordering::Relaxed);
        let has_room = used + bytes(event) <= BYTES_MAX && self.events.len() < EVENTS_MAX;
        self.events.push_back((sequence, Arc::clone(event)));
        has_room
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

    /// The batch that is to be sent next.
    pub(super) fn batch(&self, target: &TargetId, bounds: BatchBounds) -> Batch {
        let mut batch = Batch::default();
        for (sequence, event) in &self.events {
            if !batch.take(*sequence, event, target, bounds) {
                break;
            }
        }
        batch
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
