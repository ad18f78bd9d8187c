//! Requests of clients: the frames that a node reads.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, IgnoredAny, MapAccess, Visitor};
use serde_json::error::Category;
use serde_json::value::RawValue;

use super::{Draft, Format, op};
use crate::{json, msgpack};

/// One frame of a client. A request without an `id` is carried out in silence, but attach and detach are
/// always answered.
#[derive(Debug, Clone)]
pub struct Request {
    /// Text that the answer repeats.
    pub id: Option<String>,
    /// Kind of the request, with its fields.
    pub body: Body,
}

/// The kinds of requests. Names and values of their fields are not checked.
#[derive(Clone)]
pub enum Body {
    /// Sign of life (op 0).
    Heartbeat,
    /// End of the connection (op 5).
    Close,
    /// Delivery of a channel (op 8).
    Attach(Attach),
    /// End of the delivery of a channel (op 10).
    Detach {
        /// Channel name.
        channel: String,
    },
    /// Change of a member (op 12).
    Presence(PresenceRequest),
    /// Publish (op 13).
    Message {
        /// Channel name.
        channel: String,
        /// Messages in their order, all of them published or none.
        messages: Vec<Draft>,
    },
    /// New token (op 15).
    Auth {
        /// Service JWT.
        access_token: String,
    },
    /// Request with another `op`, which is answered with a nack.
    Unknown {
        /// Kind of the frame.
        op: i64,
    },
}

/// The fields of an attach (op 8). Names and values are not checked.
#[derive(Debug, Clone, Default)]
pub struct Attach {
    /// Channel name.
    pub channel: String,
    /// Messages from before the attach: a count such as `10`, or a time such as `10s` or `5m`.
    pub rewind: Option<String>,
    /// Channel position from which to resume.
    pub serial: Option<String>,
    /// Deliveries that are wanted: of `subscribe`, `publish` and `presence`; `None`: all.
    pub modes: Option<Vec<String>>,
    /// Whether op 16 is to say how many are at the channel, now and after changes.
    pub occupancy: bool,
}

/// The fields of a presence request (op 12). Names and values are not checked.
#[derive(Debug, Clone, Default)]
pub struct PresenceRequest {
    /// Channel name.
    pub channel: String,
    /// `enter`, `update` or `leave`.
    pub action: String,
    /// Client id of the member; `None`: that of the connection.
    pub client_id: Option<String>,
    /// JSON text of the member, which may be `null`; `None`: none, or the last data in a leave.
    pub data: Option<Box<RawValue>>,
}

/// Reasons for which a frame is not understood, each with what the node does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FrameError {
    /// Payload that is malformed or no object, with a sentence that says why: op 7 (40000), then close 1002.
    Fatal(String),
    /// Payload with more levels of nesting than allowed: op 7 (40000), then close 1002.
    TooDeep {
        /// Levels that are allowed.
        nesting_max: usize,
    },
    /// Text frame that is not UTF-8: op 7 (40000), then close 1007.
    BadUtf8,
    /// MessagePack frame whose JSON text is over the limit: op 7 (40000), then close 1009.
    TooBig {
        /// Bytes that are allowed.
        json_bytes_max: usize,
    },
    /// Object with a field that is missing or wrong: nack 40000.
    Refused {
        /// Id of the request; without one nothing is answered.
        id: Option<String>,
        /// Sentence that names the field.
        error: String,
    },
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Fatal(text) | Self::Refused { error: text, .. } => f.write_str(text),
            Self::TooDeep { nesting_max } => json::Error::Nesting { nesting_max: *nesting_max }.fmt(f),
            Self::BadUtf8 => f.write_str("text is not valid UTF-8"),
            Self::TooBig { json_bytes_max } => {
                write!(f, "JSON text is over the limit of {json_bytes_max} bytes")
            }
        }
    }
}

impl std::error::Error for FrameError {}

/// Default limit for the JSON text of a MessagePack frame, in bytes: the default limit of a socket message.
pub const JSON_BYTES_MAX: usize = 524_288;

