//! Refusal, refresh and expiry of a credential.

use std::time::Duration;

use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Node, Raw, SOON, clock, http};
use serde_json::{Value, json};

use super::{EVERYTHING, KEY, node, token, with_token};

#[tokio::test(flavor = "multi_thread")]
async fn refused_credential_is_reported_before_upgrade_or_in_socket() {
    let node = node().await;
    let bad = [
        http::basic("wrong.k1"),
        http::bearer("nonsense"),
        "Digest x".into(),
        http::basic("k1:secret.with.dots"),
    ];
    for authorization in bad {
        let headers = [("authorization", authorization.as_str())];
        let mut raw = Raw::connect(node.addr()).await;
        let (status, head) = raw.upgrade("/realtime", &headers).await;
        assert_eq!(status, 401, "{authorization}");
        assert!(head.to_lowercase().contains("access-control-allow-origin: *\r\n"), "{head}");
        refused_in_socket(&node, "/realtime?errors=socket", &headers).await;
    }
    refused_in_socket(&node, "/realtime?errors=socket", &[]).await;
    refused_in_socket(&node, "/realtime?errors=socket&accessToken=nonsense", &[]).await;
    refused_in_socket(&node, "/realtime?errors=socket&key=wrong.k1", &[]).await;
    let two = format!("/realtime?errors=socket&key={KEY}&accessToken={}", token(EVERYTHING, None, 60));
    refused_in_socket(&node, &two, &[]).await;
    let forced = token(EVERYTHING, Some("bob"), 60);
    refused_in_socket(&node, &format!("/realtime?errors=socket&clientId=ann&token={forced}"), &[]).await;

    for query in
        [format!("?key={KEY}"), format!("?token={forced}"), format!("?accessToken={forced}&clientId=bob")]
    {
        let mut raw = Raw::connect(node.addr()).await;
        assert_eq!(raw.upgrade(&format!("/realtime{query}"), &[]).await.0, 101, "{query}");
    }
    assert!(!node.log().contains(&forced) && !node.log().contains("secret.with.dots"), "no secret is logged");
}

async fn refused_in_socket(node: &Node, path: &str, headers: &[(&str, &str)]) {
    let mut raw = Raw::connect(node.addr()).await;
    assert_eq!(raw.upgrade(path, headers).await.0, 101, "{path}");
    let frame = raw.frame(SOON).await.expect("op 7");
    let error: Value = serde_json::from_slice(&frame.payload).expect("JSON");
    assert_eq!((&error["op"], &error["code"]), (&json!(7), &json!(40100)), "{path}: {error}");
    assert!(error.get("channel").is_none());
    assert_eq!(raw.frame(SOON).await.expect("a close frame").close_code(), Some(4001), "{path}");
}

#[tokio::test(flavor = "multi_thread")]
async fn token_refresh_keeps_connection_and_applies_new_capability() {
    let node = node().await;
    let mut socket = with_token(&node, "", &token(EVERYTHING, Some("ann"), 60)).await;
    socket.attach("kept").await;
    socket.attach("lost").await;
    let first = socket.connected.clone();

    for (what, other) in [
        ("another clientId", token(EVERYTHING, Some("bob"), 600)),
        ("no clientId", token(EVERYTHING, None, 600)),
        ("a broken one", "nonsense".into()),
    ] {
        let nack = socket.ask(json!({"op": 15, "accessToken": other})).await;
        assert_eq!(nack["op"], 2, "{what}: {nack}");
    }
    socket.publish("lost", json!({"data": "the old credential stands"})).await;

    let narrow = token(r#"{"kept":["subscribe"]}"#, Some("ann"), 600);
    let id = socket.start(json!({"op": 15, "accessToken": narrow})).await;
    let ack = socket.find("the ack", |frame| frame["id"] == *id).await;
    assert_eq!(ack["op"], 1, "{ack}");
    let connected = socket.next().await;
    assert_eq!((&connected["op"], &connected["resumed"]), (&json!(3), &json!(true)));
    assert_eq!(connected["connectionId"], first["connectionId"]);
    assert!(connected["expires"].as_u64() > first["expires"].as_u64());
    let changes = [socket.next().await, socket.next().await];
    let detached = changes.iter().find(|frame| frame["op"] == 11).expect("detached");
    assert_eq!((&detached["channel"], &detached["code"]), (&json!("lost"), &json!(40160)));
    let attached = changes.iter().find(|frame| frame["op"] == 9).expect("attached");
    assert_eq!((&attached["channel"], &attached["modes"]), (&json!("kept"), &json!(["subscribe"])));
    let nack = socket.ask(json!({"op": 13, "channel": "lost", "data": 1})).await;
    assert_eq!(nack["code"], 40160);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_is_asked_for_and_its_expiry_ends_the_connection() {
    let node = node().await;
    let mut socket = with_token(&node, "", &token(EVERYTHING, None, 3)).await;
    let ask = socket.next().await;
    assert_eq!(ask, json!({"op": 15, "code": 40142, "expires": socket.connected["expires"]}));
    let expires = ask["expires"].as_u64().expect("a time");
    let end = socket.find("op 4", |frame| frame["op"] == 4).await;
    assert_eq!(end["code"], 40142);
    assert!(end["reconnectAfterMs"].is_u64(), "{end}");
    assert!(clock::now_ms() >= expires, "not before it expires");
    assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Closed(4001));

    let mut refreshed = with_token(&node, "", &token(EVERYTHING, None, 3)).await;
    refreshed.ask(json!({"op": 15, "accessToken": token(EVERYTHING, None, 600)})).await;
    let (frames, ended) = refreshed.to_end(Duration::from_secs(5)).await;
    assert_eq!(ended, SocketEnd::Silence, "{frames:?}");
    refreshed.publish("alive", json!({})).await;
}
