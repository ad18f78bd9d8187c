//! Continuation marks: the partition of a channel's whole day says whether narrower partitions of that day, or any of a later day, exist.
//!
//! A mark is written together with the index, before a row of such a partition is acknowledged. So without a mark the newest rows are
//! those of the present day's partition, and a page of them needs no other request. A mark lasts until its day has ended on every node,
//! which assumes that clocks differ by less than a day.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use futures_util::future::try_join_all;

use super::buckets::{HistoryBucket, day_of};
use super::connection::PreparedSession;
use super::values::{kind_value, ttl_s, written_at};
use super::{DAY_MS, ScyllaShared, failed};
use crate::model::ChannelKey;
use crate::origin::history::{HistoryQuery, RowKind, StoreError};

/// Days ahead for which incarnations of the version before, which write no marks, may have written rows.
const AHEAD_DAYS: i32 = 2;
/// Days before a row's day whose partitions are marked, for a node whose clock is ahead.
const DAYS_MAX: i32 = 32;
/// Slots for queries whose extent is known; of two queries in one slot the later one is remembered.
const QUERIES: usize = 4_096;

pub(super) struct Continuations {
    /// First day from which all partitions are marked; later than any day while that is unknown.
    from: AtomicI32,
    /// Queries that one partition answered when they were last asked.
    single_partition: Box<[AtomicU64]>,
}

impl Continuations {
    pub(super) fn new() -> Self {
        let single_partition = std::iter::repeat_with(|| AtomicU64::new(0)).take(QUERIES).collect();
        Self { from: AtomicI32::new(i32::MAX), single_partition }
    }

    /// Returns whether the day's partition says reliably whether it is the only one.
    pub(super) fn cover(&self, day: i32) -> bool {
        day >= self.from.load(Ordering::Relaxed)
    }

    fn are_known(&self) -> bool {
        self.cover(i32::MAX - 1)
    }

    #[cfg(test)]
    pub(super) fn from(&self) -> i32 {
        self.from.load(Ordering::Relaxed)
    }

    /// Returns whether one partition probably holds the whole page again. This is only a guess.
    pub(super) fn was_single_partition(&self, query: &HistoryQuery, day: i32) -> bool {
        let (slot, name) = self.slot(query, day);
        slot.load(Ordering::Relaxed) == name
    }

    pub(super) fn record(&self, query: &HistoryQuery, day: i32, is_alone: bool) {
        let (slot, name) = self.slot(query, day);
        if is_alone {
            slot.store(name, Ordering::Relaxed);
        } else if slot.load(Ordering::Relaxed) == name {
            slot.store(0, Ordering::Relaxed);
        }
    }

    fn slot(&self, query: &HistoryQuery, day: i32) -> (&AtomicU64, u64) {
        let mut hasher = DefaultHasher::new();
        (&query.key, query.kind, query.limit, day).hash(&mut hasher);
        let name = hasher.finish();
        let at = usize::try_from(name % QUERIES as u64).unwrap_or(0);
        (&self.single_partition[at], name)
    }
}

/// Marks the whole-day partitions of earlier days, and that of the bucket's own day if the bucket is narrower.
pub(super) async fn mark_continued(
    shared: &ScyllaShared,
    database: &PreparedSession,
    key: &ChannelKey,
    (kind, bucket): (RowKind, HistoryBucket),
) -> Result<(), StoreError> {
    let now_ms = shared.time.now_ms();
    let is_narrow = bucket != HistoryBucket::of_day(bucket.day);
    let first = (bucket.day - 1).min(day_of(now_ms).max(bucket.day - DAYS_MAX));
    let rows = (first..bucket.day + i32::from(is_narrow)).map(|day| {
        let times = HistoryBucket::of_day(day).times();
        let left_ms = times.end.saturating_add(DAY_MS).saturating_sub(now_ms);
        // At least two days, so that the mark outlives its own day even if the clock of this node is behind.
        let ttl = ttl_s(left_ms.max(2 * DAY_MS), 0).unwrap_or(i32::MAX);
        let (account, channel) = (key.account().as_str(), key.channel());
        // Write time within its day, like the rows: the database drops an SSTable as a whole once it is older than all live data.
        (ttl, written_at(times.start), account, channel, kind_value(kind), day)
    });
    // Each mark is in a partition of its own.
    let each: Vec<_> =
        rows.map(|row| database.session.execute_unpaged(&database.statements.set_continued, row)).collect();
    try_join_all(each).await.map(drop).map_err(failed)
}

/// Reads the first day from which all partitions are marked, unless it is known.
pub(super) async fn read(shared: &ScyllaShared) -> Result<(), StoreError> {
    if shared.continuations.are_known() {
        return Ok(());
    }
    let database = shared.database();
    let found = database.session.execute_unpaged(&database.statements.marked_from, ()).await;
    let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
    if let Some((Some(from),)) = rows.maybe_first_row::<(Option<i32>,)>().map_err(failed)? {
        shared.continuations.from.store(from, Ordering::Relaxed);
    }
    Ok(())
}

/// Sets the first marked day once all incarnations that can write also mark. All later ones do, since the version before does not start on
/// this schema.
pub(super) async fn set_first_day(shared: &ScyllaShared, do_all_mark: bool) -> Result<(), StoreError> {
    read(shared).await?;
    if shared.continuations.are_known() || !do_all_mark {
        return Ok(());
    }
    let from = day_of(shared.time.now_ms()).saturating_add(AHEAD_DAYS);
    let database = shared.database();
    let set = database.session.execute_unpaged(&database.statements.set_marked_from, (from,)).await;
    set.map_err(failed)?;
    shared.continuations.from.store(from, Ordering::Relaxed);
    tracing::info!(day = from, "single-request reads of newest messages enabled from this day");
    Ok(())
}
