use super::*;

#[test]
fn connected_carries_the_client_id_and_limits() {
    let mut client = SessionTestClient::key_as("all", Some("ann"));
    let seen = client.opened();
    let mut connected = frame(&seen).clone();
    let key = connected.as_object_mut().unwrap().remove("connectionKey").unwrap();
    assert!(!key.as_str().unwrap().is_empty());
    let id = client.session.connection_id().to_string();
    assert!(id.starts_with("c_") && id.len() == 24);
    let expected = json!({
        "op": 3, "connectionId": id, "clientId": "ann", "nodeId": "node-1", "resumed": false,
        "heartbeatMs": 15_000, "resumeWindowMs": 120_000, "maxMessageBytes": 65_536, "serverTime": NOW_MS,
    });
    assert_eq!(connected, expected);
}

#[test]
fn connected_has_token_expiry_and_client_id_only_if_present() {
    let mut client = SessionTestClient::token(&token_of("all", &json!({"*": ["publish"]}), None, 3600));
    let seen = client.opened();
    assert_eq!(frame(&seen)["expires"], json!((NOW_S + 3600) * 1000));
    assert!(frame(&seen).get("clientId").is_none());
    let mut client = SessionTestClient::key("all");
    let seen = client.opened();
    assert!(frame(&seen).get("expires").is_none());
}

#[test]
fn connection_ids_and_keys_are_fresh() {
    let (mut one, mut other) = (SessionTestClient::key("all"), SessionTestClient::key("all"));
    let (one, other) = (one.opened(), other.opened());
    assert_ne!(frame(&one)["connectionId"], frame(&other)["connectionId"]);
    assert_ne!(frame(&one)["connectionKey"], frame(&other)["connectionKey"]);
}

#[test]
fn a_heartbeat_is_answered_when_it_has_an_id() {
    let mut client = SessionTestClient::key("all");
    assert_eq!(client.send(&json!({"op": 0})), []);
    assert_eq!(client.send(&json!({"op": 0, "id": 7})), [], "an id that is not a string counts as none");
    let seen = client.send(&json!({"op": 0, "id": "h"}));
    assert_eq!(*frame(&seen), json!({"op": 0, "id": "h"}));
}

#[test]
fn op_5_ends_at_once_and_nothing_is_done_after_it() {
    let mut client = SessionTestClient::key("all");
    client.send(&publish("p", "a"));
    let seen = client.send_together(&[json!({"op": 5}), json!({"op": 0, "id": "h"}), publish("q", "a")]);
    assert_eq!(seen, [SessionEffect::Frame(json!({"op": 6})), end(close::NORMAL)]);
    assert_eq!(client.acked(1), [], "nothing follows the ending");
    assert_eq!(client.send(&json!({"op": 5})), []);
}

#[test]
fn an_unknown_op_is_answered_and_the_connection_stays() {
    let mut client = SessionTestClient::key("all");
    let seen = client.send(&json!({"op": 99, "id": "u"}));
    assert_eq!(*frame(&seen), json!({"op": 2, "id": "u", "error": "op 99 is unknown", "code": 40000}));
    assert_eq!(client.send(&json!({"op": 99})), []);
    assert_eq!(brief(&client.send(&json!({"op": "13", "id": "u"}))), ["2 u 40000"]);
    assert_eq!(brief(&client.send(&json!({"op": 0, "id": "h"}))), ["0 h"]);
}

#[test]
fn unreadable_frame_ends_connection() {
    let cases: [(&str, bool, &[u8], u16); 6] = [
        ("not an object", true, b"[]", close::PROTOCOL),
        ("not JSON", true, b"{\"op\":", close::PROTOCOL),
        ("empty", true, b"", close::PROTOCOL),
        ("not UTF-8", true, b"{\"op\":0,\"id\":\"\xff\"}", close::BAD_UTF8),
        ("binary under json", false, b"{\"op\":0}", close::PROTOCOL),
        ("a number", true, b"13", close::PROTOCOL),
    ];
    for (case, text, payload, code) in cases {
        let mut client = SessionTestClient::key("all");
        let seen = client.payload(text, payload);
        assert_eq!(brief(&seen[..1]), ["7  40000"], "{case}");
        assert_eq!(seen[1..], [end(code)], "{case}");
        assert_eq!(client.send(&json!({"op": 0, "id": "h"})), [], "{case}");
    }
}

