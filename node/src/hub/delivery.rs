//! One publish on its way to subscribers, encoded at most once per format.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, MessageOut};
use fanfare_proto::msgpack;
use fanfare_proto::serial::Serial;
use fastwebsockets::OpCode;

use super::wire;
use crate::model::{Published, Stamp};

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

    pub fn last(&self) -> Stamp {
        self.published.last()
    }

    /// Memory that an undelivered frame holds, roughly.
    pub fn bytes(&self) -> usize {
        let data = |message: &crate::model::Message| message.data.as_ref().map_or(0, |data| data.get().len());
        256 + self.published.messages.iter().map(|message| 128 + data(message)).sum::<usize>()
    }

    pub fn frame(&self, format: Format) -> Bytes {
        match format {
            Format::Json => self.json.get_or_init(|| {
                let mut buffer = wire::payload_buffer(self.bytes());
                self.encode(&mut buffer);
                wire::seal(OpCode::Text, buffer)
            }),
            Format::MsgPack => self.msgpack.get_or_init(|| {
                let mut json = Vec::with_capacity(self.bytes());
                self.encode(&mut json);
                let json = std::str::from_utf8(&json).expect("an encoded frame is JSON text");
                wire::frame(OpCode::Binary, &msgpack::from_json(json))
            }),
        }
        .clone()
    }

    fn encode(&self, out: &mut Vec<u8>) {
        let published = &*self.published;
        let last = published.last();
        let messages = published.messages.iter().map(|message| MessageOut {
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
