//! A realtime session frame by frame, so that a test sees exactly the frames of a node.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use fanfare_proto::msgpack;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout_at};

use crate::raw::{self, End, Raw};
use crate::{Node, SOON, http};

const NESTING_MAX: usize = 128;
const JSON_BYTES_MAX: usize = 16 * 1024 * 1024;

pub struct Socket {
    raw: Raw,
    binary: bool,
    next_id: u64,
    /// Frames that came before an awaited answer.
    backlog: VecDeque<Value>,
    /// The `connected` frame.
    pub connected: Value,
}

impl Socket {
    /// Connects with the node's key. `query` begins with `?` or is empty.
    pub async fn open(node: &Node, query: &str) -> Self {
        Self::open_as(node, query, &http::basic(&node.key())).await
    }

    /// Connects with an `authorization` header of the caller's choice.
    pub async fn open_as(node: &Node, query: &str, authorization: &str) -> Self {
        Self::over(Raw::connect(node.addr()).await, query, authorization).await
    }

    /// Upgrades a connection, and reads `connected`.
    pub async fn over(mut raw: Raw, query: &str, authorization: &str) -> Self {
        let path = format!("/realtime{query}");
        let (status, head) = raw.upgrade(&path, &[("authorization", authorization)]).await;
        assert_eq!(status, 101, "{head}");
        Self::upgraded(raw, query.contains("format=msgpack")).await
    }

    /// Connects to an address where there may be no node, or one that does not run; `None` in these cases.
    pub async fn try_open(addr: SocketAddr, query: &str, key: &str) -> Option<Self> {
        let stream = TcpStream::connect(addr).await.ok()?;
        stream.set_nodelay(true).ok()?;
        let mut raw = Raw::over(stream);
        let path = format!("/realtime{query}");
        let (status, _) = raw.try_upgrade(&path, &[("authorization", &http::basic(key))]).await.ok()?;
        let mut socket = Self::refused(raw, query.contains("format=msgpack"));
        socket.connected = socket.next_within(SOON).await.ok()?;
        (status == 101 && socket.connected["op"] == 3).then_some(socket)
    }

    /// Takes a connection whose upgrade was accepted, and reads `connected`.
    pub async fn upgraded(raw: Raw, binary: bool) -> Self {
        let mut socket = Self::refused(raw, binary);
        socket.connected = socket.next().await;
        assert_eq!(socket.connected["op"], 3, "{}", socket.connected);
        socket
    }

    /// Takes a connection whose upgrade was accepted, and reads nothing: the first frame is expected to be a refusal.
    pub fn refused(raw: Raw, binary: bool) -> Self {
        Self { raw, binary, next_id: 0, backlog: VecDeque::new(), connected: Value::Null }
    }

    pub fn raw(&mut self) -> &mut Raw {
        &mut self.raw
    }

    /// Sends a frame as it is.
    pub async fn send(&mut self, frame: &Value) {
        assert!(self.try_send(frame).await, "the node takes {frame}");
    }

    /// Sends a frame to a node that may be gone. Its answer shows whether it got the frame.
    pub async fn try_send(&mut self, frame: &Value) -> bool {
        let (head, bytes) = if self.binary {
            (raw::BINARY, msgpack::from_json(&frame.to_string()))
        } else {
            (raw::TEXT, frame.to_string().into_bytes())
        };
        self.raw.send(raw::FIN | head, &bytes).await
    }

    /// Sends a request with a fresh id, which it returns.
    pub async fn start(&mut self, mut request: Value) -> String {
        self.next_id += 1;
        let id = format!("r{}", self.next_id);
        request["id"] = json!(id);
        self.send(&request).await;
        id
    }

