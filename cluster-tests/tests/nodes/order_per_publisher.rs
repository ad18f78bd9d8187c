//! What one publisher says comes in its order on every node, also when it goes on at another node.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, told};
use fanfare_cluster_tests::{Node, Socket};
use serde_json::json;

const MESSAGES: u64 = 300;
const TRIES: usize = 5;
/// An ack that is quicker has not given up waiting for anybody.
const CONFIRMED_WITHIN: Duration = Duration::from_secs(1);

async fn heard(socket: &mut Socket) -> u64 {
    let frame = socket.message("room").await;
    frame["messages"][0]["data"].as_u64().expect("a number")
}

/// One publisher that goes from node to node with each message: what a subscriber on each node has heard of it, and how long the
/// slowest ack took.
async fn from_node_to_node(nodes: &[Node]) -> (Vec<Vec<u64>>, Duration) {
    let (mut publishers, mut subscribers) = (Vec::new(), Vec::new());
    for node in nodes {
        publishers.push(Socket::open(node, "").await);
        let mut subscriber = Socket::open(node, "").await;
        subscriber.attach("room").await;
        subscribers.push(subscriber);
    }
    let mut slowest = Duration::ZERO;
    for number in 0..MESSAGES {
        let begun = Instant::now();
        publishers[number as usize % nodes.len()].publish("room", json!({"data": number})).await;
        slowest = slowest.max(begun.elapsed());
    }
    let mut all = Vec::new();
    for subscriber in &mut subscribers {
        let mut numbers = Vec::new();
        for _ in 0..MESSAGES {
            numbers.push(heard(subscriber).await);
        }
        all.push(numbers);
    }
    (all, slowest)
}

/// An ack does not wait for a node that cannot be reached or does not confirm in time, and what that one lacks it gets later. Where
/// this may have happened, as it does when a node gets no time for a second, only what each node has taken must be in order.
#[tokio::test(flavor = "multi_thread")]
async fn acked_messages_precede_later_publishes_on_other_nodes() {
    for _ in 0..TRIES {
        let mut cluster = Cluster::linked(3).await;
        let nodes = cluster.nodes();
        let (heard, slowest) = from_node_to_node(nodes).await;
        for numbers in &heard {
            for at in 0..3 {
                let own: Vec<u64> = numbers.iter().copied().filter(|number| number % 3 == at).collect();
                assert!(own.iter().copied().eq((at..MESSAGES).step_by(3)), "{own:?}");
            }
        }
        let has_failed = |node: &Node| told(node).iter().any(|(_, said)| said == "link to a peer is down");
        if slowest < CONFIRMED_WITHIN && !nodes.iter().any(has_failed) {
            assert!(heard.iter().all(|numbers| numbers.iter().copied().eq(0..MESSAGES)), "{heard:?}");
            return;
        }
    }
    unreachable!("somebody was left out each time");
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
        assert_eq!(heard(&mut subscriber).await, number);
    }
}
