use fanfare_proto::frame::{Format, parse_server};
use fanfare_proto::serial::Serial;
use serde_json::json;
use serde_json::value::RawValue;

use super::*;
use crate::model::ClientId;

fn delivery() -> MessageDelivery {
    let raw = |text: &str| RawValue::from_string(text.to_owned()).unwrap();
    let message = |sequence: u64, data: Option<&str>| Message {
        id: format!("m{sequence}").into(),
        id_given: false,
        sequence,
        name: data.map(|_| "greeting".into()),
        data: data.map(raw),
        extras: data.map(|_| raw(r#"{"headers":{}}"#)),
    };
    let messages = vec![message(7, Some("1.0")), message(8, None)];
    let client_id = Some(ClientId::of("ann"));
    let connection_id = ConnectionId::from_bytes([1; 16]);
    let published =
        PublishedMessages::new(key("a"), 9, NOW_MS, connection_id, client_id, "k".into(), messages);
    MessageDelivery::own(3, ChannelPosition::own(published.last()), published)
}

/// The payload of a frame shorter than 64 KiB, after its head.
fn payload(frame: &[u8], first: u8) -> &[u8] {
    assert_eq!(frame[0], first);
    let (length, head) = match frame[1] {
        126 => (usize::from(u16::from_be_bytes([frame[2], frame[3]])), 4),
        short => (usize::from(short), 2),
    };
    assert_eq!(frame.len(), head + length);
    &frame[head..]
}

#[test]
fn a_text_frame_is_the_message_as_it_was_published() {
    let frame = delivery().frame(Format::Json);
    let text = std::str::from_utf8(payload(&frame, 0x81)).unwrap();
    let connection_id = ConnectionId::from_bytes([1; 16]).to_string();
    let expected = json!({
        "op": 13, "channel": "a", "serial": Serial::single(9, 8).to_string(),
        "messages": [
            {"id": "m7", "name": "greeting", "data": 1.0, "extras": {"headers": {}}, "clientId": "ann",
             "connectionId": connection_id, "timestamp": NOW_MS},
            {"id": "m8", "clientId": "ann", "connectionId": connection_id, "timestamp": NOW_MS},
        ],
    });
    assert_eq!(serde_json::from_str::<serde_json::Value>(text).unwrap(), expected);
    assert!(text.starts_with(r#"{"op":13,"#) && text.contains(r#""data":1.0"#), "{text}");
}

#[test]
fn a_binary_frame_says_the_same() {
    let frame = delivery().frame(Format::MsgPack);
    let incoming = parse_server(Format::MsgPack, payload(&frame, 0x82)).unwrap();
    assert_eq!((incoming.op, incoming.channel.as_deref()), (13, Some("a")));
    assert_eq!(incoming.serial.unwrap(), Serial::single(9, 8).to_string());
    let ids: Vec<&str> = incoming.messages.iter().map(|message| message.id.as_str()).collect();
    assert_eq!(ids, ["m7", "m8"]);
    assert_eq!(incoming.messages[0].data.as_ref().unwrap().get(), "1.0");
}

#[test]
fn each_format_is_encoded_once_and_shared() {
    let delivery = delivery();
    for format in [Format::Json, Format::MsgPack] {
        let (first, second) = (delivery.frame(format), delivery.frame(format));
        assert_eq!(first.as_ptr(), second.as_ptr(), "{format:?}");
    }
    assert_ne!(delivery.frame(Format::Json), delivery.frame(Format::MsgPack));
}

#[test]
fn a_shard_hands_out_a_position_before_what_follows() {
    let (hub, _targets) = hub_of(1, Clock::manual(NOW_MS));
    let (channel, _) = hub.attach(&key("a"), 0);
    let mut subscribers = Subscribers::default();
    let number = channel.number();
    subscribers.add(&channel, Subscriber::new(4, 10));
    assert_eq!(subscribers.delivered_offset(number, 4), Some(10));
    assert_eq!(subscribers.deliver(number, 9).len(), 1);
    assert_eq!(
        subscribers.delivered_offset(number, 4),
        Some(10),
        "what stood before the attach moves nothing"
    );
    subscribers.deliver(number, 12);
    assert_eq!(subscribers.delivered_offset(number, 4), Some(12));
    subscribers.add(&channel, Subscriber::new(5, 14));
    assert_eq!(
        (subscribers.delivered_offset(number, 4), subscribers.delivered_offset(number, 5)),
        (Some(12), Some(14))
    );
    assert_eq!(
        (subscribers.delivered_offset(number, 6), subscribers.delivered_offset(number + 1, 4)),
        (None, None)
    );
    assert!(subscribers.remove(number, 4).is_none(), "one is left");
    assert!(subscribers.remove(number, 4).is_none(), "it was removed");
    assert_eq!(subscribers.remove(number, 5).unwrap().number(), number, "the last one");
    assert!(subscribers.deliver(number, 15).is_empty());
}
