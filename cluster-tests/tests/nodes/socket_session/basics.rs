//! Connect, heartbeats, attach, publish, formats, close.

use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::{Node, SOON, clock};
use serde_json::{Value, json};

use super::{EVERYTHING, node, options, token, with_token};

#[tokio::test(flavor = "multi_thread")]
async fn connected_carries_the_client_id_and_settings() {
    let node = node().await;
    let socket = Socket::open(&node, "?clientId=ann%20b").await;
    let connected = &socket.connected;
    let id = connected["connectionId"].as_str().expect("a connectionId");
    assert!(id.starts_with("c_") && id.len() == 24, "{id}");
    assert!(connected["connectionKey"].as_str().is_some_and(|key| !key.is_empty()));
    assert_eq!(connected["clientId"], "ann b");
    assert!(connected["nodeId"].is_string());
    assert_eq!(connected["resumed"], false);
    assert_eq!(connected["heartbeatMs"], 15_000);
    assert_eq!(connected["resumeWindowMs"], 120_000);
    assert_eq!(connected["maxMessageBytes"], 65_536);
    assert!(connected.get("expires").is_none(), "a key does not expire");
    let now_ms = clock::now_ms();
    assert!(connected["serverTime"].as_u64().is_some_and(|time| time.abs_diff(now_ms) < 60_000));
    let other = Socket::open(&node, "").await;
    assert_ne!(other.connected["connectionId"], connected["connectionId"]);
    assert!(other.connected.get("clientId").is_none());
    let forced = with_token(&node, "", &token(EVERYTHING, Some("bob"), 60)).await;
    assert_eq!(forced.connected["clientId"], "bob");
    assert!(
        forced.connected["expires"].as_u64().is_some_and(|expires| expires % 1000 == 0 && expires > now_ms)
    );
}