/// Reads a client's frame as [`parse_within`] does, with [`JSON_BYTES_MAX`].
///
/// # Errors
/// Those of [`parse_within`].
pub fn parse(format: Format, payload: &[u8], nesting_max: usize) -> Result<Request, FrameError> {
    parse_within(format, payload, nesting_max, JSON_BYTES_MAX)
}

/// Reads a client's frame. Unknown fields, and those of another `op`, are ignored.
///
/// # Errors
/// [`FrameError`] says what the node answers.
pub fn parse_within(
    format: Format,
    payload: &[u8],
    nesting_max: usize,
    json_bytes_max: usize,
) -> Result<Request, FrameError> {
    let text = match format {
        Format::Json => read_json(payload, nesting_max)?,
        Format::MsgPack => Cow::Owned(read_msgpack(payload, nesting_max, json_bytes_max)?),
    };
    if !text.starts_with('{') {
        return Err(FrameError::Fatal("frame is not an object".into()));
    }
    let wire: Wire<'_> = serde_json::from_str(&text).map_err(|error| match error.classify() {
        Category::Data => refused(&text, json::error_text(&error)),
        Category::Syntax | Category::Eof | Category::Io => FrameError::Fatal(json::error_text(&error)),
    })?;
    let id = wire.id.and_then(json::as_text).map(Cow::into_owned);
    match wire.body() {
        Ok(body) => Ok(Request { id, body }),
        Err(error) => Err(FrameError::Refused { id, error }),
    }
}

fn read_json(payload: &[u8], nesting_max: usize) -> Result<Cow<'_, str>, FrameError> {
    json::tidy(payload, nesting_max).map_err(|error| match error {
        json::Error::Utf8 => FrameError::BadUtf8,
        json::Error::Nesting { nesting_max } => FrameError::TooDeep { nesting_max },
        json::Error::LoneSurrogate => refused(&String::from_utf8_lossy(payload), error.to_string()),
    })
}

fn read_msgpack(payload: &[u8], nesting_max: usize, json_bytes_max: usize) -> Result<String, FrameError> {
    msgpack::to_json(payload, nesting_max, json_bytes_max).map_err(|error| match error {
        msgpack::Error::TooLarge { json_bytes_max } => FrameError::TooBig { json_bytes_max },
        msgpack::Error::Unsupported(_) => {
            match msgpack::to_json_with_gaps(payload, nesting_max, json_bytes_max) {
                Ok(text) => refused(&text, error.to_string()),
                Err(msgpack::Error::Nesting { nesting_max }) => FrameError::TooDeep { nesting_max },
                Err(worse) => FrameError::Fatal(worse.to_string()),
            }
        }
        msgpack::Error::Nesting { nesting_max } => FrameError::TooDeep { nesting_max },
        _ => FrameError::Fatal(error.to_string()),
    })
}

/// Refuses a frame that could not be read as a whole, with the id that stands in it.
fn refused(text: &str, error: String) -> FrameError {
    match serde_json::from_str::<FirstId>(text) {
        Ok(FirstId(id)) => FrameError::Refused { id, error },
        Err(syntax) => FrameError::Fatal(json::error_text(&syntax)),
    }
}

/// The fields of all frames as JSON texts. `op` decides which of them are read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Wire<'a> {
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    op: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    channel: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    messages: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    name: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    data: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    rewind: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    serial: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    modes: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    occupancy: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    action: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    client_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    access_token: Option<&'a RawValue>,
}

