//! A stalled node: its own clients after the stall, and the order of their messages. [`super::pause_is_a_death`] has
//! the rest.

use std::time::Duration;

use fanfare_cluster_tests::chaos::ChannelSequence;
use fanfare_cluster_tests::cluster::{Cluster, until_down};
use fanfare_cluster_tests::presence::{Watcher, attach, present, until_members_on_all};
use fanfare_cluster_tests::waits::{fault_lasts, pace};
use fanfare_cluster_tests::{Cassandra, Node, SOON, Socket};
use serde_json::{Value, json};
use tokio::time::Instant;

const WATCHERS: usize = 20;

async fn over_cassandra() -> Option<Cluster> {
    let cassandra = Cassandra::shared()?;
    let keyspace = cassandra.keyspace();
    Some(Cluster::linked_with(3, |options| cassandra.store(options, &keyspace)).await)
}

/// No subscriber, on the stalled node or elsewhere, gets events of members that stay on the other nodes.
async fn members_of_other_nodes_stay(mut cluster: Cluster) {
    let nodes = cluster.nodes();
    let mut members = Vec::new();
    for (node, name) in nodes.iter().zip(["ann", "bob"]) {
        let mut member = Socket::open(node, &format!("?clientId={name}")).await;
        present(&mut member, "enter", "room", json!({"data": name})).await;
        members.push(member);
    }
    until_members_on_all(nodes, "room", &["ann", "bob"]).await;
    let mut on_others = [Watcher::on(&nodes[0], "room").await, Watcher::on(&nodes[1], "room").await];
    let mut watchers = Vec::new();
    for _ in 0..WATCHERS {
        let mut socket = Socket::open(&nodes[2], "").await;
        assert_eq!(attach(&mut socket, "room").await.len(), 2);
        watchers.push(socket);
    }
    nodes[2].pause();
    // Its peers declare the node down meanwhile.
    until_down(&nodes[..2], "n2").await;
    nodes[2].resume_until_restarted(1).await;
    for mut socket in watchers {
        let (frames, _) = socket.to_end(SOON).await;
        let events: Vec<_> = frames.iter().filter(|frame| frame["op"] == 12 || frame["op"] == 14).collect();
        assert!(events.is_empty(), "{events:?}");
    }
    let mut back = Watcher::on(&nodes[2], "room").await;
    assert_eq!(back.list, [("ann".to_owned(), json!("ann")), ("bob".to_owned(), json!("bob"))].into());
    for watcher in on_others.iter_mut().chain([&mut back]) {
        watcher.assert_quiet(Duration::from_secs(2)).await;
        assert_eq!(watcher.events, []);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_reports_no_leave_of_remote_members() {
    members_of_other_nodes_stay(Cluster::linked(3).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_over_scylla_reports_no_leave_of_remote_members() {
    let Some(cluster) = over_cassandra().await else { return };
    members_of_other_nodes_stay(cluster).await;
}

/// A subscriber of one channel with one publisher, which reconnects to the same node.
struct Reader {
    socket: Socket,
    place: ChannelSequence,
    frames: Vec<String>,
    faults: Vec<String>,
}

impl Reader {
    async fn on(node: &Node) -> Self {
        let mut reader = Self {
            socket: Socket::open(node, "").await,
            place: ChannelSequence::default(),
            frames: Vec::new(),
            faults: Vec::new(),
        };
        let attached = reader.socket.ask(json!({"op": 8, "channel": "room"})).await;
        reader.take(&attached);
        reader
    }

    async fn come_back(&mut self, node: &Node) {
        self.socket = Socket::open(node, "").await;
        let serial = self.place.serial.clone();
        let attached = self.socket.ask(json!({"op": 8, "channel": "room", "serial": serial})).await;
        assert_eq!(attached["op"], 9, "{attached}");
        self.take(&attached);
    }

    fn take(&mut self, frame: &Value) {
        if frame["op"] == 9 && self.place.serial.is_some() && frame["resumed"] == false {
            self.place.report_loss(self.place.next.unwrap_or(0));
            self.frames.push("resumed: false".to_owned());
        }
        for message in frame["messages"].as_array().into_iter().flatten() {
            let number = message["data"].as_u64().expect("a number");
            self.frames.push(number.to_string());
            if let Err(fault) = self.place.take(number, false) {
                self.faults.push(format!("{fault}: {number}"));
            }
        }
        if frame["op"] == 9 || frame["op"] == 13 {
            self.place.serial = Some(frame["serial"].clone());
        }
    }

    /// Reads until all earlier numbers have come, or a loss was reported.
    async fn read_to(&mut self, number: u64) {
        let end = Instant::now() + SOON;
        while self.place.next.unwrap_or(0) < number {
            match self.socket.next_within(end.saturating_duration_since(Instant::now())).await {
                Ok(frame) => self.take(&frame),
                Err(ended) => unreachable!("{number} does not come, {ended:?}: {:?}", self.frames),
            }
        }
    }
}

/// Publishes numbers at two nodes in turn, each after the ack of the one before.
struct Publisher {
    sockets: [Socket; 2],
    next: u64,
}

impl Publisher {
    async fn on(nodes: &[Node]) -> Self {
        Self { sockets: [Socket::open(&nodes[1], "").await, Socket::open(&nodes[2], "").await], next: 0 }
    }

    async fn publish(&mut self) {
        let socket = &mut self.sockets[usize::from(self.next % 2 == 1)];
        socket.publish("room", json!({"data": self.next})).await;
        self.next += 1;
    }
}

/// The subscriber's node is stalled several times while a publisher changes between the two others.
async fn order_holds(cluster: &mut Cluster, stops_ms: &[u64]) -> Reader {
    let nodes = cluster.nodes();
    let mut publisher = Publisher::on(nodes).await;
    let mut reader = Reader::on(&nodes[0]).await;
    let mut times = 0;
    for stop_ms in stops_ms {
        for _ in 0..4 {
            publisher.publish().await;
        }
        reader.read_to(publisher.next).await;
        nodes[0].pause();
        let length = Duration::from_millis(*stop_ms);
        let until = Instant::now() + length;
        let restarts = *stop_ms >= 2_000;
        let publishing = async {
            loop {
                publisher.publish().await;
                if Instant::now() >= until {
                    return;
                }
                pace(Duration::from_millis(5)).await;
            }
        };
        let resuming = async {
            fault_lasts(length).await;
            nodes[0].resume();
        };
        tokio::join!(publishing, resuming);
        if restarts {
            times += 1;
            nodes[0].until_restarted(times).await;
            for frame in reader.socket.to_end(SOON).await.0 {
                reader.take(&frame);
            }
            reader.come_back(&nodes[0]).await;
        }
        publisher.publish().await;
        reader.read_to(publisher.next).await;
    }
    reader
}

async fn assert_order_over_restarts(mut cluster: Cluster) {
    let reader = order_holds(&mut cluster, &[4_000, 4_000, 4_000]).await;
    assert!(reader.faults.is_empty(), "{:?} in {:?}", reader.faults, reader.frames);
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_node_delivers_acknowledged_messages_in_order() {
    assert_order_over_restarts(Cluster::linked(3).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stopped_node_over_scylla_delivers_acknowledged_in_order() {
    let Some(cluster) = over_cassandra().await else { return };
    assert_order_over_restarts(cluster).await;
}

/// Checks the order over stalls that are shorter than the wait for a peer ack, so that the second node gets no message
/// before the stalled one has the first.
async fn order_holds_over_blinks(mut cluster: Cluster) {
    let reader = order_holds(&mut cluster, &[300, 400, 300, 400, 300, 400]).await;
    assert!(reader.faults.is_empty(), "{:?} in {:?}", reader.faults, reader.frames);
    assert!(!reader.frames.iter().any(|frame| frame == "resumed: false"), "{:?}", reader.frames);
}

#[tokio::test(flavor = "multi_thread")]
async fn short_stops_keep_the_order_over_nodes() {
    order_holds_over_blinks(Cluster::linked(3).await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn short_stops_over_scylla_keep_the_order_over_nodes() {
    let Some(cluster) = over_cassandra().await else { return };
    order_holds_over_blinks(cluster).await;
}
