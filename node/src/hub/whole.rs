//! The runs of other nodes that forward a channel, and up to which number nothing of theirs is missing.

use std::borrow::Cow;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, State};
use crate::model::Stamp;

/// Each once. As large as a pointer while there is none.
#[derive(Debug, Default)]
pub(super) struct Whole(Option<Box<Serial>>);

impl Whole {
    /// The run forwards the channel, and up to this number nothing is on its way any more.
    pub(super) fn reach(&mut self, stamp: Stamp) {
        self.0.get_or_insert_default().advance(stamp.incarnation, stamp.sequence);
    }

    pub(super) fn remove(&mut self, run: u64) {
        if let Some(reached) = &mut self.0 {
            reached.retain(|one| one != run);
        }
        self.0.take_if(|reached| reached.is_empty());
    }

    pub(super) fn reached(&self, run: u64) -> Option<u64> {
        self.0.as_ref()?.sequence_of(run)
    }

    pub(super) fn contains(&self, run: u64) -> bool {
        self.reached(run).is_some()
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = u64> {
        self.0.iter().flat_map(|reached| reached.entries()).map(|(run, _)| *run)
    }

    /// The position of who has all up to `here`, with the numbers behind which there is nothing more.
    pub(super) fn and(&self, mut here: Serial) -> Serial {
        let reached = self.0.iter().flat_map(|reached| reached.entries());
        reached
            .filter(|(_, sequence)| *sequence > 0)
            .for_each(|(run, sequence)| here.advance(*run, *sequence));
        here
    }
}

impl State {
    /// The position, at the last message that is here of each run of which it has numbers without one behind that.
    pub(super) fn lowered<'a>(&self, position: &'a Serial) -> Cow<'a, Serial> {
        let heard = |run| self.mark.others.as_ref().and_then(|others| others.sequence_of(run)).unwrap_or(0);
        let is_without = |run, sequence| heard(run) < sequence && self.whole.reached(run) >= Some(sequence);
        if !position.entries().iter().any(|(run, sequence)| is_without(*run, *sequence)) {
            return Cow::Borrowed(position);
        }
        let mut lowered = Serial::default();
        for (run, sequence) in position.entries().iter().copied() {
            lowered.advance(run, if is_without(run, sequence) { heard(run) } else { sequence });
        }
        Cow::Owned(lowered)
    }
}

impl Channel {
    /// The position without what it has of other runs behind the last message that is here, where there is none.
    pub fn lowered(&self, position: &Serial) -> Serial {
        self.state.lock().lowered(position).into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn contiguous_set_keeps_highest_sequence_and_empty_has_no_heap() {
        let mut whole = Whole::default();
        for (incarnation, sequence) in [(8, 2), (7, 0), (8, 5), (8, 4)] {
            whole.reach(Stamp { incarnation, sequence });
        }
        assert_eq!([7, 8, 9].map(|run| whole.reached(run)), [Some(0), Some(5), None]);
        assert_eq!(whole.runs().collect::<Vec<_>>(), [7, 8]);
        assert_eq!(whole.and(Serial::single(8, 6)), Serial::single(8, 6));
        assert_eq!(whole.and(Serial::single(9, 1)).entries(), [(8, 5), (9, 1)]);
        whole.remove(9);
        whole.remove(8);
        assert!(whole.contains(7) && !whole.contains(8));
        whole.remove(7);
        assert!(whole.0.is_none());
        assert_eq!(size_of::<Whole>(), size_of::<usize>());
    }
}
