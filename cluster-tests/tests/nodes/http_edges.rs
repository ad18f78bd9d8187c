//! Requests at the edges of HTTP: hosts, refused upgrades, HEAD of a stream, encoded bodies, idle connections.

use std::io::Write as _;
use std::time::Duration;

use fanfare_cluster_tests::raw::End;
use fanfare_cluster_tests::{Node, NodeOptions, Raw, Response, SOON, Socket, http, wait_until};
use flate2::Compression;
use flate2::write::{GzEncoder, ZlibEncoder};
use serde_json::json;
use tokio::time::Instant;

const HANDSHAKE: &str = "connection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
    sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";

async fn node() -> Node {
    Node::start(NodeOptions::default()).await
}

/// Sends a request as it is, first on a connection and after another one; gives status and head of both answers.
async fn first_and_second(node: &Node, request: &str) -> [(u16, String); 2] {
    let mut first = Raw::connect(node.addr()).await;
    first.write(request.as_bytes()).await;
    let mut second = Raw::connect(node.addr()).await;
    second.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
    assert_eq!(second.response(SOON).await.expect("an answer").0, 200);
    second.write(request.as_bytes()).await;
    [first.head(SOON).await.expect("an answer"), second.head(SOON).await.expect("an answer")]
}

async fn assert_status(node: &Node, request: &str, status: u16) {
    for (answered, head) in first_and_second(node, request).await {
        assert_eq!(answered, status, "{request}\n{head}");
        let head = head.to_ascii_lowercase();
        assert!(status == 101 || head.contains("\r\ndate: "), "{head}");
        assert!(head.contains("\r\naccess-control-allow-origin: *\r\n"), "{head}");
    }
}

/// Counts the 4xx answers under the route.
async fn refused(node: &Node, route: &str) -> f64 {
    node.metric(&format!("fanfare_http_requests_total{{route=\"{route}\",status=\"4xx\"}}")).await
}

