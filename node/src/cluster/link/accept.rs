//! The side of a lane that takes: the listener, who may speak, and what each peer has sent so far.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::peer::v1::frame::Kind;
use fanfare_proto::peer::{Items, LANES_MAX, MAJOR, v1};
use futures_util::{Stream, stream};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tonic::{Status, Streaming};

use super::grpc::{self, Connections};
use super::handshakes::{Handshakes, Place};
use super::{CONNECT, Common, SILENCE};
use crate::cluster::inbound::{self, Inbound, Peer};
use crate::pulse;
use crate::tasks::OnStop;
use crate::telemetry::{OFTEN, PeerRefusal};

/// Connections of peers; whoever comes beyond is closed, and tries again.
const CONNECTIONS_MAX: usize = 1024;
/// Lanes that are remembered, open or not; the longest unused goes, and where all are open a further one is refused.
const LANES_KEPT_MAX: usize = 2048;
const NODE_ID_BYTES_MAX: usize = 256;
/// An ack waits for this node so long at least, as long as the lane is open and its sender has kept what it held: what came
/// before is here. The rest of that time is for the way of a ping.
const WHOLE_WITHIN: Duration = Duration::from_millis(800);
const ACCEPT_AGAIN: Duration = Duration::from_millis(100);

/// Never returns. What cannot be accepted leaves the others alone.
pub(super) async fn listen(listener: TcpListener, common: Arc<Common>) {
    let lanes = Arc::new(Lanes::default());
    let handshakes = Handshakes::new();
    let connections = Arc::new(Semaphore::new(CONNECTIONS_MAX));
    loop {
        let (socket, from) = match listener.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(target: OFTEN, %error, "a peer's connection cannot be accepted");
                sleep(ACCEPT_AGAIN).await;
                continue;
            }
        };
        let place = handshakes.enter(from.ip()).await;
        let (common, lanes) = (Arc::clone(&common), Arc::clone(&lanes));
        let (connections, tasks) = (Arc::clone(&connections), Arc::clone(&common.tasks));
        tasks.spawn("peer connection", OnStop::Cancel, async move {
            let end = common.end.clone();
            end.run_until_cancelled(serve(socket, place, connections, common, lanes)).await;
        });
    }
}

async fn serve(
    socket: TcpStream,
    place: Place,
    connections: Arc<Semaphore>,
    common: Arc<Common>,
    lanes: Arc<Lanes>,
) {
    let acceptor = TlsAcceptor::from(Arc::clone(&common.tls.server));
    let accepted = match socket.set_nodelay(true) {
        Ok(()) => place.lost.run_until_cancelled(timeout(CONNECT, acceptor.accept(socket))).await,
        Err(error) => Some(Ok(Err(error))),
    };
    drop(place);
    let socket = match accepted {
        Some(Ok(Ok(socket))) => socket,
        Some(Ok(Err(error))) => return PeerRefusal::Tls.count(&error.to_string()),
        Some(Err(_)) => return PeerRefusal::Timeout.count("no handshake in time"),
        None => return PeerRefusal::TooMany.count("handshakes of its source"),
    };
    let Ok(_connection) = connections.try_acquire() else { return PeerRefusal::TooMany.count("connections") };
    let connections = Connections { tasks: Arc::clone(&common.tasks), end: common.end.child_token() };
    grpc::serve(socket, connections, move |frames| taking(frames, Arc::clone(&common), Arc::clone(&lanes)))
        .await;
}

/// What each lane of each run of a peer has sent.
#[derive(Default)]
pub(in crate::cluster) struct Lanes(Mutex<HashMap<(u64, u32), Arc<Lane>>>);

struct Lane {
    used: Mutex<Instant>,
    taken: Mutex<Taken>,
}

/// Held while a batch is handed on, so that an older stream of the same lane cannot come between.
#[derive(Default)]
struct Taken {
    /// The stream that speaks for the lane; an older one may still hold frames.
    stream: u64,
    sequence: u64,
}

impl Lanes {
    fn find(&self, incarnation: u64, lane: u32) -> Result<Arc<Lane>, Status> {
        let mut lanes = self.0.lock();
        if lanes.len() >= LANES_KEPT_MAX && !lanes.contains_key(&(incarnation, lane)) {
            let unused = lanes.iter().filter(|(_, lane)| Arc::strong_count(lane) == 1);
            let oldest = unused.min_by_key(|(_, lane)| *lane.used.lock()).map(|(key, _)| *key);
            let oldest = oldest.ok_or_else(|| Status::resource_exhausted("too many lanes are open here"))?;
            lanes.remove(&oldest);
        }
        let lane = lanes
            .entry((incarnation, lane))
            .or_insert_with(|| Arc::new(Lane { used: Mutex::new(Instant::now()), taken: Mutex::default() }));
        *lane.used.lock() = Instant::now();
        Ok(Arc::clone(lane))
    }

    /// A stream begins to speak for a lane of the peer that says hello.
    pub(in crate::cluster) fn open(
        &self,
        hello: v1::Hello,
        own: &Peer,
        inbound: &dyn Inbound,
    ) -> Result<(OpenLane, v1::Hello), Status> {
        if hello.major != MAJOR {
            return Err(other_major(hello.major));
        }
        if hello.lane as usize >= LANES_MAX || hello.node_id.len() > NODE_ID_BYTES_MAX {
            return Err(Status::invalid_argument("the hello is beyond its bounds"));
        }
        if hello.incarnation == own.incarnation {
            return Err(Status::failed_precondition("this is the node itself"));
        }
        if hello.to != own.incarnation {
            return Err(Status::failed_precondition(super::ANOTHER_RUN));
        }
        let lane = self.find(hello.incarnation, hello.lane)?;
        let peer = Peer { node_id: hello.node_id.into(), incarnation: hello.incarnation };
        let mut taken = lane.taken.lock();
        taken.stream += 1;
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
            lane: hello.lane,
            taken: taken.sequence,
            ..v1::Hello::default()
        };
        let stream = taken.stream;
        drop(taken);
        Ok((OpenLane { peer, number: hello.lane, lane, stream }, answer))
    }
}

