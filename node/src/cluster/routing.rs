//! Which channels go to which node: what is wanted here is told the others, and a publish goes to those that want it.

mod absent;
mod ask;
mod deaths;
#[cfg(test)]
mod fixture;
mod hand_over;
mod ids;
mod joins;
mod lag;
mod leaving;
mod nonces;
mod occupancy;
mod orphans;
mod presence;
mod queues_changed;
mod quorum;
mod receipts;
mod refill;
mod repeats;
mod revocations;
mod runs;
mod stored;
mod successors;
mod telling;
mod tenants;
mod unreached;
mod wants;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;

pub use ask::{Later, Local};
use dashmap::DashMap;
pub use deaths::Standing;
use fanfare_proto::serial::Serial;
use fanfare_proto::trace::TraceContext;
pub use ids::{ClaimedIds, NotClaimed, OnClaimed};
use parking_lot::{Mutex, RwLock};
pub use quorum::KeptNodes;
pub use runs::Connections;
pub use stored::Behind;
pub use tenants::Seats;
use tokio::time::Instant;
pub use wants::Known;

use absent::Absent;
use ask::{Asked, EarlyAnswers, LOCAL_MAX};
use deaths::Deaths;
use ids::Ids;
use lag::ToldLags;
use leaving::Leaving;
use nonces::{Clocks, Noted};
use orphans::Orphaned;
use presence::Presence;
use quorum::Quorum;
use receipts::Acks;
use refill::{REFILLS_MAX, REFILLS_WAITING_MAX, Round};
use runs::{Runs, SEATS_MAX};
use successors::Successors;
use telling::Telling;
use tenants::Counting;
use tokio::sync::{Notify, Semaphore};
use unreached::Unreached;
use wants::Wants;

use super::inbound::{Answer, ConnectionSaid, Inbound, Interest, Peer, PresenceSaid, Request, Tenants};
use super::link::{Item, PeerAddr, PeerLinks, Receipt};
use crate::hub::{self, Hub, Joins};
use crate::model::{
    ChannelKey, Forwarded, ForwardedPresence, IdScope, Published, Stamp, StampedIds, ToldMembers,
};
use crate::tasks::{Merged, OnStop, Tasks};
use crate::telemetry::Span;
use crate::telemetry::traces::Kind;

/// An attach waits no longer for a peer that does not answer.
const JOIN_WAIT: Duration = Duration::from_secs(2);
/// How often it is looked for such peers.
const JOIN_LOOK: Duration = Duration::from_millis(100);

/// The channels of this node and of its peers. Locks: that of a channel comes before those of this.
pub struct Routing {
    this: Weak<Self>,
    hub: Arc<Hub>,
    links: OnceLock<Box<dyn PeerLinks>>,
    tasks: Arc<Tasks>,
    /// What is wanted here, by the numbers of the channels.
    own: Mutex<BTreeMap<u64, Own>>,
    /// The members, by incarnation.
    peers: RwLock<HashMap<u64, Wants>>,
    /// Who wanted something before it was known as a member.
    early: Mutex<HashSet<u64>>,
    /// Those of them that are alive.
    expected: Mutex<Vec<u64>>,
    runs: Mutex<Runs>,
    deaths: Mutex<Deaths>,
    unreached: Mutex<Unreached>,
    absent: Mutex<Absent>,
    /// The nodes that are alive and cannot be reached, and since when.
    torn: Mutex<HashMap<u64, Instant>>,
    /// Who is alive, or can be reached.
    reach_changed: Notify,
    connections: OnceLock<Arc<dyn Connections>>,
    successors: Mutex<Successors>,
    seats_waiting: Arc<Semaphore>,
    presence: Presence,
    orphaned: Mutex<Orphaned>,
    /// Who wants a channel, by incarnation.
    wanted: DashMap<ChannelKey, Vec<u64>>,
    /// Peers that are being told all that is wanted here.
    tellings: Mutex<HashMap<u64, Arc<Telling>>>,
    /// Peers that are to be told all once more when they have been told what they are being told.
    untold: Mutex<HashSet<u64>>,
    epoch: AtomicU64,
    /// Of rounds and requests.
    last_number: AtomicU64,
    asked: Mutex<HashMap<u64, Asked>>,
    early_answers: Mutex<EarlyAnswers>,
    /// Requests of peers that may be answered at a time, and that may wait for that.
    refills: Semaphore,
    refills_waiting: Arc<Semaphore>,
    local: OnceLock<Arc<dyn Local>>,
    /// Further requests of peers that may be answered at a time.
    local_waiting: Arc<Semaphore>,
    counting: Counting,
    leaving: Leaving,
    acks: Mutex<Acks>,
    quorum: Mutex<Quorum>,
    clocks: Mutex<Clocks>,
    /// Held for reading while a nonce is claimed here, and for writing while another node is told, or tells, what is remembered.
    noted: tokio::sync::RwLock<Mutex<Noted>>,
    ids: Ids,
    /// Whether all have settled.
    settling: Merged<bool>,
    told_lags: Mutex<ToldLags>,
    /// Peers that can be sent to, and of which it is known what they want.
    known: metrics::Gauge,
    sent: metrics::Counter,
    taken: metrics::Counter,
}

