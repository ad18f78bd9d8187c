//! Metric rows: counts, their accounts, and their continuation after a restart.

use std::time::Duration;

use fanfare_client::sign::{self, TokenParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::socket::Socket;
use fanfare_cluster_tests::waits::time_passes;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, SOON, clock, http};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const OTHER_KEY: &str = "secret.k2";
/// Greatest time until a count is stored, so that it survives the end of the process.
const STORED_WITHIN: Duration = Duration::from_secs(5);

fn options() -> NodeOptions {
    let directory = Directory::default()
        .account("acme")
        .key("k1", "secret", ALL)
        .account("other")
        .key("k2", "secret", ALL);
    NodeOptions::default().directory(directory, KEY).environment("FANFARE_NODE_ID", "n1")
}

async fn call(node: &Node, key: &str, method: &str, path: &str, body: impl Into<bytes::Bytes>) -> Value {
    let authorization = http::basic(key);
    let answer = http::request(node.addr(), method, path, &[("authorization", &authorization)], body).await;
    assert_eq!(answer.status, 200, "{path}: {:?}", answer.body);
    answer.json()
}

async fn publish(node: &Node, key: &str, body: impl Into<bytes::Bytes>) {
    call(node, key, "POST", "/api/channels/a/publish", body).await;
}

async fn series(node: &Node, key: &str, query: &str) -> Vec<Value> {
    let body = call(node, key, "GET", &format!("/api/metrics/series?{query}"), "").await;
    body["series"].as_array().expect("a list").clone()
}

/// Gives count and bytes of a kind over all minutes of the last hour.
async fn total(node: &Node, key: &str, kind: &str) -> (u64, u64) {
    let rows = series(node, key, "").await;
    let of_kind = rows.iter().filter(|row| row["kind"] == kind);
    let number = |row: &Value, field: &str| row[field].as_u64().expect("a number");
    of_kind.fold((0, 0), |(count, bytes), row| (count + number(row, "count"), bytes + number(row, "bytes")))
}

