//! One publish on its way to subscribers, encoded at most once per format.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, MessageOut};
use fanfare_proto::msgpack;
use fanfare_proto::serial::Serial;
use fastwebsockets::OpCode;

use super::wire;
use crate::model::{Message, Published, Stamp};

/// A publish with the channel number that shards know it by. The frames are whole: head and payload.
#[derive(Debug)]
pub struct Delivery {
    pub channel: u64,
    pub published: Arc<Published>,
    json: OnceLock<Bytes>,
    msgpack: OnceLock<Bytes>,
}

impl Delivery {
    pub fn new(channel: u64, published: Arc<Published>) -> Self {
        Self { channel, published, json: OnceLock::new(), msgpack: OnceLock::new() }
    }

    pub fn first_sequence(&self) -> u64 {
        self.published.messages.first().map_or(0, |message| message.sequence)
    }

    pub fn last(&self) -> Stamp {
        self.published.last()
    }

    /// Memory that it may come to hold, roughly: the messages, and their frame in both formats.
    pub fn bytes(&self) -> usize {
        let Published { messages, bytes, .. } = &*self.published;
        let ids: usize = messages.iter().map(|message| message.id.len()).sum();
        let own =
            size_of::<Published>() + messages.len() * (size_of::<Message>() + 32) + *bytes as usize + ids;
        own + 2 * self.frame_bytes()
    }

    /// The length of its frame, roughly: every message has its publisher in it.
    fn frame_bytes(&self) -> usize {
        let Published { messages, bytes, .. } = &*self.published;
        // An id may hold what is escaped.
        let ids: usize = messages.iter().map(|message| 2 * message.id.len()).sum();
        256 + messages.len() * 128 + *bytes as usize + ids
    }

    pub fn frame(&self, format: Format) -> Bytes {
        match format {
            Format::Json => self.json.get_or_init(|| self.encode(format, 0)),
            Format::MsgPack => self.msgpack.get_or_init(|| self.encode(format, 0)),
        }
        .clone()
    }

    /// A frame of the messages after `sequence` alone, for who has the others; some must be left.
    pub fn frame_after(&self, format: Format, sequence: u64) -> Bytes {
        match sequence.checked_sub(self.first_sequence()) {
            None => self.frame(format),
            Some(before_last) => self.encode(format, before_last as usize + 1),
        }
    }

    fn encode(&self, format: Format, skip: usize) -> Bytes {
        match format {
            Format::Json => {
                let mut buffer = wire::payload_buffer(self.frame_bytes());
                self.write(skip, &mut buffer);
                wire::seal(OpCode::Text, buffer)
            }
            Format::MsgPack => {
                let mut json = Vec::with_capacity(self.frame_bytes());
                self.write(skip, &mut json);
                let json = std::str::from_utf8(&json).expect("an encoded frame is JSON text");
                wire::frame(OpCode::Binary, &msgpack::from_json(json))
            }
        }
    }

    fn write(&self, skip: usize, out: &mut Vec<u8>) {
        let published = &*self.published;
        let last = published.last();
        let messages = published.messages.iter().skip(skip).map(|message| MessageOut {
            id: &message.id,
            name: message.name.as_deref(),
            data: message.data.as_deref(),
            extras: message.extras.as_deref(),
        });
        frame::encode_messages(
            published.key.channel(),
            &Serial::single(last.incarnation, last.sequence).to_string(),
            published.timestamp_ms,
            &published.connection_id.to_string(),
            published.client_id.as_ref().map(crate::model::ClientId::as_str),
            messages,
            out,
        );
    }
}
