//! Routing between nodes: tells peers the interest of this node, and forwards each publish to the peers with subscribers of its channel.

mod attach_barrier;
mod backfill;
#[cfg(test)]
mod fixture;
mod handoff;
mod ids;
mod inbound;
mod incarnations;
mod interest_snapshot;
mod lag;
mod leaving;
mod node_failures;
mod nonces;
mod occupancy;
mod orphaned_members;
mod peer_acks;
mod peer_interest;
mod presence;
mod queues_changed;
mod quorum;
mod recent_takeovers;
mod repeats;
mod requests;
mod retirement;
mod revocations;
mod store_backfill;
mod tenants;
mod unreachable_peers;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

use dashmap::DashMap;
use fanfare_proto::serial::Serial;
use fanfare_proto::trace::TraceContext;
pub use ids::{ClaimedIds, IdClaimCallback, IdClaimError};
pub use incarnations::PeerSessionHandler;
pub use node_failures::GossipStatus;
use parking_lot::{Mutex, RwLock};
pub use peer_interest::PeerStatus;
pub use quorum::KeptNodes;
pub use requests::{LocalNode, NodeFuture};
pub use store_backfill::StoreBackfillQuery;
pub use tenants::LocalTenantCounts;
use tokio::time::Instant;

use backfill::{BACKFILLS_MAX, BACKFILLS_WAITING_MAX, SettleRound};
use ids::ClusterIdClaims;
use incarnations::{KnownIncarnations, QUOTA_CHECKS_MAX};
use interest_snapshot::InterestSnapshot;
use lag::ReportedLags;
use leaving::LeavingNodes;
use node_failures::NodeFailures;
use nonces::{NonceClaims, PeerClocks};
use orphaned_members::OrphanedIncarnations;
use peer_acks::AckDeadlines;
use peer_interest::PeerInterest;
use presence::PeerPresenceSync;
use quorum::NonceQuorum;
use recent_takeovers::RecentTakeovers;
use requests::{EarlyAnswers, LOCAL_MAX, PendingPeerRequest};
use retirement::RetirementCandidates;
use tenants::TenantCountSync;
use tokio::sync::{Notify, Semaphore};
use unreachable_peers::UnreachablePeers;

use super::inbound::InterestMessage;
use super::link::{PeerAck, PeerAddr, PeerItem, PeerLinks};
use crate::hub::{self, AnnounceResult, Hub};
use crate::model::{ChannelKey, PublishedMessages};
use crate::tasks::{OnStop, SingleFlight, Tasks};
use crate::telemetry::TraceSpan;
use crate::telemetry::traces::TraceSpanKind;

/// Longest time for which an attach waits for a peer's answer.
const JOIN_WAIT: Duration = Duration::from_secs(2);
/// Interval of the check for peers that keep attaches waiting.
const JOIN_LOOK: Duration = Duration::from_millis(100);

