use super::*;
use crate::origin::metering::series::points;

fn row(minute_ms: u64, node_id: &str, incarnation: u64, kind: UsageKind, count: u64) -> MetricRow {
    let amount = Amount { count, bytes: 2 * count };
    MetricRow {
        account: AccountId::new("acme"),
        minute_ms,
        node_id: node_id.into(),
        incarnation,
        kind,
        amount,
    }
}

fn shown(points: &[SeriesPoint]) -> Vec<String> {
    let shown = points.iter().map(|point| {
        let SeriesPoint { minute_ms, node_id, kind, amount } = point;
        format!("{minute_ms} {node_id} {} {} {}", kind.as_str(), amount.count, amount.bytes)
    });
    shown.collect()
}

#[test]
fn one_point_for_each_minute_node_and_kind() {
    let rows = vec![
        row(60_000, "n2", 9, UsageKind::Publish, 1),
        row(0, "n2", 9, UsageKind::Publish, 2),
        row(0, "n1", 7, UsageKind::Publish, 4),
        row(0, "n1", 8, UsageKind::Publish, 8),
        row(0, "n1", 8, UsageKind::Api, 16),
        row(0, "n1", 8, UsageKind::Publish, 6),
        row(0, "n1", 6, UsageKind::Publish, 32),
    ];
    let points = points(rows);
    let by_node = ["0 n1 api 16 32", "0 n1 publish 44 88", "0 n2 publish 2 4", "60000 n2 publish 1 2"];
    assert_eq!(shown(&points), by_node);
    assert_eq!(shown(&sum_nodes(points)), ["0 * api 16 32", "0 * publish 46 92", "60000 * publish 1 2"]);
    assert_eq!(sum_nodes(Vec::new()), []);
}
