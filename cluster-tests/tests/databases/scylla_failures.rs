//! A database that is killed, is stalled or loses a node: acknowledged messages stay, publishes that cannot be stored
//! are refused in time, and the node recovers without a restart.

mod three_nodes;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fanfare_client::sign::{self, TokenParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::network::{PacketLoss, isolated};
use fanfare_cluster_tests::waits::{fault_lasts, pace};
use fanfare_cluster_tests::{
    Cassandra, Directory, Node, NodeOptions, SOON, Socket, history, http, wait_for, wait_until,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

const KEY: &str = "secret.k1";
/// Greatest time until a publish is refused: the wait for the store, and some more on a busy machine.
const REFUSED_WITHIN: Duration = Duration::from_millis(2_000 + 1_500);
/// Greatest time from the database's return until a publish is acknowledged.
const WELL_WITHIN: Duration = Duration::from_secs(5);
const PUBLISHERS: usize = 8;
/// Time from an answer to a publisher's next attempt. Some have a request under way at any time, but the
/// database is not driven to its limit, which would leave no processor to the test.
const EVERY: Duration = Duration::from_millis(20);

async fn node(cassandra: &Cassandra) -> Node {
    node_with(cassandra, &cassandra.keyspace()).await
}

async fn node_with(cassandra: &Cassandra, keyspace: &str) -> Node {
    Node::start(cassandra.store(options(), keyspace)).await
}

fn options() -> NodeOptions {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    NodeOptions::default().directory(directory, KEY).environment("FANFARE_NODE_ID", "n1")
}

async fn publish(node: &Node, channel: &str, body: Value) -> http::Response {
    let path = format!("/api/channels/{channel}/publish");
    http::request(node.addr(), "POST", &path, &[("authorization", &http::basic(KEY))], body.to_string()).await
}

async fn status(node: &Node, path: &str) -> u16 {
    http::request(node.addr(), "GET", path, &[("authorization", &http::basic(KEY))], "").await.status
}

/// Greatest time until the database declares one of its nodes down, also on a busy machine.
const MARKED_DOWN: Duration = Duration::from_secs(120);

/// Waits until a publish is acknowledged; gives the time that it took.
async fn until_well(node: &Node) -> Duration {
    let begun = Instant::now();
    wait_until(SOON, "an acknowledged publish", async || {
        publish(node, "probe", json!({"data": 1})).await.status == 200
    })
    .await;
    begun.elapsed()
}

/// Waits until the node notices that the store is down, and asserts the behaviour of a degraded node.
async fn assert_degraded_in_time(node: &Node, subscriber: &mut Socket, why: &str) {
    // A process that was told to end may still answer for a moment.
    wait_until(SOON, "a refused publish", async || {
        publish(node, "probe", json!({"data": 1})).await.status == 503
    })
    .await;
    for body in [json!({"data": why}), json!({"data": why, "id": format!("own-{why}")})] {
        let begun = Instant::now();
        let answer = publish(node, "room", body).await;
        assert_eq!(answer.status, 503, "{:?}", answer.body);
        assert!(begun.elapsed() < REFUSED_WITHIN, "{:?}", begun.elapsed());
    }
    // The message is not stored, but delivered.
    subscriber.find("the live message", |frame| frame["messages"][0]["data"] == why).await;
    let begun = Instant::now();
    let nack = subscriber.ask(json!({"op": 13, "channel": "room", "data": "socket"})).await;
    assert_eq!((&nack["op"], &nack["code"]), (&json!(2), &json!(50003)), "{nack}");
    assert!(begun.elapsed() < REFUSED_WITHIN, "{:?}", begun.elapsed());
    assert_eq!(status(node, "/api/channels/room/history").await, 503, "never an empty list");
    assert_eq!(status(node, "/api/channels/room/presence/history").await, 503);
    assert_eq!(status(node, "/api/metrics/series").await, 503);
    let request = sign::token_request(&KEY.parse().expect("a key"), TokenParams::default());
    let body = serde_json::to_string(&request.expect("a request")).expect("it is JSON");
    let token = http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], body).await;
    assert_eq!(token.status, 503, "a nonce of which nothing is known gives no token");
    let ready = http::request(node.admin(), "GET", "/ready", &[], "").await;
    assert_eq!((ready.status, ready.json()["status"].clone()), (200, json!("degraded")));
}

