//! The client's side of the socket: writes its requests and reads the server's frames.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Body, Draft, Format, FrameError, Request, op};
use crate::http::Occupancy;
use crate::writer::{Object, write_array};
use crate::{json, msgpack};

/// A frame of the server, with the fields of all kinds. A field that the frame does not have is `None` or
/// empty.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Incoming {
    /// Kind of the frame, one of [`op`](super::op).
    pub op: i64,
    /// Id of the request that the frame answers.
    pub id: Option<String>,
    /// Channel that the frame is about; `None`: the connection.
    pub channel: Option<String>,
    /// Channel position after the frame, for a resume (op 9, 12 and 13).
    pub serial: Option<String>,
    /// Serials of the published messages, in their order (op 1).
    #[serde(default)]
    pub serials: Vec<String>,
    /// Sentence for a person that says what is wrong.
    pub error: Option<String>,
    /// Number of the error, one of [`code`](super::code).
    pub code: Option<u32>,
    /// Name of the limit that was reached, such as `channel_limit`.
    pub reason: Option<String>,
    /// Messages of one publish (op 13).
    #[serde(default)]
    pub messages: Vec<MessageIn>,
    /// Whether the connection is the former one (op 3), or no message of the channel is missing (op 9).
    pub resumed: Option<bool>,
    /// JSON text: whether members follow (op 9), or a list of [`PresenceIn`] (op 12).
    #[serde(default, deserialize_with = "json::present")]
    pub presence: Option<Box<RawValue>>,
    /// Members of one page (op 14).
    #[serde(default)]
    pub members: Vec<MemberIn>,
    /// Whether further pages follow (op 14).
    pub more: Option<bool>,
    /// Modes that are granted: of `subscribe`, `publish` and `presence` (op 9).
    pub modes: Option<Vec<String>>,
    /// Sentence for a person about what the attach did not get (op 9).
    pub warning: Option<String>,
    /// Numbers of connections and members (op 16).
    pub occupancy: Option<Occupancy>,
    /// `cluster` if all nodes are counted, `node` if the answering one alone (op 16).
    pub source: Option<String>,
    /// Connection id, `c_` and 22 base64url characters (op 3).
    pub connection_id: Option<String>,
    /// Secret by which the connection is resumed (op 3).
    pub connection_key: Option<String>,
    /// Client id of the connection; `None` if it has none (op 3).
    pub client_id: Option<String>,
    /// Name of the node in the cluster (op 3).
    pub node_id: Option<String>,
    /// Rhythm of heartbeats of both sides, in milliseconds (op 3).
    pub heartbeat_ms: Option<u64>,
    /// Milliseconds after a lost connection in which it can be resumed (op 3).
    pub resume_window_ms: Option<u64>,
    /// Greatest size of a message: the JSON texts of name, data, extras and client id, in bytes (op 3).
    pub max_message_bytes: Option<usize>,
    /// Milliseconds after which the client connects again (op 4).
    pub reconnect_after_ms: Option<u64>,
    /// End of the token, in epoch milliseconds; `None` for a credential without an end (op 3 and 15).
    pub expires: Option<u64>,
    /// Clock of the node, in epoch milliseconds (op 3).
    pub server_time: Option<u64>,
}

/// One message of op 13.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MessageIn {
    /// Message id, given by the publisher or made by the node.
    pub id: String,
    /// Kind of event, as published.
    pub name: Option<String>,
    /// JSON text as published, which may be `null`; `None` if it was left out.
    #[serde(default, deserialize_with = "json::present")]
    pub data: Option<Box<RawValue>>,
    /// JSON object as published; `None` if it was left out.
    #[serde(default, deserialize_with = "json::present")]
    pub extras: Option<Box<RawValue>>,
    /// Client id of the publisher; `None` if it has none.
    pub client_id: Option<String>,
    /// Connection id of the publisher.
    pub connection_id: String,
    /// Time of the publish, in epoch milliseconds.
    pub timestamp: u64,
}

