//! Bounds of HTTP in memory and time: pages, unread answers, unfinished bodies.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::http::Connection;
use fanfare_cluster_tests::waits::pace;
use fanfare_cluster_tests::{
    Directory, Node, NodeOptions, Raw, Response, SOON, Socket, Tls, history, http, wait_until,
};
use serde_json::{Value, json};
use tokio::task::JoinSet;
use tokio::time::Instant;

const MESSAGE_BYTES: usize = 60_000;
/// Greatest size of a page: its records, the last of them beyond the bound, and the text around them.
const PAGE_BYTES_MAX: usize = 1024 * 1024 + 64 * 1024;
/// Number of messages that fill one page.
const PAGE: usize = 18;
/// Number of pages that exceed the system's buffers for a client that does not read.
const PAGES: usize = 12;
const ACCOUNTS: usize = 8;
/// Number of clients, for which the node would hold 200 MiB of pages, and 600 MiB of bodies.
const UNREAD: usize = 200;
const UNFINISHED: usize = 300;
/// Greatest memory: 64 MiB for pages and for bodies each, and the memory of an idle node.
const RESIDENT_MIB_MAX: u64 = 256;
const RECEIVE_BYTES: u32 = 128 * 1024;

/// Publishes large messages with the numbers 0..count as their names.
async fn publish_large(connection: &mut Connection, key: &str, channel: &str, count: usize) {
    let authorization = http::basic(key);
    let path = format!("/api/channels/{channel}/publish");
    let numbers: Vec<usize> = (0..count).collect();
    for numbers in numbers.chunks(30) {
        let message = |number: &usize| json!({"name": number.to_string(), "data": "x".repeat(MESSAGE_BYTES)});
        let body = json!(numbers.iter().map(message).collect::<Vec<_>>()).to_string();
        let headers = [("authorization", authorization.as_str())];
        let answer = connection.request("POST", &path, &headers, body).await.expect("an answer");
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }
}

fn key_of(account: usize) -> String {
    format!("secret.k{account}")
}

/// Adds `count` accounts, the first of which has the key of the node.
fn with_accounts(options: NodeOptions, count: usize) -> NodeOptions {
    let directory = (0..count).fold(Directory::default(), |directory, number| {
        directory.account(&format!("account-{number}")).key(&format!("k{number}"), "secret", ALL)
    });
    options.directory(directory, &key_of(0))
}

async fn node_with_pages(options: NodeOptions, count: usize) -> Node {
    let node = Node::start(options).await;
    let mut connection = Connection::open(node.addr()).await.expect("a connection");
    publish_large(&mut connection, &node.key(), "large", count).await;
    node
}

