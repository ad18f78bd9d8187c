//! The store of one node, copied into a shared database: everything is copied once, however often the copy was
//! interrupted.

use std::collections::{BTreeMap, HashSet};
use std::time::Duration;

use fanfare_client::sign::{self, JwtParams, TokenParams};
use fanfare_cluster_tests::clock::{self, ShiftedClock};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{
    Cassandra, Directory, Node, NodeOptions, Response, RunningCommand, SOON, Socket, history, http, presence,
    wait_for, wait_until,
};
use scylla::client::session::Session;
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
/// Channels, with their retention in hours.
const CHANNELS: [(&str, u64); 4] = [("news", 72), ("orders:1", 72), ("long:chat", 240), ("brief:note", 24)];
/// Messages of each channel on each of three days.
const MESSAGES: usize = 1_000;
const MESSAGES_IN_ONE: usize = 100;
const DAY_S: i64 = 24 * 3_600;
const HOUR_MS: u64 = 3_600_000;
/// Long wait for the store, since the tests are not about a slow database.
const STORE_WAIT_MS: u64 = 8_000;
const COPIED_WITHIN: Duration = Duration::from_secs(120);

fn options() -> NodeOptions {
    let directory = Directory::default()
        .account("acme")
        .channels("pattern = \"long:*\"\nretention_hours = 240")
        .channels("pattern = \"brief:*\"\nretention_hours = 24")
        .key("k1", "secret", ALL);
    // The windows are longer than the test takes on a busy machine.
    NodeOptions::default()
        .directory(directory, KEY)
        .environment("FANFARE_NODE_ID", "n1")
        .environment("FANFARE_DRAIN_TIMEOUT", "3s")
        // The clock of the source is set twice, and both nodes must agree on the expired messages.
        .limit("clock_hold_ms", 0)
        .limit("idempotency_window_ms", HOUR_MS)
        .limit("store_wait_ms", STORE_WAIT_MS)
        .limit("presence_grace_ms", HOUR_MS / 2)
}

async fn post(node: &Node, path: &str, body: &Value) -> Response {
    http::request(node.addr(), "POST", path, &[("authorization", &http::basic(KEY))], body.to_string()).await
}

async fn get(node: &Node, path: &str) -> Value {
    let answer = http::request(node.addr(), "GET", path, &[("authorization", &http::basic(KEY))], "").await;
    assert_eq!(answer.status, 200, "{path}: {:?}", answer.body);
    answer.json()
}

fn publish_path(channel: &str) -> String {
    format!("/api/channels/{}/publish", fanfare_proto::path::encode_channel(channel))
}

/// Publishes the messages of one day on every channel.
async fn publish_day(node: &Node, day: usize) {
    for (channel, _) in CHANNELS {
        for part in 0..MESSAGES / MESSAGES_IN_ONE {
            let first = (day * MESSAGES) + part * MESSAGES_IN_ONE;
            let messages: Vec<Value> =
                (first..first + MESSAGES_IN_ONE).map(|number| json!({"data": number})).collect();
            let answer = post(node, &publish_path(channel), &json!(messages)).await;
            assert_eq!(answer.status, 200, "{:?}", answer.body);
        }
    }
}

/// Gives a node with messages of three days, and its clock, which is right at last.
async fn source() -> (Node, ShiftedClock) {
    let shifted = ShiftedClock::default();
    shifted.ahead(-2 * DAY_S);
    let mut node = Node::start(shifted.under(options())).await;
    for day in 0..3 {
        if day > 0 {
            shifted.ahead((day - 2) * DAY_S);
            assert!(node.stop().await.success());
            node.restart().await;
        }
        publish_day(&node, usize::try_from(day).expect("small")).await;
    }
    (node, shifted)
}

fn copy(from: &Node, cassandra: &Cassandra, keyspace: &str) -> RunningCommand {
    let from = from.data_dir().display().to_string();
    let points = cassandra.points().join(",");
    RunningCommand::start(&[
        "history",
        "copy",
        "--from",
        &from,
        "--store",
        "scylla",
        "--scylla-node",
        &points,
        "--scylla-keyspace",
        keyspace,
        "--node-id",
        "n1",
    ])
}

