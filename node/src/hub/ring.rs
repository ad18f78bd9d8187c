//! The recent deliveries of a channel: what a client that comes back is given of what it missed.

use std::collections::VecDeque;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::budget::Budget;
use super::channels::Channel;
use super::delivery::Delivery;
use super::mark::{Mark, Spot};
use crate::model::Stamp;

/// The last deliveries of one channel, without a gap, from `begin` to the channel's last.
///
/// Bounded by age and by `ring_bytes`: the oldest go first, and who would have needed them is continued from the store or
/// told that continuity is lost. The hub sees to the bound of all rings together.
#[derive(Debug)]
pub(super) struct Ring {
    entries: VecDeque<Entry>,
    /// Where the channel stood before the first entry.
    begin: Mark,
    bytes: usize,
    /// Something may have been here before the first one that is not any more.
    has_dropped: bool,
    /// How often others were put there then, and the place below which that was.
    used_again: (u32, u64),
    /// Others were asked for what they have had lately, since it began.
    pub(super) of_all: OfAll,
    /// Since when nobody is attached.
    pub(super) idle_ms: Option<u64>,
    /// The number under which it stands in the order of those that may have to go; 0: it does not, having no messages.
    listed: u64,
    budget: Arc<Budget>,
}

/// Whether what other nodes have had lately lies before what came here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OfAll {
    No,
    /// They are being asked.
    Asking,
    Yes,
}

/// Where a client begins that has what its position covers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Begin {
    /// The place before the first message that it has not.
    pub(super) after: u64,
    /// It has nothing that is behind that.
    pub(super) is_exact: bool,
}

/// How far back the recent messages go of what was asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Back {
    /// None when nothing was found.
    pub(super) after: Option<u64>,
    pub(super) found: usize,
    /// Nothing of it lies before the ring.
    pub(super) is_whole: bool,
}

#[derive(Debug)]
struct Entry {
    at_ms: u64,
    bytes: usize,
    delivery: Arc<Delivery>,
}

impl Ring {
    /// Empty, for a channel that stands there; none when there is no room for one more.
    pub(super) fn begin(begin: Mark, budget: &Arc<Budget>) -> Option<Box<Self>> {
        budget.take_ring().then(|| {
            Box::new(Self {
                entries: VecDeque::new(),
                has_dropped: true,
                used_again: (0, 0),
                begin,
                bytes: 0,
                of_all: OfAll::No,
                idle_ms: None,
                listed: 0,
                budget: Arc::clone(budget),
            })
        })
    }

    pub(super) fn push(&mut self, delivery: Arc<Delivery>, now_ms: u64) {
        let bytes = delivery.bytes();
        self.entries.push_back(Entry { at_ms: now_ms, bytes, delivery });
        self.bytes += bytes;
        self.budget.take(bytes);
        self.drop_beyond(now_ms);
    }

    fn drop_beyond(&mut self, now_ms: u64) {
        self.drop_old(now_ms);
        while self.bytes > self.budget.ring_bytes {
            if !self.drop_first() {
                break;
            }
        }
    }

    pub(super) fn drop_old(&mut self, now_ms: u64) {
        let keep_ms = self.budget.keep_ms;
        while self.entries.front().is_some_and(|entry| entry.at_ms + keep_ms < now_ms) {
            self.drop_first();
        }
    }

    /// False when nothing is left.
    fn drop_first(&mut self) -> bool {
        self.take_first().is_some()
    }

    fn take_first(&mut self) -> Option<Entry> {
        let Some(entry) = self.entries.pop_front() else {
            self.entries = VecDeque::new();
            return None;
        };
        self.begin.clone_from(entry.delivery.mark());
        self.has_dropped = true;
        self.bytes -= entry.bytes;
        self.budget.give_back(entry.bytes);
        Some(entry)
    }

