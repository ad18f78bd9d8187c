//! Links: each node opens a few lanes to each other node and sends over them what that node is to have.
//!
//! A lane is one gRPC stream on a connection of its own. What concerns one channel is always on the same lane, so it
//! comes in order. A batch is kept until it is confirmed and sent again when the lane is back; the receiver drops what
//! it has, so an item comes once as long as both processes live, or its loss is told.

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
use fanfare_proto::peer::{LANES_MAX, MINOR, encode_item, encode_item_of_next_minor, v1};
use fanfare_proto::serial::Serial;
use fanfare_proto::trace::TraceContext;
use parking_lot::{Mutex, RwLock};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

#[cfg(test)]
pub(super) use accept::{Ending, Lanes, OpenLane};
pub use carrier::{PeerLag, PeerLinks};
pub use certificates::{PeerFile, PeerFiles, PeerTls, PeerTlsError, SERVER_NAME};
#[cfg(test)]
pub(super) use queue::Pull;
pub(super) use queue::Queue;
pub use queue::{Lost, QueueBounds, Receipt};

use super::inbound::once::{self, Claimed};
use super::inbound::{Answer, EndedRun, Inbound, Interest, Peer, Request, Tenants, connections};
use crate::hub::{Delivery, HandedOver};
use crate::model::{ConnectionId, NotOpen, Over, Place, Published, Stamp, TakenUp};
use crate::tasks::{OnStop, Tasks};
use dial::Link;
use forward::named;

pub const LANES_DEFAULT: usize = 1;

/// Why a lane is refused where a node was started anew.
const ANOTHER_RUN: &str = "this is another run of the node";
/// The variable that tells a build for tests to speak the next minor.
const NEXT_MINOR: &str = "PEER_PROTOCOL_NEXT_MINOR";
/// Connections that the kernel completes while this node is busy, those of strangers among them.
const BACKLOG: i32 = 4096;
/// For connection, handshake and hello together.
const CONNECT: Duration = Duration::from_secs(1);
const RETRY: Duration = Duration::from_millis(500);
const PING: Duration = Duration::from_millis(500);
/// The same while another lane of the link is not up yet.
const PING_UNTIL_UP: Duration = Duration::from_millis(50);
/// A lane over which nothing comes for so long is cut, by either side.
const SILENCE: Duration = Duration::from_millis(1500);
/// A longer frame is refused before there is room made for it.
const FRAME_BYTES_MAX: usize = 16 * 1024 * 1024;

/// A member of the cluster, and where its peer listener is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerAddr {
    pub peer: Peer,
    pub addr: SocketAddr,
}

/// How a node links to others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LinkSettings {
    /// Lanes to each peer, 1 to 8.
    pub lanes: usize,
    pub queue: QueueBounds,
}

impl Default for LinkSettings {
    fn default() -> Self {
        Self { lanes: LANES_DEFAULT, queue: QueueBounds::default() }
    }
}

/// What is said to peers, encoded once for all that are to have it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Item {
    bytes: Bytes,
    /// Somebody cannot go on before it has come: who attaches, or asks, or is asked.
    is_waited_for: bool,
    /// Of a publish.
    publisher: Option<ConnectionId>,
}

impl Item {
    /// One publish that entered here. What came from a peer is no `Published`, so it is not forwarded again.
    pub fn forward(published: &Published, trace: Option<&TraceContext>) -> Self {
        let item = Self::of(v1::item::Kind::Forward(forward::traced(published, trace)));
        Self { publisher: Some(published.connection_id), ..item }
    }

