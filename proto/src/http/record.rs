//! Records of the history and of integrations: one message or event each.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::json;
use crate::writer::Object;

/// One message of the history, to be written.
#[derive(Debug, Clone, Copy)]
pub struct Record<'a> {
    /// Channel name.
    pub channel: &'a str,
    /// Kind of event.
    pub name: Option<&'a str>,
    /// JSON text as published; `None` if it was left out.
    pub data: Option<&'a RawValue>,
    /// Message id, given by the publisher or made by the node.
    pub id: &'a str,
    /// Client id of the publisher; `None` if it has none.
    pub client_id: Option<&'a str>,
    /// Connection id of the publisher.
    pub connection_id: &'a str,
    /// JSON object as published; `None` if it was left out.
    pub extras: Option<&'a RawValue>,
    /// Time of the publish, in epoch milliseconds.
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

/// One message of the history, read back from its text. The channel is known from where it was read.
#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StoredRecord<'a> {
    /// Kind of event.
    pub name: Option<String>,
    /// JSON text as published; `None` if it was left out.
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    pub data: Option<&'a RawValue>,
    /// Message id.
    #[serde(borrow)]
    pub id: Cow<'a, str>,
    /// Client id of the publisher; `None` if it has none.
    pub client_id: Option<String>,
    /// Connection id of the publisher.
    #[serde(borrow)]
    pub connection_id: Cow<'a, str>,
    /// JSON object as published; `None` if it was left out.
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    pub extras: Option<&'a RawValue>,
    /// Time of the publish, in epoch milliseconds.
    pub timestamp: u64,
}

/// Reads the text that [`write_record`] wrote.
///
/// # Errors
/// The text is no record; the error says where.
pub fn read_record(text: &str) -> Result<StoredRecord<'_>, serde_json::Error> {
    serde_json::from_str(text)
}

/// One presence event of the history, to be written.
#[derive(Debug, Clone, Copy)]
pub struct PresenceRecord<'a> {
    /// Channel name.
    pub channel: &'a str,
    /// Event id, which integrations receive; `None` in the history.
    pub id: Option<&'a str>,
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

/// Appends the compact JSON text of the record that integrations receive when a channel becomes occupied or
/// vacated. `timestamp` is when a node noticed it, in epoch milliseconds.
pub fn write_occupancy_record(out: &mut Vec<u8>, channel: &str, id: &str, timestamp: u64) {
    Object::begin(out).text("channel", channel).text("id", id).number("timestamp", timestamp).end();
}
