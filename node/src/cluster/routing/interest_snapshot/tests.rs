//! Interest snapshots that are larger than a peer queue, with changes meanwhile.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::sync::atomic::AtomicBool;

use fanfare_proto::peer::{Items, v1};
use tokio::runtime::Handle;

use super::super::super::inbound::{Inbound as _, Peer};
use super::super::super::link::{BatchPull, PeerAddr, PeerLinks, PeerQueue, QueueBounds};
use super::super::KeptNodes;
use super::*;
use crate::hub::{Hub, InterestAnnouncer as _};
use crate::model::{AccountId, ChannelKey, ChannelName, Clock, Limits};
use crate::tasks::Tasks;

const PEER: u64 = 7;
const BOUNDS: QueueBounds = QueueBounds { bytes: 8 << 20, items: 10_000 };
const CHANNELS: u64 = 25_000;

/// One stream to the only member.
struct SnapshotTestLinks {
    queue: PeerQueue,
    is_up: AtomicBool,
}

impl PeerLinks for Arc<SnapshotTestLinks> {
    fn set_peers(&self, _: Vec<PeerAddr>) {}

    fn stream_count(&self) -> usize {
        1
    }

    fn send(&self, _: u64, _: u64, item: &PeerItem) -> PeerAck {
        self.queue.push(item.encoded(), None)
    }

    fn is_up(&self, _: u64) -> bool {
        self.is_up.load(Ordering::Relaxed)
    }
}

struct SnapshotTestNode {
    routing: Arc<Routing>,
    links: Arc<SnapshotTestLinks>,
    stream: u64,
    peer: Peer,
    /// Channels that the peer knows as interest of the node, and messages that it has not answered.
    interest: BTreeSet<u64>,
    unanswered: Vec<InterestMessage>,
    snapshot_ends: Vec<u64>,
}

impl SnapshotTestNode {
    /// Creates a node with interest in all channels and a new link to the peer.
    fn new() -> Self {
        let hub = Arc::new(Hub::new(Vec::new(), Clock::system(), &Limits::default()).with_incarnation(1));
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let routing = Routing::new(&hub, &"n1".into(), KeptNodes::default(), &tasks);
        let links =
            Arc::new(SnapshotTestLinks { queue: PeerQueue::new(BOUNDS), is_up: AtomicBool::new(false) });
        routing.set_links(Arc::clone(&links));
        let peer = Peer { node_id: "n7".into(), incarnation: PEER };
        let addr = SocketAddr::from(([127, 0, 0, 1], 1));
        routing.set_peers(vec![PeerAddr { peer: peer.clone(), addr }], vec![PEER]);
        (0..CHANNELS).for_each(|number| assert!(routing.announce(&key(number), number, 0).is_done));
        let stream = links.queue.open(0);
        links.is_up.store(true, Ordering::Relaxed);
        routing.link(&peer, true);
        let (interest, unanswered, snapshot_ends) = (BTreeSet::new(), Vec::new(), Vec::new());
        Self { routing, links, stream, peer, interest, unanswered, snapshot_ends }
    }

    /// Lets the peer take items until none follows.
    async fn is_taken(&mut self) {
        loop {
            for _ in 0..20 {
                tokio::task::yield_now().await;
            }
            match self.links.queue.pull(self.stream) {
                BatchPull::Batch(batch) => self.takes(batch),
                BatchPull::Nothing => return,
                BatchPull::Over => panic!("more was told than the lane holds"),
            }
        }
    }

    fn takes(&mut self, batch: v1::Batch) {
        for item in Items::new(batch.items) {
            match item.expect("it is well formed").kind {
                Some(v1::item::Kind::Interest(v1::Interest {
                    channel, number, interested, round, ..
                })) => {
                    let name = channel.expect("there is one").name;
                    let index = name.parse().expect("a number");
                    if interested {
                        self.interest.insert(index);
                        let (key, retired) = (key(index), Vec::new());
                        self.unanswered.push(InterestMessage::Forwarding {
                            key,
                            number,
                            sequence: 0,
                            round,
                            retired,
                        });
                    } else {
                        self.interest.remove(&index);
                    }
                }
                Some(v1::item::Kind::InterestSnapshotEnd(message)) => self.snapshot_ends.push(message.epoch),
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

    async fn receives_snapshot(&mut self) {
        let ends_before = self.snapshot_ends.len();
        while self.snapshot_ends.len() == ends_before {
            let before = self.interest.len() + self.unanswered.len();
            self.answers();
            self.is_taken().await;
            let is_more = self.interest.len() + self.unanswered.len() > before;
            assert!(is_more || self.snapshot_ends.len() > ends_before, "it stands still");
        }
    }
}

fn key(number: u64) -> ChannelKey {
    ChannelKey::new(AccountId::new("a"), ChannelName::stored(&number.to_string()))
}

#[tokio::test]
async fn snapshot_larger_than_the_peer_stream_queue_arrives() {
    let mut node = SnapshotTestNode::new();
    let all: BTreeSet<u64> = (0..CHANNELS).collect();
    node.receives_snapshot().await;
    assert!(node.interest == all && node.snapshot_ends == [1]);
    node.interest.clear();
    node.routing.continuity_lost(&node.peer);
    node.receives_snapshot().await;
    assert!(node.interest == all, "it is asked for all anew");
}

#[tokio::test]
async fn interest_changed_during_a_snapshot_is_sent_correctly() {
    let mut node = SnapshotTestNode::new();
    node.is_taken().await;
    assert_eq!(node.interest.len(), PART_ITEMS, "the answers are waited for");
    for (left, new) in [(0, CHANNELS), (CHANNELS - 1, CHANNELS + 1)] {
        node.routing.withdraw(&key(left), left);
        node.routing.announce(&key(new), new, 0);
        node.is_taken().await;
        assert!(node.interest.contains(&new), "it waits for nothing that is told");
    }
    node.receives_snapshot().await;
    let all: BTreeSet<u64> = (1..CHANNELS - 1).chain(CHANNELS..CHANNELS + 2).collect();
    assert!(node.interest == all);
}

#[tokio::test]
async fn interest_snapshot_asked_again_starts_from_the_beginning() {
    let mut node = SnapshotTestNode::new();
    node.is_taken().await;
    node.interest.clear();
    node.routing.interest(&node.peer, InterestMessage::SnapshotRequest);
    node.receives_snapshot().await;
    assert!(node.interest == (0..CHANNELS).collect());
    assert_eq!(node.snapshot_ends, [2], "the one before was not all");
}
