//! A node at its limit of open files or connections: HTTP, operators and open sockets are served, and one connection
//! too many is refused at once.

use std::time::Duration;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::http::Connection;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, SOON, Socket, http, wait_until};
use serde_json::json;

const KEY: &str = "secret.k1";
const OPEN_FILES: u64 = 256;
/// Number of sockets: half of the files are reserved for the node itself, and an eighth of the others for HTTP.
const SOCKETS: usize = 80;
/// Far less than the timeout of a silent client.
const AT_ONCE: Duration = Duration::from_secs(3);

fn options() -> NodeOptions {
    NodeOptions::default().directory(Directory::default().account("acme").key("k1", "secret", ALL), KEY)
}

/// Opens a socket; the error is the head of the refusal.
async fn open(node: &Node) -> Result<Socket, String> {
    let mut raw = Raw::connect(node.addr()).await;
    match raw.upgrade("/realtime", &[("authorization", &http::basic(KEY))]).await {
        (101, _) => Ok(Socket::upgraded(raw, false).await),
        (status, head) => {
            assert_eq!(status, 503, "{head}");
            Err(head)
        }
    }
}

/// Opens sockets until the node refuses one.
async fn fill(node: &Node) -> Vec<Socket> {
    let mut sockets = Vec::new();
    while let Ok(socket) = open(node).await {
        sockets.push(socket);
        assert!(sockets.len() < OPEN_FILES as usize, "the node refuses no socket");
    }
    sockets
}

async fn refused(node: &Node, reason: &str) -> f64 {
    node.metric(&format!("fanfare_connections_refused_total{{reason=\"{reason}\"}}")).await
}

async fn status(node: &Node) -> String {
    let ready = http::request(node.admin(), "GET", "/ready", &[], "").await;
    assert_eq!(ready.status, 200);
    let (ready, mut reasons) = (ready.json(), json!(null));
    if ready["status"] == "degraded" {
        reasons = json!(["files"]);
    }
    assert_eq!(ready["reasons"], reasons);
    ready["status"].as_str().expect("a status").to_owned()
}

