//! The node counts each refusal and each close for a limit under the name of the setting.
//!
//! No limit that refuses or closes is left out: it counts under its name, by the reason of a refused credential, or, as the connections
//! of a tenant, under a counter of its own. The resume window, the recent messages, the retention, the window of given ids and the
//! `limit` of history refuse nothing.

use std::collections::BTreeSet;
use std::time::Duration;

use fanfare_cluster_tests::raw::{CONTINUATION, TEXT};

use super::*;

/// Gives the limits that have been hit.
async fn hits(node: &Node) -> BTreeSet<String> {
    let page = http::request(node.admin(), "GET", "/metrics", &[], "").await;
    let page = String::from_utf8(page.body.to_vec()).expect("text");
    let counts = page.lines().filter_map(|line| {
        let (limit, count) = line.strip_prefix("fanfare_limit_hits_total{limit=\"")?.split_once("\"} ")?;
        (count != "0").then(|| limit.to_owned())
    });
    counts.collect()
}

/// Asserts that this is the only limit that has been hit since the last check.
async fn assert_hit(node: &Node, seen: &mut BTreeSet<String>, limit: &str) {
    wait_until(SOON, &format!("{limit} to be counted"), async || hits(node).await.contains(limit)).await;
    assert!(seen.insert(limit.to_owned()), "{limit} was hit before");
    assert_eq!(hits(node).await, *seen, "{limit}");
}

