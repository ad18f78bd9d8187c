//! Bridge between the suite, which expects an echo of its messages, and a node: each message is put into the `id` of a
//! heartbeat, and the node's answer is the same frame. Everything except the payload of messages passes unchanged:
//! frames and fragments, control frames, invalid frames, and the end of either side.

use std::net::SocketAddr;
use std::time::Duration;

use fanfare_cluster_tests::raw::{BINARY, CONTINUATION, FIN, TEXT};
use serde_json::Value;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

/// Time after which an incomplete frame is passed on as it is.
const QUIET: Duration = Duration::from_millis(50);
const TEXT_BEGINS: &[u8] = br#"{"op":0,"id":""#;
const TEXT_ENDS: &[u8] = br#""}"#;
/// Beginning of a MessagePack map of two entries: `op`, 0, `id`, and a text with a length of four bytes.
const BINARY_BEGINS: &[u8] = b"\x82\xa2op\x00\xa2id\xdb";
const MASK: [u8; 4] = [0x5a, 0xa5, 0x3c, 0xc3];

/// The kinds of messages of the cases.
#[derive(Debug, Clone, Copy)]
pub(super) enum Messages {
    /// Text messages, which become JSON with a few escaped bytes.
    Text,
    /// Binary messages, which become hexadecimal text in MessagePack, behind its length.
    Binary { fragmented_bytes: u32 },
}

/// A relay between the suite and a node, which puts each message into a frame of the protocol. Dropping it
/// ends its connections.
pub(super) struct Bridge {
    addr: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Bridge {
    pub(super) async fn open(node: SocketAddr, authorization: &str, messages: Messages) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let addr = listener.local_addr().expect("an address");
        let format = match messages {
            Messages::Text => "json",
            Messages::Binary { .. } => "msgpack",
        };
        let head = format!("GET /realtime?format={format} HTTP/1.1\r\nauthorization: {authorization}\r\n");
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let (client, _) = listener.accept().await.expect("a connection");
                let node = TcpStream::connect(node).await.expect("the node accepts");
                client.set_nodelay(true).expect("a socket option");
                node.set_nodelay(true).expect("a socket option");
                let (from_client, to_client) = client.into_split();
                let (from_node, to_node) = node.into_split();
                connections.spawn(up(from_client, to_node, head.clone(), messages));
                connections.spawn(down(from_node, to_client));
            }
        });
        Self { addr, _tasks: tasks }
    }

    pub(super) fn addr(&self) -> SocketAddr {
        self.addr
    }
}

/// Relays from the suite to the node.
async fn up(mut client: OwnedReadHalf, mut node: OwnedWriteHalf, head: String, messages: Messages) {
    let Some((_, rest)) = http_head(&mut client).await else { return };
    // The suite wrote the first line itself.
    let (mut out, rest) = (head.into_bytes(), rest);
    let first_line = rest.iter().position(|byte| *byte == b'\n').expect("a line") + 1;
    let end = rest.windows(4).position(|bytes| bytes == b"\r\n\r\n").expect("a head") + 4;
    out.extend(&rest[first_line..end]);
    let mut frames =
        UpstreamBridge { messages, is_within: false, passing: None, input: rest[end..].to_vec() };
    let mut buffer = vec![0; 64 * 1024];
    loop {
        if node.write_all(&out).await.is_err() {
            return;
        }
        out.clear();
        let read = match timeout(QUIET, client.read(&mut buffer)).await {
            Ok(Ok(0) | Err(_)) => break,
            Ok(Ok(read)) => read,
            Err(_) => {
                frames.translate(true, &mut out);
                if !out.is_empty() {
                    continue;
                }
                match client.read(&mut buffer).await {
                    Ok(0) | Err(_) => break,
                    Ok(read) => read,
                }
            }
        };
        frames.input.extend_from_slice(&buffer[..read]);
        frames.translate(false, &mut out);
    }
    frames.translate(true, &mut out);
    // The node may have closed the connection before.
    node.write_all(&out).await.ok();
    node.shutdown().await.ok();
}