/// Interest of this node and of its peers, with the state of each peer. The lock of a hub channel is taken before any lock of this
/// struct.
pub struct Routing {
    this: Weak<Self>,
    hub: Arc<Hub>,
    links: OnceLock<Box<dyn PeerLinks>>,
    tasks: Arc<Tasks>,
    /// Channels with subscribers at this node, by channel number.
    local_interest: Mutex<BTreeMap<u64, LocalInterest>>,
    /// The members, by incarnation.
    peers: RwLock<HashMap<u64, PeerInterest>>,
    /// Incarnations that sent interest before this node knew them as members.
    early: Mutex<HashSet<u64>>,
    /// Incarnations of the members that are alive.
    expected: Mutex<Vec<u64>>,
    incarnations: Mutex<KnownIncarnations>,
    node_failures: Mutex<NodeFailures>,
    unreachable: Mutex<UnreachablePeers>,
    retirement: Mutex<RetirementCandidates>,
    /// Peers that are alive and unreachable, and since when.
    unreachable_since: Mutex<HashMap<u64, Instant>>,
    /// Notified when the set of alive or reachable peers changes.
    reach_changed: Notify,
    session_handler: OnceLock<Arc<dyn PeerSessionHandler>>,
    recent_takeovers: Mutex<RecentTakeovers>,
    quota_checks: Arc<Semaphore>,
    presence: PeerPresenceSync,
    orphaned: Mutex<OrphanedIncarnations>,
    /// Incarnations of the peers with subscribers, by channel.
    interested_peers: DashMap<ChannelKey, Vec<u64>>,
    /// Interest snapshots in progress, by the peer's incarnation.
    interest_snapshots: Mutex<HashMap<u64, Arc<InterestSnapshot>>>,
    /// Peers that are due another interest snapshot once none is in progress.
    snapshots_due: Mutex<HashSet<u64>>,
    epoch: AtomicU64,
    /// Last number that was given to a request, a settle round or a snapshot.
    last_number: AtomicU64,
    pending_requests: Mutex<HashMap<u64, PendingPeerRequest>>,
    early_answers: Mutex<EarlyAnswers>,
    /// Permits for the backfill requests that are answered at a time, and for those that wait.
    backfills: Semaphore,
    backfills_waiting: Arc<Semaphore>,
    local: OnceLock<Arc<dyn LocalNode>>,
    /// Permits for the other requests of peers that are answered at a time.
    local_waiting: Arc<Semaphore>,
    counting: TenantCountSync,
    leaving: LeavingNodes,
    acks: Mutex<AckDeadlines>,
    quorum: Mutex<NonceQuorum>,
    clocks: Mutex<PeerClocks>,
    /// Recent nonce claims. Read-locked while a nonce is claimed here, write-locked while nonces are exchanged with a peer.
    nonce_claims: tokio::sync::RwLock<Mutex<NonceClaims>>,
    ids: ClusterIdClaims,
    /// Single flight of the settle request to all peers; true if all have settled.
    settling: SingleFlight<bool>,
    reported_lags: Mutex<ReportedLags>,
    /// Number of reachable peers whose interest is known.
    known: metrics::Gauge,
    sent: metrics::Counter,
    taken: metrics::Counter,
}

/// A channel with subscribers at this node, with the state of its attach barrier.
struct LocalInterest {
    key: ChannelKey,
    since: Instant,
    /// Peers whose confirmation the attach barrier waits for.
    waits: Vec<u64>,
    /// True once an awaited peer became unreachable before it confirmed.
    is_passed: bool,
    /// Time at which the attach barrier opened.
    let_in: Option<Instant>,
    /// Peers that have confirmed that they forward the channel.
    confirmed: Vec<u64>,
    rounds: Vec<SettleRound>,
    /// Last sequences of retired incarnations, as reported by peers.
    retired: Serial,
}

