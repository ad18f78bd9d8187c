//! Messages that entered at another node and are to be delivered here.

use bytes::Bytes;

use super::ids::{ChannelKey, ClientId, ConnectionId};
use super::message::Stamp;

/// One publish of another node, made by `cluster::inbound` alone.
///
/// It is delivered and nothing else: nothing turns it into a `Published`, which is all that the origin and the
/// links to other nodes take, so it is neither stored nor forwarded again.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct Forwarded {
    pub key: ChannelKey,
    /// Of the node where the messages entered.
    pub incarnation: u64,
    /// Sequences of the first and the last message, which rise by one from the one to the other.
    pub first: u64,
    pub last: u64,
    pub timestamp_ms: u64,
    pub connection_id: ConnectionId,
    pub client_id: Option<ClientId>,
    /// The JSON text of each message in the frame for subscribers, as it was written where they entered.
    pub messages: Vec<Bytes>,
    /// The sizes of the messages as they are counted for the account.
    pub bytes: u64,
    _made_by_inbound: (),
}

/// What of a forwarded publish is not in its channel.
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

impl Forwarded {
    pub fn last(&self) -> Stamp {
        Stamp { incarnation: self.incarnation, sequence: self.last }
    }

    /// Without what stands up to this sequence; some must be left.
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
