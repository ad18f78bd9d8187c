//! A bounded queue that refuses entries which do not fit.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

use crate::origin::history::StoreError;

/// Bounds of a queue. An item larger than `bytes` is accepted if the queue is empty and nothing is outstanding.
#[derive(Debug, Clone, Copy)]
pub(in crate::origin) struct DiskQueueBounds {
    pub(in crate::origin) items: usize,
    pub(in crate::origin) bytes: usize,
}

/// Weight of an entry. It counts until it is released, which may be long after the entry was taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::origin) struct QueueWeight {
    pub(in crate::origin) items: usize,
    pub(in crate::origin) bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::origin) enum PushRefusal {
    Full,
    Closed,
}

impl From<PushRefusal> for StoreError {
    fn from(refused: PushRefusal) -> Self {
        match refused {
            PushRefusal::Full => Self::Busy,
            PushRefusal::Closed => Self::ShutDown,
        }
    }
}

pub(in crate::origin) struct DiskQueue<T> {
    bounds: DiskQueueBounds,
    state: Mutex<DiskQueueState<T>>,
    filled: Condvar,
}

struct DiskQueueState<T> {
    waiting: VecDeque<(QueueWeight, T)>,
    outstanding: QueueWeight,
    closed: bool,
}

impl<T> DiskQueueState<T> {
    fn push(&mut self, weight: QueueWeight, entry: T) {
        self.outstanding.items += weight.items;
        self.outstanding.bytes += weight.bytes;
        self.waiting.push_back((weight, entry));
    }
}

impl<T> DiskQueue<T> {
    pub(in crate::origin) fn new(bounds: DiskQueueBounds) -> Self {
        let state =
            DiskQueueState { waiting: VecDeque::new(), outstanding: QueueWeight::default(), closed: false };
        Self { bounds, state: Mutex::new(state), filled: Condvar::new() }
    }

    /// Adds an entry without waiting. Returns the entry if it does not fit or the queue is closed.
    pub(in crate::origin) fn push(&self, weight: QueueWeight, entry: T) -> Result<(), (PushRefusal, T)> {
        let mut state = self.state.lock();
        if state.closed {
            return Err((PushRefusal::Closed, entry));
        }
        let held = QueueWeight {
            items: state.outstanding.items + weight.items,
            bytes: state.outstanding.bytes + weight.bytes,
        };
        let is_exceeded = held.items > self.bounds.items || held.bytes > self.bounds.bytes;
        if is_exceeded && state.outstanding != QueueWeight::default() {
            return Err((PushRefusal::Full, entry));
        }
        state.push(weight, entry);
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// Adds an entry that was admitted while the queue had space; refuses it only if the queue is closed. The bounds are exceeded at most
    /// by the entries that are admitted at one moment, one for each thread.
    pub(in crate::origin) fn push_admitted(
        &self,
        weight: QueueWeight,
        entry: T,
    ) -> Result<(), (PushRefusal, T)> {
        let mut state = self.state.lock();
        if state.closed {
            return Err((PushRefusal::Closed, entry));
        }
        state.push(weight, entry);
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// Adds an entry that follows from an outstanding one, also if the queue is full or closed. The outstanding entry bounds it.
    pub(in crate::origin) fn push_next(&self, entry: T) {
        self.state.lock().waiting.push_front((QueueWeight::default(), entry));
        self.filled.notify_one();
    }

    /// Weight of the entries that were pushed and are not released yet.
    pub(in crate::origin) fn outstanding(&self) -> QueueWeight {
        self.state.lock().outstanding
    }

    /// Returns whether more than seven eighths of a bound are used.
    pub(in crate::origin) fn is_nearly_full(&self) -> bool {
        let held = self.outstanding();
        held.items > self.bounds.items / 8 * 7 || held.bytes > self.bounds.bytes / 8 * 7
    }

    /// Waits for an entry and takes all available ones, up to `most` but at least one. `None` if the queue is closed and empty.
    pub(in crate::origin) fn take_group(
        &self,
        most: DiskQueueBounds,
        group: &mut Vec<T>,
    ) -> Option<QueueWeight> {
        let mut state = self.state.lock();
        while state.waiting.is_empty() {
            if state.closed {
                return None;
            }
            self.filled.wait(&mut state);
        }
        let mut taken = QueueWeight::default();
        while let Some((weight, _)) = state.waiting.front() {
            let sum = QueueWeight { items: taken.items + weight.items, bytes: taken.bytes + weight.bytes };
            if !group.is_empty() && (sum.items > most.items || sum.bytes > most.bytes) {
                break;
            }
            taken = sum;
            group.extend(state.waiting.pop_front().map(|(_, entry)| entry));
        }
        Some(taken)
    }

    /// Waits for one entry; `None` if the queue is closed and empty.
    pub(in crate::origin) fn next(&self) -> Option<(QueueWeight, T)> {
        let mut state = self.state.lock();
        loop {
            if let Some(next) = state.waiting.pop_front() {
                return Some(next);
            }
            if state.closed {
                return None;
            }
            self.filled.wait(&mut state);
        }
    }

    /// Waits for one entry and releases its weight at once; `None` if the queue is closed and empty.
    pub(in crate::origin) fn take_one(&self) -> Option<T> {
        let (weight, entry) = self.next()?;
        self.release(weight);
        Some(entry)
    }

    pub(in crate::origin) fn release(&self, weight: QueueWeight) {
        let mut state = self.state.lock();
        state.outstanding.items -= weight.items;
        state.outstanding.bytes -= weight.bytes;
    }

    /// Refuses further entries; entries that wait can still be taken.
    pub(in crate::origin) fn close(&self) {
        self.state.lock().closed = true;
        self.filled.notify_all();
    }
}
