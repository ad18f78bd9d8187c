//! The system clock of a node is set, or wrong: retention does not depend on it, and credentials do.

use fanfare_client::sign::{self, JwtParams, TokenParams};
use fanfare_cluster_tests::clock::{self, ShiftedClock};
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::{Cassandra, Node, NodeOptions, SOON, history, http, wait_until};
use serde_json::{Value, json};

const DAY_S: i64 = 24 * 3_600;
/// Seconds by which a clock is wrong, and whether the node detects that as a step.
const STEPS: [(i64, bool); 8] = [
    (1, false),
    (-1, false),
    (90, true),
    (-90, true),
    (600, true),
    (-600, true),
    (5 * DAY_S, true),
    (-5 * DAY_S, true),
];
/// Default retention of history, in seconds.
const KEPT_S: i32 = 72 * 3_600;

async fn publish(node: &Node, key: &str, channel: &str, data: &Value) {
    let path = format!("/api/channels/{channel}/publish");
    let headers = [("authorization", &*http::basic(key))];
    let answer = http::request(node.addr(), "POST", &path, &headers, json!({"data": data}).to_string()).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
}

/// The data and the times of all messages, oldest first.
async fn read(node: &Node, key: &str, channel: &str) -> Vec<(Value, u64)> {
    let records = history::read_all(node.addr(), key, channel, "direction=forwards&limit=7").await;
    let of = |mut record: Value| (record["data"].take(), record["timestamp"].as_u64().expect("a time"));
    records.into_iter().map(of).collect()
}

async fn data(node: &Node, key: &str, channel: &str) -> Vec<Value> {
    read(node, key, channel).await.into_iter().map(|(data, _)| data).collect()
}

async fn readiness(node: &Node) -> String {
    let answer = http::request(node.admin(), "GET", "/ready", &[], "").await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer.json()["status"].as_str().expect("a status").to_owned()
}

async fn until_ready_as(node: &Node, expected: &str) {
    wait_until(SOON, "the readiness", async || readiness(node).await == expected).await;
}

async fn steps(node: &Node) -> f64 {
    node.metric("fanfare_clock_steps_total").await
}

/// Waits until the node has counted `expected` steps; it checks its clock once a second.
async fn until_steps(node: &Node, expected: f64) {
    wait_until(SOON, "the step to be counted", async || steps(node).await >= expected).await;
    assert_eq!(steps(node).await, expected, "{}", node.log());
}

/// Gives the seconds by which the node's clock is ahead of this process.
async fn ahead_s(node: &Node) -> i64 {
    let headers = [("authorization", &*http::basic(&node.key()))];
    let now = http::request(node.addr(), "GET", "/time", &headers, "").await.json();
    let now_ms = now["now"].as_i64().expect("a time");
    (now_ms - clock::now_ms().cast_signed() + 500).div_euclid(1_000)
}