    pub fn request(number: u64, request: &Request) -> Self {
        let kind = Some(match request {
            Request::Refill { key, after, back_ms } => {
                let (channel, after, back_ms) = (Some(named(key)), after.to_whole(), *back_ms);
                v1::request::Kind::Refill(v1::Refill { channel, after, back_ms })
            }
            Request::CloseClient { account, client_id } => {
                let [account, client_id] = [account.as_str(), client_id.as_str()].map(str::to_owned);
                v1::request::Kind::CloseClient(v1::CloseClient { account, client_id })
            }
            Request::TakeOver { key } => {
                v1::request::Kind::TakeOver(v1::TakeOver { channel: Some(named(key)) })
            }
            Request::Load => v1::request::Kind::Load(v1::Load {}),
            Request::HandOver { key, after } => {
                let after = after.as_ref().map(Serial::to_whole).unwrap_or_default();
                v1::request::Kind::HandOver(v1::HandOver { channel: Some(named(key)), after })
            }
            Request::Claim(nonce) => once::write_claim(nonce),
            Request::NoncesAsked { after } => {
                let after = after.as_deref().map(Bytes::copy_from_slice).unwrap_or_default();
                v1::request::Kind::NoncesAsked(v1::NoncesAsked { after })
            }
            Request::NoncesGiven { nonces, last } => {
                let (nonces, last) = (once::write_nonces(nonces), *last);
                v1::request::Kind::NoncesGiven(v1::NoncesGiven { nonces, last })
            }
            Request::QueuesChanged => v1::request::Kind::QueuesChanged(v1::QueuesChanged {}),
            Request::Revoke(revocations) => {
                let revocations = once::write_revocations(revocations);
                v1::request::Kind::Revoke(v1::Revoke { revocations })
            }
            Request::ClaimIds(ids) => once::write_claim_ids(ids),
            Request::Settle => v1::request::Kind::Settle(v1::Settle {}),
            Request::Deliver { key, stamp } => once::write_deliver(named(key), *stamp),
            Request::Attached(keys) => {
                let channels = keys.iter().map(named).collect();
                v1::request::Kind::AttachedAsked(v1::AttachedAsked { channels })
            }
        });
        Self::of(v1::item::Kind::Request(v1::Request { number, kind }))
    }

    /// None where not all of it is there.
    pub fn refilled(number: u64, deliveries: Option<&[Arc<Delivery>]>) -> Self {
        let forwards = deliveries.unwrap_or_default().iter().map(|delivery| forward::again(delivery));
        let refilled = v1::Refilled { forwards: forwards.collect(), complete: deliveries.is_some() };
        let kind = Some(v1::answer::Kind::Refilled(refilled));
        Self::of(v1::item::Kind::Answer(v1::Answer { number, kind }))
    }

    /// None where something is missing.
    pub fn handed_over(number: u64, handed: Option<&HandedOver<Arc<Delivery>>>) -> Self {
        let stamps = |serial: &Serial| {
            let stamp = |&(incarnation, sequence): &(u64, u64)| v1::Stamp { incarnation, sequence };
            serial.entries().iter().map(stamp).collect()
        };
        let handed = handed.map(|handed| v1::HandedOver {
            begin: stamps(&handed.begin),
            end: stamps(&handed.end),
            forwards: handed.messages.iter().map(|(delivery, _)| forward::again(delivery)).collect(),
            ages_ms: handed.messages.iter().map(|(_, age_ms)| *age_ms).collect(),
            complete: true,
        });
        let kind = Some(v1::answer::Kind::HandedOver(handed.unwrap_or_default()));
        Self::of(v1::item::Kind::Answer(v1::Answer { number, kind }))
    }

    /// Of any request but those for messages, for which there are [`Item::refilled`] and [`Item::handed_over`].
    pub fn answer(number: u64, answer: &Answer) -> Self {
        let kind = match answer {
            Answer::Closed(connections) => v1::answer::Kind::Closed(v1::Closed { connections: *connections }),
            Answer::Loaded(connections) => v1::answer::Kind::Loaded(v1::Loaded { connections: *connections }),
            Answer::TakenOver(done) => v1::answer::Kind::TakenOver(v1::TakenOver { done: *done }),
            Answer::Refilled(_) | Answer::HandedOver(_) | Answer::Unknown => {
                v1::answer::Kind::Unknown(v1::Unknown {})
            }
            Answer::Claimed(Claimed { first, counts, now_ms }) => {
                let (first, counts, now_ms) = (*first, *counts, *now_ms);
                v1::answer::Kind::Claimed(v1::Claimed { first, counts, now_ms })
            }
            Answer::Nonces(known) => v1::answer::Kind::Nonces(once::write_known(known)),
            Answer::ClaimedIds(taken) => v1::answer::Kind::ClaimedIds(once::write_taken(taken)),
            Answer::Attached(counts) => connections::write_attached(counts),
            Answer::Done => v1::answer::Kind::Done(v1::Done {}),
        };
        Self::of(v1::item::Kind::Answer(v1::Answer { number, kind: Some(kind) }))
    }

