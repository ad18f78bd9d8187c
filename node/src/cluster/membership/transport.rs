//! Transport of gossip: chitchat's messages over one UDP socket, sealed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chitchat::transport::{Socket, Transport};
use chitchat::{ChitchatMessage, Deserializable as _, Serializable as _};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use super::sealed::{DATAGRAM_BYTES_MAX, DatagramDropReason, DatagramSealer};
use crate::telemetry::RATE_LIMITED;

/// A socket that fails is tried again after this time.
const FAILED_WAIT: Duration = Duration::from_millis(100);

/// Interval of the log line about forged datagrams, since strangers could fill the log.
const FORGED_LOG_EVERY: Duration = Duration::from_secs(60);

/// The socket and its known peers. Outlives restarts of chitchat.
#[derive(Clone)]
pub(super) struct GossipWire {
    socket: Arc<UdpSocket>,
    pub(super) sealed: Arc<Mutex<DatagramSealer>>,
    /// Time at which a datagram with a foreign key was last logged.
    forged: Arc<Mutex<Option<Instant>>>,
}

impl GossipWire {
    pub(super) fn new(socket: UdpSocket, sealed: DatagramSealer) -> Self {
        Self { socket: Arc::new(socket), sealed: Arc::new(Mutex::new(sealed)), forged: Arc::default() }
    }

    /// Sends at once or not at all: lost datagrams are sent again sooner or later.
    pub(super) fn send(&self, datagram: &[u8], to: SocketAddr) {
        if let Err(error) = self.socket.try_send_to(datagram, to)
            && error.kind() != io::ErrorKind::WouldBlock
        {
            tracing::debug!(%to, %error, "gossip datagram not sent");
        }
    }

    /// Asks for the identity of the node at an address.
    pub(super) fn challenge(&self, to: SocketAddr) {
        let challenge = self.sealed.lock().challenge(to, Instant::now());
        if let Some(challenge) = challenge {
            self.send(&challenge, to);
        }
    }

    /// Handles one datagram, replies included, and returns gossip.
    fn take(&self, datagram: &[u8], from: SocketAddr) -> Option<ChitchatMessage> {
        let received = self.sealed.lock().receive(datagram, from, Instant::now());
        for reply in &received.replies {
            self.send(reply, from);
        }
        if let Some(dropped) = received.dropped {
            count(dropped);
            if dropped == DatagramDropReason::Forged {
                self.log_forged(from);
            }
        }
        let gossip = received.gossip?;
        let message = ChitchatMessage::deserialize(&mut &gossip[..]);
        message.inspect_err(|_| count(DatagramDropReason::Malformed)).ok()
    }

    fn log_forged(&self, from: SocketAddr) {
        let (now, mut logged_at) = (Instant::now(), self.forged.lock());
        if logged_at.is_none_or(|logged_at| now.saturating_duration_since(logged_at) >= FORGED_LOG_EVERY) {
            *logged_at = Some(now);
            tracing::warn!(%from, "forged gossip dropped: the sender has another key (--cluster-key-file), or is not a node of this cluster");
        }
    }
}

fn count(dropped: DatagramDropReason) {
    metrics::counter!("fanfare_gossip_dropped_total", "reason" => dropped.name()).increment(1);
}

/// Creates the counters, so that they exist before the first drop.
pub(super) fn begin_metrics() {
    for dropped in DatagramDropReason::ALL {
        metrics::counter!("fanfare_gossip_dropped_total", "reason" => dropped.name()).increment(0);
    }
}

#[async_trait]
impl Transport for GossipWire {
    async fn open(&self, own: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        // One byte more, so that a too large datagram shows.
        let buffer = vec![0; DATAGRAM_BYTES_MAX + 1].into();
        Ok(Box::new(SealedSocket { wire: self.clone(), own, buffer }))
    }
}

struct SealedSocket {
    wire: GossipWire,
    /// Address at which other nodes reach this node.
    own: SocketAddr,
    buffer: Box<[u8]>,
}

#[async_trait]
impl Socket for SealedSocket {
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        // An earlier incarnation of this node is down for chitchat, which gossips with such nodes now and then.
        if to == self.own {
            return Ok(());
        }
        let sealed = self.wire.sealed.lock().seal_gossip(&message.serialize_to_vec(), to);
        match sealed {
            Some(sealed) => self.wire.send(&sealed, to),
            None => self.wire.challenge(to),
        }
        Ok(())
    }

    // Cancel-safe: no state is kept over its only awaits.
    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        loop {
            match self.wire.socket.recv_from(&mut self.buffer).await {
                Ok((length, from)) => {
                    if let Some(message) = self.wire.take(&self.buffer[..length], from) {
                        return Ok((from, message));
                    }
                }
                // The kernel reports this for a peer that has ended.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => {
                    tracing::warn!(target: RATE_LIMITED, %error, "gossip receive failed");
                    tokio::time::sleep(FAILED_WAIT).await;
                }
            }
        }
    }
}
