//! Metric rows: the key has account, minute, node, incarnation and kind, the value count and bytes.

use std::ops::Bound;
use std::sync::Arc;

use fjall::OwnedWriteBatch;

use crate::model::{AccountId, Amount, UsageKind};
use crate::origin::history::StoreError;
use crate::origin::metering::{KEPT_MS, MetricRow};

use super::partitions::{Partition, PartitionKind, Partitions};
use super::{DAY_MS, failed, keys};

pub(super) fn insert(
    partitions: &Partitions,
    batch: &mut OwnedWriteBatch,
    rows: &[MetricRow],
) -> fjall::Result<()> {
    let mut key = Vec::new();
    for row in rows {
        keys::metric_key(row, &mut key);
        let value = [row.amount.count, row.amount.bytes].map(u64::to_be_bytes);
        let partition = Partition::containing(PartitionKind::Metrics, row.minute_ms, DAY_MS, KEPT_MS);
        let table = partitions.get_or_create(partition)?;
        batch.insert(table.keyspace(), key.as_slice(), value.as_flattened());
    }
    Ok(())
}

/// Reads the rows of an account from the minute `from_ms` on, oldest first, up to the end of the minute that brings them to `rows_max`.
pub(super) fn read(
    partitions: &Partitions,
    account: &AccountId,
    from_ms: u64,
    rows_max: usize,
) -> Result<Vec<MetricRow>, StoreError> {
    let (first, end) = keys::metric_range(account, from_ms);
    let mut rows: Vec<MetricRow> = Vec::new();
    for (_, keyspace) in partitions.overlapping(PartitionKind::Metrics, from_ms, u64::MAX) {
        let range = (Bound::Included(first.as_slice()), Bound::Excluded(end.as_slice()));
        for pair in keyspace.range::<&[u8], _>(range) {
            let (key, value) = pair.into_inner().map_err(failed)?;
            let (minute_ms, node_id, incarnation, kind) =
                keys::metric_parts(account, &key).ok_or_else(damaged)?;
            if rows.len() >= rows_max && rows.last().is_some_and(|last| last.minute_ms < minute_ms) {
                return Ok(rows);
            }
            // A kind that only a later version counts is skipped.
            let Some(kind) = UsageKind::parse(kind) else { continue };
            rows.push(MetricRow {
                account: account.clone(),
                minute_ms,
                node_id: shared(node_id, rows.last()),
                incarnation,
                kind,
                amount: amount(&value)?,
            });
        }
    }
    Ok(rows)
}

/// Reads one row of any account; `None` if only a later version knows its kind.
pub(super) fn read_row(key: &[u8], value: &[u8]) -> Result<Option<MetricRow>, StoreError> {
    let (account, _) = keys::take_part(key).ok_or_else(damaged)?;
    let account = AccountId::new(account);
    let (minute_ms, node_id, incarnation, kind) = keys::metric_parts(&account, key).ok_or_else(damaged)?;
    let (node_id, kind) = (node_id.into(), UsageKind::parse(kind));
    let amount = amount(value)?;
    Ok(kind.map(|kind| MetricRow { account, minute_ms, node_id, incarnation, kind, amount }))
}

fn amount(value: &[u8]) -> Result<Amount, StoreError> {
    let field = |at: usize| value.get(at..)?.first_chunk().copied().map(u64::from_be_bytes);
    let (Some(count), Some(bytes)) = (field(0), field(8)) else { return Err(damaged()) };
    Ok(Amount { count, bytes })
}

fn damaged() -> StoreError {
    failed("a stored metric row is damaged")
}

/// Reuses the node id of the row before, which most often has the same one.
fn shared(node_id: &str, last: Option<&MetricRow>) -> Arc<str> {
    let same = last.filter(|row| *row.node_id == *node_id);
    same.map_or_else(|| node_id.into(), |row| Arc::clone(&row.node_id))
}