#[tokio::test(flavor = "multi_thread")]
async fn refusals_before_routing_are_counted_and_logged() {
    let node = Node::start(NodeOptions::default().environment("FANFARE_LOG", "debug")).await;
    let authorization = http::basic(&node.key());
    let upgrade = |path: &str, handshake: &str| {
        format!("GET {path} HTTP/1.1\r\nhost: a\r\nauthorization: {authorization}\r\n{handshake}\r\n")
    };
    for (request, route, reason) in [
        ("GET /time HTTP/1.1\r\n\r\n".to_owned(), "none", "the host header is missing"),
        ("GET /time HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n".to_owned(), "none", "given more than once"),
        ("GET /time HTTP/1.1\r\nhost a\r\n\r\n".to_owned(), "none", "the request is malformed"),
        (
            upgrade("/realtime", &HANDSHAKE.replace("AAA=", "A")),
            "/realtime",
            "sec-websocket-key must be 16 bytes in base64",
        ),
        (
            upgrade("/realtime", &HANDSHAKE.replace("13", "12")),
            "/realtime",
            "sec-websocket-version must be 13",
        ),
        (upgrade("/realtime?format=xml", HANDSHAKE), "/realtime", "format must be json or msgpack"),
        (upgrade("/realtime?key=x.y", HANDSHAKE), "/realtime", "unauthorized"),
    ] {
        let before = refused(&node, route).await;
        let [first, second] = first_and_second(&node, &request).await;
        assert!((400..500).contains(&first.0) && second.0 == first.0, "{request}");
        assert_eq!(refused(&node, route).await, before + 2.0, "{request}");
        let is_logged = |line: &str| line.contains("request refused") && line.contains(reason);
        wait_until(SOON, reason, async || node.log().lines().filter(|line| is_logged(line)).count() == 2)
            .await;
    }
    let before = refused(&node, "none").await;
    let mut raw = Raw::connect(node.addr()).await;
    raw.write(&[22, 3, 1, 0, 4, 1, 0, 0, 0]).await;
    assert_eq!(raw.head(SOON).await.expect("an answer").0, 400);
    assert_eq!(refused(&node, "none").await, before + 1.0);
    let hello = "the request is a TLS handshake";
    wait_until(SOON, hello, async || node.log().contains(hello)).await;
    let health = node.metric("fanfare_http_requests_total{route=\"/health\",status=\"2xx\"}").await;
    assert!(health >= 7.0, "{health}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_names_one_host() {
    let node = node().await;
    let upgrade = format!("authorization: {}\r\n{HANDSHAKE}", http::basic(&node.key()));
    for (path, headers, good) in [("/health", "", 200), ("/realtime", upgrade.as_str(), 101)] {
        let request = |hosts: &[&str]| {
            let hosts: String = hosts.iter().map(|host| format!("host: {host}\r\n")).collect();
            format!("GET {path} HTTP/1.1\r\n{hosts}{headers}\r\n")
        };
        for host in ["localhost", "a.example:8080", "[::1]:80", "127.0.0.1"] {
            assert_status(&node, &request(&[host]), good).await;
        }
        for hosts in [&[][..], &["a", "b"], &["a", "a"], &[""], &["a b"], &["a/b"], &["u@a"], &["a:b"]] {
            assert_status(&node, &request(hosts), 400).await;
        }
    }
    assert_status(&node, "GET /health HTTP/1.0\r\n\r\n", 200).await;
    assert_status(&node, "GET /health HTTP/1.0\r\nhost: a\r\nhost: b\r\n\r\n", 400).await;
    let mut operators = Raw::connect(node.admin()).await;
    operators.write(b"GET /live HTTP/1.1\r\n\r\n").await;
    assert_eq!(operators.head(SOON).await.expect("an answer").0, 400);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_is_one_of_http_1_1_without_a_body() {
    let node = node().await;
    let authorization = format!("authorization: {}\r\n", http::basic(&node.key()));
    let head = format!("host: localhost\r\n{authorization}{HANDSHAKE}");
    let heartbeat = fanfare_cluster_tests::raw::frame(0x81, br#"{"op":0,"id":"smuggled"}"#);
    assert_status(&node, &format!("GET /realtime HTTP/1.1\r\n{head}\r\n"), 101).await;
    assert_status(&node, &format!("GET /realtime HTTP/1.1\r\n{head}content-length: 0\r\n\r\n"), 101).await;
    for old in
        first_and_second(&node, &format!("GET /realtime HTTP/1.0\r\nconnection: keep-alive\r\n{head}\r\n"))
            .await
    {
        assert_eq!(old.0, 426, "{}", old.1);
        assert!(old.1.to_ascii_lowercase().contains("\r\nupgrade: websocket\r\n"), "{}", old.1);
    }
    let bodies = [
        format!("content-length: {}\r\n\r\n", heartbeat.len()),
        format!("transfer-encoding: chunked\r\n\r\n{:x}\r\n", heartbeat.len()),
    ];
    for body in bodies {
        let mut raw = Raw::connect(node.addr()).await;
        let begin = format!("GET /realtime HTTP/1.1\r\n{head}{body}");
        raw.write(&[begin.as_bytes(), &heartbeat, b"\r\n0\r\n\r\n"].concat()).await;
        assert_eq!(raw.head(SOON).await.expect("an answer").0, 400, "{body}");
        assert_status(&node, &begin, 400).await;
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_has_one_key_and_one_version() {
    let node = node().await;
    let authorization = http::basic(&node.key());
    let key = "sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n";
    let other_key = "sec-websocket-key: BBBBBBBBBBBBBBBBBBBBBA==\r\n";
    let (version, other_version) = ("sec-websocket-version: 13\r\n", "sec-websocket-version: 8\r\n");
    let cases = [
        (vec![key, version], 101),
        (vec![key, version, key, version], 101),
        (vec![key, other_key, version], 400),
        (vec![other_key, key, version], 400),
        (vec![key, version, other_version], 400),
        (vec![key, other_version, version], 400),
        (vec![key, "sec-websocket-version: 13, 8\r\n"], 400),
        (vec![key, other_version], 426),
        (vec![key], 426),
        (vec![version], 400),
        (vec![version, "sec-websocket-key: short\r\n"], 400),
    ];
    for (headers, status) in cases {
        let request = format!(
            "GET /realtime HTTP/1.1\r\nhost: localhost\r\nauthorization: {authorization}\r\n\
             connection: keep-alive, Upgrade\r\nupgrade: websocket\r\n{}\r\n",
            headers.concat()
        );
        assert_status(&node, &request, status).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn head_of_an_event_stream_is_answered_without_a_body() {
    let node = node().await;
    let authorization = http::basic(&node.key());
    let headers = [("authorization", authorization.as_str())];
    let head = http::request(node.addr(), "HEAD", "/realtime/sse?channel=a", &headers, "").await;
    assert_eq!((head.status, head.header("content-type")), (200, Some("text/event-stream")));
    assert_eq!((head.header("cache-control"), head.header("content-length")), (Some("no-store"), None));
    assert!(head.body.is_empty() && head.header("date").is_some());
    for (path, headers, status) in
        [("/realtime/sse?channel=a", &[][..], 401), ("/realtime/sse", &headers[..], 400)]
    {
        let answer = http::request(node.addr(), "HEAD", path, headers, "").await;
        assert_eq!((answer.status, answer.body.len()), (status, 0), "{path}");
    }
    assert_eq!(node.metric("fanfare_socket_connections").await, 0.0, "no session was opened");
}

fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).expect("into memory");
    encoder.finish().expect("into memory")
}

fn deflate(text: &[u8]) -> Vec<u8> {
    let mut encoder = ZlibEncoder::new(Vec::new(), Compression::best());
    encoder.write_all(text).expect("into memory");
    encoder.finish().expect("into memory")
}

async fn publish(node: &Node, coding: &str, body: Vec<u8>) -> Response {
    let authorization = http::basic(&node.key());
    let headers = [("authorization", authorization.as_str()), ("content-encoding", coding)];
    http::request(node.addr(), "POST", "/api/channels/coded/publish", &headers, body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn encoded_bodies_are_inflated_within_their_limit() {
    let node = Node::start(NodeOptions::default().limit("http_body_bytes", 100_000)).await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("coded").await;
    let text = |data: &str| json!({"data": data}).to_string().into_bytes();
    let long = "y".repeat(50_000);
    for (coding, body, data) in [
        ("gzip", gzip(&text("by gzip")), "by gzip"),
        ("x-gzip", gzip(&text(&long)), &*long),
        ("deflate", deflate(&text("by deflate")), "by deflate"),
        ("identity", text("as it is"), "as it is"),
    ] {
        let answer = publish(&node, coding, body).await;
        assert_eq!(answer.status, 200, "{coding}: {:?}", answer.body);
        assert_eq!(socket.message("coded").await["messages"][0]["data"], data, "{coding}");
    }
    for coding in ["br", "zstd", "compress", "gzip, gzip", "nonsense"] {
        let answer = publish(&node, coding, gzip(&text("x"))).await;
        assert_eq!(
            (answer.status, answer.header("accept-encoding")),
            (415, Some("gzip, deflate")),
            "{coding}"
        );
        assert!(answer.error().contains("content-encoding"), "{coding}");
    }
    for body in [text("not encoded"), gzip(&text("cut short"))[..20].to_vec(), Vec::new()] {
        assert_eq!(publish(&node, "gzip", body).await.status, 400);
    }
    let filled = |bytes: usize| [b"{}".to_vec(), vec![b' '; bytes - 2]].concat();
    assert_eq!(publish(&node, "gzip", gzip(&filled(100_000))).await.status, 200, "exactly the limit");
    assert_eq!(publish(&node, "gzip", gzip(&filled(100_001))).await.status, 413, "one past it");
    let of_token = vec![b' '; 16 * 1024 + 1];
    let path = format!("/keys/{}/requestToken", node.key().rsplit('.').next().expect("a key"));
    let headers = [("content-encoding", "deflate")];
    let answer = http::request(node.addr(), "POST", &path, &headers, deflate(&of_token)).await;
    assert_eq!(answer.status, 413, "each body has its own limit");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bomb_is_refused_and_never_in_memory() {
    const BOMBS: usize = 40;
    const BOMB_BYTES: usize = 64 * 1024 * 1024;
    let node = node().await;
    let before = node.resident_bytes();
    let bomb = gzip(&vec![0; BOMB_BYTES]);
    assert!(bomb.len() < 100_000);
    let sent = (0..BOMBS).map(|_| publish(&node, "gzip", bomb.clone()));
    for answer in futures_util::future::join_all(sent).await {
        assert_eq!(answer.status, 413, "{:?}", answer.body);
    }
    let grown = node.peak_resident_bytes().saturating_sub(before);
    assert!(grown < BOMB_BYTES as u64, "{BOMBS} bombs of {BOMB_BYTES} bytes cost {grown} bytes");
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_idle_connection_has_a_time_of_its_own() {
    const REQUEST: &[u8] = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";
    let options = NodeOptions::default().limit("header_ms", 1_000).limit("http_idle_ms", 3_000);
    let node = Node::start(options).await;
    let mut idle = Raw::connect(node.addr()).await;
    idle.write(REQUEST).await;
    assert_eq!(idle.response(SOON).await.expect("an answer").0, 200);
    let answered = Instant::now();
    // Longer than the timeout of a head.
    assert_eq!(idle.frame(Duration::from_millis(1_500)).await, Err(End::Silence));
    idle.write(REQUEST).await;
    assert_eq!(idle.response(SOON).await.expect("it is still open").0, 200);
    let since = Instant::now();
    assert_eq!(idle.end(SOON).await, End::Gone);
    assert_eq!(node.metric("fanfare_limit_hits_total{limit=\"http_idle_ms\"}").await, 1.0);
    assert!(since.elapsed() >= Duration::from_millis(2_900), "{:?}", since.elapsed());
    assert!(answered.elapsed() >= Duration::from_millis(4_400));

    let mut slow = Raw::connect(node.addr()).await;
    slow.write(REQUEST).await;
    assert_eq!(slow.response(SOON).await.expect("an answer").0, 200);
    slow.write(&REQUEST[..20]).await;
    let begun = Instant::now();
    assert_eq!(slow.end(SOON).await, End::Gone);
    let took = begun.elapsed();
    assert!(
        took >= Duration::from_millis(900) && took < Duration::from_millis(2_900),
        "a further head: {took:?}"
    );
}

/// The test opens many connections, since the system may be ready for the answer or not.
#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_that_is_not_served_is_answered_without() {
    const REQUEST: &[u8] =
        b"GET /health HTTP/1.1\r\nhost: a\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 10\r\n\r\n";
    let node = node().await;
    for _ in 0..200 {
        let mut raw = Raw::connect(node.addr()).await;
        raw.write(REQUEST).await;
        assert_eq!(raw.response(SOON).await.expect("an answer").0, 200);
    }
}
