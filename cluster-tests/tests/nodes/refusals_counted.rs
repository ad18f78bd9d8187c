//! Refused requests and ended sockets have counters by reason, beside those of credentials and limits.

use fanfare_cluster_tests::raw::{self, TEXT, unmasked_frame};
use fanfare_cluster_tests::tls::Tls;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, SOON, Socket, http, wait_until};
use serde_json::json;

async fn assert_counted(node: &Node, series: &str) {
    wait_until(SOON, series, async || node.metric(series).await >= 1.0).await;
    assert_eq!(node.metric(series).await, 1.0, "{series}");
}

/// Waits for the text in the log, which a thread of its own writes.
async fn assert_logged(node: &Node, text: &str) {
    wait_until(SOON, text, async || node.log().contains(text)).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_socket_requests_count_by_code() {
    let directory = Directory::default().account("acme").key("k1", "secret", r#"{ "chat" = ["subscribe"] }"#);
    let node = Node::start(NodeOptions::default().directory(directory, "secret.k1")).await;
    let mut socket = Socket::open(&node, "").await;
    let nacks = r#"fanfare_nacks_total{code="40160"}"#;
    assert_eq!(node.metric(nacks).await, 0.0);
    let answer = socket.ask(json!({"op": 13, "channel": "chat", "data": 1})).await;
    assert_eq!(answer["code"], 40160, "{answer}");
    assert_counted(&node, nacks).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_ended_by_the_node_count_by_code() {
    let node = Node::start(NodeOptions::default()).await;
    let closes = r#"fanfare_socket_closes_total{code="1002"}"#;
    assert_eq!(node.metric(closes).await, 0.0);
    let mut socket = Socket::open(&node, "").await;
    socket.raw().write(&unmasked_frame(TEXT, b"{}")).await;
    assert_counted(&node, closes).await;
    let mut socket = Socket::open(&node, "").await;
    socket.send(&json!({"op": 5})).await;
    assert!(matches!(socket.raw().end(SOON).await, raw::End::Gone));
    assert_eq!(
        node.metric("fanfare_socket_closes_total").await,
        1.0,
        "an end that the client asked for is none"
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn refused_admin_requests_count_by_reason() {
    let node = Node::start(NodeOptions::default()).await;
    for (reason, header, status) in [
        ("token", ("authorization", "Bearer guessed"), 401),
        ("origin", ("origin", "http://elsewhere.example"), 403),
    ] {
        let answer = http::request(node.admin(), "POST", "/rebalance", &[header], "").await;
        assert_eq!(answer.status, status);
        assert_counted(&node, &format!("fanfare_admin_refusals_total{{reason=\"{reason}\"}}")).await;
        assert_logged(&node, "admin request refused").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn failed_tls_handshakes_are_counted() {
    let node = Node::start(Tls::default().node()).await;
    let mut raw = Raw::connect(node.addr()).await;
    raw.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_counted(&node, "fanfare_tls_handshakes_failed_total").await;
    assert_logged(&node, "tls handshake failed").await;
}
