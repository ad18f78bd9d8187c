//! What a shard counts, and what waits for it and in it.

use std::sync::atomic::Ordering;

use fanfare_proto::frame::Format;

use super::super::connection::Open;
use super::super::handshake::Transport;
use super::Shard;

/// How often it is looked what waits for sockets that take nothing more.
const LOOK_MS: u64 = 2_000;
const JSON: &str = "json";
const MSGPACK: &str = "msgpack";

pub(super) struct Metrics {
    connections: metrics::Gauge,
    websocket_json: metrics::Gauge,
    websocket_msgpack: metrics::Gauge,
    sse: metrics::Gauge,
    pub(super) rings: metrics::Gauge,
    pub(super) deliveries: metrics::Counter,
    pub(super) slow: metrics::Counter,
}

impl Metrics {
    pub(super) fn new() -> Self {
        let of = |transport: Transport, format| metrics::gauge!("fanfare_connections", "transport" => transport.as_str(), "format" => format);
        Self {
            connections: metrics::gauge!("fanfare_socket_connections"),
            websocket_json: of(Transport::WebSocket, JSON),
            websocket_msgpack: of(Transport::WebSocket, MSGPACK),
            sse: of(Transport::Sse, JSON),
            rings: metrics::gauge!("fanfare_io_uring_shards"),
            deliveries: metrics::counter!("fanfare_deliveries_total"),
            slow: metrics::counter!("fanfare_slow_consumers_total"),
        }
    }

    pub(super) fn opened(&self, open: &Open) {
        self.connections.increment(1.0);
        self.of(open).increment(1.0);
    }

    pub(super) fn ended(&self, open: &Open) {
        self.connections.decrement(1.0);
        self.of(open).decrement(1.0);
    }

    fn of(&self, open: &Open) -> &metrics::Gauge {
        match (open.transport, open.session.format()) {
            (Transport::Sse, _) => &self.sse,
            (Transport::WebSocket, Format::Json) => &self.websocket_json,
            (Transport::WebSocket, Format::MsgPack) => &self.websocket_msgpack,
        }
    }
}

/// When the connections whose socket is full are looked through. Nothing is while there is none.
#[derive(Default)]
pub(super) struct Backlogged {
    /// A socket was full since the last look, or still was then.
    pub(super) is_any: bool,
    next_ms: u64,
}

/// What waits for sockets that are full.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct Waiting {
    connections: usize,
    bytes: usize,
}

impl Waiting {
    pub(super) fn add(&mut self, bytes: usize) {
        self.connections += 1;
        self.bytes += bytes;
    }
}

impl Backlogged {
    /// When to look. None: no socket is full.
    pub(super) fn next_ms(&self) -> Option<u64> {
        self.is_any.then_some(self.next_ms)
    }
}

impl Shard {
    /// Begins to look through the connections when one of them has, or had, a full socket.
    pub(super) fn look_at_backlogged(&mut self) {
        if self.backlogged.is_any && self.now_ms >= self.backlogged.next_ms {
            // Not again before this look has ended.
            self.backlogged = Backlogged { is_any: false, next_ms: u64::MAX };
            self.begin_to_weigh();
        }
    }

    pub(super) fn weighed(&mut self, waiting: Waiting) {
        let Waiting { connections, bytes } = waiting;
        let is_any = self.backlogged.is_any || connections > 0;
        self.backlogged = Backlogged { is_any, next_ms: self.now_ms + LOOK_MS };
        self.handle.blocked.store(connections, Ordering::Relaxed);
        self.handle.outbox_bytes.store(bytes, Ordering::Relaxed);
    }
}
