//! Bodies of the HTTP interface, in the format of `docs/openapi.yaml`.

mod record;

pub use record::{
    PresenceRecord, Record, StoredRecord, read_record, write_occupancy_record, write_presence_record,
    write_record,
};

use std::fmt;

use serde::de::{Deserializer as _, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::frame::Draft;
use crate::json;
use crate::writer::{Object, write_array};

/// The body of every error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// Sentence for a person.
    pub error: String,
    /// Name of the limit that was reached, such as `rate_limit`; with status 429 alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl ErrorBody {
    /// Makes a body without a reason.
    pub fn new(error: impl Into<String>) -> Self {
        Self { error: error.into(), reason: None }
    }
}

/// The answer to a publish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    /// Channel name.
    pub channel: String,
    /// Always `true`.
    pub published: bool,
}

impl Published {
    /// Makes the answer for a channel.
    pub fn new(channel: impl Into<String>) -> Self {
        Self { channel: channel.into(), published: true }
    }
}

/// The answer of `/time`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    /// Clock of the node, in epoch milliseconds.
    pub now: u64,
}

/// The answer of `/api/connections/count`: connections of the tenant on all nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionCount {
    /// Open connections, which may be more than a limit that was lowered.
    pub connections: u64,
    /// Greatest number of connections; `null` if there is no limit.
    pub limit: Option<u64>,
}

/// One channel of [`ChannelList`]: it has live connections.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelEntry {
    /// Channel name.
    pub name: String,
    /// Connections that are attached.
    pub connections: u64,
    /// Distinct client ids among the connections, or connections if none has one.
    pub subscribers: u64,
}

/// The answer of `/api/channels`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelList {
    /// Channels with live connections.
    pub channels: Vec<ChannelEntry>,
}

/// The answer of `/api/channels/{channel}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelDetails {
    /// Channel name.
    pub name: String,
    /// Numbers of connections and members.
    pub occupancy: Occupancy,
    /// Nodes whose connections are counted.
    pub source: OccupancySource,
}

/// Numbers of connections and members at a channel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occupancy {
    /// Connections that are attached, event streams included.
    pub connections: u64,
    /// Attached connections whose credential may publish on the channel.
    pub publishers: u64,
    /// Attached connections to which messages are delivered.
    pub subscribers: u64,
    /// Presence members, of all nodes in any case.
    pub members: u64,
}

/// The nodes whose connections an [`Occupancy`] counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OccupancySource {
    /// All nodes.
    Cluster,
    /// The answering node alone, since another one has not answered.
    Node,
}

impl OccupancySource {
    /// Gives the text of the JSON bodies.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cluster => "cluster",
            Self::Node => "node",
        }
    }
}

/// One live connection of [`ConnectionList`].
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionEntry {
    /// Connection id, `c_` and 22 base64url characters.
    pub connection_id: String,
    /// Client id; `None` if the connection has none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// Attached channels, sorted by name.
    pub channels: Vec<String>,
    /// Number of attached channels.
    pub channel_count: usize,
    /// `websocket` or `sse`.
    pub transport: String,
    /// False if the node runs without authentication.
    pub authenticated: bool,
    /// Beginning of the connection, in epoch milliseconds.
    pub connected_at: u64,
}

/// The answer of `/api/connections`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionList {
    /// Live connections.
    pub connections: Vec<ConnectionEntry>,
}

/// The answer to a request that closes the connections of a client.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closed {
    /// Number of connections that were closed.
    pub closed: u64,
}

/// One row of [`MetricSeries`]: what a node counted of one kind within a minute.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetricRow<'a> {
    /// Account of the count.
    pub account_id: &'a str,
    /// Beginning of the minute, in epoch milliseconds.
    pub minute: u64,
    /// Node that counted; `*` for the sum over all nodes.
    pub node_id: &'a str,
    /// Kind of the count, such as `publish`, `deliver` or `history-read`.
    pub kind: &'a str,
    /// Number of messages, requests or other events of the kind.
    pub count: u64,
    /// Size of the counted events, in bytes; 0 for kinds without a size.
    pub bytes: u64,
}

/// The answer of `/api/metrics/series`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetricSeries<'a> {
    /// Rows by minute, node and kind.
    #[serde(borrow)]
    pub series: Vec<MetricRow<'a>>,
    /// Time back from now that the rows are of, in milliseconds.
    pub window_ms: u64,
}

/// A publish of the same messages to several channels. [`parse_batch`] gives neither list empty.
#[derive(Debug, Clone)]
pub struct BatchRequest {
    /// Channel names.
    pub channels: Vec<String>,
    /// Messages, in their order for each channel.
    pub messages: Vec<Draft>,
}

/// The outcome for one channel of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BatchResult {
    /// Nothing was published to the channel.
    Refused {
        /// Channel name.
        channel: String,
        /// Sentence for a person.
        error: String,
        /// HTTP status that a publish to this channel alone would have had.
        status: u16,
    },
    /// All messages were published to the channel.
    Published {
        /// Channel name.
        channel: String,
        /// Always `true`.
        published: bool,
    },
}

/// The answer to a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchResponse {
    /// Outcome of each channel, in the order of the request.
    pub results: Vec<BatchResult>,
}

/// One member in a list of a channel's presence.
#[derive(Debug, Clone, Copy)]
pub struct PresenceMember<'a> {
    /// Client id of the member.
    pub client_id: &'a str,
    /// Connection id of the member.
    pub connection_id: &'a str,
    /// JSON text of the member; `None` if it has none.
    pub data: Option<&'a RawValue>,
    /// Time of the member's last event, in epoch milliseconds.
    pub updated_at: u64,
}

