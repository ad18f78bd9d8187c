//! Metric rows: everything that one incarnation of a node counted of one kind in a minute, in partitions of account and day.

use std::collections::BTreeMap;
use std::sync::Arc;

use futures_util::TryStreamExt as _;
use futures_util::future::try_join_all;

use super::buckets::day_of;
use super::values::{natural, number, ttl_s};
use super::{DAY_MS, ScyllaShared, failed};
use crate::model::{AccountId, Amount, UsageKind};
use crate::origin::history::StoreError;
use crate::origin::metering::{KEPT_MS, MetricRow};

/// Rows in one batch, all of one partition.
const BATCH_ROWS_MAX: usize = 200;
/// Batches that are written concurrently.
const UNDER_WAY_MAX: usize = 32;
/// Rows that a read fetches at a time.
const PAGE_ROWS: i32 = 1_000;

type MetricValues = (String, i32, i64, Arc<str>, i64, &'static str, i64, i64, i32, i64);

/// Writes the rows, except those that have expired.
pub(super) async fn write(shared: &ScyllaShared, rows: Vec<MetricRow>) -> Result<(), StoreError> {
    let now_ms = shared.clock.line_ms();
    // Of two writes of a row the later flush counts, whichever arrives last.
    let at = shared.next_change(shared.clock.highest_ms());
    let mut parts: BTreeMap<(AccountId, i32), Vec<MetricValues>> = BTreeMap::new();
    for MetricRow { account, minute_ms, node_id, incarnation, kind, amount } in rows {
        let Some(ttl) = ttl_s(minute_ms.saturating_add(KEPT_MS + DAY_MS), now_ms) else { continue };
        let day = day_of(minute_ms);
        let (incarnation, name) = (incarnation.cast_signed(), account.as_str().to_owned());
        let (counted, bytes) = (number(amount.count), number(amount.bytes));
        let kind = kind.as_str();
        let values = (name, day, number(minute_ms), node_id, incarnation, kind, counted, bytes, ttl, at);
        parts.entry((account, day)).or_default().push(values);
    }
    let database = shared.database();
    let statement = &database.statements.insert_metric;
    let batches: Vec<&[MetricValues]> = parts.values().flat_map(|part| part.chunks(BATCH_ROWS_MAX)).collect();
    for batches in batches.chunks(UNDER_WAY_MAX) {
        let written: Vec<_> = batches.iter().map(|rows| database.write_all(statement, rows)).collect();
        try_join_all(written).await?;
    }
    Ok(())
}

/// Reads the rows of an account from the minute `from_ms` on, oldest first, up to the end of the minute that brings them to `rows_max`.
pub(super) async fn read(
    shared: &ScyllaShared,
    account: &AccountId,
    from_ms: u64,
    rows_max: usize,
) -> Result<Vec<MetricRow>, StoreError> {
    let now_ms = shared.clock.line_ms();
    let from_ms = from_ms.max(now_ms.saturating_sub(KEPT_MS + DAY_MS));
    let database = shared.database();
    let mut statement = database.statements.metrics.clone();
    let page = i32::try_from(rows_max.saturating_add(1)).unwrap_or(i32::MAX);
    statement.set_page_size(page.clamp(1, PAGE_ROWS));
    let mut rows: Vec<MetricRow> = Vec::new();
    // The clock of another node may be ahead.
    for day in day_of(from_ms)..=day_of(now_ms.saturating_add(DAY_MS)) {
        let values = (account.as_str(), day, number(from_ms));
        let found = database.session.execute_iter(statement.clone(), values).await.map_err(failed)?;
        let mut found = found.rows_stream::<(i64, String, i64, String, i64, i64)>().map_err(failed)?;
        while let Some(row) = found.try_next().await.map_err(failed)? {
            let (minute_ms, node_id, incarnation, kind, counted, bytes) = row;
            let minute_ms = natural(minute_ms);
            if rows.len() >= rows_max && rows.last().is_some_and(|last| last.minute_ms < minute_ms) {
                return Ok(rows);
            }
            // A kind that only a later version counts is skipped.
            let Some(kind) = UsageKind::parse(&kind) else { continue };
            // Most rows have the same node as the row before.
            let same = rows.last().filter(|last| *last.node_id == *node_id);
            let node_id = same.map_or_else(|| node_id.into(), |last| Arc::clone(&last.node_id));
            rows.push(MetricRow {
                account: account.clone(),
                minute_ms,
                node_id,
                incarnation: incarnation.cast_unsigned(),
                kind,
                amount: Amount { count: natural(counted), bytes: natural(bytes) },
            });
        }
    }
    Ok(rows)
}
