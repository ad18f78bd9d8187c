//! Reads of history pages, on a few threads of the store.

use std::ops::Bound;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Instant;

use fjall::{Keyspace, KvPair};
use tokio::sync::oneshot;

use crate::model::{AccountId, NoncePage};
use crate::origin::history::{
    Direction, HistoryPage, HistoryPosition, HistoryQuery, HistoryRow, RowKind, StoreError,
};
use crate::origin::metering::MetricRow;
use crate::telemetry::{StoreOperation, StoreTimes};

use super::partitions::{PartitionKind, Partitions};
use super::queue::DiskQueue;
use super::{failed, keys, metrics, nonces};

/// Rows left out because of `until` after which a page ends early, so that no read takes long.
const SKIPPED_MAX: usize = 50_000;

pub(super) enum StoreReadRequest {
    Page {
        query: HistoryQuery,
        answer: oneshot::Sender<Result<HistoryPage, StoreError>>,
    },
    Metrics {
        account: AccountId,
        from_ms: u64,
        rows_max: usize,
        answer: oneshot::Sender<Result<Vec<MetricRow>, StoreError>>,
    },
    Nonces {
        after: Option<Box<[u8]>>,
        memory_ms: u64,
        now_ms: u64,
        answer: oneshot::Sender<Result<NoncePage, StoreError>>,
    },
}

/// Serves reads until the queue is closed and empty.
pub(super) fn run(queue: &DiskQueue<StoreReadRequest>, partitions: &Arc<Partitions>, times: &StoreTimes) {
    while let Some(read) = queue.take_one() {
        let begun = Instant::now();
        match read {
            StoreReadRequest::Page { query, answer } => give(answer, || page(partitions, &query)),
            StoreReadRequest::Metrics { account, from_ms, rows_max, answer } => {
                give(answer, || metrics::read(partitions, &account, from_ms, rows_max));
            }
            StoreReadRequest::Nonces { after, memory_ms, now_ms, answer } => {
                let page = || nonces::page(partitions, after.as_deref(), memory_ms, now_ms);
                give(answer, || page().map_err(failed));
            }
        }
        times.ended(StoreOperation::Read, begun);
    }
}

/// Sends the result of a read; skips the read if the caller has dropped the receiver.
fn give<T>(answer: oneshot::Sender<Result<T, StoreError>>, read: impl FnOnce() -> Result<T, StoreError>) {
    if !answer.is_closed() {
        let found = catch_unwind(AssertUnwindSafe(read));
        let _ = answer.send(found.unwrap_or_else(|_| Err(failed("the storage engine panicked"))));
    }
}

fn page(partitions: &Partitions, query: &HistoryQuery) -> Result<HistoryPage, StoreError> {
    let mut filling =
        EmbeddedPageBuilder { query, page: HistoryPage::default(), bytes: 0, skipped: 0, seen: None };
    let Some(range) = HistoryKeyRange::of(query) else { return Ok(filling.page) };
    let kind = match query.kind {
        RowKind::Messages => PartitionKind::Messages,
        RowKind::Presence => PartitionKind::Presence,
    };
    let mut days = partitions.overlapping(kind, range.from_ms, range.to_ms);
    if query.direction == Direction::Backwards {
        days.reverse();
    }
    for day in days.chunk_by(|(a, _), (b, _)| a.start_ms == b.start_ms) {
        let classes = day.iter().map(|(_, keyspace)| range.rows(keyspace, query.direction));
        let mut merge = PartitionRowMerge::new(classes, query.direction).map_err(failed)?;
        while let Some(row) = merge.next().map_err(failed)? {
            if !filling.push(&row)? {
                return Ok(filling.page);
            }
        }
    }
    Ok(filling.page)
}

/// Key range of a query, newest row first, and the times that it can hold.
struct HistoryKeyRange {
    newest: Bound<Vec<u8>>,
    oldest: Bound<Vec<u8>>,
    from_ms: u64,
    to_ms: u64,
}