/// Appends the compact JSON text of a member.
pub fn write_presence_member(out: &mut Vec<u8>, member: &PresenceMember<'_>) {
    Object::begin(out)
        .text("clientId", member.client_id)
        .text("connectionId", member.connection_id)
        .raw_if("data", member.data)
        .number("updatedAt", member.updated_at)
        .end();
}

/// One channel of [`PresenceList`]: it has presence members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PresenceChannel {
    /// Channel name.
    pub channel: String,
    /// Number of members.
    pub members: u64,
}

/// The list of an account's channels with presence members.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PresenceList {
    /// Channels with at least one member.
    pub channels: Vec<PresenceChannel>,
}

/// Writes `{"messages":[…]}` around records, each a JSON text.
pub fn history_body<'a>(records: impl IntoIterator<Item = &'a str, IntoIter: Clone>) -> Vec<u8> {
    listing("messages", records)
}

/// Writes `{"events":[…]}` around records, each a JSON text.
pub fn presence_history_body<'a>(records: impl IntoIterator<Item = &'a str, IntoIter: Clone>) -> Vec<u8> {
    listing("events", records)
}

fn listing<'a>(name: &str, records: impl IntoIterator<Item = &'a str, IntoIter: Clone>) -> Vec<u8> {
    let records = records.into_iter();
    let bytes: usize = records.clone().map(|record| record.len() + 1).sum();
    let mut out = Vec::with_capacity(bytes + name.len() + r#"{"":[]}"#.len());
    let mut object = Object::begin(&mut out);
    write_array(object.field(name), records, |out, record| out.extend_from_slice(record.as_bytes()));
    object.end();
    out
}

/// Reasons for which a body is refused: HTTP 400 with the text of the error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyError {
    /// Body with more levels of nesting than allowed.
    TooDeep {
        /// Levels that are allowed.
        nesting_max: usize,
    },
    /// Body that is not JSON, or has a field that is missing or wrong: a sentence.
    Malformed(String),
}

impl fmt::Display for BodyError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooDeep { nesting_max } => json::Error::Nesting { nesting_max: *nesting_max }.fmt(f),
            Self::Malformed(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for BodyError {}

impl From<serde_json::Error> for BodyError {
    fn from(error: serde_json::Error) -> Self {
        Self::Malformed(json::error_text(&error))
    }
}

impl From<json::Error> for BodyError {
    fn from(error: json::Error) -> Self {
        match error {
            json::Error::Nesting { nesting_max } => Self::TooDeep { nesting_max },
            json::Error::Utf8 | json::Error::LoneSurrogate => Self::Malformed(error.to_string()),
        }
    }
}

/// Reads the body of a publish: one message, or an array of at least one. Lengths and characters are not
/// checked.
///
/// Of an array with more than `messages_max` messages, the first `messages_max` + 1 are given, so that many
/// small ones take no multiple of the body's memory.
///
/// # Errors
/// [`BodyError`] says what is wrong.
pub fn parse_publish(body: &[u8], nesting_max: usize, messages_max: usize) -> Result<Vec<Draft>, BodyError> {
    let text = json::tidy(body, nesting_max)?;
    let drafts = match text.bytes().next() {
        None => return Err(BodyError::Malformed("body is empty".into())),
        Some(b'[') => drafts(&text, messages_max)?,
        Some(_) => vec![serde_json::from_str(&text)?],
    };
    if drafts.is_empty() {
        return Err(BodyError::Malformed("array holds no message".into()));
    }
    Ok(drafts)
}

/// Reads the body of a batch. `messages_max` bounds its messages as in [`parse_publish`].
///
/// # Errors
/// [`BodyError`] says what is wrong.
pub fn parse_batch(body: &[u8], nesting_max: usize, messages_max: usize) -> Result<BatchRequest, BodyError> {
    let text = json::tidy(body, nesting_max)?;
    if !text.starts_with('{') {
        return Err(BodyError::Malformed("body must be an object".into()));
    }
    let Fields { channels, messages } = serde_json::from_str(&text)?;
    let channels = serde_json::from_str(array("channels", channels)?)
        .map_err(|_| BodyError::Malformed("channels must be an array of strings".into()))?;
    let batch = BatchRequest { channels, messages: drafts(array("messages", messages)?, messages_max)? };
    if batch.channels.is_empty() || batch.messages.is_empty() {
        return Err(BodyError::Malformed("channels and messages must not be empty".into()));
    }
    Ok(batch)
}

fn drafts(text: &str, messages_max: usize) -> Result<Vec<Draft>, BodyError> {
    let mut deserializer = serde_json::Deserializer::from_str(text);
    let drafts = deserializer.deserialize_seq(AtMost(messages_max))?;
    deserializer.end()?;
    Ok(drafts)
}

/// Visitor that keeps that many messages and one more, and passes over the rest.
struct AtMost(usize);

impl<'de> Visitor<'de> for AtMost {
    type Value = Vec<Draft>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an array of messages")
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut messages: A) -> Result<Vec<Draft>, A::Error> {
        let mut drafts = Vec::new();
        while drafts.len() <= self.0 {
            let Some(draft) = messages.next_element()? else { return Ok(drafts) };
            drafts.push(draft);
        }
        while messages.next_element::<IgnoredAny>()?.is_some() {}
        Ok(drafts)
    }
}

fn array<'a>(name: &str, value: Option<&'a RawValue>) -> Result<&'a str, BodyError> {
    let text = value.map(RawValue::get).ok_or_else(|| BodyError::Malformed(format!("{name} is missing")))?;
    if text.starts_with('[') {
        Ok(text)
    } else {
        Err(BodyError::Malformed(format!("{name} must be an array")))
    }
}

/// The fields of a batch as JSON texts.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    channels: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    messages: Option<&'a RawValue>,
}
