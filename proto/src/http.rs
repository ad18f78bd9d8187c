//! Bodies of the HTTP interface.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer as _, IgnoredAny, SeqAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::frame::Draft;
use crate::json;
use crate::writer::{Object, write_array};

/// The body of every error; `reason` names a ceiling.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ErrorBody {
    pub error: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

impl ErrorBody {
    pub fn new(error: impl Into<String>) -> Self {
        Self { error: error.into(), reason: None }
    }
}

/// The answer to a publish.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Published {
    pub channel: String,
    /// Always true.
    pub published: bool,
}

impl Published {
    pub fn new(channel: impl Into<String>) -> Self {
        Self { channel: channel.into(), published: true }
    }
}

/// The answer of `/time`, in epoch milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Time {
    pub now: u64,
}

/// `limit` is null when no ceiling applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionCount {
    pub connections: u64,
    pub limit: Option<u64>,
}

/// A channel with live connections, of the listing `/api/channels`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelEntry {
    pub name: String,
    pub connections: u64,
    /// Distinct clientIds, or connections when none is identified.
    pub subscribers: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelList {
    pub channels: Vec<ChannelEntry>,
}

/// The answer of `/api/channels/{channel}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChannelDetails {
    pub name: String,
    pub occupancy: Occupancy,
    pub source: OccupancySource,
}

/// How many are at a channel.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Occupancy {
    /// Connections that are attached.
    pub connections: u64,
    /// Those of them whose credential may publish there.
    pub publishers: u64,
    /// Those of them that messages are delivered to.
    pub subscribers: u64,
    /// Presence members.
    pub members: u64,
}

/// The nodes whose connections an [`Occupancy`] counts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum OccupancySource {
    /// All nodes.
    Cluster,
    /// The answering node alone, as another one has not answered.
    Node,
}

impl OccupancySource {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Cluster => "cluster",
            Self::Node => "node",
        }
    }
}

/// A live connection, of the listing `/api/connections`; `connected_at` in epoch milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ConnectionEntry {
    pub connection_id: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// Sorted by name.
    pub channels: Vec<String>,
    pub channel_count: usize,
    /// `websocket` or `sse`.
    pub transport: String,
    pub authenticated: bool,
    pub connected_at: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConnectionList {
    pub connections: Vec<ConnectionEntry>,
}

/// How many connections of a client were closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Closed {
    pub closed: u64,
}

/// What a node counted of one kind within a minute; `minute` is where that begins, in epoch milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetricRow<'a> {
    pub account_id: &'a str,
    pub minute: u64,
    /// `*` for the sum over all nodes.
    pub node_id: &'a str,
    pub kind: &'a str,
    pub count: u64,
    pub bytes: u64,
}

/// The answer of `/api/metrics/series`: the rows of the last `window_ms`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MetricSeries<'a> {
    #[serde(borrow)]
    pub series: Vec<MetricRow<'a>>,
    pub window_ms: u64,
}

/// A publish to several channels; both lists hold at least one.
#[derive(Debug, Clone)]
pub struct BatchRequest {
    pub channels: Vec<String>,
    pub messages: Vec<Draft>,
}

/// What became of one channel of a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BatchResult {
    Refused { channel: String, error: String, status: u16 },
    Published { channel: String, published: bool },
}

/// The answer to a batch.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchResponse {
    pub results: Vec<BatchResult>,
}

/// One message of the history; `timestamp` in epoch milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    pub channel: &'a str,
    pub name: Option<&'a str>,
    pub data: Option<&'a RawValue>,
    pub id: &'a str,
    pub client_id: Option<&'a str>,
    pub connection_id: &'a str,
    pub extras: Option<&'a RawValue>,
    pub timestamp: u64,
}

/// Appends the compact JSON text of a record.
pub fn write_record(out: &mut Vec<u8>, record: &Record<'_>) {
    Object::begin(out)
        .text("channel", record.channel)
        .text_if("name", record.name)
        .raw_if("data", record.data)
        .text("id", record.id)
        .text_if("clientId", record.client_id)
        .text("connectionId", record.connection_id)
        .raw_if("extras", record.extras)
        .number("timestamp", record.timestamp)
        .end();
}

/// A record of a message as it is read back from its text.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredRecord<'a> {
    pub name: Option<String>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    pub data: Option<&'a RawValue>,
    #[serde(borrow)]
    pub id: Cow<'a, str>,
    pub client_id: Option<String>,
    #[serde(borrow)]
    pub connection_id: Cow<'a, str>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    pub extras: Option<&'a RawValue>,
    pub timestamp: u64,
}

/// Reads what [`write_record`] wrote; the error says where the text is another one.
pub fn read_record(text: &str) -> Result<StoredRecord<'_>, serde_json::Error> {
    serde_json::from_str(text)
}

/// One presence event of the history; `timestamp` in epoch milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct PresenceRecord<'a> {
    pub channel: &'a str,
    /// An integration receives it, the history does not give it.
    pub id: Option<&'a str>,
    pub action: &'a str,
    pub client_id: &'a str,
    pub connection_id: &'a str,
    pub data: Option<&'a RawValue>,
    pub timestamp: u64,
}

/// Appends the compact JSON text of a presence record.
pub fn write_presence_record(out: &mut Vec<u8>, record: &PresenceRecord<'_>) {
    Object::begin(out)
        .text("channel", record.channel)
        .text_if("id", record.id)
        .text("action", record.action)
        .text("clientId", record.client_id)
        .text("connectionId", record.connection_id)
        .raw_if("data", record.data)
        .number("timestamp", record.timestamp)
        .end();
}

/// Appends the compact JSON text of what an integration receives when a channel becomes occupied or vacated; `timestamp`, of when a node
/// noticed it, in epoch milliseconds.
pub fn write_occupancy_record(out: &mut Vec<u8>, channel: &str, id: &str, timestamp: u64) {
    Object::begin(out).text("channel", channel).text("id", id).number("timestamp", timestamp).end();
}

/// One member of a channel's presence; `updated_at`, of its last event, in epoch milliseconds.
#[derive(Debug, Clone, Copy)]
pub struct PresenceMember<'a> {
    pub client_id: &'a str,
    pub connection_id: &'a str,
    pub data: Option<&'a RawValue>,
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

/// A channel with presence members, and how many.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PresenceChannel {
    pub channel: String,
    pub members: u64,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct PresenceList {
    pub channels: Vec<PresenceChannel>,
}

/// `{"messages":[…]}` of records that are JSON texts already.
pub fn history_body<'a>(records: impl IntoIterator<Item = &'a str, IntoIter: Clone>) -> Vec<u8> {
    listing("messages", records)
}

/// `{"events":[…]}` of records that are JSON texts already.
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

/// Why a body was refused: HTTP 400 with this sentence.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BodyError {
    TooDeep { nesting_max: usize },
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

/// One message, or an array of at least one. Names and sizes are not checked. Of more than `messages_max` one too many is
/// given, so that many small ones do not take a multiple of their text.
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

/// As [`parse_publish`] of the messages.
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

/// Keeps one more than so many, and passes over the rest.
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

/// The fields of a batch, each still as text.
#[derive(Deserialize)]
struct Fields<'a> {
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    channels: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    messages: Option<&'a RawValue>,
}