impl Routing {
    /// Creates the routing of a node; `kept` was stored last with [`LocalNode::keep_nodes`].
    pub fn new(hub: &Arc<Hub>, node_id: &Arc<str>, kept: KeptNodes, tasks: &Arc<Tasks>) -> Arc<Self> {
        let routing = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            hub: Arc::clone(hub),
            links: OnceLock::new(),
            tasks: Arc::clone(tasks),
            local_interest: Mutex::default(),
            peers: RwLock::default(),
            early: Mutex::default(),
            expected: Mutex::default(),
            incarnations: Mutex::default(),
            node_failures: Mutex::default(),
            unreachable: Mutex::default(),
            retirement: Mutex::default(),
            unreachable_since: Mutex::default(),
            reach_changed: Notify::new(),
            session_handler: OnceLock::new(),
            recent_takeovers: Mutex::default(),
            quota_checks: Arc::new(Semaphore::new(QUOTA_CHECKS_MAX)),
            presence: PeerPresenceSync::new(),
            orphaned: Mutex::default(),
            interested_peers: DashMap::new(),
            interest_snapshots: Mutex::default(),
            snapshots_due: Mutex::default(),
            epoch: AtomicU64::new(0),
            last_number: AtomicU64::new(0),
            pending_requests: Mutex::default(),
            early_answers: Mutex::default(),
            backfills: Semaphore::new(BACKFILLS_MAX),
            backfills_waiting: Arc::new(Semaphore::new(BACKFILLS_WAITING_MAX)),
            local: OnceLock::new(),
            local_waiting: Arc::new(Semaphore::new(LOCAL_MAX)),
            counting: TenantCountSync::default(),
            leaving: LeavingNodes::default(),
            acks: Mutex::default(),
            quorum: Mutex::new(NonceQuorum::new(node_id, kept, Instant::now())),
            clocks: Mutex::default(),
            nonce_claims: tokio::sync::RwLock::default(),
            ids: ClusterIdClaims::default(),
            settling: SingleFlight::default(),
            reported_lags: Mutex::default(),
            known: metrics::gauge!("fanfare_peers_known"),
            sent: metrics::counter!("fanfare_forwards_sent_total"),
            taken: metrics::counter!("fanfare_forwards_taken_total"),
        });
        let forgetting = Arc::clone(&routing);
        tasks.spawn("retirement", OnStop::Cancel, async move { forgetting.retire_absent_in_time().await });
        tasks.spawn("peer acks", OnStop::Cancel, Arc::clone(&routing).expire_peer_acks());
        let looking = Arc::clone(&routing);
        tasks.spawn("attach barrier", OnStop::Cancel, async move {
            loop {
                tokio::time::sleep(JOIN_LOOK).await;
                looking.expire_attach_barriers();
                looking.announce_skipped_sequences();
                looking.has_recently_unreachable();
            }
        });
        routing
    }

    /// Sets the links and starts the periodic tasks. Called once, before there are peers.
    pub fn begin(self: &Arc<Self>, links: impl PeerLinks) {
        self.set_links(links);
        self.tasks.spawn("presence", OnStop::Cancel, Arc::clone(self).compare_presence());
        let looking = Arc::clone(self);
        self.tasks.spawn("unreachable peers", OnStop::Cancel, async move {
            loop {
                tokio::time::sleep(JOIN_LOOK).await;
                looking.mark_unreachable_in_doubt(Instant::now());
            }
        });
    }

    /// Sets the links without the periodic tasks: the caller runs [`Routing::compare_members`] and [`Routing::mark_unreachable_in_doubt`]
    /// itself.
    pub(super) fn set_links(self: &Arc<Self>, links: impl PeerLinks) {
        self.links.set(Box::new(links)).ok();
        self.hub.set_interest(Arc::clone(self) as Arc<dyn hub::InterestAnnouncer>);
    }

    /// True if the interest and the presence members of every alive member are known here.
    pub fn is_complete(&self) -> bool {
        let (peers, expected) = (self.peers.read(), self.expected.lock());
        let is_known = |peer: &u64| peers.get(peer).is_some_and(|wants| wants.is_known) && self.is_up(*peer);
        expected.iter().all(|peer| is_known(peer) && self.presence.is_known(*peer))
    }

    /// Number of members that are alive and have not said goodbye.
    pub fn expected(&self) -> usize {
        self.expected.lock().len()
    }

    /// Sets the current members, without this node; `expected` holds the incarnations of those that are alive.
    pub fn set_peers(&self, members: Vec<PeerAddr>, expected: Vec<u64>) {
        let _changing = self.leaving.changing.lock();
        self.leaving.set_members(members, expected);
        self.apply_members();
    }

    /// Applies the members that were set last. The caller holds the `changing` lock.
    fn apply_members(&self) {
        let Some(links) = self.links.get() else { return };
        let (members, expected) = self.leaving.without_left();
        let ended = self.incarnations.lock().set_alive(&expected, Instant::now());
        let are_members_known = ended.iter().all(|incarnation| self.presence.is_known(*incarnation));
        let id_of = |incarnation: u64| members.iter().find(|member| member.peer.incarnation == incarnation);
        let alive =
            expected.iter().filter_map(|alive| Some((*alive, Arc::clone(&id_of(*alive)?.peer.node_id))));
        self.quorum.lock().see(alive.collect(), Instant::now());
        *self.expected.lock() = expected;
        self.reach_changed.notify_waiters();
        let mut peers = self.peers.write();
        let before = peers.len();
        peers.retain(|peer, _| members.iter().any(|member| member.peer.incarnation == *peer));
        let has_left = peers.len() < before;
        for member in &members {
            let peer = member.peer.incarnation;
            peers.entry(peer).or_insert_with(|| PeerInterest::begin(self.early.lock().remove(&peer)));
        }
        self.presence.retain(&peers.keys().copied().collect());
        drop(peers);
        links.set_peers(members);
        self.send_early_answers();
        self.count_known();
        if !are_members_known {
            self.ask_all_for_members();
        }
        if has_left {
            let peers = self.peers.read();
            self.interested_peers.retain(|_, wanting| {
                wanting.retain(|peer| peers.contains_key(peer));
                !wanting.is_empty()
            });
        }
    }

    /// Sends a publish to every peer with subscribers of its channel, in the order of the calls. The caller holds the lock of the
    /// channel. Returns the acks of the reachable peers, and the span of the forward, which lasts until they have confirmed it.
    pub fn forward(
        &self,
        published: &PublishedMessages,
        trace: Option<&TraceContext>,
    ) -> (Vec<PeerAck>, TraceSpan) {
        let to = self.peers_interested_in(&published.key);
        let Some(links) = self.links.get().filter(|_| !to.is_empty()) else { return Default::default() };
        let mut span = TraceSpan::within(trace, "forward", TraceSpanKind::Producer);
        if span.is_recorded() {
            span.concerns(published.key.channel(), published.messages.len());
            span.set("fanfare.peers", || (to.len() as i64).into());
        }
        let (item, hash) = (PeerItem::forward(published, span.context().as_deref()), hash_of(&published.key));
        self.sent.increment(to.len() as u64);
        let send = |peer: &u64| (links.is_up(*peer), links.send(*peer, hash, &item));
        (to.iter().map(send).filter(|(is_up, _)| *is_up).map(|(_, ack)| ack).collect(), span)
    }

    fn peers_interested_in(&self, key: &ChannelKey) -> Vec<u64> {
        let mut wanting = self.interested_peers.get(key).map_or_else(Vec::new, |wanting| wanting.clone());
        for (peer, wants) in &*self.peers.read() {
            if !wants.is_known && !wanting.contains(peer) && self.is_up(*peer) {
                wanting.push(*peer);
            }
        }
        wanting
    }

    fn is_up(&self, peer: u64) -> bool {
        self.links.get().is_some_and(|links| links.is_up(peer))
    }

    fn count_known(&self) {
        let known = |(peer, wants): &(&u64, &PeerInterest)| wants.is_known && self.is_up(**peer);
        self.known.set(self.peers.read().iter().filter(known).count() as f64);
    }

    /// Sends an interest message. False if the peer has no link; otherwise only the peer's answer shows that the message arrived.
    fn send(&self, to: u64, hash: u64, interest: &InterestMessage) -> bool {
        let Some(links) = self.links.get() else { return false };
        !links.send(to, hash, &PeerItem::interest(interest)).is_lost()
    }
}

