//! A node with one other, and what it says to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::super::inbound::{Inbound as _, Interest, Peer};
use super::super::link::{Item, PeerAddr, PeerLinks, Queue, QueueBounds, Receipt};
use super::{KeptNodes, Routing, Standing};
use crate::hub::Hub;
use crate::model::{AccountId, ChannelKey, ChannelName, Clock, ConnectionId, ForwardedParts, Limits, Stamp};
use crate::tasks::Tasks;

pub(super) const PEER: u64 = 7;

/// The stored row of one message.
pub(super) fn row(incarnation: u64, sequence: u64) -> ForwardedParts {
    ForwardedParts {
        incarnation,
        first: sequence,
        last: sequence,
        timestamp_ms: 0,
        connection_id: ConnectionId::from_bytes([1; 16]),
        client_id: None,
        messages: vec![Bytes::from_static(b"{}")],
        bytes: 2,
    }
}

/// One lane to each member, to which there is a link when it is said so.
pub(super) struct Links {
    queue: Queue,
    sent: Mutex<Vec<Item>>,
    is_there: AtomicBool,
}

impl PeerLinks for Arc<Links> {
    fn set_peers(&self, _: Vec<PeerAddr>) {}

    fn lanes(&self) -> usize {
        1
    }

    fn send(&self, _: u64, _: u64, item: &Item) -> Receipt {
        if !self.is_there.load(Ordering::Relaxed) {
            return Receipt::lost();
        }
        self.sent.lock().push(item.clone());
        self.queue.push(item.encoded(), None)
    }

    fn is_up(&self, _: u64) -> bool {
        self.is_there.load(Ordering::Relaxed)
    }
}

pub(super) struct Node {
    pub(super) routing: Arc<Routing>,
    pub(super) links: Arc<Links>,
    pub(super) peer: Peer,
    pub(super) key: ChannelKey,
}

impl Node {
    pub(super) fn new() -> Self {
        let hub = Arc::new(Hub::new(Vec::new(), Clock::system(), &Limits::default()).of_run(1));
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let routing = Routing::new(&hub, &"n1".into(), KeptNodes::default(), &tasks);
        let links = Arc::new(Links {
            queue: Queue::new(QueueBounds::default()),
            sent: Mutex::default(),
            is_there: AtomicBool::new(false),
        });
        routing.begin(Arc::clone(&links));
        let key = ChannelKey::new(AccountId::new("a"), ChannelName::stored("room"));
        Self { routing, links, peer: Peer { node_id: "n7".into(), incarnation: PEER }, key }
    }

    /// With a second other one; both forward a channel that somebody here is attached to.
    pub(super) fn of_three() -> (Self, Peer) {
        let node = Self::new();
        let other = Peer { node_id: "n8".into(), incarnation: 8 };
        node.finds(&[&node.peer, &other]);
        node.has_a_link();
        node.is_attached_to();
        for peer in [&node.peer, &other] {
            node.says_joined_as(peer, 0, 0, Vec::new());
        }
        (node, other)
    }

    pub(super) fn finds_the_peer(&self) {
        self.finds(&[&self.peer]);
    }

    /// These are the members, and alive.
    pub(super) fn finds(&self, peers: &[&Peer]) {
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        let members = peers.iter().map(|peer| PeerAddr { peer: (*peer).clone(), addr });
        let alive = peers.iter().map(|peer| peer.incarnation);
        self.routing.set_peers(members.collect(), alive.collect());
    }

    pub(super) fn loses_its_links(&self) {
        self.links.is_there.store(false, Ordering::Relaxed);
        self.routing.link(&self.peer, false);
    }

    pub(super) fn loses_the_peer(&self) {
        self.loses_its_links();
        self.routing.set_peers(Vec::new(), Vec::new());
    }

    /// It is a member that is not heard.
    pub(super) fn does_not_hear_the_peer(&self, is_dead: bool) {
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        self.routing.set_peers(vec![PeerAddr { peer: self.peer.clone(), addr }], Vec::new());
        self.routing.look_for_deaths(&[Standing { incarnation: PEER, is_dead, ..Standing::default() }]);
    }

    /// It forwards a channel that somebody here is attached to until it is held for dead. Its lane ends whole as that of a process does that
    /// is killed; else it may be taking publishes behind a cut.
    pub(super) fn sees_the_peer_die(&self, is_whole: bool) {
        let standing =
            |is_dead| Standing { incarnation: PEER, is_dead, has_clients: true, ..Standing::default() };
        self.finds_the_peer();
        self.has_a_link();
        self.routing.lane_opened(&self.peer, 0);
        self.routing.look_for_deaths(&[standing(false)]);
        self.is_attached_to();
        self.says_joined(0, 0, Vec::new());
        self.loses_the_peer();
        self.routing.lane_ended(&self.peer, 0, is_whole);
        self.routing.look_for_deaths(&[standing(true)]);
    }

    /// Somebody is, and the others are told.
    pub(super) fn is_attached_to(&self) {
        let hub = &self.routing.hub;
        hub.join(&self.key, 0, || Box::new(|| {}));
        hub.attach(&self.key, 0);
    }

    /// The peer forwards the channel from then on, and says what it has of runs that are gone.
    pub(super) fn says_joined(&self, sequence: u64, round: u64, gone: Vec<Stamp>) {
        self.says_joined_as(&self.peer, sequence, round, gone);
    }

    pub(super) fn says_joined_as(&self, peer: &Peer, sequence: u64, round: u64, gone: Vec<Stamp>) {
        let number = self.number();
        let joined = Interest::Joined { key: self.key.clone(), number, sequence, round, gone };
        self.routing.interest(peer, joined);
    }

    pub(super) fn number(&self) -> u64 {
        self.routing.hub.live(&self.key).expect("it is attached to").number()
    }

    pub(super) fn has_a_link(&self) {
        self.links.is_there.store(true, Ordering::Relaxed);
    }

    pub(super) fn is_told_a_want(&self) {
        let wanted = Interest::Wanted { key: self.key.clone(), number: 1, round: 0, sequence: 0 };
        self.routing.interest(&self.peer, wanted);
    }

    pub(super) fn is_told_all(&self, epoch: u64) {
        self.routing.interest(&self.peer, Interest::Said { epoch, lanes: 1 });
    }

    pub(super) fn knows(&self) -> bool {
        self.routing.known_of(PEER).is_interest_known
    }

    /// What it has said since this was last asked.
    pub(super) fn says(&self) -> Vec<Item> {
        std::mem::take(&mut self.links.sent.lock())
    }
}
