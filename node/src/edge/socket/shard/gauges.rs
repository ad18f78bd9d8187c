//! Gauges and counters of a shard.

use std::sync::atomic::Ordering;

use fanfare_proto::frame::Format;

use super::super::connection::OpenSocket;
use super::super::handshake::ClientTransport;
use super::Shard;

/// Interval of the scan for connections with a full socket.
const LOOK_MS: u64 = 2_000;
const JSON: &str = "json";
const MSGPACK: &str = "msgpack";

pub(super) struct ShardMetrics {
    connections: metrics::Gauge,
    websocket_json: metrics::Gauge,
    websocket_msgpack: metrics::Gauge,
    sse: metrics::Gauge,
    pub(super) rings: metrics::Gauge,
    pub(super) deliveries: metrics::Counter,
    pub(super) slow: metrics::Counter,
}

impl ShardMetrics {
    pub(super) fn new() -> Self {
        let of = |transport: ClientTransport, format| metrics::gauge!("fanfare_connections", "transport" => transport.as_str(), "format" => format);
        Self {
            connections: metrics::gauge!("fanfare_socket_connections"),
            websocket_json: of(ClientTransport::WebSocket, JSON),
            websocket_msgpack: of(ClientTransport::WebSocket, MSGPACK),
            sse: of(ClientTransport::Sse, JSON),
            rings: metrics::gauge!("fanfare_io_uring_shards"),
            deliveries: metrics::counter!("fanfare_deliveries_total"),
            slow: metrics::counter!("fanfare_slow_consumers_total"),
        }
    }

    pub(super) fn opened(&self, open: &OpenSocket) {
        self.connections.increment(1.0);
        self.of(open).increment(1.0);
    }

    pub(super) fn ended(&self, open: &OpenSocket) {
        self.connections.decrement(1.0);
        self.of(open).decrement(1.0);
    }

    fn of(&self, open: &OpenSocket) -> &metrics::Gauge {
        match (open.transport, open.session.format()) {
            (ClientTransport::Sse, _) => &self.sse,
            (ClientTransport::WebSocket, Format::Json) => &self.websocket_json,
            (ClientTransport::WebSocket, Format::MsgPack) => &self.websocket_msgpack,
        }
    }
}

/// Schedule of the scan for connections with a full socket. No scan runs while there are none.
#[derive(Default)]
pub(super) struct BlockedScan {
    /// True if a socket was full since the last scan, or still was at that time.
    pub(super) is_any: bool,
    next_ms: u64,
}

/// Totals over the connections with a full socket.
#[derive(Debug, Default, Clone, Copy)]
pub(super) struct BlockedTotals {
    connections: usize,
    bytes: usize,
}

impl BlockedTotals {
    pub(super) fn add(&mut self, bytes: usize) {
        self.connections += 1;
        self.bytes += bytes;
    }
}

impl BlockedScan {
    /// Time of the next scan. None: no socket is full.
    pub(super) fn next_ms(&self) -> Option<u64> {
        self.is_any.then_some(self.next_ms)
    }
}

impl Shard {
    /// Starts a scan if a connection has, or had, a full socket.
    pub(super) fn start_blocked_scan(&mut self) {
        if self.blocked_scan.is_any && self.now_ms >= self.blocked_scan.next_ms {
            // No further scan before this one has ended.
            self.blocked_scan = BlockedScan { is_any: false, next_ms: u64::MAX };
            self.begin_blocked_scan();
        }
    }

    pub(super) fn finish_blocked_scan(&mut self, waiting: BlockedTotals) {
        let BlockedTotals { connections, bytes } = waiting;
        let is_any = self.blocked_scan.is_any || connections > 0;
        self.blocked_scan = BlockedScan { is_any, next_ms: self.now_ms + LOOK_MS };
        self.handle.blocked.store(connections, Ordering::Relaxed);
        self.handle.outbox_bytes.store(bytes, Ordering::Relaxed);
    }
}