/// Asserts that publishing and reading over HTTP work, each within its time.
async fn assert_serves_http(node: &Node, channel: &str) {
    let authorization = http::basic(KEY);
    let headers = [("authorization", authorization.as_str())];
    let served = async {
        let publish = format!("/api/channels/{channel}/publish");
        assert_eq!(http::request(node.addr(), "POST", &publish, &headers, r#"{"data":1}"#).await.status, 200);
        let history = format!("/api/channels/{channel}/history");
        let page = http::request(node.addr(), "GET", &history, &headers, "").await;
        assert_eq!((page.status, &page.json()["messages"][0]["data"]), (200, &json!(1)));
    };
    tokio::time::timeout(SOON, served).await.expect("HTTP is served");
}

#[tokio::test(flavor = "multi_thread")]
async fn node_at_file_ceiling_serves_http_and_refuses_sockets() {
    let node = Node::start(options().open_files(OPEN_FILES)).await;
    assert_eq!(node.metric("fanfare_open_files_max").await, OPEN_FILES as f64);
    assert_eq!(node.metric("fanfare_connections_max").await, SOCKETS as f64);
    let degraded = "fanfare_degraded{reason=\"files\"}";
    assert_eq!(node.metric(degraded).await, 0.0);
    assert_eq!((status(&node).await.as_str(), refused(&node, "sockets").await), ("ready", 0.0));
    let mut reused = Connection::open(node.addr()).await.expect("a connection");
    assert_eq!(reused.request("GET", "/health", &[], "").await.expect("an answer").status, 200);
    let mut sockets = vec![open(&node).await.expect("a socket")];
    sockets[0].attach("room").await;
    sockets.extend(fill(&node).await);
    assert_eq!(sockets.len(), SOCKETS);

    let head = open(&node).await.err().expect("refused").to_ascii_lowercase();
    assert!(
        head.contains("\r\nretry-after: ") && head.contains("\r\naccess-control-allow-origin: *"),
        "{head}"
    );
    let authorization = http::basic(KEY);
    let late = reused.request("GET", "/realtime", &http::upgrade(&authorization), "").await;
    assert_eq!(late.expect("an answer").status, 503);
    let stream = format!("/realtime/sse?key={KEY}&channel=room");
    assert_eq!(http::request(node.addr(), "GET", &stream, &[], "").await.status, 503);

    assert_serves_http(&node, "room").await;
    assert_eq!(sockets[0].message("room").await["messages"][0]["data"], json!(1));
    assert_eq!(http::request(node.admin(), "GET", "/live", &[], "").await.status, 200);
    assert_eq!((status(&node).await.as_str(), refused(&node, "sockets").await), ("degraded", 4.0));
    assert_eq!(node.metric("fanfare_limit_hits_total{limit=\"connections\"}").await, 4.0);
    wait_until(SOON, "the gauge of open files", async || {
        let files = node.metric("fanfare_open_files").await;
        assert!(files < OPEN_FILES as f64, "{files}");
        files > SOCKETS as f64
    })
    .await;
    wait_until(SOON, "the gauge of a full node", async || node.metric(degraded).await == 1.0).await;
    assert_eq!(node.metric("fanfare_degraded{reason=\"store\"}").await, 0.0);
    assert!(node.log().contains("connection refused: the node is full"), "{}", node.log());

    sockets.truncate(SOCKETS / 2);
    wait_until(SOON, "the node to have room", async || status(&node).await == "ready").await;
    sockets.extend(fill(&node).await);
    assert_eq!(sockets.len(), SOCKETS);
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_connections_than_files_leave_streams_their_share() {
    let node = Node::start(options().open_files(300).limit("connections", 1_000)).await;
    assert_eq!(node.metric("fanfare_connections_max").await, 96.0);
    let stream = format!("/realtime/sse?key={KEY}&channel=room");
    let mut streams = Vec::new();
    loop {
        let mut raw = Raw::connect(node.addr()).await;
        raw.write(format!("GET {stream} HTTP/1.1\r\nhost: a\r\n\r\n").as_bytes()).await;
        let (status, head) = raw.head(SOON).await.expect("an answer");
        if status != 200 {
            assert_eq!(status, 503, "{head}");
            break;
        }
        streams.push(raw);
    }
    assert_eq!(streams.len(), 18);
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_leave_the_others_served_and_are_refused() {
    let node = Node::start(options().open_files(OPEN_FILES).limit("header_ms", 60_000)).await;
    let mut early = Connection::open(node.addr()).await.expect("a connection");
    let mut socket = open(&node).await.expect("a socket");
    let mut silent = Vec::new();
    while refused(&node, "connections").await == 0.0 {
        silent.push(Raw::connect(node.addr()).await);
        assert!(silent.len() < OPEN_FILES as usize, "the node refuses no connection");
    }
    let woken = node.woken("accept");
    for _ in 0..3 {
        let (status, ..) =
            Raw::connect(node.addr()).await.response(AT_ONCE).await.expect("an answer at once");
        assert_eq!(status, 503);
    }
    assert_eq!(status(&node).await, "degraded");
    assert_eq!(http::request(node.admin(), "GET", "/live", &[], "").await.status, 200);
    socket.attach("room").await;
    let ended = early.request("GET", "/health", &[], "").await.expect("an answer");
    assert_eq!((ended.status, ended.header("connection")), (200, Some("close")), "it makes room");
    // The thread is woken about once for each connection, and by nothing else.
    let times = node.woken("accept") - woken;
    assert!(times < 20, "the accepting thread was woken {times} times");

    silent.clear();
    wait_until(SOON, "the node to have room", async || status(&node).await == "ready").await;
    assert_serves_http(&node, "room").await;
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_that_finds_no_file_is_refused_at_once() {
    let node = Node::start(options()).await;
    let before = node.allow_no_further_file();
    // Uses up the free file numbers below the highest one of the process.
    let sockets = fill(&node).await;
    let (status_now, ..) =
        Raw::connect(node.addr()).await.response(AT_ONCE).await.expect("an answer at once");
    assert_eq!(status_now, 503);
    node.allow_files(before);
    assert_eq!(status(&node).await, "degraded");
    assert!(refused(&node, "open_files").await >= 2.0);
    let _socket = open(&node).await.expect("a socket");
    wait_until(SOON, "the node to be well", async || status(&node).await == "ready").await;
    drop(sockets);
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_at_its_connection_bound_serves_http() {
    let node = Node::start(options().limit("connections", 10)).await;
    let mut sockets = fill(&node).await;
    assert_eq!(sockets.len(), 10);
    assert_serves_http(&node, "room").await;
    assert_eq!(status(&node).await, "degraded");
    for socket in &mut sockets {
        let answer = socket.ask(json!({"op": 0})).await;
        assert_eq!(answer["op"], 0, "a socket that was there before stays: {answer}");
    }
    sockets.pop();
    wait_until(SOON, "the place of a socket that left", async || open(&node).await.is_ok()).await;
    node.assert_well().await;
}
