//! Interface of the links that carry items to peers.

use std::sync::Arc;
use std::time::Duration;

use super::{PeerAck, PeerAddr, PeerItem};

/// Items that a peer has not acknowledged yet, queued or sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerLag {
    pub node_id: Arc<str>,
    pub items: usize,
    pub bytes: usize,
    /// Time that the oldest of the items has waited.
    pub oldest: Duration,
}

impl PeerLag {
    /// No items wait for the peer.
    pub fn none(node_id: Arc<str>) -> Self {
        Self { node_id, items: 0, bytes: 0, oldest: Duration::ZERO }
    }

    /// Adds items that wait in another queue for the same peer.
    pub fn add(&mut self, items: usize, bytes: usize, oldest: Duration) {
        self.items += items;
        self.bytes += bytes;
        self.oldest = self.oldest.max(oldest);
    }
}

/// Links that carry items to peers: `GrpcPeerLinks`, or a simulation of them.
pub trait PeerLinks: Send + Sync + 'static {
    /// Sets the current members, without this node. New members are dialled. Links to members that are missing are dropped, with their
    /// queues. A node that restarted has another incarnation and is another member.
    fn set_peers(&self, peers: Vec<PeerAddr>);

    /// Number of peer streams to each peer.
    fn stream_count(&self) -> usize;

    /// Puts an item into the queue of a peer and returns at once. The remainder of `channel_hash` chooses the peer stream: all items of a
    /// channel take the same one.
    fn send(&self, to_incarnation: u64, channel_hash: u64, item: &PeerItem) -> PeerAck;

    /// True if all streams to the peer are open, so that an ack may be waited for.
    fn is_up(&self, incarnation: u64) -> bool;

    /// Unacknowledged items of each peer.
    fn lags(&self) -> Vec<PeerLag> {
        Vec::new()
    }
}
