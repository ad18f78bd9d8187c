//! Messages and presence events as rows, and one write of some of them.

use std::cell::RefCell;
use std::sync::Arc;

use futures_util::future::{join_all, try_join, try_join_all};

use super::buckets::{Bucket, told_until_ms};
use super::connection::Database;
use super::ids::GivenId;
use super::marks;
use super::members::{self, MemberChange};
use super::once;
use super::values::{kind_value, number, ordered, ttl_s, written_at};
use super::{HOUR_MS, Shared, failed};
use crate::model::{ChannelKey, PresenceEvent, Published, Stamp};
use crate::origin::history::{IdScope, Position, RowKind, StoreError, record};

/// Rows in one batch, all of one partition.
const BATCH_ROWS_MAX: usize = 256;
const BATCH_BYTES_MAX: usize = 256 * 1024;

/// What is stored of one publish or one event.
pub(super) struct Content {
    kind: RowKind,
    rows: Vec<NewRow>,
    /// From its write on; 0: its rows are not kept.
    kept_ms: u64,
    ids: Vec<GivenId>,
    member: Option<MemberChange>,
    /// Other nodes may write the same event.
    is_shared: bool,
    pub(super) bytes: usize,
}

#[derive(Clone)]
pub(super) struct NewRow {
    pub(super) position: Position,
    /// Of the message, or of the event.
    pub(super) id: Box<str>,
    pub(super) record: Box<str>,
}

impl NewRow {
    pub(super) fn bytes(&self) -> u64 {
        (self.record.len() + self.id.len()) as u64
    }
}

