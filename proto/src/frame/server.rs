//! What the server says.

use serde_json::value::RawValue;

use super::{Format, op};
use crate::http::{Occupancy, OccupancySource};
use crate::msgpack;
use crate::writer::{Object, write_array};

/// A frame of the server, other than message (see [`encode_messages`]), presence ([`encode_presence`]) and sync
/// ([`SyncPage`]).
#[derive(Debug, Clone)]
pub enum ServerFrame<'a> {
    Heartbeat {
        id: Option<&'a str>,
    },
    /// `serials`: one per message of a publish.
    Ack {
        id: &'a str,
        serials: Option<&'a [String]>,
    },
    Nack {
        id: &'a str,
        error: &'a str,
        code: u32,
        reason: Option<&'a str>,
    },
    Connected(Connected<'a>),
    Disconnected {
        error: Option<&'a str>,
        code: u32,
        /// Names a ceiling.
        reason: Option<&'a str>,
        reconnect_after_ms: u64,
    },
    Closed,
    /// Without a channel the connection is over.
    Error {
        error: &'a str,
        code: u32,
        channel: Option<&'a str>,
    },
    Attached(Attached<'a>),
    Detached {
        id: Option<&'a str>,
        channel: &'a str,
        error: Option<&'a str>,
        code: Option<u32>,
    },
    /// How many are at a channel, for a client that has asked at its attach.
    Occupancy {
        channel: &'a str,
        occupancy: Occupancy,
        source: OccupancySource,
    },
    /// Asks for a fresh token; `expires` in epoch milliseconds.
    AuthRequired {
        code: u32,
        expires: u64,
    },
}

/// Times in epoch milliseconds.
#[derive(Debug, Clone)]
pub struct Connected<'a> {
    pub connection_id: &'a str,
    pub connection_key: &'a str,
    pub client_id: Option<&'a str>,
    pub node_id: &'a str,
    pub resumed: bool,
    pub heartbeat_ms: u64,
    pub resume_window_ms: u64,
    pub max_message_bytes: usize,
    pub expires: Option<u64>,
    pub server_time: u64,
}

#[derive(Debug, Clone)]
pub struct Attached<'a> {
    pub id: Option<&'a str>,
    pub channel: &'a str,
    pub serial: &'a str,
    pub resumed: bool,
    /// A sync follows.
    pub presence: bool,
    pub modes: &'a [&'a str],
    pub warning: Option<&'a str>,
}

/// One message of op 13.
#[derive(Debug, Clone, Copy)]
pub struct MessageOut<'a> {
    pub id: &'a str,
    pub name: Option<&'a str>,
    pub data: Option<&'a RawValue>,
    pub extras: Option<&'a RawValue>,
}

/// The payload of a frame: `op` first, compact, absent fields left out.
pub fn encode(frame: &ServerFrame<'_>, format: Format) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    write(frame, &mut Object::begin(&mut out));
    match format {
        Format::Json => out,
        Format::MsgPack => msgpack::from_json(std::str::from_utf8(&out).expect("only UTF-8 is written")),
    }
}

fn write(frame: &ServerFrame<'_>, object: &mut Object<'_>) {
    match frame {
        ServerFrame::Heartbeat { id } => object.number("op", op::HEARTBEAT).text_if("id", *id),
        ServerFrame::Ack { id, serials } => {
            object.number("op", op::ACK).text("id", id);
            if let Some(serials) = serials {
                object.texts("serials", serials);
            }
            object
        }
        ServerFrame::Nack { id, error, code, reason } => {
            object.number("op", op::NACK).text("id", id).text("error", error);
            object.number("code", code).text_if("reason", *reason)
        }
        ServerFrame::Connected(connected) => write_connected(connected, object),
        ServerFrame::Disconnected { error, code, reason, reconnect_after_ms } => {
            object.number("op", op::DISCONNECTED).text_if("error", *error);
            object
                .number("code", code)
                .text_if("reason", *reason)
                .number("reconnectAfterMs", reconnect_after_ms)
        }
        ServerFrame::Closed => object.number("op", op::CLOSED),
        ServerFrame::Error { error, code, channel } => object
            .number("op", op::ERROR)
            .text("error", error)
            .number("code", code)
            .text_if("channel", *channel),
        ServerFrame::Attached(attached) => write_attached(attached, object),
        ServerFrame::Detached { id, channel, error, code } => {
            object.number("op", op::DETACHED).text_if("id", *id).text("channel", channel);
            object.text_if("error", *error).number_if("code", *code)
        }
        ServerFrame::Occupancy { channel, occupancy, source } => {
            object.number("op", op::OCCUPANCY).text("channel", channel);
            Object::begin(object.field("occupancy"))
                .number("connections", occupancy.connections)
                .number("publishers", occupancy.publishers)
                .number("subscribers", occupancy.subscribers)
                .number("members", occupancy.members)
                .end();
            object.text("source", source.as_str())
        }
        ServerFrame::AuthRequired { code, expires } => {
            object.number("op", op::AUTH).number("code", code).number("expires", expires)
        }
    }
    .end();
}

