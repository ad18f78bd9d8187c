//! What carries items to other nodes.

use std::sync::Arc;
use std::time::Duration;

use super::{Item, PeerAddr, Receipt};

/// What a peer has not acknowledged yet, waiting or sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerLag {
    pub node_id: Arc<str>,
    pub items: usize,
    pub bytes: usize,
    /// How long the oldest of it has waited.
    pub oldest: Duration,
}

impl PeerLag {
    /// Nothing waits for the peer.
    pub fn none(node_id: Arc<str>) -> Self {
        Self { node_id, items: 0, bytes: 0, oldest: Duration::ZERO }
    }

    /// Adds what waits elsewhere for the same peer.
    pub fn add(&mut self, items: usize, bytes: usize, oldest: Duration) {
        self.items += items;
        self.bytes += bytes;
        self.oldest = self.oldest.max(oldest);
    }
}

/// What carries items to other nodes: [`Links`], or a simulation of them.
pub trait PeerLinks: Send + Sync + 'static {
    /// The members as they are now, without this node. Who is new is linked to; who is missing is left, with what
    /// waits for it. A node that has started again has another incarnation and is another member.
    fn set_peers(&self, peers: Vec<PeerAddr>);

    /// How many lanes there are to each peer.
    fn lanes(&self) -> usize;

    /// Puts an item into the queue of a peer and returns at once. `channel_hash` chooses the lane, by its remainder: the
    /// same for all of a channel.
    fn send(&self, to_incarnation: u64, channel_hash: u64, item: &Item) -> Receipt;

    /// Whether all lanes to the peer are open: a receipt may be waited for.
    fn is_up(&self, incarnation: u64) -> bool;

    /// What each peer has not acknowledged.
    fn lags(&self) -> Vec<PeerLag> {
        Vec::new()
    }
}
