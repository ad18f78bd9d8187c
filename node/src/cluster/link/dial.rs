//! Sending side of peer streams: connects, sends queued items, and keeps them until the peer acknowledges them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use fanfare_proto::peer::v1::frame::Kind;
use fanfare_proto::peer::{MAJOR, v1};
use futures_util::stream;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::time::{Instant, sleep, sleep_until, timeout};
use tokio_rustls::TlsConnector;
use tokio_util::sync::CancellationToken;
use tonic::{Code, Status, Streaming};

use super::certificates::SERVER_NAME;
use super::grpc::{self, PeerConnectionExecutor};
use super::queue::{BatchPull, PeerQueue};
use super::{CONNECT, LinkContext, PING, PING_UNTIL_UP, PeerLag, RETRY, SILENCE};
use crate::cluster::inbound::Peer;
use crate::stall_detector;

/// The link to one incarnation of a peer, as long as the peer is a member.
pub(super) struct PeerLink {
    pub(super) peer: Peer,
    pub(super) addr: Mutex<SocketAddr>,
    pub(super) queues: Vec<Arc<PeerQueue>>,
    /// Number of open streams.
    pub(super) open: AtomicUsize,
    /// Locked while a change of the link is reported, so that reports stay in order.
    pub(super) reporting: Mutex<()>,
    /// True once the peer has left the membership.
    pub(super) is_left: AtomicBool,
    pub(super) end: CancellationToken,
}

impl PeerLink {
    pub(super) fn is_up(&self) -> bool {
        self.open.load(Ordering::Relaxed) == self.queues.len()
    }

    /// Unacknowledged items of all streams of this link.
    pub(super) fn lag(&self) -> PeerLag {
        let mut lag = PeerLag::none(Arc::clone(&self.peer.node_id));
        for queue in &self.queues {
            let (items, bytes) = queue.held();
            lag.add(items, bytes, queue.waits());
        }
        lag
    }

    pub(super) fn leave(&self) {
        self.is_left.store(true, Ordering::Relaxed);
        self.end.cancel();
    }

    /// True if the link is being given up, so that its failures need no warning.
    fn is_given_up(&self, common: &LinkContext) -> bool {
        self.is_left.load(Ordering::Relaxed) || common.tasks.stopping().is_cancelled()
    }

    fn opened(&self, common: &LinkContext) {
        let _reporting = self.reporting.lock();
        if self.open.fetch_add(1, Ordering::Relaxed) + 1 == self.queues.len() {
            tracing::info!(peer = &*self.peer.node_id, "peer streams open");
            common.inbound.link(&self.peer, true);
        }
    }

    fn closed(&self, common: &LinkContext, reason: &Status) {
        let _reporting = self.reporting.lock();
        if self.open.fetch_sub(1, Ordering::Relaxed) == self.queues.len() {
            let peer = &*self.peer.node_id;
            // The connection may end before the task that reads from it.
            match reason.code() == Code::Cancelled || self.is_given_up(common) {
                true => tracing::info!(peer, "peer stream closed"),
                false => tracing::warn!(peer, reason = reason.message(), "peer stream lost"),
            }
            common.inbound.link(&self.peer, false);
        }
    }
}

/// Counts a stream as open, and uncounts it however its task ends.
struct OpenStreamGuard<'a> {
    link: &'a PeerLink,
    common: &'a LinkContext,
    reason: Status,
}

impl Drop for OpenStreamGuard<'_> {
    fn drop(&mut self) {
        self.link.closed(self.common, &self.reason);
    }
}

