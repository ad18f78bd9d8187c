//! Finding where a reader begins.

use fanfare_proto::serial::Serial;

use super::{Found, Order, Place, Rows};
use crate::accounts::CUT_MS;
use crate::model::Stamp;
use crate::origin::history::{Direction, HistoryQuery, Position, RowKind};
use crate::session::Rewind;

impl Rows<'_> {
    /// The place after a stamp of this run or of one before; none when what follows it is not all there.
    pub(super) async fn find_after(&self, after: Stamp, mark: u64, back_ms: Option<u64>) -> Option<Found> {
        let shared = self.shared;
        // Rows up to the mark are on their way at least: wait until they can be read.
        shared.store.settled().await.ok()?;
        let is_own = after.incarnation == shared.hub.incarnation();
        let last_ms = if is_own {
            (after.sequence <= mark).then(|| shared.clock.expiry_ms())?
        } else {
            let within_ms = back_ms.unwrap_or(shared.keep_ms);
            shared.former(after.incarnation).filter(|run| shared.follows(run, within_ms))?.last_ms
        };
        let floor_ms = back_ms.map_or(self.oldest_ms, |back_ms| last_ms.saturating_sub(back_ms));
        let floor_ms = self.readable_from(floor_ms)?;
        let newest = self.newest(None).await?;
        let order = if is_own { Order::Strict } else { Order::IntoThisRun { from: after.incarnation, mark } };
        let Some(newest) = newest.filter(|newest| self.is_after(*newest, after)) else {
            // All that was numbered since is stored, and nothing is.
            let cursor = newest.unwrap_or(before(floor_ms, after));
            let after = if is_own { after } else { shared.own(mark) };
            return Some(Found::Begin {
                place: Place { after, cursor, order: Order::Strict },
                is_cut: false,
            });
        };
        let first_ms = self.first_after(after, floor_ms, newest.timestamp_ms + 1).await?;
        if first_ms <= floor_ms
            && let Some(older) = self.newest(Some(floor_ms)).await?
            && self.is_after(older, after)
        {
            return None;
        }
        let cursor = self.without_earlier_runs(before(first_ms, after), after).await?;
        Some(Found::Begin { place: Place { after, cursor, order }, is_cut: false })
    }

    /// From this time on, or from the retention cut. None: some of what is asked for may have outlived its retention.
    pub(super) fn readable_from(&self, floor_ms: u64) -> Option<u64> {
        (floor_ms + CUT_MS >= self.oldest_ms).then_some(floor_ms.max(self.oldest_ms))
    }

    /// In the millisecond before, a row of a run before this stamp's may have a higher number than the stamp.
    async fn without_earlier_runs(&self, cursor: Position, after: Stamp) -> Option<Position> {
        let query = HistoryQuery { limit: 1, cursor: Some(cursor), ..self.query(Direction::Forwards) };
        let page = self.shared.store.read(query).await.ok()?;
        let is_earlier = page.rows.first().is_some_and(|row| !self.is_after(row.position, after));
        let behind_all = Position { sequence: u64::MAX, incarnation: u64::MAX, ..cursor };
        Some(if is_earlier { behind_all } else { cursor })
    }

    /// The least time from which on every row is after the stamp. All rows from `to_ms` on are, and those of the time
    /// just before it may be so in part.
    async fn first_after(&self, after: Stamp, from_ms: u64, to_ms: u64) -> Option<u64> {
        let (mut from_ms, mut to_ms) = (from_ms, to_ms);
        while from_ms < to_ms {
            let middle_ms = from_ms + (to_ms - from_ms) / 2;
            let query = HistoryQuery {
                limit: 1,
                start_ms: Some(middle_ms),
                direction: Direction::Forwards,
                ..self.query(Direction::Forwards)
            };
            let page = self.shared.store.read(query).await.ok()?;
            match page.rows.first().map(|row| row.position) {
                Some(row) if !self.is_after(row, after) => from_ms = row.timestamp_ms + 1,
                _ => to_ms = middle_ms,
            }
        }
        Some(from_ms)
    }

    /// The place before the first message of a rewind.
    pub(super) async fn find_back(&self, rewind: Rewind, mark: u64) -> Option<Found> {
        let shared = self.shared;
        shared.store.settled().await.ok()?;
        let asked = HistoryQuery {
            limit: rewind.count,
            start_ms: Some(rewind.since_ms),
            // Their texts are read again, page by page.
            bytes_max: usize::MAX,
            until: Some(Serial::single(shared.hub.incarnation(), mark)),
            ..self.query(Direction::Backwards)
        };
        let mut query = asked;
        let (mut found, mut first) = (0, None);
        // A store may stop early where many rows are beyond the mark.
        loop {
            let page = shared.store.read(query.clone()).await.ok()?;
            found += page.rows.len();
            first = page.rows.last().map(|row| row.position).or(first);
            query.limit = rewind.count - found;
            query.cursor = page.next;
            if page.next.is_none() || query.limit == 0 {
                break;
            }
        }
        let is_cut = rewind.is_cut && found < rewind.count;
        let place = match first {
            Some(Position { timestamp_ms, sequence, incarnation }) => {
                let sequence = sequence.saturating_sub(1);
                let after = Stamp { incarnation, sequence };
                let cursor = Position { timestamp_ms, sequence, incarnation: u64::MAX };
                Place { after, cursor, order: Order::Any { mark } }
            }
            None => {
                let after = shared.own(mark);
                Place { after, cursor: before(shared.clock.expiry_ms(), after), order: Order::Strict }
            }
        };
        Some(Found::Begin { place, is_cut })
    }

    /// The newest row, or the newest before a time.
    pub(super) async fn newest(&self, end_ms: Option<u64>) -> Option<Option<Position>> {
        let query = HistoryQuery { limit: 1, end_ms, ..self.query(Direction::Backwards) };
        let page = self.shared.store.read(query).await.ok()?;
        Some(page.rows.first().map(|row| row.position))
    }

    /// Rows of runs that are not known are not after anything that can be asked for.
    fn is_after(&self, row: Position, after: Stamp) -> bool {
        if row.incarnation == after.incarnation {
            return row.sequence > after.sequence;
        }
        let runs_since = |incarnation| self.shared.runs_since(incarnation).unwrap_or(usize::MAX);
        runs_since(row.incarnation) < runs_since(after.incarnation)
    }

    pub(super) fn query(&self, direction: Direction) -> HistoryQuery {
        HistoryQuery {
            key: self.channel.key().clone(),
            kind: RowKind::Messages,
            limit: 0,
            bytes_max: 0,
            start_ms: None,
            end_ms: None,
            oldest_ms: self.oldest_ms,
            cursor: None,
            direction,
            until: None,
        }
    }
}

/// Behind it are the rows from `timestamp_ms` on, and of the millisecond before those with higher numbers.
fn before(timestamp_ms: u64, after: Stamp) -> Position {
    let Stamp { incarnation, sequence } = after;
    Position { timestamp_ms: timestamp_ms.saturating_sub(1), sequence, incarnation }
}