#[tokio::test(flavor = "multi_thread")]
async fn history_outlives_a_clock_ahead_for_one_publish() {
    let shifted = ShiftedClock::default();
    let mut node = Node::start(shifted.under(NodeOptions::default())).await;
    let key = node.key();
    let all: Vec<Value> = (0..5).map(|number| json!(number)).collect();
    for number in &all {
        publish(&node, &key, "c", number).await;
    }
    shifted.ahead(5 * DAY_S);
    publish(&node, &key, "other", &json!("ahead")).await;
    assert_eq!(data(&node, &key, "c").await, all, "while the clock is wrong");
    until_ready_as(&node, "degraded").await;
    shifted.ahead(0);
    until_ready_as(&node, "ready").await;
    until_steps(&node, 1.0).await;
    assert_eq!(data(&node, &key, "c").await, all, "once it is right again");
    publish(&node, &key, "c", &json!("right")).await;
    let (_, at_ms) = read(&node, &key, "c").await.pop().expect("messages");
    assert!(at_ms.abs_diff(clock::now_ms()) < 60_000, "a time of a channel that was never ahead: {at_ms}");
    node.stop().await;
    node.restart().await;
    let key = node.key();
    assert_eq!(data(&node, &key, "c").await.len(), 6, "after a restart");
    assert_eq!(data(&node, &key, "other").await, [json!("ahead")]);
    assert!(node.log().contains("newest stored row is ahead of the system clock"), "{}", node.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_follow_the_clock_in_both_directions() {
    let shifted = ShiftedClock::default();
    let node = Node::start(shifted.under(NodeOptions::default())).await;
    let key = node.key().parse().expect("a key");
    let status = async |issued_s: u64| {
        let params = JwtParams {
            capability: r#"{"*":["subscribe"]}"#.into(),
            client_id: None,
            issued_s: Some(issued_s),
            ttl_s: 1_800,
        };
        let bearer = http::bearer(&sign::jwt(&key, &params).expect("a token"));
        http::request(node.addr(), "GET", "/time", &[("authorization", &bearer)], "").await.status
    };
    let exchange = async || {
        let params = TokenParams { timestamp_ms: Some(clock::now_ms()), ..TokenParams::default() };
        let request = serde_json::to_string(&sign::token_request(&key, params).expect("a request"));
        let path = format!("/keys/{}/requestToken", node.key().split_once('.').expect("a name").1);
        http::request(node.addr(), "POST", &path, &[], request.expect("JSON")).await
    };
    assert_eq!(status(clock::now_s()).await, 200);
    for wrong_s in [7_200, -7_200] {
        shifted.ahead(wrong_s);
        assert_eq!(ahead_s(&node).await, wrong_s);
        assert_eq!(status(clock::now_s()).await, 401, "{wrong_s}");
        assert_eq!(exchange().await.status, 401, "{wrong_s}");
        shifted.ahead(0);
        assert_eq!(ahead_s(&node).await, 0);
        assert_eq!(status(clock::now_s()).await, 200, "after {wrong_s}");
        let granted = exchange().await;
        assert_eq!(granted.status, 200, "after {wrong_s}: {:?}", granted.body);
        let issued_ms = granted.json()["issued"].as_u64().expect("a time");
        assert!(issued_ms.abs_diff(clock::now_ms()) < 60_000, "after {wrong_s}: {issued_ms}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_while_running_deletes_nothing() {
    let shifted = ShiftedClock::default();
    let mut node = Node::start(shifted.under(NodeOptions::default())).await;
    let key = node.key();
    let mut all = vec![json!("first")];
    publish(&node, &key, "c", &all[0]).await;
    let mut taken = 0.0;
    for (wrong_s, is_step) in STEPS {
        shifted.ahead(wrong_s);
        let message = json!(wrong_s);
        publish(&node, &key, "c", &message).await;
        all.push(message);
        assert_eq!(ahead_s(&node).await, wrong_s);
        if is_step {
            taken += 1.0;
            until_ready_as(&node, "degraded").await;
            until_steps(&node, taken).await;
        }
        assert_eq!(data(&node, &key, "c").await, all, "{wrong_s}");
        shifted.ahead(0);
        until_ready_as(&node, "ready").await;
    }
    until_steps(&node, taken).await;
    let messages = read(&node, &key, "c").await;
    assert!(messages.is_sorted_by_key(|(_, at_ms)| *at_ms), "times of a channel go back: {messages:?}");
    node.stop().await;
    node.restart().await;
    assert_eq!(data(&node, &node.key(), "c").await, all);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_while_down_deletes_nothing() {
    let shifted = ShiftedClock::default();
    let mut node = Node::start(shifted.under(NodeOptions::default())).await;
    let key = node.key();
    let mut all = vec![json!("first")];
    publish(&node, &key, "c", &all[0]).await;
    for (wrong_s, is_step) in STEPS {
        // A killed incarnation leaves as much state as one that stops.
        node.kill();
        shifted.ahead(wrong_s);
        node.restart().await;
        let (is_degraded, counted) = (readiness(&node).await == "degraded", steps(&node).await);
        assert_eq!((is_degraded, counted > 0.0), (is_step, is_step), "{wrong_s}: {}", node.log());
        assert_eq!(data(&node, &key, "c").await, all, "{wrong_s}");
        let message = json!(wrong_s);
        publish(&node, &key, "c", &message).await;
        all.push(message);
        node.stop().await;
        shifted.ahead(0);
        node.restart().await;
        until_ready_as(&node, "ready").await;
        assert_eq!(data(&node, &key, "c").await, all, "after {wrong_s}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_step_that_has_held_is_followed() {
    let shifted = ShiftedClock::default();
    let options = NodeOptions::default().limit("clock_hold_ms", 8_000);
    let mut node = Node::start(shifted.under(options)).await;
    let key = node.key();
    publish(&node, &key, "c", &json!("old")).await;
    shifted.ahead(5 * DAY_S);
    until_ready_as(&node, "degraded").await;
    node.stop().await;
    node.restart().await;
    assert_eq!(data(&node, &node.key(), "c").await, [json!("old")], "it has not held yet");
    until_ready_as(&node, "ready").await;
    assert_eq!(data(&node, &node.key(), "c").await, Vec::<Value>::new(), "it is five days old");
    wait_until(SOON, "the log line", async || node.log().contains("expiry follows the system clock again"))
        .await;
    assert_eq!(steps(&node).await, 0.0, "the step was taken up, and is none of this start: {}", node.log());
}

/// Gives the remaining seconds of all rows that expire.
async fn lives(cassandra: &Cassandra, keyspace: &str) -> Vec<i32> {
    let asked = format!("SELECT ttl(record) FROM {keyspace}.history");
    let found = cassandra.session().await.query_unpaged(asked, ()).await.expect("read");
    let found = found.into_rows_result().expect("rows");
    let rows = found.rows::<(Option<i32>,)>().expect("a number");
    rows.filter_map(|row| row.expect("a row").0).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn one_wrong_clock_of_three_over_scylla_hides_nothing() {
    let Some(cassandra) = Cassandra::shared() else { return };
    let (keyspace, shifted) = (cassandra.keyspace(), ShiftedClock::default());
    let stored = |options| cassandra.store(options, &keyspace).limit("store_wait_ms", 8_000);
    let mut cluster = Cluster::linked_with(2, stored).await;
    cluster.add(|options| shifted.under(stored(options))).await;
    cluster.until_linked().await;
    let [n0, n1, wrong] = cluster.nodes() else { panic!("three nodes were started") };
    let key = n0.key();
    let mut all = Vec::new();
    for (wrong_s, is_step) in [(0, false)].into_iter().chain(STEPS) {
        shifted.ahead(wrong_s);
        // The node with the wrong clock publishes first, and so has announced its partitions of the day to the others.
        for (from, node) in [&*wrong, n0, n1].into_iter().enumerate() {
            let message = json!([wrong_s, from]);
            publish(node, &key, "c", &message).await;
            all.push(message);
        }
        if is_step {
            until_ready_as(wrong, "degraded").await;
        }
        for node in [&*wrong, n0, n1] {
            let mut read = data(node, &key, "c").await;
            for message in &all {
                assert!(read.contains(message), "{wrong_s}: {message} is missing in {read:?}");
            }
            read.dedup();
            assert_eq!(read.len(), all.len(), "{wrong_s}");
        }
    }
    for node in [&*n0, n1] {
        assert_eq!((readiness(node).await.as_str(), steps(node).await), ("ready", 0.0));
    }
    let lives = lives(&cassandra, &keyspace).await;
    assert_eq!(lives.len(), all.len());
    for left_s in lives {
        assert!((KEPT_S - 600..=KEPT_S).contains(&left_s), "a row has {left_s} s left");
    }
}
