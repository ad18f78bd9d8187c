//! Replay buffer: the recent deliveries of a channel, from which clients resume.

use std::collections::VecDeque;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::channel_position::{ChannelPosition, LocalOffset};
use super::channels::Channel;
use super::delivery::MessageDelivery;
use super::replay_budget::ReplayBudget;
use crate::model::Stamp;

/// The last deliveries of one channel, without a gap, from `begin` to the channel's last.
///
/// Bounded by age and by `buffer_bytes`: the oldest go first, and a client that would have needed them is continued from the store or gets
/// a continuity loss. The hub enforces the bound of all buffers together.
#[derive(Debug)]
pub(super) struct ReplayBuffer {
    entries: VecDeque<ReplayEntry>,
    /// Position of the channel before the first entry.
    begin: ChannelPosition,
    bytes: usize,
    /// Whether entries before the first one may have been dropped.
    has_dropped: bool,
    /// Number of times that earlier messages were prepended over dropped offsets, and the offset below which they were.
    used_again: (u32, u64),
    /// State of the cluster backfill since the buffer was opened.
    pub(super) cluster_backfill: ClusterBackfillState,
    /// Time since which no client is attached.
    pub(super) idle_ms: Option<u64>,
    /// Key in the eviction order; 0 while there are no messages.
    listed: u64,
    budget: Arc<ReplayBudget>,
}

/// Whether the recent messages of other nodes precede the local ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ClusterBackfillState {
    No,
    /// Peers are being asked.
    Asking,
    Yes,
}

/// The start of a replay for a client with a given position.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ReplayStart {
    /// Offset before the first message that the client lacks.
    pub(super) after: u64,
    /// The client has no message after the offset.
    pub(super) is_exact: bool,
}

/// The part of a rewind that the replay buffer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct BufferRewind {
    /// Offset before the first message; none when nothing was found.
    pub(super) after: Option<u64>,
    pub(super) found: usize,
    /// The buffer has everything that was asked for.
    pub(super) is_complete: bool,
}

#[derive(Debug)]
struct ReplayEntry {
    at_ms: u64,
    bytes: usize,
    delivery: Arc<MessageDelivery>,
}

impl ReplayBuffer {
    /// Opens an empty buffer for a channel at this position; none when the budget has no space for another one.
    pub(super) fn open(begin: ChannelPosition, budget: &Arc<ReplayBudget>) -> Option<Box<Self>> {
        budget.reserve_buffer().then(|| {
            Box::new(Self {
                entries: VecDeque::new(),
                has_dropped: true,
                used_again: (0, 0),
                begin,
                bytes: 0,
                cluster_backfill: ClusterBackfillState::No,
                idle_ms: None,
                listed: 0,
                budget: Arc::clone(budget),
            })
        })
    }

    pub(super) fn push(&mut self, delivery: Arc<MessageDelivery>, now_ms: u64) {
        let bytes = delivery.bytes();
        self.entries.push_back(ReplayEntry { at_ms: now_ms, bytes, delivery });
        self.bytes += bytes;
        self.budget.take(bytes);
        self.drop_beyond(now_ms);
    }

