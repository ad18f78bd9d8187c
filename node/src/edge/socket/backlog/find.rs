//! Search for the row at which a reader begins.

use fanfare_proto::serial::Serial;

use super::{BacklogCursor, BacklogResponse, ChannelBacklog, StampOrder};
use crate::accounts::CUT_MS;
use crate::model::Stamp;
use crate::origin::history::{Direction, HistoryPosition, HistoryQuery, RowKind};
use crate::session::Rewind;

impl ChannelBacklog<'_> {
    /// Finds the cursor after a stamp of this or an earlier incarnation. None if the messages after it are incomplete.
    pub(super) async fn find_after(
        &self,
        after: Stamp,
        until_sequence: u64,
        back_ms: Option<u64>,
    ) -> Option<BacklogResponse> {
        let shared = self.shared;
        // Rows up to the last requested sequence may still be written: wait until they can be read.
        shared.store.flush().await.ok()?;
        let is_own = after.incarnation == shared.hub.incarnation();
        let last_ms = if is_own {
            (after.sequence <= until_sequence).then(|| shared.clock.expiry_ms())?
        } else {
            let within_ms = back_ms.unwrap_or(shared.keep_ms);
            shared
                .earlier_incarnation(after.incarnation)
                .filter(|earlier| shared.follows(earlier, within_ms))?
                .last_ms
        };
        let from_ms = back_ms.map_or(self.oldest_ms, |back_ms| last_ms.saturating_sub(back_ms));
        let from_ms = self.readable_from(from_ms)?;
        let newest = self.newest(None).await?;
        let order = if is_own {
            StampOrder::Strict
        } else {
            StampOrder::IntoThisIncarnation { from: after.incarnation, until_sequence }
        };
        let Some(newest) = newest.filter(|newest| self.is_after(*newest, after)) else {
            // Every message since then would be stored, and there is none.
            let cursor = newest.unwrap_or(before(from_ms, after));
            let after = if is_own { after } else { shared.own(until_sequence) };
            return Some(BacklogResponse::Begin {
                cursor: BacklogCursor { after, cursor, order: StampOrder::Strict },
                is_cut: false,
            });
        };
        let first_ms = self.first_after(after, from_ms, newest.timestamp_ms + 1).await?;
        if first_ms <= from_ms
            && let Some(older) = self.newest(Some(from_ms)).await?
            && self.is_after(older, after)
        {
            return None;
        }
        let cursor = self.without_earlier_incarnations(before(first_ms, after), after).await?;
        Some(BacklogResponse::Begin { cursor: BacklogCursor { after, cursor, order }, is_cut: false })
    }

    /// Start time of the read, not before the retention limit. None: some of the messages may have exceeded their retention.
    pub(super) fn readable_from(&self, from_ms: u64) -> Option<u64> {
        (from_ms + CUT_MS >= self.oldest_ms).then_some(from_ms.max(self.oldest_ms))
    }

    /// Skips a row of an earlier incarnation: in the millisecond before the cursor's rows it may have a higher sequence than the stamp.
    async fn without_earlier_incarnations(
        &self,
        cursor: HistoryPosition,
        after: Stamp,
    ) -> Option<HistoryPosition> {
        let query = HistoryQuery { limit: 1, cursor: Some(cursor), ..self.query(Direction::Forwards) };
        let page = self.shared.store.read(query).await.ok()?;
        let is_earlier = page.rows.first().is_some_and(|row| !self.is_after(row.position, after));
        let behind_all = HistoryPosition { sequence: u64::MAX, incarnation: u64::MAX, ..cursor };
        Some(if is_earlier { behind_all } else { cursor })
    }

    /// Binary search for the least time from which on every row is after the stamp. All rows from `to_ms` on are; rows in the millisecond
    /// before may be so in part.
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

    /// Finds the cursor before the first message of a rewind.
    pub(super) async fn find_back(&self, rewind: Rewind, until_sequence: u64) -> Option<BacklogResponse> {
        let shared = self.shared;
        shared.store.flush().await.ok()?;
        let request = HistoryQuery {
            limit: rewind.count,
            start_ms: Some(rewind.since_ms),
            // Only positions are needed here; the texts are read later, page by page.
            bytes_max: usize::MAX,
            until: Some(Serial::single(shared.hub.incarnation(), until_sequence)),
            ..self.query(Direction::Backwards)
        };
        let mut query = request;
        let (mut found, mut first) = (0, None);
        // A store may return less if many rows are after the last requested sequence.
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
        let begin = match first {
            Some(HistoryPosition { timestamp_ms, sequence, incarnation }) => {
                let sequence = sequence.saturating_sub(1);
                let after = Stamp { incarnation, sequence };
                let cursor = HistoryPosition { timestamp_ms, sequence, incarnation: u64::MAX };
                BacklogCursor { after, cursor, order: StampOrder::Any { until_sequence } }
            }
            None => {
                let after = shared.own(until_sequence);
                BacklogCursor {
                    after,
                    cursor: before(shared.clock.expiry_ms(), after),
                    order: StampOrder::Strict,
                }
            }
        };
        Some(BacklogResponse::Begin { cursor: begin, is_cut })
    }

    /// Position of the newest row, or of the newest one before a time.
    pub(super) async fn newest(&self, end_ms: Option<u64>) -> Option<Option<HistoryPosition>> {
        let query = HistoryQuery { limit: 1, end_ms, ..self.query(Direction::Backwards) };
        let page = self.shared.store.read(query).await.ok()?;
        Some(page.rows.first().map(|row| row.position))
    }

    /// True if the row is after the stamp. Rows of unknown incarnations never are.
    fn is_after(&self, row: HistoryPosition, after: Stamp) -> bool {
        if row.incarnation == after.incarnation {
            return row.sequence > after.sequence;
        }
        let incarnations_since =
            |incarnation| self.shared.incarnations_since(incarnation).unwrap_or(usize::MAX);
        incarnations_since(row.incarnation) < incarnations_since(after.incarnation)
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

/// Store position before the rows from `timestamp_ms` on, and before those of the previous millisecond with higher sequences.
fn before(timestamp_ms: u64, after: Stamp) -> HistoryPosition {
    let Stamp { incarnation, sequence } = after;
    HistoryPosition { timestamp_ms: timestamp_ms.saturating_sub(1), sequence, incarnation }
}