impl Content {
    pub(super) fn of_messages(published: &Published, retention_hours: Option<u32>) -> Self {
        let kept_ms = kept_ms(retention_hours);
        let connection_id = published.connection_id.to_string();
        let stored = published.messages.iter().filter(|_| kept_ms > 0);
        let rows = stored.map(|message| NewRow {
            position: Position {
                timestamp_ms: published.timestamp_ms,
                sequence: message.sequence,
                incarnation: published.incarnation,
            },
            id: message.id.clone(),
            record: text(|out| record::write_message(out, published, message, &connection_id)),
        });
        let rows: Vec<_> = rows.collect();
        let given = published.messages.iter().filter(|message| message.id_given);
        let ids = given.map(|message| GivenId {
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
        let kept_ms = kept_ms(retention_hours);
        let PresenceEvent { timestamp_ms, sequence, incarnation, .. } = *event;
        let row = (kept_ms > 0).then(|| NewRow {
            position: Position { timestamp_ms, sequence, incarnation },
            id: event.id().into(),
            record: text(|out| record::write_presence(out, event)),
        });
        let is_shared = event.is_departure && event.owner.incarnation != incarnation;
        let content = Self::new(RowKind::Presence, row.into_iter().collect(), kept_ms, Vec::new(), member);
        Self { is_shared, ..content }
    }

    fn new(
        kind: RowKind,
        rows: Vec<NewRow>,
        kept_ms: u64,
        ids: Vec<GivenId>,
        member: Option<MemberChange>,
    ) -> Self {
        let bytes = rows.iter().map(|row| row.record.len() + row.id.len()).sum::<usize>()
            + ids.iter().map(|given| given.id.len() + size_of::<GivenId>()).sum::<usize>()
            + member.as_ref().map_or(0, MemberChange::bytes);
        Self { kind, rows, kept_ms, ids, member, is_shared: false, bytes }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.is_empty() && self.ids.is_empty() && self.member.is_none()
    }

    pub(super) fn rows_count(&self) -> usize {
        self.rows.len() + self.ids.len() + usize::from(self.member.is_some())
    }

    pub(super) fn given(&self) -> &[GivenId] {
        &self.ids
    }
}

fn kept_ms(retention_hours: Option<u32>) -> u64 {
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

/// Rows of one partition that go in one batch.
pub(super) struct Part {
    kind: RowKind,
    bucket: Bucket,
    /// The index is to be told that the partition is there until then.
    tell_until_ms: Option<u64>,
    values: Vec<RowValues>,
    bytes: usize,
}

#[cfg(test)]
impl Part {
    /// Those that its rows are written to.
    pub(super) fn partitions(&self) -> std::collections::HashSet<(i32, i32)> {
        self.values.iter().map(|values| (values.3, values.4)).collect()
    }
}

type RowValues = (Arc<str>, Arc<str>, i8, i32, i32, i64, i64, i64, Arc<str>, Box<str>, Box<str>, i32, i64);

/// Writes the contents in their order, each result in its place. What follows a write that failed is not tried, so that
/// what can be read stays without a gap for as long as possible.
pub(super) async fn write(
    shared: &Arc<Shared>,
    key: &ChannelKey,
    contents: &[Content],
    results: &mut [Result<(), StoreError>],
) {
    let mut placed: Vec<_> = contents.iter().map(|content| place(shared, key, content)).collect();
    let stamped = contents.iter().zip(&placed).map(|(content, rows)| stamp(shared, content, rows));
    let stamped: Vec<_> = stamped.collect();
    for (result, stamped) in results.iter_mut().zip(join_all(stamped).await) {
        *result = stamped;
    }
    let once = contents.iter().zip(&mut placed).map(|(content, rows)| place_once(shared, key, content, rows));
    let once: Vec<_> = once.collect();
    for (result, once) in results.iter_mut().zip(join_all(once).await) {
        if result.is_ok() {
            *result = once;
        }
    }
    let mut parts: Vec<Part> = Vec::new();
    // Behind which part each content is all there.
    let mut ends = Vec::with_capacity(contents.len());
    for (rows, result) in placed.iter_mut().zip(results.iter()) {
        if result.is_ok() {
            rows.drain(..).for_each(|row| add(&mut parts, row));
        }
        ends.push(parts.len());
    }
    let (mut written, mut failure) = (0, Ok(()));
    for part in parts {
        failure = write_part(shared, key, &part).await;
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

async fn stamp(shared: &Shared, content: &Content, rows: &[PlacedRow]) -> Result<(), StoreError> {
    let bucket = |given: &GivenId| {
        // In the order of their sequences, each with a partition of its own where the one before was full.
        let at = rows.binary_search_by_key(&number(given.stamp.sequence), |row| row.values.6);
        at.ok().map(|at| rows[at].bucket)
    };
    let each: Vec<_> =
        content.ids.iter().map(|given| shared.ids.stamp(shared, given, bucket(given))).collect();
    try_join_all(each).await.map(drop)
}

/// What other nodes may write too goes where the first of them has it, and nowhere if it is there.
async fn place_once(
    shared: &Shared,
    key: &ChannelKey,
    content: &Content,
    placed: &mut Vec<PlacedRow>,
) -> Result<(), StoreError> {
    let (true, [row], [own]) = (content.is_shared, &content.rows[..], &placed[..]) else { return Ok(()) };
    let place = once::claim(shared, key, &row.id, (row.position, own.bucket)).await?;
    let Some((position, bucket)) = place.filter(|place| *place != (row.position, own.bucket)) else {
        if place.is_none() {
            placed.clear();
        }
        return Ok(());
    };
    let ttl = own.values.11;
    let row = NewRow { position, ..row.clone() };
    let tell_until_ms = Some(told_until_ms(shared.time.now_ms().saturating_add(content.kept_ms)));
    *placed = vec![PlacedRow::new(shared, &names(key), (content.kind, bucket), &row, ttl, tell_until_ms)];
    Ok(())
}

pub(super) struct PlacedRow {
    kind: RowKind,
    bucket: Bucket,
    tell_until_ms: Option<u64>,
    values: RowValues,
}

/// Of a channel, as rows name it.
pub(super) type Names = (Arc<str>, Arc<str>);

pub(super) fn names(key: &ChannelKey) -> Names {
    (key.account().as_str().into(), key.channel().into())
}

impl PlacedRow {
    pub(super) fn new(
        shared: &Shared,
        (account, channel): &Names,
        (kind, bucket): (RowKind, Bucket),
        row: &NewRow,
        ttl: i32,
        tell_until_ms: Option<u64>,
    ) -> Self {
        let Position { timestamp_ms, sequence, incarnation } = row.position;
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
        Self { kind, bucket, tell_until_ms, values }
    }
}

/// The rows, each with its partition.
fn place(shared: &Shared, key: &ChannelKey, content: &Content) -> Vec<PlacedRow> {
    let Content { kind, rows, kept_ms, .. } = content;
    // By a time that has passed, and not until one of a clock: nothing that is acknowledged may be left out.
    let ttl = ttl_s(*kept_ms, 0).unwrap_or(i32::MAX);
    let kept_until_ms = shared.time.now_ms().saturating_add(*kept_ms);
    let names = names(key);
    let placed = rows.iter().map(|row| {
        let timestamp_ms = row.position.timestamp_ms;
        let (bucket, tell_until_ms) =
            shared.buckets.place(key, *kind, timestamp_ms, row.bytes(), kept_until_ms);
        PlacedRow::new(shared, &names, (*kind, bucket), row, ttl, tell_until_ms)
    });
    placed.collect()
}

pub(super) fn add(parts: &mut Vec<Part>, row: PlacedRow) {
    let PlacedRow { kind, bucket, tell_until_ms, values } = row;
    let bytes = values.9.len() + values.10.len();
    let fits = |part: &Part| {
        (part.kind, part.bucket) == (kind, bucket)
            && part.values.len() < BATCH_ROWS_MAX
            && part.bytes + bytes <= BATCH_BYTES_MAX
    };
    match parts.last_mut() {
        Some(part) if fits(part) => {
            part.bytes += bytes;
            part.tell_until_ms = part.tell_until_ms.max(tell_until_ms);
            part.values.push(values);
        }
        _ => parts.push(Part { kind, bucket, tell_until_ms, values: vec![values], bytes }),
    }
}

pub(super) async fn write_part(shared: &Shared, key: &ChannelKey, part: &Part) -> Result<(), StoreError> {
    let Part { kind, bucket, tell_until_ms, values, .. } = part;
    let highest_ms = values.iter().map(|values| values.5.cast_unsigned()).max().unwrap_or(0);
    let database = shared.database();
    let rows = async {
        let statement = &database.statements.insert_row;
        if let [only] = &values[..] {
            return database.session.execute_unpaged(statement, only).await.map(drop).map_err(failed);
        }
        database.write_all(statement, values).await
    };
    // First, so that a row that is there is found also where the write of both was not answered: who asks for its id is told that it is.
    tell(shared, &database, key, (*kind, *bucket), *tell_until_ms).await?;
    rows.await?;
    shared.wrote_up_to(highest_ms);
    Ok(())
}

pub(super) async fn tell(
    shared: &Shared,
    database: &Database,
    key: &ChannelKey,
    (kind, bucket): (RowKind, Bucket),
    until_ms: Option<u64>,
) -> Result<(), StoreError> {
    let Some(until_ms) = until_ms else { return Ok(()) };
    let ttl = ttl_s(until_ms, shared.time.now_ms()).unwrap_or(1);
    let (account, channel) = (key.account().as_str(), key.channel());
    // Of two writes the one that lasts longer is the later one. Milliseconds, since ScyllaDB refuses times that lie ahead.
    let told = (account, channel, kind_value(kind), bucket.day, bucket.number, ttl, number(until_ms));
    let index = database.session.execute_unpaged(&database.statements.insert_day, told);
    let index = async { index.await.map(drop).map_err(failed) };
    try_join(index, marks::mark(shared, database, key, (kind, bucket))).await?;
    shared.buckets.told(key, kind, bucket, until_ms);
    Ok(())
}