#[tokio::test(flavor = "multi_thread")]
async fn messages_count_with_their_sizes_for_the_account_they_are_of() {
    let node = Node::start(options()).await;
    let mut sockets = Vec::new();
    for query in ["", "", "?format=msgpack", "?clientId=a%22b&echo=false"] {
        let mut socket = Socket::open(&node, query).await;
        socket.attach("a").await;
        sockets.push(socket);
    }
    let mut others = Socket::open_as(&node, "", &http::basic(OTHER_KEY)).await;
    others.attach("a").await;

    // name "n" 3, data 7, extras 7: four deliveries.
    publish(&node, KEY, r#"{"name":"n", "data":{"x": 1}, "extras":{"h":2}}"#).await;
    // Two messages of data 2 each; the repeat is acked and not counted.
    let batch = r#"[{"data":12},{"data":34,"id":"own"}]"#;
    publish(&node, KEY, batch).await;
    publish(&node, KEY, r#"{"data":34,"id":"own"}"#).await;
    // clientId a"b 6 and data 4, not echoed: three deliveries.
    sockets[3].publish("a", json!({"data": "hi"})).await;
    publish(&node, OTHER_KEY, r#"{"data":12345}"#).await;
    for socket in &mut sockets[..3] {
        socket.find("the last message", |frame| frame["messages"][0]["data"] == "hi").await;
    }
    others.message("a").await;

    assert_eq!(total(&node, KEY, "publish").await, (4, 17 + 4 + 10));
    assert_eq!(total(&node, KEY, "deliver").await, (4 + 8 + 3, 4 * 17 + 4 * 4 + 3 * 10));
    assert_eq!(total(&node, KEY, "connect").await, (4, 0));
    assert_eq!(total(&node, OTHER_KEY, "publish").await, (1, 5));
    assert_eq!(total(&node, OTHER_KEY, "deliver").await, (1, 5));
    assert_eq!(total(&node, OTHER_KEY, "connect").await, (1, 0));
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_event_stream_counts_as_a_connection_with_its_deliveries() {
    let node = Node::start(options()).await;
    let mut stream = Raw::connect(node.addr()).await;
    let head = format!("GET /realtime/sse?channel=a&channel=b&key={KEY} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    stream.write(head.as_bytes()).await;
    let (status, answer) = stream.head(SOON).await.expect("an answer");
    assert_eq!(status, 200, "{answer}");
    let mut find = async |event: &str, count| {
        let mut found = 0;
        while found < count {
            found += stream.chunk(SOON).await.expect("the stream goes on").matches(event).count();
        }
    };
    find("event: attached", 2).await;
    publish(&node, KEY, r#"{"name":"n","data":"hi"}"#).await;
    publish(&node, KEY, r#"{"name":"n","data":"ho"}"#).await;
    find("event: message", 2).await;
    assert_eq!(total(&node, KEY, "deliver").await, (2, 2 * (3 + 4)));
    assert_eq!(total(&node, KEY, "connect").await, (1, 0));
    assert_eq!(total(&node, OTHER_KEY, "connect").await, (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn replayed_messages_count_as_delivered() {
    let node = Node::start(options()).await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("a").await;
    let messages = json!([{"data": 1}, {"data": 22}, {"data": 333}]);
    let ack = socket.ask(json!({"op": 13, "channel": "a", "messages": messages})).await;
    publish(&node, KEY, r#"{"data":4444}"#).await;
    socket.find("the last message", |frame| frame["messages"][0]["data"] == 4444).await;
    assert_eq!(total(&node, KEY, "deliver").await, (4, 10));
    let mut late = Socket::open(&node, "").await;
    late.ask(json!({"op": 8, "channel": "a", "serial": ack["serials"][0]})).await;
    late.find("the last message", |frame| frame["messages"][0]["data"] == 4444).await;
    assert_eq!(total(&node, KEY, "deliver").await, (4 + 3, 10 + 9), "without the first, which it had");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_tokens_and_reads_are_counted() {
    let node = Node::start(options()).await;
    publish(&node, KEY, r#"{"data":1}"#).await;
    let request = sign::token_request(&KEY.parse().expect("a key"), TokenParams::default());
    let request = serde_json::to_string(&request.expect("a request")).expect("JSON");
    let path = "/keys/k1/requestToken";
    let issued = http::request(node.addr(), "POST", path, &[], request.clone()).await;
    assert_eq!(issued.status, 200, "{:?}", issued.body);
    assert_eq!(http::request(node.addr(), "POST", path, &[], request).await.status, 401);
    let token = http::bearer(issued.json()["token"].as_str().expect("a token"));
    let path = "/api/channels/a/history";
    let page = http::request(node.addr(), "GET", path, &[("authorization", &token)], "").await;
    assert_eq!(page.status, 200);
    assert_eq!(http::request(node.addr(), "GET", path, &[], "").await.status, 401);

    assert_eq!(total(&node, KEY, "token").await, (1, 0));
    assert_eq!(total(&node, KEY, "history-read").await, (1, page.body.len() as u64));
    // A publish, a page, this request and the two before it.
    assert_eq!(total(&node, KEY, "api").await, (5, 0));
    assert_eq!(total(&node, OTHER_KEY, "token").await, (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn one_row_for_each_minute_node_and_kind_over_all_restarts() {
    let mut node = Node::start(options()).await;
    publish(&node, KEY, r#"[{"data":1},{"data":2}]"#).await;
    assert!(node.stop().await.success());
    node.restart().await;
    assert_eq!(total(&node, KEY, "publish").await, (2, 2), "flushed by a clean stop, however short the run");
    publish(&node, KEY, r#"{"data":3}"#).await;
    assert!(node.stop().await.success());
    node.restart().await;
    assert_eq!(total(&node, KEY, "publish").await, (3, 3));

    let mut places = Vec::new();
    for (query, node_id) in [("window=7d", "n1"), ("window=7d&aggregate=sum", "*")] {
        let rows = series(&node, KEY, query).await;
        places.clear();
        for row in &rows {
            assert_eq!((&row["accountId"], &row["nodeId"]), (&json!("acme"), &json!(node_id)));
            let minute = row["minute"].as_u64().expect("a number");
            assert!(minute % 60_000 == 0 && clock::now_ms() - minute < 600_000, "{minute}");
            places.push((minute, row["kind"].to_string()));
        }
        let as_sent = places.clone();
        places.sort();
        places.dedup();
        assert_eq!(as_sent, places, "in order, and none twice");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_node_has_all_that_was_counted_five_seconds_before() {
    let mut node = Node::start(options()).await;
    for number in 0..10 {
        publish(&node, KEY, format!(r#"{{"data":{number}}}"#)).await;
    }
    time_passes(STORED_WITHIN).await;
    publish(&node, KEY, r#"{"data":"late"}"#).await;
    node.kill();
    node.restart().await;
    let (count, bytes) = total(&node, KEY, "publish").await;
    assert!(matches!((count, bytes), (10, 10) | (11, 16)), "{count} messages, {bytes} bytes");
    publish(&node, KEY, "{}").await;
    assert_eq!(total(&node, KEY, "publish").await, (count + 1, bytes), "nothing is counted twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_store_the_rows_are_in_memory() {
    let node = Node::start(options().environment("FANFARE_STORE", "none")).await;
    publish(&node, KEY, r#"{"data":1}"#).await;
    assert_eq!(total(&node, KEY, "publish").await, (1, 1));
    time_passes(STORED_WITHIN).await;
    publish(&node, KEY, r#"{"data":2}"#).await;
    assert_eq!(total(&node, KEY, "publish").await, (2, 2));
    let body = call(&node, KEY, "GET", "/api/metrics/series?window=nonsense", "").await;
    assert_eq!(body["windowMs"], 3_600_000);
}
