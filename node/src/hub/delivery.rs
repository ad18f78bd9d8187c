//! One publish on its way to subscribers, encoded at most once per format.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fanfare_proto::frame::{self, Format};
use fanfare_proto::serial::Serial;

use super::channel_position::ChannelPosition;
use super::wire;
use crate::model::{Amount, ClientId, ConnectionId, ForwardedMessages, Message, PublishedMessages, Stamp};

/// A publish with the channel number of the shards. Frames are complete: head and payload.
#[derive(Debug)]
pub struct MessageDelivery {
    pub channel: u64,
    content: DeliveryContent,
    /// Position of the channel after this delivery.
    position: ChannelPosition,
    json: OnceLock<Bytes>,
    msgpack: OnceLock<Bytes>,
}

#[derive(Debug)]
pub enum DeliveryContent {
    /// Published at this node.
    Own(Arc<PublishedMessages>),
    Forwarded(Box<ForwardedMessages>),
}

impl MessageDelivery {
    pub(super) fn own(channel: u64, position: ChannelPosition, published: Arc<PublishedMessages>) -> Self {
        Self::new(channel, position, DeliveryContent::Own(published))
    }

    /// Wraps a message that a peer backfills for one resuming client. It has no local offset.
    pub fn backfilled(forwarded: ForwardedMessages) -> Self {
        Self::forwarded(0, ChannelPosition::own(forwarded.last()), forwarded)
    }

    pub(super) fn forwarded(channel: u64, position: ChannelPosition, forwarded: ForwardedMessages) -> Self {
        Self::new(channel, position, DeliveryContent::Forwarded(Box::new(forwarded)))
    }

    fn new(channel: u64, position: ChannelPosition, content: DeliveryContent) -> Self {
        Self { channel, content, position, json: OnceLock::new(), msgpack: OnceLock::new() }
    }

    /// Whether the messages were published at another node.
    pub fn is_forwarded(&self) -> bool {
        matches!(self.content, DeliveryContent::Forwarded(_))
    }

    /// A copy whose position also includes these stamps.
    pub(super) fn including(&self, stamps: &[Stamp]) -> Self {
        let content = match &self.content {
            DeliveryContent::Own(published) => DeliveryContent::Own(Arc::clone(published)),
            DeliveryContent::Forwarded(forwarded) => DeliveryContent::Forwarded(forwarded.clone()),
        };
        let mut position = self.position.clone();
        stamps.iter().for_each(|stamp| position.receive(*stamp, 0));
        Self::new(self.channel, position, content)
    }

    #[cfg(test)]
    pub(crate) fn published(&self) -> &PublishedMessages {
        match &self.content {
            DeliveryContent::Own(published) => published,
            DeliveryContent::Forwarded(_) => unreachable!("it entered here"),
        }
    }

    pub fn content(&self) -> &DeliveryContent {
        &self.content
    }

    /// Position of the channel after this delivery.
    pub fn position(&self) -> &ChannelPosition {
        &self.position
    }

    /// Local offset of the last message.
    pub fn offset(&self) -> u64 {
        self.position.offset
    }

    /// Stamp of the last message.
    pub(super) fn last(&self) -> Stamp {
        match &self.content {
            DeliveryContent::Own(published) => published.last(),
            DeliveryContent::Forwarded(forwarded) => forwarded.last(),
        }
    }

    pub fn count(&self) -> u64 {
        match &self.content {
            DeliveryContent::Own(published) => published.messages.len() as u64,
            DeliveryContent::Forwarded(forwarded) => forwarded.messages.len() as u64,
        }
    }

    /// Sizes of the messages as counted for the account.
    pub fn counted_bytes(&self) -> u64 {
        match &self.content {
            DeliveryContent::Own(published) => published.bytes,
            DeliveryContent::Forwarded(forwarded) => forwarded.bytes,
        }
    }

    /// Connection id of the publisher.
    pub fn connection_id(&self) -> ConnectionId {
        match &self.content {
            DeliveryContent::Own(published) => published.connection_id,
            DeliveryContent::Forwarded(forwarded) => forwarded.connection_id,
        }
    }

    pub(super) fn timestamp_ms(&self) -> u64 {
        match &self.content {
            DeliveryContent::Own(published) => published.timestamp_ms,
            DeliveryContent::Forwarded(forwarded) => forwarded.timestamp_ms,
        }
    }

