//! Retired incarnations: nobody can resume from them any more, so clients need not keep them in their serials.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fanfare_proto::serial::Serial;

use super::channel_position::ChannelPosition;
use super::channels::{Channel, Hub, State};
use crate::model::Stamp;

/// Bound of the retired incarnations that a channel remembers. A serial that names others is not resumed.
const INCARNATIONS_MAX: usize = 64;

/// The last sequences of retired incarnations, which positions of the channel no longer name.
#[derive(Debug, Default)]
pub(super) struct RetiredPositions(Option<Box<RetiredSequences>>);

#[derive(Debug, Default)]
struct RetiredSequences {
    sequences: Serial,
    /// Own sequence from which the channel's positions do not name the retired incarnations.
    since: u64,
}

impl RetiredPositions {
    /// Removes these incarnations from the channel's position and reserves a sequence without a message, which separates later positions
    /// from earlier ones.
    fn retire(&mut self, position: &mut ChannelPosition, incarnations: &[u64]) {
        let Some(others) = &position.others else { return };
        let is_retired = |incarnation: &u64| incarnations.contains(incarnation);
        if !others.entries().iter().any(|(incarnation, _)| is_retired(incarnation)) {
            return;
        }
        let retired = self.0.get_or_insert_default();
        let mut kept = Serial::default();
        for (incarnation, sequence) in others.entries().iter().copied() {
            if !is_retired(&incarnation) {
                kept.advance(incarnation, sequence);
            } else if retired.sequences.entries().len() < INCARNATIONS_MAX {
                retired.sequences.advance(incarnation, sequence);
            }
        }
        position.others = Some(Arc::new(kept));
        position.own.sequence += 1;
        retired.since = position.own.sequence;
    }

    /// Adds the retired sequences to a position that was given out after their removal.
    pub(super) fn complete(&self, position: &Serial, own: u64) -> Serial {
        match &self.0 {
            Some(retired) if position.includes_one(own, retired.since) => position.join(&retired.sequences),
            _ => position.clone(),
        }
    }

    /// The position `here` with the retired incarnations added.
    pub(super) fn join_into(&self, here: &Serial) -> Serial {
        self.0.as_ref().map_or_else(|| here.clone(), |retired| here.join(&retired.sequences))
    }

    fn contains(&self, incarnation: u64) -> bool {
        self.0.as_ref().is_some_and(|retired| retired.sequences.sequence_of(incarnation).is_some())
    }

    pub(super) fn includes(&self, stamp: Stamp) -> bool {
        self.0
            .as_ref()
            .is_some_and(|retired| retired.sequences.includes_one(stamp.incarnation, stamp.sequence))
    }
}

impl State {
    /// Whether a message was delivered here, does not exist (a sequence gap by design), or is of a retired incarnation.
    pub(super) fn accounts_for(&self, stamp: Stamp) -> bool {
        let is_without = self.contiguous.up_to(stamp.incarnation) >= Some(stamp.sequence);
        self.position.includes(stamp) || self.retired.includes(stamp) || is_without
    }

    /// Whether this node has received a message of the incarnation, or its announcement that it forwards the channel.
    pub(super) fn knows_incarnation(&self, incarnation: u64) -> bool {
        let is_received =
            self.position.others.as_ref().is_some_and(|others| others.sequence_of(incarnation).is_some());
        is_received
            || self.retired.contains(incarnation)
            || self.contiguous.contains(incarnation)
            || incarnation == self.position.own.incarnation
    }
}

impl Hub {
    /// Incarnations of other nodes that a position names or that forward a channel.
    pub fn known_incarnations(&self) -> HashSet<u64> {
        let channels: Vec<Arc<Channel>> = self.channels.iter().map(|entry| Arc::clone(&entry)).collect();
        let mut incarnations = HashSet::new();
        for channel in &channels {
            let state = channel.state.lock();
            incarnations.extend(state.contiguous.incarnations());
            if let Some(others) = &state.position.others {
                incarnations.extend(others.entries().iter().map(|(incarnation, _)| *incarnation));
            }
        }
        incarnations
    }

    /// Retires incarnations that ended so long ago that every client that can still resume has all their messages.
    pub fn retire_incarnations(&self, incarnations: &[u64]) {
        for channel in &self.all() {
            let state = &mut *channel.state.lock();
            // The serial of a client that comes from there may include a sequence gap by design.
            let known = |incarnation: &u64| {
                state.contiguous.up_to(*incarnation).map(|sequence| (*incarnation, sequence))
            };
            let known: Vec<(u64, u64)> =
                incarnations.iter().filter_map(known).filter(|(_, of)| *of > 0).collect();
            if !known.is_empty()
                || incarnations.iter().any(|incarnation| state.has_received_from(*incarnation))
            {
                self.ensure_replay_buffer(state);
            }
            for (incarnation, sequence) in known {
                let stamp = Stamp { incarnation, sequence };
                if !state.position.includes(stamp) {
                    state.position.receive(stamp, 0);
                }
            }
            let before = state.position.own.sequence;
            state.retired.retire(&mut state.position, incarnations);
            if state.position.own.sequence > before {
                self.has_unannounced_gap.store(true, Ordering::SeqCst);
            }
            incarnations.iter().for_each(|incarnation| state.contiguous.remove(*incarnation));
        }
    }
}
