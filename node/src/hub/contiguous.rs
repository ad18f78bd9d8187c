//! Incarnations of other nodes that forward a channel, each with the sequence up to which nothing of it is missing.

use std::borrow::Cow;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, State};
use crate::model::Stamp;

/// A map without duplicates. As large as a pointer while empty.
#[derive(Debug, Default)]
pub(super) struct ContiguousSequences(Option<Box<Serial>>);

impl ContiguousSequences {
    /// Records that the incarnation forwards the channel, and that nothing up to this sequence is on its way any more.
    pub(super) fn advance(&mut self, stamp: Stamp) {
        self.0.get_or_insert_default().advance(stamp.incarnation, stamp.sequence);
    }

    pub(super) fn remove(&mut self, incarnation: u64) {
        if let Some(reached) = &mut self.0 {
            reached.retain(|one| one != incarnation);
        }
        self.0.take_if(|reached| reached.is_empty());
    }

    pub(super) fn up_to(&self, incarnation: u64) -> Option<u64> {
        self.0.as_ref()?.sequence_of(incarnation)
    }

    pub(super) fn contains(&self, incarnation: u64) -> bool {
        self.up_to(incarnation).is_some()
    }

    pub(super) fn incarnations(&self) -> impl Iterator<Item = u64> {
        self.0.iter().flat_map(|reached| reached.entries()).map(|(incarnation, _)| *incarnation)
    }

    /// The position `here` joined with the contiguous sequences.
    pub(super) fn join_into(&self, mut here: Serial) -> Serial {
        let reached = self.0.iter().flat_map(|reached| reached.entries());
        reached
            .filter(|(_, sequence)| *sequence > 0)
            .for_each(|(incarnation, sequence)| here.advance(*incarnation, *sequence));
        here
    }
}

impl State {
    /// Clamps a position to the last real messages: sequences above the received one, up to the contiguous one, are
    /// gaps by design.
    pub(super) fn clamp_position<'a>(&self, position: &'a Serial) -> Cow<'a, Serial> {
        let received = |incarnation| {
            self.position.others.as_ref().and_then(|others| others.sequence_of(incarnation)).unwrap_or(0)
        };
        let is_without = |incarnation, sequence| {
            received(incarnation) < sequence && self.contiguous.up_to(incarnation) >= Some(sequence)
        };
        if !position.entries().iter().any(|(incarnation, sequence)| is_without(*incarnation, *sequence)) {
            return Cow::Borrowed(position);
        }
        let mut lowered = Serial::default();
        for (incarnation, sequence) in position.entries().iter().copied() {
            lowered.advance(
                incarnation,
                if is_without(incarnation, sequence) { received(incarnation) } else { sequence },
            );
        }
        Cow::Owned(lowered)
    }
}

impl Channel {
    /// Clamps a position to the last real messages of other incarnations, as far as gaps are known here.
    pub fn clamp_position(&self, position: &Serial) -> Serial {
        self.state.lock().clamp_position(position).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_set_keeps_highest_sequence_and_empty_has_no_heap() {
        let mut contiguous = ContiguousSequences::default();
        for (incarnation, sequence) in [(8, 2), (7, 0), (8, 5), (8, 4)] {
            contiguous.advance(Stamp { incarnation, sequence });
        }
        assert_eq!([7, 8, 9].map(|incarnation| contiguous.up_to(incarnation)), [Some(0), Some(5), None]);
        assert_eq!(contiguous.incarnations().collect::<Vec<_>>(), [7, 8]);
        assert_eq!(contiguous.join_into(Serial::single(8, 6)), Serial::single(8, 6));
        assert_eq!(contiguous.join_into(Serial::single(9, 1)).entries(), [(8, 5), (9, 1)]);
        contiguous.remove(9);
        contiguous.remove(8);
        assert!(contiguous.contains(7) && !contiguous.contains(8));
        contiguous.remove(7);
        assert!(contiguous.0.is_none());
        assert_eq!(size_of::<ContiguousSequences>(), size_of::<usize>());
    }
}