impl Wire<'_> {
    fn body(&self) -> Result<Body, String> {
        let op = self.op.ok_or("op is missing")?;
        let op = op.get().parse().map_err(|_| "op must be an integer")?;
        Ok(match op {
            op::HEARTBEAT => Body::Heartbeat,
            op::CLOSE => Body::Close,
            op::ATTACH => Body::Attach(self.attach()?),
            op::DETACH => Body::Detach { channel: self.channel()? },
            op::PRESENCE => Body::Presence(self.presence()?),
            op::MESSAGE => Body::Message { channel: self.channel()?, messages: self.messages()? },
            op::AUTH => Body::Auth { access_token: required("accessToken", self.access_token)? },
            op => Body::Unknown { op },
        })
    }

    fn channel(&self) -> Result<String, String> {
        required("channel", self.channel)
    }

    fn attach(&self) -> Result<Attach, String> {
        let modes = match self.modes {
            None => None,
            Some(modes) => {
                Some(serde_json::from_str(modes.get()).map_err(|_| "modes must be an array of strings")?)
            }
        };
        let occupancy = match self.occupancy.map(RawValue::get) {
            None | Some("false") => false,
            Some("true") => true,
            Some(_) => return Err("occupancy must be true or false".into()),
        };
        Ok(Attach {
            channel: self.channel()?,
            rewind: optional("rewind", self.rewind)?,
            serial: optional("serial", self.serial)?,
            modes,
            occupancy,
        })
    }

    fn presence(&self) -> Result<PresenceRequest, String> {
        Ok(PresenceRequest {
            channel: self.channel()?,
            action: required("action", self.action)?,
            client_id: optional("clientId", self.client_id)?,
            data: self.data.map(ToOwned::to_owned),
        })
    }

    fn messages(&self) -> Result<Vec<Draft>, String> {
        let Some(messages) = self.messages else {
            let name = optional("name", self.name)?.map(String::into_boxed_str);
            return Ok(vec![Draft { name, data: self.data.map(ToOwned::to_owned), ..Draft::default() }]);
        };
        if self.name.is_some() || self.data.is_some() {
            return Err("messages excludes name and data beside it".into());
        }
        if !messages.get().starts_with('[') {
            return Err("messages must be an array".into());
        }
        serde_json::from_str(messages.get()).map_err(|error| json::error_text(&error))
    }
}

fn required(field: &str, value: Option<&RawValue>) -> Result<String, String> {
    optional(field, value)?.ok_or_else(|| format!("{field} is missing"))
}

fn optional(field: &str, value: Option<&RawValue>) -> Result<Option<String>, String> {
    let Some(value) = value else { return Ok(None) };
    match json::as_text(value) {
        Some(text) => Ok(Some(text.into_owned())),
        None => Err(format!("{field} must be a string")),
    }
}

/// The first `id` of an object if it is a string, whatever the other fields are.
struct FirstId(Option<String>);

#[derive(Deserialize)]
#[serde(field_identifier, rename_all = "lowercase")]
enum IdField {
    Id,
    #[serde(other)]
    Other,
}

impl<'de> Deserialize<'de> for FirstId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct FirstIdVisitor;
        impl<'de> Visitor<'de> for FirstIdVisitor {
            type Value = FirstId;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<FirstId, A::Error> {
                let mut first: Option<&RawValue> = None;
                while let Some(field) = map.next_key()? {
                    match (field, first) {
                        (IdField::Id, None) => first = Some(map.next_value()?),
                        _ => drop(map.next_value::<IgnoredAny>()?),
                    }
                }
                Ok(FirstId(first.and_then(json::as_text).map(Cow::into_owned)))
            }
        }
        deserializer.deserialize_map(FirstIdVisitor)
    }
}

/// Leaves out the access token, so that none reaches a log.
impl fmt::Debug for Body {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Heartbeat => f.write_str("Heartbeat"),
            Self::Close => f.write_str("Close"),
            Self::Attach(attach) => attach.fmt(f),
            Self::Detach { channel } => f.debug_struct("Detach").field("channel", channel).finish(),
            Self::Presence(presence) => presence.fmt(f),
            Self::Message { channel, messages } => {
                f.debug_struct("Message").field("channel", channel).field("messages", messages).finish()
            }
            Self::Auth { .. } => f.debug_struct("Auth").finish_non_exhaustive(),
            Self::Unknown { op } => f.debug_struct("Unknown").field("op", op).finish(),
        }
    }
}
