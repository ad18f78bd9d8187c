//! Occupancy of a channel: counted on one node, or summed over all, with a source that says which.

use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::presence::present;
use fanfare_cluster_tests::receiver::Receiver;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Response, SOON, Socket, http, wait_until};
use serde_json::{Value, json};
use tokio::time::Instant;

const KEY: &str = "secret.k1";
/// Key that may subscribe everywhere, and publish nowhere.
const READER: &str = "secret.reader";
const WRITER: &str = "secret.writer";
const MEMBER: &str = "secret.member";
/// Key of another account.
const OTHER: &str = "secret.other";

fn directory() -> Directory {
    directory_with(ALL)
}

/// Makes a directory in which [`KEY`] has this capability.
fn directory_with(capability: &str) -> Directory {
    Directory::default()
        .account("acme")
        .key("k1", "secret", capability)
        .key("reader", "secret", r#"{ "*" = ["subscribe"] }"#)
        .key("writer", "secret", r#"{ "*" = ["publish", "history"] }"#)
        .key("member", "secret", r#"{ "*" = ["presence"] }"#)
        .account("other")
        .key("other", "secret", ALL)
}

async fn node() -> Node {
    Node::start(NodeOptions::default().directory(directory(), KEY)).await
}

async fn get(node: &Node, channel: &str, key: &str) -> Response {
    let path = format!("/api/channels/{channel}");
    http::request(node.addr(), "GET", &path, &[("authorization", &http::basic(key))], "").await
}

async fn occupancy(node: &Node, channel: &str) -> Value {
    let answer = get(node, channel, KEY).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer.json()
}

fn counts([connections, publishers, subscribers, members]: [u64; 4]) -> Value {
    json!({"connections": connections, "publishers": publishers, "subscribers": subscribers, "members": members})
}

fn details(name: &str, at: [u64; 4], source: &str) -> Value {
    json!({"name": name, "occupancy": counts(at), "source": source})
}

async fn until_occupied(node: &Node, at: [u64; 4], source: &str) {
    let expected = details("room", at, source);
    let what = format!("{expected}");
    wait_until(SOON, &what, async || occupancy(node, "room").await == expected).await;
}

async fn attached(node: &Node, key: &str, modes: &[&str]) -> Socket {
    let mut socket = Socket::open_as(node, "", &http::basic(key)).await;
    let answer = socket.ask(json!({"op": 8, "channel": "room", "modes": modes})).await;
    assert_eq!(answer["op"], 9, "{answer}");
    socket
}

#[tokio::test(flavor = "multi_thread")]
async fn one_node_counts_by_mode_and_capability() {
    let node = node().await;
    assert_eq!(occupancy(&node, "room").await, details("room", [0; 4], "cluster"));
    let mut open = Vec::new();
    for (key, modes, at) in [
        (KEY, &["subscribe", "publish", "presence"][..], [1, 1, 1, 0]),
        (KEY, &["subscribe"], [2, 2, 2, 0]),
        (READER, &["subscribe"], [3, 2, 3, 0]),
        (KEY, &["publish"], [4, 3, 3, 0]),
        (KEY, &["presence"], [5, 4, 3, 0]),
        (MEMBER, &["presence"], [6, 4, 3, 0]),
    ] {
        open.push(attached(&node, key, modes).await);
        assert_eq!(occupancy(&node, "room").await, details("room", at, "cluster"), "{key} {modes:?}");
    }
    let mut other_account = Socket::open_as(&node, "", &http::basic(OTHER)).await;
    other_account.attach("room").await;
    present(&mut open[0], "enter", "room", json!({"clientId": "ann"})).await;
    present(&mut open[0], "enter", "room", json!({"clientId": "bob"})).await;
    assert_eq!(occupancy(&node, "room").await, details("room", [6, 4, 3, 2], "cluster"));
    assert_eq!(get(&node, "room", OTHER).await.json(), details("room", [1, 1, 1, 0], "cluster"));

    // A further attach replaces the modes of a connection in the counts.
    for (modes, at) in [
        (["publish"], [6, 4, 2, 2]),
        (["publish"], [6, 4, 2, 2]),
        (["presence"], [6, 4, 2, 2]),
        (["subscribe"], [6, 4, 3, 2]),
        (["publish"], [6, 4, 2, 2]),
    ] {
        open[1].ask(json!({"op": 8, "channel": "room", "modes": modes})).await;
        assert_eq!(occupancy(&node, "room").await, details("room", at, "cluster"), "{modes:?}");
    }
    open[1].ask(json!({"op": 10, "channel": "room"})).await;
    assert_eq!(occupancy(&node, "room").await, details("room", [5, 3, 2, 2], "cluster"));
    drop(open.remove(3));
    until_occupied(&node, [4, 2, 2, 2], "cluster").await;
    open.clear();
    // The members remain for the presence timeout.
    until_occupied(&node, [0, 0, 0, 2], "cluster").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn changed_key_capability_updates_the_publisher_count() {
    let node = node().await;
    let _socket = attached(&node, KEY, &["subscribe"]).await;
    assert_eq!(occupancy(&node, "room").await, details("room", [1, 1, 1, 0], "cluster"));
    node.replace_directory(&directory_with(r#"{ "*" = ["subscribe"] }"#));
    until_occupied(&node, [1, 0, 1, 0], "cluster").await;
    node.replace_directory(&directory());
    until_occupied(&node, [1, 1, 1, 0], "cluster").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn path_names_the_channel_and_needs_a_capability() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    for channel in ["a/b", "a:b", "room/publish", "publish", "/history"] {
        socket.attach(channel).await;
    }
    for (path, name) in [
        ("a%2Fb", "a/b"),
        ("a/b", "a/b"),
        ("a%3Ab", "a:b"),
        ("room%2Fpublish", "room/publish"),
        ("publish", "publish"),
        ("/history", "/history"),
    ] {
        let answer = get(&node, path, KEY).await;
        assert_eq!((answer.status, answer.json()), (200, details(name, [1, 1, 1, 0], "cluster")), "{path}");
        assert!(answer.header("x-service-node-id").is_some());
    }
    // A path with the name of an operation after a channel still means the operation.
    assert_eq!(get(&node, "room/history", KEY).await.json(), json!({"messages": []}));
    assert_eq!(get(&node, "room/presence", KEY).await.json()["members"], json!([]));
    for (path, key, status) in [
        ("room/publish", KEY, 405),
        ("room", READER, 200),
        ("room", MEMBER, 200),
        ("room", WRITER, 403),
        ("room", "wrong.k1", 401),
        ("%FF", KEY, 400),
        ("a%2", KEY, 400),
        ("%5Broom", KEY, 400),
        ("", KEY, 404),
    ] {
        assert_eq!(get(&node, path, key).await.status, status, "{path} {key}");
    }
    let basic = http::basic(KEY);
    let authorization = [("authorization", basic.as_str())];
    let posted = http::request(node.addr(), "POST", "/api/channels/room", &authorization, "{}").await;
    assert_eq!((posted.status, posted.header("allow")), (405, Some("GET, HEAD")));
}

async fn cluster() -> Cluster {
    Cluster::linked_with(3, |options| options.directory(directory(), KEY)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn three_nodes_answer_with_the_sum() {
    let mut cluster = cluster().await;
    let nodes = cluster.nodes();
    let mut open = Vec::new();
    for node in &*nodes {
        open.push(attached(node, KEY, &["subscribe", "publish", "presence"]).await);
        open.push(attached(node, READER, &["subscribe"]).await);
    }
    open.push(attached(&nodes[2], KEY, &["publish"]).await);
    present(&mut open[0], "enter", "room", json!({"clientId": "ann"})).await;
    for node in &*nodes {
        until_occupied(node, [7, 4, 6, 1], "cluster").await;
    }
    open.drain(..2);
    for node in &*nodes {
        until_occupied(node, [5, 3, 4, 1], "cluster").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_does_not_answer_leaves_the_own_count() {
    let mut cluster = cluster().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let _open = [
        attached(n0, KEY, &["subscribe"]).await,
        attached(n1, KEY, &["subscribe"]).await,
        attached(n2, KEY, &["subscribe"]).await,
    ];
    until_occupied(n0, [3, 3, 3, 0], "cluster").await;
    n2.pause();
    let asked = Instant::now();
    assert_eq!(occupancy(n0, "room").await, details("room", [1, 1, 1, 0], "node"));
    assert!(asked.elapsed() < Duration::from_secs(2), "{:?}", asked.elapsed());
    // A node that is declared down is not waited for.
    until_occupied(n0, [2, 2, 2, 0], "cluster").await;
    n2.kill();
    n1.kill();
    until_occupied(n0, [1, 1, 1, 0], "cluster").await;
}

async fn watching(node: &Node, query: &str) -> Socket {
    let mut socket = Socket::open(node, query).await;
    let attached = socket.ask(json!({"op": 8, "channel": "room", "occupancy": true})).await;
    assert_eq!(attached["op"], 9, "{attached}");
    socket
}

async fn next_occupancy(socket: &mut Socket) -> Value {
    socket.find("op 16", |frame| frame["op"] == 16).await
}

async fn until_occupancy(socket: &mut Socket, at: [u64; 4], source: &str) {
    let notices = json!({"op": 16, "channel": "room", "occupancy": counts(at), "source": source});
    socket.find(&notices.to_string(), |frame| *frame == notices).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn attach_with_occupancy_gets_the_counts_and_changes() {
    let node = node().await;
    let mut first = watching(&node, "").await;
    until_occupancy(&mut first, [1, 1, 1, 0], "cluster").await;
    let mut second = watching(&node, "?format=msgpack").await;
    // The notice with the former count, and then the one with the present count.
    until_occupancy(&mut second, [2, 2, 2, 0], "cluster").await;
    until_occupancy(&mut first, [2, 2, 2, 0], "cluster").await;
    let reader = attached(&node, READER, &["subscribe"]).await;
    present(&mut first, "enter", "room", json!({"clientId": "ann"})).await;
    for socket in [&mut first, &mut second] {
        until_occupancy(socket, [3, 2, 3, 1], "cluster").await;
    }
    drop(reader);
    until_occupancy(&mut first, [2, 2, 2, 1], "cluster").await;
    until_occupancy(&mut second, [2, 2, 2, 1], "cluster").await;
    // A further attach without occupancy ends the notices, as a detach does.
    second.attach("room").await;
    first.ask(json!({"op": 10, "channel": "room"})).await;
    let third = watching(&node, "").await;
    let silence = Duration::from_millis(1_500);
    for socket in [&mut first, &mut second] {
        let (frames, ended) = socket.to_end(silence).await;
        assert!(frames.iter().all(|frame| frame["op"] != 16), "{frames:?}");
        assert_eq!(ended, SocketEnd::Silence);
    }
    drop(third);
}

#[tokio::test(flavor = "multi_thread")]
async fn many_occupancy_changes_are_sent_once_a_second() {
    let node = node().await;
    let mut watcher = watching(&node, "").await;
    next_occupancy(&mut watcher).await;
    let begun = Instant::now();
    let mut other = Socket::open(&node, "").await;
    let mut last = Value::Null;
    let mut count = 0;
    for _ in 0..40 {
        other.attach("room").await;
        other.ask(json!({"op": 10, "channel": "room"})).await;
    }
    other.attach("room").await;
    while last["occupancy"] != counts([2, 2, 2, 0]) {
        last = next_occupancy(&mut watcher).await;
        count += 1;
    }
    let seconds = begun.elapsed().as_secs();
    assert!(count <= seconds + 1, "{count} frames within {seconds} s");
}

#[tokio::test(flavor = "multi_thread")]
async fn occupancy_of_three_nodes_is_reported_on_each() {
    let mut cluster = cluster().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut watchers = [watching(n0, "").await, watching(n1, "").await];
    let member = attached(n2, MEMBER, &["presence"]).await;
    for watcher in &mut watchers {
        until_occupancy(watcher, [3, 2, 2, 0], "cluster").await;
    }
    drop(member);
    for watcher in &mut watchers {
        until_occupancy(watcher, [2, 2, 2, 0], "cluster").await;
    }
    n2.pause();
    until_occupancy(&mut watchers[0], [1, 1, 1, 0], "node").await;
    until_occupancy(&mut watchers[0], [2, 2, 2, 0], "cluster").await;
}

/// An account with two webhooks: `asks` gets all events of `room`, occupancy included, and `other` gets the default
/// events.
fn hooked(options: NodeOptions, asks: &Receiver, other: &Receiver) -> NodeOptions {
    let hook = |receiver: &Receiver, more: &str| {
        format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"hush\"\n{more}", receiver.url())
    };
    let events = "events = [\"message\", \"presence\", \"occupancy\"]\nchannels = [\"room\"]";
    let directory = Directory::default()
        .account("acme")
        .integration("asks", &hook(asks, events))
        .integration("other", &hook(other, ""))
        .key("k1", "secret", ALL);
    options.directory(directory, KEY).environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")
}

/// Gives source and node of the events, in their order.
fn sources(receiver: &Receiver) -> Vec<(String, String)> {
    let text = |envelope: &Value, name: &str| envelope[name].as_str().expect("a text").to_owned();
    let received = receiver.received();
    let envelopes = received.iter().map(|request| {
        let envelope = request.envelope();
        assert_eq!(request.header("x-service-source"), text(&envelope, "source"));
        (text(&envelope, "source"), text(&envelope, "nodeId"))
    });
    envelopes.collect()
}

fn expected(notices: &[(&str, &str)]) -> Vec<(String, String)> {
    notices.iter().map(|(source, node)| ((*source).to_owned(), (*node).to_owned())).collect()
}

async fn until_sources(receiver: &Receiver, notices: &[(&str, &str)]) {
    let what = format!("{notices:?}");
    wait_until(SOON, &what, async || sources(receiver).len() >= notices.len()).await;
    assert_eq!(sources(receiver), expected(notices));
}

#[tokio::test(flavor = "multi_thread")]
async fn integration_gets_channel_occupied_and_vacated_events() {
    let (asks, other) = (Receiver::start().await, Receiver::start().await);
    let options = NodeOptions::default().environment("FANFARE_NODE_ID", "n0");
    let node = Node::start(hooked(options, &asks, &other)).await;
    let mut silent = attached(&node, KEY, &["publish"]).await;
    silent.attach("elsewhere").await;
    until_sources(&asks, &[("channel.occupied", "n0")]).await;
    let envelope = asks.received().remove(0).envelope();
    assert_eq!((&envelope["channel"], &envelope["ruleId"]), (&json!("room"), &json!("asks")));
    let [item] = &envelope["items"].as_array().expect("items")[..] else { panic!("one record: {envelope}") };
    assert_eq!(item["channel"], "room");
    assert!(item["id"].as_str().is_some_and(|id| id.starts_with("occ_")), "{item}");
    assert!(item["timestamp"].as_u64().is_some_and(|timestamp| timestamp > 1_700_000_000_000), "{item}");
    let mut second = attached(&node, KEY, &["subscribe"]).await;
    silent.ask(json!({"op": 10, "channel": "room"})).await;
    second.publish("room", json!({"data": 1})).await;
    drop(second);
    let notices = [("channel.occupied", "n0"), ("channel.message", "n0"), ("channel.vacated", "n0")];
    until_sources(&asks, &notices).await;
    // The other webhook gets the default events alone.
    until_sources(&other, &[("channel.message", "n0")]).await;
    node.assert_no_panic();
}

async fn until_known(nodes: &[Node], expected: [u64; 3]) {
    for (node, channels) in nodes.iter().zip(expected) {
        let what = format!("{expected:?}");
        let known = async || node.metric("fanfare_occupied_channels").await == channels as f64;
        wait_until(SOON, &what, known).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn first_and_last_client_of_three_nodes_are_reported_once() {
    let (asks, other) = (Receiver::start().await, Receiver::start().await);
    let mut cluster = Cluster::linked_with(3, |options| hooked(options, &asks, &other)).await;
    let nodes = cluster.nodes();
    let first = attached(&nodes[0], KEY, &["subscribe"]).await;
    until_sources(&asks, &[("channel.occupied", "n0")]).await;
    let second = attached(&nodes[1], KEY, &["publish"]).await;
    let mut last = attached(&nodes[2], KEY, &["presence"]).await;
    // All nodes know that the event was sent, so the remaining ones do not send it again.
    until_known(nodes, [1, 1, 1]).await;
    drop(first);
    until_known(nodes, [0, 1, 1]).await;
    drop(second);
    until_known(nodes, [0, 0, 1]).await;
    last.ask(json!({"op": 10, "channel": "room"})).await;
    until_sources(&asks, &[("channel.occupied", "n0"), ("channel.vacated", "n2")]).await;
    let _again = attached(&nodes[1], KEY, &["subscribe"]).await;
    let notices = [("channel.occupied", "n0"), ("channel.vacated", "n2"), ("channel.occupied", "n1")];
    until_sources(&asks, &notices).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_node_reports_channels_it_leaves_vacated() {
    let (asks, other) = (Receiver::start().await, Receiver::start().await);
    let mut node = Node::start(hooked(NodeOptions::default(), &asks, &other)).await;
    let _socket = attached(&node, KEY, &["subscribe"]).await;
    wait_until(SOON, "occupied", async || sources(&asks).len() == 1).await;
    assert!(node.stop().await.success());
    let notices: Vec<String> = sources(&asks).into_iter().map(|(source, _)| source).collect();
    assert_eq!(notices, ["channel.occupied", "channel.vacated"]);
}