/// Asserts that the node recovers in time, once the store is up again.
async fn assert_well_in_time(node: &Node, after: &str) {
    let waited = until_well(node).await;
    assert!(waited < WELL_WITHIN, "{waited:?} after {after}");
    let answer = publish(node, "room", json!({"data": after, "id": format!("own-{after}")})).await;
    assert_eq!(answer.status, 200, "what is unknown can be tried again: {:?}", answer.body);
    wait_until(SOON, "the node to say that it is ready", async || {
        http::request(node.admin(), "GET", "/ready", &[], "").await.json()["status"] == "ready"
    })
    .await;
    let records = history::read_all(node.addr(), KEY, "room", "limit=100").await;
    let id = json!(format!("own-{after}"));
    let stored = records.iter().filter(|record| record["id"] == id).count();
    assert_eq!(stored, 1, "once, whatever became of the first attempt: {records:?}");
    assert!(records.iter().any(|record| record["data"] == "before"));
}

async fn subscriber(node: &Node) -> Socket {
    let mut subscriber = Socket::open(node, "").await;
    subscriber.attach("room").await;
    assert_eq!(publish(node, "room", json!({"data": "before"})).await.status, 200);
    assert_eq!(subscriber.message("room").await["messages"][0]["data"], "before");
    subscriber
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_or_stalled_database_gives_503_and_live_delivery_works() {
    let Some(cassandra) = Cassandra::to_kill(1) else { return };
    let node = node(&cassandra).await;
    for (signal, again) in [("KILL", None), ("STOP", Some("CONT"))] {
        // The recovery of the database may take longer than the timeout of a silent client, so each round has a fresh
        // one.
        let mut subscriber = subscriber(&node).await;
        cassandra.signal(signal, None);
        assert_degraded_in_time(&node, &mut subscriber, signal).await;
        match again {
            Some(again) => cassandra.signal(again, None),
            None => cassandra.restart(),
        }
        assert_well_in_time(&node, signal).await;
    }
    node.assert_no_panic();
}

#[test]
fn unreachable_database_gives_503_and_live_delivery_works() {
    Cassandra::fetch();
    isolated(async |network| {
        let (here, there) = (network.host(), network.host());
        let Some(cassandra) = Cassandra::start_on(&there) else { return };
        let node = Node::start(cassandra.store(options().on(&here), &cassandra.keyspace())).await;
        let mut attached = subscriber(&node).await;
        let answers = network.cut(&there, &here, PacketLoss::All);
        assert_degraded_in_time(&node, &mut attached, "no answer comes").await;
        drop(answers);
        assert_well_in_time(&node, "no answer comes").await;
        let mut attached = subscriber(&node).await;
        let all = network.split(&[&here], &[&there]);
        assert_degraded_in_time(&node, &mut attached, "nothing goes either way").await;
        drop(all);
        assert_well_in_time(&node, "nothing goes either way").await;
        node.assert_no_panic();
    });
}

/// Publishers on two nodes that are not linked, and the data of acknowledged messages.
struct Load {
    nodes: Arc<[Node; 2]>,
    stop: Arc<AtomicBool>,
    publishers: JoinSet<Vec<String>>,
}

impl Load {
    async fn begin(cassandra: &Cassandra) -> Self {
        let keyspace = cassandra.keyspace();
        let one = node_with(cassandra, &keyspace).await;
        let other = cassandra.store(options().environment("FANFARE_NODE_ID", "n2"), &keyspace);
        let nodes = Arc::new([one, Node::start(other).await]);
        let (stop, mut publishers) = (Arc::default(), JoinSet::new());
        for from in 0..PUBLISHERS {
            publishers.spawn(publish_all(Arc::clone(&nodes), from, Arc::clone(&stop)));
        }
        Self { nodes, stop, publishers }
    }

    /// Waits until both nodes have published some more messages.
    async fn goes_on(&self, what: &str) {
        for node in &*self.nodes {
            let published = async || node.metric("fanfare_published_messages_total").await;
            let enough = published().await + 50.0;
            wait_until(MARKED_DOWN, what, async || published().await >= enough).await;
        }
    }

    /// Stops the publishers, and asserts that the store has each acknowledged message once.
    async fn assert_safe(self) {
        self.stop.store(true, Ordering::Relaxed);
        let acked: Vec<String> = self.publishers.join_all().await.into_iter().flatten().collect();
        let mut stored = HashSet::new();
        for channel in ["load0", "load1", "load2"] {
            for record in history::read_all(self.nodes[0].addr(), KEY, channel, "limit=1000").await {
                let data = record["data"].as_str().expect("a text").to_owned();
                assert!(stored.insert(data.clone()), "{data} is there twice");
            }
        }
        let lost: Vec<_> = acked.iter().filter(|data| !stored.contains(*data)).collect();
        assert!(lost.is_empty(), "{} of {} are lost: {lost:?}", lost.len(), acked.len());
        self.nodes.iter().for_each(Node::assert_no_panic);
    }
}

/// Publishes once; gives the ack, or `None` if the store is down.
async fn attempt(node: &Node, channel: &str, body: &Value) -> Option<Value> {
    let begun = Instant::now();
    let answer = publish(node, channel, body.clone()).await;
    assert!(begun.elapsed() < REFUSED_WITHIN, "{:?}", begun.elapsed());
    assert!([200, 503].contains(&answer.status), "{:?}", answer.body);
    (answer.status == 200).then(|| answer.json())
}

/// Publishes at one node after another until one acknowledges.
async fn until_acknowledged(nodes: &[Node], channel: &str, body: &Value) -> Value {
    let end = Instant::now() + MARKED_DOWN;
    for node in nodes.iter().cycle() {
        if let Some(ack) = attempt(node, channel, body).await {
            return ack;
        }
        assert!(Instant::now() < end, "{body} is never acknowledged");
        pace(EVERY).await;
    }
    unreachable!("there are nodes")
}

/// Publishes until it is stopped; gives the data of all acknowledged messages. Every fourth message has an id: it is
/// retried at both nodes until it is acknowledged, and then published once more at each.
async fn publish_all(nodes: Arc<[Node; 2]>, from: usize, stop: Arc<AtomicBool>) -> Vec<String> {
    let channel = format!("load{}", from % 3);
    let mut acked = Vec::new();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let data = format!("{from}-{number}");
        if number % 4 == 0 {
            let body = json!({"data": data, "id": data});
            let first = until_acknowledged(&*nodes, &channel, &body).await;
            for node in &*nodes {
                let again = until_acknowledged(std::slice::from_ref(node), &channel, &body).await;
                assert_eq!(again, first, "it is known");
            }
            acked.push(data);
        } else if attempt(&nodes[number % 2], &channel, &json!({"data": data})).await.is_some() {
            acked.push(data);
        }
        pace(EVERY).await;
    }
    acked
}

#[tokio::test(flavor = "multi_thread")]
async fn acked_messages_survive_database_kill_stall_and_slowness() {
    let Some(cassandra) = Cassandra::to_kill(1) else { return };
    let load = Load::begin(&cassandra).await;
    load.goes_on("load").await;
    cassandra.signal("KILL", None);
    cassandra.restart();
    load.goes_on("load after the kill").await;
    cassandra.signal("STOP", None);
    // The stall is longer than the wait for the store, so publishes are refused whose outcome in the database is
    // unknown.
    for node in &*load.nodes {
        wait_until(SOON, "the node to know", async || {
            http::request(node.admin(), "GET", "/ready", &[], "").await.json()["status"] == "degraded"
        })
        .await;
    }
    cassandra.signal("CONT", None);
    load.goes_on("load after the pause").await;
    // Stalls around the wait for the store: some answers come in time, and some do not.
    for pause_ms in [600, 1_200, 1_800, 2_400, 600, 1_200] {
        cassandra.signal("STOP", None);
        fault_lasts(Duration::from_millis(pause_ms)).await;
        cassandra.signal("CONT", None);
        pace(Duration::from_millis(150)).await;
    }
    load.goes_on("load after it was slow").await;
    load.assert_safe().await;
}
