//! Writing to many sockets by one system call or by one each makes no difference to clients, nor does a change between
//! the two while messages are on their way.

use std::time::Duration;

use fanfare_cluster_tests::raw::Raw;
use fanfare_cluster_tests::ring::Ring;
use fanfare_cluster_tests::waits::pace;
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket, http, wait_until};
use serde_json::json;
use tokio::task::JoinSet;

const SHARDS: &str = "fanfare_io_uring_shards";
const SUBSCRIBERS: usize = 80;
const MESSAGES: usize = 300;
/// Size of the data of every fifth message; the others have nearly none. All together exceed the system's buffers for a
/// client that does not read.
const BYTES: usize = 65_000;

fn options(io_uring: &str) -> NodeOptions {
    let options = NodeOptions::default().environment("FANFARE_IO_URING", io_uring);
    options.limit("publishes_per_second", 0).limit("outbox_bytes", 256 * 1024 * 1024)
}

fn threads() -> f64 {
    std::thread::available_parallelism().expect("a number of cores").get() as f64
}

/// Whether the node uses io_uring. If the system refuses it, the test is skipped, which is a failure in CI.
async fn has_rings(node: &Node) -> bool {
    let log = node.log();
    let refused = node.metric(SHARDS).await == 0.0;
    if refused {
        assert!(
            log.contains("io_uring unavailable") && std::env::var("CI").as_deref() != Ok("true"),
            "{log}"
        );
        eprintln!("NOT TESTED, there is no io_uring:\n{log}");
    }
    !refused
}

/// Reads all messages of the channel, in order and each once, and nothing after them.
async fn read_all(mut socket: Socket, pause: Duration) {
    let mut next = 0;
    while next < MESSAGES {
        for message in socket.message("news").await["messages"].as_array().expect("messages") {
            assert_eq!(message["data"][0], next, "each once and in order");
            next += 1;
        }
        pace(pause).await;
    }
    while let Ok(frame) = socket.next_within(Duration::from_millis(200)).await {
        assert_ne!(frame["op"], 13, "{frame}");
    }
}

async fn attached(node: &Node, raw: Raw) -> Socket {
    let mut socket = Socket::over(raw, "", &http::basic(&node.key())).await;
    socket.attach("news").await;
    socket
}

/// Publishes to many clients that read, some that read slowly, and some that disconnect meanwhile.
async fn all_receive_all(node: &Node) {
    let mut reading = JoinSet::new();
    for _ in 0..SUBSCRIBERS {
        let socket = attached(node, Raw::connect(node.addr()).await).await;
        reading.spawn(read_all(socket, Duration::ZERO));
    }
    for _ in 0..3 {
        let socket = attached(node, Raw::connect_slow(node.addr(), 4 * 1024).await).await;
        reading.spawn(read_all(socket, Duration::from_millis(10)));
    }
    let mut going = Vec::new();
    for _ in 0..10 {
        going.push(attached(node, Raw::connect_slow(node.addr(), 4 * 1024).await).await);
    }
    let mut publisher = Socket::open(node, "").await;
    for number in 0..MESSAGES {
        let bytes = if number % 5 == 0 { BYTES } else { 10 };
        publisher.start(json!({"op": 13, "channel": "news", "data": [number, "x".repeat(bytes)]})).await;
        if number > 2 * MESSAGES / 3 && number % 10 == 5 {
            going.pop();
        }
        pace(Duration::from_millis(1)).await;
    }
    for _ in 0..MESSAGES {
        assert_eq!(publisher.find("an answer", |frame| frame["op"] != 0).await["op"], 1);
    }
    while let Some(read) = reading.join_next().await {
        read.expect("a subscriber got everything");
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_writes_to_many_sockets_in_one_io_uring_call() {
    let node = Node::start(options("on")).await;
    if !has_rings(&node).await {
        return;
    }
    assert_eq!(node.metric(SHARDS).await, threads(), "{}", node.log());
    all_receive_all(&node).await;
    assert_eq!(node.metric(SHARDS).await, threads(), "none was given up:\n{}", node.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_io_uring_writes_by_a_call_per_socket() {
    let node = Node::start(options("off")).await;
    assert_eq!(node.metric(SHARDS).await, 0.0);
    assert!(!node.log().contains("io_uring"), "who has said no is not told:\n{}", node.log());
    all_receive_all(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_permission_for_io_uring_logs_it_and_delivers() {
    let ring = Ring::refused();
    let node = Node::start(ring.under(options("on"))).await;
    assert_eq!(node.metric(SHARDS).await, 0.0);
    wait_until(SOON, "it to be told", async || node.log().contains("io_uring")).await;
    let log = node.log();
    let logged: Vec<_> = log.lines().filter(|line| line.contains("io_uring")).collect();
    assert!(logged.len() == 1 && logged[0].contains("INFO") && logged[0].contains("not permitted"), "{log}");
    all_receive_all(&node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_delivers_after_io_uring_has_failed() {
    let ring = Ring::failing();
    let node = Node::start(ring.under(options("on"))).await;
    if !has_rings(&node).await {
        return;
    }
    all_receive_all(&node).await;
    wait_until(SOON, "the rings to be given up", async || node.metric(SHARDS).await == 0.0).await;
    let logged = node.log().lines().filter(|line| line.contains("io_uring failed")).count();
    assert_eq!(logged as f64, threads(), "each thread says so once:\n{}", node.log());
}
