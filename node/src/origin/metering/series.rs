//! Rows → what a client reads: one point for each minute, node and kind.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::MetricRow;
use crate::model::{Amount, UsageKind};

/// What a node counted of a kind within a minute, over all its incarnations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Point {
    /// Epoch milliseconds where the minute begins.
    pub minute_ms: u64,
    /// `*`: all nodes together.
    pub node_id: Arc<str>,
    pub kind: UsageKind,
    pub amount: Amount,
}

/// Rows of one account, in which one that was gathered may stand beside its former state from the store: counts only
/// grow, so the larger one is the later.
pub(super) fn points(mut rows: Vec<MetricRow>) -> Vec<Point> {
    fn key(row: &MetricRow) -> (u64, &str, &'static str, u64) {
        (row.minute_ms, &row.node_id, row.kind.as_str(), row.incarnation)
    }
    rows.sort_by(|a, b| key(a).cmp(&key(b)));
    rows.dedup_by(|next, kept| {
        let same = key(next) == key(kept);
        if same {
            kept.amount.count = kept.amount.count.max(next.amount.count);
            kept.amount.bytes = kept.amount.bytes.max(next.amount.bytes);
        }
        same
    });
    let mut points: Vec<Point> = Vec::with_capacity(rows.len());
    for MetricRow { minute_ms, node_id, kind, amount, .. } in rows {
        match points.last_mut() {
            Some(last) if (last.minute_ms, last.kind) == (minute_ms, kind) && last.node_id == node_id => {
                last.amount.add(amount);
            }
            _ => points.push(Point { minute_ms, node_id, kind, amount }),
        }
    }
    points
}

/// One point for each minute and kind, in that order.
pub fn sum_nodes(points: Vec<Point>) -> Vec<Point> {
    let all: Arc<str> = "*".into();
    let mut sums: BTreeMap<(u64, &'static str), Point> = BTreeMap::new();
    for point in points {
        let Point { minute_ms, kind, amount, .. } = point;
        let none = || Point { minute_ms, node_id: Arc::clone(&all), kind, amount: Amount::default() };
        sums.entry((minute_ms, kind.as_str())).or_insert_with(none).amount.add(amount);
    }
    sums.into_values().collect()
}
