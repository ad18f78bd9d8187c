//! Revocation of a key's tokens: at once for requests, within seconds for open connections, and over a restart.

use std::time::Duration;

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Response, clock, http};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const OTHER_KEY: &str = "other.k2";

async fn node(options: NodeOptions) -> Node {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL).key("k2", "other", ALL);
    Node::start(options.directory(directory, KEY)).await
}

/// Signs a token of this age, so that a revocation can lie clearly before or after it.
fn token(key: &str, client_id: Option<&str>, age_s: u64) -> String {
    let params = JwtParams {
        capability: r#"{"*":["subscribe","history"]}"#.into(),
        client_id: client_id.map(Into::into),
        issued_s: Some(clock::now_s() - age_s),
        ttl_s: 3600,
    };
    sign::jwt(&key.parse().expect("a key"), &params).expect("a token")
}

async fn revoke_as(node: &Node, authorization: &str, key_name: &str, body: &str) -> Response {
    let path = format!("/keys/{key_name}/revokeTokens");
    http::request(node.addr(), "POST", &path, &[("authorization", authorization)], body.to_owned()).await
}

async fn revoke(node: &Node, body: &Value) -> Value {
    let answer = revoke_as(node, &http::basic(KEY), "k1", &body.to_string()).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer.json()
}

async fn status(node: &Node, token: &str) -> u16 {
    let bearer = http::bearer(token);
    http::request(node.addr(), "GET", "/time", &[("authorization", &bearer)], "").await.status
}

