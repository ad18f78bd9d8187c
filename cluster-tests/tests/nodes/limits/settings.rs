//! Limits with other values than the defaults that clients know: each at its limit and one past it.

use std::time::Duration;

use fanfare_client::sign::TokenParams;
use fanfare_cluster_tests::Disk;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn names() {
    let node = Node::start(options().limit("channel_name_bytes", 8).limit("client_id_bytes", 600)).await;
    let (fits, longer) = ("n".repeat(8), "n".repeat(9));
    let path = |channel: &str| format!("/api/channels/{channel}/publish");
    assert_eq!(post(&node, &path(&fits), &http::basic(KEY), "{}").await.status, 200);
    assert_eq!(post(&node, &path(&longer), &http::basic(KEY), "{}").await.status, 400);
    for (channel, status) in [(&fits, 200), (&longer, 400)] {
        let sse = format!("/realtime/sse?channel={channel}&key={KEY}");
        let mut raw = Raw::connect(node.addr()).await;
        raw.write(format!("GET {sse} HTTP/1.1\r\nhost: localhost\r\n\r\n").as_bytes()).await;
        assert_eq!(raw.head(SOON).await.expect("an answer").0, status, "{channel}");
    }

    let (fits_id, longer_id) = ("i".repeat(600), "i".repeat(601));
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(brief(&socket.ask(json!({"op": 8, "channel": fits})).await), (9, None));
    assert_eq!(brief(&socket.ask(json!({"op": 8, "channel": longer})).await), (2, Some(40003)));
    for (client_id, expected, status) in [(&fits_id, (1, None), 200), (&longer_id, (2, Some(40000)), 401)] {
        let enter = json!({"op": 12, "channel": fits, "action": "enter", "clientId": client_id});
        assert_eq!(brief(&socket.ask(enter).await), expected);
        let token = jwt(&json!({"x-service-client-id": client_id}));
        assert_eq!(time(&node, &token).await, status);
        let mut raw = Raw::connect(node.addr()).await;
        let headers = [("authorization", &*http::basic(KEY))];
        let (upgraded, _) = raw.upgrade(&format!("/realtime?clientId={client_id}"), &headers).await;
        assert_eq!(upgraded, if status == 200 { 101 } else { 400 });
        let params = TokenParams { client_id: Some(client_id.clone()), ..TokenParams::default() };
        assert_eq!(exchange(&node, params).await.status, if status == 200 { 200 } else { 400 });
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn token_requests() {
    let limits = options()
        .limit("token_ttl_default_ms", 5_000)
        .limit("token_ttl_max_ms", 6_000)
        .limit("nonce_characters_min", 5)
        .limit("nonce_characters_max", 30)
        .limit("token_request_window_ms", 3_600_000)
        .limit("nonce_memory_ms", 7_200_000);
    let node = Node::start(limits).await;
    let answer = exchange(&node, TokenParams::default()).await.json();
    assert_eq!(answer["expires"].as_u64().zip(answer["issued"].as_u64()).map(|(e, i)| e - i), Some(5_000));
    let now_ms = clock::now_ms();
    for (what, status, params) in [
        ("ttl", 200, TokenParams { ttl_ms: Some(6_000), ..TokenParams::default() }),
        ("ttl", 400, TokenParams { ttl_ms: Some(6_001), ..TokenParams::default() }),
        ("nonce", 200, TokenParams { nonce: Some("n".repeat(5)), ..TokenParams::default() }),
        ("nonce", 400, TokenParams { nonce: Some("n".repeat(4)), ..TokenParams::default() }),
        ("nonce", 200, TokenParams { nonce: Some("n".repeat(30)), ..TokenParams::default() }),
        ("nonce", 400, TokenParams { nonce: Some("n".repeat(31)), ..TokenParams::default() }),
        ("60 minutes", 200, TokenParams { timestamp_ms: Some(now_ms - 3_590_000), ..TokenParams::default() }),
        ("60 minutes", 401, TokenParams { timestamp_ms: Some(now_ms - 3_601_000), ..TokenParams::default() }),
        ("60 minutes", 200, TokenParams { timestamp_ms: Some(now_ms + 3_599_000), ..TokenParams::default() }),
        ("60 minutes", 401, TokenParams { timestamp_ms: Some(now_ms + 3_700_000), ..TokenParams::default() }),
    ] {
        let answer = exchange(&node, params.clone()).await;
        assert_eq!(answer.status, status, "{params:?}");
        assert!(status == 200 || answer.error().contains(what), "{what}: {}", answer.error());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn times_of_a_jwt() {
    let limits = options()
        .limit("jwt_ahead_ms", 3_600_000)
        .limit("jwt_lifetime_ms", 200_000_999)
        .limit("token_ttl_max_ms", 200_000_000);
    let node = Node::start(limits).await;
    let now_s = clock::now_s();
    for (iat, exp, status) in [
        (now_s, now_s + 200_000, 200),
        (now_s, now_s + 200_001, 401),
        (now_s + 3_590, now_s + 3_600, 200),
        (now_s + 3_700, now_s + 3_800, 401),
    ] {
        assert_eq!(time(&node, &jwt(&json!({"iat": iat, "exp": exp}))).await, status, "{iat} to {exp}");
    }
    let longest = TokenParams { ttl_ms: Some(200_000_000), ..TokenParams::default() };
    let token = exchange(&node, longest).await.json()["token"].as_str().expect("a token").to_owned();
    assert_eq!(time(&node, &token).await, 200, "what is issued is taken");
    let ahead = json!({"issuedBefore": clock::now_ms() + 3_500_000}).to_string();
    assert_eq!(post(&node, "/keys/k1/revokeTokens", &http::basic(KEY), ahead).await.status, 200);
    assert_eq!(time(&node, &token).await, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn pages_batches_and_streams() {
    let limits = options()
        .limit("page_limit", 3)
        .limit("page_limit_max", 1_500)
        .limit("batch_channels", 2)
        .limit("sse_channels", 1);
    let node = Node::start(limits).await;
    let many = json!((0..1501).map(|number| json!({"data": number})).collect::<Vec<_>>());
    assert_eq!(publish(&node, many.to_string()).await.status, 200);
    for (query, expected) in
        [("", 3), ("?limit=no", 3), ("?limit=1500", 1500), ("?limit=1501", 1500), ("?limit=0", 1)]
    {
        let page = get(&node, &format!("/api/channels/c/history{query}")).await;
        assert_eq!(page.json()["messages"].as_array().map(Vec::len), Some(expected), "{query}");
    }
    let mut sockets = Vec::new();
    for _ in 0..4 {
        sockets.push(Socket::open(&node, "").await);
    }
    let listed = get(&node, "/api/connections").await.json()["connections"].as_array().map(Vec::len);
    assert_eq!(listed, Some(3), "a listing has the same pages");

    for (channels, status) in [(json!(["a", "b"]), 200), (json!(["a", "b", "d"]), 400)] {
        let body = json!({"channels": channels, "messages": [{"data": 1}]}).to_string();
        assert_eq!(post(&node, "/api/publish", &http::basic(KEY), body).await.status, status);
    }
    for (query, status) in [("channel=a", 200), ("channel=a&channel=b", 400)] {
        let mut raw = Raw::connect(node.addr()).await;
        let head = format!("GET /realtime/sse?{query}&key={KEY} HTTP/1.1\r\nhost: localhost\r\n\r\n");
        raw.write(head.as_bytes()).await;
        assert_eq!(raw.head(SOON).await.expect("an answer").0, status, "{query}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_client_is_closed_after_the_heartbeat_timeout() {
    let node = Node::start(options().limit("heartbeat_ms", 100).limit("heartbeat_grace_ms", 100)).await;
    let mut socket = Socket::open(&node, "").await;
    let began = std::time::Instant::now();
    // The default of the presence timeout is longer.
    let (_, ended) = socket.to_end(Duration::from_secs(9)).await;
    assert_ne!(ended, SocketEnd::Silence);
    assert!(began.elapsed() >= Duration::from_millis(300), "twice the heartbeat and the grace");
    assert_eq!(node.metric("fanfare_limit_hits_total{limit=\"heartbeat_ms\"}").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_store_that_is_waited_for_longer_answers_in_time() {
    let disk = Disk::default();
    let node = Node::start(disk.under(options().limit("store_wait_ms", 60_000))).await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(publish(&node, "{}").await.status, 200);
    disk.hang(true);
    let asked = socket.start(json!({"op": 13, "channel": "c", "data": 1})).await;
    let (over_http, ()) = tokio::join!(publish(&node, "{}"), async {
        // Reported after three seconds, when the default wait is over.
        wait_until(SOON, "/ready to say degraded", async || {
            let ready = http::request(node.admin(), "GET", "/ready", &[], "").await;
            ready.json()["status"] == "degraded"
        })
        .await;
        disk.hang(false);
    });
    assert_eq!(over_http.status, 200);
    let answer = socket.next().await;
    assert_eq!((&answer["id"], brief(&answer)), (&json!(asked), (1, None)));
}

fn jwt(changed: &Value) -> String {
    let now_s = clock::now_s();
    let mut claims =
        json!({"iat": now_s, "exp": now_s + 600, "x-service-capability": r#"{"*":["subscribe"]}"#});
    for (name, value) in changed.as_object().expect("claims") {
        claims[name] = value.clone();
    }
    forge::jwt(&json!({"alg": "HS256", "kid": "k1"}), &claims, "secret", forge::Signature::Hs256)
}

/// Gives the status of the simplest request.
async fn time(node: &Node, token: &str) -> u16 {
    http::request(node.addr(), "GET", "/time", &[("authorization", &http::bearer(token))], "").await.status
}

async fn exchange(node: &Node, params: TokenParams) -> Response {
    let request = sign::token_request(&KEY.parse().expect("a key"), params).expect("a request");
    let body = serde_json::to_string(&request).expect("JSON");
    http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], body).await
}
