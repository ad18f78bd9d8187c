//! Links: each node opens a few peer streams to each peer, and sends over them what is meant for that peer.
//!
//! A peer stream is one gRPC stream on a connection of its own. All items of a channel take the same stream, so they arrive in order. A
//! batch is kept until the peer acknowledges it, and sent again when the stream is open again; the receiver drops duplicates. So an item
//! arrives once as long as both processes live, or its loss is reported.

mod accept;
mod carrier;
mod certificates;
mod dial;
mod forward;
mod grpc;
mod handshakes;
mod presence;
mod queue;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicUsize};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bytes::Bytes;
use fanfare_proto::peer::{MINOR, STREAMS_MAX, encode_item, encode_item_of_next_minor, v1};
use fanfare_proto::serial::Serial;
use fanfare_proto::trace::TraceContext;
use parking_lot::{Mutex, RwLock};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[cfg(test)]
pub(super) use accept::{InboundStreams, OpenInboundStream, StreamEnd};
pub use carrier::{PeerLag, PeerLinks};
pub use certificates::{PeerFile, PeerFiles, PeerTls, PeerTlsError, SERVER_NAME};
#[cfg(test)]
pub(super) use queue::BatchPull;
pub(super) use queue::PeerQueue;
pub use queue::{LostItem, PeerAck, QueueBounds};

use super::inbound::claims::{self, NonceClaimAnswer};
use super::inbound::{
    EndedIncarnation, Inbound, InterestMessage, Peer, PeerAnswer, PeerRequest, TenantCountMessage,
    connections,
};
use crate::hub::{MessageDelivery, ReplayHandoff};
use crate::model::{
    ClosedSession, ConnectionId, PublishedMessages, SessionLocation, SessionTakeover, SocketlessTakeover,
    Stamp,
};
use crate::tasks::{OnStop, Tasks};
use dial::PeerLink;
use forward::named;

pub const STREAMS_DEFAULT: usize = 1;

/// Reason of a refusal by a node that has restarted since.
const ANOTHER_INCARNATION: &str = "this is another run of the node";
/// Environment variable that makes a test build speak the next minor version.
const NEXT_MINOR: &str = "PEER_PROTOCOL_NEXT_MINOR";
/// Connections that the kernel completes while this node is busy, connections of strangers included.
const BACKLOG: i32 = 4096;
/// Time limit of connection, handshake and hello together.
const CONNECT: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(500);
const PING: Duration = Duration::from_millis(500);
/// Interval of pings while another stream of the link is not up yet.
const PING_UNTIL_UP: Duration = Duration::from_millis(50);
/// A stream over which nothing arrives for this long is cut, by either side.
const SILENCE: Duration = Duration::from_millis(1500);
/// A longer frame is refused before memory is allocated for it.
const FRAME_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A member of the cluster with the address of its peer listener.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAddr {
    pub peer: Peer,
    pub addr: SocketAddr,
}

/// Settings of the links to peers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkSettings {
    /// Streams to each peer, 1 to 8.
    pub streams: usize,
    pub queue: QueueBounds,
}

impl Default for LinkSettings {
    fn default() -> Self {
        Self { streams: STREAMS_DEFAULT, queue: QueueBounds::default() }
    }
}

/// An item for peers, encoded once for all of its receivers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerItem {
    bytes: Bytes,
    /// True if a caller waits for the item to arrive, as an attach or a request does.
    is_waited_for: bool,
    /// The publishing connection, if the item is a publish.
    publisher: Option<ConnectionId>,
}

impl PeerItem {
    /// A publish of this node. Messages that came from a peer have another type, so they are not forwarded again.
    pub fn forward(published: &PublishedMessages, trace: Option<&TraceContext>) -> Self {
        let item = Self::of(v1::item::Kind::Forward(forward::traced(published, trace)));
        Self { publisher: Some(published.connection_id), ..item }
    }

