//! The side of a lane that has something to send: it connects, sends what waits, and keeps it until it is confirmed.

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
use super::grpc::{self, Connections};
use super::queue::{Pull, Queue};
use super::{CONNECT, Common, PING, PING_UNTIL_UP, PeerLag, RETRY, SILENCE};
use crate::cluster::inbound::Peer;
use crate::pulse;

/// One run of a peer, as long as it is a member.
pub(super) struct Link {
    pub(super) peer: Peer,
    pub(super) addr: Mutex<SocketAddr>,
    pub(super) lanes: Vec<Arc<Queue>>,
    /// How many lanes are open.
    pub(super) open: AtomicUsize,
    /// Held while a change is reported, so that reports are in order.
    pub(super) reporting: Mutex<()>,
    /// The peer is no member any more.
    pub(super) is_left: AtomicBool,
    pub(super) end: CancellationToken,
}

impl Link {
    pub(super) fn is_up(&self) -> bool {
        self.open.load(Ordering::Relaxed) == self.lanes.len()
    }

    /// Of all its lanes.
    pub(super) fn lag(&self) -> PeerLag {
        let mut lag = PeerLag::none(Arc::clone(&self.peer.node_id));
        for lane in &self.lanes {
            let (items, bytes) = lane.held();
            lag.add(items, bytes, lane.waits());
        }
        lag
    }

    pub(super) fn leave(&self) {
        self.is_left.store(true, Ordering::Relaxed);
        self.end.cancel();
    }

    /// Nobody is to be warned that its lanes end, or are not opened.
    fn is_given_up(&self, common: &Common) -> bool {
        self.is_left.load(Ordering::Relaxed) || common.tasks.stopping().is_cancelled()
    }

    fn opened(&self, common: &Common) {
        let _reporting = self.reporting.lock();
        if self.open.fetch_add(1, Ordering::Relaxed) + 1 == self.lanes.len() {
            tracing::info!(peer = &*self.peer.node_id, "link to a peer is up");
            common.inbound.link(&self.peer, true);
        }
    }

    fn closed(&self, common: &Common, reason: &Status) {
        let _reporting = self.reporting.lock();
        if self.open.fetch_sub(1, Ordering::Relaxed) == self.lanes.len() {
            let peer = &*self.peer.node_id;
            // The connection may end before the task that reads it.
            match reason.code() == Code::Cancelled || self.is_given_up(common) {
                true => tracing::info!(peer, "link to a peer is left"),
                false => tracing::warn!(peer, reason = reason.message(), "link to a peer is down"),
            }
            common.inbound.link(&self.peer, false);
        }
    }
}

/// Ends the count of an open lane in whatever way its task ends.
struct Open<'a> {
    link: &'a Link,
    common: &'a Common,
    reason: Status,
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.link.closed(self.common, &self.reason);
    }
}

/// Never returns by itself: each attempt has a fresh socket.
pub(super) async fn keep(link: Arc<Link>, lane: usize, common: Arc<Common>) {
    let mut told = String::new();
    loop {
        let end = link.end.child_token();
        let _end = end.clone().drop_guard();
        let opened = timeout(CONNECT, open(&link, lane, &common, end))
            .await
            .unwrap_or_else(|_| Err(Status::deadline_exceeded("it did not answer in time")));
        match opened {
            Ok(frames) => {
                told.clear();
                link.opened(&common);
                let mut open = Open { link: &link, common: &common, reason: Status::cancelled("it is left") };
                open.reason = listen(frames, &link.lanes[lane]).await;
            }
            // A peer that is away for long is one line, not one for each attempt.
            Err(error) if error.message() == told || link.is_given_up(&common) => {}
            Err(error) => {
                error.message().clone_into(&mut told);
                let peer = &*link.peer.node_id;
                // It was started anew, and gossip is about to say so.
                match told == super::ANOTHER_RUN {
                    true => tracing::info!(peer, lane, reason = told, "no link to a peer"),
                    false => tracing::warn!(peer, lane, reason = told, "no link to a peer"),
                }
            }
        }
        sleep(RETRY).await;
    }
}