fn write_connected<'o, 'v>(connected: &Connected<'_>, object: &'o mut Object<'v>) -> &'o mut Object<'v> {
    object
        .number("op", op::CONNECTED)
        .text("connectionId", connected.connection_id)
        .text("connectionKey", connected.connection_key)
        .text_if("clientId", connected.client_id)
        .text("nodeId", connected.node_id)
        .flag("resumed", connected.resumed)
        .number("heartbeatMs", connected.heartbeat_ms)
        .number("resumeWindowMs", connected.resume_window_ms)
        .number("maxMessageBytes", connected.max_message_bytes)
        .number_if("expires", connected.expires)
        .number("serverTime", connected.server_time)
}

fn write_attached<'o, 'v>(attached: &Attached<'_>, object: &'o mut Object<'v>) -> &'o mut Object<'v> {
    object
        .number("op", op::ATTACHED)
        .text_if("id", attached.id)
        .text("channel", attached.channel)
        .text("serial", attached.serial)
        .flag("resumed", attached.resumed)
        .flag("presence", attached.presence)
        .texts("modes", attached.modes)
        .text_if("warning", attached.warning)
}

/// Appends the JSON text of op 13; `timestamp` in epoch milliseconds. For MessagePack see [`msgpack::from_json`].
pub fn encode_messages<'m>(
    channel: &str,
    serial: &str,
    timestamp: u64,
    connection_id: &str,
    client_id: Option<&str>,
    messages: impl Iterator<Item = MessageOut<'m>>,
    out: &mut Vec<u8>,
) {
    let mut frame = Object::begin(out);
    frame.number("op", op::MESSAGE).text("channel", channel).text("serial", serial);
    write_array(frame.field("messages"), messages, |out, message| {
        encode_message(&message, timestamp, connection_id, client_id, out);
    });
    frame.end();
}

/// Appends one message of op 13.
pub fn encode_message(
    message: &MessageOut<'_>,
    timestamp: u64,
    connection_id: &str,
    client_id: Option<&str>,
    out: &mut Vec<u8>,
) {
    Object::begin(out)
        .text("id", message.id)
        .text_if("name", message.name)
        .raw_if("data", message.data)
        .raw_if("extras", message.extras)
        .text_if("clientId", client_id)
        .text("connectionId", connection_id)
        .number("timestamp", timestamp)
        .end();
}

/// Appends the JSON text of op 13 around messages that [`encode_message`] wrote.
pub fn encode_written<'m>(
    channel: &str,
    serial: &str,
    messages: impl Iterator<Item = &'m [u8]>,
    out: &mut Vec<u8>,
) {
    let mut frame = Object::begin(out);
    frame.number("op", op::MESSAGE).text("channel", channel).text("serial", serial);
    write_array(frame.field("messages"), messages, |out, message| out.extend_from_slice(message));
    frame.end();
}

/// One presence event of op 12; `timestamp` in epoch milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct PresenceOut<'a> {
    pub action: &'a str,
    pub client_id: &'a str,
    pub connection_id: &'a str,
    pub data: Option<&'a RawValue>,
    pub timestamp: u64,
}

/// Appends the JSON text of op 12. For MessagePack see [`msgpack::from_json`].
pub fn encode_presence(channel: &str, serial: &str, event: &PresenceOut<'_>, out: &mut Vec<u8>) {
    let mut frame = Object::begin(out);
    frame.number("op", op::PRESENCE).text("channel", channel).text("serial", serial);
    write_array(frame.field("presence"), [event], |out, event| {
        Object::begin(out)
            .text("action", event.action)
            .text("clientId", event.client_id)
            .text("connectionId", event.connection_id)
            .raw_if("data", event.data)
            .number("timestamp", event.timestamp)
            .end();
    });
    frame.end();
}

/// One member of op 14; `timestamp`, of its last event, in epoch milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct MemberOut<'a> {
    pub client_id: &'a str,
    pub connection_id: &'a str,
    pub data: Option<&'a RawValue>,
    pub timestamp: u64,
}

/// The JSON text of op 14 being written, member by member, up to a size.
#[derive(Debug)]
pub struct SyncPage {
    out: Vec<u8>,
    bytes_max: usize,
    members: usize,
}

impl SyncPage {
    /// Room for what follows the last member.
    const END_BYTES: usize = "],\"more\":false}".len();

    /// `out` may hold bytes before the text, which do not count.
    pub fn begin(mut out: Vec<u8>, channel: &str, bytes_max: usize) -> Self {
        let bytes_max = out.len() + bytes_max;
        Object::begin(&mut out).number("op", op::SYNC).text("channel", channel).field("members").push(b'[');
        Self { out, bytes_max, members: 0 }
    }

    /// False, and nothing is written, when the page is full. The first member always has room.
    pub fn push(&mut self, member: &MemberOut<'_>) -> bool {
        let before = self.out.len();
        if self.members > 0 {
            self.out.push(b',');
        }
        Object::begin(&mut self.out)
            .text("clientId", member.client_id)
            .text("connectionId", member.connection_id)
            .raw_if("data", member.data)
            .number("timestamp", member.timestamp)
            .end();
        if self.members > 0 && self.out.len() + Self::END_BYTES > self.bytes_max {
            self.out.truncate(before);
            return false;
        }
        self.members += 1;
        true
    }

    pub fn end(mut self, more: bool) -> Vec<u8> {
        self.out.extend_from_slice(if more { b"],\"more\":true}" } else { b"],\"more\":false}" });
        self.out
    }
}
