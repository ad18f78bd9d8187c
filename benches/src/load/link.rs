use std::io::{self, Write as _};

use mio::net::TcpStream;
use mio::{Interest, Registry, Token};

use crate::os;
use crate::wire::dialect::Dialect;
use crate::wire::reader::Reader;
use crate::wire::websocket::{opcode, write_client};

/// How long a client of Fanfare may say nothing: the protocol's default `heartbeatMs`.
const SILENCE_NS: u64 = 15_000_000_000;

/// An open connection of the generator.
pub(super) struct Link {
    stream: TcpStream,
    dialect: Dialect,
    reader: Reader,
    unsent: Vec<u8>,
    sent_ns: u64,
}

impl Link {
    pub(super) fn new(stream: TcpStream, dialect: Dialect, read: Vec<u8>) -> Self {
        let (reader, sent_ns) = (Reader::with_bytes(read), os::monotonic_ns());
        Self { stream, dialect, reader, unsent: Vec::new(), sent_ns }
    }

    pub(super) fn dialect(&self) -> Dialect {
        self.dialect
    }

    pub(super) fn register(&mut self, registry: &Registry, at: usize) -> io::Result<()> {
        registry.register(&mut self.stream, Token(at), Interest::READABLE | Interest::WRITABLE)
    }

    /// Hands over what the server has said, answers pings, and says that it lives when it was long silent.
    pub(super) fn read(
        &mut self,
        now_ns: u64,
        shared: &mut [u8],
        mut said: impl FnMut(&[u8]),
    ) -> io::Result<()> {
        let dialect = self.dialect;
        let (mut closed, mut pong) = (None, Vec::new());
        self.reader.read(&mut self.stream, shared, |opcode, payload| match opcode {
            opcode::TEXT | opcode::BINARY => dialect.each(payload, |piece| match dialect.pong(piece) {
                Some(answer) => write_client(dialect.opcode(), answer, &mut pong),
                None => said(piece),
            }),
            opcode::PING => write_client(opcode::PONG, payload, &mut pong),
            opcode::CLOSE => closed = Some(String::from_utf8_lossy(payload).into_owned()),
            _ => {}
        })?;
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
    pub(super) fn push(&mut self, said: impl AsRef<[u8]>) {
        write_client(self.dialect.opcode(), said.as_ref(), &mut self.unsent);
    }

    pub(super) fn send(&mut self, said: impl AsRef<[u8]>) -> io::Result<()> {
        self.push(said);
        self.flush()
    }

    pub(super) fn has_unsent(&self) -> bool {
        !self.unsent.is_empty()
    }

    /// Writes what the socket takes; the rest goes when it is writable again.
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
