//! The memory budget of all replay buffers of a node, and the order of eviction.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};

use parking_lot::Mutex;

use super::channels::Channel;
use crate::model::Limits;

/// Cost of an empty replay buffer: the channel that it keeps alive, its name, and its entry in the eviction order.
pub(super) const BUFFER_BYTES: usize = 1024;

#[derive(Debug)]
pub(super) struct ReplayBudget {
    pub(super) buffer_bytes: usize,
    pub(super) buffers_bytes: usize,
    /// Retention of a message, and of a channel without subscribers, in milliseconds.
    pub(super) keep_ms: u64,
    held: AtomicUsize,
    buffers: AtomicUsize,
    /// Replay buffers with messages, by the number of the last attach to their channel or of an earlier one: the eviction that finds an
    /// earlier number puts the buffer back under the last. Locked when a buffer gets its first message, is dropped or evicted, after the
    /// lock of its channel or without it.
    order: Mutex<BTreeMap<u64, Weak<Channel>>>,
}

impl ReplayBudget {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            buffer_bytes: limits.ring_bytes,
            buffers_bytes: limits.rings_bytes,
            keep_ms: 2 * limits.resume_window_ms,
            held: AtomicUsize::new(0),
            buffers: AtomicUsize::new(0),
            order: Mutex::default(),
        })
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    pub(super) fn is_exceeded(&self) -> bool {
        self.held() > self.buffers_bytes
    }

    /// Memory that an eviction reduces the buffers to: 1/64 below the bound, so that not every further message evicts.
    pub(super) fn eviction_target(&self) -> usize {
        self.buffers_bytes - self.buffers_bytes / 64
    }

    /// Whether empty buffers alone take so much that channels have to be forgotten before another channel can have a buffer.
    pub(super) fn has_many_buffers(&self) -> bool {
        self.buffers.load(Ordering::Relaxed) * BUFFER_BYTES > self.buffers_bytes / 8 * 7
    }

    /// Memory that the buffers are reduced to when there are too many of them.
    pub(super) fn many_buffers_target(&self) -> usize {
        self.buffers_bytes / 4 * 3
    }

    /// Reserves the fixed cost of one more buffer; false when the fixed costs alone would exceed the bound.
    pub(super) fn reserve_buffer(&self) -> bool {
        let before = self.buffers.fetch_add(1, Ordering::Relaxed);
        let fits = (before + 1) * BUFFER_BYTES <= self.buffers_bytes;
        if fits {
            self.take(BUFFER_BYTES);
        } else {
            self.buffers.fetch_sub(1, Ordering::Relaxed);
        }
        fits
    }

    pub(super) fn release_buffer(&self, bytes: usize) {
        self.buffers.fetch_sub(1, Ordering::Relaxed);
        self.give_back(BUFFER_BYTES + bytes);
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

    /// Removes and returns the first live channel of the eviction order.
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
