//! One connection of a shard, from its first byte to its last.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use mio::net::TcpStream;

use super::handshake::{AdmittedConnection, ClientTransport};
use super::reader::FrameReader;
use super::shard::Replay;
use crate::accounts::QuotaSlot;
use crate::edge::link::{ClientLink, unsent};
use crate::hub::{MemberSync, SocketOutbox};
use crate::model::{ChannelName, Limits, SessionOwnership};
use crate::session::Session;

/// Time that a closed connection has to read the last frames and to close its side.
const LINGER_MS: u64 = 2_000;
/// Extra time for a silent client, in which the node checks whether unread bytes are in the socket.
const LAST_LOOK_MS: u64 = 1_000;
/// Number of moments between two heartbeats to which the heartbeats of all connections are aligned.
const HEARTBEAT_MOMENTS: u64 = 128;

/// Permit for one of the node's connections; returned when dropped.
#[derive(Debug)]
pub struct ConnectionPermit(Arc<AtomicUsize>);

impl ConnectionPermit {
    pub fn take(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(open))
    }
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A connection of a shard. Times are milliseconds since the shard began.
#[derive(Debug)]
pub(super) struct SocketConnection {
    pub(super) link: ClientLink<TcpStream>,
    pub(super) permit: ConnectionPermit,
    pub(super) generation: u32,
    pub(super) stage: ConnectionStage,
    pub(super) outbox: SocketOutbox,
    /// True if the socket may hold unread bytes.
    pub(super) readable: bool,
    /// True if the stream has ended after the unread bytes; no further event tells of it.
    pub(super) read_closed: bool,
    /// Start of the last check for unread bytes after the client was silent for too long.
    pub(super) last_look_ms: Option<u64>,
    /// True if the connection is in the shard's list of sockets to read. The next two flags are for sockets to flush and for replays.
    pub(super) in_ready: bool,
    pub(super) in_dirty: bool,
    pub(super) in_replaying: bool,
    /// True while reading waits for answers, or for space in the outbox.
    pub(super) paused: bool,
    /// Time since which the socket is full.
    pub(super) blocked_ms: Option<u64>,
    /// Unacknowledged bytes in the socket at that time, if the system can tell.
    pub(super) unsent: Option<i32>,
    pub(super) sent_ms: u64,
    pub(super) received_ms: u64,
    /// Time of the timer entry that is valid.
    pub(super) due_ms: u64,
}

#[derive(Debug)]
pub(super) enum ConnectionStage {
    /// The request's head is incomplete.
    Opening {
        head: Vec<u8>,
        since_ms: u64,
    },
    Open(Box<OpenSocket>),
    Closing(Box<ClosingSocket>),
}

/// A connection whose last frames are queued.
#[derive(Debug)]
pub(super) struct ClosingSocket {
    /// The last bytes, a close frame or an HTTP answer, and when to send them; none once they are sent.
    pub(super) close: Option<(u64, Bytes)>,
    pub(super) until_ms: u64,
    /// Reader for a close frame of the client, which may close first.
    pub(super) reader: FrameReader,
}

#[derive(Debug)]
pub(super) struct OpenSocket {
    pub(super) session: Session,
    pub(super) reader: FrameReader,
    pub(super) echo: bool,
    /// True for heartbeats by WebSocket pings instead of op 0.
    pub(super) heartbeat_pings: bool,
    pub(super) transport: ClientTransport,
    /// Attached channels with delivery.
    pub(super) subscriptions: Vec<SocketSubscription>,
    /// Replays under way, at most one for each subscription.
    pub(super) replays: Vec<Replay>,
    /// Member lists under way, by the numbers of their channels.
    pub(super) syncs: Vec<(u64, MemberSync)>,
    pub(super) pings: PingRate,
    /// Time of the open, in epoch milliseconds.
    pub(super) opened_ms: u64,
    /// Held only while the session is open, so returned before the last frames are sent.
    _quota_slot: QuotaSlot,
    _socket_permit: ConnectionPermit,
}

