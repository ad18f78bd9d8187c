//! Where a channel stands on this node.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use crate::model::Stamp;

/// A place among the recent messages of a channel, of which other messages may come to be there: it is good as long as none have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Spot {
    pub place: u64,
    /// How often places had been used again when it was found; none where it was the end of the channel then.
    pub(super) generation: Option<u32>,
}

impl Spot {
    /// Where the channel stood when somebody was attached, or was handed a message.
    pub fn end(place: u64) -> Self {
        Self { place, generation: None }
    }
}

/// All that a channel of this node has handed on up to some moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mark {
    /// Rises by one with each message, wherever it entered: what deliveries of the channel are ordered by on this node.
    pub place: u64,
    /// The last message that entered here.
    pub own: Stamp,
    /// The last ones of other runs. As long as there is none, places and the sequences of this run rise together.
    pub others: Option<Arc<Serial>>,
}

impl Mark {
    /// Where nothing came from other nodes.
    pub fn own(own: Stamp) -> Self {
        Self { place: own.sequence, own, others: None }
    }

    /// The position of who has all up to here.
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

    /// The place of a message of this run, as long as there are none of others.
    pub(super) fn place_of(&self, sequence: u64) -> u64 {
        (self.place - self.own.sequence).saturating_add(sequence)
    }

    /// The other way round.
    pub(super) fn sequence_at(&self, place: u64) -> u64 {
        place.saturating_sub(self.place - self.own.sequence)
    }

    /// Counts messages that entered at another node.
    pub(super) fn hear(&mut self, last: Stamp, count: u64) {
        let mut others = self.others.as_deref().cloned().unwrap_or_default();
        others.advance(last.incarnation, last.sequence);
        self.others = Some(Arc::new(others));
        self.place += count;
    }

    /// Whether a message was handed on by then.
    pub(super) fn covers(&self, stamp: Stamp) -> bool {
        if stamp.incarnation == self.own.incarnation {
            return stamp.sequence <= self.own.sequence;
        }
        let heard = self.others.as_ref().and_then(|others| others.sequence_of(stamp.incarnation));
        stamp.sequence <= heard.unwrap_or(0)
    }
}