async fn copied(from: &Node, cassandra: &Cassandra, keyspace: &str) -> String {
    let mut copy = copy(from, cassandra, keyspace);
    let ended = copy.ended_within(COPIED_WITHIN).await;
    let printed = copy.stderr();
    assert!(ended.success(), "{printed:?}");
    let bars: Vec<_> = printed.iter().filter(|line| line.contains(" rows, ")).collect();
    assert!(bars.last().is_some_and(|bar| bar.contains("100 %")), "{printed:?}");
    copy.stdout().join("\n")
}

/// Reads the rows of the database: channel, kind, time, sequence and remaining seconds.
async fn rows(session: &Session, keyspace: &str) -> Vec<(String, i8, u64, i64, i32)> {
    let asked = format!("SELECT channel, kind, timestamp_ms, sequence, ttl(record) FROM {keyspace}.history");
    let Ok(found) = session.query_unpaged(asked, ()).await else { return Vec::new() };
    let found = found.into_rows_result().expect("rows");
    type Columns = (String, i8, Option<i64>, Option<i64>, Option<i32>);
    let rows = found.rows::<Columns>().expect("the columns are what they are");
    // A partition with nothing but a mark has no row.
    let read = |(channel, kind, at_ms, sequence, left_s): Columns| {
        Some((channel, kind, u64::try_from(at_ms?).expect("a time"), sequence?, left_s?))
    };
    rows.filter_map(|row| read(row.expect("a row"))).collect()
}

/// Kills a copy when it has written a part of the rows; `None` if it was always too fast for that.
async fn cut_short(from: &Node, cassandra: &Cassandra, session: &Session) -> Option<String> {
    for _ in 0..10 {
        let keyspace = cassandra.keyspace();
        let copy = copy(from, cassandra, &keyspace);
        wait_until(COPIED_WITHIN, "the first rows", async || !rows(session, &keyspace).await.is_empty())
            .await;
        drop(copy);
        if rows(session, &keyspace).await.len() < CHANNELS.len() * MESSAGES {
            return Some(keyspace);
        }
    }
    None
}

/// Reads the history of all channels as clients do, and one page after a cursor of each.
async fn seen(node: &Node, cursors: &BTreeMap<&str, String>) -> Vec<Value> {
    let mut seen = Vec::new();
    for (channel, _) in CHANNELS {
        seen.push(json!(history::read_all(node.addr(), KEY, channel, "limit=500").await));
        seen.push(json!(history::read_all(node.addr(), KEY, channel, "limit=500&direction=forwards").await));
        seen.push(get(node, &cursors[channel]).await);
    }
    seen.push(get(node, "/api/channels/news/presence/history").await);
    seen
}

async fn cursors(node: &Node) -> BTreeMap<&'static str, String> {
    let mut cursors = BTreeMap::new();
    for (channel, _) in CHANNELS {
        let path = history::path(channel, "limit=17");
        let authorization = http::basic(KEY);
        let page = http::request(node.addr(), "GET", &path, &[("authorization", &authorization)], "").await;
        cursors.insert(channel, history::next_of(page.header("link").expect("there is more")));
    }
    cursors
}

/// Reads the publishes that this node and its former incarnations have counted, by minute.
async fn counted(node: &Node) -> BTreeMap<u64, u64> {
    let series = get(node, "/api/metrics/series?window=7d").await;
    let rows = series["series"].as_array().expect("a list").clone();
    let mut counted = BTreeMap::new();
    for row in rows.iter().filter(|row| row["kind"] == "publish") {
        *counted.entry(row["minute"].as_u64().expect("a time")).or_default() +=
            row["count"].as_u64().expect("a count");
    }
    counted
}