    /// Takes out its oldest messages, of `bytes` if it has as many, and no more than `count_max` of them: to be dropped where
    /// nobody waits.
    pub(super) fn give_way(&mut self, bytes: usize, count_max: usize) -> Vec<Arc<Delivery>> {
        let (mut given, mut taken) = (0, Vec::new());
        while given < bytes
            && taken.len() < count_max
            && let Some(Entry { bytes, delivery, .. }) = self.take_first()
        {
            given += bytes;
            taken.push(delivery);
        }
        taken
    }

    /// Forgets everything: nobody can be brought to `mark`.
    pub(super) fn restart(&mut self, mark: &Mark) {
        while self.drop_first() {}
        self.begin.clone_from(mark);
        self.has_dropped = true;
        self.of_all = OfAll::No;
    }

    /// It stands in the order under this number, or was taken out of it there.
    pub(super) fn is_listed(&self, number: u64) -> bool {
        self.listed == number
    }

    /// Puts it into the order, if it has messages that could go: after those whose channels were attached to before.
    pub(super) fn list(&mut self, channel: &Arc<Channel>, attached: u64) {
        self.listed = if self.entries.is_empty() { 0 } else { attached };
        if self.listed != 0 {
            self.budget.list(attached, channel);
        }
    }

    /// Who has not all of this cannot be brought on from here, and who is given what is here has it. What is here of these runs goes,
    /// with all before that: who lacks it is not to be taken for having it, and is given it with the rest where that is to be had.
    pub(super) fn know_all(&mut self, stamps: &[Stamp]) {
        let is_of_them =
            |entry: &Entry| stamps.iter().any(|stamp| stamp.incarnation == entry.delivery.last().incarnation);
        let mut count = self.entries.iter().rposition(is_of_them).map_or(0, |last| last + 1);
        if count > 0 {
            self.of_all = OfAll::No;
        }
        while count > 0 && self.drop_first() {
            count -= 1;
        }
        stamps.iter().for_each(|stamp| self.begin.hear(*stamp, 0));
        self.stand(stamps);
    }

    /// In the positions behind each of the messages these stand, too.
    pub(super) fn stand(&mut self, stamps: &[Stamp]) {
        for Entry { delivery, .. } in &mut self.entries {
            if stamps.iter().any(|stamp| !delivery.mark().covers(*stamp)) {
                *delivery = Arc::new(delivery.beside(stamps));
            }
        }
    }

    /// Where the channel stood before the first message that is here.
    pub(super) fn begins(&self) -> &Mark {
        &self.begin
    }

    /// Where the channel stood before an entry.
    fn before(&self, entry: usize) -> &Mark {
        entry.checked_sub(1).map_or(&self.begin, |before| self.entries[before].delivery.mark())
    }

    /// Its last messages, about `bytes_max` of them, each with its age, and where the channel stood before.
    pub(super) fn latest(&self, bytes_max: usize, now_ms: u64) -> (Serial, Vec<(Arc<Delivery>, u64)>) {
        let mut bytes = 0;
        let fits = |entry: &&Entry| {
            bytes += entry.bytes / 3;
            bytes <= bytes_max
        };
        let fitting = self.entries.iter().rev().take_while(fits).count();
        let first = self.entries.len() - fitting;
        let aged = |entry: &Entry| (Arc::clone(&entry.delivery), now_ms.saturating_sub(entry.at_ms));
        (self.before(first).serial(), self.entries.range(first..).map(aged).collect())
    }

    /// Puts earlier messages before the first one, each with when it came; of all together the oldest go as they always do.
    pub(super) fn prepend(&mut self, begin: Mark, earlier: Vec<(Arc<Delivery>, u64)>, now_ms: u64) {
        if std::mem::take(&mut self.has_dropped) {
            let (count, below) = self.used_again;
            self.used_again = (count.wrapping_add(1), below.max(self.begin.place));
        }
        for (delivery, at_ms) in earlier.into_iter().rev() {
            let bytes = delivery.bytes();
            self.entries.push_front(Entry { at_ms, bytes, delivery });
            self.bytes += bytes;
            self.budget.take(bytes);
        }
        self.begin = begin;
        self.drop_beyond(now_ms);
    }

