//! Frames of a client, one by one, so that a frame that comes twice is noticed.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf as _, BytesMut};
use fanfare::model::Stamp;
use fanfare_proto::serial::Serial;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, timeout, timeout_at};

use crate::SOON;
use crate::nodes::KEY;

const WHOLE_TEXT: u8 = 0x81;

/// A realtime session.
pub(crate) struct Socket {
    stream: TcpStream,
    buffer: BytesMut,
    last_id: u64,
    /// Frames that came before an answer that was waited for.
    backlog: VecDeque<Value>,
    /// The `connected` frame.
    pub(crate) connected: Value,
}

impl Socket {
    /// Connects. `query` begins with `?` or is empty.
    pub(crate) async fn open(addr: SocketAddr, query: &str) -> Self {
        let upgrade = "connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n\
                       sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n";
        let stream = send(addr, &format!("GET /realtime{query}"), upgrade).await;
        let (buffer, backlog) = (BytesMut::new(), VecDeque::new());
        let mut socket = Self { stream, buffer, last_id: 0, backlog, connected: Value::Null };
        let end = Instant::now() + SOON;
        let end_of_head = loop {
            if let Some(at) = socket.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                break at + 4;
            }
            assert!(socket.read_until(end).await, "the upgrade is not answered");
        };
        let head = socket.buffer.split_to(end_of_head);
        assert!(head.starts_with(b"HTTP/1.1 101"), "{}", String::from_utf8_lossy(&head));
        socket.connected = socket.next().await;
        assert_eq!(socket.connected["op"], 3, "{}", socket.connected);
        socket
    }

    /// Attaches to a channel; `how` has further fields of the request.
    pub(crate) async fn attach(&mut self, channel: &str, how: &Value) -> Value {
        let mut request = json!({"op": 8, "channel": channel});
        for (name, value) in how.as_object().expect("fields of the request") {
            request[name] = value.clone();
        }
        let attached = self.ask(request).await;
        assert_eq!(attached["op"], 9, "{attached}");
        attached
    }

    /// Publishes messages at once, and gives the stamps of the ack.
    pub(crate) async fn publish(&mut self, channel: &str, messages: &[Value]) -> Vec<Stamp> {
        let id = self.start_publish(channel, messages).await;
        self.published(&id).await
    }

    /// Publishes as [`Self::publish`] does, but gives the id of the request instead of waiting for the answer.
    pub(crate) async fn start_publish(&mut self, channel: &str, messages: &[Value]) -> String {
        self.start(json!({"op": 13, "channel": channel, "messages": messages})).await
    }

    pub(crate) async fn published(&mut self, id: &str) -> Vec<Stamp> {
        let answer = self.answer(id).await;
        assert_eq!(answer["op"], 1, "{answer}");
        let stamp = |serial: &Value| {
            let serial: Serial = serial.as_str().expect("a serial").parse().expect("a serial");
            let [(incarnation, sequence)] = *serial.entries() else {
                unreachable!("one message has one place, not {serial}")
            };
            Stamp { incarnation, sequence }
        };
        answer["serials"].as_array().expect("serials").iter().map(stamp).collect()
    }

    /// Enters, updates or leaves.
    pub(crate) async fn present(&mut self, action: &str, channel: &str, data: &Value) {
        let request = json!({"op": 12, "channel": channel, "action": action, "data": data});
        let answer = self.ask(request).await;
        assert_eq!(answer["op"], 1, "{answer}");
    }

    async fn ask(&mut self, request: Value) -> Value {
        let id = self.start(request).await;
        self.answer(&id).await
    }

    /// Sends a request with a fresh id, which it gives.
    async fn start(&mut self, mut request: Value) -> String {
        self.last_id += 1;
        let id = format!("r{}", self.last_id);
        request["id"] = json!(id);
        self.send(&request).await;
        id
    }

    /// The answer to a request; what comes before it stays to be read.
    async fn answer(&mut self, id: &str) -> Value {
        let mut before = VecDeque::new();
        let answer = loop {
            let frame = self.next().await;
            if frame["id"] == *id {
                break frame;
            }
            before.push_back(frame);
        };
        before.append(&mut self.backlog);
        self.backlog = before;
        answer
    }

    pub(crate) async fn send(&mut self, frame: &Value) {
        let text = frame.to_string();
        let mut bytes = vec![WHOLE_TEXT];
        match u16::try_from(text.len()).expect("a short frame") {
            short @ 0..126 => bytes.push(0x80 | short as u8),
            long => {
                bytes.push(0x80 | 126);
                bytes.extend(long.to_be_bytes());
            }
        }
        // A mask of zeros leaves the text as it is.
        bytes.extend([0; 4]);
        bytes.extend(text.as_bytes());
        self.stream.write_all(&bytes).await.expect("the node takes it");
    }

    /// The next frame. Fails the test when none comes.
    pub(crate) async fn next(&mut self) -> Value {
        self.next_within(SOON).await.expect("a frame in time")
    }

    pub(crate) async fn next_within(&mut self, wait: Duration) -> Option<Value> {
        if let Some(frame) = self.backlog.pop_front() {
            return Some(frame);
        }
        let end = Instant::now() + wait;
        loop {
            if let Some(frame) = self.take_frame() {
                return Some(frame);
            }
            if !self.read_until(end).await {
                return None;
            }
        }
    }

    /// Takes the first complete frame of the read bytes.
    fn take_frame(&mut self) -> Option<Value> {
        let (kind, short) = (*self.buffer.first()?, *self.buffer.get(1)?);
        let (head, length) = match short {
            126 => (4, usize::from(u16::from_be_bytes(*self.buffer.get(2..)?.first_chunk()?))),
            127 => (10, u64::from_be_bytes(*self.buffer.get(2..)?.first_chunk()?) as usize),
            short => (2, usize::from(short)),
        };
        if self.buffer.len() < head + length {
            return None;
        }
        self.buffer.advance(head);
        let payload = self.buffer.split_to(length);
        assert_eq!(kind, WHOLE_TEXT, "{}", String::from_utf8_lossy(&payload));
        Some(serde_json::from_slice(&payload).expect("JSON"))
    }

    /// Reads once. False if nothing came in time.
    async fn read_until(&mut self, end: Instant) -> bool {
        match timeout_at(end, self.stream.read_buf(&mut self.buffer)).await {
            Ok(read) => {
                assert_ne!(read.expect("the node is there"), 0, "the node has closed the connection");
                true
            }
            Err(_) => false,
        }
    }
}

/// Sends a request over HTTP, and gives the body of its answer.
pub(crate) async fn request(addr: SocketAddr, what: &str, body: &str) -> Value {
    let length = body.len();
    let rest = format!("connection: close\r\ncontent-length: {length}\r\n\r\n{body}");
    let mut stream = send(addr, what, &rest).await;
    let mut answer = Vec::new();
    timeout(SOON, stream.read_to_end(&mut answer)).await.expect("in time").expect("an answer");
    let answer = String::from_utf8(answer).expect("a text");
    let (head, body) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200"), "{what}: {answer}");
    serde_json::from_str(body).expect("JSON")
}

/// Begins a request on a connection of its own. `what` is method and path, `rest` the last headers and the body.
async fn send(addr: SocketAddr, what: &str, rest: &str) -> TcpStream {
    let mut stream = TcpStream::connect(addr).await.expect("the node accepts");
    stream.set_nodelay(true).expect("a socket option");
    let authorization = STANDARD.encode(KEY);
    let text =
        format!("{what} HTTP/1.1\r\nhost: localhost\r\nauthorization: Basic {authorization}\r\n{rest}");
    stream.write_all(text.as_bytes()).await.expect("the node takes it");
    stream
}
