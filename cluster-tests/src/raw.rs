//! A connection for arbitrary bytes, and WebSocket frames made by hand.

use std::net::SocketAddr;
use std::time::Duration;

use bytes::{Buf as _, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::time::timeout;

pub const TEXT: u8 = 0x1;
pub const BINARY: u8 = 0x2;
pub const CONTINUATION: u8 = 0x0;
pub const CLOSE: u8 = 0x8;
pub const PING: u8 = 0x9;
pub const PONG: u8 = 0xA;
/// FIN bit, which ends a message.
pub const FIN: u8 = 0x80;

const MASK: [u8; 4] = [0x12, 0x34, 0x56, 0x78];

/// A received frame; only its length was checked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub fin: bool,
    pub reserved: u8,
    pub opcode: u8,
    pub payload: Vec<u8>,
}

impl Frame {
    /// Gives the code of a close frame.
    pub fn close_code(&self) -> Option<u16> {
        match &self.payload[..] {
            [high, low, ..] if self.opcode == CLOSE => Some(u16::from_be_bytes([*high, *low])),
            _ => None,
        }
    }
}

/// Makes a client's frame. `head` is the first byte: [`FIN`], reserved bits and opcode.
pub fn frame(head: u8, payload: &[u8]) -> Vec<u8> {
    let mut bytes = frame_head(head, payload.len() as u64);
    bytes.extend(payload.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    bytes
}

/// Makes the beginning of a masked frame that claims `length` bytes.
pub fn frame_head(head: u8, length: u64) -> Vec<u8> {
    let mut bytes = vec![head];
    match length {
        0..=125 => bytes.push(0x80 | length as u8),
        126..=0xFFFF => {
            bytes.push(0x80 | 126);
            bytes.extend((length as u16).to_be_bytes());
        }
        _ => {
            bytes.push(0x80 | 127);
            bytes.extend(length.to_be_bytes());
        }
    }
    bytes.extend(MASK);
    bytes
}

/// Makes a frame without a mask, which clients must not send.
pub fn unmasked_frame(head: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).expect("a short payload");
    assert!(length < 126, "a short payload");
    let mut bytes = vec![head, length];
    bytes.extend(payload);
    bytes
}

/// Reason for which reading ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum End {
    /// The other side ended or reset the connection.
    Gone,
    /// Nothing came in time.
    Silence,
}

/// TCP stream, or TLS over it.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<S: AsyncRead + AsyncWrite + Send + Unpin> Stream for S {}

pub struct Raw {
    stream: Box<dyn Stream>,
    buffer: BytesMut,
}

impl Raw {
    pub async fn connect(addr: SocketAddr) -> Self {
        let stream = TcpStream::connect(addr).await.expect("the node accepts");
        stream.set_nodelay(true).expect("a socket option");
        Self::over(stream)
    }

    pub fn over(stream: impl Stream + 'static) -> Self {
        Self { stream: Box::new(stream), buffer: BytesMut::new() }
    }

    /// Connects with a small receive buffer, for a slow reader.
    pub async fn connect_slow(addr: SocketAddr, receive_buffer_bytes: u32) -> Self {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.set_recv_buffer_size(receive_buffer_bytes).expect("a socket option");
        Self::over(socket.connect(addr).await.expect("the node accepts"))
    }

    /// Writes as much as the other side takes; its answers show whether it still reads.
    pub async fn write(&mut self, bytes: &[u8]) -> bool {
        let written = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        matches!(timeout(crate::SOON, written).await, Ok(Ok(())))
    }

    pub async fn send(&mut self, head: u8, payload: &[u8]) -> bool {
        self.write(&frame(head, payload)).await
    }

    /// Sends an upgrade request for `path`; gives the status and the head of the answer.
    pub async fn upgrade(&mut self, path: &str, headers: &[(&str, &str)]) -> (u16, String) {
        self.try_upgrade(path, headers).await.expect("an answer to the upgrade")
    }

    /// Sends an upgrade request to a node that may be gone.
    pub async fn try_upgrade(&mut self, path: &str, headers: &[(&str, &str)]) -> Result<(u16, String), End> {
        let mut request = format!(
            "GET {path} HTTP/1.1\r\nhost: localhost\r\nconnection: Upgrade\r\nupgrade: websocket\r\n\
             sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
        );
        for (name, value) in headers {
            request.push_str(&format!("{name}: {value}\r\n"));
        }
        request.push_str("\r\n");
        self.write(request.as_bytes()).await;
        self.head(crate::SOON).await
    }

