//! A queue that refuses what does not fit.

use std::collections::VecDeque;

use parking_lot::{Condvar, Mutex};

use crate::origin::history::StoreError;

/// What a queue holds at most; an item larger than `bytes` is taken when nothing else is held.
#[derive(Debug, Clone, Copy)]
pub(in crate::origin) struct Bounds {
    pub(in crate::origin) items: usize,
    pub(in crate::origin) bytes: usize,
}

/// What an entry counts as until it is released, which may be long after it was taken.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(in crate::origin) struct Weight {
    pub(in crate::origin) items: usize,
    pub(in crate::origin) bytes: usize,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::origin) enum Refused {
    Full,
    Closed,
}

impl From<Refused> for StoreError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Full => Self::Busy,
            Refused::Closed => Self::ShutDown,
        }
    }
}

pub(in crate::origin) struct Queue<T> {
    bounds: Bounds,
    state: Mutex<State<T>>,
    filled: Condvar,
}

struct State<T> {
    waiting: VecDeque<(Weight, T)>,
    held: Weight,
    closed: bool,
}

impl<T> State<T> {
    fn push(&mut self, weight: Weight, entry: T) {
        self.held.items += weight.items;
        self.held.bytes += weight.bytes;
        self.waiting.push_back((weight, entry));
    }
}

impl<T> Queue<T> {
    pub(in crate::origin) fn new(bounds: Bounds) -> Self {
        let state = State { waiting: VecDeque::new(), held: Weight::default(), closed: false };
        Self { bounds, state: Mutex::new(state), filled: Condvar::new() }
    }

    /// The policy: never waits; gives the entry back when it does not fit or the queue is closed.
    pub(in crate::origin) fn push(&self, weight: Weight, entry: T) -> Result<(), (Refused, T)> {
        let mut state = self.state.lock();
        if state.closed {
            return Err((Refused::Closed, entry));
        }
        let held = Weight { items: state.held.items + weight.items, bytes: state.held.bytes + weight.bytes };
        let is_over = held.items > self.bounds.items || held.bytes > self.bounds.bytes;
        if is_over && state.held != Weight::default() {
            return Err((Refused::Full, entry));
        }
        state.push(weight, entry);
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// For what was begun because there was room: refused only when the queue is closed. What goes over the bounds is what is
    /// begun at one moment, and one entry of each thread at most.
    pub(in crate::origin) fn push_begun(&self, weight: Weight, entry: T) -> Result<(), (Refused, T)> {
        let mut state = self.state.lock();
        if state.closed {
            return Err((Refused::Closed, entry));
        }
        state.push(weight, entry);
        drop(state);
        self.filled.notify_one();
        Ok(())
    }

    /// For what follows from an entry that is held, and so is bounded with it: put in also when full or closed.
    pub(in crate::origin) fn push_next(&self, entry: T) {
        self.state.lock().waiting.push_front((Weight::default(), entry));
        self.filled.notify_one();
    }

    /// What was pushed and is not released yet.
    pub(in crate::origin) fn held(&self) -> Weight {
        self.state.lock().held
    }

    /// Less than an eighth of the room is left.
    pub(in crate::origin) fn is_nearly_full(&self) -> bool {
        let held = self.held();
        held.items > self.bounds.items / 8 * 7 || held.bytes > self.bounds.bytes / 8 * 7
    }

    /// Waits for an entry; takes all that are there by then, up to `most`, and at least one. None: closed and empty.
    pub(in crate::origin) fn take(&self, most: Bounds, group: &mut Vec<T>) -> Option<Weight> {
        let mut state = self.state.lock();
        while state.waiting.is_empty() {
            if state.closed {
                return None;
            }
            self.filled.wait(&mut state);
        }
        let mut taken = Weight::default();
        while let Some((weight, _)) = state.waiting.front() {
            let sum = Weight { items: taken.items + weight.items, bytes: taken.bytes + weight.bytes };
            if !group.is_empty() && (sum.items > most.items || sum.bytes > most.bytes) {
                break;
            }
            taken = sum;
            group.extend(state.waiting.pop_front().map(|(_, entry)| entry));
        }
        Some(taken)
    }

    /// Waits for one entry. None: closed and empty.
    pub(in crate::origin) fn next(&self) -> Option<(Weight, T)> {
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

    /// Waits for one entry and releases it at once. None: closed and empty.
    pub(in crate::origin) fn take_one(&self) -> Option<T> {
        let (weight, entry) = self.next()?;
        self.release(weight);
        Some(entry)
    }

    pub(in crate::origin) fn release(&self, weight: Weight) {
        let mut state = self.state.lock();
        state.held.items -= weight.items;
        state.held.bytes -= weight.bytes;
    }

    /// Refuses further entries; those that wait are still taken.
    pub(in crate::origin) fn close(&self) {
        self.state.lock().closed = true;
        self.filled.notify_all();
    }
}
