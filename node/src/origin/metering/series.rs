//! Conversion of rows to the points that clients read: one for each minute, node and kind.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::MetricRow;
use crate::model::{Amount, UsageKind};

/// Usage of one kind that a node counted within a minute, over all its incarnations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SeriesPoint {
    /// Begin of the minute, in epoch milliseconds.
    pub minute_ms: u64,
    /// Node id; `*` stands for all nodes together.
    pub node_id: Arc<str>,
    pub kind: UsageKind,
    pub amount: Amount,
}

/// Converts rows of one account to points. A row from memory may be beside its earlier version from the store; counts only grow, so the
/// larger one is the later.
pub(super) fn points(mut rows: Vec<MetricRow>) -> Vec<SeriesPoint> {
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
    let mut points: Vec<SeriesPoint> = Vec::with_capacity(rows.len());
    for MetricRow { minute_ms, node_id, kind, amount, .. } in rows {
        match points.last_mut() {
            Some(last) if (last.minute_ms, last.kind) == (minute_ms, kind) && last.node_id == node_id => {
                last.amount.add(amount);
            }
            _ => points.push(SeriesPoint { minute_ms, node_id, kind, amount }),
        }
    }
    points
}

/// Sums the points of all nodes: one for each minute and kind, in that order.
pub fn sum_nodes(points: Vec<SeriesPoint>) -> Vec<SeriesPoint> {
    let all: Arc<str> = "*".into();
    let mut sums: BTreeMap<(u64, &'static str), SeriesPoint> = BTreeMap::new();
    for point in points {
        let SeriesPoint { minute_ms, kind, amount, .. } = point;
        let none = || SeriesPoint { minute_ms, node_id: Arc::clone(&all), kind, amount: Amount::default() };
        sums.entry((minute_ms, kind.as_str())).or_insert_with(none).amount.add(amount);
    }
    sums.into_values().collect()
}