    /// Number and sizes of the messages after an offset. For messages of other nodes cut in the middle, an estimate from their mean size.
    pub fn amount_after(&self, offset: u64) -> Amount {
        let (skip, count) = (self.before(offset), self.count());
        match &self.content {
            DeliveryContent::Own(published) => {
                published.amount_after(published.last().sequence.saturating_sub(count - skip))
            }
            DeliveryContent::Forwarded(forwarded) => {
                Amount { count: count - skip, bytes: forwarded.bytes / count * (count - skip) }
            }
        }
    }

    /// Memory that the delivery may take, roughly: the messages, and their frames in both formats.
    pub fn bytes(&self) -> usize {
        let own = match &self.content {
            DeliveryContent::Own(published) => {
                let PublishedMessages { messages, bytes, .. } = &**published;
                let ids: usize = messages.iter().map(|message| message.id.len()).sum();
                size_of::<PublishedMessages>()
                    + messages.len() * (size_of::<Message>() + 32)
                    + *bytes as usize
                    + ids
            }
            DeliveryContent::Forwarded(forwarded) => {
                let texts = forwarded.messages.iter().map(|text| size_of::<Bytes>() + text.len());
                size_of::<ForwardedMessages>() + texts.sum::<usize>()
            }
        };
        own + 2 * self.frame_bytes()
    }

    /// Length of the frame, roughly: every message has its publisher in it.
    fn frame_bytes(&self) -> usize {
        match &self.content {
            DeliveryContent::Own(published) => {
                let PublishedMessages { messages, bytes, .. } = &**published;
                // Ids may contain characters that are escaped.
                let ids: usize = messages.iter().map(|message| 2 * message.id.len()).sum();
                256 + messages.len() * 128 + *bytes as usize + ids
            }
            DeliveryContent::Forwarded(forwarded) => {
                256 + forwarded.messages.iter().map(|text| text.len() + 1).sum::<usize>()
            }
        }
    }

    /// The frame for a subscriber that has every earlier message.
    pub fn frame(&self, format: Format) -> Bytes {
        let kept = match format {
            Format::Json => &self.json,
            Format::MsgPack => &self.msgpack,
        };
        kept.get_or_init(|| self.encode(format, 0, &self.position.serial())).clone()
    }

    /// The frame of only the messages after an offset, which must not be empty.
    pub fn frame_after(&self, format: Format, offset: u64) -> Bytes {
        match self.before(offset) {
            0 => self.frame(format),
            skip => self.encode(format, skip as usize, &self.position.serial()),
        }
    }

    /// Whether a position includes the last message of this delivery.
    pub fn is_included_in(&self, position: &Serial) -> bool {
        let Stamp { incarnation, sequence } = self.last();
        position.includes_one(incarnation, sequence)
    }

    /// The frame for a client that has every earlier message and those that `received` includes.
    pub fn frame_including(&self, format: Format, received: &Serial) -> Bytes {
        self.encode(format, 0, &self.position.serial().join(received))
    }

    /// Gives the number of messages that are at or before the offset.
    fn before(&self, offset: u64) -> u64 {
        offset.saturating_sub(self.offset() - self.count()).min(self.count())
    }

    fn encode(&self, format: Format, skip: usize, serial: &Serial) -> Bytes {
        wire::encoded(format, self.frame_bytes(), |mut out| {
            self.write(skip, &serial.to_string(), &mut out);
            out
        })
    }

    fn write(&self, skip: usize, serial: &str, out: &mut Vec<u8>) {
        match &self.content {
            DeliveryContent::Own(published) => {
                let PublishedMessages { key, timestamp_ms, connection_id, client_id, messages, .. } =
                    &**published;
                let client_id = client_id.as_ref().map(ClientId::as_str);
                let messages = messages.iter().skip(skip).map(Message::as_sent);
                let connection_id = connection_id.to_string();
                frame::encode_messages(
                    key.channel(),
                    serial,
                    *timestamp_ms,
                    &connection_id,
                    client_id,
                    messages,
                    out,
                );
            }
            DeliveryContent::Forwarded(forwarded) => {
                let messages = forwarded.messages.iter().skip(skip).map(|text| &text[..]);
                frame::encode_written(forwarded.key.channel(), serial, messages, out);
            }
        }
    }
}
