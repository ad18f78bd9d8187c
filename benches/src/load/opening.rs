//! Opens and attaches connections, many at a time.

use std::collections::VecDeque;
use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use super::Target;
use super::link::Link;
use crate::wire::dialect::{Dialect, ReplyKind};
use crate::wire::handshake;
use crate::wire::websocket::{first_frame, opcode, write_client};
use crate::{Error, Result};

/// Number of handshakes that are under way at once.
const TOGETHER: usize = 100;
/// First id of a request. All ids of a connection with 20 channels have as many digits, so that their frames
/// have one size.
const FIRST_ID: u32 = 101;
const PATIENCE: Duration = Duration::from_secs(30);

/// Opens `count` connections; each is attached to the channels that `channels` names for its number, in their order.
pub(super) fn open<Channels: IntoIterator<Item = String>>(
    target: &Target,
    count: usize,
    channels: impl Fn(usize) -> Channels,
) -> Result<Vec<Link>> {
    open_over(target, count, channels, |target| TcpStream::connect(target.address))
}

/// Opens and attaches connections as [`open`] does, over streams that `connect` makes.
pub(super) fn open_over<Channels: IntoIterator<Item = String>>(
    target: &Target,
    count: usize,
    channels: impl Fn(usize) -> Channels,
    connect: impl Fn(&Target) -> io::Result<TcpStream>,
) -> Result<Vec<Link>> {
    let upgrade = target.dialect.upgrade(&target.address.to_string(), target.authorization()?.as_deref());
    let mut links = Vec::with_capacity(count);
    while links.len() < count {
        let first = links.len();
        let batch = first..count.min(first + TOGETHER);
        let begin = |_| Opening::over(connect(target)?, target, &upgrade);
        let openings: Result<Vec<_>> = batch.clone().map(begin).collect();
        let mut openings = openings.map_err(|error| format!("connection {first} and on: {error}"))?;
        for (opening, number) in openings.iter_mut().zip(batch) {
            opening.greeted()?;
            for (nth, channel) in (FIRST_ID..).zip(channels(number)) {
                opening.subscribe(nth, &channel)?;
                opening.awaited += 1;
            }
        }
        for mut opening in openings {
            for _ in 0..opening.awaited {
                opening.answered()?;
            }
            links.push(opening.finish()?);
        }
    }
    Ok(links)
}

impl Target {
    /// Gives the credential of each connection, if it is the same for all.
    pub(super) fn authorization(&self) -> Result<Option<String>> {
        let read = |path: &Path| {
            let text = fs::read_to_string(path).map_err(|error| format!("{}: {error}", path.display()))?;
            Ok::<_, Error>(text.trim().to_owned())
        };
        Ok(match (&self.key_file, &self.token_file) {
            (Some(key), _) => Some(handshake::basic(&read(key)?)),
            (None, Some(token)) => Some(format!("Bearer {}", read(token)?)),
            (None, None) => None,
        })
    }
}

/// Connection in blocking mode that is being opened.
pub(super) struct Opening {
    stream: TcpStream,
    dialect: Dialect,
    read: Vec<u8>,
    /// First frame of the server.
    welcome: Vec<u8>,
    /// Meanings of frames that were read and not yet handled.
    replies: VecDeque<ReplyKind>,
    /// Number of channels whose attach is not answered.
    awaited: usize,
}

impl Opening {
    /// Sends the upgrade request `upgrade` on a new connection.
    pub(super) fn begin(target: &Target, upgrade: &[u8]) -> Result<Self> {
        Self::over(TcpStream::connect(target.address)?, target, upgrade)
    }

    fn over(mut stream: TcpStream, target: &Target, upgrade: &[u8]) -> Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(upgrade)?;
        let (read, replies) = (Vec::new(), VecDeque::new());
        Ok(Self { stream, dialect: target.dialect, read, welcome: Vec::new(), replies, awaited: 0 })
    }

    /// Waits until the server has accepted the connection.
    pub(super) fn greeted(&mut self) -> Result<()> {
        self.upgraded()?;
        if let Some(hello) = self.dialect.hello() {
            self.send(&hello)?;
        }
        self.answered()
    }

    pub(super) fn subscribe(&mut self, id: u32, channel: &str) -> io::Result<()> {
        let request = self.dialect.subscribe(id, channel, &self.welcome);
        self.send(&request)
    }

    fn upgraded(&mut self) -> Result<()> {
        let head_bytes = loop {
            match handshake::head_bytes(&self.read) {
                Some(head_bytes) => break head_bytes,
                None => self.read_more()?,
            }
        };
        let head: Vec<u8> = self.read.drain(..head_bytes).collect();
        if head.starts_with(b"HTTP/1.1 101") {
            return Ok(());
        }
        let head = String::from_utf8_lossy(&head);
        Err(format!("the upgrade was refused: {}", head.lines().next().unwrap_or_default()).into())
    }

    /// Reads until the oldest request is done.
    pub(super) fn answered(&mut self) -> Result<()> {
        loop {
            while let Some(reply) = self.replies.pop_front() {
                if reply == ReplyKind::Done {
                    return Ok(());
                }
            }
            let Some(frame) = first_frame(&self.read)? else {
                self.read_more()?;
                continue;
            };
            let read: Vec<u8> = self.read.drain(..frame.payload.end).collect();
            let payload = &read[frame.payload];
            if frame.opcode == opcode::CLOSE {
                return Err(format!("closed by the server: {}", String::from_utf8_lossy(payload)).into());
            }
            if self.welcome.is_empty() {
                self.welcome = payload.to_vec();
            }
            let (dialect, replies, mut pongs) = (self.dialect, &mut self.replies, Vec::new());
            let mut refused = None;
            dialect.each(payload, |piece| match (dialect.pong(piece), dialect.reply_kind(piece)) {
                (Some(pong), _) => pongs.push(pong),
                (None, ReplyKind::Refused) => refused = Some(String::from_utf8_lossy(piece).into_owned()),
                (None, other) => replies.push_back(other),
            });
            if let Some(refused) = refused {
                return Err(format!("refused: {refused}").into());
            }
            pongs.into_iter().try_for_each(|pong| self.send(pong))?;
        }
    }

    fn send(&mut self, payload: &[u8]) -> io::Result<()> {
        let mut frame = Vec::new();
        write_client(self.dialect.opcode(), payload, &mut frame);
        self.stream.write_all(&frame)
    }

    fn read_more(&mut self) -> io::Result<()> {
        let mut buffer = [0; 4096];
        match self.stream.read(&mut buffer)? {
            0 => Err(io::ErrorKind::UnexpectedEof.into()),
            read => {
                self.read.extend_from_slice(&buffer[..read]);
                Ok(())
            }
        }
    }

    fn finish(self) -> io::Result<Link> {
        self.stream.set_nonblocking(true)?;
        Ok(Link::new(mio::net::TcpStream::from_std(self.stream), self.dialect, self.read))
    }
}