/// A channel that is wanted here.
struct Own {
    key: ChannelKey,
    since: Instant,
    /// Whose answer is waited for.
    waits: Vec<u64>,
    /// One of them could not be reached any more, and has not answered.
    is_passed: bool,
    /// When nobody's was waited for any more, and those who attach were let in.
    let_in: Option<Instant>,
    /// Who has answered.
    confirmed: Vec<u64>,
    rounds: Vec<Round>,
    /// How far others have heard runs that are gone.
    gone: Serial,
}

impl Routing {
    /// `kept` is what the node has kept with [`Local::keep_nodes`].
    pub fn new(hub: &Arc<Hub>, node_id: &Arc<str>, kept: KeptNodes, tasks: &Arc<Tasks>) -> Arc<Self> {
        let routing = Arc::new_cyclic(|this| Self {
            this: Weak::clone(this),
            hub: Arc::clone(hub),
            links: OnceLock::new(),
            tasks: Arc::clone(tasks),
            own: Mutex::default(),
            peers: RwLock::default(),
            early: Mutex::default(),
            expected: Mutex::default(),
            runs: Mutex::default(),
            deaths: Mutex::default(),
            unreached: Mutex::default(),
            absent: Mutex::default(),
            torn: Mutex::default(),
            reach_changed: Notify::new(),
            connections: OnceLock::new(),
            successors: Mutex::default(),
            seats_waiting: Arc::new(Semaphore::new(SEATS_MAX)),
            presence: Presence::new(),
            orphaned: Mutex::default(),
            wanted: DashMap::new(),
            tellings: Mutex::default(),
            untold: Mutex::default(),
            epoch: AtomicU64::new(0),
            last_number: AtomicU64::new(0),
            asked: Mutex::default(),
            early_answers: Mutex::default(),
            refills: Semaphore::new(REFILLS_MAX),
            refills_waiting: Arc::new(Semaphore::new(REFILLS_WAITING_MAX)),
            local: OnceLock::new(),
            local_waiting: Arc::new(Semaphore::new(LOCAL_MAX)),
            counting: Counting::default(),
            leaving: Leaving::default(),
            acks: Mutex::default(),
            quorum: Mutex::new(Quorum::new(node_id, kept, Instant::now())),
            clocks: Mutex::default(),
            noted: tokio::sync::RwLock::default(),
            ids: Ids::default(),
            settling: Merged::default(),
            told_lags: Mutex::default(),
            known: metrics::gauge!("fanfare_peers_known"),
            sent: metrics::counter!("fanfare_forwards_sent_total"),
            taken: metrics::counter!("fanfare_forwards_taken_total"),
        });
        let forgetting = Arc::clone(&routing);
        tasks.spawn("absent runs", OnStop::Cancel, async move { forgetting.forget_the_absent().await });
        tasks.spawn("receipts", OnStop::Cancel, Arc::clone(&routing).give_up_receipts());
        let looking = Arc::clone(&routing);
        tasks.spawn("joins", OnStop::Cancel, async move {
            loop {
                tokio::time::sleep(JOIN_LOOK).await;
                looking.give_up_waiting();
                looking.tell_what_is_numbered();
                looking.is_torn_lately();
            }
        });
        routing
    }

    /// To be called once, before there are peers.
    pub fn begin(self: &Arc<Self>, links: impl PeerLinks) {
        self.link_by(links);
        self.tasks.spawn("presence", OnStop::Cancel, Arc::clone(self).compare_presence());
        let looking = Arc::clone(self);
        self.tasks.spawn("unreached", OnStop::Cancel, async move {
            loop {
                tokio::time::sleep(JOIN_LOOK).await;
                looking.doubt_the_unreached(Instant::now());
            }
        });
    }

    /// The same, for whoever calls [`Routing::compare_members`] and [`Routing::doubt_the_unreached`].
    pub(super) fn link_by(self: &Arc<Self>, links: impl PeerLinks) {
        self.links.set(Box::new(links)).ok();
        self.hub.set_interest(Arc::clone(self) as Arc<dyn hub::Interest>);
    }

