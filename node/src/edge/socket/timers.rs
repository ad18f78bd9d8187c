//! Timers of a shard's connections.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// Heap with one valid entry per connection; outdated entries are skipped when they expire.
#[derive(Debug, Default)]
pub(super) struct Timers {
    heap: BinaryHeap<Reverse<(u64, u32)>>,
}

impl Timers {
    pub(super) fn arm(&mut self, due_ms: u64, slot: u32) {
        self.heap.push(Reverse((due_ms, slot)));
    }

    pub(super) fn next_ms(&self) -> Option<u64> {
        self.heap.peek().map(|Reverse((due_ms, _))| *due_ms)
    }

    pub(super) fn pop_due(&mut self, now_ms: u64) -> Option<(u64, u32)> {
        if self.next_ms()? > now_ms {
            return None;
        }
        self.heap.pop().map(|Reverse(entry)| entry)
    }
}
