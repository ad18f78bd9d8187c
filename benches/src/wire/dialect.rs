//! Protocols of the generator, as far as it needs them to subscribe, to publish and to stay connected.

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use super::websocket::opcode;
use super::{centrifuge, frames, handshake, nats, pusher};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Default, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Dialect {
    #[default]
    Fanfare,
    CentrifugeJson,
    CentrifugeProtobuf,
    Nats,
    Pusher,
}

/// Meaning of a server's frame.
#[derive(Debug, PartialEq, Eq)]
pub enum ReplyKind {
    /// Answer to the oldest open request; opening a connection is the first request.
    Done,
    Refused,
    /// Frame that no request waits for.
    Other,
}

impl Dialect {
    /// Gives the name of the protocol on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Fanfare => "fanfare",
            Self::CentrifugeJson => "centrifuge-json",
            Self::CentrifugeProtobuf => "centrifuge-protobuf",
            Self::Nats => "nats",
            Self::Pusher => "pusher",
        }
    }

    pub fn upgrade(self, host: &str, authorization: Option<&str>) -> Vec<u8> {
        let subprotocol = match self {
            Self::CentrifugeJson => Some("centrifuge-json"),
            Self::CentrifugeProtobuf => Some("centrifuge-protobuf"),
            Self::Fanfare | Self::Nats | Self::Pusher => None,
        };
        let path = if self == Self::Pusher { pusher::path() } else { handshake::PATH.to_owned() };
        handshake::request(host, &path, authorization, subprotocol)
    }

    /// The opcode of the WebSocket frames that a client sends.
    pub fn opcode(self) -> u8 {
        match self {
            Self::Fanfare | Self::CentrifugeJson | Self::Pusher => opcode::TEXT,
            Self::CentrifugeProtobuf | Self::Nats => opcode::BINARY,
        }
    }

    /// Gives the client's first frame, if the client begins.
    pub fn hello(self) -> Option<Vec<u8>> {
        match self {
            Self::Fanfare | Self::Pusher => None,
            Self::CentrifugeJson => Some(centrifuge::json::CONNECT.into()),
            Self::CentrifugeProtobuf => Some(centrifuge::protobuf::connect()),
            Self::Nats => Some(nats::CONNECT.into()),
        }
    }

    /// Makes the request for a channel. `id` is unique within the connection, `welcome` is the first frame of the
    /// server.
    pub fn subscribe(self, id: u32, channel: &str, welcome: &[u8]) -> Vec<u8> {
        match self {
            Self::Fanfare => frames::attach(id.into(), channel).into(),
            Self::CentrifugeJson => centrifuge::json::subscribe(id, channel).into(),
            Self::CentrifugeProtobuf => centrifuge::protobuf::subscribe(id, channel),
            Self::Nats => nats::subscribe(id, channel).into(),
            Self::Pusher => pusher::subscribe(welcome, channel).into(),
        }
    }

    /// Makes a publish of one message; `data` is JSON.
    pub fn publish(self, id: u32, channel: &str, data: &str) -> Vec<u8> {
        match self {
            Self::Fanfare => frames::publish(id.into(), channel, data).into(),
            Self::CentrifugeJson => centrifuge::json::publish(id, channel, data).into(),
            Self::CentrifugeProtobuf => centrifuge::protobuf::publish(id, channel, data),
            Self::Nats => nats::publish(channel, data).into(),
            Self::Pusher => pusher::publish(channel, data).into(),
        }
    }

    /// Whether the server acknowledges a publish, with `Done`.
    pub fn acks(self) -> bool {
        !matches!(self, Self::Nats | Self::Pusher)
    }

    /// Whether a client must be attached to a channel to publish to it. It does not get its own messages.
    pub fn publishers_listen(self) -> bool {
        self == Self::Pusher
    }

    /// Splits the payload of one WebSocket frame into the server's frames, in order.
    pub fn each(self, payload: &[u8], take: impl FnMut(&[u8])) {
        match self {
            Self::Fanfare | Self::Pusher => [payload].into_iter().for_each(take),
            Self::CentrifugeJson => centrifuge::json::replies(payload, take),
            Self::CentrifugeProtobuf => centrifuge::protobuf::replies(payload).for_each(take),
            Self::Nats => nats::operations(payload).for_each(take),
        }
    }

    /// Gives the answer to a ping of the server; `None` for any other frame.
    pub fn pong(self, payload: &[u8]) -> Option<&'static [u8]> {
        match self {
            Self::Fanfare => None,
            Self::CentrifugeJson => (payload == b"{}").then_some(b"{}"),
            Self::CentrifugeProtobuf => payload.is_empty().then_some(&[0]),
            Self::Nats => payload.starts_with(b"PING").then_some(b"PONG\r\n"),
            Self::Pusher => pusher::is_ping(payload).then_some(pusher::PONG),
        }
    }

    /// Gives the frame of a client that was silent for long, if the protocol asks for it.
    pub fn heartbeat(self) -> Option<&'static [u8]> {
        (self == Self::Fanfare).then_some(frames::HEARTBEAT.as_bytes())
    }

    /// Gives the meaning of a frame that is no message.
    pub fn reply_kind(self, payload: &[u8]) -> ReplyKind {
        match self {
            Self::Fanfare => frames::reply_kind(payload),
            Self::CentrifugeJson => centrifuge::json::reply_kind(payload),
            Self::CentrifugeProtobuf => centrifuge::protobuf::reply_kind(payload),
            Self::Nats => nats::reply_kind(payload),
            Self::Pusher => pusher::reply_kind(payload),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialect_is_found_by_its_own_name() {
        for dialect in Dialect::value_variants() {
            assert_eq!(Dialect::from_str(dialect.name(), false).as_ref(), Ok(dialect));
        }
    }
}
