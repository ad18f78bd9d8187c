//! Session ownership: the node and socket that serve a connection id.

use std::time::Duration;

use super::ids::ConnectionId;

/// Delay before a quota slot is checked that was granted on behalf of an earlier socket: until then the counts may be older than the return
/// of a slot, or its grant to another client.
pub const QUOTA_SLOTS_SETTLE: Duration = Duration::from_millis(500);

/// The location of a connection's socket: a slot of a shard, which holds one generation after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionLocation {
    /// Incarnation of the node.
    pub incarnation: u64,
    pub shard: u16,
    pub slot: u32,
    pub generation: u32,
}

/// Ownership of a connection: the epoch rises with each session takeover.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionOwnership {
    pub connection_id: ConnectionId,
    pub epoch: u64,
    /// Location of the socket when the connection key was issued.
    pub location: SessionLocation,
}

/// The owner of a connection: an incarnation of a node, in an epoch. Of two claims the greater one is right, so that all nodes agree when
/// two take the connection over at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SessionOwner {
    pub epoch: u64,
    pub incarnation: u64,
}

impl SessionOwnership {
    pub fn owner(&self) -> SessionOwner {
        SessionOwner { epoch: self.epoch, incarnation: self.location.incarnation }
    }
}

/// A session takeover: another socket serves the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SessionTakeover {
    pub ownership: SessionOwnership,
    /// Location before the takeover, as far as it is known.
    pub previous: SessionLocation,
}

/// A takeover of a connection without an open socket at its old location: its quota slot may have been given to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SocketlessTakeover {
    pub connection_id: ConnectionId,
    /// Epoch of the takeover.
    pub epoch: u64,
}

/// A connection that is closed for good: its client closed it, or was refused. It cannot be resumed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClosedSession {
    pub connection_id: ConnectionId,
    /// Owner at the close.
    pub owner: SessionOwner,
}

/// Status of another node's incarnation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IncarnationStatus {
    Alive,
    /// Ended so lately that its connections may still be resumed.
    Ended,
}
