//! A node at its memory limit: new clients are refused, connected ones are served, and new ones are accepted again when
//! they go.

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::http::Connection;
use fanfare_cluster_tests::tls::Tls;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, SOON, Socket, http, wait_until};
use serde_json::json;

const KEY: &str = "secret.k1";
const MIB: u64 = 1024 * 1024;
const REFUSED: &str = "fanfare_connections_refused_total{reason=\"memory\"}";
const USED: &str = "fanfare_memory_used_bytes";
const DEGRADED: &str = "fanfare_degraded{reason=\"memory\"}";
/// Size of each message. The messages that wait for a slow client are more than the 4 MiB that the kernel
/// takes at most (`tcp_wmem`).
const MESSAGE_BYTES: usize = 60_000;
const WAITING: usize = 150;
const CLIENTS_MAX: usize = 200;

fn options() -> NodeOptions {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    let options = NodeOptions::default().directory(directory, KEY).environment("FANFARE_STORE", "none");
    // Outboxes may hold much for long, and no connection is closed for it.
    let options = options.limit("outbox_bytes", 64 * MIB).limit("outbox_stall_ms", 600_000);
    // Only the outboxes take memory, which is freed with their connections.
    let options = options.limit("ring_bytes", 0).limit("rings_bytes", 0);
    // Connections may wait with their first request until the node is full.
    let options = options.limit("header_ms", 600_000);
    options.limit("publishes_per_second", 0).limit("controls_per_second", 0)
}

/// Starts a node that may take `free_bytes` more than at its start.
async fn node_with_free_memory(free_bytes: u64) -> Node {
    let idle = Node::start(options().limit("memory_bytes", 1 << 40)).await;
    wait_until(SOON, "the node to be measured", async || idle.metric(USED).await > 0.0).await;
    let used: u64 = idle.metric(USED).await.to_string().parse().expect("whole bytes");
    let memory = (used + free_bytes) * 100 / 90;
    drop(idle);
    let node = Node::start(options().limit("memory_bytes", memory)).await;
    assert_eq!(node.metric("fanfare_memory_max_bytes").await, memory as f64);
    assert_eq!((node.metric(DEGRADED).await, node.metric(REFUSED).await), (0.0, 0.0));
    node
}

/// Opens a socket over a connection with a small buffer; the error is the head of the refusal.
async fn open(node: &Node) -> Result<Socket, String> {
    let mut raw = Raw::connect_slow(node.addr(), 4 * 1024).await;
    match raw.upgrade("/realtime", &[("authorization", &http::basic(KEY))]).await {
        (101, _) => Ok(Socket::upgraded(raw, false).await),
        (status, head) => {
            assert_eq!(status, 503, "{head}");
            Err(head)
        }
    }
}

async fn reasons(node: &Node) -> serde_json::Value {
    let ready = http::request(node.admin(), "GET", "/ready", &[], "").await;
    assert_eq!(ready.status, 200, "a node without room for more serves those it has");
    ready.json()["reasons"].clone()
}

/// Connects clients that do not read, each with a backlog of its own, until one is refused; gives that answer, too.
async fn fill(node: &Node, publisher: &mut Socket) -> (Vec<Socket>, String) {
    let mut clients = Vec::new();
    loop {
        let mut client = match open(node).await {
            Ok(client) => client,
            Err(head) => return (clients, head),
        };
        let channel = format!("backlog-{}", clients.len());
        client.attach(&channel).await;
        clients.push(client);
        assert!(clients.len() < CLIENTS_MAX, "the node refuses nobody, with {} bytes", node.resident_bytes());
        for _ in 0..WAITING {
            publisher.publish(&channel, json!({"data": "x".repeat(MESSAGE_BYTES)})).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_at_memory_ceiling_are_refused_until_memory_frees() {
    let node = node_with_free_memory(40 * MIB).await;
    let mut reused = Connection::open(node.addr()).await.expect("a connection");
    let mut reader = open(&node).await.expect("there is room");
    reader.attach("room").await;
    let mut publisher = open(&node).await.expect("there is room");
    let (clients, head) = fill(&node, &mut publisher).await;
    assert!(clients.len() > 2, "it had room for more than {}", clients.len());
    let head = head.to_ascii_lowercase();
    assert!(head.contains("\r\nretry-after: "), "{head}");

    let stream = format!("/realtime/sse?key={KEY}&channel=room");
    assert_eq!(http::request(node.addr(), "GET", &stream, &[], "").await.status, 503);
    let authorization = http::basic(KEY);
    let late = reused.request("GET", "/realtime", &http::upgrade(&authorization), "").await;
    assert_eq!(late.expect("an answer").status, 503);
    assert_eq!(node.metric(REFUSED).await, 3.0);
    assert_eq!(node.metric("fanfare_limit_hits_total{limit=\"memory_bytes\"}").await, 3.0);
    assert_eq!(reasons(&node).await, json!(["memory"]));
    wait_until(SOON, "the gauge", async || node.metric(DEGRADED).await == 1.0).await;
    let max_bytes = node.metric("fanfare_memory_max_bytes").await;
    assert!(node.metric("fanfare_memory_used_bytes").await >= 0.85 * max_bytes);
    for text in ["memory near the ceiling", "connection refused: the node is full"] {
        wait_until(SOON, text, async || node.log().contains(text)).await;
    }

    publisher.publish("room", json!({"data": 1})).await;
    assert_eq!(reader.message("room").await["messages"][0]["data"], 1, "who is there goes on");
    let headers = [("authorization", authorization.as_str())];
    let published =
        http::request(node.addr(), "POST", "/api/channels/room/publish", &headers, r#"{"data":2}"#);
    assert_eq!(published.await.status, 200, "HTTP is served");
    assert_eq!(reader.message("room").await["messages"][0]["data"], 2);

    drop(clients);
    // The allocator frees memory as its threads run, which on an idle node is every few seconds.
    wait_until(3 * SOON, "room", async || reasons(&node).await == json!(null)).await;
    let mut back = open(&node).await.expect("there is room again");
    back.attach("room").await;
    wait_until(SOON, "the gauge", async || node.metric(DEGRADED).await == 0.0).await;
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_client_over_the_memory_budget_gets_503() {
    let tls = Tls::default();
    // Less than the memory of a node at its start.
    let node = Node::start(tls.node().limit("memory_bytes", MIB)).await;
    wait_until(SOON, "the node to look", async || reasons(&node).await == json!(["memory"])).await;
    let mut raw = tls.raw(node.addr()).await;
    let (status, head) = raw.upgrade("/realtime", &[("authorization", &http::basic(&node.key()))]).await;
    assert_eq!(status, 503, "{head}");
    assert_eq!(node.metric(REFUSED).await, 1.0);
}