#[tokio::test(flavor = "multi_thread")]
async fn each_limit_over_http_is_counted() {
    let limits = [
        ("message_bytes", 1000),
        ("http_body_bytes", 16_000),
        ("token_request_bytes", 500),
        ("http_body_ms", 2000),
        ("http_stall_ms", 1000),
        ("batch_bytes", 2000),
        ("publish_messages", 5),
        ("batch_channels", 3),
        ("http_publishes_per_second", 20),
        ("failed_token_requests_per_second", 1),
        ("sse_channels", 1),
        ("sse_streams", 1),
        ("revoked_client_ids", 1),
        ("header_ms", 2000),
    ];
    let node =
        Node::start(limits.iter().fold(options(), |options, (name, value)| options.limit(name, *value)))
            .await;
    let (basic, seen) = (http::basic(KEY), &mut BTreeSet::new());
    let long = |bytes: usize| json!({"data": "x".repeat(bytes)}).to_string();

    assert_eq!(publish(&node, long(1000)).await.status, 413);
    assert_hit(&node, seen, "message_bytes").await;
    assert_eq!(publish(&node, long(16_000)).await.status, 413);
    assert_hit(&node, seen, "http_body_bytes").await;
    assert_eq!(post(&node, "/keys/k1/requestToken", &basic, long(500)).await.status, 413);
    assert_hit(&node, seen, "token_request_bytes").await;
    let mut slow = Raw::connect(node.addr()).await;
    let head = format!(
        "POST /api/channels/c/publish HTTP/1.1\r\nhost: localhost\r\nauthorization: {basic}\r\ncontent-length: 9\r\n\r\n{{"
    );
    slow.write(head.as_bytes()).await;
    assert_eq!(slow.response(SOON).await.expect("an answer").0, 408);
    assert_hit(&node, seen, "http_stall_ms").await;
    let mut steady = Raw::connect(node.addr()).await;
    steady.write(head.replace("length: 9", "length: 999").as_bytes()).await;
    wait_until(SOON, "the end of the time", async || {
        steady.write(b" ").await;
        steady.head(Duration::from_millis(100)).await.is_ok_and(|(status, _)| status == 408)
    })
    .await;
    assert_hit(&node, seen, "http_body_ms").await;
    assert_eq!(publish(&node, json!(vec![json!({"data": 1}); 6]).to_string()).await.status, 413);
    assert_hit(&node, seen, "publish_messages").await;
    let batch = json!({"channels": ["a", "b", "c", "d"], "messages": [{"data": 1}]});
    assert_eq!(post(&node, "/api/publish", &basic, batch.to_string()).await.status, 400);
    assert_hit(&node, seen, "batch_channels").await;
    let batch = json!({"channels": ["a", "b", "c"], "messages": [{"data": "x".repeat(900)}]});
    assert_eq!(post(&node, "/api/publish", &basic, batch.to_string()).await.status, 413);
    assert_hit(&node, seen, "batch_bytes").await;
    let nested = format!("{{\"data\":{}{}}}", "[".repeat(64), "]".repeat(64));
    assert_eq!(publish(&node, nested).await.status, 400);
    assert_hit(&node, seen, "nesting").await;
    let path = format!("/api/channels/{}/publish", "c".repeat(513));
    assert_eq!(post(&node, &path, &basic, r#"{"data":1}"#).await.status, 400);
    assert_hit(&node, seen, "channel_name_bytes").await;
    let many = json!(vec![json!({"data": 1}); 5]).to_string();
    wait_until(SOON, "a refused publish", async || publish(&node, many.clone()).await.status == 429).await;
    assert_hit(&node, seen, "http_publishes_per_second").await;
    let stream = async |query: &str| {
        let mut raw = Raw::connect(node.addr()).await;
        let head = format!("GET /realtime/sse?key={KEY}&{query} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        raw.write(head.as_bytes()).await;
        (raw.head(SOON).await.expect("an answer").0, raw)
    };
    assert_eq!(stream("channel=a&channel=b").await.0, 400);
    assert_hit(&node, seen, "sse_channels").await;
    let (_open, second) = (stream("channel=a").await, stream("channel=a").await.0);
    assert_eq!(second, 503);
    assert_hit(&node, seen, "sse_streams").await;
    let revoke = async |client_id: &str| {
        post(&node, "/keys/k1/revokeTokens", &basic, json!({"clientId": client_id}).to_string()).await.status
    };
    assert_eq!((revoke("ann").await, revoke("bob").await), (200, 429));
    assert_hit(&node, seen, "revoked_client_ids").await;
    let fail = async || post(&node, "/keys/k1/requestToken", &basic, "{").await.status == 429;
    wait_until(SOON, "a limited token request", fail).await;
    assert_hit(&node, seen, "failed_token_requests_per_second").await;
    let mut large = Raw::connect(node.addr()).await;
    large
        .write(
            format!("GET /time HTTP/1.1\r\nhost: localhost\r\nx: {}\r\n\r\n", "x".repeat(17_000)).as_bytes(),
        )
        .await;
    assert_eq!(large.response(SOON).await.expect("an answer").0, 431);
    assert_hit(&node, seen, "header_bytes").await;
    let mut late = Raw::connect(node.addr()).await;
    late.write(b"GET /time HTTP/1.1\r\n").await;
    late.end(SOON).await;
    assert_hit(&node, seen, "header_ms").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_limit_of_a_credential_and_of_names_is_counted() {
    let limits = [("failed_token_requests_per_second", 0), ("token_bytes", 1000)];
    let node =
        Node::start(limits.iter().fold(options(), |options, (name, value)| options.limit(name, *value)))
            .await;
    let (basic, seen) = (http::basic(KEY), &mut BTreeSet::new());
    let exchange = async |changed: Value| {
        let now_ms = clock::now_s() * 1000;
        let mut body = json!({"keyName": "k1", "timestamp": now_ms, "nonce": "n".repeat(20), "ttl": 1000});
        for (name, value) in changed.as_object().expect("fields") {
            body[name] = value.clone();
        }
        post(&node, "/keys/k1/requestToken", &basic, body.to_string()).await.status
    };
    assert_eq!(exchange(json!({})).await, 200);
    assert_eq!(exchange(json!({"nonce": "n".repeat(15)})).await, 400);
    assert_hit(&node, seen, "nonce_characters_min").await;
    assert_eq!(exchange(json!({"nonce": "n".repeat(129)})).await, 400);
    assert_hit(&node, seen, "nonce_characters_max").await;
    assert_eq!(exchange(json!({"ttl": 172_800_001})).await, 400);
    assert_hit(&node, seen, "token_ttl_max_ms").await;
    let wide = json!({"c".repeat(450): ["subscribe"], "d".repeat(450): ["subscribe"]}).to_string();
    assert_eq!(exchange(json!({"capability": wide, "nonce": "m".repeat(20)})).await, 400);
    assert_hit(&node, seen, "token_bytes").await;
    assert_eq!(exchange(json!({"clientId": "c".repeat(257)})).await, 400);
    assert_hit(&node, seen, "client_id_bytes").await;
    let nested = format!("{}{}", "[".repeat(65), "]".repeat(65));
    assert_eq!(post(&node, "/keys/k1/requestToken", &basic, nested.clone()).await.status, 400);
    assert_hit(&node, seen, "nesting").await;

    // The same limits over other transports.
    let hits = async |limit: &str| {
        node.metric(&format!("fanfare_limit_hits_total{{limit=\"{limit}\"}}")).await as u64
    };
    let token = http::bearer(&"x".repeat(1001));
    assert_eq!(
        http::request(node.addr(), "GET", "/time", &[("authorization", &token)], "").await.status,
        401
    );
    assert_eq!(hits("token_bytes").await, 2);
    let long = "c".repeat(257);
    let close = format!("/api/clients/{long}/connections/close");
    assert_eq!(post(&node, &close, &basic, "").await.status, 400);
    let revoke = json!({"clientId": long}).to_string();
    assert_eq!(post(&node, "/keys/k1/revokeTokens", &basic, revoke).await.status, 400);
    let path = format!("/realtime?clientId={long}");
    assert_eq!(Raw::connect(node.addr()).await.upgrade(&path, &[("authorization", &basic)]).await.0, 400);
    assert_eq!(hits("client_id_bytes").await, 4);
    assert_eq!(post(&node, "/keys/k1/revokeTokens", &basic, nested.clone()).await.status, 400);
    assert_eq!(post(&node, "/api/publish", &basic, nested).await.status, 400);
    assert_eq!(hits("nesting").await, 3);
    let path = format!("/realtime/sse?key={KEY}&channel={}", "c".repeat(513));
    assert_eq!(http::request(node.addr(), "GET", &path, &[], "").await.status, 400);
    assert_hit(&node, seen, "channel_name_bytes").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn each_limit_of_a_socket_is_counted() {
    let limits = [
        ("socket_message_bytes", 5000),
        ("socket_message_fragments", 4),
        ("socket_message_ms", 300),
        ("message_bytes", 1000),
        ("publishes_per_second", 1),
        ("publish_burst", 8),
        ("controls_per_second", 1),
        ("control_burst", 20),
        ("attached_channels", 2),
        ("presence_data_bytes", 100),
        ("presence_members", 2),
        ("presence_connection_members", 3),
    ];
    let node =
        Node::start(limits.iter().fold(options(), |options, (name, value)| options.limit(name, *value)))
            .await;
    let seen = &mut BTreeSet::new();
    let enter = |channel: &str, client_id: &str, data: Value| json!({"op": 12, "channel": channel, "action": "enter", "clientId": client_id, "data": data});

    let mut socket = Socket::open(&node, "").await;
    for channel in ["a", "b"] {
        socket.attach(channel).await;
    }
    assert_eq!(brief(&socket.ask(json!({"op": 8, "channel": "c"})).await), (2, Some(42900)));
    assert_hit(&node, seen, "attached_channels").await;
    assert_eq!(brief(&socket.ask(json!({"op": 8, "channel": "c".repeat(513)})).await), (2, Some(40003)));
    assert_hit(&node, seen, "channel_name_bytes").await;
    let far = json!({"op": 8, "channel": "a", "rewind": "101"});
    assert_eq!(brief(&socket.ask(far).await), (2, Some(40000)));
    assert_hit(&node, seen, "rewind_messages").await;
    let large = json!({"op": 13, "channel": "a", "data": "x".repeat(1000)});
    assert_eq!(brief(&socket.ask(large).await), (2, Some(40009)));
    assert_hit(&node, seen, "message_bytes").await;
    let long_id = json!({"op": 13, "channel": "a", "messages": [{"id": "i".repeat(129), "data": 1}]});
    assert_eq!(brief(&socket.ask(long_id).await), (2, Some(40000)));
    assert_hit(&node, seen, "message_id_bytes").await;
    let long_name = json!({"op": 13, "channel": "a", "name": "n".repeat(257), "data": 1});
    assert_eq!(brief(&socket.ask(long_name).await), (2, Some(40000)));
    assert_hit(&node, seen, "name_bytes").await;
    assert_eq!(brief(&socket.ask(enter("a", &"c".repeat(257), json!(1))).await), (2, Some(40000)));
    assert_hit(&node, seen, "client_id_bytes").await;
    let many = json!({"op": 13, "channel": "a", "messages": vec![json!({"data": 1}); 9]});
    assert_eq!(brief(&socket.ask(many).await), (2, Some(42900)));
    assert_hit(&node, seen, "publishes_per_second").await;
    assert_eq!(brief(&socket.ask(enter("a", "x", json!("x".repeat(100)))).await), (2, Some(40009)));
    assert_hit(&node, seen, "presence_data_bytes").await;
    for client_id in ["x", "y"] {
        assert_eq!(brief(&socket.ask(enter("a", client_id, json!(1))).await), (1, None));
    }
    assert_eq!(brief(&socket.ask(enter("a", "z", json!(1))).await), (2, Some(42900)));
    assert_hit(&node, seen, "presence_members").await;
    assert_eq!(brief(&socket.ask(enter("b", "x", json!(1))).await), (1, None));
    assert_eq!(brief(&socket.ask(enter("b", "y", json!(1))).await), (2, Some(42900)));
    assert_hit(&node, seen, "presence_connection_members").await;
    for _ in 0..40 {
        socket.start(json!({"op": 10, "channel": "none"})).await;
    }
    socket.find("a refused detach", |frame| frame["op"] == 2).await;
    assert_hit(&node, seen, "controls_per_second").await;

    let closed = async |frames: Vec<u8>| {
        let mut socket = Socket::open(&node, "").await;
        socket.raw().write(&frames).await;
        socket.to_end(SOON).await.1
    };
    let nested = format!("{{\"op\":0,\"x\":{}{}}}", "[".repeat(64), "]".repeat(64));
    assert_eq!(closed(raw::frame(FIN | TEXT, nested.as_bytes())).await, SocketEnd::Closed(1002));
    assert_hit(&node, seen, "nesting").await;
    assert_eq!(closed(raw::frame(FIN | TEXT, &[b' '; 5001])).await, SocketEnd::Closed(1009));
    assert_hit(&node, seen, "socket_message_bytes").await;
    let fragments = [raw::frame(TEXT, b" "), raw::frame(CONTINUATION, b" ").repeat(4)].concat();
    assert_eq!(closed(fragments).await, SocketEnd::Closed(1009));
    assert_hit(&node, seen, "socket_message_fragments").await;
    assert_eq!(closed(raw::frame(TEXT, b" ")).await, SocketEnd::Closed(1009));
    assert_hit(&node, seen, "socket_message_ms").await;
    assert_eq!(closed(raw::frame(FIN | raw::PING, b"p").repeat(11)).await, SocketEnd::Closed(1008));
    assert_hit(&node, seen, "pings_per_second").await;
}
