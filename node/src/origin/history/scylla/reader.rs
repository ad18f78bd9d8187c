//! Reads of history pages, over days and partitions.

use std::collections::HashSet;

use futures_util::future::try_join;

use super::buckets::{HistoryBucket, day_of};
use super::connection::PreparedSession;
use super::index::BucketIndex;
use super::values::{kind_value, position, position_values};
use super::{ScyllaShared, failed};
use crate::origin::history::{
    Direction, HistoryPage, HistoryPosition, HistoryQuery, HistoryRow, RowKind, StoreError,
};

/// Rows that one request fetches.
const CHUNK: usize = 250;
/// Rows left out because of `until` after which a page ends early, so that no read takes long.
const SKIPPED_MAX: usize = 50_000;

pub(super) async fn page(shared: &ScyllaShared, query: &HistoryQuery) -> Result<HistoryPage, StoreError> {
    let mut filling = ScyllaPageBuilder {
        query,
        page: HistoryPage::default(),
        bytes: 0,
        skipped: 0,
        seen: None,
        events: HashSet::new(),
    };
    let Some(range) = HistoryPositionRange::of(query) else { return Ok(filling.page) };
    let database = shared.database();
    let mut index = BucketIndex::new(&database, query, (range.oldest, range.newest));
    let (mut sources, mut unopened) = begin(shared, &database, &mut index, range).await?;
    loop {
        let best = best(&sources, query.direction);
        let next = best.and_then(|source_index| sources[source_index].head());
        // An unopened partition may hold a row before the best one so far.
        if let Some(bucket) = unopened.last()
            && next.is_none_or(|next| may_precede(*bucket, next, query.direction))
        {
            let mut source = BucketReader::new(*bucket, range);
            unopened.pop();
            source.fetch(&database, query, filling.rows_needed()).await?;
            if source.head().is_some() {
                sources.push(source);
            }
            continue;
        }
        if index.may_precede(next) {
            unopened.extend(index.more().await?);
            sort(&mut unopened, query.direction);
            continue;
        }
        let Some(source_index) = best else { return Ok(filling.page) };
        let source = &mut sources[source_index];
        let Some(row) = source.rows.pop() else { return Ok(filling.page) };
        // The row that does not fit is most often the last one that was fetched.
        if !filling.push(row) {
            return Ok(filling.page);
        }
        if source.rows.is_empty() && !source.is_exhausted {
            source.fetch(&database, query, filling.rows_needed()).await?;
        }
        if source.rows.is_empty() {
            sources.swap_remove(source_index);
        }
    }
}

/// Opens the first partitions; returns them, and the unopened ones that the index lists.
async fn begin(
    shared: &ScyllaShared,
    database: &PreparedSession,
    index: &mut BucketIndex<'_>,
    range: HistoryPositionRange,
) -> Result<(Vec<BucketReader>, Vec<HistoryBucket>), StoreError> {
    let query = index.query;
    let rows_max = query.limit.saturating_add(1);
    let today = day_of(shared.time.now_ms());
    // Most often all rows are in the whole-day partition in which the reading begins. The index decides if they are not.
    let day = match query.direction {
        Direction::Backwards => day_of(range.newest.timestamp_ms).min(today),
        Direction::Forwards => day_of(range.oldest.timestamp_ms),
    };
    let mut first = BucketReader::new(HistoryBucket::of_day(day), range);
    let is_covered =
        query.direction == Direction::Backwards && day == today && shared.continuations.cover(day);
    let mut unopened = if is_covered && shared.continuations.was_single_partition(query, day) {
        first.fetch(database, query, rows_max).await?;
        if first.is_alone() {
            shared.continuations.record(query, day, !first.is_exhausted);
            index.exclude_from_day(day);
            return Ok((vec![first], Vec::new()));
        }
        index.more().await?
    } else {
        try_join(index.more(), first.fetch(database, query, rows_max)).await?.0
    };
    shared.continuations.record(query, day, is_covered && first.is_alone() && !first.is_exhausted);
    sort(&mut unopened, query.direction);
    // Later rows that the index lists may have been written since this partition was read, and further rows of this partition before them.
    let is_later =
        |bucket: &HistoryBucket| bucket.times().end > first.bucket.times().start && *bucket != first.bucket;
    let may_be_more = query.direction == Direction::Forwards && index.may_precede(None);
    let mut sources = Vec::new();
    if unopened.contains(&first.bucket) && !may_be_more && !unopened.iter().any(is_later) {
        unopened.retain(|bucket| *bucket != first.bucket);
        sources.extend(Some(first).filter(|first| first.head().is_some()));
    }
    Ok((sources, unopened))
}

/// Sorts the partitions so that the first to be read comes last.
fn sort(buckets: &mut [HistoryBucket], direction: Direction) {
    match direction {
        Direction::Backwards => buckets.sort_by_key(|bucket| bucket.times().end),
        Direction::Forwards => buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.times().start)),
    }
}

fn may_precede(bucket: HistoryBucket, next: HistoryPosition, direction: Direction) -> bool {
    match direction {
        Direction::Backwards => bucket.times().end > next.timestamp_ms,
        Direction::Forwards => bucket.times().start <= next.timestamp_ms,
    }
}

/// Index of the source that has the next row.
fn best(sources: &[BucketReader], direction: Direction) -> Option<usize> {
    let heads =
        sources.iter().enumerate().filter_map(|(source_index, source)| Some((source.head()?, source_index)));
    let best = match direction {
        Direction::Backwards => heads.max(),
        Direction::Forwards => heads.min(),
    };
    best.map(|(_, source_index)| source_index)
}