async fn open(
    link: &Arc<Link>,
    lane: usize,
    common: &Common,
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
    let queue = &link.lanes[lane];
    let (start, started) = oneshot::channel();
    let hello = v1::Hello {
        major: MAJOR,
        minor: super::minor(),
        node_id: common.own.node_id.to_string(),
        incarnation: common.own.incarnation,
        lane: lane as u32,
        next: queue.next(),
        taken: 0,
        to: link.peer.incarnation,
    };
    let outgoing =
        Outgoing { link: Arc::clone(link), queue: Arc::clone(queue), step: Step::Hello(hello, started) };
    let frames = stream::unfold(outgoing, |mut outgoing| async move {
        let kind = outgoing.next().await?;
        Some((v1::Frame { kind: Some(kind) }, outgoing))
    });
    let connections = Connections { tasks: Arc::clone(&common.tasks), end };
    let mut frames = grpc::open(socket, connections, frames).await?;
    let Some(v1::Frame { kind: Some(Kind::Hello(hello)) }) = frames.message().await? else {
        return Err(Status::failed_precondition("it does not begin with hello"));
    };
    if hello.major != MAJOR {
        return Err(super::accept::other_major(hello.major));
    }
    if hello.incarnation != link.peer.incarnation {
        return Err(Status::failed_precondition(super::ANOTHER_RUN));
    }
    // The stream waits for it, unless it is gone again.
    let _ = start.send(queue.open(hello.taken));
    Ok(frames)
}

fn is_untrusted(error: &std::io::Error) -> bool {
    let error = error.get_ref().and_then(|error| error.downcast_ref());
    matches!(error, Some(rustls::Error::InvalidCertificate(_)))
}

/// Reads what the peer answers; why it ended.
async fn listen(mut frames: Streaming<v1::Frame>, queue: &Queue) -> Status {
    loop {
        match timeout(SILENCE, frames.message()).await {
            Err(_) => return Status::deadline_exceeded("it is silent"),
            Ok(Err(status)) => return status,
            Ok(Ok(None)) => return Status::unavailable("it ended the lane"),
            Ok(Ok(Some(frame))) => {
                pulse::pass();
                // A pong says no more than that it came; what is unknown came with a later minor.
                if let Some(Kind::Confirm(confirm)) = frame.kind {
                    queue.confirm(confirm.sequence);
                }
            }
        }
    }
}

/// The frames of a lane, made when the connection has room for them.
struct Outgoing {
    link: Arc<Link>,
    queue: Arc<Queue>,
    step: Step,
}

enum Step {
    Hello(v1::Hello, oneshot::Receiver<u64>),
    Answer(oneshot::Receiver<u64>),
    Open { stream: u64, ping_at: Instant, pings: u64, awaited: Awaited },
    Over,
}

/// Since when acks wait for the receipts of what a lane is given.
#[derive(Debug, Default)]
struct Awaited(Option<Instant>);

impl Awaited {
    /// How long something has waited that an ack waits for. None while something is there, too, that was acknowledged without.
    fn waits_ms(&mut self, is_up: bool, waits: Duration, now: Instant) -> Option<u64> {
        self.0 = is_up.then(|| self.0.unwrap_or(now));
        let is_awaited = waits <= now.saturating_duration_since(self.0?);
        is_awaited.then(|| u64::try_from(waits.as_millis()).unwrap_or(u64::MAX))
    }
}

impl Outgoing {
    /// None ends the lane. It is not called again before it has resolved.
    async fn next(&mut self) -> Option<Kind> {
        match std::mem::replace(&mut self.step, Step::Over) {
            Step::Hello(hello, started) => {
                self.step = Step::Answer(started);
                return Some(Kind::Hello(hello));
            }
            Step::Answer(started) => {
                let (stream, now) = (started.await.ok()?, Instant::now());
                let awaited = Awaited::default();
                self.step = Step::Open { stream, ping_at: now, pings: 0, awaited };
            }
            step => self.step = step,
        }
        // Whoever is ready to publish now is in the same batch.
        tokio::task::yield_now().await;
        let Step::Open { stream, ping_at, pings, awaited } = &mut self.step else { return None };
        loop {
            pulse::pass();
            let now = Instant::now();
            if now >= *ping_at {
                *pings += 1;
                let waits_ms = awaited.waits_ms(self.link.is_up(), self.queue.waits(), now);
                // Until a peer has heard how long things wait here, it must think that something was lost when this node dies.
                *ping_at = now + if waits_ms.is_some() { PING } else { PING_UNTIL_UP };
                return Some(Kind::Ping(v1::Ping { number: *pings, waits_ms }));
            }
            if let Some(until) = self.queue.gathers_until().filter(|until| now < *until) {
                // Of what comes meanwhile only that wakes the task for which somebody waits.
                self.queue.gathered(until).await;
            }
            match self.queue.pull(*stream) {
                Pull::Batch(batch) => return Some(Kind::Batch(batch)),
                Pull::Over => return None,
                Pull::Nothing => {}
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
        let (mut awaited, begun) = (Awaited::default(), Instant::now());
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