/// Keeps one stream open. Never returns by itself. Each attempt uses a fresh socket.
pub(super) async fn keep_open(link: Arc<PeerLink>, stream: usize, common: Arc<LinkContext>) {
    let mut logged = String::new();
    loop {
        let end = link.end.child_token();
        let _end = end.clone().drop_guard();
        let opened = timeout(CONNECT, open(&link, stream, &common, end))
            .await
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("it did not answer in time")));
        match opened {
            Ok(frames) => {
                logged.clear();
                link.opened(&common);
                let mut open =
                    OpenStreamGuard { link: &link, common: &common, reason: Status::cancelled("it is left") };
                open.reason = listen(frames, &link.queues[stream]).await;
            }
            // An unreachable peer is logged once, not once for each attempt.
            Err(error) if error.message() == logged || link.is_given_up(&common) => {}
            Err(error) => {
                error.message().clone_into(&mut logged);
                let peer = &*link.peer.node_id;
                // The peer restarted, and gossip is about to report that.
                match logged == super::ANOTHER_INCARNATION {
                    true => tracing::info!(peer, stream, reason = logged, "peer stream not opened"),
                    false => tracing::warn!(peer, stream, reason = logged, "peer stream not opened"),
                }
            }
        }
        sleep(RETRY).await;
    }
}

async fn open(
    link: &Arc<PeerLink>,
    stream: usize,
    common: &LinkContext,
    end: CancellationToken,
) -> Result<Streaming<v1::Frame>, Status> {
    let addr = *link.addr.lock();
    let failed = |error: std::io::Error| Status::unavailable(error.to_string());
    let socket = TcpStream::connect(addr).await.map_err(failed)?;
    socket.set_nodelay(true).map_err(failed)?;
    let name =
        ServerName::try_from(SERVER_NAME).map_err(|_| Status::internal("the name of peers is no name"))?;
    let connector = TlsConnector::from(Arc::clone(&common.tls.client));
    let socket = connector.connect(name, socket).await.map_err(|error| match is_untrusted(&error) {
        true => Status::unauthenticated(format!(
            "{error} (--peer-ca, --peer-cert and --peer-key, or --cluster-key-file, of both nodes)"
        )),
        false => failed(error),
    })?;
    let queue = &link.queues[stream];
    let (start, started) = oneshot::channel();
    let hello = v1::Hello {
        major: MAJOR,
        minor: super::minor(),
        node_id: common.own.node_id.to_string(),
        incarnation: common.own.incarnation,
        peer_stream: stream as u32,
        next: queue.next(),
        taken: 0,
        to: link.peer.incarnation,
    };
    let outgoing = OutboundFrames {
        link: Arc::clone(link),
        queue: Arc::clone(queue),
        step: OutboundStep::Hello(hello, started),
    };
    let frames = stream::unfold(outgoing, |mut outgoing| async move {
        let kind = outgoing.next().await?;
        Some((v1::Frame { kind: Some(kind) }, outgoing))
    });
    let connections = PeerConnectionExecutor { tasks: Arc::clone(&common.tasks), end };
    let mut frames = grpc::open(socket, connections, frames).await?;
    let Some(v1::Frame { kind: Some(Kind::Hello(hello)) }) = frames.message().await? else {
        return Err(Status::failed_precondition("it does not begin with hello"));
    };
    if hello.major != MAJOR {
        return Err(super::accept::other_major(hello.major));
    }
    if hello.incarnation != link.peer.incarnation {
        return Err(Status::failed_precondition(super::ANOTHER_INCARNATION));
    }
    // The stream waits for this answer, unless it has ended.
    let _ = start.send(queue.open(hello.taken));
    Ok(frames)
}

fn is_untrusted(error: &std::io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref());
    matches!(error, Some(rustls::Error::InvalidCertificate(_)))
}

/// Reads the peer's answers. Returns the reason why they ended.
async fn listen(mut frames: Streaming<v1::Frame>, queue: &PeerQueue) -> Status {
    loop {
        match timeout(SILENCE, frames.message()).await {
            Err(_) => return Status::deadline_exceeded("it is silent"),
            Ok(Err(status)) => return status,
            Ok(Ok(None)) => return Status::unavailable("it ended the lane"),
            Ok(Ok(Some(frame))) => {
                stall_detector::halt_if_stalled();
                // A pong needs no handling, and an unknown frame is of a later minor version.
                if let Some(Kind::Confirm(confirm)) = frame.kind {
                    queue.confirm(confirm.sequence);
                }
            }
        }
    }
}