    pub fn request(number: u64, request: &PeerRequest) -> Self {
        let kind = Some(match request {
            PeerRequest::Backfill { key, after, back_ms } => {
                let (channel, after, back_ms) = (Some(named(key)), after.to_whole(), *back_ms);
                v1::request::Kind::Backfill(v1::Backfill { channel, after, back_ms })
            }
            PeerRequest::CloseClient { account, client_id } => {
                let [account, client_id] = [account.as_str(), client_id.as_str()].map(str::to_owned);
                v1::request::Kind::CloseClient(v1::CloseClient { account, client_id })
            }
            PeerRequest::AcceptHandoff { key } => {
                v1::request::Kind::TakeOver(v1::TakeOver { channel: Some(named(key)) })
            }
            PeerRequest::Load => v1::request::Kind::Load(v1::Load {}),
            PeerRequest::FetchReplay { key, after } => {
                let after = after.as_ref().map(Serial::to_whole).unwrap_or_default();
                v1::request::Kind::FetchReplay(v1::FetchReplay { channel: Some(named(key)), after })
            }
            PeerRequest::Claim(nonce) => claims::write_claim(nonce),
            PeerRequest::NoncesAsked { after } => {
                let after = after.as_deref().map(Bytes::copy_from_slice).unwrap_or_default();
                v1::request::Kind::NoncesRequest(v1::NoncesRequest { after })
            }
            PeerRequest::NoncesGiven { nonces, last } => {
                let (nonces, last) = (claims::write_nonces(nonces), *last);
                v1::request::Kind::NoncesHandoff(v1::NoncesHandoff { nonces, last })
            }
            PeerRequest::QueuesChanged => v1::request::Kind::QueuesChanged(v1::QueuesChanged {}),
            PeerRequest::Revoke(revocations) => {
                let revocations = claims::write_revocations(revocations);
                v1::request::Kind::Revoke(v1::Revoke { revocations })
            }
            PeerRequest::ClaimIds(ids) => claims::write_claim_ids(ids),
            PeerRequest::Settle => v1::request::Kind::Settle(v1::Settle {}),
            PeerRequest::Deliver { key, stamp } => claims::write_deliver(named(key), *stamp),
            PeerRequest::Attached(keys) => {
                let channels = keys.iter().map(named).collect();
                v1::request::Kind::AttachedRequest(v1::AttachedRequest { channels })
            }
        });
        Self::of(v1::item::Kind::Request(v1::Request { number, kind }))
    }

    /// Answer to a backfill request. None if some of the messages are missing.
    pub fn backfill(number: u64, deliveries: Option<&[Arc<MessageDelivery>]>) -> Self {
        let forwards = deliveries.unwrap_or_default().iter().map(|delivery| forward::again(delivery));
        let refilled = v1::Backfilled { forwards: forwards.collect(), complete: deliveries.is_some() };
        let kind = Some(v1::answer::Kind::Backfilled(refilled));
        Self::of(v1::item::Kind::Answer(v1::Answer { number, kind }))
    }

    /// Answer to a handoff request. None if something is missing.
    pub fn replay_handoff(number: u64, handed: Option<&ReplayHandoff<Arc<MessageDelivery>>>) -> Self {
        let stamps = |serial: &Serial| {
            let stamp = |&(incarnation, sequence): &(u64, u64)| v1::Stamp { incarnation, sequence };
            serial.entries().iter().map(stamp).collect()
        };
        let handed = handed.map(|handed| v1::ReplayBuffer {
            begin: stamps(&handed.begin),
            end: stamps(&handed.end),
            forwards: handed.messages.iter().map(|(delivery, _)| forward::again(delivery)).collect(),
            ages_ms: handed.messages.iter().map(|(_, age_ms)| *age_ms).collect(),
            complete: true,
        });
        let kind = Some(v1::answer::Kind::ReplayBuffer(handed.unwrap_or_default()));
        Self::of(v1::item::Kind::Answer(v1::Answer { number, kind }))
    }