#[test]
fn msgpack_is_spoken_in_binary_frames_alone() {
    let basic = format!("Basic {}", STANDARD.encode("secret-of-all.all"));
    let begin = |limits| SessionTestClient::begin(&basic, None, Format::MsgPack, limits);
    let heartbeat = fanfare_proto::msgpack::from_json(r#"{"op":0,"id":"h"}"#);
    let mut client = begin(Limits::default());
    let opened = client.opened();
    assert_eq!(frame(&opened)["op"], json!(3));
    assert_eq!(*frame(&client.payload(false, &heartbeat)), json!({"op": 0, "id": "h"}));
    let seen = client.payload(true, &heartbeat);
    assert_eq!(brief(&seen), ["7  40000", "end 1002"]);

    let json_bytes = r#"{"op":0,"id":"h"}"#.len();
    let mut limits = Limits { socket_message_bytes: json_bytes, ..Limits::default() };
    assert_eq!(brief(&begin(limits.clone()).payload(false, &heartbeat)), ["0 h"]);
    limits.socket_message_bytes -= 1;
    assert_eq!(brief(&begin(limits).payload(false, &heartbeat)), ["7  40000", "end 1009"]);
}

#[test]
fn nesting_at_the_limit_and_one_past() {
    let nested = |depth: usize| {
        let data = "[".repeat(depth) + &"]".repeat(depth);
        format!(r#"{{"op":13,"id":"p","channel":"a","data":{data}}}"#)
    };
    let mut client = SessionTestClient::key("all");
    assert_eq!(brief(&client.payload(true, nested(63).as_bytes())), ["publish 1"]);
    assert_eq!(brief(&client.payload(true, nested(64).as_bytes())), ["7  40000", "end 1002"]);
}

#[test]
fn requests_without_an_id_are_done_and_not_answered() {
    let mut client = SessionTestClient::key("chat");
    let message = |channel: &str| json!({"op": 13, "channel": channel, "data": 1});
    assert_eq!(brief(&client.send(&message("chat:a"))), ["publish 1"]);
    assert_eq!(client.acked(1), [], "an ack");
    assert_eq!(client.send(&message("other")), [], "a capability");
    assert_eq!(client.send(&message("")), [], "a name");
    assert_eq!(client.send(&json!({"op": 13, "channel": "chat:a", "messages": []})), [], "no message");
    assert_eq!(client.send(&json!({"op": 15, "accessToken": "x"})), [], "a token");
    assert_eq!(client.send(&json!({"op": 8, "channel": "other"})), [], "a refused attach");
    let token = token_of("all", &json!({"*": ["publish"]}), None, 3600);
    let seen = client.send(&json!({"op": 15, "accessToken": token}));
    assert_eq!(brief(&seen), ["3 "], "a fresh connected, no ack");
}

#[test]
fn names_of_channels_at_the_limit_and_one_past() {
    let cases = [
        ("".to_owned(), "2 i 40003"),
        ("[meta]".to_owned(), "2 i 40003"),
        ("a\u{1f}".to_owned(), "2 i 40003"),
        ("é".repeat(256) + "x", "2 i 40003"),
    ];
    let mut client = SessionTestClient::key("all");
    for (channel, expected) in cases {
        for op in [8, 10, 12, 13] {
            let request = json!({"op": op, "id": "i", "channel": channel, "action": "enter"});
            assert_eq!(brief(&client.send(&request)), [expected], "op {op} of {channel:?}");
        }
    }
    assert!(!client.session.is_full());
    let longest = "é".repeat(256);
    assert_eq!(brief(&client.send(&publish("p", &longest))), ["publish 1"]);
    assert_eq!(brief(&client.send(&publish("p", "a[b] c"))), ["publish 2"]);
}

#[test]
fn a_ping_is_answered_in_its_place_and_not_after_the_end() {
    let mut client = SessionTestClient::key("all");
    client.opened();
    let seen = client.act(|session, cx, out| {
        session.ping(b"first", out);
        session.message(cx, true, br#"{"op":0,"id":"a"}"#, out);
        session.ping(b"second", out);
        session.message(cx, true, br#"{"op":5}"#, out);
        session.ping(b"late", out);
    });
    let pong = |payload: &[u8]| SessionEffect::Pong(payload.to_vec());
    assert_eq!(seen[0], pong(b"first"));
    assert_eq!(seen[1], SessionEffect::Frame(json!({"op": 0, "id": "a"})));
    assert_eq!(seen[2], pong(b"second"));
    assert_eq!(seen.iter().filter(|seen| matches!(seen, SessionEffect::Pong(_))).count(), 2, "{seen:?}");
    assert!(client.session.has_ended());
}
