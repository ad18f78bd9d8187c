//! Index of a channel's partitions, read as far as a page needs: a hot channel has tens of thousands in a day.

use scylla::response::query_result::QueryResult;
use scylla::statement::prepared::PreparedStatement;

use super::buckets::{HistoryBucket, day_of};
use super::connection::PreparedSession;
use super::failed;
use super::values::kind_value;
use crate::origin::history::{Direction, HistoryPosition, HistoryQuery, StoreError};

// Small in tests, so that they reach the bounds.
/// Partitions that the first request reads, over all days. Few channels have more.
const FIRST: usize = if cfg!(test) { 8 } else { 1_000 };
/// Partitions of one second that each further request reads.
const MORE: usize = if cfg!(test) { 3 } else { 250 };

/// Partitions of one query that the index has not returned yet.
pub(super) struct BucketIndex<'a> {
    database: &'a PreparedSession,
    pub(super) query: &'a HistoryQuery,
    oldest: HistoryPosition,
    newest: HistoryPosition,
    /// Days that were not read yet, both included.
    days: (i32, i32),
    cut: Option<PartialDay>,
    /// Time up to which the index was read, in the direction of the query.
    reaches_ms: u64,
    is_exhausted: bool,
}

/// A day with more partitions than one request reads.
struct PartialDay {
    day: i32,
    /// Number of the first unread partition among the narrowest ones.
    from: i32,
    wide_listed: bool,
}

impl<'a> BucketIndex<'a> {
    pub(super) fn new(
        database: &'a PreparedSession,
        query: &'a HistoryQuery,
        (oldest, newest): (HistoryPosition, HistoryPosition),
    ) -> Self {
        let days = (day_of(oldest.timestamp_ms), day_of(newest.timestamp_ms));
        let reaches_ms = if query.direction == Direction::Backwards { u64::MAX } else { 0 };
        Self { database, query, oldest, newest, days, cut: None, reaches_ms, is_exhausted: false }
    }

    /// Leaves out this day and all later ones, which the caller knows otherwise. To be called before the first read, for a page that goes
    /// backwards.
    pub(super) fn exclude_from_day(&mut self, day: i32) {
        let begins_ms = HistoryBucket::of_day(day).times().start;
        self.reaches_ms = begins_ms;
        self.newest.timestamp_ms = self.newest.timestamp_ms.min(begins_ms.saturating_sub(1));
        self.days.1 = day - 1;
        self.is_exhausted = self.days.0 > self.days.1;
    }

    /// Returns whether a partition that was not returned yet may hold a row before `next`, or any row if there is no `next`.
    pub(super) fn may_precede(&self, next: Option<HistoryPosition>) -> bool {
        let is_beyond = |next: HistoryPosition| match self.query.direction {
            Direction::Backwards => next.timestamp_ms < self.reaches_ms,
            Direction::Forwards => next.timestamp_ms >= self.reaches_ms,
        };
        !self.is_exhausted && next.is_none_or(is_beyond)
    }

    /// Reads further partitions, in any order. The result may be empty although more follow.
    pub(super) async fn more(&mut self) -> Result<Vec<HistoryBucket>, StoreError> {
        let mut found = match self.cut.take() {
            Some(cut) => self.more_of(cut).await?,
            None => self.more_days().await?,
        };
        let (oldest_ms, newest_ms) = (self.oldest.timestamp_ms, self.newest.timestamp_ms);
        found.retain(|bucket| {
            let times = bucket.times();
            times.start <= newest_ms && times.end > oldest_ms
        });
        Ok(found)
    }

    async fn more_days(&mut self) -> Result<Vec<HistoryBucket>, StoreError> {
        let statements = &self.database.statements;
        let statement = match self.query.direction {
            Direction::Backwards => &statements.days_backwards,
            Direction::Forwards => &statements.days_forwards,
        };
        let mut found = self.ask(statement, self.days, FIRST).await?;
        let Some(last) = found.last().filter(|_| found.len() >= FIRST) else {
            self.is_exhausted = true;
            return Ok(found);
        };
        let day = last.day;
        found.retain(|bucket| bucket.day != day);
        let times = HistoryBucket::of_day(day).times();
        let (from, reaches_ms) = match self.query.direction {
            Direction::Backwards => (self.newest.timestamp_ms.min(times.end - 1), times.end),
            Direction::Forwards => (self.oldest.timestamp_ms.max(times.start), times.start),
        };
        self.reaches_ms = reaches_ms;
        self.cut = Some(PartialDay { day, from: HistoryBucket::narrowest(from).number, wide_listed: false });
        Ok(found)
    }

    async fn more_of(&mut self, cut: PartialDay) -> Result<Vec<HistoryBucket>, StoreError> {
        let PartialDay { day, from, wide_listed } = cut;
        let statements = &self.database.statements;
        let is_backwards = self.query.direction == Direction::Backwards;
        let (statement, numbers) = if is_backwards {
            (&statements.buckets_backwards, (HistoryBucket::NARROW.start, from))
        } else {
            (&statements.buckets_forwards, (from, HistoryBucket::NARROW.end - 1))
        };
        let narrow = self.ask_day(statement, day, numbers, MORE).await?;
        match narrow.last().filter(|_| narrow.len() >= MORE) {
            Some(last) => {
                let times = last.times();
                self.reaches_ms = if is_backwards { times.start } else { times.end };
                let from = if is_backwards { last.number - 1 } else { last.number + 1 };
                self.cut = Some(PartialDay { day, from, wide_listed: true });
            }
            None => {
                let times = HistoryBucket::of_day(day).times();
                self.reaches_ms = if is_backwards { times.start } else { times.end };
                if is_backwards {
                    self.days.1 = day - 1
                } else {
                    self.days.0 = day + 1
                }
                self.is_exhausted = self.days.0 > self.days.1;
            }
        }
        if wide_listed {
            return Ok(narrow);
        }
        let wide = (0, HistoryBucket::NARROW.start - 1);
        let mut found = self.ask_day(&statements.buckets_forwards, day, wide, usize::MAX).await?;
        found.extend(narrow);
        Ok(found)
    }
}

impl BucketIndex<'_> {
    async fn ask(
        &self,
        statement: &PreparedStatement,
        (first, last): (i32, i32),
        rows_max: usize,
    ) -> Result<Vec<HistoryBucket>, StoreError> {
        let (account, channel) = (self.query.key.account().as_str(), self.query.key.channel());
        let limit = i32::try_from(rows_max).unwrap_or(i32::MAX);
        let values = (account, channel, kind_value(self.query.kind), first, last, limit);
        let found = self.database.session.execute_unpaged(statement, values).await;
        buckets(found.map_err(failed)?)
    }

    async fn ask_day(
        &self,
        statement: &PreparedStatement,
        day: i32,
        (first, last): (i32, i32),
        rows_max: usize,
    ) -> Result<Vec<HistoryBucket>, StoreError> {
        let (account, channel) = (self.query.key.account().as_str(), self.query.key.channel());
        let limit = i32::try_from(rows_max).unwrap_or(i32::MAX);
        let values = (account, channel, kind_value(self.query.kind), day, first, last, limit);
        let found = self.database.session.execute_unpaged(statement, values).await;
        buckets(found.map_err(failed)?)
    }
}

fn buckets(found: QueryResult) -> Result<Vec<HistoryBucket>, StoreError> {
    let rows = found.into_rows_result().map_err(failed)?;
    let buckets = rows.rows::<(i32, i32)>().map_err(failed)?;
    buckets.map(|row| row.map(|(day, number)| HistoryBucket { day, number }).map_err(failed)).collect()
}