    /// Answer to any request but those for messages, which have [`PeerItem::backfill`] and [`PeerItem::replay_handoff`].
    pub fn answer(number: u64, answer: &PeerAnswer) -> Self {
        let kind = match answer {
            PeerAnswer::Closed(connections) => {
                v1::answer::Kind::Closed(v1::Closed { connections: *connections })
            }
            PeerAnswer::Loaded(connections) => {
                v1::answer::Kind::Loaded(v1::Loaded { connections: *connections })
            }
            PeerAnswer::HandoffAccepted(done) => v1::answer::Kind::TakenOver(v1::TakenOver { done: *done }),
            PeerAnswer::Backfill(_) | PeerAnswer::ReplayHandoff(_) | PeerAnswer::Unknown => {
                v1::answer::Kind::Unknown(v1::Unknown {})
            }
            PeerAnswer::Claimed(NonceClaimAnswer { first, counts, now_ms }) => {
                let (first, counts, now_ms) = (*first, *counts, *now_ms);
                v1::answer::Kind::Claimed(v1::Claimed { first, counts, now_ms })
            }
            PeerAnswer::Nonces(known) => v1::answer::Kind::Nonces(claims::write_known(known)),
            PeerAnswer::ClaimedIds(taken) => v1::answer::Kind::ClaimedIds(claims::write_taken(taken)),
            PeerAnswer::Attached(counts) => connections::write_attached(counts),
            PeerAnswer::Done => v1::answer::Kind::Done(v1::Done {}),
        };
        Self::of(v1::item::Kind::Answer(v1::Answer { number, kind: Some(kind) }))
    }

    /// Message ids that clients gave for these messages and that are now settled.
    pub fn ids_settled(published: &PublishedMessages) -> Self {
        let PublishedMessages { key, key_name, client_id, messages, .. } = published;
        let given = || messages.iter().filter(|message| message.id_given);
        let ids = claims::write_ids((key, key_name, client_id.as_ref()), given().map(|message| &*message.id));
        let sequences = given().map(|message| message.sequence).collect();
        Self::of(v1::item::Kind::IdsSettled(v1::IdsSettled { ids: Some(ids), sequences }))
    }

    pub fn takeover(taken: &SessionTakeover) -> Self {
        let SessionTakeover { ownership, previous } = taken;
        let wire = |location: &SessionLocation| {
            let SessionLocation { incarnation, shard, slot, generation } = *location;
            Some(v1::SessionLocation { incarnation, shard: shard.into(), slot, generation })
        };
        Self::of(v1::item::Kind::SessionTakeover(v1::SessionTakeover {
            connection_id: Bytes::copy_from_slice(ownership.connection_id.as_bytes()),
            epoch: ownership.epoch,
            location: wire(&ownership.location),
            previous: wire(previous),
        }))
    }

    pub fn socketless_takeover(not_open: &SocketlessTakeover) -> Self {
        let SocketlessTakeover { connection_id, epoch } = *not_open;
        let connection_id = Bytes::copy_from_slice(connection_id.as_bytes());
        Self::of(v1::item::Kind::NotOpen(v1::NotOpen { connection_id, epoch }))
    }

    /// Notice that a session of this incarnation is closed for good.
    pub fn session_closed(over: &ClosedSession) -> Self {
        let connection_id = Bytes::copy_from_slice(over.connection_id.as_bytes());
        let epoch = over.owner.epoch;
        Self::of(v1::item::Kind::SessionClosed(v1::SessionClosed { connection_id, epoch }))
    }

    /// Encodes a [`TenantCountMessage`].
    pub fn tenants(tenants: &TenantCountMessage) -> Self {
        Self::of(match tenants {
            TenantCountMessage::Connections { counts, begins, ends } => {
                let count = |(tenant, connections): &(Arc<str>, u64)| v1::tenant_connections::Count {
                    tenant: tenant.as_ref().to_owned(),
                    connections: *connections,
                };
                let (counts, begins, ends) = (counts.iter().map(count).collect(), *begins, *ends);
                v1::item::Kind::TenantConnections(v1::TenantConnections { counts, begins, ends })
            }
            TenantCountMessage::Asked => {
                v1::item::Kind::TenantConnectionsRequest(v1::TenantConnectionsRequest {})
            }
        })
    }

