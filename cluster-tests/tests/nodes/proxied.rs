//! The address of a client behind a load balancer.

use std::net::SocketAddr;

use fanfare_cluster_tests::balancer::Balancer;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, SOON, wait_until};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

const SOURCE: &str = "127.0.0.9";
const UPGRADE: &str = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";

async fn node(proxy_protocol: &str) -> Node {
    let directory = Directory::default().account("acme").key("k1", "top-secret", ALL);
    let options = NodeOptions::default().directory(directory, "top-secret.k1");
    let options = options.environment("FANFARE_TRUSTED_PROXY", "127.0.0.1");
    Node::start(options.environment("FANFARE_PROXY_PROTOCOL", proxy_protocol)).await
}

/// Sends the text from an address; gives the answer up to the end.
async fn answer(from: &str, to: SocketAddr, text: &str) -> String {
    let socket = TcpSocket::new_v4().expect("a socket");
    socket.bind(format!("{from}:0").parse().expect("an address")).expect("bound");
    let mut stream = socket.connect(to).await.expect("connected");
    stream.write_all(text.as_bytes()).await.expect("sent");
    let mut answer = Vec::new();
    // The node may close the connection without an answer.
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut answer)).await.expect("ended in time");
    String::from_utf8_lossy(&answer).into_owned()
}

/// Requests that are refused, each with its reason: one without a credential, and a socket with a malformed token.
fn refused(headers: &str) -> [(String, &'static str); 2] {
    let head = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: localhost\r\n{headers}");
    let request = head("/time") + "connection: close\r\n\r\n";
    [(request, "missing"), (head("/realtime?accessToken=x") + UPGRADE + "\r\n", "malformed")]
}

async fn assert_logged(node: &Node, reason: &str, address: &str) {
    let is_there = async || {
        let log = node.log();
        let mut lines = log.lines().filter(|line| line.contains("credential refused"));
        lines.any(|line| line.contains(reason) && line.contains(address))
    };
    wait_until(SOON, &format!("{reason} from {address}"), is_there).await;
}

async fn client_of_the_balancer_is_known(server: &str) {
    let nodes = [node("on").await];
    let Some(balancer) = Balancer::start_with(&nodes, server).await else { return };
    for (text, reason) in refused("") {
        assert!(answer(SOURCE, balancer.addr(), &text).await.starts_with("HTTP/1.1 401"), "{reason}");
        assert_logged(&nodes[0], reason, SOURCE).await;
    }
    assert!(!nodes[0].log().contains("127.0.0.1\""), "{}", nodes[0].log());
    nodes[0].assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn client_is_known_by_version_1_of_the_proxy_protocol() {
    client_of_the_balancer_is_known("send-proxy").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_is_known_by_version_2_of_the_proxy_protocol() {
    client_of_the_balancer_is_known("send-proxy-v2").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn proxy_without_the_header_is_refused_and_others_need_none() {
    let node = node("on").await;
    let [(request, _), _] = refused("");
    assert_eq!(answer("127.0.0.1", node.addr(), &request).await, "");
    assert!(answer(SOURCE, node.addr(), &request).await.starts_with("HTTP/1.1 401"));
    assert_logged(&node, "missing", SOURCE).await;
    let forged = format!("PROXY TCP4 203.0.113.7 10.0.0.1 1 2\r\n{request}");
    let answered = answer(SOURCE, node.addr(), &forged).await;
    assert!(answered.starts_with("HTTP/1.1 400"), "{answered}");
    let is_counted = async || node.metric("fanfare_proxy_headers_refused_total").await == 1.0;
    wait_until(SOON, "the refusal", is_counted).await;
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn forwarded_for_is_believed_of_a_trusted_proxy() {
    let node = node("off").await;
    for (text, reason) in refused("x-forwarded-for: 192.0.2.1, 203.0.113.7\r\n") {
        assert!(answer("127.0.0.1", node.addr(), &text).await.starts_with("HTTP/1.1 401"), "{reason}");
        assert_logged(&node, reason, "203.0.113.7").await;
    }
    node.assert_no_panic();
    let other = self::node("off").await;
    let [(request, reason), _] = refused("x-forwarded-for: 203.0.113.7\r\n");
    assert!(answer(SOURCE, other.addr(), &request).await.starts_with("HTTP/1.1 401"));
    assert_logged(&other, reason, SOURCE).await;
}
