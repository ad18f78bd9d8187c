//! Hostile bytes: each gets its code, and none crashes the node, blocks others or makes it grow.

use std::time::Duration;

use fanfare_cluster_tests::raw::{self, BINARY, CONTINUATION, End, FIN, PING, Raw, TEXT};
use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::{Node, NodeOptions, SOON, http, node, wait_until};
use serde_json::json;

const MIB: u64 = 1024 * 1024;
/// Greatest growth of a node's memory after hostile input, allocator and warm-up included.
const GROWTH_BYTES_MAX: u64 = 32 * MIB;

#[tokio::test(flavor = "multi_thread")]
async fn frames_that_break_the_protocol_get_their_close_code() {
    let node = Node::start(NodeOptions::default()).await;
    let before = node.resident_bytes();
    let fragmented_ping = raw::frame(PING, b"half");
    let long_ping = raw::frame(FIN | PING, &[b'x'; 126]);
    let text_within_text = [raw::frame(TEXT, b"{"), raw::frame(FIN | TEXT, b"{}")].concat();
    let split_bad_utf8 =
        [raw::frame(TEXT, b"{\"op\":\"\xC3"), raw::frame(FIN | CONTINUATION, b"\x28\"}")].concat();
    let cases: Vec<(&str, Vec<u8>, u16)> = vec![
        ("an unmasked frame", raw::unmasked_frame(FIN | TEXT, b"{\"op\":0}"), 1002),
        ("RSV1", raw::frame(FIN | 0x40 | TEXT, b"{\"op\":0}"), 1002),
        ("RSV2", raw::frame(FIN | 0x20 | TEXT, b"{\"op\":0}"), 1002),
        ("RSV3", raw::frame(FIN | 0x10 | TEXT, b"{\"op\":0}"), 1002),
        ("the reserved data opcode 3", raw::frame(FIN | 0x3, b"x"), 1002),
        ("the reserved data opcode 7", raw::frame(FIN | 0x7, b"x"), 1002),
        ("the reserved control opcode 11", raw::frame(FIN | 0xB, b"x"), 1002),
        ("the reserved control opcode 15", raw::frame(FIN | 0xF, b"x"), 1002),
        ("a fragmented control frame", fragmented_ping, 1002),
        ("a control frame of 126 bytes", long_ping, 1002),
        ("a continuation of nothing", raw::frame(FIN | CONTINUATION, b"x"), 1002),
        ("a message within a message", text_within_text, 1002),
        ("a close frame of one byte", raw::frame(FIN | raw::CLOSE, b"x"), 1002),
        ("a close code that must not be sent", raw::frame(FIN | raw::CLOSE, &1005_u16.to_be_bytes()), 1002),
        ("bad UTF-8", raw::frame(FIN | TEXT, b"{\"op\":\"\xFF\"}"), 1007),
        ("bad UTF-8 over a fragment's edge", split_bad_utf8, 1007),
        ("a frame of 524 289 bytes", raw::frame(FIN | TEXT, &vec![b' '; 524_289]), 1009),
        ("a claim of a mebibyte without data", raw::frame_head(FIN | TEXT, MIB), 1009),
        ("a claim of 2^63 - 1 bytes without data", raw::frame_head(FIN | TEXT, u64::MAX >> 1), 1009),
        ("a claim of 2^63 bytes without data", raw::frame_head(FIN | BINARY, 1 << 63), 1002),
        ("a length of two bytes that one would hold", vec![FIN | TEXT, 0xFE, 0, 125, 0, 0, 0, 0], 1002),
        ("a length of eight bytes that two would hold", [&[FIN | TEXT, 0xFF][..], &[0; 12]].concat(), 1002),
        ("not JSON", raw::frame(FIN | TEXT, b"hello"), 1002),
        ("not an object", raw::frame(FIN | TEXT, b"[1]"), 1002),
        ("a binary frame under JSON", raw::frame(FIN | BINARY, b"\x81\xA2op\x00"), 1002),
        ("deep nesting", raw::frame(FIN | TEXT, deep(65).as_bytes()), 1002),
    ];
    for (what, bytes, code) in cases {
        let mut socket = Socket::open(&node, "").await;
        socket.raw().write(&bytes).await;
        let (frames, ended) = socket.to_end(SOON).await;
        assert_eq!(ended, SocketEnd::Closed(code), "{what}");
        let last = frames.last();
        assert!(last.is_some_and(|frame| frame["op"] == 7 && frame["code"] == 40000), "{what}: {last:?}");
        assert_eq!(socket.raw().end(SOON).await, End::Gone, "{what}: the connection is ended");
        node.assert_well().await;
    }
    node::wait_until_small(&node, before + GROWTH_BYTES_MAX).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn fragments_are_bounded_in_number_and_size() {
    let node = Node::start(NodeOptions::default()).await;
    let before = node.resident_bytes();

    let mut socket = Socket::open(&node, "").await;
    let heartbeat = b"{\"op\":0,\"id\":\"whole\"}";
    socket.raw().send(TEXT, &heartbeat[..1]).await;
    for byte in &heartbeat[1..heartbeat.len() - 1] {
        socket.raw().send(CONTINUATION, &[*byte]).await;
    }
    socket.raw().send(FIN | CONTINUATION, b"}").await;
    assert_eq!(socket.next().await, json!({"op": 0, "id": "whole"}), "some fragments are fine");

    socket.raw().send(TEXT, b"{").await;
    for _ in 0..64 {
        socket.raw().send(CONTINUATION, b" ").await;
    }
    assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Closed(1009), "the 65th fragment");

    let mut socket = Socket::open(&node, "").await;
    socket.raw().send(TEXT, &vec![b' '; 300_000]).await;
    socket.raw().send(CONTINUATION, &vec![b' '; 300_000]).await;
    assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Closed(1009), "together too big");

    let mut socket = Socket::open(&node, "").await;
    socket.raw().send(TEXT, b"").await;
    for _ in 0..64 {
        socket.raw().send(CONTINUATION, b"").await;
    }
    assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Closed(1009), "empty fragments count too");
    node.assert_well().await;
    node::wait_until_small(&node, before + GROWTH_BYTES_MAX).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_must_be_finished_in_time() {
    let node = Node::start(NodeOptions::default().limit("socket_message_ms", 1_000)).await;
    let mut in_fragments = Socket::open(&node, "").await;
    in_fragments.raw().send(TEXT, b"{").await;
    let mut in_a_frame = Socket::open(&node, "").await;
    in_a_frame.raw().write(&raw::frame_head(FIN | TEXT, 1000)).await;
    in_a_frame.raw().write(b"only this").await;
    let mut in_a_head = Socket::open(&node, "").await;
    in_a_head.raw().write(&[FIN | TEXT]).await;
    for (what, socket) in
        [("fragments", &mut in_fragments), ("a frame", &mut in_a_frame), ("a head", &mut in_a_head)]
    {
        let (_, ended) = socket.to_end(SOON).await;
        assert_eq!(ended, SocketEnd::Closed(1009), "{what}");
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_of_pings_is_ended() {
    let node = Node::start(NodeOptions::default()).await;
    let mut socket = Socket::open(&node, "").await;
    socket.raw().send(FIN | PING, b"hello").await;
    let pong = socket.raw().frame(SOON).await.expect("a pong");
    assert_eq!((pong.opcode, &pong.payload[..]), (raw::PONG, &b"hello"[..]));
    let flood: Vec<u8> = (0..200).flat_map(|_| raw::frame(FIN | PING, b"")).collect();
    socket.raw().write(&flood).await;
    assert_eq!(socket.to_end(SOON).await.1, SocketEnd::Closed(1008));
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn headers_are_bounded_in_time_and_size() {
    let node = Node::start(NodeOptions::default().limit("header_ms", 2_000)).await;
    let before = node.resident_bytes();

    let mut slow = Raw::connect(node.addr()).await;
    slow.write(b"GET /realtime HTTP/1.1\r\nhost: localhost\r\n").await;
    let mut slow_byte_by_byte = Raw::connect(node.addr()).await;
    wait_until(SOON, "a header that drips to be ended", async || !slow_byte_by_byte.write(b"G").await).await;
    let (_, ended) = slow.text_to_end(SOON).await;
    assert_eq!(ended, End::Gone, "a header that is never finished");

    for (what, head) in [("before", "GET /realtime HTTP/1.1\r\n"), ("to HTTP", "GET /health HTTP/1.1\r\n")] {
        let mut huge = Raw::connect(node.addr()).await;
        huge.write(head.as_bytes()).await;
        huge.write(format!("host: localhost\r\nx-filler: {}\r\n\r\n", "x".repeat(64 * 1024)).as_bytes())
            .await;
        let (answer, ended) = huge.text_to_end(SOON).await;
        assert_eq!(ended, End::Gone, "{what}: a huge header");
        assert!(answer.starts_with("HTTP/1.1 431 "), "{what}: {answer}");
    }

    let mut endless = Raw::connect(node.addr()).await;
    endless.write(b"GET /realtime HTTP/1.1\r\n").await;
    wait_until(SOON, "headers without end to be ended", async || !endless.write(&[b'x'; 16 * 1024]).await)
        .await;
    node.assert_well().await;
    node::wait_until_small(&node, before + GROWTH_BYTES_MAX).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_silent_beyond_the_heartbeat_timeout_is_closed() {
    // The timeout is 2 × 500 ms + 10 s.
    let node = Node::start(NodeOptions::default().limit("heartbeat_ms", 500)).await;
    let mut silent = Socket::open(&node, "").await;
    let mut alive = Socket::open(&node, "").await;
    let mut ponging = Socket::open(&node, "?heartbeats=ping").await;
    let started = tokio::time::Instant::now();
    let (mut silent_end, mut pings) = (None, 0);
    wait_until(Duration::from_secs(30), "the silent connection to be ended", async || {
        let beat = alive.next().await;
        assert_eq!(beat, json!({"op": 0}));
        alive.send(&json!({"op": 0})).await;
        while let Ok(frame) = ponging.raw().frame(Duration::from_millis(1)).await {
            assert_eq!(frame.opcode, PING, "{frame:?}");
            ponging.raw().send(FIN | raw::PONG, &frame.payload).await;
            pings += 1;
        }
        match silent.next_within(Duration::from_millis(1)).await {
            Err(SocketEnd::Silence) | Ok(_) => {}
            Err(ended) => silent_end = Some(ended),
        }
        silent_end.is_some()
    })
    .await;
    assert!(started.elapsed() >= Duration::from_secs(10), "not before its time: {:?}", started.elapsed());
    assert!(pings >= 3, "heartbeats as pings: {pings}");
    let answer = alive.ask(json!({"op": 0})).await;
    assert_eq!(answer["op"], 0, "a pong or a frame counts as life");
    ponging.publish("still-here", json!({"data": 1})).await;
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn thousand_silent_connections_are_ended_and_block_no_client() {
    const CONNECTIONS: usize = 1_000;
    let node = Node::start(NodeOptions::default().limit("header_ms", 3_000)).await;
    let before = node.resident_bytes();
    let mut idle = Vec::with_capacity(CONNECTIONS);
    for _ in 0..CONNECTIONS {
        idle.push(Raw::connect(node.addr()).await);
    }
    let mut socket = Socket::open(&node, "").await;
    socket.attach("among-idlers").await;
    socket.publish("among-idlers", json!({"data": "served"})).await;
    let authorization = http::basic(&node.key());
    let history = http::request(
        node.addr(),
        "GET",
        "/api/channels/among-idlers/history",
        &[("authorization", &authorization)],
        "",
    )
    .await;
    assert_eq!(history.json()["messages"][0]["data"], "served");
    let grown = node.resident_bytes().saturating_sub(before);
    assert!(grown < GROWTH_BYTES_MAX, "{CONNECTIONS} idle connections cost {grown} bytes");
    for mut connection in idle {
        assert_eq!(connection.end(SOON).await, End::Gone);
    }
    node.assert_well().await;
    let answer = socket.ask(json!({"op": 0})).await;
    assert_eq!(answer["op"], 0, "who has spoken stays");
}

fn deep(levels: usize) -> String {
    // The frame, the list of messages and the message are levels of their own.
    format!("{{\"op\":13,\"channel\":\"c\",\"data\":{}{}}}", "[".repeat(levels), "]".repeat(levels))
}