/// An attached channel with delivery.
#[derive(Debug)]
pub(super) struct SocketSubscription {
    pub(super) name: ChannelName,
    /// Channel number in the hub.
    pub(super) number: u64,
    /// The connection has access to all messages after this sequence of this incarnation.
    pub(super) since: u64,
}

impl SocketSubscription {
    /// Value of `since` for a subscription without messages.
    pub(super) const NEVER: u64 = u64::MAX;
}

impl OpenSocket {
    /// Creates the socket's state. The caller has already settled which session it owns.
    pub(super) fn new(opening: AdmittedConnection, ownership: SessionOwnership, epoch_ms: u64) -> Box<Self> {
        let AdmittedConnection {
            principal,
            client_id,
            format,
            echo,
            heartbeat_pings,
            quota_slot,
            socket_permit: permit,
            transport,
            resumable: _,
        } = opening;
        Box::new(Self {
            session: Session::new(principal, client_id, ownership, format),
            reader: FrameReader::default(),
            echo,
            heartbeat_pings,
            transport,
            subscriptions: Vec::new(),
            replays: Vec::new(),
            syncs: Vec::new(),
            pings: PingRate::default(),
            opened_ms: epoch_ms,
            _quota_slot: quota_slot,
            _socket_permit: permit,
        })
    }

    pub(super) fn add_subscription(&mut self, name: ChannelName, number: u64, since: u64) {
        // Most connections have one channel.
        self.subscriptions.reserve_exact(usize::from(self.subscriptions.is_empty()));
        self.subscriptions.push(SocketSubscription { name, number, since });
    }

    pub(super) fn subscription_mut(&mut self, name: &ChannelName) -> Option<&mut SocketSubscription> {
        self.subscriptions.iter_mut().find(|subscription| subscription.name == *name)
    }
}

/// Pings of the client in the current second.
#[derive(Debug, Default)]
pub(super) struct PingRate {
    count: u32,
    second: u32,
}

impl PingRate {
    /// True if the client may send one more; `per_second` 0: no limit.
    pub(super) fn allows(&mut self, now_ms: u64, per_second: u32) -> bool {
        let second = u32::try_from(now_ms / 1000).unwrap_or(u32::MAX);
        if self.second != second {
            (self.count, self.second) = (0, second);
        }
        self.count = self.count.saturating_add(1);
        per_second == 0 || self.count <= per_second
    }
}

