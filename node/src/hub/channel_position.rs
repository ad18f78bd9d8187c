//! Position of a channel on this node.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use crate::model::Stamp;

/// An offset in a channel's replay buffer. Valid until other messages take its place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LocalOffset {
    pub offset: u64,
    /// Count of reuses of offsets at that time; none for an offset that was the end of the channel.
    pub(super) generation: Option<u32>,
}

impl LocalOffset {
    /// The offset of the channel's end at an attach or at a delivery.
    pub fn end(offset: u64) -> Self {
        Self { offset, generation: None }
    }
}

/// Everything that a channel of this node has delivered up to some moment: a version vector with the local offset.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelPosition {
    /// Local offset: rises by one with each message, of whatever node. Orders the channel's deliveries on this node.
    pub offset: u64,
    /// Last message that was published at this node.
    pub own: Stamp,
    /// Last messages of other incarnations. While none, offsets and own sequences rise together.
    pub others: Option<Arc<Serial>>,
}

impl ChannelPosition {
    /// A position without messages of other nodes.
    pub fn own(own: Stamp) -> Self {
        Self { offset: own.sequence, own, others: None }
    }

    /// The serial of a client that has everything up to here.
    pub fn serial(&self) -> Serial {
        let Stamp { incarnation, sequence } = self.own;
        match &self.others {
            None => Serial::single(incarnation, sequence),
            Some(others) => {
                let mut serial = Serial::clone(others);
                if sequence > 0 {
                    serial.advance(incarnation, sequence);
                }
                serial
            }
        }
    }

    /// The offset of an own message, valid while `others` is none.
    pub(super) fn offset_of(&self, sequence: u64) -> u64 {
        (self.offset - self.own.sequence).saturating_add(sequence)
    }

    /// The own sequence at an offset, valid while `others` is none.
    pub(super) fn sequence_at(&self, offset: u64) -> u64 {
        offset.saturating_sub(self.offset - self.own.sequence)
    }

    /// Adds `count` messages that were published at another node, up to `last`.
    pub(super) fn receive(&mut self, last: Stamp, count: u64) {
        let mut others = self.others.as_deref().cloned().unwrap_or_default();
        others.advance(last.incarnation, last.sequence);
        self.others = Some(Arc::new(others));
        self.offset += count;
    }

    /// Whether the position includes a message.
    pub(super) fn includes(&self, stamp: Stamp) -> bool {
        if stamp.incarnation == self.own.incarnation {
            return stamp.sequence <= self.own.sequence;
        }
        let received = self.others.as_ref().and_then(|others| others.sequence_of(stamp.incarnation));
        stamp.sequence <= received.unwrap_or(0)
    }
}
