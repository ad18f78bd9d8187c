//! Frames of the server, as a node writes them.

use serde_json::value::RawValue;

use super::{Format, op};
use crate::http::{Occupancy, OccupancySource};
use crate::msgpack;
use crate::writer::{Object, write_array};

/// A frame of the server, other than messages ([`encode_messages`]), presence ([`encode_presence`]) and
/// members ([`SyncPage`]).
#[derive(Debug, Clone)]
pub enum ServerFrame<'a> {
    /// Sign of life, or answer to a heartbeat with an id (op 0).
    Heartbeat {
        /// Id of the client's heartbeat.
        id: Option<&'a str>,
    },
    /// Answer to a request that is carried out (op 1).
    Ack {
        /// Id of the request.
        id: &'a str,
        /// Serial of each message of a publish, in their order; `None` for other requests.
        serials: Option<&'a [String]>,
    },
    /// Answer to a request that is refused (op 2).
    Nack {
        /// Id of the request.
        id: &'a str,
        /// Sentence for a person.
        error: &'a str,
        /// Number of the error, one of [`code`](super::code).
        code: u32,
        /// Name of the limit that was reached, such as `channel_limit`.
        reason: Option<&'a str>,
    },
    /// Beginning of the connection, or answer to a new token (op 3).
    Connected(Connected<'a>),
    /// Notice before a close: the client may connect again (op 4).
    Disconnected {
        /// Sentence for a person.
        error: Option<&'a str>,
        /// Number of the error, one of [`code`](super::code).
        code: u32,
        /// Name of the limit that was reached, such as `connection_limit`.
        reason: Option<&'a str>,
        /// Milliseconds after which the client connects again.
        reconnect_after_ms: u64,
    },
    /// Answer to a close (op 6).
    Closed,
    /// Error on a channel, or without a channel the end of the connection (op 7).
    Error {
        /// Sentence for a person.
        error: &'a str,
        /// Number of the error, one of [`code`](super::code).
        code: u32,
        /// Channel name; `None`: the connection ends.
        channel: Option<&'a str>,
    },
    /// Answer to an attach, or notice of a change (op 9).
    Attached(Attached<'a>),
    /// Answer to a detach, or notice that delivery has ended (op 11).
    Detached {
        /// Id of the request; `None`: a notice.
        id: Option<&'a str>,
        /// Channel name.
        channel: &'a str,
        /// Sentence for a person, in a notice.
        error: Option<&'a str>,
        /// Number of the error, in a notice.
        code: Option<u32>,
    },
    /// Numbers of connections and members at a channel, for a client whose attach asks for them (op 16).
    Occupancy {
        /// Channel name.
        channel: &'a str,
        /// The numbers.
        occupancy: Occupancy,
        /// Nodes whose connections are counted.
        source: OccupancySource,
    },
    /// Request for a new token (op 15).
    AuthRequired {
        /// Number of the error, one of [`code`](super::code).
        code: u32,
        /// End of the present token, in epoch milliseconds.
        expires: u64,
    },
}

/// The fields of op 3.
#[derive(Debug, Clone)]
pub struct Connected<'a> {
    /// Connection id, `c_` and 22 base64url characters.
    pub connection_id: &'a str,
    /// Secret by which the client resumes the connection.
    pub connection_key: &'a str,
    /// Client id of the connection; `None` if it has none.
    pub client_id: Option<&'a str>,
    /// Name of the node in the cluster.
    pub node_id: &'a str,
    /// Whether the connection is the former one.
    pub resumed: bool,
    /// Rhythm of heartbeats of both sides, in milliseconds.
    pub heartbeat_ms: u64,
    /// Milliseconds after a lost connection in which it can be resumed.
    pub resume_window_ms: u64,
    /// Greatest size of a message: the JSON texts of name, data, extras and client id, in bytes.
    pub max_message_bytes: usize,
    /// End of the token, in epoch milliseconds; `None` for a credential without an end.
    pub expires: Option<u64>,
    /// Clock of the node, in epoch milliseconds.
    pub server_time: u64,
}

/// The fields of op 9.
#[derive(Debug, Clone)]
pub struct Attached<'a> {
    /// Id of the request; `None`: a notice.
    pub id: Option<&'a str>,
    /// Channel name.
    pub channel: &'a str,
    /// Channel position at which delivery begins.
    pub serial: &'a str,
    /// Whether no message is missing since the client's serial.
    pub resumed: bool,
    /// Whether a list of members follows (op 14).
    pub presence: bool,
    /// Modes that are granted: of `subscribe`, `publish` and `presence`.
    pub modes: &'a [&'a str],
    /// Sentence for a person about what the attach did not get.
    pub warning: Option<&'a str>,
}

/// The part of a message that differs within a publish, for op 13.
#[derive(Debug, Clone, Copy)]
pub struct MessageOut<'a> {
    /// Message id.
    pub id: &'a str,
    /// Kind of event.
    pub name: Option<&'a str>,
    /// JSON text as published; `None` if it was left out.
    pub data: Option<&'a RawValue>,
    /// JSON object as published; `None` if it was left out.
    pub extras: Option<&'a RawValue>,
}

/// Writes the payload of a frame: `op` first, compact, without absent fields.
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

/// Appends the JSON text of op 13; `timestamp` is in epoch milliseconds. [`msgpack::from_json`] makes
/// MessagePack of it.
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

/// Appends the JSON text of one message of op 13; `timestamp` is in epoch milliseconds.
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

/// Appends the JSON text of op 13 around messages that [`encode_message`] has written.
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

/// One presence event of op 12.
#[derive(Debug, Clone, Copy)]
pub struct PresenceOut<'a> {
    /// `enter`, `update` or `leave`.
    pub action: &'a str,
    /// Client id of the member.
    pub client_id: &'a str,
    /// Connection id of the member.
    pub connection_id: &'a str,
    /// JSON text of the member; `None` if it has none.
    pub data: Option<&'a RawValue>,
    /// Time of the event, in epoch milliseconds.
    pub timestamp: u64,
}

/// Appends the JSON text of op 12. [`msgpack::from_json`] makes MessagePack of it.
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

/// One presence member of op 14.
#[derive(Debug, Clone, Copy)]
pub struct MemberOut<'a> {
    /// Client id of the member.
    pub client_id: &'a str,
    /// Connection id of the member.
    pub connection_id: &'a str,
    /// JSON text of the member; `None` if it has none.
    pub data: Option<&'a RawValue>,
    /// Time of the member's last event, in epoch milliseconds.
    pub timestamp: u64,
}

/// Writer of the JSON text of op 14, member by member up to a size.
#[derive(Debug)]
pub struct SyncPage {
    out: Vec<u8>,
    bytes_max: usize,
    members: usize,
}

impl SyncPage {
    /// Bytes that follow the last member.
    const END_BYTES: usize = "],\"more\":false}".len();

    /// Begins a page of at most `bytes_max` bytes behind the bytes of `out`, which do not count.
    pub fn begin(mut out: Vec<u8>, channel: &str, bytes_max: usize) -> Self {
        let bytes_max = out.len() + bytes_max;
        Object::begin(&mut out).number("op", op::SYNC).text("channel", channel).field("members").push(b'[');
        Self { out, bytes_max, members: 0 }
    }

    /// Appends a member. Gives `false` and writes nothing if the page is full; the first member always has
    /// room.
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

    /// Ends the page and gives all bytes. `more` says whether further pages follow.
    pub fn end(mut self, more: bool) -> Vec<u8> {
        self.out.extend_from_slice(if more { b"],\"more\":true}" } else { b"],\"more\":false}" });
        self.out
    }
}