    /// The ids that clients gave for these messages.
    pub fn ids_settled(published: &Published) -> Self {
        let Published { key, key_name, client_id, messages, .. } = published;
        let given = || messages.iter().filter(|message| message.id_given);
        let ids = once::write_ids((key, key_name, client_id.as_ref()), given().map(|message| &*message.id));
        let sequences = given().map(|message| message.sequence).collect();
        Self::of(v1::item::Kind::IdsSettled(v1::IdsSettled { ids: Some(ids), sequences }))
    }

    pub fn taken_up(taken: &TakenUp) -> Self {
        let TakenUp { tenure, former } = taken;
        let place = |place: &Place| {
            let Place { incarnation, shard, slot, generation } = *place;
            Some(v1::Place { incarnation, shard: shard.into(), slot, generation })
        };
        Self::of(v1::item::Kind::TakenUp(v1::TakenUp {
            connection_id: Bytes::copy_from_slice(tenure.connection_id.as_bytes()),
            epoch: tenure.epoch,
            place: place(&tenure.place),
            former: place(former),
        }))
    }

    pub fn not_open(not_open: &NotOpen) -> Self {
        let NotOpen { connection_id, epoch } = *not_open;
        let connection_id = Bytes::copy_from_slice(connection_id.as_bytes());
        Self::of(v1::item::Kind::NotOpen(v1::NotOpen { connection_id, epoch }))
    }

    /// Of a connection of this run.
    pub fn over(over: &Over) -> Self {
        let connection_id = Bytes::copy_from_slice(over.connection_id.as_bytes());
        let epoch = over.owner.epoch;
        Self::of(v1::item::Kind::ConnectionOver(v1::ConnectionOver { connection_id, epoch }))
    }

    /// As [`Tenants`] has it.
    pub fn tenants(tenants: &Tenants) -> Self {
        Self::of(match tenants {
            Tenants::Connections { counts, begins, ends } => {
                let count = |(tenant, connections): &(Arc<str>, u64)| v1::tenant_connections::Count {
                    tenant: tenant.as_ref().to_owned(),
                    connections: *connections,
                };
                let (counts, begins, ends) = (counts.iter().map(count).collect(), *begins, *ends);
                v1::item::Kind::TenantConnections(v1::TenantConnections { counts, begins, ends })
            }
            Tenants::Asked => v1::item::Kind::TenantConnectionsAsked(v1::TenantConnectionsAsked {}),
        })
    }

    /// As [`Interest`] has it.
    pub fn interest(interest: &Interest) -> Self {
        Self::of(match interest {
            Interest::Wanted { key, number, round, sequence } => {
                let (channel, number, round, sequence) = (Some(named(key)), *number, *round, *sequence);
                v1::item::Kind::Interest(v1::Interest { channel, number, wanted: true, round, sequence })
            }
            Interest::NotWanted { key } => {
                let channel = Some(named(key));
                v1::item::Kind::Interest(v1::Interest { channel, ..v1::Interest::default() })
            }
            Interest::Said { epoch, lanes } => {
                v1::item::Kind::InterestSaid(v1::InterestSaid { epoch: *epoch, lanes: *lanes })
            }
            Interest::Asked => v1::item::Kind::InterestAsked(v1::InterestAsked {}),
            Interest::Joined { key, number, sequence, round, gone } => {
                let (channel, number, sequence, round) = (Some(named(key)), *number, *sequence, *round);
                let stamp = |&Stamp { incarnation, sequence }: &Stamp| v1::Stamp { incarnation, sequence };
                let gone = gone.iter().map(stamp).collect();
                v1::item::Kind::Joined(v1::Joined { channel, number, sequence, round, gone })
            }
            Interest::Left { lanes, is_all } => {
                v1::item::Kind::Goodbye(v1::Goodbye { lanes: *lanes, not_all: !is_all })
            }
            Interest::Ended { runs } => {
                let run = |&EndedRun { incarnation, ago_ms, has_left: left }: &EndedRun| v1::EndedRun {
                    incarnation,
                    ago_ms,
                    left,
                };
                v1::item::Kind::RunsEnded(v1::RunsEnded { runs: runs.iter().map(run).collect() })
            }
        })
    }