    /// Sends a request and returns its answer; earlier frames stay to be read.
    pub async fn ask(&mut self, request: Value) -> Value {
        let id = self.start(request).await;
        let end = Instant::now() + SOON;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.read_within(left).await {
                Ok(frame) if frame["id"] == *id => return frame,
                Ok(frame) => self.backlog.push_back(frame),
                Err(end) => unreachable!("waited for the answer to {id}, but {end:?}"),
            }
        }
    }

    pub async fn attach(&mut self, channel: &str) -> Value {
        let attached = self.ask(json!({"op": 8, "channel": channel})).await;
        assert_eq!(attached["op"], 9, "{attached}");
        attached
    }

    /// Publishes one message and returns its serial.
    pub async fn publish(&mut self, channel: &str, message: Value) -> String {
        let ack = self.ask(json!({"op": 13, "channel": channel, "messages": [message]})).await;
        assert_eq!(ack["op"], 1, "{ack}");
        ack["serials"][0].as_str().expect("a serial").into()
    }

    /// Reads the next frame. Fails the test without one.
    pub async fn next(&mut self) -> Value {
        let frame = self.next_within(SOON).await;
        frame.unwrap_or_else(|end| unreachable!("a frame was expected, but {end:?}"))
    }

    /// Reads the next frame of the protocol, or gives the reason why none came. Answers WebSocket pings.
    pub async fn next_within(&mut self, deadline: Duration) -> Result<Value, SocketEnd> {
        match self.backlog.pop_front() {
            Some(frame) => Ok(frame),
            None => self.read_within(deadline).await,
        }
    }

    async fn read_within(&mut self, deadline: Duration) -> Result<Value, SocketEnd> {
        let end = Instant::now() + deadline;
        loop {
            let read = timeout_at(end, self.raw.frame(deadline)).await.unwrap_or(Err(End::Silence));
            let frame = read.map_err(|end| match end {
                End::Gone => SocketEnd::Gone,
                End::Silence => SocketEnd::Silence,
            })?;
            assert!(frame.fin && frame.reserved == 0, "{frame:?}");
            match frame.opcode {
                raw::CLOSE => return Err(SocketEnd::Closed(frame.close_code().unwrap_or(1005))),
                raw::PING => drop(self.raw.send(raw::FIN | raw::PONG, &frame.payload).await),
                raw::PONG => {}
                opcode => return Ok(self.decode(opcode, &frame.payload)),
            }
        }
    }

    /// Gives the first frame for which `matches` holds, and drops earlier ones.
    pub async fn find(&mut self, what: &str, matches: impl Fn(&Value) -> bool) -> Value {
        let end = Instant::now() + SOON;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            match self.next_within(left).await {
                Ok(frame) if matches(&frame) => return frame,
                Ok(_) => {}
                Err(end) => unreachable!("waited for {what}, but {end:?}"),
            }
        }
    }

    /// Gives the next message frame on a channel.
    pub async fn message(&mut self, channel: &str) -> Value {
        let what = format!("a message on {channel}");
        self.find(&what, |frame| frame["op"] == 13 && frame["channel"] == channel).await
    }

    /// Reads all frames until the end of the connection.
    pub async fn to_end(&mut self, deadline: Duration) -> (Vec<Value>, SocketEnd) {
        let end = Instant::now() + deadline;
        let mut frames = Vec::new();
        loop {
            match self.next_within(end.saturating_duration_since(Instant::now())).await {
                Ok(frame) => frames.push(frame),
                Err(ended) => return (frames, ended),
            }
        }
    }

    fn decode(&self, opcode: u8, payload: &[u8]) -> Value {
        if self.binary {
            assert_eq!(opcode, raw::BINARY);
            let json = msgpack::to_json(payload, NESTING_MAX, JSON_BYTES_MAX).expect("MessagePack");
            return serde_json::from_str(&json).expect("JSON");
        }
        assert_eq!(opcode, raw::TEXT);
        assert!(payload.starts_with(b"{\"op\":"), "op comes first: {:?}", String::from_utf8_lossy(payload));
        serde_json::from_slice(payload).expect("JSON")
    }
}

/// Reason for which there is no further frame.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SocketEnd {
    /// Close frame with this code.
    Closed(u16),
    /// End of the connection without a close frame.
    Gone,
    /// Nothing came in time.
    Silence,
}
