//! Rows of messages and presence events, and writes of several of them.

use std::cell::RefCell;
use std::sync::Arc;

use futures_util::future::{join_all, try_join, try_join_all};

use super::buckets::{HistoryBucket, indexed_until_ms};
use super::connection::PreparedSession;
use super::continuations;
use super::event_claims;
use super::ids::StampedClientId;
use super::members::{self, MemberChange};
use super::values::{kind_value, number, ordered, ttl_s, written_at};
use super::{HOUR_MS, ScyllaShared, failed};
use crate::model::{ChannelKey, PresenceEvent, PublishedMessages, Stamp};
use crate::origin::history::{HistoryPosition, IdScope, RowKind, StoreError, record};

/// Rows in one batch, all of one partition.
const BATCH_ROWS_MAX: usize = 256;
const BATCH_BYTES_MAX: usize = 256 * 1024;

/// Rows and ids that one publish or presence event stores.
pub(super) struct AppendContent {
    kind: RowKind,
    rows: Vec<NewRow>,
    /// Retention from the write on, in milliseconds; 0 if its rows are not kept.
    retention_ms: u64,
    ids: Vec<StampedClientId>,
    member: Option<MemberChange>,
    /// Whether other nodes may write the same event.
    is_shared: bool,
    pub(super) bytes: usize,
}

#[derive(Clone)]
pub(super) struct NewRow {
    pub(super) position: HistoryPosition,
    /// Id of the message or event.
    pub(super) id: Box<str>,
    pub(super) record: Box<str>,
}

impl NewRow {
    pub(super) fn bytes(&self) -> u64 {
        (self.record.len() + self.id.len()) as u64
    }
}

impl AppendContent {
    pub(super) fn of_messages(published: &PublishedMessages, retention_hours: Option<u32>) -> Self {
        let kept_ms = retention_ms(retention_hours);
        let connection_id = published.connection_id.to_string();
        let stored = published.messages.iter().filter(|_| kept_ms > 0);
        let rows = stored.map(|message| NewRow {
            position: HistoryPosition {
                timestamp_ms: published.timestamp_ms,
                sequence: message.sequence,
                incarnation: published.incarnation,
            },
            id: message.id.clone(),
            record: text(|out| record::write_message(out, published, message, &connection_id)),
        });
        let rows: Vec<_> = rows.collect();
        let given = published.messages.iter().filter(|message| message.id_given);
        let ids = given.map(|message| StampedClientId {
            scope: IdScope {
                key: published.key.clone(),
                key_name: published.key_name.clone(),
                client_id: published.client_id.clone(),
            },
            id: message.id.clone(),
            stamp: Stamp { incarnation: published.incarnation, sequence: message.sequence },
            timestamp_ms: published.timestamp_ms,
        });
        Self::new(RowKind::Messages, rows, kept_ms, ids.collect(), None)
    }

    pub(super) fn of_presence(
        event: &PresenceEvent,
        retention_hours: Option<u32>,
        member: Option<MemberChange>,
    ) -> Self {
        let kept_ms = retention_ms(retention_hours);
        let PresenceEvent { timestamp_ms, sequence, incarnation, .. } = *event;
        let row = (kept_ms > 0).then(|| NewRow {
            position: HistoryPosition { timestamp_ms, sequence, incarnation },
            id: event.id().into(),
            record: text(|out| record::write_presence(out, event)),
        });
        let is_shared = event.is_delayed_leave && event.owner.incarnation != incarnation;
        let content = Self::new(RowKind::Presence, row.into_iter().collect(), kept_ms, Vec::new(), member);
        Self { is_shared, ..content }
    }

