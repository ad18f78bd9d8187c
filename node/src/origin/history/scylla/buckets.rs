//! Partitions of a channel's history: assignment of rows, and the times that each partition holds.
//!
//! A channel's day is one partition. When a node has filled it, the node goes on with a partition of the hour, then of the minute, then of
//! each second. At the begin of an hour or minute it returns to the wider partition of that hour or minute.
//!
//! The number of a partition determines its times. So nodes need not agree on anything, and a reader knows where to look.

use std::collections::HashMap;
use std::ops::Range;

use parking_lot::Mutex;

use super::{DAY_MS, HOUR_MS};
use crate::model::ChannelKey;
use crate::origin::history::RowKind;

const MINUTE_MS: u64 = 60_000;
/// Width of the partitions of each level, with the number of the first one in a day.
const WIDTHS: [(u64, u64); 4] = [(DAY_MS, 0), (HOUR_MS, 1), (MINUTE_MS, 25), (1_000, 1_465)];
/// Channels whose fill levels are known. Beyond it the least recently written ones are dropped, and their partitions are indexed again.
const KNOWN_MAX: usize = 65_536;

/// One partition of a channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct HistoryBucket {
    /// Days since 1970.
    pub(super) day: i32,
    pub(super) number: i32,
}

impl HistoryBucket {
    /// Numbers of the narrowest partitions of a day.
    pub(super) const NARROW: Range<i32> = 1_465..87_865;

    pub(super) fn of_day(day: i32) -> Self {
        Self { day, number: 0 }
    }

    pub(super) fn narrowest(timestamp_ms: u64) -> Self {
        Self::of(timestamp_ms, WIDTHS.len() - 1)
    }

    fn of(timestamp_ms: u64, level: usize) -> Self {
        let (width_ms, first) = WIDTHS[level];
        let number = first + timestamp_ms % DAY_MS / width_ms;
        Self { day: day_of(timestamp_ms), number: i32::try_from(number).unwrap_or(i32::MAX) }
    }

    /// Times that the partition holds.
    pub(super) fn times(self) -> Range<u64> {
        let day_ms = u64::try_from(self.day).unwrap_or(0).saturating_mul(DAY_MS);
        let number = u64::try_from(self.number).unwrap_or(0);
        let (width_ms, first) =
            WIDTHS.into_iter().rev().find(|(_, first)| number >= *first).unwrap_or(WIDTHS[0]);
        let start_ms = day_ms.saturating_add((number - first) * width_ms);
        start_ms..start_ms.saturating_add(width_ms)
    }
}

pub(super) fn day_of(timestamp_ms: u64) -> i32 {
    i32::try_from(timestamp_ms / DAY_MS).unwrap_or(i32::MAX)
}

/// Rows and bytes that this node writes to one partition. Each further node can add as much.
#[derive(Debug, Clone, Copy)]
pub(super) struct BucketBounds {
    pub(super) rows: u64,
    pub(super) bytes: u64,
}

pub(super) struct Buckets {
    pub(super) bounds: BucketBounds,
    known: Mutex<RecentBucketFills>,
}

/// Fill levels in two halves; the older half is dropped when the recent one is full.
#[derive(Default)]
struct RecentBucketFills {
    recent: HashMap<(ChannelKey, RowKind), BucketFill>,
    older: HashMap<(ChannelKey, RowKind), BucketFill>,
}

/// Fill level of the partition that one writer writes to.
#[derive(Clone, Copy)]
pub(super) struct BucketFill {
    bucket: HistoryBucket,
    level: usize,
    /// The time of the last row.
    last_ms: u64,
    rows: u64,
    bytes: u64,
    /// Time until which the index lists the partition.
    indexed_until_ms: u64,
}

impl Buckets {
    pub(super) fn new(bounds: BucketBounds) -> Self {
        Self { bounds, known: Mutex::default() }
    }

    /// Assigns a row to a partition. Also returns until when the index must list the partition, unless it already does.
    pub(super) fn assign(
        &self,
        key: &ChannelKey,
        kind: RowKind,
        timestamp_ms: u64,
        bytes: u64,
        kept_until_ms: u64,
    ) -> (HistoryBucket, Option<u64>) {
        let mut known = self.known.lock();
        let filling = known.filling(key, kind, timestamp_ms);
        let bucket = filling.assign(self.bounds, timestamp_ms, bytes);
        (bucket, (filling.indexed_until_ms < kept_until_ms).then(|| indexed_until_ms(kept_until_ms)))
    }

    /// Records that the index lists the partition until `until_ms`.
    pub(super) fn set_indexed(&self, key: &ChannelKey, kind: RowKind, bucket: HistoryBucket, until_ms: u64) {
        let mut known = self.known.lock();
        let filling = known.filling(key, kind, bucket.times().start);
        if filling.bucket == bucket {
            filling.indexed_until_ms = until_ms.max(filling.indexed_until_ms);
        }
    }
}

/// Time until which the index lists a partition: a day longer than its row is kept, so that later rows of the same day need no new entry.
pub(super) fn indexed_until_ms(kept_until_ms: u64) -> u64 {
    kept_until_ms.saturating_add(DAY_MS)
}

impl RecentBucketFills {
    fn filling(&mut self, key: &ChannelKey, kind: RowKind, timestamp_ms: u64) -> &mut BucketFill {
        let name = (key.clone(), kind);
        if self.recent.len() >= KNOWN_MAX / 2 && !self.recent.contains_key(&name) {
            self.older = std::mem::take(&mut self.recent);
        }
        let older = self.older.remove(&name);
        self.recent.entry(name).or_insert_with(|| older.unwrap_or_else(|| BucketFill::begin(timestamp_ms, 0)))
    }
}

