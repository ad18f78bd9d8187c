//! RFC 6455 on the order of control frames, on closes, and on the time at which invalid text is refused.

use fanfare_cluster_tests::raw::{self, CLOSE, CONTINUATION, FIN, Frame, PING, PONG, Raw, TEXT};
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket, http};
use serde_json::{Value, json};

async fn node() -> Node {
    Node::start(NodeOptions::default()).await
}

/// Reads the next frame: its opcode and text.
async fn next(socket: &mut Socket) -> (u8, String) {
    let Frame { opcode, payload, .. } = socket.raw().frame(SOON).await.expect("a frame");
    (opcode, String::from_utf8_lossy(&payload).into_owned())
}

/// Reads until the close; gives the opcodes of the frames and the close code. After it the connection must end.
async fn closed(socket: &mut Socket) -> (Vec<u8>, Option<u16>) {
    let mut opcodes = Vec::new();
    loop {
        let frame = socket.raw().frame(SOON).await.expect("a frame before the end");
        opcodes.push(frame.opcode);
        if frame.opcode == CLOSE {
            assert_eq!(socket.raw().frame(SOON).await, Err(raw::End::Gone), "the close is the last frame");
            return (opcodes, frame.close_code());
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pongs_and_answers_come_in_the_order_of_one_read() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let heartbeat = |id: &str| json!({"op": 0, "id": id}).to_string();
    let whole = heartbeat("in fragments");
    let bytes = [
        raw::frame(FIN | PING, b"one"),
        raw::frame(FIN | TEXT, heartbeat("first").as_bytes()),
        raw::frame(FIN | PING, b"two"),
        raw::frame(TEXT, &whole.as_bytes()[..9]),
        raw::frame(FIN | PING, b"three"),
        raw::frame(FIN | CONTINUATION, &whole.as_bytes()[9..]),
        raw::frame(FIN | PING, b"four"),
    ];
    socket.raw().write(&bytes.concat()).await;
    let expected = [
        (PONG, "one".to_owned()),
        (TEXT, r#"{"op":0,"id":"first"}"#.to_owned()),
        (PONG, "two".to_owned()),
        (PONG, "three".to_owned()),
        (TEXT, r#"{"op":0,"id":"in fragments"}"#.to_owned()),
        (PONG, "four".to_owned()),
    ];
    for expected_frame in expected {
        assert_eq!(next(&mut socket).await, expected_frame);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_answered_after_the_close_of_the_node() {
    let node = node().await;
    let ping = raw::frame(FIN | PING, b"late");
    let heartbeat = raw::frame(FIN | TEXT, br#"{"op":0,"id":"late"}"#);
    let broken = raw::frame(FIN | 0x40 | TEXT, b"{}");
    let close = raw::frame(FIN | CLOSE, &1000_u16.to_be_bytes());
    let goodbye = raw::frame(FIN | TEXT, br#"{"op":5}"#);
    for (end, opcodes, code) in [
        (broken, vec![PONG, TEXT, CLOSE], 1002),
        (close, vec![PONG, CLOSE], 1000),
        (goodbye, vec![PONG, TEXT, CLOSE], 1000),
    ] {
        let mut socket = Socket::open(&node, "").await;
        let bytes = [raw::frame(FIN | PING, b"in time"), end, ping.clone(), heartbeat.clone(), ping.clone()];
        socket.raw().write(&bytes.concat()).await;
        assert_eq!(closed(&mut socket).await, (opcodes, Some(code)));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_close_is_answered_with_its_own_code() {
    let node = node().await;
    for code in [1000_u16, 1001, 1003, 1007, 1011, 1014, 3000, 4001, 4999] {
        let mut socket = Socket::open(&node, "").await;
        let payload = [&code.to_be_bytes()[..], b"goodbye"].concat();
        socket.raw().send(FIN | CLOSE, &payload).await;
        assert_eq!(closed(&mut socket).await, (vec![CLOSE], Some(code)));
    }
    let mut socket = Socket::open(&node, "").await;
    socket.raw().send(FIN | CLOSE, b"").await;
    assert_eq!(closed(&mut socket).await, (vec![CLOSE], Some(1000)));
}

/// The node has announced the end of the connection, and gives the client time to close it.
#[tokio::test(flavor = "multi_thread")]
async fn a_close_before_that_of_the_node_is_answered_with_its_code() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    node.terminate();
    let disconnected = socket.find("op 4", |frame: &Value| frame["op"] == 4).await;
    assert_eq!(disconnected["code"], 50003);
    let bytes = [
        raw::frame(FIN | TEXT, br#"{"op":0}"#),
        raw::frame(FIN | PING, b"still there"),
        raw::frame(FIN | CLOSE, &3001_u16.to_be_bytes()),
    ];
    socket.raw().write(&bytes.concat()).await;
    assert_eq!(closed(&mut socket).await, (vec![PONG, CLOSE], Some(3001)));
}

#[tokio::test(flavor = "multi_thread")]
async fn text_that_is_no_utf8_is_refused_when_it_is_seen() {
    let node = node().await;
    let bad = b"{\"op\":0,\"id\":\"\xce\xba\xf4\x90";
    let frame = raw::frame(FIN | TEXT, &[&bad[..], &[b'x'; 100]].concat());
    let cases = [
        (
            "an unfinished message",
            [raw::frame(TEXT, &bad[..15]), raw::frame(CONTINUATION, &bad[15..])].concat(),
        ),
        ("an unfinished frame", frame[..frame.len() - 100].to_vec()),
    ];
    for (case, bytes) in cases {
        let mut socket = Socket::open(&node, "").await;
        socket.raw().write(&bytes).await;
        assert_eq!(closed(&mut socket).await, (vec![TEXT, CLOSE], Some(1007)), "{case}");
    }
    let mut socket = Socket::open(&node, "").await;
    for byte in frame {
        if !socket.raw().write(&[byte]).await {
            break;
        }
    }
    assert_eq!(closed(&mut socket).await.1, Some(1007), "byte by byte");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_subprotocol_fanfare_is_chosen_where_it_is_offered() {
    let node = node().await;
    let authorization = http::basic(&node.key());
    for (offered, is_chosen) in [
        (vec![], false),
        (vec!["fanfare"], true),
        (vec!["chat, fanfare"], true),
        (vec!["chat", " fanfare ,superchat"], true),
        (vec!["chat, superchat"], false),
        (vec!["Fanfare", "fanfare2", "not-fanfare"], false),
    ] {
        for is_first in [true, false] {
            let mut raw = Raw::connect(node.addr()).await;
            if !is_first {
                raw.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
                assert_eq!(raw.response(SOON).await.expect("an answer").0, 200);
            }
            let mut headers = vec![("authorization", authorization.as_str())];
            headers.extend(offered.iter().map(|offer| ("sec-websocket-protocol", *offer)));
            let (status, head) = raw.upgrade("/realtime", &headers).await;
            assert_eq!(status, 101, "{head}");
            let chosen = head.contains("\r\nsec-websocket-protocol: fanfare\r\n");
            assert_eq!(chosen, is_chosen, "{offered:?}: {head}");
            assert_eq!(head.matches("sec-websocket-protocol").count(), usize::from(is_chosen), "{head}");
            Socket::upgraded(raw, false).await;
        }
    }
}
