//! Rules for a node as a whole: start, end, stalls, bounds, and one form for every answer.

use std::time::Duration;

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::raw::Raw;
use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Response, SOON, http, wait_until};
use serde_json::{Value, json};
use tokio::time::Instant;

const KEY: &str = "secret.k1";
const OTHER_KEY: &str = "other.k2";
const KEEP_ALIVE: &str = "GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n";

fn token(key: &str) -> String {
    let params = JwtParams {
        capability: r#"{"*":["subscribe","history"]}"#.into(),
        client_id: None,
        issued_s: None,
        ttl_s: 60,
    };
    let key = key.parse().expect("a key");
    sign::jwt(&key, &params).expect("a token")
}

async fn publish(node: &Node, channel: &str, body: impl Into<bytes::Bytes>) -> Response {
    let authorization = http::basic(&node.key());
    let path = format!("/api/channels/{channel}/publish");
    http::request(node.addr(), "POST", &path, &[("authorization", &authorization)], body).await
}

#[tokio::test(flavor = "multi_thread")]
async fn auth_off_needs_no_credential() {
    let node = Node::start(NodeOptions::default().environment("FANFARE_AUTH", "off")).await;
    let mut raw = Raw::connect(node.addr()).await;
    let (status, head) = raw.upgrade("/realtime", &[]).await;
    assert_eq!(status, 101, "{head}");
    let mut socket = Socket::upgraded(raw, false).await;
    socket.attach("open").await;

    let path = "/api/channels/open/publish";
    let answer = http::request(node.addr(), "POST", path, &[], r#"{"data":"for all"}"#).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    assert_eq!(socket.message("open").await["messages"][0]["data"], "for all");
    let page = http::request(node.addr(), "GET", "/api/channels/open/history", &[], "").await;
    assert_eq!((page.status, &page.json()["messages"][0]["data"]), (200, &json!("for all")));
    // Longer than the interval of checks of the directory.
    assert_eq!(socket.next_within(Duration::from_millis(1_500)).await, Err(SocketEnd::Silence));
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_ends_what_it_opened_and_nothing_else() {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL).key("k2", "other", ALL);
    let node = Node::start(NodeOptions::default().directory(directory, KEY)).await;
    let by_token = http::bearer(&token(KEY));
    let mut with_key = Socket::open(&node, "").await;
    let mut with_token = Socket::open_as(&node, "?format=msgpack", &by_token).await;
    let mut with_other = Socket::open_as(&node, "", &http::basic(OTHER_KEY)).await;
    with_key.attach("live").await;
    with_other.attach("live").await;

    let revoked = Directory::default().account("acme").revoked_key("k1", "secret").key("k2", "other", ALL);
    node.replace_directory(&revoked);
    for authorization in [http::basic(KEY), by_token] {
        wait_until(Duration::from_secs(2), "HTTP to refuse the key", async || {
            let headers = [("authorization", authorization.as_str())];
            let path = "/api/channels/live/history";
            http::request(node.addr(), "GET", path, &headers, "").await.status == 401
        })
        .await;
    }
    for (what, socket) in [("the key", &mut with_key), ("its token", &mut with_token)] {
        let (frames, ended) = socket.to_end(Duration::from_secs(3)).await;
        assert_eq!(ended, SocketEnd::Closed(4001), "{what}: {frames:?}");
        let last = frames.last();
        assert!(last.is_some_and(|frame| frame["op"] == 7 && frame["code"] == 40100), "{what}: {last:?}");
    }
    with_other.publish("live", json!({"data": "still here"})).await;
    assert_eq!(with_other.message("live").await["messages"][0]["data"], "still here");
    node.assert_well().await;
}

/// Sends a request, first on its connection or after another one.
async fn answer_to(node: &Node, second: bool, request: &str) -> (u16, String, String) {
    let mut raw = Raw::connect(node.addr()).await;
    if second {
        raw.write(KEEP_ALIVE.as_bytes()).await;
        let (status, head, body) = raw.response(SOON).await.expect("an answer");
        assert_eq!((status, body.as_str()), (200, "ok"), "{head}");
    }
    raw.write(request.as_bytes()).await;
    raw.response(SOON).await.unwrap_or_else(|end| unreachable!("an answer was expected, but {end:?}"))
}

fn allows_every_origin(head: &str) -> bool {
    head.to_ascii_lowercase().contains("\r\naccess-control-allow-origin: *\r\n")
}

#[tokio::test(flavor = "multi_thread")]
async fn every_refusal_has_one_form_wherever_it_is_made() {
    let node = Node::start(NodeOptions::default()).await;
    let get = |headers: &str| format!("GET /health HTTP/1.1\r\nhost: localhost\r\n{headers}\r\n");
    let huge = get(&format!("x-filler: {}\r\n", "x".repeat(20 * 1024)));
    let upgrade = "GET /realtime HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
                   sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n";
    let cases = [
        ("an upgrade without a credential", upgrade, 401),
        ("a header of 20 KB", &huge, 431),
        ("garbage", "\u{1}\u{2} garbage \u{3}\r\n\r\n", 400),
    ];
    for (what, request, expected) in cases {
        for second in [false, true] {
            let (status, head, body) = answer_to(&node, second, request).await;
            let what = format!("{what}, second on its connection: {second}: {head}{body}");
            assert_eq!(status, expected, "{what}");
            assert!(allows_every_origin(&head), "{what}");
            let body: Value = serde_json::from_str(&body).unwrap_or_else(|e| unreachable!("{what}: {e}"));
            assert!(body["error"].as_str().is_some_and(|error| !error.is_empty()), "{what}");
        }
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upgrade_after_another_request_opens_a_socket() {
    let node = Node::start(NodeOptions::default()).await;
    let authorization = http::basic(&node.key());
    let mut raw = Raw::connect(node.addr()).await;
    raw.write(KEEP_ALIVE.as_bytes()).await;
    let (status, head, _) = raw.response(SOON).await.expect("an answer");
    assert_eq!(status, 200, "{head}");
    let (status, head) = raw.upgrade("/realtime", &[("authorization", &authorization)]).await;
    assert_eq!(status, 101, "{head}");
    assert!(allows_every_origin(&head), "{head}");
    let mut socket = Socket::upgraded(raw, false).await;
    socket.attach("late").await;
    socket.publish("late", json!({"data": "works"})).await;
    assert_eq!(socket.message("late").await["messages"][0]["data"], "works");
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_clients_stops_at_once() {
    let mut node = Node::start(NodeOptions::default()).await;
    let started = Instant::now();
    let exit = node.stop().await;
    let took = started.elapsed();
    assert!(exit.success(), "{exit}");
    assert!(took < Duration::from_secs(1), "{took:?}");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_that_stay_are_closed_within_a_short_drain_timeout() {
    let mut node = Node::start(NodeOptions::default().environment("FANFARE_DRAIN_TIMEOUT", "1s")).await;
    let mut sockets = Vec::new();
    for _ in 0..4 {
        sockets.push(Socket::open(&node, "").await);
    }
    let started = Instant::now();
    let exit = node.stop().await;
    let took = started.elapsed();
    assert!(exit.success(), "{exit}");
    assert!(took < Duration::from_secs(4), "{took:?}");
    for socket in &mut sockets {
        let (frames, ended) = socket.to_end(SOON).await;
        let disconnected = frames.iter().find(|frame| frame["op"] == 4).expect("told to leave");
        assert!(disconnected["reconnectAfterMs"].as_u64().is_some_and(|ms| ms < 1_000), "{disconnected}");
        assert_eq!(ended, SocketEnd::Closed(1012));
    }
    assert!(!node.log().contains("did not end in time"), "{}", node.log());
    node.assert_no_panic();
}

/// A load balancer learns of the drain from the answer, before connections are refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_stopping_node_says_that_it_is_draining() {
    let node = Node::start(NodeOptions::default()).await;
    let admin = node.admin();
    let _stays = Socket::open(&node, "").await;
    node.terminate();
    let draining = async || {
        let ready = http::request(admin, "GET", "/ready", &[], "").await;
        ready.status == 503 && ready.json()["status"] == "draining"
    };
    wait_until(SOON, "the node to say that it drains", draining).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_half_sent_body_does_not_hold_a_stopping_node() {
    let mut node = Node::start(NodeOptions::default()).await;
    let key = node.key();
    let name = key.rsplit('.').next().expect("a key name");
    let mut raw = Raw::connect(node.addr()).await;
    let head = format!(
        "POST /keys/{name}/requestToken HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n\
         content-type: application/json\r\ncontent-length: 1000\r\n\r\n"
    );
    raw.write(head.as_bytes()).await;
    let (status, head) = raw.head(SOON).await.expect("the node waits for the body");
    assert_eq!(status, 100, "{head}");
    raw.write(b"{\"keyName\":").await;
    let started = Instant::now();
    let exit = node.stop().await;
    let took = started.elapsed();
    assert!(exit.success(), "{exit}");
    assert!(took < Duration::from_secs(6), "{took:?}");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn stopping_node_sends_its_sockets_the_reconnect_delay() {
    let mut node = Node::start(NodeOptions::default()).await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("live").await;
    let started = Instant::now();
    let (exit, (frames, ended)) = tokio::join!(node.stop(), socket.to_end(SOON));
    let took = started.elapsed();
    let last = frames.last().unwrap_or(&Value::Null);
    assert_eq!((&last["op"], &last["code"]), (&json!(4), &json!(50003)), "{frames:?}");
    assert!(last["reconnectAfterMs"].is_u64(), "{last}");
    assert_eq!(ended, SocketEnd::Closed(1012));
    assert!(exit.success(), "{exit}");
    assert!(took < Duration::from_secs(4), "{took:?}");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_answered_to_a_client_that_has_closed_its_side() {
    let node = Node::start(NodeOptions::default()).await;
    let authorization = http::basic(&node.key());
    let body = r#"{"data":"last words"}"#;
    let request = format!(
        "POST /api/channels/half/publish HTTP/1.1\r\nhost: localhost\r\nauthorization: {authorization}\r\n\
         content-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut raw = Raw::connect(node.addr()).await;
    raw.write(request.as_bytes()).await;
    raw.half_close().await;
    let (status, _, body) = raw.response(SOON).await.expect("an answer");
    assert_eq!(status, 200, "{body}");
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn publish_of_very_many_messages_is_refused_or_harmless() {
    let node = Node::start(NodeOptions::default()).await;
    let array = |messages: usize| format!("[{}]", vec!["{}"; messages].join(","));
    let refused = publish(&node, "many", array(10_001)).await;
    assert_eq!(refused.status, 413, "{:?}", refused.body);
    assert!(refused.error().contains("10000"), "{:?}", refused.body);

    let (largest_sent, others_done) = (std::cell::Cell::new(0), std::cell::Cell::new(0));
    let largest = async {
        for _ in 0..2 {
            let answer = publish(&node, "many", array(10_000)).await;
            assert_eq!(answer.status, 200, "{:?}", answer.body);
            largest_sent.set(largest_sent.get() + 1);
        }
    };
    let others = async {
        while largest_sent.get() < 2 {
            let answer = publish(&node, "few", "{}").await;
            assert_eq!(answer.status, 200, "{:?}", answer.body);
            others_done.set(others_done.get() + 1);
        }
    };
    tokio::join!(largest, others);
    assert!(others_done.get() > 0);
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_of_a_slow_subscriber_are_still_answered() {
    const MIB: u64 = 1024 * 1024;
    // The bytes beyond the system's buffers stay in the outbox, within its bound.
    let node = Node::start(NodeOptions::default().limit("outbox_bytes", 16 * MIB)).await;
    let mut slow = Socket::open(&node, "").await;
    let mut observer = Socket::open(&node, "").await;
    slow.attach("firehose").await;
    observer.attach("elsewhere").await;
    let message = format!(r#"{{"data":"{}"}}"#, "x".repeat(60_000));
    let array = format!("[{}]", vec![message.as_str(); 30].join(","));
    for _ in 0..5 {
        let answer = publish(&node, "firehose", array.clone()).await;
        assert_eq!(answer.status, 200, "{:?}", answer.body);
    }

    let detach = slow.start(json!({"op": 10, "channel": "firehose"})).await;
    slow.start(json!({"op": 13, "channel": "elsewhere", "messages": [{"data": "heard"}]})).await;
    assert_eq!(observer.message("elsewhere").await["messages"][0]["data"], "heard");
    publish(&node, "firehose", r#"{"data":"after the detach"}"#).await;
    slow.send(&json!({"op": 5})).await;

    let (frames, ended) = slow.to_end(SOON).await;
    assert_eq!(ended, SocketEnd::Closed(1000));
    let place = |op: i64| frames.iter().position(|frame| frame["op"] == op);
    let detached = place(11).expect("the detach is answered");
    assert_eq!(frames[detached]["id"], json!(detach));
    let live = frames.iter().filter(|frame| frame["op"] == 13);
    let delivered: usize = live.map(|frame| frame["messages"].as_array().map_or(0, Vec::len)).sum();
    assert_eq!(delivered, 150, "all up to the detach, none after it");
    assert_eq!(place(6), Some(frames.len() - 1), "the end is answered last");
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_spoke_during_a_node_stall_is_not_timed_out() {
    // Longer than the timeout of 2 × 500 ms + 10 s.
    let pause = Duration::from_millis(11_500);
    let node = Node::start(NodeOptions::default().limit("heartbeat_ms", 500)).await;
    let mut talking = Vec::new();
    for _ in 0..4 {
        talking.push(Socket::open(&node, "").await);
    }
    let mut silent = Socket::open(&node, "").await;
    node.pause();
    let started = Instant::now();
    wait_until(SOON, "the pause to be longer than a silence may be", async || {
        let over = started.elapsed() >= pause;
        while !over && talking[0].next_within(Duration::from_secs(1)).await.is_ok() {}
        for socket in &mut talking {
            socket.send(&json!({"op": 0})).await;
        }
        over
    })
    .await;
    node.resume();
    let (_, ended) = silent.to_end(SOON).await;
    assert_eq!(ended, SocketEnd::Gone, "who was silent is taken for dead");
    for socket in &mut talking {
        let answer = socket.ask(json!({"op": 0})).await;
        assert_eq!(answer["op"], 0, "{answer}");
    }
    node.assert_well().await;
}