async fn assert_revoked(what: &str, socket: &mut Socket) {
    let (frames, ended) = socket.to_end(Duration::from_secs(5)).await;
    assert_eq!(ended, SocketEnd::Closed(4001), "{what}: {frames:?}");
    let last = frames.last();
    assert!(last.is_some_and(|frame| frame["op"] == 7 && frame["code"] == 40100), "{what}: {last:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_the_revoked_client_is_shut_out() {
    let node = node(NodeOptions::default()).await;
    let (ann, bob) = (token(KEY, Some("ann"), 10), token(KEY, Some("bob"), 10));
    let of_other_key = token(OTHER_KEY, Some("ann"), 10);
    let mut out = Socket::open_as(&node, "", &http::bearer(&ann)).await;
    let mut out_packed = Socket::open_as(&node, "?format=msgpack", &http::bearer(&ann)).await;
    let mut by_key = Socket::open(&node, "?clientId=ann").await;
    let mut by_bob = Socket::open_as(&node, "", &http::bearer(&bob)).await;
    let mut by_other = Socket::open_as(&node, "", &http::bearer(&of_other_key)).await;
    for socket in [&mut by_key, &mut by_bob, &mut by_other] {
        socket.attach("live").await;
    }

    let before_ms = clock::now_ms();
    let answer = revoke(&node, &json!({"clientId": "ann"})).await;
    assert_eq!((&answer["keyName"], &answer["clientId"]), (&json!("k1"), &json!("ann")));
    let at_ms = answer["issuedBefore"].as_u64().expect("a time");
    assert!((before_ms..=clock::now_ms()).contains(&at_ms), "{answer}");

    assert_eq!(status(&node, &ann).await, 401, "at once");
    let refused = by_bob.ask(json!({"op": 15, "accessToken": ann})).await;
    assert_eq!((&refused["op"], &refused["code"]), (&json!(2), &json!(40140)), "nor by a refresh");
    assert_revoked("json", &mut out).await;
    assert_revoked("msgpack", &mut out_packed).await;
    assert_eq!((status(&node, &bob).await, status(&node, &of_other_key).await), (200, 200));
    by_key.publish("live", json!({"data": "still here"})).await;
    for socket in [&mut by_key, &mut by_bob, &mut by_other] {
        assert_eq!(socket.message("live").await["messages"][0]["data"], "still here");
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_connection_lives_on_with_a_token_issued_later() {
    let node = node(NodeOptions::default()).await;
    let mut refreshed = Socket::open_as(&node, "", &http::bearer(&token(KEY, Some("ann"), 20))).await;
    let mut stale = Socket::open_as(&node, "", &http::bearer(&token(KEY, Some("ann"), 20))).await;
    let ack = refreshed.ask(json!({"op": 15, "accessToken": token(KEY, Some("ann"), 5)})).await;
    assert_eq!(ack["op"], 1, "{ack}");
    revoke(&node, &json!({"issuedBefore": clock::now_ms() - 10_000})).await;
    assert_revoked("the old one", &mut stale).await;
    refreshed.attach("live").await;

    revoke(&node, &json!({})).await;
    assert_revoked("now both", &mut refreshed).await;
    let fresh = exchange(&node, "ann").await;
    assert_eq!(status(&node, &fresh).await, 200, "a token of the very second of the revocation");
    Socket::open_as(&node, "", &http::bearer(&fresh)).await.attach("live").await;
}

async fn exchange(node: &Node, client_id: &str) -> String {
    let params = sign::TokenParams { client_id: Some(client_id.into()), ..sign::TokenParams::default() };
    let request = sign::token_request(&KEY.parse().expect("a key"), params).expect("a request");
    let body = serde_json::to_string(&request).expect("JSON");
    let answer = http::request(node.addr(), "POST", "/keys/k1/requestToken", &[], body).await;
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    answer.json()["token"].as_str().expect("a token").into()
}

#[tokio::test(flavor = "multi_thread")]
async fn revocation_survives_kill_and_stop_with_and_without_history() {
    for store in ["embedded", "none"] {
        let mut node = node(NodeOptions::default().environment("FANFARE_STORE", store)).await;
        let (ann, bob) = (token(KEY, Some("ann"), 10), token(KEY, Some("bob"), 10));
        revoke(&node, &json!({"clientId": "ann"})).await;
        node.kill();
        node.restart().await;
        assert_eq!((status(&node, &ann).await, status(&node, &bob).await), (401, 200), "{store}");
        revoke(&node, &json!({})).await;
        assert_eq!(node.stop().await.code(), Some(0));
        node.restart().await;
        assert_eq!((status(&node, &ann).await, status(&node, &bob).await), (401, 401), "{store}");
        node.assert_well().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn revoke_request_needs_its_own_key_and_a_valid_body() {
    let node = node(NodeOptions::default().limit("revoked_client_ids", 2)).await;
    let own = http::basic(KEY);
    let far_ahead = format!(r#"{{"issuedBefore":{}}}"#, clock::now_ms() + 300_000);
    let cases = [
        ("no such key", "Basic eC5r", "k1", "{}", 401),
        ("another key", &http::basic(OTHER_KEY), "k1", "{}", 403),
        ("its key on another's path", &own, "k2", "{}", 403),
        ("its key on nobody's path", &own, "k3", "{}", 403),
        ("a token of the key", &http::bearer(&token(KEY, None, 5)), "k1", "{}", 403),
        ("an empty body", &own, "k1", "", 400),
        ("a misspelt field", &own, "k1", r#"{"clientID":"ann"}"#, 400),
        ("a clientId that none can have", &own, "k1", r#"{"clientId":"*"}"#, 400),
        ("a time that is none", &own, "k1", r#"{"issuedBefore":"now"}"#, 400),
        ("a time far ahead", &own, "k1", &far_ahead, 400),
        ("the first clientId", &own, "k1", r#"{"clientId":"ann"}"#, 200),
        ("the second", &own, "k1", r#"{"clientId":"bob"}"#, 200),
        ("the first again", &own, "k1", r#"{"clientId":"ann"}"#, 200),
        ("one too many", &own, "k1", r#"{"clientId":"eve"}"#, 429),
        ("all of them", &own, "k1", "{}", 200),
    ];
    for (what, authorization, key_name, body, status) in cases {
        let answer = revoke_as(&node, authorization, key_name, body).await;
        assert_eq!(answer.status, status, "{what}: {:?}", answer.body);
    }
    let get =
        http::request(node.addr(), "GET", "/keys/k1/revokeTokens", &[("authorization", &own)], "").await;
    assert_eq!((get.status, get.header("allow")), (405, Some("POST")));
    let anonymous = http::request(node.addr(), "POST", "/keys/k1/revokeTokens", &[], "{}").await;
    assert_eq!((anonymous.status, anonymous.error().as_str()), (401, "unauthorized"));
    node.assert_well().await;
}