#[tokio::test(flavor = "multi_thread")]
async fn history_copy_stores_all_once_after_an_interrupted_copy() {
    let Some(cassandra) = Cassandra::shared() else { return };
    let (mut node, _shifted) = source().await;
    let mut member = Socket::open(&node, "?clientId=ann").await;
    presence::present(&mut member, "enter", "news", json!({"data": 1})).await;
    presence::present(&mut member, "update", "news", json!({"data": 2})).await;
    let own = json!({"id": "own-1", "data": "own"});
    assert_eq!(post(&node, &publish_path("news"), &own).await.status, 200);
    let request = sign::token_request(&KEY.parse().expect("a key"), TokenParams::default());
    let request = serde_json::to_value(request.expect("a request")).expect("it is JSON");
    assert_eq!(post(&node, "/keys/k1/requestToken", &request).await.status, 200);
    let params = JwtParams {
        capability: r#"{"*":["history"]}"#.into(),
        client_id: Some("eve".into()),
        issued_s: Some(clock::now_s() - 10),
        ttl_s: 3_600,
    };
    let token = sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token");
    let revoked = post(&node, "/keys/k1/revokeTokens", &json!({"clientId": "eve"})).await;
    assert_eq!(revoked.status, 200, "{:?}", revoked.body);
    let cursors = cursors(&node).await;
    let before = seen(&node, &cursors).await;
    let published = u64::try_from(3 * MESSAGES * CHANNELS.len() + 1).expect("few");
    wait_until(SOON, "the counts", async || counted(&node).await.values().sum::<u64>() == published).await;

    let mut refused = copy(&node, &cassandra, &cassandra.keyspace());
    assert_eq!(refused.ended().await.code(), Some(1), "its node runs");
    let output = refused.stderr().join("\n");
    assert!(
        output.contains("its node must not run") && output.contains("is in use by another process"),
        "{output}"
    );
    let counts = counted(&node).await;
    // The stop stores the last counts.
    assert!(node.stop().await.success());

    let session = cassandra.session().await;
    let keyspace = cut_short(&node, &cassandra, &session).await.expect("a copy takes its time");
    let output = copied(&node, &cassandra, &keyspace).await;
    assert!(output.contains(&format!("the keyspace {keyspace} has all that")), "{output}");
    assert_kept_for_their_time(&rows(&session, &keyspace).await);

    let target = Node::start(cassandra.store(options(), &keyspace)).await;
    assert_eq!(seen(&target, &cursors).await, before, "every message once, in its place");
    let now = counted(&target).await;
    assert!(counts.iter().all(|(minute, count)| now.get(minute) >= Some(count)), "{counts:?} {now:?}");
    assert_eq!(post(&target, &publish_path("news"), &own).await.status, 200);
    assert_eq!(seen(&target, &cursors).await, before, "the id was stored before");
    assert_eq!(post(&target, "/keys/k1/requestToken", &request).await.status, 401, "the nonce was used");
    let bearer = http::bearer(&token);
    let path = history::path("news", "");
    let answer = http::request(target.addr(), "GET", &path, &[("authorization", &bearer)], "").await;
    assert_eq!(answer.status, 401, "the token is revoked");
    wait_for(SOON, "the member that was there", async || {
        let names = presence::names(&target, "news").await;
        (names == ["ann"]).then_some(())
    })
    .await;
    target.assert_no_panic();

    let there = rows(&session, &keyspace).await.len();
    let output = copied(&node, &cassandra, &keyspace).await;
    assert!(output.contains(" of them earlier"), "{output}");
    assert_eq!(rows(&session, &keyspace).await.len(), there, "the same rows");
}

/// Asserts that no row is there twice, and that each expires at the time that the source has for it.
fn assert_kept_for_their_time(rows: &[(String, i8, u64, i64, i32)]) {
    let mut names = HashSet::new();
    let now_ms = clock::now_ms();
    for (channel, kind, at_ms, sequence, left_s) in rows {
        assert!(names.insert((channel, kind, at_ms, sequence)), "twice: {channel} {at_ms} {sequence}");
        let (_, hours) = CHANNELS.iter().find(|(name, _)| name == channel).expect("a channel of the test");
        let left_ms = (at_ms + hours * HOUR_MS).saturating_sub(now_ms);
        let too_long_ms = (u64::try_from(*left_s).expect("a time") * 1_000).abs_diff(left_ms);
        assert!(too_long_ms < 60_000, "{channel} {at_ms}: {left_s} s left");
    }
    let of = |name: &str| rows.iter().filter(|(channel, kind, ..)| channel == name && *kind == 0).count();
    assert_eq!(of("orders:1"), 3 * MESSAGES);
    assert_eq!(of("long:chat"), 3 * MESSAGES);
    assert_eq!(of("brief:note"), MESSAGES, "those of the days before are over");
    assert_eq!(of("news"), 3 * MESSAGES + 1);
    assert_eq!(rows.iter().filter(|(_, kind, ..)| *kind == 1).count(), 2, "two events");
}
