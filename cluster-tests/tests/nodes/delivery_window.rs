//! A busy node coalesces deliveries for up to the delivery window; on an idle node no delivery waits.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::socket::Socket;
use fanfare_cluster_tests::{Node, NodeOptions};
use serde_json::json;

const WINDOW_MS: u64 = 50;
const WINDOW: Duration = Duration::from_millis(WINDOW_MS);
const WINDOW_LIMIT: &str = "delivery_window_ms";

/// Number of subscribers, enough for every shard to be busy.
fn subscribers() -> usize {
    32 * std::thread::available_parallelism().expect("a number of cores").get()
}

/// Publishes one message after another, and checks that each subscriber gets all of them. Gives the times until the
/// acks, sorted.
async fn publish_in_turn(node: &Node, subscribers: usize, messages: u32) -> Vec<Duration> {
    let mut listening = Vec::new();
    for _ in 0..subscribers {
        let mut socket = Socket::open(node, "").await;
        socket.attach("news").await;
        listening.push(socket);
    }
    let mut publisher = Socket::open(node, "").await;
    let mut taken = Vec::new();
    for number in 0..messages {
        let begun = Instant::now();
        publisher.publish("news", json!({"data": number})).await;
        taken.push(begun.elapsed());
    }
    for socket in &mut listening {
        for number in 0..messages {
            assert_eq!(socket.message("news").await["messages"][0]["data"], number);
        }
    }
    taken.sort();
    taken
}

/// Asserts that half of the acks came within half of the window, even on a busy machine. A publish that waits takes
/// nearly the whole window.
fn assert_none_waits(taken: &[Duration]) {
    let middle = taken[taken.len() / 2];
    assert!(middle < WINDOW / 2, "{middle:?} in the median");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_busy_node_serves_once_in_a_window() {
    let node = Node::start(NodeOptions::default().limit(WINDOW_LIMIT, WINDOW_MS)).await;
    let taken = publish_in_turn(&node, subscribers(), 10).await;
    assert!(taken.iter().sum::<Duration>() >= 9 * WINDOW, "{taken:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn idle_node_delivers_without_waiting() {
    let node = Node::start(NodeOptions::default().limit(WINDOW_LIMIT, WINDOW_MS)).await;
    assert_none_waits(&publish_in_turn(&node, 1, 300).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_window_a_busy_node_does_not_wait() {
    let node = Node::start(NodeOptions::default().limit(WINDOW_LIMIT, 0)).await;
    assert_none_waits(&publish_in_turn(&node, subscribers(), 300).await);
}
