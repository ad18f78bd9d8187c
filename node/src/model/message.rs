//! Messages: a draft as the publisher gave it, and the numbered message.

use std::fmt;
use std::sync::Arc;

use fanfare_proto::frame::{Draft, MessageOut};
use fanfare_proto::serial::Serial;
use serde_json::value::RawValue;

use super::ids::{ChannelKey, ClientId, ConnectionId, NameError, check_name};
use super::limits::Limits;
use super::usage::Amount;

/// Reason for which a draft was refused; the text names the field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DraftError {
    /// HTTP 413, Nack 40009.
    TooLarge { bytes: usize, bytes_max: usize },
    /// HTTP 413, Nack 40009.
    TooMany { messages_max: usize },
    /// HTTP 400, Nack 40000.
    Name { field: &'static str, error: NameError },
    /// HTTP 400, Nack 40000.
    Bad(String),
}

impl fmt::Display for DraftError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooLarge { bytes, bytes_max } => {
                write!(f, "message of {bytes} bytes is over the limit of {bytes_max}")
            }
            Self::TooMany { messages_max } => write!(f, "more than {messages_max} messages in one publish"),
            Self::Name { field, error } => write!(f, "{field} {error}"),
            Self::Bad(text) => f.write_str(text),
        }
    }
}

impl std::error::Error for DraftError {}

/// The size of a draft: UTF-8 lengths of the compact JSON texts of its name, data, extras and clientId.
pub fn draft_bytes(draft: &Draft, client_id: Option<&ClientId>) -> usize {
    let client_id = client_id.map(ClientId::as_str);
    message_bytes(draft.name.as_deref(), draft.data.as_deref(), draft.extras.as_deref(), client_id)
}

/// The size of a message that is not a draft any more, by the same rule.
pub fn message_bytes(
    name: Option<&str>,
    data: Option<&RawValue>,
    extras: Option<&RawValue>,
    client_id: Option<&str>,
) -> usize {
    name.map_or(0, json_bytes)
        + data.map_or(0, |data| data.get().len())
        + extras.map_or(0, |extras| extras.get().len())
        + client_id.map_or(0, json_bytes)
}

/// The length of a text as JSON, quotes included.
fn json_bytes(text: &str) -> usize {
    let escaped = |byte: u8| match byte {
        b'"' | b'\\' | b'\n' | b'\r' | b'\t' | 0x08 | 0x0c => 2,
        0..0x20 => 6,
        _ => 1,
    };
    2 + text.bytes().map(escaped).sum::<usize>()
}

/// Whether a message may be published, judged by its draft.
pub fn check_draft(draft: &Draft, client_id: Option<&ClientId>, limits: &Limits) -> Result<(), DraftError> {
    // An event name may be empty, unlike all other names.
    if let Some(name) = draft.name.as_deref().filter(|name| !name.is_empty()) {
        check_name(name, limits.name_bytes).map_err(|error| DraftError::Name { field: "name", error })?;
    }
    if let Some(id) = &draft.id {
        check_name(id, limits.message_id_bytes).map_err(|error| DraftError::Name { field: "id", error })?;
    }
    if draft.extras.as_ref().is_some_and(|extras| !extras.get().starts_with('{')) {
        return Err(DraftError::Bad("extras must be an object".into()));
    }
    let bytes = draft_bytes(draft, client_id);
    if bytes > limits.message_bytes {
        return Err(DraftError::TooLarge { bytes, bytes_max: limits.message_bytes });
    }
    Ok(())
}

/// The identity of a message in a channel: the numbering incarnation, and its sequence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Stamp {
    pub incarnation: u64,
    pub sequence: u64,
}

impl Stamp {
    /// The last message of each incarnation that a position names; sequence 0 for none.
    pub fn all_of(position: &Serial) -> impl Iterator<Item = Self> {
        position.entries().iter().map(|&(incarnation, sequence)| Self { incarnation, sequence })
    }
}

/// One numbered message. Its stamp is the publish's incarnation with its own sequence.
#[derive(Debug)]
pub struct Message {
    pub id: Box<str>,
    /// Whether the client gave the id, which is then remembered for the idempotency window.
    pub id_given: bool,
    pub sequence: u64,
    pub name: Option<Box<str>>,
    pub data: Option<Box<RawValue>>,
    pub extras: Option<Box<RawValue>>,
}

impl Message {
    /// The form that subscribers get.
    pub fn as_sent(&self) -> MessageOut<'_> {
        MessageOut {
            id: &self.id,
            name: self.name.as_deref(),
            data: self.data.as_deref(),
            extras: self.extras.as_deref(),
        }
    }

    /// The size by the rule of [`draft_bytes`].
    fn bytes(&self, client_id: Option<&ClientId>) -> u64 {
        let Self { name, data, extras, .. } = self;
        let client_id = client_id.map(ClientId::as_str);
        message_bytes(name.as_deref(), data.as_deref(), extras.as_deref(), client_id) as u64
    }
}

/// Messages published at this node: checked, stamped and numbered by `publish`, the only maker.
#[derive(Debug)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct PublishedMessages {
    pub key: ChannelKey,
    pub incarnation: u64,
    pub timestamp_ms: u64,
    pub connection_id: ConnectionId,
    pub client_id: Option<ClientId>,
    /// The key whose credential published: part of the scope of client-given ids.
    pub key_name: super::KeyName,
    /// One or more messages, in publish order, with sequences that rise by one.
    pub messages: Vec<Message>,
    /// Sum of the sizes by [`draft_bytes`].
    pub bytes: u64,
    _made_by_publish: (),
}

impl PublishedMessages {
    pub(crate) fn new(
        key: ChannelKey,
        incarnation: u64,
        timestamp_ms: u64,
        connection_id: ConnectionId,
        client_id: Option<ClientId>,
        key_name: super::KeyName,
        messages: Vec<Message>,
    ) -> Arc<Self> {
        let bytes = messages.iter().map(|message| message.bytes(client_id.as_ref())).sum();
        let _made_by_publish = ();
        Arc::new(Self {
            key,
            incarnation,
            timestamp_ms,
            connection_id,
            client_id,
            key_name,
            messages,
            bytes,
            _made_by_publish,
        })
    }

    /// The messages numbered above `sequence`, and their sizes.
    pub fn amount_after(&self, sequence: u64) -> Amount {
        if self.messages.first().is_some_and(|first| first.sequence > sequence) {
            return Amount { count: self.messages.len() as u64, bytes: self.bytes };
        }
        let mut amount = Amount::default();
        for message in self.messages.iter().filter(|message| message.sequence > sequence) {
            amount.add(Amount { count: 1, bytes: message.bytes(self.client_id.as_ref()) });
        }
        amount
    }

    /// The stamp of the last message: the position that the frame carries.
    pub fn last(&self) -> Stamp {
        let sequence = self.messages.last().map_or(0, |message| message.sequence);
        Stamp { incarnation: self.incarnation, sequence }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_counts_as_it_stands_in_json() {
        let every_ascii: String = (0..128).map(char::from).collect();
        for text in ["", "plain", "a\"b\\c", "é 漢 🙂", &every_ascii] {
            assert_eq!(
                json_bytes(text),
                serde_json::to_string(text).expect("any text is JSON").len(),
                "{text:?}"
            );
        }
    }
}
