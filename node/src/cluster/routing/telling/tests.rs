//! A peer that is told more than its lane holds, and what changes meanwhile.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

use fanfare_proto::peer::{Items, v1};
use tokio::runtime::Handle;

use super::super::super::inbound::{Inbound as _, Peer};
use super::super::super::link::{PeerAddr, PeerLinks, Pull, Queue, QueueBounds};
use super::super::KeptNodes;
use super::*;
use crate::hub::{Hub, Interest as _};
use crate::model::{AccountId, ChannelKey, ChannelName, Clock, Limits};
use crate::tasks::Tasks;

const PEER: u64 = 7;
const BOUNDS: QueueBounds = QueueBounds { bytes: 8 << 20, items: 10_000 };
const CHANNELS: u64 = 25_000;

/// One lane to the one member.
struct Links {
    queue: Queue,
    is_up: AtomicBool,
}

impl PeerLinks for Arc<Links> {
    fn set_peers(&self, _: Vec<PeerAddr>) {}

    fn lanes(&self) -> usize {
        1
    }

    fn send(&self, _: u64, _: u64, item: &Item) -> Receipt {
        self.queue.push(item.encoded(), None)
    }

    fn is_up(&self, _: u64) -> bool {
        self.is_up.load(Ordering::Relaxed)
    }
}

struct Node {
    routing: Arc<Routing>,
    links: Arc<Links>,
    stream: u64,
    peer: Peer,
    /// What the peer takes it to want, and what it has not answered.
    wanted: BTreeSet<u64>,
    unanswered: Vec<Interest>,
    said: Vec<u64>,
}

impl Node {
    /// It wants all channels, and has been linked to the peer just now.
    fn new() -> Self {
        let hub = Arc::new(Hub::new(Vec::new(), Clock::system(), &Limits::default()).of_run(1));
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let routing = Routing::new(&hub, &"n1".into(), KeptNodes::default(), &tasks);
        let links = Arc::new(Links { queue: Queue::new(BOUNDS), is_up: AtomicBool::new(false) });
        routing.link_by(Arc::clone(&links));
        let peer = Peer { node_id: "n7".into(), incarnation: PEER };
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        routing.set_peers(vec![PeerAddr { peer: peer.clone(), addr }], vec![PEER]);
        (0..CHANNELS).for_each(|number| assert!(routing.join(&key(number), number, 0).is_done));
        let stream = links.queue.open(0);
        links.is_up.store(true, Ordering::Relaxed);
        routing.link(&peer, true);
        let (wanted, unanswered, said) = (BTreeSet::new(), Vec::new(), Vec::new());
        Self { routing, links, stream, peer, wanted, unanswered, said }
    }

    /// The peer takes what is told until nothing follows.
    async fn is_taken(&mut self) {
        loop {
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            match self.links.queue.pull(self.stream) {
                Pull::Batch(batch) => self.takes(batch),
                Pull::Nothing => return,
                Pull::Over => panic!("more was told than the lane holds"),
            }
        }
    }

    fn takes(&mut self, batch: v1::Batch) {
        for item in Items::new(batch.items) {
            match item.expect("it is well formed").kind {
                Some(v1::item::Kind::Interest(v1::Interest { channel, number, wanted, round, .. })) => {
                    let name = channel.expect("there is one").name;
                    let told = name.parse().expect("a number");
                    if wanted {
                        self.wanted.insert(told);
                        let (key, gone) = (key(told), Vec::new());
                        self.unanswered.push(Interest::Joined { key, number, sequence: 0, round, gone });
                    } else {
                        self.wanted.remove(&told);
                    }
                }
                Some(v1::item::Kind::InterestSaid(said)) => self.said.push(said.epoch),
                _ => {}
            }
        }
        self.links.queue.confirm(batch.sequence);
    }

    fn answers(&mut self) {
        for answer in std::mem::take(&mut self.unanswered) {
            self.routing.interest(&self.peer, answer);
        }
    }

    async fn is_told_all(&mut self) {
        let said = self.said.len();
        while self.said.len() == said {
            let told = self.wanted.len() + self.unanswered.len();
            self.answers();
            self.is_taken().await;
            let is_more = self.wanted.len() + self.unanswered.len() > told;
            assert!(is_more || self.said.len() > said, "it stands still");
        }
    }
}

fn key(number: u64) -> ChannelKey {
    ChannelKey::new(AccountId::new("a"), ChannelName::stored(&number.to_string()))
}

#[tokio::test]
async fn more_is_wanted_than_a_lane_holds() {
    let mut node = Node::new();
    let all: BTreeSet<u64> = (0..CHANNELS).collect();
    node.is_told_all().await;
    assert!(node.wanted == all && node.said == [1]);
    node.wanted.clear();
    node.routing.continuity_lost(&node.peer);
    node.is_told_all().await;
    assert!(node.wanted == all, "it is asked for all anew");
}

#[tokio::test]
async fn interest_changed_during_snapshot_is_told_in_its_place() {
    let mut node = Node::new();
    node.is_taken().await;
    assert_eq!(node.wanted.len(), PART_ITEMS, "the answers are waited for");
    for (left, new) in [(0, CHANNELS), (CHANNELS - 1, CHANNELS + 1)] {
        node.routing.leave(&key(left), left);
        node.routing.join(&key(new), new, 0);
        node.is_taken().await;
        assert!(node.wanted.contains(&new), "it waits for nothing that is told");
    }
    node.is_told_all().await;
    let all: BTreeSet<u64> = (1..CHANNELS - 1).chain(CHANNELS..CHANNELS + 2).collect();
    assert!(node.wanted == all);
}

#[tokio::test]
async fn interest_snapshot_asked_again_starts_from_the_beginning() {
    let mut node = Node::new();
    node.is_taken().await;
    node.wanted.clear();
    node.routing.interest(&node.peer, Interest::Asked);
    node.is_told_all().await;
    assert!(node.wanted == (0..CHANNELS).collect());
    assert_eq!(node.said, [2], "the one before was not all");
}