    /// Encodes an [`InterestMessage`].
    pub fn interest(interest: &InterestMessage) -> Self {
        Self::of(match interest {
            InterestMessage::Added { key, number, round, sequence } => {
                let (channel, number, round, sequence) = (Some(named(key)), *number, *round, *sequence);
                v1::item::Kind::Interest(v1::Interest { channel, number, interested: true, round, sequence })
            }
            InterestMessage::Removed { key } => {
                let channel = Some(named(key));
                v1::item::Kind::Interest(v1::Interest { channel, ..v1::Interest::default() })
            }
            InterestMessage::SnapshotEnd { epoch, streams } => {
                v1::item::Kind::InterestSnapshotEnd(v1::InterestSnapshotEnd {
                    epoch: *epoch,
                    streams: *streams,
                })
            }
            InterestMessage::SnapshotRequest => {
                v1::item::Kind::InterestSnapshotRequest(v1::InterestSnapshotRequest {})
            }
            InterestMessage::Forwarding { key, number, sequence, round, retired } => {
                let (channel, number, sequence, round) = (Some(named(key)), *number, *sequence, *round);
                let stamp = |&Stamp { incarnation, sequence }: &Stamp| v1::Stamp { incarnation, sequence };
                let retired = retired.iter().map(stamp).collect();
                v1::item::Kind::Joined(v1::Joined { channel, number, sequence, round, retired })
            }
            InterestMessage::Goodbye { streams, is_all } => {
                v1::item::Kind::Goodbye(v1::Goodbye { streams: *streams, not_all: !is_all })
            }
            InterestMessage::IncarnationsEnded { incarnations } => {
                let ended = |&EndedIncarnation { incarnation, ago_ms, has_left: left }: &EndedIncarnation| {
                    v1::EndedIncarnation { incarnation, ago_ms, left }
                };
                v1::item::Kind::IncarnationsEnded(v1::IncarnationsEnded {
                    incarnations: incarnations.iter().map(ended).collect(),
                })
            }
        })
    }

    #[cfg(test)]
    pub(super) fn encoded(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Size of the encoded item, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.len()
    }

    fn of(kind: v1::item::Kind) -> Self {
        use v1::item::Kind;
        let is_waited_for =
            matches!(kind, Kind::Interest(_) | Kind::Joined(_) | Kind::Request(_) | Kind::Answer(_));
        let item = v1::Item { kind: Some(kind) };
        let bytes = if minor() > MINOR { encode_item_of_next_minor(&item) } else { encode_item(&item) };
        Self { bytes, is_waited_for, publisher: None }
    }
}

/// Minor version of the protocol between nodes that this node speaks. A test build can be told to speak the next one, so that nodes of two
/// versions can be tested before there are two.
pub fn minor() -> u32 {
    static NEXT: OnceLock<bool> = OnceLock::new();
    let speaks_next = || cfg!(debug_assertions) && std::env::var_os(NEXT_MINOR).is_some();
    MINOR + u32::from(*NEXT.get_or_init(speaks_next))
}

/// The links of one node. Dropping them ends all links.
pub struct GrpcPeerLinks {
    common: Arc<LinkContext>,
    settings: LinkSettings,
    links: RwLock<HashMap<u64, Arc<PeerLink>>>,
    /// Locked while members change, so that two changes do not interleave.
    changing: Mutex<()>,
    _end: tokio_util::sync::DropGuard,
}

/// Context that all streams share.
struct LinkContext {
    own: Peer,
    tls: PeerTls,
    inbound: Arc<dyn Inbound>,
    tasks: Arc<Tasks>,
    end: CancellationToken,
}

