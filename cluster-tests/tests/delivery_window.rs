//! A busy node collects what it delivers for up to the delivery window; at rest nothing waits for it.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::socket::Socket;
use fanfare_cluster_tests::{Node, NodeOptions};
use serde_json::json;

const WINDOW_MS: u64 = 50;
const WINDOW: Duration = Duration::from_millis(WINDOW_MS);
const WINDOW_LIMIT: &str = "delivery_window_ms";

/// How long it takes to publish so often, each time after the ack of the one before, and that everybody got all of it.
async fn publish_in_turn(node: &Node, subscribers: usize, messages: u32) -> Duration {
    let mut listening = Vec::new();
    for _ in 0..subscribers {
        let mut socket = Socket::open(node, "").await;
        socket.attach("news").await;
        listening.push(socket);
    }
    let mut publisher = Socket::open(node, "").await;
    let begun = Instant::now();
    for number in 0..messages {
        publisher.publish("news", json!({"data": number})).await;
    }
    let taken = begun.elapsed();
    for socket in &mut listening {
        for number in 0..messages {
            assert_eq!(socket.message("news").await["messages"][0]["data"], number);
        }
    }
    taken
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_node_serves_once_in_a_window() {
    let node = Node::start(NodeOptions::default().limit(WINDOW_LIMIT, WINDOW_MS)).await;
    // Enough for every shard to be busy.
    let subscribers = 32 * std::thread::available_parallelism().expect("a number of cores").get();
    let taken = publish_in_turn(&node, subscribers, 10).await;
    assert!(taken >= 9 * WINDOW, "10 in {taken:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn at_rest_nothing_waits() {
    let node = Node::start(NodeOptions::default().limit(WINDOW_LIMIT, WINDOW_MS)).await;
    let taken = publish_in_turn(&node, 1, 300).await;
    assert!(taken < 300 * WINDOW, "300 in {taken:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_window_a_busy_node_does_not_wait() {
    let node = Node::start(NodeOptions::default().limit(WINDOW_LIMIT, 0)).await;
    let taken = publish_in_turn(&node, 64, 300).await;
    assert!(taken < 300 * WINDOW, "300 in {taken:?}");
}