    pub(super) fn is_half_empty(&self) -> bool {
        self.bytes <= self.budget.ring_bytes / 2
    }

    /// Whether everything after the place is here.
    pub(super) fn reaches(&self, place: u64) -> bool {
        self.begin.place <= place
    }

    /// The place as it is now.
    pub(super) fn spot(&self, place: u64) -> Spot {
        Spot { place, generation: Some(self.used_again.0) }
    }

    /// No other messages have been put there since it was found.
    pub(super) fn has_kept(&self, spot: Spot) -> bool {
        let (count, below) = self.used_again;
        spot.generation == Some(count) || spot.place >= below
    }

    /// The place before the first message that is here.
    #[cfg(test)]
    pub(super) fn reach(&self) -> u64 {
        self.begin.place
    }

    /// Where who has all up to this position begins; none where something that it has not may have been here before.
    pub(super) fn find(&self, position: &Serial) -> Option<Begin> {
        if !position.covers(&self.begin.serial()) {
            return None;
        }
        let last = |entry: &Entry| entry.delivery.last();
        let lacks = |entry: &Entry| !position.covers_one(last(entry).incarnation, last(entry).sequence);
        let first = self.entries.iter().position(lacks).unwrap_or(self.entries.len());
        let before = self.before(first);
        Some(Begin { after: before.place, is_exact: before.serial().covers(position) })
    }

    /// Where the channel stood there, if it is the end of a delivery.
    pub(super) fn mark_at(&self, spot: Spot) -> Option<&Mark> {
        let place = self.has_kept(spot).then_some(spot.place)?;
        let found = self.entries.binary_search_by_key(&place, |entry| entry.delivery.place());
        let found = found.ok().map(|at| self.entries[at].delivery.mark());
        found.or_else(|| Some(&self.begin).filter(|begin| begin.place == place))
    }

    /// How long ago the first message after the place came.
    pub(super) fn age_ms(&self, place: u64, now_ms: u64) -> u64 {
        let first = self.entries.partition_point(|entry| entry.delivery.place() <= place);
        self.entries.get(first).map_or(0, |entry| now_ms.saturating_sub(entry.at_ms))
    }

    /// Where a client begins that asks for the last `count` messages, none older than `since_ms` (epoch milliseconds): the
    /// place before the first of them that is here, and how many these are.
    pub(super) fn back(&self, count: usize, since_ms: u64) -> Back {
        let mut back = Back { after: None, found: 0, is_whole: count == 0 };
        for entry in self.entries.iter().rev() {
            let delivery = &entry.delivery;
            if back.is_whole || delivery.timestamp_ms() < since_ms {
                back.is_whole = true;
                break;
            }
            let taken = (delivery.count() as usize).min(count - back.found);
            back.found += taken;
            back.after = Some(delivery.place() - taken as u64);
            back.is_whole = back.found == count;
        }
        back
    }

    /// The deliveries that hold something after the place, oldest first, at least one if there is one and then no
    /// more than about `bytes_max`.
    pub(super) fn after(&self, place: u64, bytes_max: usize) -> Vec<Arc<Delivery>> {
        let first = self.entries.partition_point(|entry| entry.delivery.place() <= place);
        let mut bytes = 0;
        let within = self.entries.range(first..).take_while(|entry| {
            let fits = bytes < bytes_max;
            bytes += entry.bytes / 3;
            fits
        });
        within.map(|entry| Arc::clone(&entry.delivery)).collect()
    }
}