impl GrpcPeerLinks {
    pub fn new(
        own: Peer,
        tls: PeerTls,
        inbound: Arc<dyn Inbound>,
        tasks: Arc<Tasks>,
        settings: LinkSettings,
    ) -> Self {
        let end = CancellationToken::new();
        let settings = LinkSettings { streams: settings.streams.clamp(1, STREAMS_MAX), ..settings };
        Self {
            common: Arc::new(LinkContext { own, tls, inbound, tasks, end: end.clone() }),
            settings,
            links: RwLock::default(),
            changing: Mutex::default(),
            _end: end.drop_guard(),
        }
    }

    /// Accepts peers on this listener.
    pub fn listen(&self, listener: TcpListener) {
        if let Err(error) = socket2::SockRef::from(&listener).listen(BACKLOG) {
            tracing::warn!(%error, "peer listener backlog not set");
        }
        let listening = accept::listen(listener, Arc::clone(&self.common));
        self.spawn("peer listener", self.common.end.clone(), listening);
    }

    fn link(&self, peer: Peer, addr: SocketAddr) -> Arc<PeerLink> {
        let queues =
            (0..self.settings.streams).map(|_| Arc::new(PeerQueue::new(self.settings.queue))).collect();
        let end = self.common.end.child_token();
        Arc::new(PeerLink {
            peer,
            addr: Mutex::new(addr),
            queues,
            open: AtomicUsize::new(0),
            reporting: Mutex::new(()),
            is_left: AtomicBool::new(false),
            end,
        })
    }

    fn keep(&self, link: &Arc<PeerLink>) {
        for stream in 0..self.settings.streams {
            let kept = dial::keep_open(Arc::clone(link), stream, Arc::clone(&self.common));
            self.spawn("peer stream", link.end.clone(), kept);
        }
    }

    fn spawn(
        &self,
        name: &'static str,
        end: CancellationToken,
        task: impl Future<Output = ()> + Send + 'static,
    ) {
        self.common.tasks.spawn(name, OnStop::Cancel, async move {
            end.run_until_cancelled(task).await;
        });
    }
}

impl PeerLinks for GrpcPeerLinks {
    fn set_peers(&self, peers: Vec<PeerAddr>) {
        let _changing = self.changing.lock();
        let before = self.links.read().clone();
        let mut after = HashMap::with_capacity(peers.len());
        for PeerAddr { peer, addr } in peers {
            let incarnation = peer.incarnation;
            if incarnation == self.common.own.incarnation {
                continue;
            }
            let link = match before.get(&incarnation) {
                Some(link) => {
                    *link.addr.lock() = addr;
                    Arc::clone(link)
                }
                None => self.link(peer, addr),
            };
            after.insert(incarnation, link);
        }
        let left: Vec<_> = before.iter().filter(|(key, _)| !after.contains_key(key)).collect();
        left.iter().for_each(|(_, link)| link.leave());
        let new = after.iter().filter(|(key, _)| !before.contains_key(key));
        let new: Vec<_> = new.map(|(_, link)| Arc::clone(link)).collect();
        *self.links.write() = after;
        // The link must be registered before it reports an open stream.
        new.iter().for_each(|link| self.keep(link));
    }

    fn stream_count(&self) -> usize {
        self.settings.streams
    }

    fn send(&self, to_incarnation: u64, channel_hash: u64, item: &PeerItem) -> PeerAck {
        let links = self.links.read();
        let Some(link) = links.get(&to_incarnation) else { return PeerAck::lost() };
        let stream = (channel_hash % link.queues.len() as u64) as usize;
        let ack = link.queues[stream].push(item.bytes.clone(), item.publisher);
        if item.is_waited_for {
            link.queues[stream].hurry();
        }
        ack
    }

    fn is_up(&self, incarnation: u64) -> bool {
        self.links.read().get(&incarnation).is_some_and(|link| link.is_up())
    }

    fn lags(&self) -> Vec<PeerLag> {
        self.links.read().values().map(|link| link.lag()).collect()
    }
}
