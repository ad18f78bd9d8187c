//! Attaching: where a client stands in a channel, and what it is given of what it missed.

use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, Hub, State};
use super::delivery::Delivery;
use crate::model::{ChannelKey, Stamp};

/// An attach that has taken effect.
#[derive(Debug)]
pub struct Joined {
    pub channel: Arc<Channel>,
    /// All that was numbered before; what comes after it is delivered.
    pub mark: Stamp,
    pub start: Start,
    /// How long ago the first message was published that [`Start::Replay`] gives; else 0.
    pub missed_ms: u64,
}

/// How a client that gave a position is brought to the mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// It is there.
    Live,
    /// [`Channel::pull`] gives what follows this sequence.
    Replay { after: u64 },
    /// What is between is not in the ring, or the position is not of this incarnation.
    Unknown,
}

/// How much of a rewind the recent messages give.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Recent {
    /// The sequence before the first of them; the last one of the channel when there is none.
    pub after: u64,
    pub found: usize,
    /// There are no others in what was asked for.
    pub is_whole: bool,
}

/// A part of what somebody missed.
#[derive(Debug)]
pub struct Pulled {
    /// In order and without a gap; the first may hold messages that were asked to be left out.
    pub deliveries: Vec<Arc<Delivery>>,
    /// Nothing is left: whoever has these has all that the channel's deliveries do not bring.
    pub is_end: bool,
}

impl Hub {
    /// Of this run of the node.
    pub fn incarnation(&self) -> u64 {
        self.incarnation
    }

    /// Registers the target's interest. The stamp covers all that was numbered before; all after it is delivered.
    pub fn attach(&self, key: &ChannelKey, target: usize) -> (Arc<Channel>, Stamp) {
        self.with_channel(key, |channel, state| (Arc::clone(channel), self.register(state, target)))
    }

    /// The same for a client that has all up to `position`.
    pub fn attach_after(&self, key: &ChannelKey, target: usize, position: &Serial) -> Joined {
        self.with_channel(key, |channel, state| {
            let start = self.start(state, position);
            let missed_ms = match (start, &state.ring) {
                (Start::Replay { after }, Some(ring)) => ring.age_ms(after, self.now_ms()),
                _ => 0,
            };
            let mark = self.register(state, target);
            Joined { channel: Arc::clone(channel), mark, start, missed_ms }
        })
    }

    /// The same for a client that wants the last `count` messages first, none older than `since_ms`.
    pub fn attach_back(
        &self,
        key: &ChannelKey,
        target: usize,
        count: usize,
        since_ms: u64,
    ) -> (Arc<Channel>, Stamp, Recent) {
        self.with_channel(key, |channel, state| {
            let back = state.ring.as_ref().map(|ring| ring.back(count, since_ms));
            let recent = Recent {
                after: back.and_then(|back| back.after).unwrap_or(state.sequence),
                found: back.map_or(0, |back| back.found),
                is_whole: back.is_some_and(|back| back.is_whole),
            };
            (Arc::clone(channel), self.register(state, target), recent)
        })
    }

    /// Where a client with this position would stand; nothing is registered.
    pub fn look_after(&self, key: &ChannelKey, position: &Serial) -> Start {
        self.with_channel(key, |_, state| self.start(state, position))
    }

    fn register(&self, state: &mut State, target: usize) -> Stamp {
        if let Some(ring) = &mut state.ring {
            ring.idle_ms = None;
        }
        state.attached = self.next_attach();
        state.targets |= 1 << target;
        Stamp { incarnation: self.incarnation, sequence: state.sequence }
    }

    fn start(&self, state: &State, position: &Serial) -> Start {
        match position.sequence_of(self.incarnation) {
            Some(after) if after == state.sequence => Start::Live,
            Some(after) if after < state.sequence && reaches(state, after) => Start::Replay { after },
            _ => Start::Unknown,
        }
    }
}

impl Channel {
    /// What follows `after`, about `bytes_max` of it; none when the ring does not reach back to it.
    pub fn pull(&self, after: u64, bytes_max: usize) -> Option<Pulled> {
        let state = self.state.lock();
        if after == state.sequence {
            return Some(Pulled { deliveries: Vec::new(), is_end: true });
        }
        if !reaches(&state, after) {
            return None;
        }
        let deliveries = state.ring.as_ref()?.after(after, bytes_max);
        let is_end = deliveries.last().is_some_and(|last| last.last().sequence == state.sequence);
        Some(Pulled { deliveries, is_end })
    }

    /// Whether [`Channel::pull`] can go on after `sequence`.
    pub fn reaches(&self, sequence: u64) -> bool {
        let state = self.state.lock();
        sequence == state.sequence || reaches(&state, sequence)
    }

    /// The last number given.
    pub fn sequence(&self) -> u64 {
        self.state.lock().sequence
    }
}

fn reaches(state: &State, after: u64) -> bool {
    state.ring.as_ref().is_some_and(|ring| ring.reaches(after))
}
