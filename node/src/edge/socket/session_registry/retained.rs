//! Channels that lost sessions had access to.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Channels of a lost session. After resuming, the session may have any message that it had access to before.
#[derive(Debug)]
pub(super) struct RetainedChannels {
    pub(super) channels: Vec<RetainedChannel>,
    /// Number of retained channels in all records.
    pub(super) total: Arc<AtomicUsize>,
}

#[derive(Debug, Clone, Copy)]
pub(super) struct RetainedChannel {
    /// Channel number in the hub.
    pub(super) number: u64,
    /// The session had access to all messages after this sequence.
    pub(super) since: u64,
    pub(super) lost_ms: u64,
}

impl RetainedChannels {
    /// Adds channels of another socket of the session. Entries of known channels change only if the new ones are newer. Above the limit
    /// nothing is retained, and then the age of a message decides about access.
    pub(super) fn add(&mut self, channels: &[(u64, u64)], lost_ms: u64, is_newer: bool, total_max: usize) {
        for (number, since) in channels.iter().copied() {
            let known = self.channels.iter_mut().find(|held| held.number == number);
            match known {
                Some(held) if is_newer => (held.since, held.lost_ms) = (since, lost_ms),
                Some(_) => {}
                None if self.total.fetch_add(1, Ordering::Relaxed) < total_max => {
                    self.channels.reserve_exact(channels.len().saturating_sub(self.channels.len()));
                    self.channels.push(RetainedChannel { number, since, lost_ms });
                }
                None => drop(self.total.fetch_sub(1, Ordering::Relaxed)),
            }
        }
    }

    pub(super) fn forget_before(&mut self, lost_ms: u64) {
        let before = self.channels.len();
        self.channels.retain(|held| held.lost_ms >= lost_ms);
        self.total.fetch_sub(before - self.channels.len(), Ordering::Relaxed);
    }
}

impl Drop for RetainedChannels {
    fn drop(&mut self) {
        self.total.fetch_sub(self.channels.len(), Ordering::Relaxed);
    }
}
