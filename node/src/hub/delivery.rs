//! One publish on its way to subscribers, encoded at most once per format.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fanfare_proto::frame::{self, Format};
use fanfare_proto::serial::Serial;

use super::mark::Mark;
use super::wire;
use crate::model::{Amount, ClientId, ConnectionId, Forwarded, Message, Published, Stamp};

/// A publish with the channel number that shards know it by. The frames are whole: head and payload.
#[derive(Debug)]
pub struct Delivery {
    pub channel: u64,
    content: Content,
    /// Where the channel stood after it.
    mark: Mark,
    json: OnceLock<Bytes>,
    msgpack: OnceLock<Bytes>,
}

#[derive(Debug)]
pub enum Content {
    /// It entered here.
    Own(Arc<Published>),
    Forwarded(Box<Forwarded>),
}

impl Delivery {
    pub(super) fn own(channel: u64, mark: Mark, published: Arc<Published>) -> Self {
        Self::new(channel, mark, Content::Own(published))
    }

    /// Of what another node had for somebody who came from there. It has no place on this node.
    pub fn refilled(forwarded: Forwarded) -> Self {
        Self::forwarded(0, Mark::own(forwarded.last()), forwarded)
    }

    pub(super) fn forwarded(channel: u64, mark: Mark, forwarded: Forwarded) -> Self {
        Self::new(channel, mark, Content::Forwarded(Box::new(forwarded)))
    }

    fn new(channel: u64, mark: Mark, content: Content) -> Self {
        Self { channel, content, mark, json: OnceLock::new(), msgpack: OnceLock::new() }
    }

    /// It entered at another node.
    pub fn is_forwarded(&self) -> bool {
        matches!(self.content, Content::Forwarded(_))
    }

    /// The same where the channel had heard these too by then.
    pub(super) fn beside(&self, stamps: &[Stamp]) -> Self {
        let content = match &self.content {
            Content::Own(published) => Content::Own(Arc::clone(published)),
            Content::Forwarded(forwarded) => Content::Forwarded(forwarded.clone()),
        };
        let mut mark = self.mark.clone();
        stamps.iter().for_each(|stamp| mark.hear(*stamp, 0));
        Self::new(self.channel, mark, content)
    }

    #[cfg(test)]
    pub(crate) fn published(&self) -> &Published {
        match &self.content {
            Content::Own(published) => published,
            Content::Forwarded(_) => unreachable!("it entered here"),
        }
    }

    pub fn content(&self) -> &Content {
        &self.content
    }

    /// Where the channel stood after it.
    pub fn mark(&self) -> &Mark {
        &self.mark
    }

    /// Of its last message.
    pub fn place(&self) -> u64 {
        self.mark.place
    }

    /// Of its last message.
    pub(super) fn last(&self) -> Stamp {
        match &self.content {
            Content::Own(published) => published.last(),
            Content::Forwarded(forwarded) => forwarded.last(),
        }
    }

    pub fn count(&self) -> u64 {
        match &self.content {
            Content::Own(published) => published.messages.len() as u64,
            Content::Forwarded(forwarded) => forwarded.messages.len() as u64,
        }
    }

    /// The sizes of its messages as they are counted for the account.
    pub fn counted_bytes(&self) -> u64 {
        match &self.content {
            Content::Own(published) => published.bytes,
            Content::Forwarded(forwarded) => forwarded.bytes,
        }
    }

    /// The publisher's.
    pub fn connection_id(&self) -> ConnectionId {
        match &self.content {
            Content::Own(published) => published.connection_id,
            Content::Forwarded(forwarded) => forwarded.connection_id,
        }
    }

    pub(super) fn timestamp_ms(&self) -> u64 {
        match &self.content {
            Content::Own(published) => published.timestamp_ms,
            Content::Forwarded(forwarded) => forwarded.timestamp_ms,
        }
    }

    /// Those of its messages that stand behind a place, and their sizes; in part, those of other nodes are taken for alike.
    pub fn amount_after(&self, place: u64) -> Amount {
        let (skip, count) = (self.before(place), self.count());
        match &self.content {
            Content::Own(published) => {
                published.amount_after(published.last().sequence.saturating_sub(count - skip))
            }
            Content::Forwarded(forwarded) => {
                Amount { count: count - skip, bytes: forwarded.bytes / count * (count - skip) }
            }
        }
    }

    /// Memory that it may come to hold, roughly: the messages, and their frame in both formats.
    pub fn bytes(&self) -> usize {
        let own = match &self.content {
            Content::Own(published) => {
                let Published { messages, bytes, .. } = &**published;
                let ids: usize = messages.iter().map(|message| message.id.len()).sum();
                size_of::<Published>() + messages.len() * (size_of::<Message>() + 32) + *bytes as usize + ids
            }
            Content::Forwarded(forwarded) => {
                let texts = forwarded.messages.iter().map(|text| size_of::<Bytes>() + text.len());
                size_of::<Forwarded>() + texts.sum::<usize>()
            }
        };
        own + 2 * self.frame_bytes()
    }

    /// The length of its frame, roughly: every message has its publisher in it.
    fn frame_bytes(&self) -> usize {
        match &self.content {
            Content::Own(published) => {
                let Published { messages, bytes, .. } = &**published;
                // An id may hold what is escaped.
                let ids: usize = messages.iter().map(|message| 2 * message.id.len()).sum();
                256 + messages.len() * 128 + *bytes as usize + ids
            }
            Content::Forwarded(forwarded) => {
                256 + forwarded.messages.iter().map(|text| text.len() + 1).sum::<usize>()
            }
        }
    }

    /// For who has all before it.
    pub fn frame(&self, format: Format) -> Bytes {
        let kept = match format {
            Format::Json => &self.json,
            Format::MsgPack => &self.msgpack,
        };
        kept.get_or_init(|| self.encode(format, 0, &self.mark.serial())).clone()
    }

    /// A frame of the messages behind a place alone, for who has the others; some must be left.
    pub fn frame_after(&self, format: Format, place: u64) -> Bytes {
        match self.before(place) {
            0 => self.frame(format),
            skip => self.encode(format, skip as usize, &self.mark.serial()),
        }
    }

    /// Whether who has all up to this position has it.
    pub fn is_covered(&self, position: &Serial) -> bool {
        let Stamp { incarnation, sequence } = self.last();
        position.covers_one(incarnation, sequence)
    }

    /// For who has all before it, and what `has` covers.
    pub fn frame_beside(&self, format: Format, has: &Serial) -> Bytes {
        self.encode(format, 0, &self.mark.serial().join(has))
    }

    /// How many of its messages stand before or at the place.
    fn before(&self, place: u64) -> u64 {
        place.saturating_sub(self.place() - self.count()).min(self.count())
    }

    fn encode(&self, format: Format, skip: usize, serial: &Serial) -> Bytes {
        wire::encoded(format, self.frame_bytes(), |mut out| {
            self.write(skip, &serial.to_string(), &mut out);
            out
        })
    }

    fn write(&self, skip: usize, serial: &str, out: &mut Vec<u8>) {
        match &self.content {
            Content::Own(published) => {
                let Published { key, timestamp_ms, connection_id, client_id, messages, .. } = &**published;
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
            Content::Forwarded(forwarded) => {
                let messages = forwarded.messages.iter().skip(skip).map(|text| &text[..]);
                frame::encode_written(forwarded.key.channel(), serial, messages, out);
            }
        }
    }
}
