//! A node with one peer, and the items that the node sends to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::super::inbound::{Inbound as _, InterestMessage, Peer};
use super::super::link::{PeerAck, PeerAddr, PeerItem, PeerLinks, PeerQueue, QueueBounds};
use super::{GossipStatus, KeptNodes, Routing};
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

/// One stream to each member, which is up while `is_there` is set.
pub(super) struct FixtureLinks {
    queue: PeerQueue,
    sent: Mutex<Vec<PeerItem>>,
    is_there: AtomicBool,
}

impl PeerLinks for Arc<FixtureLinks> {
    fn set_peers(&self, _: Vec<PeerAddr>) {}

    fn stream_count(&self) -> usize {
        1
    }

    fn send(&self, _: u64, _: u64, item: &PeerItem) -> PeerAck {
        if !self.is_there.load(Ordering::Relaxed) {
            return PeerAck::lost();
        }
        self.sent.lock().push(item.clone());
        self.queue.push(item.encoded(), None)
    }

    fn is_up(&self, _: u64) -> bool {
        self.is_there.load(Ordering::Relaxed)
    }
}

pub(super) struct RoutingTestNode {
    pub(super) routing: Arc<Routing>,
    pub(super) links: Arc<FixtureLinks>,
    pub(super) peer: Peer,
    pub(super) key: ChannelKey,
}

impl RoutingTestNode {
    pub(super) fn new() -> Self {
        let hub = Arc::new(Hub::new(Vec::new(), Clock::system(), &Limits::default()).with_incarnation(1));
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let routing = Routing::new(&hub, &"n1".into(), KeptNodes::default(), &tasks);
        let links = Arc::new(FixtureLinks {
            queue: PeerQueue::new(QueueBounds::default()),
            sent: Mutex::default(),
            is_there: AtomicBool::new(false),
        });
        routing.begin(Arc::clone(&links));
        let key = ChannelKey::new(AccountId::new("a"), ChannelName::stored("room"));
        Self { routing, links, peer: Peer { node_id: "n7".into(), incarnation: PEER }, key }
    }

    /// A node with two peers, which both forward a channel that has a subscriber here.
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

    /// Makes these peers the members, all of them alive.
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

    /// Makes the peer a member that gossip does not see.
    pub(super) fn loses_sight_of_the_peer(&self, is_down: bool) {
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        self.routing.set_peers(vec![PeerAddr { peer: self.peer.clone(), addr }], Vec::new());
        self.routing.update_node_failures(&[GossipStatus {
            incarnation: PEER,
            is_down,
            ..GossipStatus::default()
        }]);
    }

    /// Lets the peer forward a channel that has a subscriber here, and then go down. With `is_whole` its stream ends like that of a
    /// killed process; otherwise the peer may be partitioned and taking publishes.
    pub(super) fn sees_the_peer_die(&self, is_contiguous: bool) {
        let status = |is_down| GossipStatus {
            incarnation: PEER,
            is_down,
            has_clients: true,
            ..GossipStatus::default()
        };
        self.finds_the_peer();
        self.has_a_link();
        self.routing.stream_opened(&self.peer, 0);
        self.routing.update_node_failures(&[status(false)]);
        self.is_attached_to();
        self.says_joined(0, 0, Vec::new());
        self.loses_the_peer();
        self.routing.stream_ended(&self.peer, 0, is_contiguous);
        self.routing.update_node_failures(&[status(true)]);
    }

    /// Attaches a subscriber to the channel, which sends the interest to the peers.
    pub(super) fn is_attached_to(&self) {
        let hub = &self.routing.hub;
        hub.join(&self.key, 0, || Box::new(|| {}));
        hub.attach(&self.key, 0);
    }

    /// Lets the peer confirm that it forwards the channel, with its last sequences of retired incarnations.
    pub(super) fn says_joined(&self, sequence: u64, round: u64, retired: Vec<Stamp>) {
        self.says_joined_as(&self.peer, sequence, round, retired);
    }

    pub(super) fn says_joined_as(&self, peer: &Peer, sequence: u64, round: u64, retired: Vec<Stamp>) {
        let number = self.number();
        let joined = InterestMessage::Forwarding { key: self.key.clone(), number, sequence, round, retired };
        self.routing.interest(peer, joined);
    }

    pub(super) fn number(&self) -> u64 {
        self.routing.hub.live(&self.key).expect("it is attached to").number()
    }

    pub(super) fn has_a_link(&self) {
        self.links.is_there.store(true, Ordering::Relaxed);
    }

    pub(super) fn receives_interest(&self) {
        let added = InterestMessage::Added { key: self.key.clone(), number: 1, round: 0, sequence: 0 };
        self.routing.interest(&self.peer, added);
    }

    pub(super) fn receives_snapshot_end(&self, epoch: u64) {
        self.routing.interest(&self.peer, InterestMessage::SnapshotEnd { epoch, streams: 1 });
    }

    pub(super) fn knows(&self) -> bool {
        self.routing.peer_status(PEER).is_interest_known
    }

    /// Takes the items that the node has sent since the last call.
    pub(super) fn says(&self) -> Vec<PeerItem> {
        std::mem::take(&mut self.links.sent.lock())
    }
}
