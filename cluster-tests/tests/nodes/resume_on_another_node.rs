//! A client that resumes on another node gets the missed messages, once and in each publisher's order, or a reported
//! loss.

mod wandering;

use std::collections::HashMap;
use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, PEER_DOWN, peer_log_events};
use fanfare_cluster_tests::presence::present;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Node, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

const PUBLISHERS: usize = 3;

/// Messages that a client has received on all its nodes.
#[derive(Default)]
struct ReceivedSequences {
    serial: Value,
    /// Next number, by publisher.
    next: HashMap<u64, u64>,
    /// Numbers below may be missing, or come again, after a reported loss.
    loss_covers_below: u64,
}

impl ReceivedSequences {
    /// Attaches a client.
    async fn begin(node: &Node) -> (Socket, Self) {
        let mut socket = Socket::open(node, "").await;
        let serial = socket.attach("room").await["serial"].clone();
        (socket, Self { serial, ..Self::default() })
    }

    fn take(&mut self, frame: &Value) {
        for message in frame["messages"].as_array().expect("a message frame") {
            let part = |at: usize| message["data"][at].as_u64().expect("a number");
            if part(1) < self.loss_covers_below {
                continue;
            }
            let next = self.next.entry(part(0)).or_default();
            assert_eq!(part(1), *next, "of publisher {} on {}", part(0), self.serial);
            *next += 1;
        }
        self.serial = frame["serial"].clone();
    }

    fn count(&self) -> u64 {
        self.next.values().sum()
    }

    async fn read_to(&mut self, socket: &mut Socket, count: u64) {
        assert!(self.has_read_to(socket, count).await, "it was told of a loss");
    }

    /// Reads until `count` messages of each publisher; false on a reported loss.
    async fn has_read_to(&mut self, socket: &mut Socket, count: u64) -> bool {
        while self.count() < count {
            let frame =
                socket.find("a message or a loss", |frame| frame["op"] == 13 || frame["op"] == 9).await;
            if frame["op"] == 9 {
                self.serial = frame["serial"].clone();
                return false;
            }
            self.take(&frame);
        }
        true
    }
}

async fn attach_after(node: &Node, serial: &Value) -> (Socket, Value) {
    let mut socket = Socket::open(node, "").await;
    let attached = socket.ask(json!({"op": 8, "channel": "room", "serial": serial})).await;
    assert_eq!(attached["op"], 9, "{attached}");
    (socket, attached)
}

/// A publisher on each node, with numbered messages.
struct Publishers {
    sockets: Vec<Socket>,
    next: u64,
}

impl Publishers {
    async fn on(nodes: &[Node]) -> Self {
        let mut sockets = Vec::new();
        for node in nodes.iter().cycle().take(PUBLISHERS) {
            sockets.push(Socket::open(node, "").await);
        }
        Self { sockets, next: 0 }
    }

    /// Publishes `count` messages on each node; all are acknowledged when this returns.
    async fn publish(&mut self, count: u64) {
        for number in self.next..self.next + count {
            for (from, socket) in self.sockets.iter_mut().enumerate() {
                socket.publish("room", json!({"data": [from, number]})).await;
            }
        }
        self.next += count;
    }

