//! A connection over its sockets: where each is served, and which of them has it.

use std::time::Duration;

use super::ids::ConnectionId;

/// Whether who was let in for a former socket has its seat is looked at so long after: until then the counts may be those from before a
/// seat was given back, or to another.
pub const SEATS_SETTLE: Duration = Duration::from_millis(500);

/// Where a connection is served: a slot of a shard holds one generation after another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Place {
    /// Of the node's run.
    pub incarnation: u64,
    pub shard: u16,
    pub slot: u32,
    pub generation: u32,
}

/// A connection over its sockets: the epoch rises each time that it is taken up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tenure {
    pub connection_id: ConnectionId,
    pub epoch: u64,
    /// Where it was served when the key was given.
    pub place: Place,
}

/// Whose a connection is: of a run of a node, in one of its epochs. Of two that say so the greater one is right, so that all
/// nodes agree when two take it up at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Owner {
    pub epoch: u64,
    pub incarnation: u64,
}

impl Tenure {
    pub fn owner(&self) -> Owner {
        Owner { epoch: self.epoch, incarnation: self.place.incarnation }
    }
}

/// A connection has another socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TakenUp {
    pub tenure: Tenure,
    /// Where it was before, as far as is known.
    pub former: Place,
}

/// A connection was taken up that had no open socket where it was before: its seat may have been given to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NotOpen {
    pub connection_id: ConnectionId,
    /// Of the taking up.
    pub epoch: u64,
}

/// A connection ended for good: its client closed it, or was refused. Nobody takes it up any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Over {
    pub connection_id: ConnectionId,
    /// Whose it was then.
    pub owner: Owner,
}

/// A run of another node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Run {
    Alive,
    /// It ended within the time in which its connections may be taken up.
    Ended,
}
