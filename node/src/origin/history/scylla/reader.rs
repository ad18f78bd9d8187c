//! Pages of history, over days and partitions.

use std::collections::HashSet;

use futures_util::future::try_join;

use super::buckets::{Bucket, day_of};
use super::connection::Database;
use super::index::Index;
use super::values::{kind_value, position, position_values};
use super::{Shared, failed};
use crate::origin::history::{Direction, HistoryPage, HistoryQuery, Position, Row, RowKind, StoreError};

/// Rows that are asked for at once.
const CHUNK: usize = 250;
/// A page ends early after this many rows that `until` leaves out, so that no read takes long.
const SKIPPED_MAX: usize = 50_000;

/// One page.
pub(super) async fn page(shared: &Shared, query: &HistoryQuery) -> Result<HistoryPage, StoreError> {
    let mut filling = Filling {
        query,
        page: HistoryPage::default(),
        bytes: 0,
        skipped: 0,
        seen: None,
        events: HashSet::new(),
    };
    let Some(range) = Range::of(query) else { return Ok(filling.page) };
    let database = shared.database();
    let mut index = Index::new(&database, query, (range.oldest, range.newest));
    let (mut sources, mut unopened) = begin(shared, &database, &mut index, range).await?;
    loop {
        let best = best(&sources, query.direction);
        let next = best.and_then(|place| sources[place].head());
        // A partition that is not looked at yet may hold what comes before the best so far.
        if let Some(bucket) = unopened.last()
            && next.is_none_or(|next| may_precede(*bucket, next, query.direction))
        {
            let mut source = Source::new(*bucket, range);
            unopened.pop();
            source.fetch(&database, query, filling.wants()).await?;
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
        let Some(place) = best else { return Ok(filling.page) };
        let source = &mut sources[place];
        let Some(row) = source.rows.pop() else { return Ok(filling.page) };
        // The row that does not fit any more is most often the last that was asked for.
        if !filling.take(row) {
            return Ok(filling.page);
        }
        if source.rows.is_empty() && !source.is_over {
            source.fetch(&database, query, filling.wants()).await?;
        }
        if source.rows.is_empty() {
            sources.swap_remove(place);
        }
    }
}

/// The partitions that are open, and others that are told.
async fn begin(
    shared: &Shared,
    database: &Database,
    index: &mut Index<'_>,
    range: Range,
) -> Result<(Vec<Source>, Vec<Bucket>), StoreError> {
    let query = index.query;
    let wanted = query.limit.saturating_add(1);
    let today = day_of(shared.time.now_ms());
    // Most often all is in the partition of the whole day in which reading begins. It need not be there.
    let day = match query.direction {
        Direction::Backwards => day_of(range.newest.timestamp_ms).min(today),
        Direction::Forwards => day_of(range.oldest.timestamp_ms),
    };
    let mut first = Source::new(Bucket::whole(day), range);
    let is_told = query.direction == Direction::Backwards && day == today && shared.marks.cover(day);
    let mut unopened = if is_told && shared.marks.was_alone(query, day) {
        first.fetch(database, query, wanted).await?;
        if first.is_alone() {
            shared.marks.note(query, day, !first.is_over);
            index.leave_out_from(day);
            return Ok((vec![first], Vec::new()));
        }
        index.more().await?
    } else {
        try_join(index.more(), first.fetch(database, query, wanted)).await?.0
    };
    shared.marks.note(query, day, is_told && first.is_alone() && !first.is_over);
    sort(&mut unopened, query.direction);
    // What the index tells of later rows may have been written since, and something of this partition before that.
    let is_later =
        |bucket: &Bucket| bucket.times().end > first.bucket.times().start && *bucket != first.bucket;
    let may_be_more = query.direction == Direction::Forwards && index.may_precede(None);
    let mut sources = Vec::new();
    if unopened.contains(&first.bucket) && !may_be_more && !unopened.iter().any(is_later) {
        unopened.retain(|bucket| *bucket != first.bucket);
        sources.extend(Some(first).filter(|first| first.head().is_some()));
    }
    Ok((sources, unopened))
}

/// What is read first comes last.
fn sort(buckets: &mut [Bucket], direction: Direction) {
    match direction {
        Direction::Backwards => buckets.sort_by_key(|bucket| bucket.times().end),
        Direction::Forwards => buckets.sort_by_key(|bucket| std::cmp::Reverse(bucket.times().start)),
    }
}

fn may_precede(bucket: Bucket, next: Position, direction: Direction) -> bool {
    match direction {
        Direction::Backwards => bucket.times().end > next.timestamp_ms,
        Direction::Forwards => bucket.times().start <= next.timestamp_ms,
    }
}

/// Whose first row is the next of all.
fn best(sources: &[Source], direction: Direction) -> Option<usize> {
    let heads = sources.iter().enumerate().filter_map(|(place, source)| Some((source.head()?, place)));
    let best = match direction {
        Direction::Backwards => heads.max(),
        Direction::Forwards => heads.min(),
    };
    best.map(|(_, place)| place)
}

/// The rows of a query, both ends included but for the cursor.
#[derive(Debug, Clone, Copy)]
struct Range {
    oldest: Position,
    newest: Position,
    cursor: Option<Position>,
}

impl Range {
    /// None: no row can be in it.
    fn of(query: &HistoryQuery) -> Option<Self> {
        let (oldest, newest) = query.ends()?;
        Some(Self { oldest, newest, cursor: query.cursor })
    }
}

/// The rows of one partition that are still to come.
struct Source {
    bucket: Bucket,
    range: Range,
    /// The next one last.
    rows: Vec<StoredRow>,
    is_over: bool,
    /// Whether it is marked, as its last row says.
    is_continued: Option<bool>,
}

struct StoredRow {
    position: Position,
    id: String,
    record: String,
}

impl Source {
    fn new(bucket: Bucket, range: Range) -> Self {
        Self { bucket, range, rows: Vec::new(), is_over: false, is_continued: None }
    }

    /// As the partition of a day that is covered by marks: its rows are those of the day and of later ones.
    fn is_alone(&self) -> bool {
        self.is_continued == Some(false)
    }

    fn head(&self) -> Option<Position> {
        self.rows.last().map(|row| row.position)
    }

    /// Asks for what follows.
    async fn fetch(
        &mut self,
        database: &Database,
        query: &HistoryQuery,
        wanted: usize,
    ) -> Result<(), StoreError> {
        let limit = i32::try_from(wanted.min(CHUNK)).unwrap_or(i32::MAX);
        let (account, channel) = (query.key.account().as_str(), query.key.channel());
        let Range { oldest, newest, cursor } = self.range;
        let is_backwards = query.direction == Direction::Backwards;
        // The end where reading begins is left out, the other one is not.
        let begin = if is_backwards { newest } else { oldest };
        let (mut t, mut s, mut i) = position_values(begin);
        if cursor != Some(begin) {
            // All values that a row can have lie between.
            (s, i) = if is_backwards { (i64::MAX, i64::MAX) } else { (-1, i64::MIN) };
            if is_backwards {
                (t, s, i) = (t.saturating_add(1), -1, i64::MIN);
            }
        }
        let (end_t, end_s, end_i) = position_values(if is_backwards { oldest } else { newest });
        let kind = kind_value(query.kind);
        let Bucket { day, number } = self.bucket;
        let values = (account, channel, kind, day, number, t, s, i, end_t, end_s, end_i, limit);
        let statements = &database.statements;
        let statement = if is_backwards { &statements.backwards } else { &statements.forwards };
        let found = database.session.execute_unpaged(statement, values).await.map_err(failed)?;
        let found = found.into_rows_result().map_err(failed)?;
        self.is_over = found.rows_num() < usize::try_from(limit).unwrap_or(usize::MAX);
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

/// A page being filled.
struct Filling<'a> {
    query: &'a HistoryQuery,
    page: HistoryPage,
    bytes: usize,
    skipped: usize,
    seen: Option<Position>,
    /// Several nodes may have written one event.
    events: HashSet<String>,
}

impl Filling<'_> {
    /// One more than fits tells that there are more.
    fn wants(&self) -> usize {
        (self.query.limit - self.page.rows.len()).saturating_add(1)
    }

    /// False once the page is full; then `next` is set, since a row was left.
    fn take(&mut self, row: StoredRow) -> bool {
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
        self.page.rows.push(Row { position, json: record.into() });
        true
    }

    /// Who attached with the serial of `until` receives this row live.
    fn is_live(&self, position: Position) -> bool {
        let until = self.query.until.as_ref();
        let reached = until.and_then(|serial| serial.sequence_of(position.incarnation));
        reached.is_some_and(|sequence| position.sequence > sequence)
    }
}