impl SocketConnection {
    /// The client's address; none for an event stream, whose socket is within the process.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.link.socket.peer_addr().ok().map(|peer| self.link.client(peer))
    }

    pub(super) fn new(
        link: ClientLink<TcpStream>,
        permit: ConnectionPermit,
        generation: u32,
        now_ms: u64,
    ) -> Self {
        Self {
            link,
            permit,
            generation,
            stage: ConnectionStage::Opening { head: Vec::new(), since_ms: now_ms },
            outbox: SocketOutbox::default(),
            readable: true,
            read_closed: false,
            last_look_ms: None,
            in_ready: false,
            in_dirty: false,
            in_replaying: false,
            paused: false,
            blocked_ms: None,
            unsent: None,
            sent_ms: now_ms,
            received_ms: now_ms,
            due_ms: u64::MAX,
        }
    }

    pub(super) fn open_mut(&mut self) -> Option<&mut OpenSocket> {
        match &mut self.stage {
            ConnectionStage::Open(open) => Some(open),
            ConnectionStage::Opening { .. } | ConnectionStage::Closing(_) => None,
        }
    }

    /// Stops reading messages, and sends `close` after `after_ms`.
    pub(super) fn begin_closing(&mut self, close: Bytes, now_ms: u64, after_ms: u64) {
        let close_ms = now_ms + after_ms;
        let reader = self.open_mut().map(|open| std::mem::take(&mut open.reader)).unwrap_or_default();
        let (close, until_ms) = (Some((close_ms, close)), close_ms + LINGER_MS);
        self.stage = ConnectionStage::Closing(Box::new(ClosingSocket { close, until_ms, reader }));
    }

    /// True once everything has been sent, the close frame included. The client is to close now.
    pub(super) fn has_sent_all(&self) -> bool {
        self.has_closed() && self.outbox.is_empty() && !self.link.wants_write()
    }

    /// True once the close frame is in the outbox or sent.
    pub(super) fn has_closed(&self) -> bool {
        matches!(&self.stage, ConnectionStage::Closing(closing) if closing.close.is_none())
    }

    /// Time of the connection's next timer. `clock_ahead_ms` is epoch time minus shard time.
    pub(super) fn next_due_ms(&self, limits: &Limits, clock_ahead_ms: u64) -> u64 {
        match &self.stage {
            ConnectionStage::Opening { since_ms, .. } => since_ms + limits.header_ms,
            ConnectionStage::Closing(closing) => {
                closing.close.as_ref().map_or(closing.until_ms, |(at_ms, _)| *at_ms)
            }
            ConnectionStage::Open(open) => [
                Some(self.heartbeat_due_ms(limits)),
                self.silence_ends_ms(limits),
                self.blocked_ms.map(|since_ms| since_ms + limits.outbox_stall_ms),
                self.message_ends_ms(limits),
                open.session.due_ms().map(|epoch_ms| epoch_ms.saturating_sub(clock_ahead_ms)),
            ]
            .into_iter()
            .flatten()
            .min()
            .unwrap_or(u64::MAX),
        }
    }
}

impl SocketConnection {
    /// Time of the next heartbeat, unless something else is sent before. Rounded up to a common moment, so that heartbeats of many
    /// connections are written together. Never earlier: a client that was silent for less does not answer.
    pub(super) fn heartbeat_due_ms(&self, limits: &Limits) -> u64 {
        let first_ms = self.sent_ms + limits.heartbeat_ms;
        first_ms.next_multiple_of((limits.heartbeat_ms / HEARTBEAT_MOMENTS).max(1))
    }

    /// Time at which a silent client is disconnected. None while the client is not read; then a full outbox ends the connection.
    pub(super) fn silence_ends_ms(&self, limits: &Limits) -> Option<u64> {
        let first_ms = self.received_ms + silence_max_ms(limits);
        (!self.paused).then(|| self.last_look_ms.map_or(first_ms, |since_ms| since_ms + LAST_LOOK_MS))
    }

    /// Deadline by which a message that has begun must be complete.
    pub(super) fn message_ends_ms(&self, limits: &Limits) -> Option<u64> {
        let ConnectionStage::Open(open) = &self.stage else { return None };
        let begun_ms = open.reader.begun_ms().filter(|_| !self.paused)?;
        Some(begun_ms + limits.socket_message_ms)
    }

    /// Notes that the socket is full, which starts the time limit for that.
    pub(super) fn begin_blocked(&mut self, now_ms: u64) {
        self.blocked_ms = Some(now_ms);
        self.unsent = unsent(&self.link.socket);
    }

    /// True if the client has taken bytes since the socket was full. The socket becomes writable only when a good part of its buffer is
    /// free, which takes a slow client long.
    pub(super) fn is_taking(&self) -> bool {
        unsent(&self.link.socket) < self.unsent
    }

    /// Resumes reading; the pause does not count as silence.
    pub(super) fn resume_reading(&mut self, now_ms: u64) {
        self.paused = false;
        self.received_ms = now_ms;
        if let Some(open) = self.open_mut() {
            open.reader.restart_message_timer(now_ms);
        }
    }
}

/// Silence after which a client is disconnected.
fn silence_max_ms(limits: &Limits) -> u64 {
    2 * limits.heartbeat_ms + limits.heartbeat_grace_ms
}
