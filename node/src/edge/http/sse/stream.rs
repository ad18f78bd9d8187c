//! Encoding of session frames as events of a stream.

use std::convert::Infallible;
use std::os::unix::net;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use axum::body::Bytes;
use fanfare_proto::frame::op;
use fastwebsockets::OpCode;
use hyper::body::{Body, Frame};
use serde::Deserialize;
use tokio::io::{AsyncRead as _, ReadBuf};
use tokio::net::UnixStream;
use tokio::time::{Instant, Interval, MissedTickBehavior, interval_at};

use crate::edge::ClientSocket;
use crate::model::{ChannelName, Operation};

const READ_BYTES: usize = 16 * 1024;
/// Size up to which events are passed on together; a larger event goes alone.
const CHUNK_BYTES: usize = 64 * 1024;
const COMMENT: &[u8] = b":\n\n";

/// Body of an event stream. Reads from the session only when the client has taken the previous events.
pub(super) struct SseStream {
    socket: UnixStream,
    received: Vec<u8>,
    events: EventEncoder,
    comments: Interval,
    /// Resolves when the client has gone: hyper does not read while it answers, so it would notice only when a write fails.
    closed: Pin<Box<dyn Future<Output = ()> + Send>>,
}

impl SseStream {
    pub(super) fn new(
        socket: net::UnixStream,
        channels: Vec<ChannelName>,
        serials: Vec<String>,
        comment_ms: u64,
        client: Option<ClientSocket>,
    ) -> std::io::Result<Self> {
        let every = Duration::from_millis(comment_ms);
        let mut comments = interval_at(Instant::now() + every, every);
        comments.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let events = EventEncoder { channels, serials, ended: false };
        let closed = async move {
            match client {
                Some(client) => client.closed().await,
                None => std::future::pending().await,
            }
        };
        let socket = UnixStream::from_std(socket)?;
        Ok(Self { socket, received: Vec::new(), events, comments, closed: Box::pin(closed) })
    }

    /// Encodes all complete frames as events.
    fn take(&mut self) -> Vec<u8> {
        let (mut out, mut taken) = (Vec::new(), 0);
        while !self.events.ended && out.len() < CHUNK_BYTES {
            let Some((opcode, payload)) = server_frame(&self.received[taken..]) else { break };
            let (start, end) = (taken + payload.start, taken + payload.end);
            taken = end;
            self.events.frame(opcode, &self.received[start..end], &mut out);
        }
        self.received.drain(..taken);
        if self.received.is_empty() {
            self.received = Vec::new();
        }
        out
    }
}

impl Body for SseStream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.events.ended || self.closed.as_mut().poll(cx).is_ready() {
            self.events.ended = true;
            return Poll::Ready(None);
        }
        loop {
            let events = self.take();
            if !events.is_empty() {
                return Poll::Ready(Some(Ok(Frame::data(events.into()))));
            }
            if self.events.ended {
                return Poll::Ready(None);
            }
            if self.comments.poll_tick(cx).is_ready() {
                // Keeps the session alive; a full socket has the same effect.
                self.socket.try_write(&client_frame(r#"{"op":0}"#)).ok();
                return Poll::Ready(Some(Ok(Frame::data(Bytes::from_static(COMMENT)))));
            }
            let mut buffer = [0; READ_BYTES];
            let mut buffer = ReadBuf::new(&mut buffer);
            match Pin::new(&mut self.socket).poll_read(cx, &mut buffer) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Ok(())) if !buffer.filled().is_empty() => {
                    self.received.extend_from_slice(buffer.filled());
                }
                Poll::Ready(_) => self.events.ended = true,
            }
        }
    }
}