/// The answers of a lane. Reading is part of making them: a peer that takes no answers is not read either.
fn taking(
    frames: Streaming<v1::Frame>,
    common: Arc<Common>,
    lanes: Arc<Lanes>,
) -> impl Stream<Item = Result<v1::Frame, Status>> + Send + 'static {
    let taking =
        Taking { frames, common, lanes, open: None, pinged: None, ending: Ending::Broken, over: false };
    stream::unfold(taking, |mut taking| async move {
        if taking.over {
            return None;
        }
        let answer = taking.answer().await;
        taking.over = answer.is_err();
        Some((answer.transpose()?.map(|kind| v1::Frame { kind: Some(kind) }), taking))
    })
}

struct Taking {
    frames: Streaming<v1::Frame>,
    common: Arc<Common>,
    lanes: Arc<Lanes>,
    open: Option<OpenLane>,
    /// When the last ping came, and how long something had waited at the peer by then.
    pinged: Option<(Instant, Duration)>,
    ending: Ending,
    over: bool,
}

/// Why nothing more comes over a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(in crate::cluster) enum Ending {
    /// As when the process of the peer has died.
    Broken,
    /// The peer may live on.
    Silent,
    /// By the peer, which may live on: it has lost what the lane held, and acknowledged it by that.
    Ended,
}

pub(in crate::cluster) struct OpenLane {
    peer: Peer,
    number: u32,
    lane: Arc<Lane>,
    stream: u64,
}

impl Taking {
    /// None when the peer has ended the lane.
    async fn answer(&mut self) -> Result<Option<Kind>, Status> {
        loop {
            let Ok(frame) = timeout(SILENCE, self.frames.message()).await else {
                self.ending = Ending::Silent;
                return Err(Status::deadline_exceeded("the peer is silent"));
            };
            pulse::pass();
            let Some(frame) = frame? else {
                self.ending = Ending::Ended;
                return Ok(None);
            };
            let answer = match (&self.open, frame.kind) {
                (None, Some(Kind::Hello(hello))) => {
                    let opened = self.lanes.open(hello, &self.common.own, &*self.common.inbound);
                    let (open, answer) =
                        opened.inspect_err(|status| PeerRefusal::Stream.count(status.message()))?;
                    self.common.inbound.lane_opened(&open.peer, open.number);
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
                // It came with a later minor.
                (Some(_), _) => continue,
            };
            return Ok(Some(answer));
        }
    }
}

impl Drop for Taking {
    fn drop(&mut self) {
        let Some(open) = self.open.take().filter(OpenLane::is_current) else { return };
        // What the peer has acknowledged for more than that time is here.
        let is_recent = |(at, waits): &(Instant, Duration)| at.elapsed() + *waits < WHOLE_WITHIN;
        let is_whole = self.ending.may_be_whole() && self.pinged.as_ref().is_some_and(is_recent);
        self.common.inbound.lane_ended(&open.peer, open.number, is_whole);
    }
}

impl Ending {
    /// Otherwise the peer may have acknowledged what has not come, however short ago its last ping is.
    pub(in crate::cluster) fn may_be_whole(self) -> bool {
        self == Self::Broken
    }
}

impl OpenLane {
    /// No other stream speaks for the lane.
    pub(in crate::cluster) fn is_current(&self) -> bool {
        self.lane.taken.lock().stream == self.stream
    }

    /// Up to which batch all are taken.
    pub(in crate::cluster) fn take(&self, batch: v1::Batch, inbound: &dyn Inbound) -> Result<u64, Status> {
        let mut taken = self.lane.taken.lock();
        if taken.stream != self.stream {
            return Err(Status::aborted("the lane was opened again"));
        }
        if batch.sequence <= taken.sequence {
            return Ok(taken.sequence);
        }
        if batch.sequence > taken.sequence + 1 {
            lost(&self.peer, inbound);
        }
        taken.sequence = batch.sequence;
        inbound.batch_came(batch.items.len());
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
            // Sent again it would be no better, so it counts as lost: once for all of them, since that concerns every channel.
            if let Some(reason) = bad {
                tracing::warn!(target: OFTEN, peer = &*self.peer.node_id, reason, "a peer's item was dropped");
                is_bad = true;
            }
        }
        if is_bad {
            lost(&self.peer, inbound);
        }
        // The same may come again, and then it waits for the next attempt of the peer.
        if has_panicked { Err(Status::internal("an item panicked")) } else { Ok(taken.sequence) }
    }
}

fn lost(peer: &Peer, inbound: &dyn Inbound) {
    metrics::counter!("fanfare_peer_continuity_lost_total").increment(1);
    tracing::warn!(target: OFTEN, peer = &*peer.node_id, "items of a peer are lost");
    inbound.continuity_lost(peer);
}

pub(super) fn other_major(theirs: u32) -> Status {
    Status::failed_precondition(format!(
        "nodes of version {MAJOR} and version {theirs} of the peer protocol do not speak to each other"
    ))
}