/// Frames of one stream, made when the connection has room for them.
struct OutboundFrames {
    link: Arc<PeerLink>,
    queue: Arc<PeerQueue>,
    step: OutboundStep,
}

enum OutboundStep {
    Hello(v1::Hello, oneshot::Receiver<u64>),
    Answer(oneshot::Receiver<u64>),
    Open { attempt: u64, ping_at: Instant, pings: u64, awaited: AwaitedSince },
    Over,
}

/// Start of the time in which publishes wait for this peer's acks. None while the link is down.
#[derive(Debug, Default)]
struct AwaitedSince(Option<Instant>);

impl AwaitedSince {
    /// Gives the time that the oldest item has waited, in milliseconds; `None` while an older item may remain that was
    /// acknowledged without waiting for the peer.
    fn waits_ms(&mut self, is_up: bool, waits: Duration, now: Instant) -> Option<u64> {
        self.0 = is_up.then(|| self.0.unwrap_or(now));
        let is_awaited = waits <= now.saturating_duration_since(self.0?);
        is_awaited.then(|| u64::try_from(waits.as_millis()).unwrap_or(u64::MAX))
    }
}

impl OutboundFrames {
    /// The next frame. None ends the stream. Not called again before the future has resolved.
    async fn next(&mut self) -> Option<Kind> {
        match std::mem::replace(&mut self.step, OutboundStep::Over) {
            OutboundStep::Hello(hello, started) => {
                self.step = OutboundStep::Answer(started);
                return Some(Kind::Hello(hello));
            }
            OutboundStep::Answer(started) => {
                let (stream, now) = (started.await.ok()?, Instant::now());
                let awaited = AwaitedSince::default();
                self.step = OutboundStep::Open { attempt: stream, ping_at: now, pings: 0, awaited };
            }
            step => self.step = step,
        }
        // Publishers that are ready now get into the same batch.
        tokio::task::yield_now().await;
        let OutboundStep::Open { attempt: stream, ping_at, pings, awaited } = &mut self.step else {
            return None;
        };
        loop {
            stall_detector::halt_if_stalled();
            let now = Instant::now();
            if now >= *ping_at {
                *pings += 1;
                let waits_ms = awaited.waits_ms(self.link.is_up(), self.queue.waits(), now);
                // Until a peer knows how long items wait here, it must assume a loss if this node fails.
                *ping_at = now + if waits_ms.is_some() { PING } else { PING_UNTIL_UP };
                return Some(Kind::Ping(v1::Ping { number: *pings, waits_ms }));
            }
            if let Some(until) = self.queue.coalesces_until().filter(|until| now < *until) {
                // Of further items, only one that completes the expected publishes wakes this task.
                self.queue.coalesced(until).await;
            }
            match self.queue.pull(*stream) {
                BatchPull::Batch(batch) => return Some(Kind::Batch(batch)),
                BatchPull::Over => return None,
                BatchPull::Nothing => {}
            }
            tokio::select! {
                () = self.queue.changed() => {}
                () = sleep_until(*ping_at) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_queued_before_link_up_are_not_awaited_by_an_ack() {
        let (mut awaited, begun) = (AwaitedSince::default(), Instant::now());
        let mut waits_ms = |is_up, waits_ms, at_ms| {
            let at = begun + Duration::from_millis(at_ms);
            awaited.waits_ms(is_up, Duration::from_millis(waits_ms), at)
        };
        assert_eq!(waits_ms(false, 0, 0), None);
        assert_eq!(waits_ms(true, 10, 100), None);
        assert_eq!(waits_ms(true, 60, 150), None);
        assert_eq!(waits_ms(true, 50, 150), Some(50));
        assert_eq!(waits_ms(true, 0, 200), Some(0));
        assert_eq!(waits_ms(false, 0, 300), None);
        assert_eq!(waits_ms(true, 250, 400), None, "it was not up meanwhile");
        assert_eq!(waits_ms(true, 0, 500), Some(0));
    }
}