impl BucketFill {
    /// Starts with the widest partition.
    pub(super) fn new(timestamp_ms: u64) -> Self {
        Self::begin(timestamp_ms, 0)
    }

    fn begin(timestamp_ms: u64, level: usize) -> Self {
        let bucket = HistoryBucket::of(timestamp_ms, level);
        Self { bucket, level, last_ms: timestamp_ms, rows: 0, bytes: 0, indexed_until_ms: 0 }
    }

    /// Assigns the next row to a partition.
    pub(super) fn assign(&mut self, bounds: BucketBounds, timestamp_ms: u64, bytes: u64) -> HistoryBucket {
        if day_of(timestamp_ms) != self.bucket.day {
            *self = Self::new(timestamp_ms);
        }
        let is_full = self.rows >= bounds.rows || self.bytes >= bounds.bytes;
        let level = (self.level + usize::from(is_full)).min(WIDTHS.len() - 1);
        // At the begin of an hour or a minute, its own partition is still empty.
        let began = |level: &usize| {
            HistoryBucket::of(self.last_ms, *level) != HistoryBucket::of(timestamp_ms, *level)
        };
        let level = (1..level).find(began).unwrap_or(level);
        self.last_ms = timestamp_ms;
        if HistoryBucket::of(timestamp_ms, level) != self.bucket {
            *self = Self::begin(timestamp_ms, level);
        }
        self.rows += 1;
        self.bytes += bytes;
        self.bucket
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{AccountId, ChannelName};

    #[test]
    fn partition_number_gives_its_time_range() {
        let timestamp_ms = 20_000 * DAY_MS + 23 * HOUR_MS + 59 * MINUTE_MS + 59_999;
        for (level, (width_ms, _)) in WIDTHS.into_iter().enumerate() {
            for timestamp_ms in [timestamp_ms, 20_000 * DAY_MS, 20_000 * DAY_MS + 5 * HOUR_MS + 61_000] {
                let times = HistoryBucket::of(timestamp_ms, level).times();
                assert!(times.contains(&timestamp_ms), "{level}: {times:?}");
                assert_eq!(times.end - times.start, width_ms);
            }
        }
        let numbers: Vec<i32> = (0..4).map(|level| HistoryBucket::of(timestamp_ms, level).number).collect();
        assert_eq!(numbers, [0, 24, 1_464, 87_864]);
        assert_eq!(HistoryBucket::NARROW, 1_465..HistoryBucket::narrowest(DAY_MS - 1).number + 1);
        assert_eq!(HistoryBucket::narrowest(0).number, HistoryBucket::NARROW.start);
    }

    #[test]
    fn a_full_partition_is_followed_by_narrower_ones() {
        let buckets = Buckets::new(BucketBounds { rows: 2, bytes: 100 });
        let key = ChannelKey::new(AccountId::new("acme"), ChannelName::of("a"));
        let place = |timestamp_ms, bytes| {
            buckets.assign(&key, RowKind::Messages, timestamp_ms, bytes, timestamp_ms + 1)
        };
        let numbers: Vec<i32> = (0..9).map(|at| place(at, 1).0.number).collect();
        assert_eq!(numbers, [0, 0, 1, 1, 25, 25, 1_465, 1_465, 1_465], "the narrowest takes what comes");
        let second_later: Vec<i32> = (0..3).map(|at| place(1_000 + at, 1).0.number).collect();
        assert_eq!(second_later, [1_466; 3]);
        let minute_later: Vec<i32> = (0..4).map(|at| place(MINUTE_MS + at, 1).0.number).collect();
        assert_eq!(minute_later, [26, 26, 1_525, 1_525], "a minute that begins is tried as a whole");
        let hour_later: Vec<i32> = (0..6).map(|at| place(HOUR_MS + at, 1).0.number).collect();
        assert_eq!(hour_later, [2, 2, 85, 85, 5_065, 5_065], "and so is an hour");
        assert_eq!(place(DAY_MS - 1, 1).0.number, 24, "never the day, which is full");
        assert_eq!(place(DAY_MS, 200).0, HistoryBucket { day: 1, number: 0 }, "a new day begins anew");
        assert_eq!(place(DAY_MS + HOUR_MS, 1).0, HistoryBucket { day: 1, number: 2 }, "bytes count as well");
    }

    #[test]
    fn partition_is_indexed_once() {
        let buckets = Buckets::new(BucketBounds { rows: 100, bytes: 100 });
        let key = ChannelKey::new(AccountId::new("acme"), ChannelName::of("a"));
        let assign = |kind, at_ms, kept_ms| buckets.assign(&key, kind, at_ms, 1, at_ms + kept_ms);
        let until_ms = 5 + HOUR_MS + DAY_MS;
        let (bucket, until) = assign(RowKind::Messages, 5, HOUR_MS);
        assert_eq!(until, Some(until_ms));
        assert!(assign(RowKind::Messages, 5, HOUR_MS).1.is_some(), "it was not told yet");
        buckets.set_indexed(&key, RowKind::Messages, bucket, until_ms);
        for at_ms in [5, 6, HOUR_MS, DAY_MS - 1] {
            assert_eq!(assign(RowKind::Messages, at_ms, HOUR_MS), (bucket, None), "at {at_ms}");
        }
        assert!(
            assign(RowKind::Messages, DAY_MS - 1, 2 * HOUR_MS).1.is_some(),
            "this row outlives what was told"
        );
        assert!(assign(RowKind::Presence, 5, HOUR_MS).1.is_some(), "events have partitions of their own");
        assert!(assign(RowKind::Messages, DAY_MS, HOUR_MS).1.is_some(), "the next day is another partition");
    }
}
