//! Which partitions a channel has, read as a page needs to know: a hot channel has tens of thousands in a day.

use scylla::response::query_result::QueryResult;
use scylla::statement::prepared::PreparedStatement;

use super::buckets::{Bucket, day_of};
use super::connection::Database;
use super::failed;
use super::values::kind_value;
use crate::origin::history::{Direction, HistoryQuery, Position, StoreError};

// Small in tests, so that they come to the end of it.
/// Partitions that are asked for at first, of all days together. Few channels have more.
const FIRST: usize = if cfg!(test) { 8 } else { 1_000 };
/// The same of one second each, further on.
const MORE: usize = if cfg!(test) { 3 } else { 250 };

/// The partitions of one query that are not told yet.
pub(super) struct Index<'a> {
    database: &'a Database,
    pub(super) query: &'a HistoryQuery,
    oldest: Position,
    newest: Position,
    /// The days that were not asked for, both included.
    days: (i32, i32),
    cut: Option<Cut>,
    /// What is told reaches to this time, from where the reading begins.
    reaches_ms: u64,
    is_over: bool,
}

/// A day with more partitions than are asked for at once.
struct Cut {
    day: i32,
    /// Of the narrowest ones, the number of the first that was not asked for.
    from: i32,
    wide_told: bool,
}

impl<'a> Index<'a> {
    pub(super) fn new(
        database: &'a Database,
        query: &'a HistoryQuery,
        (oldest, newest): (Position, Position),
    ) -> Self {
        let days = (day_of(oldest.timestamp_ms), day_of(newest.timestamp_ms));
        let reaches_ms = if query.direction == Direction::Backwards { u64::MAX } else { 0 };
        Self { database, query, oldest, newest, days, cut: None, reaches_ms, is_over: false }
    }

    /// Everything from this day on is known from elsewhere. To be called before anything is asked, where a page goes backwards.
    pub(super) fn leave_out_from(&mut self, day: i32) {
        let begins_ms = Bucket::whole(day).times().start;
        self.reaches_ms = begins_ms;
        self.newest.timestamp_ms = self.newest.timestamp_ms.min(begins_ms.saturating_sub(1));
        self.days.1 = day - 1;
        self.is_over = self.days.0 > self.days.1;
    }

    /// A partition that is not told yet may hold what is to be read before `next`, or at all when there is nothing else.
    pub(super) fn may_precede(&self, next: Option<Position>) -> bool {
        let is_beyond = |next: Position| match self.query.direction {
            Direction::Backwards => next.timestamp_ms < self.reaches_ms,
            Direction::Forwards => next.timestamp_ms >= self.reaches_ms,
        };
        !self.is_over && next.is_none_or(is_beyond)
    }

    /// Some more, in any order; there may be none among them, and yet more behind.
    pub(super) async fn more(&mut self) -> Result<Vec<Bucket>, StoreError> {
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

    async fn more_days(&mut self) -> Result<Vec<Bucket>, StoreError> {
        let statements = &self.database.statements;
        let statement = match self.query.direction {
            Direction::Backwards => &statements.days_backwards,
            Direction::Forwards => &statements.days_forwards,
        };
        let mut found = self.ask(statement, self.days, FIRST).await?;
        let Some(last) = found.last().filter(|_| found.len() >= FIRST) else {
            self.is_over = true;
            return Ok(found);
        };
        let day = last.day;
        found.retain(|bucket| bucket.day != day);
        let times = Bucket::whole(day).times();
        let (from, reaches_ms) = match self.query.direction {
            Direction::Backwards => (self.newest.timestamp_ms.min(times.end - 1), times.end),
            Direction::Forwards => (self.oldest.timestamp_ms.max(times.start), times.start),
        };
        self.reaches_ms = reaches_ms;
        self.cut = Some(Cut { day, from: Bucket::narrowest(from).number, wide_told: false });
        Ok(found)
    }

    async fn more_of(&mut self, cut: Cut) -> Result<Vec<Bucket>, StoreError> {
        let Cut { day, from, wide_told } = cut;
        let statements = &self.database.statements;
        let is_backwards = self.query.direction == Direction::Backwards;
        let (statement, numbers) = if is_backwards {
            (&statements.buckets_backwards, (Bucket::NARROW.start, from))
        } else {
            (&statements.buckets_forwards, (from, Bucket::NARROW.end - 1))
        };
        let narrow = self.ask_day(statement, day, numbers, MORE).await?;
        match narrow.last().filter(|_| narrow.len() >= MORE) {
            Some(last) => {
                let times = last.times();
                self.reaches_ms = if is_backwards { times.start } else { times.end };
                let from = if is_backwards { last.number - 1 } else { last.number + 1 };
                self.cut = Some(Cut { day, from, wide_told: true });
            }
            None => {
                let times = Bucket::whole(day).times();
                self.reaches_ms = if is_backwards { times.start } else { times.end };
                if is_backwards {
                    self.days.1 = day - 1
                } else {
                    self.days.0 = day + 1
                }
                self.is_over = self.days.0 > self.days.1;
            }
        }
        if wide_told {
            return Ok(narrow);
        }
        let wide = (0, Bucket::NARROW.start - 1);
        let mut found = self.ask_day(&statements.buckets_forwards, day, wide, usize::MAX).await?;
        found.extend(narrow);
        Ok(found)
    }
}

impl Index<'_> {
    async fn ask(
        &self,
        statement: &PreparedStatement,
        (first, last): (i32, i32),
        rows_max: usize,
    ) -> Result<Vec<Bucket>, StoreError> {
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
    ) -> Result<Vec<Bucket>, StoreError> {
        let (account, channel) = (self.query.key.account().as_str(), self.query.key.channel());
        let limit = i32::try_from(rows_max).unwrap_or(i32::MAX);
        let values = (account, channel, kind_value(self.query.kind), day, first, last, limit);
        let found = self.database.session.execute_unpaged(statement, values).await;
        buckets(found.map_err(failed)?)
    }
}

fn buckets(found: QueryResult) -> Result<Vec<Bucket>, StoreError> {
    let rows = found.into_rows_result().map_err(failed)?;
    let buckets = rows.rows::<(i32, i32)>().map_err(failed)?;
    buckets.map(|row| row.map(|(day, number)| Bucket { day, number }).map_err(failed)).collect()
}