impl Drop for Ring {
    fn drop(&mut self) {
        self.budget.give_ring_back(self.bytes);
        if self.listed != 0 {
            self.budget.unlist(self.listed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::budget::RING_BYTES;
    use crate::hub::tests::delivery_of;
    use crate::model::Limits;

    const WINDOW_MS: u64 = 1_000;

    fn budget(ring_bytes: usize, rings_bytes: usize) -> Arc<Budget> {
        let limits = Limits { ring_bytes, rings_bytes, resume_window_ms: WINDOW_MS, ..Limits::default() };
        Budget::new(&limits)
    }

    fn at(place: u64) -> Mark {
        Mark::own(Stamp { incarnation: 9, sequence: place })
    }

    fn sequences(ring: &Ring, after: u64) -> Vec<u64> {
        ring.after(after, usize::MAX).iter().map(|delivery| delivery.place()).collect()
    }

    #[test]
    fn replay_buffer_gives_deliveries_after_position_in_order() {
        let mut ring = Ring::begin(at(10), &budget(1 << 20, 1 << 20)).expect("the budget has room");
        ring.push(delivery_of(11..=11), 0);
        ring.push(delivery_of(12..=14), 0);
        ring.push(delivery_of(15..=15), 0);
        assert_eq!(sequences(&ring, 10), [11, 14, 15]);
        assert_eq!(sequences(&ring, 13), [14, 15], "a delivery that is held in part is given");
        assert_eq!(sequences(&ring, 14), [15]);
        assert_eq!(sequences(&ring, 15), Vec::<u64>::new());
        assert!(ring.reaches(10) && !ring.reaches(9));
        assert_eq!(ring.after(10, 1).len(), 1, "at least one, however small the bound");
    }

    #[test]
    fn replay_buffer_drops_entries_older_than_twice_the_window() {
        let mut ring = Ring::begin(at(0), &budget(1 << 20, 1 << 20)).expect("the budget has room");
        ring.push(delivery_of(1..=1), 0);
        ring.push(delivery_of(2..=2), 1);
        ring.drop_old(2 * WINDOW_MS);
        assert!(ring.reaches(0));
        ring.drop_old(2 * WINDOW_MS + 1);
        assert!(!ring.reaches(0) && ring.reaches(1));
    }

    #[test]
    fn a_ring_at_its_bound_and_one_past() {
        let one = delivery_of(1..=1).bytes();
        let mut ring = Ring::begin(at(0), &budget(3 * one, 1 << 20)).expect("the budget has room");
        for sequence in 1..=3 {
            ring.push(delivery_of(sequence..=sequence), 0);
        }
        assert!(ring.reaches(0));
        ring.push(delivery_of(4..=4), 0);
        assert_eq!((ring.reach(), sequences(&ring, 1)), (1, vec![2, 3, 4]));
        ring.push(delivery_of(5..=50), 0);
        assert_eq!(ring.reach(), 50, "one that is larger than the whole ring is not kept");
    }

    #[test]
    fn replay_buffers_count_their_bytes_in_one_budget() {
        let one = delivery_of(1..=1).bytes();
        let budget = budget(1 << 20, 1 << 20);
        let mut first = Ring::begin(at(0), &budget).expect("the budget has room");
        let second = Ring::begin(at(0), &budget).expect("the budget has room");
        first.push(delivery_of(1..=1), 0);
        first.push(delivery_of(2..=2), 0);
        assert_eq!(budget.held(), 2 * RING_BYTES + 2 * one);
        assert_eq!(first.give_way(1, 9).len(), 1, "as many as it takes");
        assert_eq!((first.reach(), budget.held()), (1, 2 * RING_BYTES + one));
        drop(second);
        assert_eq!(budget.held(), RING_BYTES + one);
        assert_eq!(first.give_way(usize::MAX, 0).len(), 0);
        drop(first);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_ring_that_would_be_over_the_bound_is_not_begun() {
        let budget = budget(1 << 20, 2 * RING_BYTES);
        let mut rings = [0, 1].map(|_| Ring::begin(at(0), &budget));
        rings[0].as_mut().expect("within the bound").push(delivery_of(1..=1), 0);
        assert!(rings.iter().all(Option::is_some), "messages can go");
        assert!(Ring::begin(at(0), &budget).is_none());
        drop(rings);
        assert!(Ring::begin(at(0), &budget).is_some());
    }
}