impl hub::InterestAnnouncer for Routing {
    fn announce(&self, key: &ChannelKey, number: u64, sequence: u64) -> AnnounceResult {
        let mut own = self.local_interest.lock();
        let peers = self.linked();
        let mut waits = peers.clone();
        waits.extend(self.ending());
        let is_done = waits.is_empty();
        let (key_of, since, retired) = (key.clone(), Instant::now(), Serial::default());
        let (let_in, confirmed, rounds) = (is_done.then_some(since), Vec::new(), Vec::new());
        let joining =
            LocalInterest { key: key_of, since, waits, is_passed: false, let_in, confirmed, rounds, retired };
        own.insert(number, joining);
        // Sent under the lock: a snapshot that is made meanwhile could miss this channel.
        for peer in peers {
            let added = InterestMessage::Added { key: key.clone(), number, round: 0, sequence };
            self.send(peer, hash_of(key), &added);
        }
        let unreachable =
            self.unreachable.lock().unreachable().filter(|incarnation| !self.is_up(*incarnation)).collect();
        AnnounceResult { is_done, unreachable }
    }

    fn withdraw(&self, key: &ChannelKey, number: u64) {
        let mut own = self.local_interest.lock();
        own.remove(&number);
        for peer in self.peers.read().keys() {
            self.send(*peer, hash_of(key), &InterestMessage::Removed { key: key.clone() });
        }
    }

    fn has_recent_loss(&self) -> bool {
        let lately = self.hub.retention();
        let alive = self.expected.lock().clone();
        let has_lost = {
            let node_failures = self.node_failures.lock();
            node_failures.has_lost(lately) || node_failures.has_unmet_member(&alive)
        };
        has_lost || self.incarnations.lock().has_lost(lately, Instant::now())
    }
}

/// Hash that selects the peer stream of a channel, the same on every node.
fn hash_of(key: &ChannelKey) -> u64 {
    hub::channel_number(key)
}