    /// Reads status and head of an HTTP answer; the body stays unread.
    pub async fn head(&mut self, deadline: Duration) -> Result<(u16, String), End> {
        let read = async {
            loop {
                if let Some(end) = self.buffer.windows(4).position(|bytes| bytes == b"\r\n\r\n") {
                    let head = self.buffer.split_to(end + 4);
                    let head = String::from_utf8_lossy(&head).into_owned();
                    let status = head.split(' ').nth(1).and_then(|status| status.parse().ok());
                    return Ok((status.expect("a status line"), head));
                }
                self.fill().await?;
            }
        };
        timeout(deadline, read).await.unwrap_or(Err(End::Silence))
    }

    /// Reads an HTTP answer: status, head and the body of its stated length.
    pub async fn response(&mut self, deadline: Duration) -> Result<(u16, String, String), End> {
        let (status, head) = self.head(deadline).await?;
        let length = head.lines().find_map(|line| {
            let (name, value) = line.split_once(':')?;
            name.eq_ignore_ascii_case("content-length").then(|| value.trim().parse::<usize>().ok())?
        });
        let length = length.unwrap_or_default();
        let read = async {
            while self.buffer.len() < length {
                self.fill().await?;
            }
            Ok(())
        };
        timeout(deadline, read).await.unwrap_or(Err(End::Silence))?;
        let body = self.buffer.split_to(length);
        Ok((status, head, String::from_utf8_lossy(&body).into_owned()))
    }

    /// Closes the sending direction, and can still read.
    pub async fn half_close(&mut self) {
        self.stream.shutdown().await.expect("the connection is open");
    }

    /// Reads the next frame.
    pub async fn frame(&mut self, deadline: Duration) -> Result<Frame, End> {
        let read = async {
            loop {
                if let Some(frame) = self.take_frame() {
                    return Ok(frame);
                }
                self.fill().await?;
            }
        };
        timeout(deadline, read).await.unwrap_or(Err(End::Silence))
    }

    /// Reads all text until the end.
    pub async fn text_to_end(&mut self, deadline: Duration) -> (String, End) {
        let read = async { while self.fill().await.is_ok() {} };
        let end = timeout(deadline, read).await.map_or(End::Silence, |()| End::Gone);
        (String::from_utf8_lossy(&self.buffer).into_owned(), end)
    }

    /// Reads and drops everything until the other side ends the connection.
    pub async fn end(&mut self, deadline: Duration) -> End {
        let read = async {
            loop {
                self.buffer.clear();
                if let Err(end) = self.fill().await {
                    return end;
                }
            }
        };
        timeout(deadline, read).await.unwrap_or(End::Silence)
    }

    /// Reads the next chunk of a chunked HTTP answer, as text; `None` at its end, also without the last chunk.
    pub async fn chunk(&mut self, deadline: Duration) -> Option<String> {
        let read = async {
            loop {
                if let Some(line) = self.buffer.windows(2).position(|bytes| bytes == b"\r\n") {
                    let length = std::str::from_utf8(&self.buffer[..line]).expect("a length");
                    let length = usize::from_str_radix(length, 16).expect("a length");
                    let whole = line + 2 + length + 2;
                    if self.buffer.len() >= whole {
                        let chunk = self.buffer.split_to(whole);
                        let text = String::from_utf8(chunk[line + 2..whole - 2].to_vec());
                        return Some(text.expect("events are cut between characters")).filter(|_| length > 0);
                    }
                }
                self.fill().await.ok()?;
            }
        };
        timeout(deadline, read).await.expect("a chunk in time")
    }

    /// Reads at most `bytes_max` bytes into the buffer, for later reads.
    pub async fn take_in(&mut self, bytes_max: usize) {
        let mut bytes = vec![0; bytes_max];
        let read = timeout(crate::SOON, self.stream.read(&mut bytes)).await.expect("bytes in time");
        self.buffer.extend_from_slice(&bytes[..read.expect("the connection is open")]);
    }

    async fn fill(&mut self) -> Result<(), End> {
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(0) | Err(_) => Err(End::Gone),
            Ok(_) => Ok(()),
        }
    }

    fn take_frame(&mut self) -> Option<Frame> {
        let [first, second, rest @ ..] = &self.buffer[..] else {
            return None;
        };
        let (head, length) = match second & 0x7F {
            126 => (4, usize::from(u16::from_be_bytes(*rest.first_chunk()?))),
            127 => (10, usize::try_from(u64::from_be_bytes(*rest.first_chunk()?)).expect("a length")),
            short => (2, usize::from(short)),
        };
        if self.buffer.len() < head + length {
            return None;
        }
        assert_eq!(second & 0x80, 0, "a frame of a node is not masked");
        let (first, fin) = (*first, first & FIN != 0);
        self.buffer.advance(head);
        let payload = self.buffer.split_to(length).to_vec();
        Some(Frame { fin, reserved: (first >> 4) & 0x7, opcode: first & 0xF, payload })
    }
}
