//! What the whole day's partition of a channel says of its others: that there are some, narrower ones of that day or any of a later one.
//!
//! A mark is written together with the index, before a row of such a partition is acknowledged. So where nothing is marked the
//! newest rows are those of the present day's partition, and a page of them asks for nothing else. A mark lasts until its day is over on
//! every node: clocks that are less than a day apart are taken for granted.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};

use futures_util::future::try_join_all;

use super::buckets::{Bucket, day_of};
use super::connection::Database;
use super::values::{kind_value, ttl_s, written_at};
use super::{DAY_MS, Shared, failed};
use crate::model::ChannelKey;
use crate::origin::history::{HistoryQuery, RowKind, StoreError};

/// Runs of the version before, which mark nothing, may have written so many days ahead.
const AHEAD_DAYS: i32 = 2;
/// Days before that of a row whose partitions tell of it, where the clock of its node is ahead.
const DAYS_MAX: i32 = 32;
/// Queries of which is known how far they go; of two in one place the later one is.
const QUERIES: usize = 4_096;

pub(super) struct Marks {
    /// The first day of which everything is marked; later than any where that is not known.
    from: AtomicI32,
    /// Queries that were answered by one partition when they were asked last.
    alone: Box<[AtomicU64]>,
}

impl Marks {
    pub(super) fn new() -> Self {
        let alone = std::iter::repeat_with(|| AtomicU64::new(0)).take(QUERIES).collect();
        Self { from: AtomicI32::new(i32::MAX), alone }
    }

    /// A day whose partition says whether it is the only one.
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

    /// Most likely one partition is all of the page again. It need not be.
    pub(super) fn was_alone(&self, query: &HistoryQuery, day: i32) -> bool {
        let (place, name) = self.place(query, day);
        place.load(Ordering::Relaxed) == name
    }

    pub(super) fn note(&self, query: &HistoryQuery, day: i32, is_alone: bool) {
        let (place, name) = self.place(query, day);
        if is_alone {
            place.store(name, Ordering::Relaxed);
        } else if place.load(Ordering::Relaxed) == name {
            place.store(0, Ordering::Relaxed);
        }
    }

    fn place(&self, query: &HistoryQuery, day: i32) -> (&AtomicU64, u64) {
        let mut hasher = DefaultHasher::new();
        (&query.key, query.kind, query.limit, day).hash(&mut hasher);
        let name = hasher.finish();
        let at = usize::try_from(name % QUERIES as u64).unwrap_or(0);
        (&self.alone[at], name)
    }
}

/// Marks the partitions that do not tell of this one by themselves.
pub(super) async fn mark(
    shared: &Shared,
    database: &Database,
    key: &ChannelKey,
    (kind, bucket): (RowKind, Bucket),
) -> Result<(), StoreError> {
    let now_ms = shared.time.now_ms();
    let is_narrow = bucket != Bucket::whole(bucket.day);
    let first = (bucket.day - 1).min(day_of(now_ms).max(bucket.day - DAYS_MAX));
    let marks = (first..bucket.day + i32::from(is_narrow)).map(|day| {
        let times = Bucket::whole(day).times();
        let left_ms = times.end.saturating_add(DAY_MS).saturating_sub(now_ms);
        // Also where the clock of this node is behind: the mark is there as long as its own day lasts.
        let ttl = ttl_s(left_ms.max(2 * DAY_MS), 0).unwrap_or(i32::MAX);
        let (account, channel) = (key.account().as_str(), key.channel());
        // A time of its day, as the rows have: a table of the database's is dropped once it is older than all that lives.
        (ttl, written_at(times.start), account, channel, kind_value(kind), day)
    });
    // Each is of a partition of its own.
    let each: Vec<_> =
        marks.map(|mark| database.session.execute_unpaged(&database.statements.mark, mark)).collect();
    try_join_all(each).await.map(drop).map_err(failed)
}

/// Reads since when everything is marked, where that is not known yet.
pub(super) async fn read(shared: &Shared) -> Result<(), StoreError> {
    if shared.marks.are_known() {
        return Ok(());
    }
    let database = shared.database();
    let found = database.session.execute_unpaged(&database.statements.marked_from, ()).await;
    let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
    if let Some((Some(from),)) = rows.maybe_first_row::<(Option<i32>,)>().map_err(failed)? {
        shared.marks.from.store(from, Ordering::Relaxed);
    }
    Ok(())
}

/// When all runs that can write mark, so do all that follow: a run of the version before does not start over this schema.
pub(super) async fn agree(shared: &Shared, do_all_mark: bool) -> Result<(), StoreError> {
    read(shared).await?;
    if shared.marks.are_known() || !do_all_mark {
        return Ok(());
    }
    let from = day_of(shared.time.now_ms()).saturating_add(AHEAD_DAYS);
    let database = shared.database();
    let set = database.session.execute_unpaged(&database.statements.set_marked_from, (from,)).await;
    set.map_err(failed)?;
    shared.marks.from.store(from, Ordering::Relaxed);
    tracing::info!(day = from, "from this day on a page of the newest messages is read with one request");
    Ok(())
}
