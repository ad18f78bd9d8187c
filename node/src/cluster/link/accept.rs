//! Receiving side of peer streams: the listener, the check of peers, and the progress of each stream.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::peer::v1::frame::Kind;
use fanfare_proto::peer::{Items, MAJOR, STREAMS_MAX, v1};
use futures_util::{Stream, stream};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tonic::{Status, Streaming};

use super::grpc::{self, PeerConnectionExecutor};
use super::handshakes::{HandshakeSlot, Handshakes};
use super::{CONNECT, LinkContext, SILENCE};
use crate::cluster::inbound::{self, Inbound, Peer};
use crate::stall_detector;
use crate::tasks::OnStop;
use crate::telemetry::{PeerRefusal, RATE_LIMITED};

/// Connections of peers. A further connection is closed, and its peer tries again.
const CONNECTIONS_MAX: usize = 1024;
/// Inbound streams that are remembered, open or closed. The stream that is unused for longest is forgotten; if all are open, a further one
/// is refused.
const STREAMS_KEPT_MAX: usize = 2048;
const NODE_ID_BYTES_MAX: usize = 256;
/// A peer waits at least this long for this node's ack before it acknowledges a publish without it, as long as the stream is open. So what
/// the peer acknowledged has arrived here if its last ping is younger than this, less the wait that the ping reports.
const CONTIGUOUS_WITHIN: Duration = Duration::from_millis(800);
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Accepts peers. Never returns. A connection that cannot be accepted does not affect the others.
pub(super) async fn listen(listener: TcpListener, common: Arc<LinkContext>) {
    let streams = Arc::new(InboundStreams::default());
    let handshakes = Handshakes::new();
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let (socket, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(target: RATE_LIMITED, %error, "peer connection accept failed");
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let slot = handshakes.enter(from.ip()).await;
        let (common, streams) = (Arc::clone(&common), Arc::clone(&streams));
        let (connections, tasks) = (Arc::clone(&connections), Arc::clone(&common.tasks));
        tasks.spawn("peer connection", OnStop::Cancel, async move {
            let end = common.end.clone();
            end.run_until_cancelled(serve(socket, slot, connections, common, streams)).await;
        });
    }
}

async fn serve(
    socket: TcpStream,
    slot: HandshakeSlot,
    connections: Arc<Semaphore>,
    common: Arc<LinkContext>,
    streams: Arc<InboundStreams>,
) {
    let acceptor = TlsAcceptor::from(Arc::clone(&common.tls.server));
    let accepted = match socket.set_nodelay(true) {
        Ok(()) => slot.lost.run_until_cancelled(timeout(CONNECT, acceptor.accept(socket))).await,
        Err(error) => Some(Ok(Err(error))),
    };
    drop(slot);
    let socket = match accepted {
        Some(Ok(Ok(socket))) => socket,
        Some(Ok(Err(error))) => return PeerRefusal::Tls.count(&error.to_string()),
        Some(Err(_)) => return PeerRefusal::Timeout.count("no handshake in time"),
        None => return PeerRefusal::TooMany.count("handshakes of its source"),
    };
    let Ok(_connection) = connections.try_acquire() else { return PeerRefusal::TooMany.count("connections") };
    let connections =
        PeerConnectionExecutor { tasks: Arc::clone(&common.tasks), end: common.end.child_token() };
    grpc::serve(socket, connections, move |frames| taking(frames, Arc::clone(&common), Arc::clone(&streams)))
        .await;
}

/// Progress of every inbound stream, by incarnation of the peer and stream number.
#[derive(Default)]
pub(in crate::cluster) struct InboundStreams(Mutex<HashMap<(u64, u32), Arc<InboundStream>>>);

struct InboundStream {
    used: Mutex<Instant>,
    taken: Mutex<InboundProgress>,
}

/// Locked while a batch is passed on, so that an older attempt of the same stream cannot interleave.
#[derive(Default)]
struct InboundProgress {
    /// The current attempt of this stream; frames of an older attempt are refused.
    attempt: u64,
    sequence: u64,
}

