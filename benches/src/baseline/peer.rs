use std::io::{self, IoSlice, Read as _, Write as _};
use std::os::fd::AsRawFd as _;
use std::sync::Arc;

use mio::net::TcpStream;

use super::channel;
use super::ring::Write;
use crate::wire::reader::Reader;
use crate::wire::{handshake, websocket};

/// A connection. Its first bytes are the head of the upgrade, all others are frames.
pub(super) struct Peer {
    stream: TcpStream,
    stage: Stage,
    /// Frames for the next flush.
    waiting: Vec<Arc<[u8]>>,
}

/// Greatest number of buffers that the system takes in one call; more are written in several.
const VECTORED_MAX: usize = 1024;

enum Stage {
    Head(Vec<u8>),
    Open(Reader),
}

impl Peer {
    pub(super) fn new(stream: TcpStream) -> Self {
        Self { stream, stage: Stage::Head(Vec::new()), waiting: Vec::new() }
    }

    /// Reads what has come, and appends the text frames to `texts`. An error means that the peer is gone.
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

    /// Writes a whole frame, or fails if the socket is full.
    pub(super) fn write(&mut self, frame: &[u8]) -> io::Result<()> {
        match self.stream.write(frame)? {
            written if written == frame.len() => Ok(()),
            _ => Err(io::ErrorKind::WriteZero.into()),
        }
    }

    /// Keeps a frame for the next flush; returns whether it is the first.
    pub(super) fn push(&mut self, frame: Arc<[u8]>) -> bool {
        self.waiting.push(frame);
        self.waiting.len() == 1
    }

    /// Writes all waiting frames, or fails if the socket is full.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        for frames in self.waiting.chunks(VECTORED_MAX) {
            let slices: Vec<IoSlice<'_>> = frames.iter().map(|frame| IoSlice::new(frame)).collect();
            let bytes: usize = frames.iter().map(|frame| frame.len()).sum();
            if self.stream.write_vectored(&slices)? != bytes {
                return Err(io::ErrorKind::WriteZero.into());
            }
        }
        self.waiting.clear();
        Ok(())
    }

    pub(super) fn immediate_write<'a>(&self, to: usize, frame: &'a [u8]) -> Write<'a> {
        Write { to, socket: self.stream.as_raw_fd(), parts: vec![IoSlice::new(frame)] }
    }

    /// Gives the waiting frames as one write, at most as many as the system takes in one call.
    pub(super) fn pending_write(&self, to: usize) -> Write<'_> {
        let parts = self.waiting.iter().take(VECTORED_MAX).map(|frame| IoSlice::new(frame)).collect();
        Write { to, socket: self.stream.as_raw_fd(), parts }
    }

    pub(super) fn clear_pending(&mut self) {
        self.waiting.drain(..self.waiting.len().min(VECTORED_MAX));
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
