//! The memory that all rings of a node share, and the order in which they give way.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::channels::Channel;
use crate::model::Limits;

/// What a ring costs before it holds anything: the channel that it keeps alive, with its name, and its place in the order.
pub(super) const RING_BYTES: usize = 1024;

#[derive(Debug)]
pub(super) struct Budget {
    pub(super) ring_bytes: usize,
    pub(super) rings_bytes: usize,
    /// How long a message is kept, and a channel that nobody is attached to.
    pub(super) keep_ms: u64,
    held: AtomicUsize,
    rings: AtomicUsize,
    /// Rings with messages, under the number of the last attach to their channel, or of an earlier one: who finds an earlier
    /// number puts the ring back under the last. Locked when a ring gets its first message, goes or has to give way, after the
    /// lock of its channel or without it.
    order: Mutex<BTreeMap<u64, Weak<Channel>>>,
}

impl Budget {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            ring_bytes: limits.ring_bytes,
            rings_bytes: limits.rings_bytes,
            keep_ms: 2 * limits.resume_window_ms,
            held: AtomicUsize::new(0),
            rings: AtomicUsize::new(0),
            order: Mutex::default(),
        })
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    pub(super) fn is_over(&self) -> bool {
        self.held() > self.rings_bytes
    }

    /// What the rings are brought down to when they are over their bound: some megabytes less, so that not every further
    /// message has to look for one that goes.
    pub(super) fn below(&self) -> usize {
        self.rings_bytes - self.rings_bytes / 64
    }

    /// So much is taken by rings themselves that channels have to be forgotten before no further one can have a ring.
    pub(super) fn are_many(&self) -> bool {
        self.rings.load(Ordering::Relaxed) * RING_BYTES > self.rings_bytes / 8 * 7
    }

    /// What the rings are brought down to when they are many.
    pub(super) fn enough(&self) -> usize {
        self.rings_bytes / 4 * 3
    }

    /// Counts one more ring; false when all of them alone would be over the bound.
    pub(super) fn take_ring(&self) -> bool {
        let before = self.rings.fetch_add(1, Ordering::Relaxed);
        let fits = (before + 1) * RING_BYTES <= self.rings_bytes;
        if fits {
            self.take(RING_BYTES);
        } else {
            self.rings.fetch_sub(1, Ordering::Relaxed);
        }
        fits
    }

    pub(super) fn give_ring_back(&self, bytes: usize) {
        self.rings.fetch_sub(1, Ordering::Relaxed);
        self.give_back(RING_BYTES + bytes);
    }

    pub(super) fn take(&self, bytes: usize) {
        self.held.fetch_add(bytes, Ordering::Relaxed);
    }

    pub(super) fn give_back(&self, bytes: usize) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
    }

    pub(super) fn list(&self, number: u64, channel: &Arc<Channel>) {
        self.order.lock().insert(number, Arc::downgrade(channel));
    }

    pub(super) fn unlist(&self, number: u64) {
        self.order.lock().remove(&number);
    }

    /// Takes out the first in the order, whose channel lives.
    pub(super) fn first(&self) -> Option<(u64, Arc<Channel>)> {
        let mut order = self.order.lock();
        while let Some((number, channel)) = order.pop_first() {
            if let Some(channel) = channel.upgrade() {
                return Some((number, channel));
            }
        }
        None
    }
}