    fn published(&self) -> u64 {
        self.next * PUBLISHERS as u64
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_at_node_with_subscriber_continues_without_loss() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut publishers = Publishers::on(nodes).await;
    let mut there = Socket::open(&nodes[1], "").await;
    there.attach("room").await;
    let (mut socket, mut received) = ReceivedSequences::begin(&nodes[0]).await;
    publishers.publish(10).await;
    received.read_to(&mut socket, publishers.published()).await;
    drop(socket);
    publishers.publish(200).await;
    let (mut socket, attached) = attach_after(&nodes[1], &received.serial).await;
    assert_eq!((&attached["resumed"], &attached["serial"]), (&json!(true), &received.serial));
    received.read_to(&mut socket, publishers.published()).await;
    publishers.publish(5).await;
    received.read_to(&mut socket, publishers.published()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_at_node_without_subscriber_backfills_from_a_peer() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut publishers = Publishers::on(nodes).await;
    let (mut socket, mut received) = ReceivedSequences::begin(&nodes[0]).await;
    for node in [2, 1, 0, 1, 2, 0] {
        publishers.publish(20).await;
        drop(socket);
        publishers.publish(100).await;
        let attached;
        (socket, attached) = attach_after(&nodes[node], &received.serial).await;
        assert_eq!((&attached["resumed"], &attached["serial"]), (&json!(true), &received.serial), "{node}");
        publishers.publish(5).await;
        received.read_to(&mut socket, publishers.published()).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_after_node_failure_keeps_messages_that_peers_have() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut publishers = Publishers::on(&nodes[1..]).await;
    let mut there = Socket::open(&nodes[1], "").await;
    there.attach("room").await;
    let (mut socket, mut received) = ReceivedSequences::begin(&nodes[0]).await;
    publishers.publish(10).await;
    received.read_to(&mut socket, publishers.published()).await;
    nodes[0].kill();
    publishers.publish(20).await;
    let (mut socket, attached) = attach_after(&nodes[1], &received.serial).await;
    assert_eq!(attached["resumed"], true);
    publishers.publish(20).await;
    received.read_to(&mut socket, publishers.published()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_after_loss_of_the_only_holder_reports_continuity_loss() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut publisher = Socket::open(n0, "").await;
    let mut socket = Socket::open(n0, "").await;
    socket.attach("room").await;
    publisher.publish("room", json!({"data": [0, 0]})).await;
    let serial = socket.message("room").await["serial"].clone();
    n0.kill();
    wait_until(SOON, "the death to be known", async || n1.metric("fanfare_peers_known").await == 0.0).await;
    let (_, attached) = attach_after(n1, &serial).await;
    assert_eq!(attached["resumed"], false);
}

async fn attach_back(node: &Node, rewind: &str) -> (Socket, Value) {
    let mut socket = Socket::open(node, "").await;
    let attached = socket.ask(json!({"op": 8, "channel": "room", "rewind": rewind})).await;
    assert_eq!((&attached["op"], &attached["resumed"]), (&json!(9), &json!(false)), "{attached}");
    (socket, attached)
}

async fn assert_receives(socket: &mut Socket, expected: &[u64]) {
    for data in expected {
        let frame = socket.find("a message or a loss", |frame| frame["op"] == 13 || frame["op"] == 9).await;
        assert_eq!(frame["messages"][0]["data"], *data, "{frame}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_gives_what_is_recent_where_somebody_was() {
    let mut cluster = Cluster::linked(3).await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut there = Socket::open(n1, "").await;
    there.attach("room").await;
    let mut publishers = [Socket::open(n0, "").await, Socket::open(n2, "").await];
    let publish = async |of: &mut Socket, data: u64| {
        of.publish("room", json!({"data": data})).await;
    };
    for number in 0..4 {
        publish(&mut publishers[number % 2], number as u64).await;
        there.message("room").await;
    }
    let (mut two, attached) = attach_back(n2, "2").await;
    assert_eq!(attached.get("warning"), None);
    assert_receives(&mut two, &[2, 3]).await;
    let (mut all, attached) = attach_back(n2, "100").await;
    assert_eq!(attached["warning"], "rewind was cut: the channel keeps no history");
    assert_receives(&mut all, &[0, 1, 2, 3]).await;
    let (mut lately, attached) = attach_back(n0, "1m").await;
    assert_eq!(attached["warning"], "rewind was cut: the channel keeps no history");
    assert_receives(&mut lately, &[0, 1, 2, 3]).await;
    publish(&mut publishers[0], 4).await;
    for socket in [&mut two, &mut all, &mut lately] {
        assert_receives(socket, &[4]).await;
    }
    // A client that loses its connection meanwhile resumes from the last position that it was given.
    let (back, attached) = attach_after(n1, &lately.attach("room").await["serial"]).await;
    assert_eq!(attached["resumed"], true, "{attached}");
    drop(back);
}

/// A client that attaches while a node goes down begins without the messages of that node.
#[tokio::test(flavor = "multi_thread")]
async fn rewind_after_attach_during_node_failure_has_messages_of_peer() {
    for is_at_once in [true, false] {
        check_rewind_from_peer(is_at_once).await;
    }
}

async fn check_rewind_from_peer(is_at_once: bool) {
    let mut cluster = Cluster::linked(3).await;
    let [n0, n1, n2] = cluster.nodes().first_chunk_mut().expect("three nodes were started");
    let mut there = Socket::open(n1, "").await;
    there.attach("room").await;
    for (node, data) in [(&*n0, 0), (&*n1, 1), (&*n2, 2)] {
        Socket::open(node, "").await.publish("room", json!({"data": data})).await;
        there.message("room").await;
    }
    let mut early = Socket::open(n2, "").await;
    n0.kill();
    early.attach("room").await;
    if is_at_once {
        assert_receives(&mut attach_back(n2, "10").await.0, &[0, 1, 2]).await;
    }
    for node in [&*n1, &*n2] {
        let is_down = || peer_log_events(node).iter().any(|(of, message)| of == "n0" && message == PEER_DOWN);
        wait_until(SOON, "the death to be known", async || is_down()).await;
    }
    let (mut all, attached) = attach_back(n2, "10").await;
    assert_eq!(attached["warning"], "rewind was cut: the channel keeps no history");
    assert_receives(&mut all, &[0, 1, 2]).await;
    Socket::open(n1, "").await.publish("room", json!({"data": 3})).await;
    assert_receives(&mut all, &[3]).await;
    let (_, attached) = attach_after(n2, &all.attach("room").await["serial"]).await;
    assert_eq!(attached["resumed"], true, "{attached}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_and_what_follows_have_no_gap() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    Socket::open(&nodes[1], "").await.attach("room").await;
    let mut publishers = Publishers::on(nodes).await;
    publishers.publish(20).await;
    let (((), (mut back, _)), end) = (tokio::join!(publishers.publish(50), attach_back(&nodes[2], "10")), 70);
    let mut next: HashMap<u64, u64> = HashMap::new();
    while next.len() < PUBLISHERS || next.values().any(|next| *next < end) {
        let frame = back.message("room").await;
        for message in frame["messages"].as_array().expect("a message frame") {
            let part = |at: usize| message["data"][at].as_u64().expect("a number");
            let number = part(1);
            assert!((16..end).contains(&number), "{frame}");
            assert_eq!(*next.entry(part(0)).or_insert(number), number, "{frame}");
            next.insert(part(0), number + 1);
        }
    }
}

/// Gives the query with which a client resumes its lost connection.
fn resume(socket: &Socket) -> String {
    format!("?resume={}", socket.connected["connectionKey"].as_str().expect("a key"))
}

#[track_caller]
fn assert_same(back: &Socket, before: &Socket) {
    assert_eq!(back.connected["resumed"], true);
    assert_eq!(back.connected["connectionId"], before.connected["connectionId"]);
}

async fn assert_taken_over(mut socket: Socket) {
    let (frames, ended) = socket.to_end(SOON).await;
    assert_eq!(ended, SocketEnd::Closed(4001), "on {}: {frames:?}", socket.connected["nodeId"]);
    assert_eq!(frames.last().map(|frame| &frame["code"]), Some(&json!(40800)), "{frames:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn session_takeover_on_another_node_ends_the_earlier_socket() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut at = Socket::open(&nodes[0], "").await;
    let first_key = resume(&at);
    for node in [1, 2, 0, 1] {
        let back = Socket::open(&nodes[node], &resume(&at)).await;
        assert_same(&back, &at);
        assert_taken_over(std::mem::replace(&mut at, back)).await;
    }
    // Also with its first key, from which no node can tell the present one. Of two nodes that took the session over
    // without knowing of each other, either may have it.
    flush_peer_streams(&nodes[1]).await;
    let back = Socket::open(&nodes[2], &first_key).await;
    assert_same(&back, &at);
    assert_taken_over(at).await;
    let anothers = Socket::open(&nodes[0], &format!("{}&clientId=eve", resume(&back))).await;
    assert_eq!(anothers.connected["resumed"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_outlives_its_node() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let before = Socket::open(&nodes[0], "").await;
    nodes[0].kill();
    let back = Socket::open(&nodes[1], &resume(&before)).await;
    assert_same(&back, &before);
    let known = async |node: &Node, count: f64| {
        wait_until(SOON, "the others to be known", async || {
            node.metric("fanfare_peers_known").await == count
        })
        .await;
    };
    known(&nodes[2], 1.0).await;
    let again = Socket::open(&nodes[2], &resume(&before)).await;
    assert_same(&again, &before);
    assert_taken_over(back).await;
    let seed = nodes[1].gossip().expect("a node of a cluster").to_string();
    nodes[0].set_environment("FANFARE_SEED", &seed);
    nodes[0].restart().await;
    known(&nodes[0], 2.0).await;
    let home = Socket::open(&nodes[0], &resume(&again)).await;
    assert_same(&home, &before);
    assert_taken_over(again).await;
}

/// All nodes restart one after the other. The last one learns of the session from a node that began after its
/// end.
#[tokio::test(flavor = "multi_thread")]
async fn session_resumes_on_nodes_started_after_its_own_node_ended() {
    let mut cluster = Cluster::linked(3).await;
    let before = Socket::open(&cluster.nodes()[0], "").await;
    let key = resume(&before);
    for index in 0..3 {
        assert_eq!(cluster.nodes()[index].stop().await.code(), Some(0));
        cluster.restart(index).await;
        cluster.until_linked().await;
    }
    for node in [1, 2, 0] {
        let back = Socket::open(&cluster.nodes()[node], &key).await;
        assert_same(&back, &before);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_taken_over_twice_at_once_has_one_owner() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    for _ in 0..10 {
        let before = Socket::open(&nodes[0], "").await;
        let query = resume(&before);
        let (one, other) = tokio::join!(Socket::open(&nodes[1], &query), Socket::open(&nodes[2], &query));
        assert_same(&one, &before);
        assert_same(&other, &before);
        assert_taken_over(before).await;
        let mut ends = [one, other];
        let [one, other] = &mut ends;
        let lost = tokio::select! {
            (frames, _) = one.to_end(SOON) => frames,
            (frames, _) = other.to_end(SOON) => frames,
        };
        assert_eq!(lost.last().map(|frame| &frame["code"]), Some(&json!(40800)), "{lost:?}");
        let mut alive = 0;
        for socket in &mut ends {
            let is_alive = socket.next_within(Duration::from_millis(200)).await == Err(SocketEnd::Silence);
            alive += usize::from(is_alive);
        }
        assert_eq!(alive, 1);
    }
}

/// Waits until all that the node has sent its peers has arrived, on each peer stream.
async fn flush_peer_streams(node: &Node) {
    let mut socket = Socket::open(node, "").await;
    for number in 0..8 {
        // The answer waits for the acks of the peers.
        present(&mut socket, "enter", &format!("lane-{number}"), json!({"clientId": "ann"})).await;
    }
}

/// Resumes the connection whose `connected` frame is `of`, and gives the new one.
async fn reconnect(node: &Node, of: &Value) -> Value {
    let key = of["connectionKey"].as_str().expect("a key");
    Socket::open(node, &format!("?clientId=ann&resume={key}")).await.connected
}

#[tokio::test(flavor = "multi_thread")]
async fn session_closed_for_good_is_resumed_on_no_node() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut ended = Vec::new();
    // Closed by the client, once on its second node, and by the account.
    let mut closed = Socket::open(&nodes[0], "?clientId=ann").await;
    let before = Socket::open(&nodes[1], "?clientId=ann").await.connected;
    let key = before["connectionKey"].as_str().expect("a key");
    let mut moved = Socket::open(&nodes[0], &format!("?clientId=ann&resume={key}")).await;
    assert_eq!(moved.connected["resumed"], true);
    for socket in [&mut closed, &mut moved] {
        socket.send(&json!({"op": 5})).await;
        assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Closed(1000));
        ended.push(socket.connected.clone());
    }
    ended.push(before);
    let mut shut = Socket::open(&nodes[0], "?clientId=ann").await;
    let lost = Socket::open(&nodes[0], "?clientId=ann2").await;
    let path = "/api/clients/ann/connections/close";
    let authorization = http::basic(&nodes[1].key());
    let answer = http::request(nodes[1].addr(), "POST", path, &[("authorization", &authorization)], "").await;
    assert_eq!(answer.status, 200);
    assert_eq!(shut.to_end(SOON).await.1, SocketEnd::Closed(4003));
    ended.push(shut.connected.clone());
    flush_peer_streams(&nodes[0]).await;
    for node in &*nodes {
        for of in &ended {
            let fresh = reconnect(node, of).await;
            assert_eq!(fresh["resumed"], false, "on {}", fresh["nodeId"]);
            assert_ne!(fresh["connectionId"], of["connectionId"]);
        }
    }
    // Also after the failure of the node that had the sessions.
    nodes[0].kill();
    wait_until(SOON, "its death to be known", async || nodes[1].metric("fanfare_peers_known").await == 1.0)
        .await;
    for of in &ended {
        assert_eq!(reconnect(&nodes[1], of).await["resumed"], false);
    }
    let key = lost.connected["connectionKey"].as_str().expect("a key");
    let back = Socket::open(&nodes[1], &format!("?clientId=ann2&resume={key}")).await;
    assert_eq!(back.connected["resumed"], true, "that one was only lost");
}
