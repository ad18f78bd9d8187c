//! The client's side: its requests written, the server's frames read.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Body, Draft, Format, FrameError, Request, op};
use crate::http::Occupancy;
use crate::writer::{Object, write_array};
use crate::{json, msgpack};

/// A frame of the server, with the fields of all kinds; those that a frame does not have are none or empty.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Incoming {
    pub op: i64,
    pub id: Option<String>,
    pub channel: Option<String>,
    pub serial: Option<String>,
    #[serde(default)]
    pub serials: Vec<String>,
    pub error: Option<String>,
    pub code: Option<u32>,
    pub reason: Option<String>,
    #[serde(default)]
    pub messages: Vec<MessageIn>,
    pub resumed: Option<bool>,
    /// Of op 9 a flag, of op 12 the list of events, as JSON text.
    #[serde(default, deserialize_with = "json::present")]
    pub presence: Option<Box<RawValue>>,
    /// Of op 14.
    #[serde(default)]
    pub members: Vec<MemberIn>,
    /// Of op 14: further pages follow.
    pub more: Option<bool>,
    pub modes: Option<Vec<String>>,
    pub warning: Option<String>,
    /// Of op 16.
    pub occupancy: Option<Occupancy>,
    /// Of op 16: `cluster` or `node`.
    pub source: Option<String>,
    pub connection_id: Option<String>,
    pub connection_key: Option<String>,
    pub client_id: Option<String>,
    pub node_id: Option<String>,
    pub heartbeat_ms: Option<u64>,
    pub resume_window_ms: Option<u64>,
    pub max_message_bytes: Option<usize>,
    pub reconnect_after_ms: Option<u64>,
    /// Epoch milliseconds.
    pub expires: Option<u64>,
    /// Epoch milliseconds.
    pub server_time: Option<u64>,
}

/// One message of op 13; `data` may be `null`, `timestamp` is in epoch milliseconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MessageIn {
    pub id: String,
    pub name: Option<String>,
    #[serde(default, deserialize_with = "json::present")]
    pub data: Option<Box<RawValue>>,
    #[serde(default, deserialize_with = "json::present")]
    pub extras: Option<Box<RawValue>>,
    pub client_id: Option<String>,
    pub connection_id: String,
    pub timestamp: u64,
}

/// One event of op 12; `data` may be `null`, `timestamp` is in epoch milliseconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PresenceIn {
    /// `enter`, `update` or `leave`.
    pub action: String,
    pub client_id: String,
    pub connection_id: String,
    #[serde(default, deserialize_with = "json::present")]
    pub data: Option<Box<RawValue>>,
    pub timestamp: u64,
}

/// One member of op 14; `data` may be `null`, `timestamp` is that of its last event, in epoch milliseconds.
#[derive(Debug, Clone, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MemberIn {
    pub client_id: String,
    pub connection_id: String,
    #[serde(default, deserialize_with = "json::present")]
    pub data: Option<Box<RawValue>>,
    pub timestamp: u64,
}

/// Reads a frame of the server, which a client trusts in size and nesting. Every error is fatal.
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

/// The payload of a client's frame.
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
