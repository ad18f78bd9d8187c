use std::io::{self, Write as _};

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use crate::os;
use crate::wire::dialect::Dialect;
use crate::wire::reader::Reader;
use crate::wire::websocket::{opcode, write_client};

/// Time of silence after which a client of Fanfare sends a heartbeat: the protocol's default `heartbeatMs`, less the
/// greatest difference of the two sides' clocks, so that each heartbeat of a silent server is answered.
const SILENCE_NS: u64 = 14_500_000_000;

/// An open connection of the generator.
pub(super) struct Link {
    stream: TcpStream,
    dialect: Dialect,
    reader: Reader,
    unsent: Vec<u8>,
    sent_ns: u64,
    /// Frames received and sent since the connection was opened.
    frames: Frames,
}

#[derive(Clone, Copy, Default)]
pub(super) struct Frames {
    pub(super) received: u64,
    pub(super) sent: u64,
}

impl Link {
    pub(super) fn new(stream: TcpStream, dialect: Dialect, read: Vec<u8>) -> Self {
        let (reader, sent_ns) = (Reader::with_bytes(read), os::monotonic_ns());
        Self { stream, dialect, reader, unsent: Vec::new(), sent_ns, frames: Frames::default() }
    }

    pub(super) fn frames(&self) -> Frames {
        self.frames
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub(super) fn register(&mut self, registry: &Registry, at: usize) -> io::Result<()> {
        registry.register(&mut self.stream, Token(at), Interest::READABLE | Interest::WRITABLE)
    }

    /// Gives the number of bytes that the kernel has received and the client has not read, up to 64 KiB.
    pub(super) fn unread_bytes(&self) -> io::Result<usize> {
        match self.stream.peek(&mut [0; 64 * 1024]) {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(0),
            peeked => peeked,
        }
    }

    /// Reads the frames of the server, answers pings, and sends a heartbeat after a long silence.
    pub(super) fn read(
        &mut self,
        now_ns: u64,
        shared: &mut [u8],
        mut take: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let dialect = self.dialect;
        let (mut closed, mut pong) = (None, Vec::new());
        let frames = &mut self.frames;
        let mut answer = |opcode, payload: &[u8]| {
            frames.sent += 1;
            write_client(opcode, payload, &mut pong);
        };
        let mut received = 0;
        self.reader.read(&mut self.stream, shared, |opcode, payload| {
            received += 1;
            match opcode {
                opcode::TEXT | opcode::BINARY => dialect.each(payload, |piece| match dialect.pong(piece) {
                    Some(pong) => answer(dialect.opcode(), pong),
                    None => take(piece),
                }),
                opcode::PING => answer(opcode::PONG, payload),
                opcode::CLOSE => closed = Some(String::from_utf8_lossy(payload).into_owned()),
                _ => {}
            }
        })?;
        frames.received += received;
        if let Some(reason) = closed {
            return Err(io::Error::new(
                io::ErrorKind::ConnectionAborted,
                format!("closed by the server {reason:?}"),
            ));
        }
        if !pong.is_empty() {
            self.unsent.extend_from_slice(&pong);
            self.flush()?;
        }
        if now_ns.saturating_sub(self.sent_ns) >= SILENCE_NS
            && let Some(heartbeat) = dialect.heartbeat()
        {
            self.send(heartbeat)?;
        }
        Ok(())
    }

    /// Queues a frame without writing it.
    pub(super) fn push(&mut self, payload: impl AsRef<[u8]>) {
        self.frames.sent += 1;
        write_client(self.dialect.opcode(), payload.as_ref(), &mut self.unsent);
    }

    pub(super) fn send(&mut self, payload: impl AsRef<[u8]>) -> io::Result<()> {
        self.push(payload);
        self.flush()
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Writes as much as the socket takes; the rest goes when the socket is writable again.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let mut written = 0;
        while written < self.unsent.len() {
            match self.stream.write(&self.unsent[written..]) {
                Ok(bytes) => written += bytes,
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        if written > 0 {
            self.sent_ns = os::monotonic_ns();
            self.unsent.drain(..written);
        }
        Ok(())
    }
}
