//! Every socket frame, byte for byte, in both formats.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use fanfare_proto::frame::{
    Attached, Body, Connected, Format, MemberOut, MessageOut, PresenceIn, PresenceOut, ServerFrame, SyncPage,
    encode, encode_messages, encode_presence, encode_request, parse, parse_server,
};
use fanfare_proto::http::{Occupancy, OccupancySource};
use fanfare_proto::msgpack;
use serde_json::value::RawValue;

const CONNECTION: &str = "c_AAAAAAAAAAAAAAAAAAAAAA";
const NOW: u64 = 1_764_000_000_000;

struct Sample {
    name: &'static str,
    json: &'static str,
    msgpack: Vec<u8>,
}

fn samples(file: &'static str) -> Vec<Sample> {
    let read = |block: &'static str| {
        let [name, json, hex] = block.lines().collect::<Vec<_>>().try_into().unwrap();
        Sample { name, json, msgpack: bytes(hex) }
    };
    file.trim_end().split("\n\n").map(read).collect()
}

fn bytes(hex: &str) -> Vec<u8> {
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

fn server_samples() -> Vec<Sample> {
    samples(include_str!("samples/server.txt"))
}

fn client_samples() -> Vec<Sample> {
    samples(include_str!("samples/client.txt"))
}

fn connected() -> Connected<'static> {
    Connected {
        connection_id: CONNECTION,
        connection_key: "sealed",
        client_id: Some("alice"),
        node_id: "n1",
        resumed: false,
        heartbeat_ms: 15_000,
        resume_window_ms: 120_000,
        max_message_bytes: 65_536,
        expires: Some(NOW + 3_600_000),
        server_time: NOW,
    }
}

fn attached() -> Attached<'static> {
    Attached {
        id: Some("5"),
        channel: "a:b",
        serial: "0",
        resumed: true,
        presence: false,
        modes: &["subscribe", "publish"],
        warning: None,
    }
}

/// The server frames but messages, presence and sync, by the names of their samples.
fn server_frame<'a>(name: &str, serials: &'a [String]) -> Option<ServerFrame<'a>> {
    let taken = "capability was taken away";
    Some(match name {
        "heartbeat" => ServerFrame::Heartbeat { id: None },
        "heartbeat-answer" => ServerFrame::Heartbeat { id: Some("h1") },
        "ack" => ServerFrame::Ack { id: "1", serials: None },
        "ack-serials" => ServerFrame::Ack { id: "2", serials: Some(serials) },
        "nack" => ServerFrame::Nack { id: "3", error: "channel is missing", code: 40000, reason: None },
        "nack-reason" => {
            let (error, reason) = ("too many \"publishes\"", Some("rate_limit"));
            ServerFrame::Nack { id: "4", error, code: 42900, reason }
        }
        "connected" => ServerFrame::Connected(connected()),
        "connected-anonymous" => {
            ServerFrame::Connected(Connected { client_id: None, expires: None, resumed: true, ..connected() })
        }
        "disconnected" => {
            ServerFrame::Disconnected { error: None, code: 50003, reason: None, reconnect_after_ms: 2500 }
        }
        "disconnected-error" => {
            let error = Some("token expired");
            ServerFrame::Disconnected { error, code: 40142, reason: None, reconnect_after_ms: 0 }
        }
        "disconnected-reason" => {
            let (error, reason) = (Some("too many connections"), Some("connection_limit"));
            ServerFrame::Disconnected { error, code: 42900, reason, reconnect_after_ms: 3000 }
        }
        "closed" => ServerFrame::Closed,
        "error" => ServerFrame::Error { error: "frame is not an object", code: 40000, channel: None },
        "error-channel" => ServerFrame::Error { error: taken, code: 40160, channel: Some("a:b") },
        "attached" => ServerFrame::Attached(attached()),
        "attached-unasked" => ServerFrame::Attached(Attached {
            id: None,
            channel: "zürich",
            serial: "AAAAAAAB.zz",
            resumed: false,
            presence: true,
            modes: &[],
            warning: Some("rewind was cut"),
        }),
        "detached" => ServerFrame::Detached { id: Some("6"), channel: "a:b", error: None, code: None },
        "detached-unasked" => {
            ServerFrame::Detached { id: None, channel: "a:b", error: Some(taken), code: Some(40160) }
        }
        "occupancy" => {
            let occupancy = Occupancy { connections: 300, publishers: 4, subscribers: 299, members: 0 };
            ServerFrame::Occupancy { channel: "a:b", occupancy, source: OccupancySource::Cluster }
        }
        "occupancy-node" => ServerFrame::Occupancy {
            channel: "zürich",
            occupancy: Occupancy { connections: 1, publishers: 1, subscribers: 0, members: 2 },
            source: OccupancySource::Node,
        },
        "auth-required" => ServerFrame::AuthRequired { code: 40142, expires: NOW + 3_600_000 },
        _ => return None,
    })
}

