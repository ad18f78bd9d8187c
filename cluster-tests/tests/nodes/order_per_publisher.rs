//! Messages of one publisher arrive in order on every node, also if it continues at another node.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, PEER_STREAM_LOST, peer_log_events};
use fanfare_cluster_tests::{Node, Socket};
use serde_json::json;

const MESSAGES: u64 = 300;
/// An ack within this time has waited for all peers.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(1);

async fn received_number(socket: &mut Socket) -> u64 {
    let frame = socket.message("room").await;
    frame["messages"][0]["data"].as_u64().expect("a number")
}

/// One publisher changes the node with each message. Returns the numbers that a subscriber on each node has received,
/// and those with a late ack.
async fn from_node_to_node(nodes: &[Node]) -> (Vec<Vec<u64>>, HashSet<u64>) {
    let (mut publishers, mut subscribers) = (Vec::new(), Vec::new());
    for node in nodes {
        publishers.push(Socket::open(node, "").await);
        let mut subscriber = Socket::open(node, "").await;
        subscriber.attach("room").await;
        subscribers.push(subscriber);
    }
    let mut late = HashSet::new();
    for number in 0..MESSAGES {
        let begun = Instant::now();
        publishers[number as usize % nodes.len()].publish("room", json!({"data": number})).await;
        if begun.elapsed() >= CONFIRMED_WITHIN {
            late.insert(number);
        }
    }
    let mut all = Vec::new();
    for subscriber in &mut subscribers {
        let mut numbers = Vec::new();
        for _ in 0..MESSAGES {
            numbers.push(received_number(subscriber).await);
        }
        all.push(numbers);
    }
    (all, late)
}

/// An ack does not wait for a node that is unreachable or does not ack within a second; that node gets the message
/// later. Such a message is in order with those of its own origin. All others are in order on every node.
#[tokio::test(flavor = "multi_thread")]
async fn acked_messages_precede_later_publishes_on_other_nodes() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let (received, late) = from_node_to_node(nodes).await;
    assert!(2 * late.len() < MESSAGES as usize, "acks wait for no peer that is slow: {late:?}");
    let has_failed = |node: &Node| peer_log_events(node).iter().any(|(_, said)| said == PEER_STREAM_LOST);
    let are_linked = !nodes.iter().any(has_failed);
    for numbers in &received {
        for at in 0..3 {
            let own: Vec<u64> = numbers.iter().copied().filter(|number| number % 3 == at).collect();
            assert!(own.iter().copied().eq((at..MESSAGES).step_by(3)), "{own:?}");
        }
        let confirmed = numbers.iter().filter(|number| !late.contains(*number));
        assert!(!are_linked || confirmed.is_sorted(), "{numbers:?}, late were {late:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unacked_messages_of_a_publisher_stay_in_order() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut subscriber = Socket::open(n1, "").await;
    subscriber.attach("room").await;
    let mut publisher = Socket::open(n0, "").await;
    for number in 0..MESSAGES {
        publisher.start(json!({"op": 13, "channel": "room", "data": number})).await;
    }
    for number in 0..MESSAGES {
        assert_eq!(received_number(&mut subscriber).await, number);
    }
}
