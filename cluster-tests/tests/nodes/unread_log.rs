//! A node whose log has no reader starts, serves, reports and stops, and counts the lines that it drops.

use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket, http, wait_until};
use serde_json::json;

async fn serves_and_stops(level: &str) {
    let options = NodeOptions::default().environment("FANFARE_LOG", level).unread();
    let mut node = Node::start(options).await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("room").await;
    // At that level each request is logged.
    wait_until(SOON, "a line that is dropped", async || {
        for _ in 0..100 {
            let headers = [("authorization", "Basic bm8=")];
            let refused = http::request(node.addr(), "GET", "/api/channels", &headers, "").await;
            assert_eq!(refused.status, 401);
        }
        node.metric("fanfare_log_lines_dropped_total").await > 0.0
    })
    .await;
    socket.publish("room", json!({"data": 1})).await;
    socket.message("room").await;
    node.signal_in_vain();
    for path in ["/live", "/ready", "/metrics"] {
        assert_eq!(node.operate("GET", path).await.status, 200, "{path}");
    }
    node.assert_well().await;
    assert_eq!(node.stop().await.code(), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_unread_trace_log_serves_and_stops() {
    serves_and_stops("trace").await;
}

/// The node logs little more at this level than its stop.
#[tokio::test(flavor = "multi_thread")]
async fn node_with_unread_info_log_stops() {
    let mut node = Node::start(NodeOptions::default().unread()).await;
    node.signal_in_vain();
    node.assert_well().await;
    assert_eq!(node.stop().await.code(), Some(0));
}

/// The node reports the failure to the same full pipe.
#[tokio::test(flavor = "multi_thread")]
async fn failing_node_with_unread_log_ends() {
    let mut node = Node::start(NodeOptions::default().unread()).await;
    let mut client = Socket::open(&node, "").await;
    client.attach("room").await;
    node.terminate();
    client.find("to be asked to go", |frame| frame["op"] == 4).await;
    // After the second signal the node does not wait for its clients.
    node.terminate();
    assert!(matches!(node.ended().await.code(), Some(0 | 1)));
}