impl HistoryKeyRange {
    /// Returns `None` if no row can be in the range.
    fn of(query: &HistoryQuery) -> Option<Self> {
        let (oldest, newest) = query.ends()?;
        if oldest == newest && query.cursor == Some(oldest) {
            return None;
        }
        let mut key = Vec::new();
        keys::channel_prefix(&query.key, &mut key);
        let bound = |position: HistoryPosition| {
            let key = [key.as_slice(), &keys::position_suffix(position)].concat();
            if query.cursor == Some(position) { Bound::Excluded(key) } else { Bound::Included(key) }
        };
        let (from_ms, to_ms) = (oldest.timestamp_ms, newest.timestamp_ms);
        Some(Self { newest: bound(newest), oldest: bound(oldest), from_ms, to_ms })
    }

    fn rows(&self, keyspace: &Keyspace, direction: Direction) -> KeyspaceRows {
        let bounds = (self.newest.as_ref().map(Vec::as_slice), self.oldest.as_ref().map(Vec::as_slice));
        let rows = keyspace.range::<&[u8], _>(bounds);
        match direction {
            Direction::Backwards => Box::new(rows.map(fjall::Guard::into_inner)),
            Direction::Forwards => Box::new(rows.rev().map(fjall::Guard::into_inner)),
        }
    }
}

type KeyspaceRows = Box<dyn Iterator<Item = fjall::Result<KvPair>>>;

/// Merged rows of one day in order, over all retentions.
struct PartitionRowMerge {
    sources: Vec<(KeyspaceRows, Option<KvPair>)>,
    direction: Direction,
}

impl PartitionRowMerge {
    fn new(sources: impl Iterator<Item = KeyspaceRows>, direction: Direction) -> fjall::Result<Self> {
        let mut merge = Self { sources: Vec::new(), direction };
        for mut rows in sources {
            let first = rows.next().transpose()?;
            merge.sources.push((rows, first));
        }
        Ok(merge)
    }

    fn next(&mut self) -> fjall::Result<Option<KvPair>> {
        let heads = self.sources.iter().enumerate();
        let heads = heads.filter_map(|(i, (_, head))| head.as_ref().map(|(key, _)| (key, i)));
        let next = match self.direction {
            Direction::Backwards => heads.min(),
            Direction::Forwards => heads.max(),
        };
        let Some((_, i)) = next else { return Ok(None) };
        let (rows, head) = &mut self.sources[i];
        let following = rows.next().transpose()?;
        Ok(std::mem::replace(head, following))
    }
}

struct EmbeddedPageBuilder<'a> {
    query: &'a HistoryQuery,
    page: HistoryPage,
    bytes: usize,
    skipped: usize,
    seen: Option<HistoryPosition>,
}

impl EmbeddedPageBuilder<'_> {
    /// Adds a row. Returns false once the page is full; `next` is then set, since a row was left.
    fn push(&mut self, (key, value): &KvPair) -> Result<bool, StoreError> {
        let position = keys::position_of(key).ok_or_else(|| failed("a stored key is damaged"))?;
        let is_full = self.page.rows.len() >= self.query.limit
            || (self.bytes >= self.query.bytes_max && !self.page.rows.is_empty());
        if is_full || self.skipped >= SKIPPED_MAX {
            self.page.next = self.seen;
            return Ok(false);
        }
        self.seen = Some(position);
        if self.is_live(position) {
            self.skipped += 1;
            return Ok(true);
        }
        let json = std::str::from_utf8(value).map_err(|_| failed("a stored record is damaged"))?;
        self.bytes += json.len();
        self.page.rows.push(HistoryRow { position, json: json.into() });
        Ok(true)
    }

    /// Returns whether a client that attaches with the serial of `until` receives this row live.
    fn is_live(&self, position: HistoryPosition) -> bool {
        let until = self.query.until.as_ref();
        let reached = until.and_then(|serial| serial.sequence_of(position.incarnation));
        reached.is_some_and(|sequence| position.sequence > sequence)
    }
}