    fn new(
        kind: RowKind,
        rows: Vec<NewRow>,
        retention_ms: u64,
        ids: Vec<StampedClientId>,
        member: Option<MemberChange>,
    ) -> Self {
        let bytes = rows.iter().map(|row| row.record.len() + row.id.len()).sum::<usize>()
            + ids.iter().map(|given| given.id.len() + size_of::<StampedClientId>()).sum::<usize>()
            + member.as_ref().map_or(0, MemberChange::bytes);
        Self { kind, rows, retention_ms, ids, member, is_shared: false, bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.ids.is_empty() && self.member.is_none()
    }

    pub(super) fn rows_count(&self) -> usize {
        self.rows.len() + self.ids.len() + usize::from(self.member.is_some())
    }

    pub(super) fn client_ids(&self) -> &[StampedClientId] {
        &self.ids
    }
}

fn retention_ms(retention_hours: Option<u32>) -> u64 {
    retention_hours.map_or(0, |hours| u64::from(hours) * HOUR_MS)
}

fn text(write: impl FnOnce(&mut Vec<u8>)) -> Box<str> {
    thread_local! {
        static SCRATCH: RefCell<Vec<u8>> = const { RefCell::new(Vec::new()) };
    }
    SCRATCH.with_borrow_mut(|scratch| {
        scratch.clear();
        write(scratch);
        String::from_utf8_lossy(scratch).into()
    })
}

/// Rows of one partition that are written in one batch.
pub(super) struct BucketRowBatch {
    kind: RowKind,
    bucket: HistoryBucket,
    /// Time until which the index must list the partition, if it does not yet.
    index_until_ms: Option<u64>,
    values: Vec<RowValues>,
    bytes: usize,
}

#[cfg(test)]
impl BucketRowBatch {
    /// Partitions to which the rows are written.
    pub(super) fn partitions(&self) -> std::collections::HashSet<(i32, i32)> {
        self.values.iter().map(|values| (values.3, values.4)).collect()
    }
}

type RowValues = (Arc<str>, Arc<str>, i8, i32, i32, i64, i64, i64, Arc<str>, Box<str>, Box<str>, i32, i64);

/// Writes the contents in order, and sets the result of each. After a failed write the following ones are not tried, so that the readable
/// rows stay without a gap for as long as possible.
pub(super) async fn write(
    shared: &Arc<ScyllaShared>,
    key: &ChannelKey,
    contents: &[AppendContent],
    results: &mut [Result<(), StoreError>],
) {
    let mut placed: Vec<_> = contents.iter().map(|content| assign_buckets(shared, key, content)).collect();
    let stamped = contents.iter().zip(&placed).map(|(content, rows)| stamp(shared, content, rows));
    let stamped: Vec<_> = stamped.collect();
    for (result, stamped) in results.iter_mut().zip(join_all(stamped).await) {
        *result = stamped;
    }
    let once =
        contents.iter().zip(&mut placed).map(|(content, rows)| adopt_claimed_row(shared, key, content, rows));
    let once: Vec<_> = once.collect();
    for (result, once) in results.iter_mut().zip(join_all(once).await) {
        if result.is_ok() {
            *result = once;
        }
    }
    let mut parts: Vec<BucketRowBatch> = Vec::new();
    // For each content the number of parts after which it is complete.
    let mut ends = Vec::with_capacity(contents.len());
    for (rows, result) in placed.iter_mut().zip(results.iter()) {
        if result.is_ok() {
            rows.drain(..).for_each(|row| add(&mut parts, row));
        }
        ends.push(parts.len());
    }
    let (mut written, mut failure) = (0, Ok(()));
    for part in parts {
        failure = write_row_batch(shared, key, &part).await;
        if failure.is_err() {
            break;
        }
        written += 1;
    }
    let changes = contents.iter().filter_map(|content| content.member.as_ref());
    let changed = if failure.is_ok() { members::write(shared, changes).await } else { failure.clone() };
    for ((content, result), end) in contents.iter().zip(results).zip(ends) {
        if result.is_ok() && end > written {
            result.clone_from(&failure);
        }
        if result.is_ok() && content.member.is_some() {
            result.clone_from(&changed);
        }
    }
}

async fn stamp(
    shared: &ScyllaShared,
    content: &AppendContent,
    rows: &[BucketedRow],
) -> Result<(), StoreError> {
    let bucket = |given: &StampedClientId| {
        // In the order of their sequences, each in the next partition if the one before was full.
        let at = rows.binary_search_by_key(&number(given.stamp.sequence), |row| row.values.6);
        at.ok().map(|at| rows[at].bucket)
    };
    let each: Vec<_> =
        content.ids.iter().map(|given| shared.ids.stamp(shared, given, bucket(given))).collect();
    try_join_all(each).await.map(drop)
}

/// Moves an event that other nodes may write too to the first node's position, and removes it if it is stored already.
async fn adopt_claimed_row(
    shared: &ScyllaShared,
    key: &ChannelKey,
    content: &AppendContent,
    placed: &mut Vec<BucketedRow>,
) -> Result<(), StoreError> {
    let (true, [row], [own]) = (content.is_shared, &content.rows[..], &placed[..]) else { return Ok(()) };
    let claimed = event_claims::claim(shared, key, &row.id, (row.position, own.bucket)).await?;
    let Some((position, bucket)) = claimed.filter(|claimed| *claimed != (row.position, own.bucket)) else {
        if claimed.is_none() {
            placed.clear();
        }
        return Ok(());
    };
    let ttl = own.values.11;
    let row = NewRow { position, ..row.clone() };
    let index_until_ms = Some(indexed_until_ms(shared.time.now_ms().saturating_add(content.retention_ms)));
    *placed = vec![BucketedRow::new(shared, &names(key), (content.kind, bucket), &row, ttl, index_until_ms)];
    Ok(())
}

pub(super) struct BucketedRow {
    kind: RowKind,
    bucket: HistoryBucket,
    index_until_ms: Option<u64>,
    values: RowValues,
}

/// Account and channel of rows.
pub(super) type ChannelNames = (Arc<str>, Arc<str>);

pub(super) fn names(key: &ChannelKey) -> ChannelNames {
    (key.account().as_str().into(), key.channel().into())
}

impl BucketedRow {
    pub(super) fn new(
        shared: &ScyllaShared,
        (account, channel): &ChannelNames,
        (kind, bucket): (RowKind, HistoryBucket),
        row: &NewRow,
        ttl: i32,
        index_until_ms: Option<u64>,
    ) -> Self {
        let HistoryPosition { timestamp_ms, sequence, incarnation } = row.position;
        let values = (
            Arc::clone(account),
            Arc::clone(channel),
            kind_value(kind),
            bucket.day,
            bucket.number,
            number(timestamp_ms),
            number(sequence),
            ordered(incarnation),
            Arc::clone(&shared.options.node_id),
            row.id.clone(),
            row.record.clone(),
            ttl,
            written_at(timestamp_ms),
        );
        Self { kind, bucket, index_until_ms, values }
    }
}

/// Assigns a partition to each row.
fn assign_buckets(shared: &ScyllaShared, key: &ChannelKey, content: &AppendContent) -> Vec<BucketedRow> {
    let AppendContent { kind, rows, retention_ms: kept_ms, .. } = content;
    // A time span, independent of clocks: no acknowledged row may expire early.
    let ttl = ttl_s(*kept_ms, 0).unwrap_or(i32::MAX);
    let kept_until_ms = shared.time.now_ms().saturating_add(*kept_ms);
    let names = names(key);
    let placed = rows.iter().map(|row| {
        let timestamp_ms = row.position.timestamp_ms;
        let (bucket, index_until_ms) =
            shared.buckets.assign(key, *kind, timestamp_ms, row.bytes(), kept_until_ms);
        BucketedRow::new(shared, &names, (*kind, bucket), row, ttl, index_until_ms)
    });
    placed.collect()
}

pub(super) fn add(parts: &mut Vec<BucketRowBatch>, row: BucketedRow) {
    let BucketedRow { kind, bucket, index_until_ms, values } = row;
    let bytes = values.9.len() + values.10.len();
    let fits = |part: &BucketRowBatch| {
        (part.kind, part.bucket) == (kind, bucket)
            && part.values.len() < BATCH_ROWS_MAX
            && part.bytes + bytes <= BATCH_BYTES_MAX
    };
    match parts.last_mut() {
        Some(part) if fits(part) => {
            part.bytes += bytes;
            part.index_until_ms = part.index_until_ms.max(index_until_ms);
            part.values.push(values);
        }
        _ => parts.push(BucketRowBatch { kind, bucket, index_until_ms, values: vec![values], bytes }),
    }
}

pub(super) async fn write_row_batch(
    shared: &ScyllaShared,
    key: &ChannelKey,
    part: &BucketRowBatch,
) -> Result<(), StoreError> {
    let BucketRowBatch { kind, bucket, index_until_ms, values, .. } = part;
    let highest_ms = values.iter().map(|values| values.5.cast_unsigned()).max().unwrap_or(0);
    let database = shared.database();
    let rows = async {
        let statement = &database.statements.insert_row;
        if let [only] = &values[..] {
            return database.session.execute_unpaged(statement, only).await.map(drop).map_err(failed);
        }
        database.write_all(statement, values).await
    };
    // Index first: if neither write was answered, a stored row must still be found, since a lookup of its id reports the message as
    // stored.
    write_index(shared, &database, key, (*kind, *bucket), *index_until_ms).await?;
    rows.await?;
    shared.wrote_up_to(highest_ms);
    Ok(())
}

pub(super) async fn write_index(
    shared: &ScyllaShared,
    database: &PreparedSession,
    key: &ChannelKey,
    (kind, bucket): (RowKind, HistoryBucket),
    until_ms: Option<u64>,
) -> Result<(), StoreError> {
    let Some(until_ms) = until_ms else { return Ok(()) };
    let ttl = ttl_s(until_ms, shared.time.now_ms()).unwrap_or(1);
    let (account, channel) = (key.account().as_str(), key.channel());
    // Of two writes the one that lasts longer is the later one. Milliseconds, since ScyllaDB refuses write times in the future.
    let values = (account, channel, kind_value(kind), bucket.day, bucket.number, ttl, number(until_ms));
    let index = database.session.execute_unpaged(&database.statements.insert_day, values);
    let index = async { index.await.map(drop).map_err(failed) };
    try_join(index, continuations::mark_continued(shared, database, key, (kind, bucket))).await?;
    shared.buckets.set_indexed(key, kind, bucket, until_ms);
    Ok(())
}
