use std::collections::VecDeque;
use std::io::{self, Read as _, Write as _};

use mio::net::TcpStream;

use crate::wire::dialect::{Dialect, ReplyKind};
use crate::wire::handshake;
use crate::wire::websocket::{first_frame, opcode, write_client};
use crate::{Result, os};

const REQUEST_ID: u32 = 101;

/// Connection that is being opened, in a state machine that never blocks.
pub(super) struct ConnectingClient {
    stream: TcpStream,
    dialect: Dialect,
    channel: String,
    stage: Stage,
    read: Vec<u8>,
    /// First frame of the server.
    welcome: Vec<u8>,
    unsent: Vec<u8>,
    pub(super) began_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Stage {
    /// TCP connect, until the kernel reports that it is done.
    Connecting,
    Upgrading,
    Greeting,
    Attaching,
    Attached,
}

impl ConnectingClient {
    pub(super) fn new(stream: TcpStream, dialect: Dialect, channel: String, upgrade: &[u8]) -> Self {
        let (read, welcome, unsent) = (Vec::new(), Vec::new(), upgrade.to_vec());
        Self {
            stream,
            dialect,
            channel,
            stage: Stage::Connecting,
            read,
            welcome,
            unsent,
            began_ns: os::monotonic_ns(),
        }
    }

    pub(super) fn is_attached(&self) -> bool {
        self.stage == Stage::Attached
    }

    /// Does all that can be done without waiting. An error means that the connection is gone.
    pub(super) fn turn(&mut self, shared: &mut [u8]) -> Result<()> {
        if self.stage == Stage::Connecting {
            self.stream.take_error()?.map_or(Ok(()), Err)?;
            match self.stream.peer_addr() {
                Err(error) if error.kind() == io::ErrorKind::NotConnected => return Ok(()),
                known => known?,
            };
            self.stage = Stage::Upgrading;
        }
        self.flush()?;
        self.read_all(shared)?;
        if self.stage == Stage::Upgrading && !self.upgraded()? {
            return Ok(());
        }
        for reply in self.read_replies()? {
            self.advance(reply)?;
        }
        Ok(self.flush()?)
    }

    /// Whether the head of the answer is complete and accepts the upgrade.
    fn upgraded(&mut self) -> Result<bool> {
        let Some(head_bytes) = handshake::head_bytes(&self.read) else { return Ok(false) };
        let head: Vec<u8> = self.read.drain(..head_bytes).collect();
        if !head.starts_with(b"HTTP/1.1 101") {
            let head = String::from_utf8_lossy(&head);
            return Err(
                format!("the upgrade was refused: {}", head.lines().next().unwrap_or_default()).into()
            );
        }
        if let Some(hello) = self.dialect.hello() {
            self.push(&hello);
        }
        self.stage = Stage::Greeting;
        Ok(true)
    }

    fn advance(&mut self, reply: ReplyKind) -> Result<()> {
        match (self.stage, reply) {
            (Stage::Greeting, ReplyKind::Done) => {
                let request = self.dialect.subscribe(REQUEST_ID, &self.channel, &self.welcome);
                self.push(&request);
                self.stage = Stage::Attaching;
            }
            (Stage::Attaching, ReplyKind::Done) => self.stage = Stage::Attached,
            (_, ReplyKind::Refused) => return Err("refused by the server".into()),
            _ => {}
        }
        Ok(())
    }

    /// Reads the complete frames, answers pings, and gives the meanings of the other frames.
    fn read_replies(&mut self) -> Result<VecDeque<ReplyKind>> {
        let (dialect, mut all) = (self.dialect, VecDeque::new());
        let mut at = 0;
        while let Some(frame) = first_frame(&self.read[at..])? {
            let payload = &self.read[at..][frame.payload.clone()];
            at += frame.payload.end;
            if self.welcome.is_empty() {
                self.welcome = payload.to_vec();
            }
            match frame.opcode {
                opcode::CLOSE => {
                    return Err(format!("closed by the server: {}", String::from_utf8_lossy(payload)).into());
                }
                opcode::PING => write_client(opcode::PONG, payload, &mut self.unsent),
                _ => dialect.each(payload, |piece| match dialect.pong(piece) {
                    Some(pong) => write_client(dialect.opcode(), pong, &mut self.unsent),
                    None => all.push_back(dialect.reply_kind(piece)),
                }),
            }
        }
        self.read.drain(..at);
        Ok(all)
    }

    fn push(&mut self, payload: &[u8]) {
        write_client(self.dialect.opcode(), payload, &mut self.unsent);
    }

    fn flush(&mut self) -> io::Result<()> {
        while !self.unsent.is_empty() {
            match self.stream.write(&self.unsent) {
                Ok(written) => drop(self.unsent.drain(..written)),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn read_all(&mut self, shared: &mut [u8]) -> io::Result<()> {
        loop {
            match self.stream.read(shared) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(read) => {
                    self.read.extend_from_slice(&shared[..read]);
                    // With edge-triggered epoll a short read says that the socket is empty.
                    if read < shared.len() {
                        return Ok(());
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
    }
}