/// Range of a query's rows, with both ends but without the cursor.
#[derive(Debug, Clone, Copy)]
struct HistoryPositionRange {
    oldest: HistoryPosition,
    newest: HistoryPosition,
    cursor: Option<HistoryPosition>,
}

impl HistoryPositionRange {
    /// Returns `None` if no row can be in the range.
    fn of(query: &HistoryQuery) -> Option<Self> {
        let (oldest, newest) = query.ends()?;
        Some(Self { oldest, newest, cursor: query.cursor })
    }
}

/// Remaining rows of one partition.
struct BucketReader {
    bucket: HistoryBucket,
    range: HistoryPositionRange,
    /// Fetched rows, the next one last.
    rows: Vec<StoredRow>,
    is_exhausted: bool,
    /// Continuation mark of the partition, as the last fetched row says; `None` if unknown.
    is_continued: Option<bool>,
}

struct StoredRow {
    position: HistoryPosition,
    id: String,
    record: String,
}

impl BucketReader {
    fn new(bucket: HistoryBucket, range: HistoryPositionRange) -> Self {
        Self { bucket, range, rows: Vec::new(), is_exhausted: false, is_continued: None }
    }

    /// Returns whether the partition, of a day with reliable marks, holds all rows of its day and of later days.
    fn is_alone(&self) -> bool {
        self.is_continued == Some(false)
    }

    fn head(&self) -> Option<HistoryPosition> {
        self.rows.last().map(|row| row.position)
    }

    /// Fetches the next rows.
    async fn fetch(
        &mut self,
        database: &PreparedSession,
        query: &HistoryQuery,
        rows_max: usize,
    ) -> Result<(), StoreError> {
        let limit = i32::try_from(rows_max.min(CHUNK)).unwrap_or(i32::MAX);
        let (account, channel) = (query.key.account().as_str(), query.key.channel());
        let HistoryPositionRange { oldest, newest, cursor } = self.range;
        let is_backwards = query.direction == Direction::Backwards;
        // The range excludes the end at which the reading begins, and includes the other one.
        let begin = if is_backwards { newest } else { oldest };
        let (mut t, mut s, mut i) = position_values(begin);
        if cursor != Some(begin) {
            // Moves the end so that it includes every possible row with its timestamp.
            (s, i) = if is_backwards { (i64::MAX, i64::MAX) } else { (-1, i64::MIN) };
            if is_backwards {
                (t, s, i) = (t.saturating_add(1), -1, i64::MIN);
            }
        }
        let (end_t, end_s, end_i) = position_values(if is_backwards { oldest } else { newest });
        let kind = kind_value(query.kind);
        let HistoryBucket { day, number } = self.bucket;
        let values = (account, channel, kind, day, number, t, s, i, end_t, end_s, end_i, limit);
        let statements = &database.statements;
        let statement = if is_backwards { &statements.backwards } else { &statements.forwards };
        let found = database.session.execute_unpaged(statement, values).await.map_err(failed)?;
        let found = found.into_rows_result().map_err(failed)?;
        self.is_exhausted = found.rows_num() < usize::try_from(limit).unwrap_or(usize::MAX);
        type Columns = (i64, i64, i64, Option<String>, String, Option<bool>);
        for row in found.rows::<Columns>().map_err(failed)? {
            let (timestamp_ms, sequence, incarnation, id, record, is_continued) = row.map_err(failed)?;
            self.is_continued = Some(is_continued.unwrap_or(false));
            let position = position((timestamp_ms, sequence, incarnation));
            self.rows.push(StoredRow { position, id: id.unwrap_or_default(), record });
        }
        if let Some(last) = self.rows.last() {
            let reached = Some(last.position);
            if is_backwards {
                (self.range.newest, self.range.cursor) = (last.position, reached);
            } else {
                (self.range.oldest, self.range.cursor) = (last.position, reached);
            }
        }
        self.rows.reverse();
        Ok(())
    }
}

struct ScyllaPageBuilder<'a> {
    query: &'a HistoryQuery,
    page: HistoryPage,
    bytes: usize,
    skipped: usize,
    seen: Option<HistoryPosition>,
    /// Ids of the events on the page, since several nodes may have written the same event.
    events: HashSet<String>,
}

impl ScyllaPageBuilder<'_> {
    /// Rows to fetch: one more than fits, which shows whether more follow.
    fn rows_needed(&self) -> usize {
        (self.query.limit - self.page.rows.len()).saturating_add(1)
    }

    /// Adds a row. Returns false once the page is full; `next` is then set, since a row was left.
    fn push(&mut self, row: StoredRow) -> bool {
        let StoredRow { position, id, record } = row;
        let is_full = self.page.rows.len() >= self.query.limit
            || (self.bytes >= self.query.bytes_max && !self.page.rows.is_empty());
        if is_full || self.skipped >= SKIPPED_MAX {
            self.page.next = self.seen;
            return false;
        }
        self.seen = Some(position);
        let is_repeated = self.query.kind == RowKind::Presence && !id.is_empty() && !self.events.insert(id);
        if is_repeated || self.is_live(position) {
            self.skipped += 1;
            return true;
        }
        self.bytes += record.len();
        self.page.rows.push(HistoryRow { position, json: record.into() });
        true
    }

    /// Returns whether a client that attaches with the serial of `until` receives this row live.
    fn is_live(&self, position: HistoryPosition) -> bool {
        let until = self.query.until.as_ref();
        let reached = until.and_then(|serial| serial.sequence_of(position.incarnation));
        reached.is_some_and(|sequence| position.sequence > sequence)
    }
}
