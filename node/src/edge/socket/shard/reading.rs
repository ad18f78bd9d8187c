//! Reading: the head of a fresh connection, then frames.

use std::ops::ControlFlow;
use std::time::Instant;

use bytes::Bytes;
use fanfare_proto::frame::{close, code};
use fastwebsockets::OpCode;
use mio::Interest;

use super::super::HttpConnection;
use super::super::connection::{ConnectionStage, OpenSocket, SocketConnection};
use super::super::handshake::{self, AdmissionDecision, DetectedProtocol};
use super::super::reader::IncomingFrame;
use super::{SLICE, Shard, context};
use crate::edge::errors::{HttpRefusal, RefusalKind};
use crate::edge::files::CapacityLimit;
use crate::edge::http;
use crate::hub::wire;
use crate::session::Output;
use crate::telemetry::Limit;
use crate::tls::TlsRead;

/// Unread answers of a client above which its socket is not read.
pub(super) const UNREAD_BYTES_MAX: usize = 64 * 1024;

/// First bytes of a TLS handshake record, of any version.
const TLS_HANDSHAKE: &[u8] = &[22, 3];

/// Result of handling a connection's bytes.
enum SocketReadOutcome {
    Keep,
    Drop,
    /// Plain HTTP: the HTTP side continues with these bytes.
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
            SocketReadOutcome::Keep => {
                let stopped = connection.open_mut().is_some_and(|open| open.reader.is_stopped());
                if (connection.readable || stopped) && !connection.paused {
                    connection.in_ready = true;
                    self.ready.push_back(slot);
                }
                self.rearm(&mut connection, slot);
                self.slots[slot as usize] = Some(connection);
            }
            SocketReadOutcome::Drop => self.forget(connection, slot),
            SocketReadOutcome::Http(read) => self.hand_to_http(connection, slot, read),
        }
    }

    fn read_once(&mut self, connection: &mut SocketConnection, slot: u32) -> SocketReadOutcome {
        let full = connection.open_mut().is_some_and(|open| open.session.is_full());
        if full || connection.outbox.answers() > UNREAD_BYTES_MAX {
            connection.paused = true;
            return SocketReadOutcome::Keep;
        }
        if !connection.readable || connection.open_mut().is_some_and(|open| open.reader.is_stopped()) {
            return self.feed(connection, slot, 0);
        }
        match connection.link.read(&mut self.buffer) {
            Ok(TlsRead { bytes: 0, .. }) => SocketReadOutcome::Drop,
            Ok(TlsRead { bytes, more }) => {
                // An end of the stream seen earlier comes after the bytes read now.
                connection.readable = more || connection.read_closed;
                connection.received_ms = self.now_ms;
                connection.last_look_ms = None;
                self.feed(connection, slot, bytes)
            }
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {
                connection.readable = false;
                self.feed(connection, slot, 0)
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => SocketReadOutcome::Keep,
            Err(_) => SocketReadOutcome::Drop,
        }
    }

    /// Passes the first `count` bytes of the buffer to the connection's current stage.
    fn feed(&mut self, connection: &mut SocketConnection, slot: u32, count: usize) -> SocketReadOutcome {
        match &mut connection.stage {
            ConnectionStage::Opening { head, .. } => {
                let seen = head.len();
                head.extend_from_slice(&self.buffer[..count]);
                let head = std::mem::take(head);
                self.look(connection, slot, head, seen)
            }
            ConnectionStage::Open(_) => {
                let mut buffer = std::mem::take(&mut self.buffer);
                self.feed_frames(connection, slot, &mut buffer[..count]);
                self.buffer = buffer;
                SocketReadOutcome::Keep
            }
            ConnectionStage::Closing(_) => {
                let mut buffer = std::mem::take(&mut self.buffer);
                self.feed_closing(connection, slot, &mut buffer[..count]);
                self.buffer = buffer;
                SocketReadOutcome::Keep
            }
        }
    }

    /// Handles bytes of a closing connection: the client may close first, as it is asked to, and then nothing is left to wait for.
    fn feed_closing(&mut self, connection: &mut SocketConnection, slot: u32, bytes: &mut [u8]) {
        let ConnectionStage::Closing(closing) = &mut connection.stage else { return };
        let Some((close_ms, close)) = &mut closing.close else { return };
        let (mut pong, mut close_code) = (None, None);
        let result = closing.reader.feed(bytes, &self.services.limits, self.now_ms, |incoming| {
            match incoming {
                // Of several pings only the last is answered (RFC 6455 §5.5.3).
                IncomingFrame::Ping(payload) => pong = Some(wire::frame(OpCode::Pong, payload)),
                IncomingFrame::Close(code) => close_code = Some(code),
                IncomingFrame::Message { .. } | IncomingFrame::Pong => {}
            }
            if close_code.is_some() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        if let Some(Some(code)) = close_code {
            *close = wire::close(code, "");
        }
        if close_code.is_some() || result.is_err() {
            *close_ms = self.now_ms;
        }
        if let Some(pong) = pong.filter(|_| connection.outbox.is_empty()) {
            self.send(connection, slot, pong);
        }
        self.close_if_due(connection, slot);
    }

    /// Decides on a fresh connection once its first head is complete.
    fn look(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        mut bytes: Vec<u8>,
        seen: usize,
    ) -> SocketReadOutcome {
        let (head, accept, length) =
            match handshake::detect_protocol(&bytes, seen, self.services.limits.header_bytes) {
                DetectedProtocol::Upgrade(head, Ok(accept), length) => (head, accept, length),
                DetectedProtocol::Upgrade(_, Err(refusal), _) => {
                    return self.refuse(connection, slot, handshake::PATH, &refusal);
                }
                DetectedProtocol::Http(_) => return SocketReadOutcome::Http(bytes),
                DetectedProtocol::TooLarge => {
                    Limit::HeaderBytes.hit();
                    return self.refuse(connection, slot, http::NO_ROUTE, &headers_too_large());
                }
                DetectedProtocol::Malformed => {
                    return self.refuse(connection, slot, http::NO_ROUTE, &malformed(&bytes));
                }
                DetectedProtocol::Partial => {
                    if let ConnectionStage::Opening { head, .. } = &mut connection.stage {
                        *head = bytes;
                    }
                    return SocketReadOutcome::Keep;
                }
            };
        let address =
            connection.address().map(|peer| self.services.proxies.client(peer, head.forwarded_for()));
        if let Some(client) = address.filter(|client| Some(*client) != connection.address()) {
            connection.link.set_client(client);
        }
        match head.decide(self.services.gate(address)) {
            AdmissionDecision::Refuse(refusal) => {
                return self.refuse(connection, slot, handshake::PATH, &refusal);
            }
            AdmissionDecision::Open(opening) => {
                self.send(connection, slot, handshake::switching_protocols(&accept).into());
                self.open(connection, slot, opening);
            }
            AdmissionDecision::OpenRefused { format, refused } => {
                self.send(connection, slot, handshake::switching_protocols(&accept).into());
                self.refuse_in_socket(connection, slot, format, refused);
            }
        }
        self.feed_frames(connection, slot, &mut bytes[length..]);
        SocketReadOutcome::Keep
    }

    fn refuse(
        &mut self,
        connection: &mut SocketConnection,
        slot: u32,
        route: &'static str,
        refusal: &HttpRefusal,
    ) -> SocketReadOutcome {
        http::count_refusal(route, refusal);
        let bytes = handshake::refusal_bytes(refusal, handshake::date(self.epoch_ms));
        connection.begin_closing(Bytes::from(bytes), self.now_ms, 0);
        self.close_if_due(connection, slot);
        SocketReadOutcome::Keep
    }

    pub(super) fn feed_frames(&mut self, connection: &mut SocketConnection, slot: u32, bytes: &mut [u8]) {
        let ConnectionStage::Open(open) = &mut connection.stage else {
            return self.feed_closing(connection, slot, bytes);
        };
        let OpenSocket { session, reader, pings, .. } = &mut **open;
        let cx = context(&self.services, self.epoch_ms);
        let now_ms = self.now_ms;
        let mut outputs: Vec<Output> = Vec::new();
        let mut closed = None;
        let result = reader.feed(bytes, cx.limits, now_ms, |incoming| {
            match incoming {
                IncomingFrame::Message { text, payload } => session.message(cx, text, payload, &mut outputs),
                IncomingFrame::Ping(payload) if pings.allows(now_ms, cx.limits.pings_per_second) => {
                    session.ping(payload, &mut outputs);
                }
                IncomingFrame::Ping(_) => {
                    Limit::PingsPerSecond.hit();
                    let error = "more pings than a client may send";
                    session.fail(error, code::BAD_REQUEST, close::POLICY, &mut outputs);
                }
                IncomingFrame::Pong => {}
                IncomingFrame::Close(code) => closed = Some(code.unwrap_or(close::NORMAL)),
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

    fn hand_to_http(&mut self, mut connection: Box<SocketConnection>, slot: u32, read: Vec<u8>) {
        if self.services.http.is_closed()
            || self.poll.registry().deregister(&mut connection.link.socket).is_err()
        {
            return self.forget(connection, slot);
        }
        self.release(slot);
        let SocketConnection { link, permit, .. } = *connection;
        let passed = HttpConnection { link: link.map(Into::into), permit, read };
        if self.services.http.try_send(passed).is_err() {
            CapacityLimit::Http.count_refusal();
        }
    }

    /// Registers a socket under a slot of its own.
    pub(super) fn register(&mut self, connection: &mut SocketConnection, slot: u32) -> std::io::Result<()> {
        let interest = Interest::READABLE | Interest::WRITABLE;
        self.poll.registry().register(&mut connection.link.socket, mio::Token(slot as usize), interest)
    }
}

fn malformed(bytes: &[u8]) -> HttpRefusal {
    HttpRefusal::malformed(if bytes.starts_with(TLS_HANDSHAKE) {
        "the request is a TLS handshake, and this port speaks plain HTTP"
    } else {
        "the request is malformed"
    })
}

fn headers_too_large() -> HttpRefusal {
    HttpRefusal::new(RefusalKind::HeadersTooLarge, "the request's headers are over the limit")
}