    /// All that the members want, and whom they have, is known here, of those that are to be reached.
    pub fn is_complete(&self) -> bool {
        let (peers, expected) = (self.peers.read(), self.expected.lock());
        let is_known = |peer: &u64| peers.get(peer).is_some_and(|wants| wants.is_known) && self.is_up(*peer);
        expected.iter().all(|peer| is_known(peer) && self.presence.is_known(*peer))
    }

    /// How many members are to be reached.
    pub fn expected(&self) -> usize {
        self.expected.lock().len()
    }

    /// The members as they are now, without this node; `expected` are the incarnations of those that are alive.
    pub fn set_peers(&self, members: Vec<PeerAddr>, expected: Vec<u64>) {
        let _changing = self.leaving.changing.lock();
        self.leaving.set_members(members, expected);
        self.members_changed();
    }

    /// To be called while no other change is made.
    fn members_changed(&self) {
        let Some(links) = self.links.get() else { return };
        let (members, expected) = self.leaving.without_left();
        let ended = self.runs.lock().are_alive(&expected, Instant::now());
        let have_told = ended.iter().all(|run| self.presence.is_known(*run));
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
            peers.entry(peer).or_insert_with(|| Wants::begin(self.early.lock().remove(&peer)));
        }
        self.presence.retain(&peers.keys().copied().collect());
        drop(peers);
        links.set_peers(members);
        self.answer_early();
        self.count_known();
        if !have_told {
            self.ask_all_for_members();
        }
        if has_left {
            let peers = self.peers.read();
            self.wanted.retain(|_, wanting| {
                wanting.retain(|peer| peers.contains_key(peer));
                !wanting.is_empty()
            });
        }
    }

    /// Sends a publish to all who want it, in the order of the calls; to be called under the lock of its channel. The receipts
    /// are those of whom can be reached. The span is that of the way to them, until they have confirmed it.
    pub fn forward(&self, published: &Published, trace: Option<&TraceContext>) -> (Vec<Receipt>, Span) {
        let to = self.wanting(&published.key);
        let Some(links) = self.links.get().filter(|_| !to.is_empty()) else { return Default::default() };
        let mut span = Span::within(trace, "forward", Kind::Producer);
        if span.is_recorded() {
            span.concerns(published.key.channel(), published.messages.len());
            span.set("fanfare.peers", || (to.len() as i64).into());
        }
        let (item, hash) = (Item::forward(published, span.context().as_deref()), hash_of(&published.key));
        self.sent.increment(to.len() as u64);
        let send = |peer: &u64| (links.is_up(*peer), links.send(*peer, hash, &item));
        (to.iter().map(send).filter(|(is_up, _)| *is_up).map(|(_, receipt)| receipt).collect(), span)
    }

    fn wanting(&self, key: &ChannelKey) -> Vec<u64> {
        let mut wanting = self.wanted.get(key).map_or_else(Vec::new, |wanting| wanting.clone());
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
        let known = |(peer, wants): &(&u64, &Wants)| wants.is_known && self.is_up(**peer);
        self.known.set(self.peers.read().iter().filter(known).count() as f64);
    }

    /// False where there is no link to the peer. Otherwise whether it came shows in the answer.
    fn send(&self, to: u64, hash: u64, interest: &Interest) -> bool {
        let Some(links) = self.links.get() else { return false };
        !links.send(to, hash, &Item::interest(interest)).is_lost()
    }
}

impl hub::Interest for Routing {
    fn join(&self, key: &ChannelKey, number: u64, sequence: u64) -> Joins {
        let mut own = self.own.lock();
        let peers = self.linked();
        let mut waits = peers.clone();
        waits.extend(self.ending());
        let is_done = waits.is_empty();
        let (key_of, since, gone) = (key.clone(), Instant::now(), Serial::default());
        let (let_in, confirmed, rounds) = (is_done.then_some(since), Vec::new(), Vec::new());
        let joining = Own { key: key_of, since, waits, is_passed: false, let_in, confirmed, rounds, gone };
        own.insert(number, joining);
        // Under the lock, so that no peer that is told all meanwhile is never told this.
        for peer in peers {
            let wanted = Interest::Wanted { key: key.clone(), number, round: 0, sequence };
            self.send(peer, hash_of(key), &wanted);
        }
        let unreached = self.unreached.lock().runs().filter(|run| !self.is_up(*run)).collect();
        Joins { is_done, unreached }
    }

    fn leave(&self, key: &ChannelKey, number: u64) {
        let mut own = self.own.lock();
        own.remove(&number);
        for peer in self.peers.read().keys() {
            self.send(*peer, hash_of(key), &Interest::NotWanted { key: key.clone() });
        }
    }

