//! One socket of a shard, from its first byte to its last.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use mio::net::TcpStream;

use super::handshake::{Opening, Transport};
use super::reader::Reader;
use super::shard::Replay;
use crate::accounts::Seat;
use crate::edge::link::{Link, unsent};
use crate::hub::{Outbox, Sync};
use crate::model::{ChannelName, Limits, Tenure};
use crate::session::Session;

/// How long a closed connection may take to read what was said and to close its side.
const LINGER_MS: u64 = 2_000;
/// What a silent client is granted while the node looks whether it had only not come to reading.
const LAST_LOOK_MS: u64 = 1_000;
/// In so many parts of the time between two heartbeats those of all connections go out.
const HEARTBEAT_MOMENTS: u64 = 128;

/// One of the connections that this node holds; given back when dropped.
#[derive(Debug)]
pub struct Permit(Arc<AtomicUsize>);

impl Permit {
    pub fn take(open: &Arc<AtomicUsize>) -> Self {
        open.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(open))
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Times are milliseconds since the shard began.
#[derive(Debug)]
pub(super) struct Connection {
    pub(super) link: Link<TcpStream>,
    pub(super) permit: Permit,
    pub(super) generation: u32,
    pub(super) stage: Stage,
    pub(super) outbox: Outbox,
    /// The socket may hold bytes that were not read.
    pub(super) readable: bool,
    /// The end of the stream stands behind what was not read; no further event tells of it.
    pub(super) read_closed: bool,
    /// Since when its silence is over its time, and what may stand in the socket is being looked at once more.
    pub(super) last_look_ms: Option<u64>,
    /// Stands in the shard's list of those to read, to flush, or to be given of what they missed.
    pub(super) in_ready: bool,
    pub(super) in_dirty: bool,
    pub(super) in_replaying: bool,
    /// Reading waits for answers or for room in the outbox.
    pub(super) paused: bool,
    /// The socket is full since then.
    pub(super) blocked_ms: Option<u64>,
    /// By then, what the socket held that the client had not acknowledged, where that can be told.
    pub(super) unsent: Option<i32>,
    pub(super) sent_ms: u64,
    pub(super) received_ms: u64,
    /// The timer that counts.
    pub(super) due_ms: u64,
}

#[derive(Debug)]
pub(super) enum Stage {
    /// Until the end of the request's head.
    Opening {
        head: Vec<u8>,
        since_ms: u64,
    },
    Open(Box<Open>),
    Closing(Box<Closing>),
}

/// Something final was said.
#[derive(Debug)]
pub(super) struct Closing {
    /// The last bytes and when they go out, if they have not yet: a close frame, or an answer of HTTP.
    pub(super) close: Option<(u64, Bytes)>,
    pub(super) until_ms: u64,
    /// Until then the client may close by itself.
    pub(super) reader: Reader,
}

#[derive(Debug)]
pub(super) struct Open {
    pub(super) session: Session,
    pub(super) reader: Reader,
    pub(super) echo: bool,
    /// Silence is broken by WebSocket pings instead of op 0.
    pub(super) heartbeat_pings: bool,
    pub(super) transport: Transport,
    /// Channels with delivery.
    pub(super) subscriptions: Vec<Subscription>,
    /// At most one for each subscription.
    pub(super) replays: Vec<Replay>,
    /// Member lists that are on their way, by the numbers of their channels.
    pub(super) syncs: Vec<(u64, Sync)>,
    pub(super) pings: PingRate,
    /// Epoch milliseconds.
    pub(super) opened_ms: u64,
    /// Held as long as the session is open, and so given back before the last frames are out.
    _seat: Seat,
    _place: Permit,
}

/// A channel with delivery.
#[derive(Debug)]
pub(super) struct Subscription {
    pub(super) name: ChannelName,
    /// In the hub.
    pub(super) number: u64,
    /// All messages after this sequence of this run are the connection's to have.
    pub(super) since: u64,
}

impl Subscription {
    /// It takes no messages.
    pub(super) const NEVER: u64 = u64::MAX;
}

impl Open {
    /// What the opening takes up was settled before: `tenure`.
    pub(super) fn new(opening: Opening, tenure: Tenure, epoch_ms: u64) -> Box<Self> {
        let Opening {
            principal,
            client_id,
            format,
            echo,
            heartbeat_pings,
            seat,
            place,
            transport,
            former: _,
        } = opening;
        Box::new(Self {
            session: Session::new(principal, client_id, tenure, format),
            reader: Reader::default(),
            echo,
            heartbeat_pings,
            transport,
            subscriptions: Vec::new(),
            replays: Vec::new(),
            syncs: Vec::new(),
            pings: PingRate::default(),
            opened_ms: epoch_ms,
            _seat: seat,
            _place: place,
        })
    }

    pub(super) fn add_subscription(&mut self, name: ChannelName, number: u64, since: u64) {
        // Most connections have one channel.
        self.subscriptions.reserve_exact(usize::from(self.subscriptions.is_empty()));
        self.subscriptions.push(Subscription { name, number, since });
    }