/// Reads the head of a request; gives its length and all bytes that were read.
async fn http_head(stream: &mut OwnedReadHalf) -> Option<(usize, Vec<u8>)> {
    let mut bytes = Vec::new();
    loop {
        if let Some(end) = bytes.windows(4).position(|part| part == b"\r\n\r\n") {
            return Some((end + 4, bytes));
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
}

/// Head of a frame, and the number of its bytes before the mask.
struct Head {
    first: u8,
    bytes: usize,
    mask: Option<[u8; 4]>,
    payload_bytes: usize,
}

impl Head {
    fn read(bytes: &[u8]) -> Option<Self> {
        let [first, second, rest @ ..] = bytes else { return None };
        let (length_bytes, payload_bytes) = match second & 0x7f {
            126 => (2, usize::from(u16::from_be_bytes(*rest.first_chunk()?))),
            127 => (8, usize::try_from(u64::from_be_bytes(*rest.first_chunk()?)).expect("a length")),
            short => (0, usize::from(short)),
        };
        let is_masked = second & 0x80 != 0;
        let mask = if is_masked { Some(*rest[length_bytes..].first_chunk()?) } else { None };
        let bytes = 2 + length_bytes + if is_masked { 4 } else { 0 };
        Some(Self { first: *first, bytes, mask, payload_bytes })
    }
}

fn write_head(first: u8, mask: Option<[u8; 4]>, payload_bytes: usize, out: &mut Vec<u8>) {
    let bit = if mask.is_some() { 0x80 } else { 0 };
    out.push(first);
    match payload_bytes {
        0..=125 => out.push(bit | payload_bytes as u8),
        126..=0xffff => {
            out.push(bit | 126);
            out.extend((payload_bytes as u16).to_be_bytes());
        }
        _ => {
            out.push(bit | 127);
            out.extend((payload_bytes as u64).to_be_bytes());
        }
    }
    out.extend(mask.into_iter().flatten());
}

struct UpstreamBridge {
    messages: Messages,
    /// Whether a message has begun and not ended.
    is_within: bool,
    passing: Option<PassingFrame>,
    input: Vec<u8>,
}

/// A frame whose payload is passed on as it comes.
struct PassingFrame {
    left: usize,
    /// Masks for the payload of a message; `None`: the payload passes unchanged.
    message: Option<Masks>,
    ends: &'static [u8],
}

/// Positions in the masks of the suite and of the bridge.
struct Masks {
    theirs: [u8; 4],
    at: usize,
    ours_at: usize,
}

impl Masks {
    fn take(&mut self, payload: &mut [u8]) {
        for byte in payload {
            *byte ^= self.theirs[self.at % 4];
            self.at += 1;
        }
    }

    fn give(&mut self, payload: &[u8], out: &mut Vec<u8>) {
        for byte in payload {
            out.push(byte ^ MASK[self.ours_at % 4]);
            self.ours_at += 1;
        }
    }
}

impl UpstreamBridge {
    /// Passes on the complete part of the input. `is_quiet`: no more input has come for a while.
    fn translate(&mut self, is_quiet: bool, out: &mut Vec<u8>) {
        let mut taken = 0;
        loop {
            if let Some(passing) = &mut self.passing {
                let count = passing.left.min(self.input.len() - taken);
                let payload = &mut self.input[taken..taken + count];
                taken += count;
                passing.left -= count;
                pass(self.messages, passing, payload, out);
                if passing.left > 0 {
                    break;
                }
                self.passing = None;
            }
            let Some(head) = Head::read(&self.input[taken..]) else { break };
            let start = taken + head.bytes;
            let Some(is_first) = self.message(&head) else {
                out.extend_from_slice(&self.input[taken..start]);
                self.passing = Some(PassingFrame { left: head.payload_bytes, message: None, ends: b"" });
                taken = start;
                continue;
            };
            let whole = self.input.get(start..start + head.payload_bytes);
            if whole.is_none() && !is_quiet {
                break;
            }
            self.begin(&head, is_first, start, out);
            taken = start;
        }
        self.input.drain(..taken);
    }

    /// Tells whether a good frame is the first of its message; `None` for any other frame.
    fn message(&self, head: &Head) -> Option<bool> {
        let own = match self.messages {
            Messages::Text => TEXT,
            Messages::Binary { .. } => BINARY,
        };
        let opcode = head.first & 0x7f;
        match self.is_within {
            _ if head.mask.is_none() => None,
            false => (opcode == own).then_some(true),
            true => (opcode == CONTINUATION).then_some(false),
        }
    }

    /// Writes the head of a message's frame, and the text in front of its payload.
    fn begin(&mut self, head: &Head, is_first: bool, start: usize, out: &mut Vec<u8>) {
        let fin = head.first & FIN != 0;
        self.is_within = !fin;
        let (begins, bytes, ends) = match self.messages {
            Messages::Text => {
                let payload = self.input.get(start..start + head.payload_bytes).unwrap_or_default();
                let mut payload = payload.to_vec();
                Masks { theirs: head.mask.unwrap_or_default(), at: 0, ours_at: 0 }.take(&mut payload);
                let bytes = if payload.is_empty() { head.payload_bytes } else { escaped(&payload).len() };
                (TEXT_BEGINS.to_vec(), bytes, if fin { TEXT_ENDS } else { b"" })
            }
            Messages::Binary { fragmented_bytes } => {
                let bytes = if fin { head.payload_bytes as u32 } else { fragmented_bytes };
                ([BINARY_BEGINS, &(2 * bytes).to_be_bytes()].concat(), 2 * head.payload_bytes, &b""[..])
            }
        };
        let begins = if is_first { begins } else { Vec::new() };
        write_head(head.first, Some(MASK), begins.len() + bytes + ends.len(), out);
        let mut masks = Masks { theirs: head.mask.unwrap_or_default(), at: 0, ours_at: 0 };
        masks.give(&begins, out);
        self.passing = Some(PassingFrame { left: head.payload_bytes, message: Some(masks), ends });
    }
}

fn pass(messages: Messages, passing: &mut PassingFrame, payload: &mut [u8], out: &mut Vec<u8>) {
    let Some(masks) = &mut passing.message else { return out.extend_from_slice(payload) };
    masks.take(payload);
    match messages {
        Messages::Text => masks.give(&escaped(payload), out),
        Messages::Binary { .. } => {
            let hex: Vec<u8> =
                payload.iter().flat_map(|byte| [digit(byte >> 4), digit(byte & 0xf)]).collect();
            masks.give(&hex, out);
        }
    }
    if passing.left == 0 {
        masks.give(passing.ends, out);
    }
}

fn digit(value: u8) -> u8 {
    b"0123456789abcdef"[usize::from(value)]
}

/// Escapes a payload for a JSON text. Bytes that are not UTF-8 stay.
fn escaped(payload: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(payload.len());
    for byte in payload {
        match byte {
            b'"' | b'\\' => out.extend([b'\\', *byte]),
            0..0x20 => out.extend(format!("\\u{byte:04x}").into_bytes()),
            _ => out.push(*byte),
        }
    }
    out
}

/// Relays from the node to the suite.
async fn down(mut node: OwnedReadHalf, mut client: OwnedWriteHalf) {
    let Some((end, mut input)) = http_head(&mut node).await else { return };
    let mut out: Vec<u8> = input.drain(..end).collect();
    loop {
        let mut taken = 0;
        while let Some(head) = Head::read(&input[taken..])
            && let Some(payload) = input.get(taken + head.bytes..taken + head.bytes + head.payload_bytes)
        {
            let message = match head.first & 0xf {
                TEXT => text_of(payload),
                BINARY => binary_of(payload),
                _ => {
                    out.extend_from_slice(&input[taken..taken + head.bytes + head.payload_bytes]);
                    None
                }
            };
            if let Some(message) = message {
                write_head(head.first, None, message.len(), &mut out);
                out.extend(message);
            }
            taken += head.bytes + head.payload_bytes;
        }
        input.drain(..taken);
        if client.write_all(&out).await.is_err() {
            return;
        }
        out.clear();
        match node.read_buf(&mut input).await {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
    }
    // The suite may have closed the connection before.
    client.shutdown().await.ok();
}

/// Gives the message in a heartbeat; `None` for any other frame.
fn text_of(payload: &[u8]) -> Option<Vec<u8>> {
    let frame: Value = serde_json::from_slice(payload).expect("a node sends JSON");
    if frame["op"] != 0 {
        return None;
    }
    Some(frame["id"].as_str()?.as_bytes().to_vec())
}

fn binary_of(payload: &[u8]) -> Option<Vec<u8>> {
    let text = payload.strip_prefix(&BINARY_BEGINS[..BINARY_BEGINS.len() - 1])?;
    let hex = match text {
        [0xa0..=0xbf, hex @ ..]
        | [0xd9, _, hex @ ..]
        | [0xda, _, _, hex @ ..]
        | [0xdb, _, _, _, _, hex @ ..] => hex,
        _ => unreachable!("the id of a heartbeat is text"),
    };
    let value = |digit: u8| (digit as char).to_digit(16).expect("a digit") as u8;
    Some(hex.chunks(2).map(|pair| value(pair[0]) << 4 | value(pair[1])).collect())
}
