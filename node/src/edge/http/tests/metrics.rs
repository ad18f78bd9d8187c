//! Usage metrics that requests leave for their account.

use std::sync::Arc;

use axum::body::HttpBody as _;
use http_body_util::BodyExt as _;
use serde_json::{Value, json};

use super::fixture::{HttpFixture, HttpTestRequest, HttpTestResponse, NOW_MS};
use crate::model::{AccountId, Amount, UsageKind};
use crate::origin::history::StoreError;
use crate::origin::metering::{MINUTE_MS, MetricRow};
use crate::testing::FakeStore;

/// A row of each kind for each of the last minutes, ending with the minute before the current one.
fn rows(minutes: u64) -> Vec<MetricRow> {
    let (account, node_id): (_, Arc<str>) = (AccountId::new("acme"), "node-1".into());
    let row = |minute, kind: UsageKind| MetricRow {
        account: account.clone(),
        minute_ms: NOW_MS - NOW_MS % MINUTE_MS - (minutes - minute) * MINUTE_MS,
        node_id: Arc::clone(&node_id),
        incarnation: 7,
        kind,
        amount: Amount { count: minute + 1, bytes: u64::MAX - minute },
    };
    (0..minutes).flat_map(|minute| UsageKind::ALL.map(|kind| row(minute, kind))).collect()
}

#[tokio::test]
async fn a_long_series_is_read_and_written_in_pieces() {
    const MINUTES: u64 = 1_000;
    const PIECE_BYTES_MAX: usize = 40 * 1024;
    let node = HttpFixture::new();
    node.services.store.put_metrics(rows(MINUTES)).await.expect("stored");
    for (query, node_id) in [("?window=24h", "node-1"), ("?window=24h&aggregate=sum", "*")] {
        let path = format!("/api/metrics/series{query}");
        let mut body = node.respond(HttpTestRequest::new("GET", &path).key("full")).await.into_body();
        assert_eq!(body.size_hint().exact(), None, "nobody knows yet how long it is");
        let (mut text, mut pieces) = (Vec::new(), 0);
        while let Some(frame) = body.frame().await {
            let piece = frame.expect("a store that answers").into_data().expect("bytes");
            assert!(piece.len() <= PIECE_BYTES_MAX, "a piece of {} bytes", piece.len());
            text.extend_from_slice(&piece);
            pieces += 1;
        }
        assert!(pieces > 10 && text.len() > 10 * PIECE_BYTES_MAX, "{pieces} pieces");
        let series: Value = serde_json::from_slice(&text).expect("JSON");
        assert_eq!(series["windowMs"], 86_400_000);
        let listed = series["series"].as_array().expect("rows");
        let stored = rows(MINUTES);
        // The last row counts these requests.
        assert_eq!(listed.len(), stored.len() + 1);
        let mut names = UsageKind::ALL.map(UsageKind::as_str);
        names.sort_unstable();
        for (index, row) in listed[..stored.len()].iter().enumerate() {
            let amount = stored[index].amount;
            let expected = json!({
                "accountId": "acme", "minute": stored[index].minute_ms, "nodeId": node_id,
                "kind": names[index % names.len()], "count": amount.count, "bytes": amount.bytes
            });
            assert_eq!(*row, expected, "{index}");
        }
    }
}

/// Returns half of the rows, then fails.
struct FailingMetricsStore;

impl FakeStore for FailingMetricsStore {
    fn read_metrics(
        &self,
        _: AccountId,
        from_ms: u64,
        rows_max: usize,
    ) -> Result<Vec<MetricRow>, StoreError> {
        let rows = rows(20);
        if from_ms >= rows[rows.len() / 2].minute_ms {
            return Err(StoreError::Failed("no disk".into()));
        }
        Ok(rows.into_iter().filter(|row| row.minute_ms >= from_ms).take(rows_max).collect())
    }
}

#[tokio::test]
async fn a_series_that_cannot_be_read_to_its_end_is_no_whole_answer() {
    let node = HttpFixture::over(FailingMetricsStore);
    let sent = HttpTestRequest::new("GET", "/api/metrics/series?window=1h").key("full");
    let mut body = node.respond(sent).await.into_body();
    assert!(body.frame().await.is_some_and(|first| first.is_ok()));
    assert!(body.frame().await.is_some_and(|second| second.is_err()));
    assert!(body.frame().await.is_none());
    let answer = series(&node, "full", "?window=60000").await;
    assert_eq!(answer.status, 503, "gone from the beginning: {}", answer.text);
}