#[tokio::test(flavor = "multi_thread")]
async fn history_of_large_messages_is_paged_by_bytes_with_each_once() {
    let node = node_with_pages(NodeOptions::default(), 100).await;
    let authorization = http::basic(&node.key());
    for direction in ["backwards", "forwards"] {
        let mut next = Some(history::path("large", &format!("limit=1000&direction={direction}")));
        let (mut names, mut pages) = (Vec::new(), 0);
        while let Some(path) = next {
            let page =
                http::request(node.addr(), "GET", &path, &[("authorization", &authorization)], "").await;
            assert_eq!(page.status, 200, "{:?}", page.body);
            assert!(page.body.len() <= PAGE_BYTES_MAX, "{path}: {} bytes", page.body.len());
            for message in page.json()["messages"].as_array().expect("a list of messages") {
                names.push(message["name"].as_str().expect("a name").parse::<usize>().expect("a number"));
            }
            pages += 1;
            next = page.header("link").map(history::next_of);
        }
        if direction == "backwards" {
            names.reverse();
        }
        assert_eq!(names, (0..100).collect::<Vec<_>>(), "{direction}");
        assert!((6..=7).contains(&pages), "{direction}: full pages, not {pages}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn batch_limit_counts_copied_bytes_without_channel_names() {
    let node = Node::start(NodeOptions::default()).await;
    let authorization = http::basic(&node.key());
    let post = async |body: String| {
        http::request(node.addr(), "POST", "/api/publish", &[("authorization", &authorization)], body).await
    };
    let names = |count: usize| (0..count).map(|number| format!("{number:0512}")).collect::<Vec<_>>();
    let answer = post(json!({"channels": names(1000), "messages": [{"data": 1}]}).to_string()).await;
    assert_eq!(answer.status, 200, "{:?}", answer.error());
    let results = answer.json()["results"].take();
    let results = results.as_array().expect("a list of results");
    assert!(results.len() == 1000 && results.iter().all(|result| result["published"] == true));

    let large = vec![json!({"data": "x".repeat(MESSAGE_BYTES)}); 30];
    let answer = post(json!({"channels": names(38), "messages": large}).to_string()).await;
    assert_eq!(answer.status, 413, "over 64 MiB in all: {:?}", answer.body);
}

/// Asks for many pages at once.
async fn ask_for_pages(raw: &mut Raw, node: &Node) {
    ask_for_pages_of(raw, &node.key()).await;
}

async fn ask_for_pages_of(raw: &mut Raw, key: &str) {
    let path = history::path("large", "limit=1000");
    let authorization = http::basic(key);
    let request = format!("GET {path} HTTP/1.1\r\nhost: localhost\r\nauthorization: {authorization}\r\n\r\n");
    assert!(raw.write(request.repeat(PAGES).as_bytes()).await, "the node takes the requests");
}

/// Waits until a client that does not read sees its connection closed.
async fn wait_until_closed(raw: &mut Raw) {
    wait_until(SOON, "the connection to be closed", async || !raw.write(b"\r\n").await).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_nothing_of_its_answer_is_given_up() {
    const STALL_MS: u64 = 3_000;
    // The client's system still takes some bytes after the node's buffers are full; the timeout begins then.
    let given_up = async |mut raw: Raw, node: &Node| {
        let began = Instant::now();
        ask_for_pages(&mut raw, node).await;
        wait_until_closed(&mut raw).await;
        let stall = Duration::from_millis(STALL_MS);
        let after = began.elapsed();
        assert!(after >= stall && after < stall * 2 - Duration::from_millis(300), "{after:?}");
    };
    let node = node_with_pages(NodeOptions::default().limit("http_stall_ms", STALL_MS), PAGE).await;
    given_up(Raw::connect_slow(node.addr(), RECEIVE_BYTES).await, &node).await;

    let tls = Tls::default();
    let node = Node::start(tls.node().limit("http_stall_ms", STALL_MS)).await;
    publish_large(&mut tls.http(node.addr()).await, &node.key(), "large", PAGE).await;
    given_up(tls.raw_slow(node.addr(), RECEIVE_BYTES).await, &node).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_slowly_gets_all_of_its_answers() {
    const STALL: Duration = Duration::from_secs(2);
    let stall_ms = u64::try_from(STALL.as_millis()).expect("a short time");
    let node = node_with_pages(NodeOptions::default().limit("http_stall_ms", stall_ms), PAGE).await;
    let mut raw = Raw::connect_slow(node.addr(), RECEIVE_BYTES).await;
    ask_for_pages(&mut raw, &node).await;
    // The client reads so slowly that the node's socket does not become writable within the timeout.
    let began = Instant::now();
    while began.elapsed() < 4 * STALL {
        raw.take_in(64 * 1024).await;
        pace(Duration::from_millis(200)).await;
    }
    for page in 0..PAGES {
        let (status, _, body) = raw.response(SOON).await.expect("the connection is kept");
        assert_eq!(status, 200, "{page}");
        let body: Value = serde_json::from_str(&body).expect("a whole page");
        assert_eq!(body["messages"].as_array().map(Vec::len), Some(PAGE), "{page}");
    }
}

/// Greatest memory of the node since the watch began.
struct MemoryPeak {
    bytes: Arc<AtomicU64>,
    _watch: JoinSet<()>,
}

impl MemoryPeak {
    fn of(node: &Arc<Node>) -> Self {
        let (bytes, node) = (Arc::new(AtomicU64::new(0)), Arc::clone(node));
        let peak = Arc::clone(&bytes);
        let mut watch = JoinSet::new();
        watch.spawn(async move {
            let mut ticks = tokio::time::interval(Duration::from_millis(20));
            loop {
                ticks.tick().await;
                peak.fetch_max(node.resident_bytes(), Ordering::Relaxed);
            }
        });
        Self { bytes, _watch: watch }
    }

    fn mib(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed) / (1024 * 1024)
    }
}

/// Asserts that the node serves small requests and sockets beside the waiting ones.
async fn assert_serves(node: &Node) {
    let authorization = http::basic(&node.key());
    let headers = [("authorization", authorization.as_str())];
    let publish = http::request(node.addr(), "POST", "/api/channels/small/publish", &headers, "{}").await;
    assert_eq!(publish.status, 200, "{:?}", publish.body);
    let mut socket = Socket::open(node, "").await;
    socket.attach("small").await;
    socket.start(json!({"op": 13, "channel": "small", "data": 7})).await;
    assert_eq!(socket.message("small").await["messages"][0]["data"], 7);
}

async fn page(node: &Node) -> Response {
    page_of(node, &node.key()).await
}

async fn page_of(node: &Node, key: &str) -> Response {
    let path = history::path("large", "limit=1000");
    http::request(node.addr(), "GET", &path, &[("authorization", &http::basic(key))], "").await
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_answers_are_bounded_over_all_connections() {
    // One account would leave most of the memory budget free.
    let options = with_accounts(NodeOptions::default(), ACCOUNTS).limit("http_stall_ms", 3_000);
    let node = Arc::new(Node::start(options).await);
    let mut connection = Connection::open(node.addr()).await.expect("a connection");
    for account in 0..ACCOUNTS {
        publish_large(&mut connection, &key_of(account), "large", PAGE).await;
    }
    let peak = MemoryPeak::of(&node);
    let mut clients = Vec::new();
    for number in 0..UNREAD {
        let mut raw = Raw::connect_slow(node.addr(), 16 * 1024).await;
        ask_for_pages_of(&mut raw, &key_of(number % ACCOUNTS)).await;
        clients.push(raw);
    }
    assert_serves(&node).await;
    for raw in &mut clients {
        wait_until_closed(raw).await;
    }
    assert!(peak.mib() < RESIDENT_MIB_MAX, "the node held {} MiB", peak.mib());
    wait_until(SOON, "pages to be read again", async || page(&node).await.status == 200).await;
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_answer_without_room_is_refused_and_one_under_way_is_not() {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    let directory = directory.account("other").key("k2", "secret", ALL);
    let options = NodeOptions::default().directory(directory, "secret.k1").limit("http_stall_ms", 60_000);
    let node = node_with_pages(options.limit("http_answers_bytes", 6 * 1024 * 1024 / 5), PAGE).await;
    let mut slow = Raw::connect_slow(node.addr(), RECEIVE_BYTES).await;
    ask_for_pages(&mut slow, &node).await;
    let mut refused = None;
    wait_until(SOON, "the room to be taken", async || {
        refused = Some(page(&node).await).filter(|answer| answer.status == 503);
        refused.is_some()
    })
    .await;
    let refused = refused.expect("just seen");
    assert_eq!(refused.header("retry-after"), Some("1"), "{:?}", refused.body);
    assert!(node.metric("fanfare_limit_hits_total{limit=\"http_answers_bytes\"}").await >= 1.0);
    assert_serves(&node).await;
    let other = [("authorization", &*http::basic("secret.k2"))];
    let path = history::path("large", "limit=4");
    let answer = http::request(node.addr(), "GET", &path, &other, "").await;
    assert_eq!(answer.status, 200, "another account has room left: {:?}", answer.body);
    for _ in 0..PAGES {
        let (status, _, body) = slow.response(SOON).await.expect("what is under way goes on");
        assert!(status == 200 && body.len() > 1024 * 1024, "{status}");
    }
    assert_eq!(page(&node).await.status, 200, "there is room again");
}

#[tokio::test(flavor = "multi_thread")]
async fn slow_readers_of_two_accounts_block_no_answer_of_a_third() {
    const TRICKLING: usize = 24;
    // The budget holds fifteen pages, of which the first account can have four and the second two.
    let options = with_accounts(NodeOptions::default(), 3);
    let node = Node::start(options.limit("http_answers_bytes", 16 * 1024 * 1024)).await;
    let mut connection = Connection::open(node.addr()).await.expect("a connection");
    let keys: Vec<_> = (0..3).map(key_of).collect();
    for key in &keys {
        publish_large(&mut connection, key, "large", PAGE).await;
    }
    let mut trickling = JoinSet::new();
    for key in &keys[..2] {
        for _ in 0..TRICKLING {
            let mut raw = Raw::connect_slow(node.addr(), RECEIVE_BYTES).await;
            ask_for_pages_of(&mut raw, key).await;
            trickling.spawn(async move {
                loop {
                    raw.take_in(64 * 1024).await;
                    pace(Duration::from_millis(500)).await;
                }
            });
        }
        wait_until(SOON, "the account to have its share", async || page_of(&node, key).await.status == 503)
            .await;
    }
    for number in 0..20 {
        let answer = page_of(&node, &keys[2]).await;
        assert_eq!(answer.status, 200, "{number}: {:?}", answer.body);
        assert!(answer.body.len() > 1024 * 1024, "a whole page");
    }
    assert_eq!(trickling.len(), 2 * TRICKLING, "nobody was given up for it");
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn unfinished_bodies_are_bounded_over_all_connections() {
    const BODY_BYTES: usize = 2 * 1024 * 1024;
    let node = Arc::new(Node::start(NodeOptions::default().limit("http_stall_ms", 3_000)).await);
    let authorization = http::basic(&node.key());
    let head = format!(
        "POST /api/channels/large/publish HTTP/1.1\r\nhost: localhost\r\nauthorization: {authorization}\r\n"
    );
    let body: Arc<[u8]> = vec![b' '; BODY_BYTES - 1].into();
    let peak = MemoryPeak::of(&node);
    let mut clients = JoinSet::new();
    for number in 0..UNFINISHED {
        let (addr, body, mut head) = (node.addr(), Arc::clone(&body), head.clone());
        // Half of the bodies are chunked, without a length.
        let chunked = number % 2 == 1;
        head += &if chunked {
            format!("transfer-encoding: chunked\r\n\r\n{BODY_BYTES:x}\r\n")
        } else {
            format!("content-length: {BODY_BYTES}\r\n\r\n")
        };
        clients.spawn(async move {
            let mut raw = Raw::connect(addr).await;
            // A refused client may find the connection closed.
            let _ = raw.write(head.as_bytes()).await && raw.write(&body).await;
            raw.response(SOON).await.map(|(status, head, _)| (status, head.contains("retry-after: 1\r\n")))
        });
    }
    assert_serves(&node).await;
    let answers = clients.join_all().await;
    assert!(peak.mib() < RESIDENT_MIB_MAX, "the node held {} MiB", peak.mib());
    let late = answers.iter().filter(|answer| **answer == Ok((408, false))).count();
    let refused = answers.iter().filter(|answer| **answer == Ok((503, true))).count();
    assert_eq!(late + refused, UNFINISHED, "{answers:?}");
    let hits =
        async |limit| node.metric(&format!("fanfare_limit_hits_total{{limit=\"{limit}\"}}")).await as usize;
    assert_eq!((hits("http_stall_ms").await, hits("http_bodies_bytes").await), (late, refused));
    assert!(late >= 9, "as many as an account has room for are waited for, not {late}");
    let mut connection = Connection::open(node.addr()).await.expect("a connection");
    publish_large(&mut connection, &node.key(), "large", 30).await;
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_in_tiny_chunks_takes_no_more_than_its_bytes() {
    const BODY_BYTES: usize = 1024 * 1024;
    // An unoptimized build is slow with a million chunks.
    const BODY_MS: u64 = 120_000;
    let node = Arc::new(Node::start(NodeOptions::default().limit("http_body_ms", BODY_MS)).await);
    let authorization = http::basic(&node.key());
    let before = node.resident_bytes() / (1024 * 1024);
    let peak = MemoryPeak::of(&node);
    let mut raw = Raw::connect(node.addr()).await;
    let head = format!(
        "POST /api/channels/large/publish HTTP/1.1\r\nhost: localhost\r\nauthorization: {authorization}\r\n\
         transfer-encoding: chunked\r\n\r\n"
    );
    let chunks = "1\r\n \r\n".repeat(BODY_BYTES);
    assert!(raw.write(head.as_bytes()).await);
    // Each part must arrive within the timeout of one write.
    for part in chunks.as_bytes().chunks(BODY_BYTES / 16) {
        assert!(raw.write(part).await);
    }
    assert!(raw.write(b"2\r\n{}\r\n0\r\n\r\n").await);
    let answer = raw.response(Duration::from_millis(BODY_MS)).await;
    assert_eq!(answer.expect("an answer").0, 200);
    assert!(peak.mib() < before + 16, "1 MiB of chunks took {} MiB", peak.mib() - before);
}
