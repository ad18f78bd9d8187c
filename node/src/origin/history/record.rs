//! Writes messages and presence events as the JSON records of history.

use fanfare_proto::http::{PresenceRecord, Record, write_presence_record, write_record};

use crate::model::{Message, PresenceEvent, PublishedMessages};

/// Appends the record of one message of a publish, whose connection is `connection_id`.
pub(in crate::origin) fn write_message(
    out: &mut Vec<u8>,
    published: &PublishedMessages,
    message: &Message,
    connection_id: &str,
) {
    let record = Record {
        channel: published.key.channel(),
        name: message.name.as_deref(),
        data: message.data.as_deref(),
        id: &message.id,
        client_id: published.client_id.as_ref().map(|id| id.as_str()),
        connection_id,
        extras: message.extras.as_deref(),
        timestamp: published.timestamp_ms,
    };
    write_record(out, &record);
}

pub(super) fn write_presence(out: &mut Vec<u8>, event: &PresenceEvent) {
    write_presence_with(out, event, None);
}

/// Appends the record of a presence event with an id, as integrations receive it.
pub(in crate::origin) fn write_presence_with(out: &mut Vec<u8>, event: &PresenceEvent, id: Option<&str>) {
    let record = PresenceRecord {
        channel: event.key.channel(),
        id,
        action: event.action.as_str(),
        client_id: event.member.client_id.as_str(),
        connection_id: &event.member.connection_id.to_string(),
        data: event.data.as_deref(),
        timestamp: event.timestamp_ms,
    };
    write_presence_record(out, &record);
}
