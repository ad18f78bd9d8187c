//! Reading: the head of a fresh connection, then frames.

use std::ops::ControlFlow;
use std::time::Instant;

use bytes::Bytes;
use fanfare_proto::frame::{close, code};
use fastwebsockets::OpCode;
use mio::Interest;

use super::super::HttpConnection;
use super::super::connection::{Connection, Open, Stage};
use super::super::handshake::{self, Decision, FirstLook};
use super::super::reader::Incoming;
use super::{SLICE, Shard, context};
use crate::edge::errors::{Kind, Refusal};
use crate::edge::files::Full;
use crate::edge::http;
use crate::hub::wire;
use crate::session::Output;
use crate::telemetry::Limit;
use crate::tls::Taken;

/// Nothing is read from a client that leaves this much of its answers unread.
pub(super) const UNREAD_BYTES_MAX: usize = 64 * 1024;

/// How the first record of TLS begins, of any version.
const TLS_HANDSHAKE: &[u8] = &[22, 3];

/// What becomes of a connection after its bytes were looked at.
enum Next {
    Keep,
    Drop,
    /// Not a socket: the HTTP side goes on with what was read.
    Http(Vec<u8>),
}

impl Shard {
    pub(super) fn read_turn(&mut self) {
        if self.ready.is_empty() || self.services.hub.congested() {
            return;
        }
        let until = Instant::now() + SLICE;
        for _ in 0..self.ready.len() {
            let Some(slot) = self.ready.pop_front() else { return };
            self.read(slot);
            if Instant::now() >= until {
                return;
            }
        }
    }

    fn read(&mut self, slot: u32) {
        let Some(mut connection) = self.slots[slot as usize].take() else { return };
        connection.in_ready = false;
        match self.read_once(&mut connection, slot) {
            Next::Keep => {
                let stopped = connection.open_mut().is_some_and(|open| open.reader.is_stopped());
                if (connection.readable || stopped) && !connection.paused {
                    connection.in_ready = true;
                    self.ready.push_back(slot);
                }
                self.rearm(&mut connection, slot);
                self.slots[slot as usize] = Some(connection);
            }
            Next::Drop => self.forget(connection, slot),
            Next::Http(read) => self.hand_to_http(connection, slot, read),
        }
    }