async fn series(node: &HttpFixture, key: &str, query: &str) -> HttpTestResponse {
    node.send(HttpTestRequest::new("GET", &format!("/api/metrics/series{query}")).key(key)).await
}

/// Kind, count and bytes of the rows that an account reads.
async fn counted(node: &HttpFixture, key: &str) -> Vec<(String, u64, u64)> {
    let body = series(node, key, "").await.json();
    let rows = body["series"].as_array().unwrap().iter().map(|row| {
        let kind = row["kind"].as_str().unwrap().to_owned();
        (kind, row["count"].as_u64().unwrap(), row["bytes"].as_u64().unwrap())
    });
    rows.collect()
}

#[tokio::test]
async fn every_authenticated_request_counts_for_its_account() {
    let node = HttpFixture::new();
    let body = series(&node, "full", "?window=6h").await.json();
    let row = json!({
        "accountId": "acme", "minute": NOW_MS - NOW_MS % 60_000, "nodeId": "node-1", "kind": "api", "count": 1, "bytes": 0
    });
    assert_eq!(body, json!({"series": [row], "windowMs": 21_600_000}));
    for (method, path, key) in [
        ("GET", "/time", "full"),
        ("GET", "/nowhere", "full"),
        ("POST", "/time", "narrow"),
        ("GET", "/api/channels/a/history", "narrow"),
        ("GET", "/time", "other"),
    ] {
        node.send(HttpTestRequest::new(method, path).key(key)).await;
    }
    node.send(HttpTestRequest::new("GET", "/time")).await;
    node.send(HttpTestRequest::new("GET", "/time").key("revoked")).await;
    node.send(HttpTestRequest::new("GET", "/health").key("full")).await;
    assert_eq!(counted(&node, "full").await, [("api".to_owned(), 6, 0)], "its keys together");
    assert_eq!(counted(&node, "other").await, [("api".to_owned(), 2, 0)]);
}

#[tokio::test]
async fn publishes_and_reads_count_with_their_bytes() {
    let node = HttpFixture::new();
    for path in ["/api/channels/a/publish", "/api/channels/off%3Aa/publish"] {
        let sent = HttpTestRequest::new("POST", path).key("full").body(r#"{"name":"n","data":{"a":1}}"#);
        assert_eq!(node.send(sent).await.status, 200);
    }
    let batch = r#"{"channels":["a","b","[c"],"messages":[{"data":1},{"id":"x"}]}"#;
    node.send(HttpTestRequest::new("POST", "/api/publish").key("full").body(batch)).await;
    let mut read = 0;
    for path in ["a/history", "b/history?limit=1", "off%3Aa/history", "a/presence/history"] {
        let answer =
            node.send(HttpTestRequest::new("GET", &format!("/api/channels/{path}")).key("full")).await;
        assert_eq!(answer.status, 200);
        read += answer.text.len() as u64;
    }
    node.send(HttpTestRequest::new("GET", "/api/channels/a/history?start=x").key("full")).await;
    let expected = [("api", 9, 0), ("history-read", 4, read), ("publish", 6, 2 * 10 + 2)];
    assert_eq!(
        counted(&node, "full").await,
        expected.map(|(kind, count, bytes)| (kind.to_owned(), count, bytes))
    );
}

#[tokio::test]
async fn the_sum_is_over_nodes_and_the_account_is_the_callers() {
    let node = HttpFixture::new();
    let body = series(&node, "full", "?aggregate=sum&window=90000&accountId=other-prod").await.json();
    assert_eq!(body["windowMs"], 90_000);
    let rows = body["series"].as_array().unwrap();
    let scope = |row: &Value| (row["accountId"].clone(), row["nodeId"].clone());
    assert_eq!(rows.iter().map(scope).collect::<Vec<_>>(), [(json!("acme"), json!("*"))]);
    let answer = series(&node, "full", "?aggregate=avg").await;
    assert_eq!((answer.status, answer.text.as_str()), (400, r#"{"error":"aggregate must be sum"}"#));
}