/// One presence event of op 12.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PresenceIn {
    /// `enter`, `update` or `leave`.
    pub action: String,
    /// Client id of the member.
    pub client_id: String,
    /// Connection id of the member.
    pub connection_id: String,
    /// JSON text that the member gave, which may be `null`; `None` if it gave none.
    #[serde(default, deserialize_with = "json::present")]
    pub data: Option<Box<RawValue>>,
    /// Time of the event, in epoch milliseconds.
    pub timestamp: u64,
}

/// One presence member of op 14.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberIn {
    /// Client id of the member.
    pub client_id: String,
    /// Connection id of the member.
    pub connection_id: String,
    /// JSON text that the member gave, which may be `null`; `None` if it gave none.
    #[serde(default, deserialize_with = "json::present")]
    pub data: Option<Box<RawValue>>,
    /// Time of the member's last event, in epoch milliseconds.
    pub timestamp: u64,
}

/// Reads a frame of the server. A client trusts its node, so neither size nor nesting is bounded.
///
/// # Errors
/// [`FrameError::Fatal`] for every payload that is no frame.
pub fn parse_server(format: Format, payload: &[u8]) -> Result<Incoming, FrameError> {
    let parsed = match format {
        Format::Json => serde_json::from_slice(payload),
        Format::MsgPack => {
            let text = msgpack::to_json(payload, usize::MAX, usize::MAX);
            serde_json::from_str(&text.map_err(|error| FrameError::Fatal(error.to_string()))?)
        }
    };
    parsed.map_err(|error| FrameError::Fatal(json::error_text(&error)))
}

/// Writes the payload of a client's frame: `op` first, compact, without absent fields.
pub fn encode_request(request: &Request, format: Format) -> Vec<u8> {
    let mut out = Vec::with_capacity(128);
    write(request, &mut Object::begin(&mut out));
    match format {
        Format::Json => out,
        Format::MsgPack => msgpack::from_json(std::str::from_utf8(&out).expect("only UTF-8 is written")),
    }
}

fn write(request: &Request, object: &mut Object<'_>) {
    let op = match &request.body {
        Body::Heartbeat => op::HEARTBEAT,
        Body::Close => op::CLOSE,
        Body::Attach(_) => op::ATTACH,
        Body::Detach { .. } => op::DETACH,
        Body::Presence(_) => op::PRESENCE,
        Body::Message { .. } => op::MESSAGE,
        Body::Auth { .. } => op::AUTH,
        Body::Unknown { op } => *op,
    };
    object.number("op", op).text_if("id", request.id.as_deref());
    match &request.body {
        Body::Heartbeat | Body::Close | Body::Unknown { .. } => {}
        Body::Attach(attach) => {
            object.text("channel", &attach.channel);
            object.text_if("rewind", attach.rewind.as_deref()).text_if("serial", attach.serial.as_deref());
            if let Some(modes) = &attach.modes {
                object.texts("modes", modes);
            }
            if attach.occupancy {
                object.flag("occupancy", true);
            }
        }
        Body::Detach { channel } => drop(object.text("channel", channel)),
        Body::Presence(presence) => {
            object.text("channel", &presence.channel).text("action", &presence.action);
            object
                .text_if("clientId", presence.client_id.as_deref())
                .raw_if("data", presence.data.as_deref());
        }
        Body::Message { channel, messages } => {
            object.text("channel", channel);
            write_array(object.field("messages"), messages, write_draft);
        }
        Body::Auth { access_token } => drop(object.text("accessToken", access_token)),
    }
    object.end();
}

pub(crate) fn write_draft(out: &mut Vec<u8>, draft: &Draft) {
    Object::begin(out)
        .text_if("id", draft.id.as_deref())
        .text_if("name", draft.name.as_deref())
        .raw_if("data", draft.data.as_deref())
        .raw_if("extras", draft.extras.as_deref())
        .end();
}
