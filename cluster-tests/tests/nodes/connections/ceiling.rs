//! The tenant's limit of connections, and the count for it.

use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Node, Raw, SOON, Socket, http, wait_until};
use serde_json::json;

use super::{KEY, OTHER, SECOND, directory, get, node};

async fn count(node: &Node, key: &str) -> serde_json::Value {
    let answer = get(node, "/api/connections/count", key).await;
    assert_eq!(answer.status, 200);
    answer.json()
}

async fn try_open(node: &Node, query: &str, key: &str) -> Result<Socket, (u16, String)> {
    let mut raw = Raw::connect(node.addr()).await;
    let authorization = http::basic(key);
    let (status, head) =
        raw.upgrade(&format!("/realtime{query}"), &[("authorization", &authorization)]).await;
    if status == 101 { Ok(Socket::upgraded(raw, false).await) } else { Err((status, head)) }
}

async fn close(socket: &mut Socket) {
    socket.send(&json!({"op": 5})).await;
    socket.find("closed", |frame| frame["op"] == 6).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_past_tenant_ceiling_is_refused_over_all_accounts() {
    let node = node(Some(2)).await;
    assert_eq!(count(&node, KEY).await, json!({"connections": 0, "limit": 2}));
    let mut first = Socket::open_as(&node, "", &http::basic(KEY)).await;
    let _second = Socket::open_as(&node, "", &http::basic(SECOND)).await;
    for key in [KEY, SECOND] {
        let (status, head) = try_open(&node, "", key).await.err().expect("refused");
        assert_eq!(status, 429);
        assert!(head.to_ascii_lowercase().contains("access-control-allow-origin: *"), "{head}");
        assert_eq!(count(&node, key).await, json!({"connections": 2, "limit": 2}));
    }
    let authorization = http::basic(KEY);
    let upgrade = http::upgrade(&authorization);
    let mut reused = http::Connection::open(node.addr()).await.expect("a connection");
    assert_eq!(reused.request("GET", "/health", &[], "").await.expect("an answer").status, 200);
    let refused = reused.request("GET", "/realtime", &upgrade, "").await.expect("an answer");
    assert_eq!((refused.status, &refused.json()["reason"]), (429, &json!("connection_limit")));
    assert!(!refused.error().is_empty());

    let _other = Socket::open_as(&node, "", &http::basic(OTHER)).await;
    assert_eq!(count(&node, OTHER).await, json!({"connections": 1, "limit": null}));

    close(&mut first).await;
    let _third = try_open(&node, "", SECOND).await.expect("the seat is free when the close is answered");
    assert_eq!(count(&node, KEY).await["connections"], 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn quota_slot_is_free_however_its_connection_ended() {
    let node = node(Some(1)).await;
    for way in ["gone", "close frame", "protocol error"] {
        let mut socket = Socket::open_as(&node, "", &http::basic(KEY)).await;
        assert_eq!(count(&node, KEY).await["connections"], 1, "{way}");
        match way {
            "close frame" => drop(socket.raw().send(0x88, &[0x03, 0xE8]).await),
            "protocol error" => drop(socket.raw().send(0x81, b"[").await),
            _ => drop(socket),
        }
        wait_until(SOON, way, async || count(&node, KEY).await["connections"] == 0).await;
    }
    let refused = http::request(node.addr(), "GET", "/realtime?key=wrong.k1", &[], "").await;
    assert_eq!((refused.status, &count(&node, KEY).await["connections"]), (426, &json!(0)));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_reads_no_status_is_refused_within_the_socket() {
    let node = node(Some(1)).await;
    let _first = Socket::open(&node, "").await;
    for query in ["?errors=socket", "?errors=socket&format=msgpack"] {
        let mut raw = Raw::connect(node.addr()).await;
        let path = format!("/realtime{query}");
        let (status, _) = raw.upgrade(&path, &[("authorization", &http::basic(KEY))]).await;
        assert_eq!(status, 101);
        let mut refused = Socket::refused(raw, query.contains("msgpack"));
        let (frames, ended) = refused.to_end(SOON).await;
        let [frame] = &frames[..] else { unreachable!("one frame: {frames:?}") };
        assert_eq!((&frame["op"], &frame["code"]), (&json!(4), &json!(42900)));
        assert_eq!(frame["reason"], "connection_limit");
        assert!(frame["reconnectAfterMs"].as_u64().is_some_and(|ms| ms > 0), "{frame}");
        assert_eq!(ended, SocketEnd::Closed(4029));
    }
    assert_eq!(count(&node, KEY).await["connections"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn lowered_limit_closes_no_connection_and_admits_none() {
    let node = node(Some(3)).await;
    let mut open = vec![Socket::open(&node, "").await, Socket::open(&node, "").await];
    node.replace_directory(&directory(Some(1)));
    wait_until(SOON, "the new ceiling", async || count(&node, KEY).await["limit"] == 1).await;
    assert_eq!(try_open(&node, "", KEY).await.err().expect("refused").0, 429);
    for socket in &mut open {
        assert_eq!(socket.ask(json!({"op": 0})).await["op"], 0);
    }
    close(&mut open.remove(0)).await;
    assert_eq!(try_open(&node, "", KEY).await.err().expect("still at the ceiling").0, 429);
    node.replace_directory(&directory(None));
    wait_until(SOON, "no ceiling", async || count(&node, KEY).await["limit"].is_null()).await;
    assert!(try_open(&node, "", KEY).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_storm_is_admitted_exactly_up_to_the_limit() {
    const CEILING: usize = 20;
    let node = node(Some(CEILING as u64)).await;
    let mut storm = tokio::task::JoinSet::new();
    for _ in 0..4 * CEILING {
        let (addr, key) = (node.addr(), http::basic(KEY));
        storm.spawn(async move {
            let mut raw = Raw::connect(addr).await;
            let (status, _) = raw.upgrade("/realtime", &[("authorization", &key)]).await;
            (status, raw)
        });
    }
    let answers = storm.join_all().await;
    let admitted = answers.iter().filter(|(status, _)| *status == 101).count();
    assert_eq!(admitted, CEILING);
    assert!(answers.iter().all(|(status, _)| [101, 429].contains(status)));
    assert_eq!(count(&node, KEY).await["connections"], CEILING);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_count_needs_a_credential_and_nothing_more() {
    let narrow = directory(Some(7)).account("narrow").key("k4", "secret", r#"{ "x" = ["publish"] }"#);
    let options = fanfare_cluster_tests::NodeOptions::default().directory(narrow, KEY);
    let node = Node::start(options).await;
    assert_eq!(count(&node, "secret.k4").await, json!({"connections": 0, "limit": null}));
    let path = "/api/connections/count";
    assert_eq!(http::request(node.addr(), "GET", path, &[], "").await.status, 401);
    let authorization = http::basic(KEY);
    let answer = http::request(node.addr(), "POST", path, &[("authorization", &authorization)], "").await;
    assert_eq!(answer.status, 405);
}