    fn drop_beyond(&mut self, now_ms: u64) {
        self.drop_old(now_ms);
        while self.bytes > self.budget.buffer_bytes {
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

    /// Drops the oldest entry; false when the buffer is empty.
    fn drop_first(&mut self) -> bool {
        self.take_first().is_some()
    }

    fn take_first(&mut self) -> Option<ReplayEntry> {
        let Some(entry) = self.entries.pop_front() else {
            self.entries = VecDeque::new();
            return None;
        };
        self.begin.clone_from(entry.delivery.position());
        self.has_dropped = true;
        self.bytes -= entry.bytes;
        self.budget.give_back(entry.bytes);
        Some(entry)
    }

    /// Removes the oldest messages, of at least `bytes` in total if there are as many, at most `count_max` of them. The caller drops them
    /// outside the channel's lock.
    pub(super) fn evict(&mut self, bytes: usize, count_max: usize) -> Vec<Arc<MessageDelivery>> {
        let (mut given, mut taken) = (0, Vec::new());
        while given < bytes
            && taken.len() < count_max
            && let Some(ReplayEntry { bytes, delivery, .. }) = self.take_first()
        {
            given += bytes;
            taken.push(delivery);
        }
        taken
    }

    /// Drops all entries: no client can be replayed up to this position.
    pub(super) fn restart(&mut self, position: &ChannelPosition) {
        while self.drop_first() {}
        self.begin.clone_from(position);
        self.has_dropped = true;
        self.cluster_backfill = ClusterBackfillState::No;
    }

    /// Whether `number` is the buffer's key in the eviction order, or was until it was taken out.
    pub(super) fn is_listed(&self, number: u64) -> bool {
        self.listed == number
    }

    /// Enters the buffer into the eviction order if it has messages, after the channels that were attached to earlier.
    pub(super) fn list(&mut self, channel: &Arc<Channel>, attached: u64) {
        self.listed = if self.entries.is_empty() { 0 } else { attached };
        if self.listed != 0 {
            self.budget.list(attached, channel);
        }
    }

    /// Requires these sequences of every resuming client, and adds them to the positions of later deliveries. Entries of these incarnations
    /// are dropped, with all before them: a client that lacks them must not pass for complete, and gets them with the rest from a peer or
    /// the store.
    pub(super) fn require_received(&mut self, stamps: &[Stamp]) {
        let is_of_them = |entry: &ReplayEntry| {
            stamps.iter().any(|stamp| stamp.incarnation == entry.delivery.last().incarnation)
        };
        let mut count = self.entries.iter().rposition(is_of_them).map_or(0, |last| last + 1);
        if count > 0 {
            self.cluster_backfill = ClusterBackfillState::No;
        }
        while count > 0 && self.drop_first() {
            count -= 1;
        }
        stamps.iter().for_each(|stamp| self.begin.receive(*stamp, 0));
        self.add_to_positions(stamps);
    }

    /// Adds these sequences to the positions of all entries.
    pub(super) fn add_to_positions(&mut self, stamps: &[Stamp]) {
        for ReplayEntry { delivery, .. } in &mut self.entries {
            if stamps.iter().any(|stamp| !delivery.position().includes(*stamp)) {
                *delivery = Arc::new(delivery.including(stamps));
            }
        }
    }

    /// The position of the channel before the first entry.
    pub(super) fn start_position(&self) -> &ChannelPosition {
        &self.begin
    }

    /// The position of the channel before an entry.
    fn before(&self, entry: usize) -> &ChannelPosition {
        entry.checked_sub(1).map_or(&self.begin, |before| self.entries[before].delivery.position())
    }

    /// The last messages, about `bytes_max` of them, with their ages, and the position of the channel before them.
    pub(super) fn latest(&self, bytes_max: usize, now_ms: u64) -> (Serial, Vec<(Arc<MessageDelivery>, u64)>) {
        let mut bytes = 0;
        let fits = |entry: &&ReplayEntry| {
            bytes += entry.bytes / 3;
            bytes <= bytes_max
        };
        let fitting = self.entries.iter().rev().take_while(fits).count();
        let first = self.entries.len() - fitting;
        let aged = |entry: &ReplayEntry| (Arc::clone(&entry.delivery), now_ms.saturating_sub(entry.at_ms));
        (self.before(first).serial(), self.entries.range(first..).map(aged).collect())
    }

    /// Prepends earlier messages, each with its time of arrival. The bounds apply to all together, oldest first.
    pub(super) fn prepend(
        &mut self,
        begin: ChannelPosition,
        earlier: Vec<(Arc<MessageDelivery>, u64)>,
        now_ms: u64,
    ) {
        if std::mem::take(&mut self.has_dropped) {
            let (count, below) = self.used_again;
            self.used_again = (count.wrapping_add(1), below.max(self.begin.offset));
        }
        for (delivery, at_ms) in earlier.into_iter().rev() {
            let bytes = delivery.bytes();
            self.entries.push_front(ReplayEntry { at_ms, bytes, delivery });
            self.bytes += bytes;
            self.budget.take(bytes);
        }
        self.begin = begin;
        self.drop_beyond(now_ms);
    }

    pub(super) fn is_half_empty(&self) -> bool {
        self.bytes <= self.budget.buffer_bytes / 2
    }

    /// Whether every message after the offset is in the buffer.
    pub(super) fn reaches_back_to(&self, offset: u64) -> bool {
        self.begin.offset <= offset
    }

    /// The offset with the present generation.
    pub(super) fn local_offset(&self, offset: u64) -> LocalOffset {
        LocalOffset { offset, generation: Some(self.used_again.0) }
    }

    /// Whether no other messages have taken the offset since it was found.
    pub(super) fn is_valid(&self, local_offset: LocalOffset) -> bool {
        let (count, below) = self.used_again;
        local_offset.generation == Some(count) || local_offset.offset >= below
    }

    /// The offset before the first message in the buffer.
    #[cfg(test)]
    pub(super) fn reach(&self) -> u64 {
        self.begin.offset
    }

    /// The start of the replay for a client with everything up to this position; none when the buffer may lack messages that the client
    /// needs.
    pub(super) fn find(&self, position: &Serial) -> Option<ReplayStart> {
        if !position.includes(&self.begin.serial()) {
            return None;
        }
        let last = |entry: &ReplayEntry| entry.delivery.last();
        let lacks =
            |entry: &ReplayEntry| !position.includes_one(last(entry).incarnation, last(entry).sequence);
        let first = self.entries.iter().position(lacks).unwrap_or(self.entries.len());
        let before = self.before(first);
        Some(ReplayStart { after: before.offset, is_exact: before.serial().includes(position) })
    }

    /// The channel's position at an offset, if a delivery ends there.
    pub(super) fn position_at(&self, local_offset: LocalOffset) -> Option<&ChannelPosition> {
        let offset = self.is_valid(local_offset).then_some(local_offset.offset)?;
        let found = self.entries.binary_search_by_key(&offset, |entry| entry.delivery.offset());
        let found = found.ok().map(|at| self.entries[at].delivery.position());
        found.or_else(|| Some(&self.begin).filter(|begin| begin.offset == offset))
    }

    /// Age of the first message after the offset, in milliseconds.
    pub(super) fn age_ms(&self, offset: u64, now_ms: u64) -> u64 {
        let first = self.entries.partition_point(|entry| entry.delivery.offset() <= offset);
        self.entries.get(first).map_or(0, |entry| now_ms.saturating_sub(entry.at_ms))
    }

    /// Finds the last `count` messages, none older than `since_ms` (epoch milliseconds): the offset before the first of them in the buffer,
    /// and their number.
    pub(super) fn rewind(&self, count: usize, since_ms: u64) -> BufferRewind {
        let mut back = BufferRewind { after: None, found: 0, is_complete: count == 0 };
        for entry in self.entries.iter().rev() {
            let delivery = &entry.delivery;
            if back.is_complete || delivery.timestamp_ms() < since_ms {
                back.is_complete = true;
                break;
            }
            let taken = (delivery.count() as usize).min(count - back.found);
            back.found += taken;
            back.after = Some(delivery.offset() - taken as u64);
            back.is_complete = back.found == count;
        }
        back
    }

    /// The deliveries with messages after the offset, oldest first: at least one if there is one, and about `bytes_max` at most.
    pub(super) fn after(&self, offset: u64, bytes_max: usize) -> Vec<Arc<MessageDelivery>> {
        let first = self.entries.partition_point(|entry| entry.delivery.offset() <= offset);
        let mut bytes = 0;
        let within = self.entries.range(first..).take_while(|entry| {
            let fits = bytes < bytes_max;
            bytes += entry.bytes / 3;
            fits
        });
        within.map(|entry| Arc::clone(&entry.delivery)).collect()
    }
}

impl Drop for ReplayBuffer {
    fn drop(&mut self) {
        self.budget.release_buffer(self.bytes);
        if self.listed != 0 {
            self.budget.unlist(self.listed);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::replay_budget::BUFFER_BYTES;
    use crate::hub::tests::delivery_of;
    use crate::model::Limits;

    const WINDOW_MS: u64 = 1_000;

    fn budget(ring_bytes: usize, rings_bytes: usize) -> Arc<ReplayBudget> {
        let limits = Limits { ring_bytes, rings_bytes, resume_window_ms: WINDOW_MS, ..Limits::default() };
        ReplayBudget::new(&limits)
    }

    fn at(offset: u64) -> ChannelPosition {
        ChannelPosition::own(Stamp { incarnation: 9, sequence: offset })
    }

    fn sequences(buffer: &ReplayBuffer, after: u64) -> Vec<u64> {
        buffer.after(after, usize::MAX).iter().map(|delivery| delivery.offset()).collect()
    }

    #[test]
    fn replay_buffer_gives_deliveries_after_position_in_order() {
        let mut buffer = ReplayBuffer::open(at(10), &budget(1 << 20, 1 << 20)).expect("the budget has room");
        buffer.push(delivery_of(11..=11), 0);
        buffer.push(delivery_of(12..=14), 0);
        buffer.push(delivery_of(15..=15), 0);
        assert_eq!(sequences(&buffer, 10), [11, 14, 15]);
        assert_eq!(sequences(&buffer, 13), [14, 15], "a delivery that is held in part is given");
        assert_eq!(sequences(&buffer, 14), [15]);
        assert_eq!(sequences(&buffer, 15), Vec::<u64>::new());
        assert!(buffer.reaches_back_to(10) && !buffer.reaches_back_to(9));
        assert_eq!(buffer.after(10, 1).len(), 1, "at least one, however small the bound");
    }

    #[test]
    fn replay_buffer_drops_entries_older_than_twice_the_window() {
        let mut buffer = ReplayBuffer::open(at(0), &budget(1 << 20, 1 << 20)).expect("the budget has room");
        buffer.push(delivery_of(1..=1), 0);
        buffer.push(delivery_of(2..=2), 1);
        buffer.drop_old(2 * WINDOW_MS);
        assert!(buffer.reaches_back_to(0));
        buffer.drop_old(2 * WINDOW_MS + 1);
        assert!(!buffer.reaches_back_to(0) && buffer.reaches_back_to(1));
    }

    #[test]
    fn replay_buffer_at_its_bound_and_one_past() {
        let one = delivery_of(1..=1).bytes();
        let mut buffer = ReplayBuffer::open(at(0), &budget(3 * one, 1 << 20)).expect("the budget has room");
        for sequence in 1..=3 {
            buffer.push(delivery_of(sequence..=sequence), 0);
        }
        assert!(buffer.reaches_back_to(0));
        buffer.push(delivery_of(4..=4), 0);
        assert_eq!((buffer.reach(), sequences(&buffer, 1)), (1, vec![2, 3, 4]));
        buffer.push(delivery_of(5..=50), 0);
        assert_eq!(buffer.reach(), 50, "one that is larger than the whole ring is not kept");
    }

    #[test]
    fn replay_buffers_count_their_bytes_in_one_budget() {
        let one = delivery_of(1..=1).bytes();
        let budget = budget(1 << 20, 1 << 20);
        let mut first = ReplayBuffer::open(at(0), &budget).expect("the budget has room");
        let second = ReplayBuffer::open(at(0), &budget).expect("the budget has room");
        first.push(delivery_of(1..=1), 0);
        first.push(delivery_of(2..=2), 0);
        assert_eq!(budget.held(), 2 * BUFFER_BYTES + 2 * one);
        assert_eq!(first.evict(1, 9).len(), 1, "as many as it takes");
        assert_eq!((first.reach(), budget.held()), (1, 2 * BUFFER_BYTES + one));
        drop(second);
        assert_eq!(budget.held(), BUFFER_BYTES + one);
        assert_eq!(first.evict(usize::MAX, 0).len(), 0);
        drop(first);
        assert_eq!(budget.held(), 0);
    }

    #[test]
    fn replay_buffer_beyond_the_budget_is_not_begun() {
        let budget = budget(1 << 20, 2 * BUFFER_BYTES);
        let mut buffers = [0, 1].map(|_| ReplayBuffer::open(at(0), &budget));
        buffers[0].as_mut().expect("within the bound").push(delivery_of(1..=1), 0);
        assert!(buffers.iter().all(Option::is_some), "messages can go");
        assert!(ReplayBuffer::open(at(0), &budget).is_none());
        drop(buffers);
        assert!(ReplayBuffer::open(at(0), &budget).is_some());
    }
}