    pub(super) fn subscription_mut(&mut self, name: &ChannelName) -> Option<&mut Subscription> {
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
    /// Whether the client may send one more; 0: as many as it likes.
    pub(super) fn allows(&mut self, now_ms: u64, per_second: u32) -> bool {
        let second = u32::try_from(now_ms / 1000).unwrap_or(u32::MAX);
        if self.second != second {
            (self.count, self.second) = (0, second);
        }
        self.count = self.count.saturating_add(1);
        per_second == 0 || self.count <= per_second
    }
}

impl Connection {
    /// The client's; none within the process, as of an event stream.
    pub(super) fn address(&self) -> Option<IpAddr> {
        self.link.socket.peer_addr().ok().map(|peer| self.link.client(peer))
    }

    pub(super) fn new(link: Link<TcpStream>, permit: Permit, generation: u32, now_ms: u64) -> Self {
        Self {
            link,
            permit,
            generation,
            stage: Stage::Opening { head: Vec::new(), since_ms: now_ms },
            outbox: Outbox::default(),
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

    pub(super) fn open_mut(&mut self) -> Option<&mut Open> {
        match &mut self.stage {
            Stage::Open(open) => Some(open),
            Stage::Opening { .. } | Stage::Closing(_) => None,
        }
    }

    /// Nothing more is read as messages; `close` goes out after `after_ms`.
    pub(super) fn begin_closing(&mut self, close: Bytes, now_ms: u64, after_ms: u64) {
        let close_ms = now_ms + after_ms;
        let reader = self.open_mut().map(|open| std::mem::take(&mut open.reader)).unwrap_or_default();
        let (close, until_ms) = (Some((close_ms, close)), close_ms + LINGER_MS);
        self.stage = Stage::Closing(Box::new(Closing { close, until_ms, reader }));
    }

    /// The close frame has gone, and all before it; its client is to close now.
    pub(super) fn has_said_all(&self) -> bool {
        self.has_closed() && self.outbox.is_empty() && !self.link.wants_write()
    }

    /// The last that is said stands in the outbox, or is out.
    pub(super) fn has_closed(&self) -> bool {
        matches!(&self.stage, Stage::Closing(closing) if closing.close.is_none())
    }

    /// When this connection is to be looked at. `clock_ahead_ms` is epoch time minus shard time.
    pub(super) fn next_due_ms(&self, limits: &Limits, clock_ahead_ms: u64) -> u64 {
        match &self.stage {
            Stage::Opening { since_ms, .. } => since_ms + limits.header_ms,
            Stage::Closing(closing) => closing.close.as_ref().map_or(closing.until_ms, |(at_ms, _)| *at_ms),
            Stage::Open(open) => [
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

impl Connection {
    /// When it is to be said that the node lives, unless something else is sent before. All of a moment are due when it ends, so
    /// that they are written together. Not before: a client that has been silent for less does not answer.
    pub(super) fn heartbeat_due_ms(&self, limits: &Limits) -> u64 {
        let first_ms = self.sent_ms + limits.heartbeat_ms;
        first_ms.next_multiple_of((limits.heartbeat_ms / HEARTBEAT_MOMENTS).max(1))
    }

    /// When a client that sends nothing is taken for dead. While it is not read, nothing is known of it; then the
    /// outbox that it does not empty ends it.
    pub(super) fn silence_ends_ms(&self, limits: &Limits) -> Option<u64> {
        let first_ms = self.received_ms + silence_max_ms(limits);
        (!self.paused).then(|| self.last_look_ms.map_or(first_ms, |since_ms| since_ms + LAST_LOOK_MS))
    }

    /// By when a message that is begun must be whole.
    pub(super) fn message_ends_ms(&self, limits: &Limits) -> Option<u64> {
        let Stage::Open(open) = &self.stage else { return None };
        let begun_ms = open.reader.begun_ms().filter(|_| !self.paused)?;
        Some(begun_ms + limits.socket_message_ms)
    }

    /// The socket takes nothing more; the time that it may take for that begins.
    pub(super) fn begin_blocked(&mut self, now_ms: u64) {
        self.blocked_ms = Some(now_ms);
        self.unsent = unsent(&self.link.socket);
    }

    /// Whether the client has taken something since, of what the socket holds: it asks for more only when a good part
    /// of its buffer is free, and a slow client takes long to get there.
    pub(super) fn is_taking(&self) -> bool {
        unsent(&self.link.socket) < self.unsent
    }

    /// Reading goes on: the time in which it did not counts for nothing.
    pub(super) fn resume_reading(&mut self, now_ms: u64) {
        self.paused = false;
        self.received_ms = now_ms;
        if let Some(open) = self.open_mut() {
            open.reader.begin_anew(now_ms);
        }
    }
}

/// A client that sends nothing for so long is taken for dead.
fn silence_max_ms(limits: &Limits) -> u64 {
    2 * limits.heartbeat_ms + limits.heartbeat_grace_ms
}
