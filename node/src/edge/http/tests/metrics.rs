//! What requests leave in the metrics of their account.

use serde_json::{Value, json};

use super::fixture::{Answer, Fixture, NOW_MS, Sent};

async fn series(node: &Fixture, key: &str, query: &str) -> Answer {
    node.send(Sent::new("GET", &format!("/api/metrics/series{query}")).key(key)).await
}

/// Kind, count and bytes of the rows that an account reads.
async fn counted(node: &Fixture, key: &str) -> Vec<(String, u64, u64)> {
    let body = series(node, key, "").await.json();
    let rows = body["series"].as_array().unwrap().iter().map(|row| {
        let kind = row["kind"].as_str().unwrap().to_owned();
        (kind, row["count"].as_u64().unwrap(), row["bytes"].as_u64().unwrap())
    });
    rows.collect()
}

#[tokio::test]
async fn every_authenticated_request_counts_for_its_account() {
    let node = Fixture::new();
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
        node.send(Sent::new(method, path).key(key)).await;
    }
    node.send(Sent::new("GET", "/time")).await;
    node.send(Sent::new("GET", "/time").key("revoked")).await;
    node.send(Sent::new("GET", "/health").key("full")).await;
    assert_eq!(counted(&node, "full").await, [("api".to_owned(), 6, 0)], "its keys together");
    assert_eq!(counted(&node, "other").await, [("api".to_owned(), 2, 0)]);
}

#[tokio::test]
async fn publishes_and_reads_count_with_their_bytes() {
    let node = Fixture::new();
    for path in ["/api/channels/a/publish", "/api/channels/off%3Aa/publish"] {
        let sent = Sent::new("POST", path).key("full").body(r#"{"name":"n","data":{"a":1}}"#);
        assert_eq!(node.send(sent).await.status, 200);
    }
    let batch = r#"{"channels":["a","b","[c"],"messages":[{"data":1},{"id":"x"}]}"#;
    node.send(Sent::new("POST", "/api/publish").key("full").body(batch)).await;
    let mut read = 0;
    for path in ["a/history", "b/history?limit=1", "off%3Aa/history", "a/presence/history"] {
        let answer = node.send(Sent::new("GET", &format!("/api/channels/{path}")).key("full")).await;
        assert_eq!(answer.status, 200);
        read += answer.text.len() as u64;
    }
    node.send(Sent::new("GET", "/api/channels/a/history?start=x").key("full")).await;
    let expected = [("api", 9, 0), ("history-read", 4, read), ("publish", 6, 2 * 10 + 2)];
    assert_eq!(
        counted(&node, "full").await,
        expected.map(|(kind, count, bytes)| (kind.to_owned(), count, bytes))
    );
}

#[tokio::test]
async fn the_sum_is_over_nodes_and_the_account_is_the_callers() {
    let node = Fixture::new();
    let body = series(&node, "full", "?aggregate=sum&window=90000&accountId=other-prod").await.json();
    assert_eq!(body["windowMs"], 90_000);
    let rows = body["series"].as_array().unwrap();
    let scope = |row: &Value| (row["accountId"].clone(), row["nodeId"].clone());
    assert_eq!(rows.iter().map(scope).collect::<Vec<_>>(), [(json!("acme"), json!("*"))]);
    let answer = series(&node, "full", "?aggregate=avg").await;
    assert_eq!((answer.status, answer.text.as_str()), (400, r#"{"error":"aggregate must be sum"}"#));
}
