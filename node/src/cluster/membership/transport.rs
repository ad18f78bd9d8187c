//! The way of gossip: chitchat's messages over one UDP socket, sealed.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use chitchat::transport::{Socket, Transport};
use chitchat::{ChitchatMessage, Deserializable as _, Serializable as _};
use parking_lot::Mutex;
use tokio::net::UdpSocket;

use super::sealed::{DATAGRAM_BYTES_MAX, Dropped, Sealed};
use crate::telemetry::OFTEN;

/// A socket that fails is tried again after this.
const FAILED_WAIT: Duration = Duration::from_millis(100);

/// Strangers could fill the log.
const FORGED_TOLD_EVERY: Duration = Duration::from_secs(60);

/// The socket and who is known behind it; it outlives one run of chitchat.
#[derive(Clone)]
pub(super) struct Wire {
    socket: Arc<UdpSocket>,
    pub(super) sealed: Arc<Mutex<Sealed>>,
    /// When something that was sealed with another key was told of last.
    forged: Arc<Mutex<Option<Instant>>>,
}

impl Wire {
    pub(super) fn new(socket: UdpSocket, sealed: Sealed) -> Self {
        Self { socket: Arc::new(socket), sealed: Arc::new(Mutex::new(sealed)), forged: Arc::default() }
    }

    /// Sends at once or not at all: what is lost is sent anew sooner or later.
    pub(super) fn send(&self, datagram: &[u8], to: SocketAddr) {
        if let Err(error) = self.socket.try_send_to(datagram, to)
            && error.kind() != io::ErrorKind::WouldBlock
        {
            tracing::debug!(%to, %error, "a datagram of gossip was not sent");
        }
    }

    /// Asks who is at an address.
    pub(super) fn challenge(&self, to: SocketAddr) {
        let challenge = self.sealed.lock().challenge(to, Instant::now());
        if let Some(challenge) = challenge {
            self.send(&challenge, to);
        }
    }

    /// Answers what is to be answered here, and returns gossip.
    fn take(&self, datagram: &[u8], from: SocketAddr) -> Option<ChitchatMessage> {
        let received = self.sealed.lock().receive(datagram, from, Instant::now());
        for reply in &received.replies {
            self.send(reply, from);
        }
        if let Some(dropped) = received.dropped {
            count(dropped);
            if dropped == Dropped::Forged {
                self.tell_forged(from);
            }
        }
        let gossip = received.gossip?;
        let message = ChitchatMessage::deserialize(&mut &gossip[..]);
        message.inspect_err(|_| count(Dropped::Malformed)).ok()
    }

    fn tell_forged(&self, from: SocketAddr) {
        let (now, mut told) = (Instant::now(), self.forged.lock());
        if told.is_none_or(|told| now.saturating_duration_since(told) >= FORGED_TOLD_EVERY) {
            *told = Some(now);
            tracing::warn!(%from, "gossip came that no key of this cluster has sealed: a node there has another key (--cluster-key-file), or it is a stranger");
        }
    }
}

fn count(dropped: Dropped) {
    metrics::counter!("fanfare_gossip_dropped_total", "reason" => dropped.name()).increment(1);
}

/// Makes the counters, so that they are there before anything was dropped.
pub(super) fn begin_metrics() {
    for dropped in Dropped::ALL {
        metrics::counter!("fanfare_gossip_dropped_total", "reason" => dropped.name()).increment(0);
    }
}

#[async_trait]
impl Transport for Wire {
    async fn open(&self, own: SocketAddr) -> anyhow::Result<Box<dyn Socket>> {
        // One byte more, so that what is too large shows.
        let buffer = vec![0; DATAGRAM_BYTES_MAX + 1].into();
        Ok(Box::new(SealedSocket { wire: self.clone(), own, buffer }))
    }
}

struct SealedSocket {
    wire: Wire,
    /// Where others reach this node.
    own: SocketAddr,
    buffer: Box<[u8]>,
}

#[async_trait]
impl Socket for SealedSocket {
    async fn send(&mut self, to: SocketAddr, message: ChitchatMessage) -> anyhow::Result<()> {
        // A former run of this node is dead for chitchat, which asks the dead now and then.
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

    // It is dropped and called again at will: nothing is kept over its only awaits.
    async fn recv(&mut self) -> anyhow::Result<(SocketAddr, ChitchatMessage)> {
        loop {
            match self.wire.socket.recv_from(&mut self.buffer).await {
                Ok((length, from)) => {
                    if let Some(message) = self.wire.take(&self.buffer[..length], from) {
                        return Ok((from, message));
                    }
                }
                // What the kernel says of a peer that is gone.
                Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {}
                Err(error) => {
                    tracing::warn!(target: OFTEN, %error, "gossip cannot be received");
                    tokio::time::sleep(FAILED_WAIT).await;
                }
            }
        }
    }
}