    fn has_lost(&self) -> bool {
        let lately = self.hub.keeps_for();
        let alive = self.expected.lock().clone();
        let has_lost = {
            let deaths = self.deaths.lock();
            deaths.has_lost(lately) || deaths.has_unheard(&alive)
        };
        has_lost || self.runs.lock().has_lost(lately, Instant::now())
    }
}

impl Inbound for Routing {
    fn forwarded(&self, _from: &Peer, forwarded: Forwarded) {
        self.taken.increment(1);
        self.hub.forwarded(forwarded);
    }

    fn batch_came(&self, bytes: usize) {
        self.hub.batch_came(bytes);
    }

    fn presence_changed(&self, _from: &Peer, forwarded: ForwardedPresence) {
        self.hub.presented(forwarded);
    }

    fn presence_told(&self, from: &Peer, number: u64, members: ToldMembers) {
        self.take_members(from.incarnation, number, members);
    }

    fn presence_said(&self, from: &Peer, said: PresenceSaid) {
        self.take_presence_said(from.incarnation, said);
    }

    fn connection_said(&self, from: &Peer, said: ConnectionSaid) {
        self.take_connection_said(from.incarnation, said);
    }

    fn interest(&self, from: &Peer, interest: Interest) {
        match interest {
            Interest::Wanted { key, number, round, sequence } => {
                self.hub.has_numbered(&key, Stamp { incarnation: from.incarnation, sequence });
                self.want(from.incarnation, key, number, round);
            }
            Interest::NotWanted { key } => {
                self.wanted.remove_if_mut(&key, |_, wanting| {
                    wanting.retain(|peer| *peer != from.incarnation);
                    wanting.is_empty()
                });
            }
            Interest::Said { epoch, lanes } => self.all_said(from.incarnation, epoch, lanes),
            Interest::Asked => self.say_all(from.incarnation),
            Interest::Joined { key, number, sequence, round, gone } => {
                self.joined(from.incarnation, &key, number, (sequence, round), gone);
            }
            Interest::Left { lanes, is_all } => self.lane_left(from.incarnation, lanes, is_all),
            Interest::Ended { runs } => self.take_ended(&runs),
        }
    }

    fn ids_settled(&self, _from: &Peer, scope: IdScope, ids: StampedIds) {
        self.take_settled(scope, ids);
    }

    fn asked(&self, from: &Peer, number: u64, request: Option<Request>) {
        self.asked_for(from.incarnation, number, request);
    }

    fn answered(&self, from: &Peer, number: u64, answer: Answer) {
        self.taken(from.incarnation, number, answer);
    }

    fn tenants(&self, from: &Peer, tenants: Tenants) {
        self.take_tenants(from.incarnation, tenants);
    }

    fn lane_opened(&self, from: &Peer, lane: u32) {
        self.lane_opened_by(from.incarnation, lane);
        self.reach_changed.notify_waiters();
    }

    fn lane_ended(&self, from: &Peer, lane: u32, whole: bool) {
        self.lane_ended_by(from.incarnation, lane, whole);
    }

    fn continuity_lost(&self, from: &Peer) {
        self.tenants_lost(from.incarnation);
        // What it wants may have been among it, too.
        if let Some(wants) = self.peers.write().get_mut(&from.incarnation) {
            wants.is_known = false;
        }
        self.count_known();
        for own in self.own.lock().values_mut() {
            own.confirmed.retain(|peer| *peer != from.incarnation);
        }
        self.hub.lost(from.incarnation);
        self.send(from.incarnation, 0, &Interest::Asked);
        self.presence_lost(from.incarnation);
        // The answers say how far it is in each.
        self.say_all(from.incarnation);
    }

    fn link(&self, to: &Peer, up: bool) {
        self.count_known();
        self.reach_changed.notify_waiters();
        if up {
            self.deaths.lock().linked(to.incarnation, true);
            self.tenants_linked(to.incarnation);
            self.say_revocations(to.incarnation);
            self.say_ended(to.incarnation);
            // It may have said what it wants before it was known here as a member.
            if self.peers.read().get(&to.incarnation).is_some_and(|wants| !wants.is_known) {
                self.send(to.incarnation, 0, &Interest::Asked);
            }
            self.presence_linked(to.incarnation);
            return self.say_all(to.incarnation);
        }
        self.answers_no_more(to.incarnation, None);
        self.unlinked(to.incarnation);
    }
}

/// The same on every lane.
fn hash_of(key: &ChannelKey) -> u64 {
    hub::channel_number(key)
}