impl InboundStreams {
    fn find(&self, incarnation: u64, number: u32) -> Result<Arc<InboundStream>, Status> {
        let mut streams = self.0.lock();
        if streams.len() >= STREAMS_KEPT_MAX && !streams.contains_key(&(incarnation, number)) {
            let unused = streams.iter().filter(|(_, stream)| Arc::strong_count(stream) == 1);
            let oldest = unused.min_by_key(|(_, stream)| *stream.used.lock()).map(|(key, _)| *key);
            let oldest = oldest.ok_or_else(|| Status::resource_exhausted("too many lanes are open here"))?;
            streams.remove(&oldest);
        }
        let stream = streams.entry((incarnation, number)).or_insert_with(|| {
            Arc::new(InboundStream { used: Mutex::new(Instant::now()), taken: Mutex::default() })
        });
        *stream.used.lock() = Instant::now();
        Ok(Arc::clone(stream))
    }

    /// Opens an attempt of a peer's stream after its hello.
    pub(in crate::cluster) fn open(
        &self,
        hello: v1::Hello,
        own: &Peer,
        inbound: &dyn Inbound,
    ) -> Result<(OpenInboundStream, v1::Hello), Status> {
        if hello.major != MAJOR {
            return Err(other_major(hello.major));
        }
        if hello.peer_stream as usize >= STREAMS_MAX || hello.node_id.len() > NODE_ID_BYTES_MAX {
            return Err(Status::invalid_argument("the hello is beyond its bounds"));
        }
        if hello.incarnation == own.incarnation {
            return Err(Status::failed_precondition("this is the node itself"));
        }
        if hello.to != own.incarnation {
            return Err(Status::failed_precondition(super::ANOTHER_INCARNATION));
        }
        let inbound_stream = self.find(hello.incarnation, hello.peer_stream)?;
        let peer = Peer { node_id: hello.node_id.into(), incarnation: hello.incarnation };
        let mut taken = inbound_stream.taken.lock();
        taken.attempt += 1;
        let before = hello.next.saturating_sub(1);
        if before > taken.sequence {
            lost(&peer, inbound);
        }
        taken.sequence = taken.sequence.max(before);
        let answer = v1::Hello {
            major: MAJOR,
            minor: super::minor(),
            node_id: own.node_id.to_string(),
            incarnation: own.incarnation,
            peer_stream: hello.peer_stream,
            taken: taken.sequence,
            ..v1::Hello::default()
        };
        let stream = taken.attempt;
        drop(taken);
        Ok((OpenInboundStream { peer, number: hello.peer_stream, inbound_stream, attempt: stream }, answer))
    }
}

/// The answers to a peer. The stream reads only when an answer is pulled, so a peer that takes no answers is not read either.
fn taking(
    frames: Streaming<v1::Frame>,
    common: Arc<LinkContext>,
    streams: Arc<InboundStreams>,
) -> impl Stream<Item = Result<v1::Frame, Status>> + Send + 'static {
    let taking = InboundStreamReader {
        frames,
        common,
        streams,
        open: None,
        pinged: None,
        ending: StreamEnd::Broken,
        over: false,
    };
    stream::unfold(taking, |mut taking| async move {
        if taking.over {
            return None;
        }
        let answer = taking.answer().await;
        taking.over = answer.is_err();
        Some((answer.transpose()?.map(|kind| v1::Frame { kind: Some(kind) }), taking))
    })
}

struct InboundStreamReader {
    frames: Streaming<v1::Frame>,
    common: Arc<LinkContext>,
    streams: Arc<InboundStreams>,
    open: Option<OpenInboundStream>,
    /// Arrival of the last ping, and how long the peer's oldest item had waited by then.
    pinged: Option<(Instant, Duration)>,
    ending: StreamEnd,
    over: bool,
}

/// The reason why nothing more arrives over a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cluster) enum StreamEnd {
    /// Connection broken, as when the process of the peer has ended.
    Broken,
    /// No frame within the time limit. The peer may still run.
    Silent,
    /// Stream ended by the peer, which may still run: it has dropped the queue, and acknowledged publishes without this node.
    Ended,
}

pub(in crate::cluster) struct OpenInboundStream {
    peer: Peer,
    number: u32,
    inbound_stream: Arc<InboundStream>,
    attempt: u64,
}

