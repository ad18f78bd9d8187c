use std::io::{self, Read as _, Write as _};

use mio::net::TcpStream;

use super::channel;
use crate::wire::reader::Reader;
use crate::wire::{handshake, websocket};

/// A connection: first the head of its upgrade, then frames.
pub(super) struct Peer {
    stream: TcpStream,
    stage: Stage,
}

enum Stage {
    Head(Vec<u8>),
    Open(Reader),
}

impl Peer {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, stage: Stage::Head(Vec::new()) }
    }

    /// Reads what is there; the text frames are appended to `texts`. An error means that the peer is gone.
    pub(super) fn read(&mut self, shared: &mut [u8], texts: &mut Vec<String>) -> io::Result<()> {
        match &mut self.stage {
            Stage::Head(_) => self.upgrade(shared),
            Stage::Open(reader) => {
                let mut closed = false;
                reader.read(&mut self.stream, shared, |opcode, payload| match opcode {
                    websocket::opcode::TEXT => texts.push(String::from_utf8_lossy(payload).into_owned()),
                    websocket::opcode::CLOSE => closed = true,
                    _ => {}
                })?;
                if closed { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
            }
        }
    }

    /// Writes a whole frame or fails: a full socket is not waited for.
    pub(super) fn write(&mut self, frame: &[u8]) -> io::Result<()> {
        match self.stream.write(frame)? {
            written if written == frame.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    fn upgrade(&mut self, shared: &mut [u8]) -> io::Result<()> {
        let Stage::Head(head) = &mut self.stage else { return Ok(()) };
        match self.stream.read(shared) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(read) => head.extend_from_slice(&shared[..read]),
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
            Err(error) => return Err(error),
        }
        let Some(head_bytes) = handshake::head_bytes(head) else { return Ok(()) };
        let mut answer = handshake::answer(&head[..head_bytes]).ok_or(io::ErrorKind::InvalidData)?;
        self.stage = Stage::Open(Reader::with_bytes(head.split_off(head_bytes)));
        answer.extend_from_slice(&channel::connected());
        self.write(&answer)
    }
}
