//! The recent deliveries of a channel: what a client that comes back is given of what it missed.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::delivery::Delivery;
use crate::model::Limits;

/// What a ring costs before it holds anything: the channel that it keeps alive, with its name.
const RING_BYTES: usize = 1024;

/// What all rings of a node share. Times are milliseconds since the hub began.
#[derive(Debug)]
pub(super) struct Budget {
    ring_bytes: usize,
    rings_bytes: usize,
    /// How long a message is kept, and a channel that nobody is attached to.
    pub(super) keep_ms: u64,
    held: AtomicUsize,
}

impl Budget {
    pub(super) fn new(limits: &Limits) -> Arc<Self> {
        Arc::new(Self {
            ring_bytes: limits.ring_bytes,
            rings_bytes: limits.rings_bytes,
            keep_ms: 2 * limits.resume_window_ms,
            held: AtomicUsize::new(0),
        })
    }

    pub(super) fn held(&self) -> usize {
        self.held.load(Ordering::Relaxed)
    }

    /// So much is held that rings have to go before the bound is met.
    pub(super) fn is_scarce(&self) -> bool {
        self.held() > self.rings_bytes / 8 * 7
    }

    /// What the rings are brought down to when they are scarce.
    pub(super) fn enough(&self) -> usize {
        self.rings_bytes / 4 * 3
    }
}

/// The last deliveries of one channel, without a gap, from `begin` to the channel's last.
///
/// Bounded by age, by `ring_bytes` and, all rings together, by `rings_bytes`: the oldest go first, and who would have
/// needed them is continued from the store or told that continuity is lost.
#[derive(Debug)]
pub(super) struct Ring {
    entries: VecDeque<Entry>,
    /// The sequence before the first entry.
    begin: u64,
    bytes: usize,
    /// When somebody last attached, and since when nobody is.
    pub(super) attached_ms: u64,
    pub(super) idle_ms: Option<u64>,
    budget: Arc<Budget>,
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
    /// Empty, for a channel whose last number is `begin`; none when there is no room for one more.
    pub(super) fn begin(begin: u64, now_ms: u64, budget: &Arc<Budget>) -> Option<Box<Self>> {
        if budget.held() + RING_BYTES > budget.rings_bytes {
            return None;
        }
        budget.held.fetch_add(RING_BYTES, Ordering::Relaxed);
        let budget = Arc::clone(budget);
        let entries = VecDeque::new();
        Some(Box::new(Self { entries, begin, bytes: 0, attached_ms: now_ms, idle_ms: None, budget }))
    }

    pub(super) fn push(&mut self, delivery: Arc<Delivery>, now_ms: u64) {
        let bytes = delivery.bytes();
        self.entries.push_back(Entry { at_ms: now_ms, bytes, delivery });
        self.bytes += bytes;
        self.budget.held.fetch_add(bytes, Ordering::Relaxed);
        self.drop_old(now_ms);
        while self.bytes > self.budget.ring_bytes || self.budget.held() > self.budget.rings_bytes {
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
        let Some(entry) = self.entries.pop_front() else {
            self.entries = VecDeque::new();
            return false;
        };
        self.begin = entry.delivery.last().sequence;
        self.bytes -= entry.bytes;
        self.budget.held.fetch_sub(entry.bytes, Ordering::Relaxed);
        true
    }

    /// Whether everything after `sequence` is here.
    pub(super) fn reaches(&self, sequence: u64) -> bool {
        self.begin <= sequence
    }

    /// The sequence before the first message that is here.
    #[cfg(test)]
    pub(super) fn reach(&self) -> u64 {
        self.begin
    }

    /// Where a client begins that asks for the last `count` messages, none older than `since_ms` (epoch milliseconds): the
    /// sequence before the first of them that is here, and how many these are.
    pub(super) fn back(&self, count: usize, since_ms: u64) -> Back {
        let mut back = Back { after: None, found: 0, is_whole: count == 0 };
        for entry in self.entries.iter().rev() {
            let published = &entry.delivery.published;
            if back.is_whole || published.timestamp_ms < since_ms {
                back.is_whole = true;
                break;
            }
            let taken = published.messages.len().min(count - back.found);
            back.found += taken;
            back.after = Some(published.last().sequence - taken as u64);
            back.is_whole = back.found == count;
        }
        back
    }

    /// Forgets what it holds.
    pub(super) fn clear(&mut self, sequence: u64) {
        while self.drop_first() {}
        self.begin = sequence;
    }

    /// The deliveries that hold something after `sequence`, oldest first, at least one if there is one and then no
    /// more than about `bytes_max`.
    pub(super) fn after(&self, sequence: u64, bytes_max: usize) -> Vec<Arc<Delivery>> {
        let first = self.entries.partition_point(|entry| entry.delivery.last().sequence <= sequence);
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
        self.budget.held.fetch_sub(self.bytes + RING_BYTES, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::tests::delivery_of;

    const WINDOW_MS: u64 = 1_000;

    fn budget(ring_bytes: usize, rings_bytes: usize) -> Arc<Budget> {
        let limits = Limits { ring_bytes, rings_bytes, resume_window_ms: WINDOW_MS, ..Limits::default() };
        Budget::new(&limits)
    }

    fn sequences(ring: &Ring, after: u64) -> Vec<u64> {
        ring.after(after, usize::MAX).iter().map(|delivery| delivery.last().sequence).collect()
    }

    #[test]
    fn what_comes_after_a_position_is_given_in_order_and_in_part() {
        let mut ring = Ring::begin(10, 0, &budget(1 << 20, 1 << 20)).unwrap();
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
    fn what_is_older_than_twice_the_window_goes() {
        let mut ring = Ring::begin(0, 0, &budget(1 << 20, 1 << 20)).unwrap();
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
        let mut ring = Ring::begin(0, 0, &budget(3 * one, 1 << 20)).unwrap();
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
    fn all_rings_together_stay_within_their_bound() {
        let one = delivery_of(1..=1).bytes();
        let budget = budget(1 << 20, 2 * RING_BYTES + 3 * one);
        let mut first = Ring::begin(0, 0, &budget).unwrap();
        let mut second = Ring::begin(0, 0, &budget).unwrap();
        first.push(delivery_of(1..=1), 0);
        first.push(delivery_of(2..=2), 0);
        for sequence in 1..=2 {
            second.push(delivery_of(sequence..=sequence), 0);
        }
        assert_eq!((first.reach(), second.reach()), (0, 1), "who brings it over the bound gives way");
        assert!(budget.is_scarce());
        drop(first);
        assert_eq!(budget.held(), RING_BYTES + one);
        drop(second);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn a_ring_that_would_be_over_the_bound_is_not_begun() {
        let budget = budget(1 << 20, 2 * RING_BYTES);
        let rings = [0, 1].map(|_| Ring::begin(0, 0, &budget));
        assert!(rings.iter().all(Option::is_some));
        assert!(Ring::begin(0, 0, &budget).is_none());
    }
}