#[tokio::test(flavor = "multi_thread")]
async fn a_heartbeat_with_an_id_is_answered_and_silence_is_filled() {
    let node = Node::start(options().limit("heartbeat_ms", 1_000)).await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(socket.connected["heartbeatMs"], 1_000);
    socket.send(&json!({"op": 0})).await;
    socket.send(&json!({"op": 0, "id": "beat"})).await;
    assert_eq!(socket.next().await, json!({"op": 0, "id": "beat"}));
    assert_eq!(socket.next().await, json!({"op": 0}));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_goes_from_one_client_to_another_and_back() {
    let node = node().await;
    let mut reader = Socket::open(&node, "").await;
    let mut writer = Socket::open(&node, "?clientId=writer").await;
    let attached = reader.attach("news:today").await;
    assert_eq!(attached["channel"], "news:today");
    assert_eq!((&attached["resumed"], &attached["presence"]), (&json!(false), &json!(false)));
    assert!(attached["serial"].as_str().is_some_and(|serial| serial.len() <= 512));
    let mut modes: Vec<_> = attached["modes"].as_array().expect("modes").iter().map(|m| m.as_str()).collect();
    modes.sort_unstable();
    assert_eq!(modes, [Some("presence"), Some("publish"), Some("subscribe")]);
    writer.attach("news:today").await;

    let id = writer
        .start(json!({"op": 13, "channel": "news:today", "unknown": true, "messages": [
            {"name": "hello", "data": {"n": 1.0}, "extras": {"tag": "x"}, "unknown": true}]}))
        .await;
    let delivered = reader.message("news:today").await;
    let message = &delivered["messages"][0];
    assert_eq!(delivered["messages"].as_array().map(Vec::len), Some(1));
    assert_eq!((&message["name"], &message["data"]), (&json!("hello"), &json!({"n": 1.0})));
    assert_eq!((&message["extras"], &message["clientId"]), (&json!({"tag": "x"}), &json!("writer")));
    assert_eq!(message["connectionId"], writer.connected["connectionId"]);
    assert!(message["id"].as_str().is_some_and(|own| !own.is_empty() && own != id));
    assert!(message["timestamp"].as_u64().is_some_and(|time| time.abs_diff(clock::now_ms()) < 60_000));

    let (mut ack, mut echo) = (Value::Null, Value::Null);
    while ack.is_null() || echo.is_null() {
        let frame = writer.next().await;
        match frame["op"].as_u64() {
            Some(1) => ack = frame,
            Some(13) => echo = frame,
            other => unreachable!("op {other:?}"),
        }
    }
    assert_eq!((&ack["id"], ack["serials"].as_array().map(Vec::len)), (&json!(id), Some(1)));
    assert_eq!(echo, delivered, "every subscriber sees the same frame, its publisher too");

    assert_eq!(reader.ask(json!({"op": 10, "channel": "news:today"})).await["op"], 11);
    writer.publish("news:today", json!({"data": "unseen"})).await;
    assert_eq!(reader.ask(json!({"op": 0})).await["op"], 0);
    reader.attach("news:today").await;
    writer.publish("news:today", json!({"data": "seen"})).await;
    assert_eq!(reader.message("news:today").await["messages"][0]["data"], "seen");
    let again = reader.attach("news:today").await;
    assert_eq!(again["resumed"], true, "an attach while attached");
}

#[tokio::test(flavor = "multi_thread")]
async fn data_keeps_its_text() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("exact").await;
    for data in
        ["1.0", "1e400", "123456789012345678901234567890", "null", "false", "\"\"", "0", r#"{"b":1,"a":2}"#]
    {
        let frame = format!(r#"{{"op":13,"id":"x","channel":"exact","messages":[{{"data":{data}}}]}}"#);
        socket.raw().send(0x81, frame.as_bytes()).await;
        let mut seen = false;
        for _ in 0..2 {
            let payload = socket.raw().frame(SOON).await.expect("ack and message").payload;
            let text = String::from_utf8(payload).expect("UTF-8");
            seen |= text.contains(&format!(r#""data":{data}"#)) && text.starts_with(r#"{"op":13"#);
        }
        assert!(seen, "{data} arrives as it was sent");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn echo_can_be_off() {
    let node = node().await;
    let mut quiet = Socket::open(&node, "?echo=false").await;
    let mut other = Socket::open(&node, "").await;
    quiet.attach("room").await;
    other.attach("room").await;
    quiet.publish("room", json!({"data": "mine"})).await;
    assert_eq!(other.message("room").await["messages"][0]["data"], "mine");
    other.publish("room", json!({"data": "theirs"})).await;
    assert_eq!(quiet.message("room").await["messages"][0]["data"], "theirs", "its own did not come before");
}

#[tokio::test(flavor = "multi_thread")]
async fn message_pack_says_the_same_both_ways() {
    let node = node().await;
    let mut packed = Socket::open(&node, "?format=msgpack").await;
    let mut plain = Socket::open(&node, "?format=json").await;
    packed.attach("formats").await;
    plain.attach("formats").await;
    let data = json!({"text": "ä", "list": [1, -2, 3.5, true, null], "deep": {"big": u64::MAX}});
    packed.publish("formats", json!({"name": "n", "data": data})).await;
    let from_packed = plain.message("formats").await;
    assert_eq!(from_packed["messages"][0]["data"], data);
    plain.publish("formats", json!({"name": "n", "data": data})).await;
    let mut as_packed = packed.message("formats").await;
    if as_packed["messages"][0]["id"] == from_packed["messages"][0]["id"] {
        as_packed = packed.message("formats").await;
    }
    assert_eq!(as_packed, plain.message("formats").await);
    packed.raw().send(0x81, b"{\"op\":0}").await;
    assert_eq!(packed.to_end(SOON).await.1, SocketEnd::Closed(1002), "a text frame under MessagePack");

    let mut fixed = Socket::open(&node, "?format=msgpack").await;
    fixed.raw().send(0x82, b"\x82\xA2op\x00\xA2id\xA1h").await;
    let frame = fixed.raw().frame(SOON).await.expect("an answer");
    assert_eq!((frame.opcode, &frame.payload[..]), (2, &b"\x82\xA2op\x00\xA2id\xA1h"[..]));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clean_end_is_closed_with_1000() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    socket.send(&json!({"op": 5})).await;
    assert_eq!(socket.next().await, json!({"op": 6}));
    assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Closed(1000));
}
