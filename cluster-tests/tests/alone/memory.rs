//! Memory of a node whose store gets all that publishers can send.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fanfare_cluster_tests::raw::{self, FIN, TEXT};
use fanfare_cluster_tests::{Node, NodeOptions, Socket, http, wait_until};
use serde_json::json;
use tokio::task::JoinSet;

const MIB: u64 = 1024 * 1024;
/// Greatest memory: unflushed tables of 32 MiB, those being merged, the queue of the store and the allocator's
/// overhead.
const RESIDENT_BYTES_MAX: u64 = 400 * MIB;
const SETTLED_BYTES_MAX: u64 = 256 * MIB;
const SENT_BYTES: u64 = 2_500 * MIB;
const PUBLISHERS: u64 = 4;
const UNDER_WAY: usize = 4;
const FLOOD_MAX: Duration = Duration::from_secs(150);

/// The data compresses well, since merges take more memory than the space on the disk.
#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_large_messages_is_stored_in_bounded_memory() {
    let node = Arc::new(Node::start(NodeOptions::default().limit("publishes_per_second", 0)).await);
    let peak = Arc::new(AtomicU64::new(0));
    let mut watching = JoinSet::new();
    watching.spawn(watch(node.clone(), peak.clone()));
    let mut publishers = JoinSet::new();
    for number in 0..PUBLISHERS {
        let node = node.clone();
        publishers.spawn(async move { publish(&node, &format!("flood-{number}")).await });
    }
    let flood = tokio::time::timeout(FLOOD_MAX, publishers.join_all());
    let acked: u64 = flood.await.expect("the flood ends").into_iter().sum();
    let small_again = async || node.resident_bytes() < SETTLED_BYTES_MAX;
    wait_until(FLOOD_MAX, "the node to give memory back", small_again).await;
    watching.abort_all();
    let peak = peak.load(Ordering::Relaxed);
    assert!(acked > SENT_BYTES * 9 / 10, "stored, not refused: {acked} bytes");
    assert!(peak < RESIDENT_BYTES_MAX, "the flood took {} MiB of memory", peak / MIB);
    let authorization = http::basic(&node.key());
    for number in 0..PUBLISHERS {
        let path = format!("/api/channels/flood-{number}/history?limit=1");
        let page =
            http::request(node.addr(), "GET", &path, &[("authorization", &authorization)], "").await.json();
        assert_eq!(page["messages"][0]["data"].as_str().map(str::len), Some(60_000), "{path}");
    }
    node.assert_well().await;
}

/// Publishes frames, and gives the number of acknowledged bytes.
async fn publish(node: &Node, channel: &str) -> u64 {
    let mut socket = Socket::open(node, "").await;
    let messages = vec![json!({"name": "large", "data": "x".repeat(60_000)}); 8];
    let request = json!({"op": 13, "id": "flood", "channel": channel, "messages": messages}).to_string();
    let frame = raw::frame(FIN | TEXT, request.as_bytes());
    let bytes = frame.len() as u64;
    let mut acked = 0;
    let mut waiting = 0;
    for _ in 0..SENT_BYTES / PUBLISHERS / bytes {
        assert!(socket.raw().write(&frame).await, "the node keeps the connection");
        waiting += 1;
        while waiting >= UNDER_WAY {
            acked += u64::from(socket.next().await["op"] == 1) * bytes;
            waiting -= 1;
        }
    }
    for _ in 0..waiting {
        acked += u64::from(socket.next().await["op"] == 1) * bytes;
    }
    acked
}

async fn watch(node: Arc<Node>, peak: Arc<AtomicU64>) {
    let mut ticks = tokio::time::interval(Duration::from_millis(50));
    loop {
        ticks.tick().await;
        peak.fetch_max(node.resident_bytes(), Ordering::Relaxed);
    }
}

/// The bound includes all memory of the replay buffers: names, ids and publishers too, and a frame in each format.
#[tokio::test(flavor = "multi_thread")]
async fn recent_messages_stay_within_their_bound() {
    const RINGS_BYTES: u64 = 32 * MIB;
    let options = NodeOptions::default().limit("publishes_per_second", 0).limit("rings_bytes", RINGS_BYTES);
    let node = Node::start(options.environment("FANFARE_STORE", "none")).await;
    let (mut json, mut msgpack) =
        (Socket::open(&node, "").await, Socket::open(&node, "?format=msgpack").await);
    let client = "c".repeat(256);
    let mut publisher = Socket::open(&node, &format!("?clientId={client}")).await;
    for channel in 0..20 {
        json.attach(&channel.to_string()).await;
        msgpack.attach(&channel.to_string()).await;
    }
    let mut reading = JoinSet::new();
    for mut socket in [json, msgpack] {
        reading.spawn(async move { while socket.next_within(FLOOD_MAX).await.is_ok() {} });
    }
    let before = node.resident_bytes();
    for round in 0..400 {
        let message =
            |number| json!({"name": "n".repeat(250), "id": format!("{}-{round}-{number}", "i".repeat(100))});
        let messages: Vec<_> = (0..250).map(message).collect();
        let request = json!({"op": 13, "channel": (round % 20).to_string(), "messages": messages});
        assert_eq!(publisher.ask(request).await["op"], 1);
    }
    let grown = node.resident_bytes().saturating_sub(before);
    // The store also keeps the ids in tables, and requests under way have their buffers.
    assert!(grown < 6 * RINGS_BYTES, "the recent messages take {} MiB", grown / MIB);
    reading.abort_all();
    node.assert_well().await;
}
