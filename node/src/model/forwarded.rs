//! Messages published at another node, to be delivered here.

use bytes::Bytes;

use super::ids::{ChannelKey, ClientId, ConnectionId};
use super::message::Stamp;

/// One publish of another node, made by `cluster::inbound` alone.
///
/// It can only be delivered. Nothing turns it into a `PublishedMessages`, the only input of the origin and of the peer
/// streams, so it is neither stored nor forwarded again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct ForwardedMessages {
    pub key: ChannelKey,
    /// Incarnation of the publishing node.
    pub incarnation: u64,
    /// Sequences of the first and the last message; those between rise by one.
    pub first: u64,
    pub last: u64,
    pub timestamp_ms: u64,
    pub connection_id: ConnectionId,
    pub client_id: Option<ClientId>,
    /// JSON text of each message in the frame for subscribers, as the publishing node wrote it.
    pub messages: Vec<Bytes>,
    /// Sizes of the messages as counted for the account.
    pub bytes: u64,
    _made_by_inbound: (),
}

/// A forwarded publish without its channel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForwardedParts {
    pub(crate) incarnation: u64,
    pub(crate) first: u64,
    pub(crate) last: u64,
    pub(crate) timestamp_ms: u64,
    pub(crate) connection_id: ConnectionId,
    pub(crate) client_id: Option<ClientId>,
    pub(crate) messages: Vec<Bytes>,
    pub(crate) bytes: u64,
}

impl ForwardedMessages {
    pub fn last(&self) -> Stamp {
        Stamp { incarnation: self.incarnation, sequence: self.last }
    }

    /// Removes the messages up to this sequence; at least one must remain.
    pub(crate) fn cut(&mut self, sequence: u64) {
        let count = self.messages.len() as u64;
        let skip = (sequence + 1).saturating_sub(self.first).min(count.saturating_sub(1));
        self.bytes -= self.bytes / count.max(1) * skip;
        self.first += skip;
        self.messages.drain(..skip as usize);
    }

    pub(crate) fn new(key: ChannelKey, parts: ForwardedParts) -> Self {
        let ForwardedParts {
            incarnation,
            first,
            last,
            timestamp_ms,
            connection_id,
            client_id,
            messages,
            bytes,
        } = parts;
        Self {
            key,
            incarnation,
            first,
            last,
            timestamp_ms,
            connection_id,
            client_id,
            messages,
            bytes,
            _made_by_inbound: (),
        }
    }
}
