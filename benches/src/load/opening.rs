//! From nothing to an attached connection, many at a time.

use std::fs;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::path::Path;
use std::time::Duration;

use super::Target;
use super::link::Link;
use crate::wire::frames::{self, op};
use crate::wire::handshake;
use crate::wire::websocket::{first_frame, opcode, write_client};
use crate::{Error, Result};

/// How many handshakes are under way at once.
const TOGETHER: usize = 100;
const PATIENCE: Duration = Duration::from_secs(30);

/// Opens `count` connections; each is attached to the channel that `channel` names for its number, if any.
pub(super) fn open(
    target: &Target,
    count: usize,
    channel: impl Fn(usize) -> Option<String>,
) -> Result<Vec<Link>> {
    let upgrade = handshake::request(&target.address.to_string(), target.authorization()?.as_deref());
    let mut links = Vec::with_capacity(count);
    while links.len() < count {
        let first = links.len();
        let batch = first..count.min(first + TOGETHER);
        let openings: Result<Vec<_>> = batch.clone().map(|_| Opening::begin(target, &upgrade)).collect();
        let mut openings = openings.map_err(|error| format!("connection {first} and on: {error}"))?;
        for (opening, number) in openings.iter_mut().zip(batch) {
            opening.upgraded()?;
            opening.answered(op::CONNECTED)?;
            if let Some(channel) = channel(number) {
                opening.send(&frames::attach(0, &channel))?;
                opening.awaiting_attach = true;
            }
        }
        for mut opening in openings {
            if opening.awaiting_attach {
                opening.answered(op::ATTACHED)?;
            }
            links.push(opening.finish()?);
        }
    }
    Ok(links)
}

impl Target {
    fn authorization(&self) -> Result<Option<String>> {
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

/// A blocking connection on its way.
struct Opening {
    stream: TcpStream,
    read: Vec<u8>,
    awaiting_attach: bool,
}

impl Opening {
    fn begin(target: &Target, upgrade: &[u8]) -> Result<Self> {
        let mut stream = TcpStream::connect(target.address)?;
        stream.set_nodelay(true)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.write_all(upgrade)?;
        Ok(Self { stream, read: Vec::new(), awaiting_attach: false })
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

    /// Reads up to the first frame with this op; heartbeats may come before it, nothing else.
    fn answered(&mut self, wanted: u32) -> Result<()> {
        loop {
            let Some(frame) = first_frame(&self.read)? else {
                self.read_more()?;
                continue;
            };
            let read: Vec<u8> = self.read.drain(..frame.payload.end).collect();
            let text = &read[frame.payload];
            match frames::op(text) {
                Some(op) if op == wanted => return Ok(()),
                Some(op::HEARTBEAT) => {}
                _ => return Err(format!("not op {wanted} but {}", String::from_utf8_lossy(text)).into()),
            }
        }
    }

    fn send(&mut self, text: &str) -> io::Result<()> {
        let mut frame = Vec::new();
        write_client(opcode::TEXT, text.as_bytes(), &mut frame);
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
        Ok(Link::new(mio::net::TcpStream::from_std(self.stream), self.read))
    }
}