/// Encoder from session frames to events.
struct EventEncoder {
    channels: Vec<ChannelName>,
    /// Position of the client in each channel.
    serials: Vec<String>,
    ended: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SessionFrame {
    op: i64,
    channel: Option<String>,
    serial: Option<String>,
    modes: Option<Vec<String>>,
    reconnect_after_ms: Option<u64>,
}

impl EventEncoder {
    fn frame(&mut self, opcode: OpCode, payload: &[u8], out: &mut Vec<u8>) {
        match opcode {
            OpCode::Text => {}
            OpCode::Close => return self.ended = true,
            _ => return,
        }
        let Ok(seen) = serde_json::from_slice::<SessionFrame>(payload) else { return };
        let listens = |modes: &[String]| modes.iter().any(|mode| mode == Operation::Subscribe.as_str());
        let event = match seen.op {
            // A narrowed capability may leave nothing to stream.
            op::ATTACHED if !seen.modes.as_deref().is_none_or(listens) => return self.ended = true,
            op::ATTACHED => "attached",
            op::MESSAGE => "message",
            // A client that listens to presence gets members under the same event name; the frame tells the two apart.
            op::PRESENCE | op::SYNC => "presence",
            op::DISCONNECTED => {
                if let Some(after_ms) = seen.reconnect_after_ms.filter(|after_ms| *after_ms > 0) {
                    out.extend_from_slice(format!("retry: {after_ms}\n\n").as_bytes());
                }
                return self.ended = true;
            }
            // An attach that was refused, or a capability that was withdrawn: a client that reconnects is told the reason.
            op::ERROR | op::NACK | op::DETACHED => return self.ended = true,
            _ => return,
        };
        let index = self.channels.iter().position(|own| Some(own.as_str()) == seen.channel.as_deref());
        if let (Some(index), Some(serial)) = (index, seen.serial) {
            self.serials[index] = serial;
        }
        let id = self.serials.join(",");
        out.extend_from_slice(format!("event: {event}\nid: {id}\ndata: ").as_bytes());
        // Compact JSON has no line breaks.
        out.extend_from_slice(payload);
        out.extend_from_slice(b"\n\n");
    }
}

/// Opcode and payload range of the first frame, which a server neither masks nor fragments; none while the frame is incomplete.
fn server_frame(bytes: &[u8]) -> Option<(OpCode, std::ops::Range<usize>)> {
    let [first, second, rest @ ..] = bytes else { return None };
    let (start, length) = match second & 0x7f {
        126 => (4, usize::from(u16::from_be_bytes(*rest.first_chunk()?))),
        127 => (10, usize::try_from(u64::from_be_bytes(*rest.first_chunk()?)).ok()?),
        short => (2, usize::from(short)),
    };
    let end = start + length;
    (bytes.len() >= end).then_some((OpCode::try_from(first & 0x0f).unwrap_or(OpCode::Close), start..end))
}

/// Text frame of a client, under a mask of zeros.
pub(super) fn client_frame(text: &str) -> Vec<u8> {
    let mut bytes = vec![0x81];
    match u16::try_from(text.len()) {
        Ok(length @ 0..126) => bytes.push(0x80 | length as u8),
        Ok(length) => {
            bytes.push(0x80 | 126);
            bytes.extend(length.to_be_bytes());
        }
        Err(_) => {
            bytes.push(0x80 | 127);
            bytes.extend((text.len() as u64).to_be_bytes());
        }
    }
    bytes.extend([0; 4]);
    bytes.extend(text.as_bytes());
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hub::wire;

    fn events() -> EventEncoder {
        let channels = ["a", "b"].map(ChannelName::of).to_vec();
        EventEncoder { channels, serials: vec![String::new(), "old".into()], ended: false }
    }

    fn encode(events: &mut EventEncoder, payload: &str) -> String {
        let mut out = Vec::new();
        events.frame(OpCode::Text, payload.as_bytes(), &mut out);
        String::from_utf8(out).expect("events are text")
    }

    #[test]
    fn an_id_holds_what_the_client_has_of_every_channel() {
        let mut events = events();
        assert_eq!(encode(&mut events, r#"{"op":3,"connectionId":"c"}"#), "");
        let attached =
            r#"{"op":9,"channel":"a","serial":"1","resumed":false,"modes":["subscribe","publish"]}"#;
        let expected = format!("event: attached\nid: 1,old\ndata: {attached}\n\n");
        assert_eq!(encode(&mut events, attached), expected);
        let message = r#"{"op":13,"channel":"b","serial":"2","messages":[{"data":"x\ny"}]}"#;
        assert_eq!(encode(&mut events, message), format!("event: message\nid: 1,2\ndata: {message}\n\n"));
        assert!(
            encode(&mut events, r#"{"op":12,"channel":"a","serial":"3"}"#)
                .starts_with("event: presence\nid: 3,2\n")
        );
        let members = r#"{"op":14,"channel":"b","members":[],"more":false}"#;
        assert_eq!(encode(&mut events, members), format!("event: presence\nid: 3,2\ndata: {members}\n\n"));
        assert_eq!(encode(&mut events, r#"{"op":0}"#), "");
        assert!(!events.ended);
    }

    #[test]
    fn an_ending_says_when_to_come_back_if_it_does() {
        for (payload, expected) in [
            (r#"{"op":4,"code":50003,"reconnectAfterMs":250}"#, "retry: 250\n\n"),
            (r#"{"op":4,"code":40142,"reconnectAfterMs":0}"#, ""),
            (r#"{"op":7,"error":"x","code":40100}"#, ""),
            (r#"{"op":11,"channel":"a","error":"x","code":40160}"#, ""),
            (r#"{"op":9,"channel":"a","serial":"1","resumed":true,"modes":["publish","presence"]}"#, ""),
        ] {
            let mut events = events();
            assert_eq!(encode(&mut events, payload), expected);
            assert!(events.ended, "{payload}");
        }
    }

    #[test]
    fn a_frame_is_found_once_it_is_whole() {
        for length in [0, 125, 126, 65_535, 65_536] {
            let payload = vec![b'x'; length];
            let frame = wire::frame(OpCode::Text, &payload);
            let (opcode, range) = server_frame(&frame).expect("a whole frame");
            assert_eq!((opcode, &frame[range]), (OpCode::Text, &payload[..]));
            assert!(server_frame(&frame[..frame.len() - 1]).is_none(), "{length}");
        }
    }
}