impl InboundStreamReader {
    /// The next answer. None when the peer has ended the stream.
    async fn answer(&mut self) -> Result<Option<Kind>, Status> {
        loop {
            let Ok(frame) = timeout(SILENCE, self.frames.message()).await else {
                self.ending = StreamEnd::Silent;
                return Err(Status::deadline_exceeded("the peer is silent"));
            };
            stall_detector::halt_if_stalled();
            let Some(frame) = frame? else {
                self.ending = StreamEnd::Ended;
                return Ok(None);
            };
            let answer = match (&self.open, frame.kind) {
                (None, Some(Kind::Hello(hello))) => {
                    let opened = self.streams.open(hello, &self.common.own, &*self.common.inbound);
                    let (open, answer) =
                        opened.inspect_err(|status| PeerRefusal::Stream.count(status.message()))?;
                    self.common.inbound.stream_opened(&open.peer, open.number);
                    self.open = Some(open);
                    Kind::Hello(answer)
                }
                (None, _) => return Err(Status::failed_precondition("a lane begins with hello")),
                (Some(open), Some(Kind::Batch(batch))) => {
                    Kind::Confirm(v1::Confirm { sequence: open.take(batch, &*self.common.inbound)? })
                }
                (Some(_), Some(Kind::Ping(ping))) => {
                    self.pinged = ping.waits_ms.map(|ms| (Instant::now(), Duration::from_millis(ms)));
                    Kind::Pong(v1::Pong { number: ping.number })
                }
                // The kind of a later minor version.
                (Some(_), _) => continue,
            };
            return Ok(Some(answer));
        }
    }
}

impl Drop for InboundStreamReader {
    fn drop(&mut self) {
        let Some(open) = self.open.take().filter(OpenInboundStream::is_current) else { return };
        // Every item that the peer acknowledged more than this time ago has arrived.
        let is_recent = |(at, waits): &(Instant, Duration)| at.elapsed() + *waits < CONTIGUOUS_WITHIN;
        let is_contiguous = self.ending.may_be_contiguous() && self.pinged.as_ref().is_some_and(is_recent);
        self.common.inbound.stream_ended(&open.peer, open.number, is_contiguous);
    }
}

impl StreamEnd {
    /// True if nothing that the peer has acknowledged may be missing. After any other end the peer may have acknowledged items that never
    /// arrived, however recent its last ping is.
    pub(in crate::cluster) fn may_be_contiguous(self) -> bool {
        self == Self::Broken
    }
}

impl OpenInboundStream {
    /// True if no newer attempt of the stream is open.
    pub(in crate::cluster) fn is_current(&self) -> bool {
        self.inbound_stream.taken.lock().attempt == self.attempt
    }

    /// Passes a batch on. Returns the sequence up to which all batches have been received.
    pub(in crate::cluster) fn take(&self, batch: v1::Batch, inbound: &dyn Inbound) -> Result<u64, Status> {
        let mut taken = self.inbound_stream.taken.lock();
        if taken.attempt != self.attempt {
            return Err(Status::aborted("the lane was opened again"));
        }
        if batch.sequence <= taken.sequence {
            return Ok(taken.sequence);
        }
        if batch.sequence > taken.sequence + 1 {
            lost(&self.peer, inbound);
        }
        taken.sequence = batch.sequence;
        inbound.batch_received(batch.items.len());
        let (mut is_bad, mut has_panicked) = (false, false);
        for item in Items::new(batch.items) {
            let take = |item| catch_unwind(AssertUnwindSafe(|| inbound::take(item, &self.peer, inbound)));
            let bad = match item.map(take) {
                Ok(Ok(taken)) => taken.err().map(|error| error.to_string()),
                Ok(Err(_)) => {
                    has_panicked = true;
                    Some("what it asks for panicked".to_owned())
                }
                Err(error) => Some(error.to_string()),
            };
            // Sent again the item would be no better, so it counts as lost: once for all of them, since the loss concerns every channel.
            if let Some(reason) = bad {
                tracing::warn!(target: RATE_LIMITED, peer = &*self.peer.node_id, reason, "peer item dropped");
                is_bad = true;
            }
        }
        if is_bad {
            lost(&self.peer, inbound);
        }
        // The same item may panic again, and then waits for the next attempt of the peer.
        if has_panicked { Err(Status::internal("an item panicked")) } else { Ok(taken.sequence) }
    }
}

fn lost(peer: &Peer, inbound: &dyn Inbound) {
    metrics::counter!("fanfare_peer_continuity_lost_total").increment(1);
    tracing::warn!(target: RATE_LIMITED, peer = &*peer.node_id, "peer items lost");
    inbound.continuity_lost(peer);
}

pub(super) fn other_major(theirs: u32) -> Status {
    Status::failed_precondition(format!(
        "nodes of version {MAJOR} and version {theirs} of the peer protocol do not speak to each other"
    ))
}