    #[cfg(test)]
    pub(super) fn encoded(&self) -> Bytes {
        self.bytes.clone()
    }

    /// What it takes on its way.
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

/// Of the protocol between nodes, as this node speaks it. A build for tests can be told to speak the one that comes after its own,
/// so that nodes of two versions meet before there are two.
pub fn minor() -> u32 {
    static NEXT: OnceLock<bool> = OnceLock::new();
    let told = || cfg!(debug_assertions) && std::env::var_os(NEXT_MINOR).is_some();
    MINOR + u32::from(*NEXT.get_or_init(told))
}

/// The links of one node. Dropping it ends them.
pub struct Links {
    common: Arc<Common>,
    settings: LinkSettings,
    links: RwLock<HashMap<u64, Arc<Link>>>,
    /// Held while members change, so that two changes do not mix.
    changing: Mutex<()>,
    _end: tokio_util::sync::DropGuard,
}

/// What all lanes need.
struct Common {
    own: Peer,
    tls: PeerTls,
    inbound: Arc<dyn Inbound>,
    tasks: Arc<Tasks>,
    end: CancellationToken,
}

impl Links {
    pub fn new(
        own: Peer,
        tls: PeerTls,
        inbound: Arc<dyn Inbound>,
        tasks: Arc<Tasks>,
        settings: LinkSettings,
    ) -> Self {
        let end = CancellationToken::new();
        let settings = LinkSettings { lanes: settings.lanes.clamp(1, LANES_MAX), ..settings };
        Self {
            common: Arc::new(Common { own, tls, inbound, tasks, end: end.clone() }),
            settings,
            links: RwLock::default(),
            changing: Mutex::default(),
            _end: end.drop_guard(),
        }
    }

    /// Takes what peers send to this listener.
    pub fn listen(&self, listener: TcpListener) {
        if let Err(error) = socket2::SockRef::from(&listener).listen(BACKLOG) {
            tracing::warn!(%error, "the peer listener has a short backlog");
        }
        let listening = accept::listen(listener, Arc::clone(&self.common));
        self.spawn("peer listener", self.common.end.clone(), listening);
    }

    fn link(&self, peer: Peer, addr: SocketAddr) -> Arc<Link> {
        let lanes = (0..self.settings.lanes).map(|_| Arc::new(Queue::new(self.settings.queue))).collect();
        let end = self.common.end.child_token();
        Arc::new(Link {
            peer,
            addr: Mutex::new(addr),
            lanes,
            open: AtomicUsize::new(0),
            reporting: Mutex::new(()),
            is_left: AtomicBool::new(false),
            end,
        })
    }

    fn keep(&self, link: &Arc<Link>) {
        for lane in 0..self.settings.lanes {
            let kept = dial::keep(Arc::clone(link), lane, Arc::clone(&self.common));
            self.spawn("peer lane", link.end.clone(), kept);
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

impl PeerLinks for Links {
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
        // What is said when a lane is open finds the link.
        new.iter().for_each(|link| self.keep(link));
    }

    fn lanes(&self) -> usize {
        self.settings.lanes
    }

    fn send(&self, to_incarnation: u64, channel_hash: u64, item: &Item) -> Receipt {
        let links = self.links.read();
        let Some(link) = links.get(&to_incarnation) else { return Receipt::lost() };
        let lane = (channel_hash % link.lanes.len() as u64) as usize;
        let receipt = link.lanes[lane].push(item.bytes.clone(), item.publisher);
        if item.is_waited_for {
            link.lanes[lane].hurry();
        }
        receipt
    }

    fn is_up(&self, incarnation: u64) -> bool {
        self.links.read().get(&incarnation).is_some_and(|link| link.is_up())
    }

    fn lags(&self) -> Vec<PeerLag> {
        self.links.read().values().map(|link| link.lag()).collect()
    }
}