    fn read_once(&mut self, connection: &mut Connection, slot: u32) -> Next {
        let full = connection.open_mut().is_some_and(|open| open.session.is_full());
        if full || connection.outbox.answers() > UNREAD_BYTES_MAX {
            connection.paused = true;
            return Next::Keep;
        }
        if !connection.readable || connection.open_mut().is_some_and(|open| open.reader.is_stopped()) {
            return self.feed(connection, slot, 0);
        }
        match connection.link.read(&mut self.buffer) {
            Ok(Taken { bytes: 0, .. }) => Next::Drop,
            Ok(Taken { bytes, more }) => {
                // An end that came before is behind what was read now.
                connection.readable = more || connection.read_closed;
                connection.received_ms = self.now_ms;
                connection.last_look_ms = None;
                self.feed(connection, slot, bytes)
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                connection.readable = false;
                self.feed(connection, slot, 0)
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => Next::Keep,
            Err(_) => Next::Drop,
        }
    }

    /// Gives the first `count` bytes of the buffer to whoever is due.
    fn feed(&mut self, connection: &mut Connection, slot: u32, count: usize) -> Next {
        match &mut connection.stage {
            Stage::Opening { head, .. } => {
                let seen = head.len();
                head.extend_from_slice(&self.buffer[..count]);
                let head = std::mem::take(head);
                self.look(connection, slot, head, seen)
            }
            Stage::Open(_) => {
                let mut buffer = std::mem::take(&mut self.buffer);
                self.feed_frames(connection, slot, &mut buffer[..count]);
                self.buffer = buffer;
                Next::Keep
            }
            Stage::Closing(_) => {
                let mut buffer = std::mem::take(&mut self.buffer);
                self.feed_closing(connection, slot, &mut buffer[..count]);
                self.buffer = buffer;
                Next::Keep
            }
        }
    }

    /// All is said but the close frame: the client may close first, as it is asked to, and then nothing is left to wait for.
    fn feed_closing(&mut self, connection: &mut Connection, slot: u32, bytes: &mut [u8]) {
        let Stage::Closing(closing) = &mut connection.stage else { return };
        let Some((close_ms, close)) = &mut closing.close else { return };
        let (mut pong, mut asked) = (None, None);
        let result = closing.reader.feed(bytes, &self.services.limits, self.now_ms, |incoming| {
            match incoming {
                // Of many only the last is answered (RFC 6455 §5.5.3).
                Incoming::Ping(payload) => pong = Some(wire::frame(OpCode::Pong, payload)),
                Incoming::Close(code) => asked = Some(code),
                Incoming::Message { .. } | Incoming::Pong => {}
            }
            if asked.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if let Some(Some(code)) = asked {
            *close = wire::close(code, "");
        }
        if asked.is_some() || result.is_err() {
            *close_ms = self.now_ms;
        }
        if let Some(pong) = pong.filter(|_| connection.outbox.is_empty()) {
            self.send(connection, slot, pong);
        }
        self.close_if_due(connection, slot);
    }

    /// Decides on a fresh connection once its first head is whole.
    fn look(&mut self, connection: &mut Connection, slot: u32, mut bytes: Vec<u8>, seen: usize) -> Next {
        let (head, accept, length) =
            match handshake::first_look(&bytes, seen, self.services.limits.header_bytes) {
                FirstLook::Upgrade(head, Ok(accept), length) => (head, accept, length),
                FirstLook::Upgrade(_, Err(refusal), _) => {
                    return self.refuse(connection, slot, handshake::PATH, &refusal);
                }
                FirstLook::Http(_) => return Next::Http(bytes),
                FirstLook::TooLarge => {
                    Limit::HeaderBytes.hit();
                    return self.refuse(connection, slot, http::NO_ROUTE, &headers_too_large());
                }
                FirstLook::Malformed => {
                    return self.refuse(connection, slot, http::NO_ROUTE, &malformed(&bytes));
                }
                FirstLook::Partial => {
                    if let Stage::Opening { head, .. } = &mut connection.stage {
                        *head = bytes;
                    }
                    return Next::Keep;
                }
            };
        let address =
            connection.address().map(|peer| self.services.proxies.client(peer, head.forwarded_for()));
        if let Some(client) = address.filter(|client| Some(*client) != connection.address()) {
            connection.link.set_client(client);
        }
        match head.decide(self.services.gate(address)) {
            Decision::Refuse(refusal) => return self.refuse(connection, slot, handshake::PATH, &refusal),
            Decision::Open(opening) => {
                self.send(connection, slot, handshake::switching_protocols(&accept).into());
                self.open(connection, slot, opening);
            }
            Decision::OpenRefused { format, refused } => {
                self.send(connection, slot, handshake::switching_protocols(&accept).into());
                self.refuse_in_socket(connection, slot, format, refused);
            }
        }
        self.feed_frames(connection, slot, &mut bytes[length..]);
        Next::Keep
    }

    fn refuse(
        &mut self,
        connection: &mut Connection,
        slot: u32,
        route: &'static str,
        refusal: &Refusal,
    ) -> Next {
        http::refused(route, refusal);
        let bytes = handshake::refusal_bytes(refusal, handshake::date(self.epoch_ms));
        connection.begin_closing(Bytes::from(bytes), self.now_ms, 0);
        self.close_if_due(connection, slot);
        Next::Keep
    }

    pub(super) fn feed_frames(&mut self, connection: &mut Connection, slot: u32, bytes: &mut [u8]) {
        let Stage::Open(open) = &mut connection.stage else {
            return self.feed_closing(connection, slot, bytes);
        };
        let Open { session, reader, pings, .. } = &mut **open;
        let cx = context(&self.services, self.epoch_ms);
        let now_ms = self.now_ms;
        let mut outputs: Vec<Output> = Vec::new();
        let mut closed = None;
        let result = reader.feed(bytes, cx.limits, now_ms, |incoming| {
            match incoming {
                Incoming::Message { text, payload } => session.message(cx, text, payload, &mut outputs),
                Incoming::Ping(payload) if pings.allows(now_ms, cx.limits.pings_per_second) => {
                    session.ping(payload, &mut outputs);
                }
                Incoming::Ping(_) => {
                    Limit::PingsPerSecond.hit();
                    let error = "more pings than a client may send";
                    session.fail(error, code::BAD_REQUEST, close::POLICY, &mut outputs);
                }
                Incoming::Pong => {}
                Incoming::Close(code) => closed = Some(code.unwrap_or(close::NORMAL)),
            }
            let enough = closed.is_some() || session.is_full() || session.has_ended();
            if enough { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if let Err(broken) = result {
            session.fail(broken.reason, code::BAD_REQUEST, broken.code, &mut outputs);
        }
        let full = session.is_full();
        self.run_outputs(connection, slot, outputs);
        if let Some(code) = closed
            && connection.open_mut().is_some()
        {
            self.end(connection, slot, code, 0);
        }
        connection.paused |= full;
    }

    fn hand_to_http(&mut self, mut connection: Box<Connection>, slot: u32, read: Vec<u8>) {
        if self.services.http.is_closed()
            || self.poll.registry().deregister(&mut connection.link.socket).is_err()
        {
            return self.forget(connection, slot);
        }
        self.release(slot);
        let Connection { link, permit, .. } = *connection;
        let passed = HttpConnection { link: link.map(Into::into), permit, read };
        if self.services.http.try_send(passed).is_err() {
            Full::Http.refused();
        }
    }

    /// Registers a socket under a slot of its own.
    pub(super) fn register(&mut self, connection: &mut Connection, slot: u32) -> std::io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut connection.link.socket, mio::Token(slot as usize), interest)
    }
}

fn malformed(bytes: &[u8]) -> Refusal {
    Refusal::malformed(if bytes.starts_with(TLS_HANDSHAKE) {
        "the request is a TLS handshake, and this port speaks plain HTTP"
    } else {
        "the request is malformed"
    })
}

fn headers_too_large() -> Refusal {
    Refusal::new(Kind::HeadersTooLarge, "the request's headers are over the limit")
}