fn message_frame(name: &str) -> Option<String> {
    let data = RawValue::from_string(r#"{"text":"hi","n":[1,-1,1.5,true,null]}"#.into()).unwrap();
    let extras = RawValue::from_string(r#"{"tag":"x"}"#.into()).unwrap();
    let null = RawValue::from_string("null".into()).unwrap();
    let first =
        MessageOut { id: "m1", name: Some("greeting \u{1}\n"), data: Some(&data), extras: Some(&extras) };
    let second = MessageOut { id: "m2", name: None, data: Some(&null), extras: None };
    let smallest = MessageOut { id: "m3", name: None, data: None, extras: None };
    let mut out = Vec::new();
    match name {
        "message" => {
            let messages = [first, second].into_iter();
            encode_messages("a:b", "AAAAAAAB.2", NOW, CONNECTION, Some("alice"), messages, &mut out);
        }
        "message-smallest" => {
            let messages = [smallest].into_iter();
            encode_messages("a:b", "AAAAAAAB.3", NOW, CONNECTION, None, messages, &mut out);
        }
        _ => return None,
    }
    Some(String::from_utf8(out).unwrap())
}

fn presence_frame(name: &str) -> Option<String> {
    let data = RawValue::from_string(r#"{"n":[1,1.5,null]}"#.into()).unwrap();
    let null = RawValue::from_string("null".into()).unwrap();
    let enter = PresenceOut {
        action: "enter",
        client_id: "alice",
        connection_id: CONNECTION,
        data: Some(&data),
        timestamp: NOW,
    };
    let leave = PresenceOut { action: "leave", client_id: "b\"b", data: None, ..enter };
    let alice =
        MemberOut { client_id: "alice", connection_id: CONNECTION, data: Some(&null), timestamp: NOW };
    let bob = MemberOut { client_id: "bob", data: None, timestamp: NOW + 1, ..alice };
    let mut out = Vec::new();
    match name {
        "presence" => encode_presence("a:b", "AAAAAAAB.2", &enter, &mut out),
        "presence-smallest" => encode_presence("a:b", "0", &leave, &mut out),
        "sync" => {
            let mut page = SyncPage::begin(out, "a:b", 1024);
            assert!(page.push(&alice) && page.push(&bob));
            out = page.end(true);
        }
        "sync-empty" => out = SyncPage::begin(out, "zürich", 1024).end(false),
        _ => return None,
    }
    Some(String::from_utf8(out).unwrap())
}

#[test]
fn a_page_of_members_keeps_its_size_and_takes_at_least_one() {
    let data = RawValue::from_string(format!("\"{}\"", "x".repeat(100))).unwrap();
    let member = MemberOut { client_id: "ann", connection_id: CONNECTION, data: Some(&data), timestamp: NOW };
    for bytes_max in [1, 300, 600, 601, 602, 5_000] {
        let mut page = SyncPage::begin(vec![0; 10], "a:b", bytes_max);
        let mut members = 0;
        while members < 100 && page.push(&member) {
            members += 1;
        }
        let text = page.end(false);
        let incoming = parse_server(Format::Json, &text[10..]).unwrap();
        assert_eq!((incoming.members.len(), incoming.more), (members, Some(false)));
        assert!(members == 1 || text.len() - 10 <= bytes_max, "{members} members in {bytes_max}");
        assert!(members >= 1 && (members + 2) * 200 > bytes_max.min(20_000), "{members} in {bytes_max}");
    }
}

#[test]
fn clients_read_every_field_of_presence() {
    let samples = server_samples();
    let read = |name: &str| {
        let sample = samples.iter().find(|sample| sample.name == name).unwrap();
        parse_server(Format::Json, sample.json.as_bytes()).unwrap()
    };
    let incoming = read("presence");
    let events: Vec<PresenceIn> = serde_json::from_str(incoming.presence.unwrap().get()).unwrap();
    let [event] = events.try_into().unwrap();
    assert_eq!((event.action.as_str(), event.client_id.as_str()), ("enter", "alice"));
    assert_eq!((event.connection_id.as_str(), event.timestamp), (CONNECTION, NOW));
    assert_eq!(event.data.unwrap().get(), r#"{"n":[1,1.5,null]}"#);
    let incoming = read("sync");
    assert_eq!((incoming.more, incoming.members[1].data.is_none()), (Some(true), true));
    let alice = &incoming.members[0];
    assert_eq!((alice.client_id.as_str(), alice.timestamp), ("alice", NOW));
    assert_eq!(alice.data.as_ref().unwrap().get(), "null");
}

#[test]
fn server_frames_are_written_as_sampled() {
    let serials = ["AAAAAAAB.1".to_owned(), "AAAAAAAB.2".to_owned()];
    for sample in server_samples() {
        let Sample { name, json, msgpack } = sample;
        if let Some(frame) = server_frame(name, &serials) {
            assert_eq!(String::from_utf8(encode(&frame, Format::Json)).unwrap(), json, "{name}");
            assert_eq!(encode(&frame, Format::MsgPack), msgpack, "{name}");
        } else {
            let text = message_frame(name)
                .or_else(|| presence_frame(name))
                .unwrap_or_else(|| panic!("nothing makes {name}"));
            assert_eq!(text, json, "{name}");
            assert_eq!(msgpack::from_json(&text), msgpack, "{name}");
        }
    }
}

#[test]
fn clients_read_server_frames_alike_in_both_formats() {
    for Sample { name, json, msgpack } in server_samples() {
        let from_json = parse_server(Format::Json, json.as_bytes()).unwrap();
        let from_msgpack = parse_server(Format::MsgPack, &msgpack).unwrap();
        assert_eq!(format!("{from_json:?}"), format!("{from_msgpack:?}"), "{name}");
    }
}

#[test]
fn clients_read_every_field_of_a_message() {
    let samples = server_samples();
    let sample = samples.iter().find(|sample| sample.name == "message").unwrap();
    let incoming = parse_server(Format::Json, sample.json.as_bytes()).unwrap();
    assert_eq!((incoming.op, incoming.channel.as_deref()), (13, Some("a:b")));
    assert_eq!(incoming.serial.as_deref(), Some("AAAAAAAB.2"));
    let [first, second] = incoming.messages.try_into().unwrap();
    assert_eq!((first.id.as_str(), first.name.as_deref()), ("m1", Some("greeting \u{1}\n")));
    assert_eq!(first.data.unwrap().get(), r#"{"text":"hi","n":[1,-1,1.5,true,null]}"#);
    assert_eq!(first.extras.unwrap().get(), r#"{"tag":"x"}"#);
    assert_eq!((first.client_id.as_deref(), first.connection_id.as_str()), (Some("alice"), CONNECTION));
    assert_eq!(first.timestamp, NOW);
    assert_eq!(second.data.unwrap().get(), "null");
}

#[test]
fn client_frames_are_read_and_written_as_sampled() {
    for Sample { name, json, msgpack } in client_samples() {
        for (format, payload) in [(Format::Json, json.as_bytes()), (Format::MsgPack, msgpack.as_slice())] {
            let request = parse(format, payload, 64).unwrap_or_else(|error| panic!("{name}: {error}"));
            assert_eq!(String::from_utf8(encode_request(&request, Format::Json)).unwrap(), json, "{name}");
            assert_eq!(encode_request(&request, Format::MsgPack), msgpack, "{name}");
        }
    }
}

#[test]
fn every_client_operation_is_distinguished() {
    let kinds: Vec<_> = client_samples()
        .iter()
        .map(|sample| match parse(Format::Json, sample.json.as_bytes(), 64).unwrap().body {
            Body::Heartbeat => "heartbeat",
            Body::Close => "close",
            Body::Attach(_) => "attach",
            Body::Detach { .. } => "detach",
            Body::Presence(_) => "presence",
            Body::Message { .. } => "message",
            Body::Auth { .. } => "auth",
            Body::Unknown { op } => {
                assert_eq!(op, 99);
                "unknown"
            }
        })
        .collect();
    for (kind, sample) in kinds.iter().zip(client_samples()) {
        assert!(sample.name.starts_with(kind), "{} was read as {kind}", sample.name);
    }
}
