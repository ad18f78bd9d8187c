//! Interest of peers, and what is known of their state.

use super::super::inbound::InterestMessage;
use super::{Routing, hash_of};
use crate::model::ChannelKey;

/// Most incarnations that are remembered because they sent interest before they were known as members.
const EARLY_MAX: usize = 1024;

/// State of another node's incarnation, as far as this node knows.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct PeerStatus {
    pub is_up: bool,
    pub is_interest_known: bool,
    /// True after its goodbye.
    pub has_left: bool,
}

/// Progress of a peer's interest snapshot. Until it is complete, the peer counts as interested in every channel.
#[derive(Debug, Default)]
pub(super) struct PeerInterest {
    epoch: u64,
    streams: u32,
    pub(super) is_known: bool,
    /// True if a part of the snapshot was skipped, so that the peer must send it once more.
    is_partial: bool,
}

impl PeerInterest {
    /// Creates the state of a new member. `is_partial` is true if it sent interest before it was known as a member.
    pub(super) fn begin(is_partial: bool) -> Self {
        Self { is_partial, ..Self::default() }
    }

    /// Takes the end of a snapshot on one stream; ends of an earlier one may still come on other streams. False if the snapshot has ended
    /// on all streams and must be sent once more.
    fn snapshot_end(&mut self, epoch: u64, streams: u32) -> bool {
        if epoch > self.epoch {
            (self.epoch, self.streams) = (epoch, 0);
        }
        self.streams += u32::from(epoch == self.epoch);
        if self.streams < streams || self.is_known {
            return true;
        }
        self.is_known = !std::mem::take(&mut self.is_partial);
        self.is_known
    }
}

impl Routing {
    /// True if the last [`Routing::set_peers`] included the peer, also if the peer has left since.
    pub fn is_known(&self, peer: u64) -> bool {
        self.leaving.name_of(peer).is_some()
    }

    pub fn peer_status(&self, peer: u64) -> PeerStatus {
        let is_interest_known = self.peers.read().get(&peer).is_some_and(|wants| wants.is_known);
        PeerStatus { is_up: self.is_up(peer), is_interest_known, has_left: self.leaving.has_left(peer) }
    }

    /// Takes the end of a peer's interest snapshot on one stream.
    pub(super) fn take_snapshot_end(&self, from: u64, epoch: u64, streams: u32) {
        let is_enough =
            self.peers.write().get_mut(&from).is_none_or(|wants| wants.snapshot_end(epoch, streams));
        if !is_enough {
            self.send(from, 0, &InterestMessage::SnapshotRequest);
        }
        self.count_known();
    }

    /// Adds a channel to the interest of a peer, while no message is numbered in it. If the answer cannot be sent, the peer must send its
    /// interest again, since two nodes do not learn of each other at the same moment.
    pub(super) fn add_peer_interest(&self, from: u64, key: ChannelKey, number: u64, round: u64) {
        self.hub.with_position(&key, |sequence, known| {
            let peers = self.peers.read();
            if !peers.contains_key(&from) {
                let mut early = self.early.lock();
                if early.len() < EARLY_MAX {
                    early.insert(from);
                }
                return;
            }
            drop(peers);
            let mut wanting = self.interested_peers.entry(key.clone()).or_default();
            if !wanting.contains(&from) {
                wanting.push(from);
            }
            drop(wanting);
            let (hash, retired) = (hash_of(&key), self.retired_stamps(&known));
            let joined = InterestMessage::Forwarding { key: key.clone(), number, sequence, round, retired };
            if !self.send(from, hash, &joined)
                && let Some(wants) = self.peers.write().get_mut(&from)
            {
                wants.is_partial = !wants.is_known;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::super::super::inbound::{Inbound as _, Peer, PresenceSyncMessage};
    use super::super::super::link::{PeerAddr, PeerItem};
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::*;

    #[test]
    fn interest_is_known_when_each_stream_ended_its_snapshot() {
        let mut wants = PeerInterest::default();
        for (epoch, is_known) in [(1, false), (2, false), (1, false), (2, true), (3, true)] {
            assert!(wants.snapshot_end(epoch, 2));
            assert_eq!(wants.is_known, is_known, "{epoch}");
        }
    }

    fn asked() -> Vec<PeerItem> {
        vec![PeerItem::interest(&InterestMessage::SnapshotRequest)]
    }

    #[tokio::test]
    async fn interest_of_unknown_peer_is_asked_for_when_it_is_found() {
        let node = RoutingTestNode::new();
        node.receives_interest();
        node.finds_the_peer();
        node.has_a_link();
        node.receives_snapshot_end(1);
        assert!(!node.knows());
        assert_eq!(node.says(), asked());
        node.receives_interest();
        node.receives_snapshot_end(2);
        assert!(node.knows());
        assert_eq!(node.says().len(), 1, "that it is forwarded");
    }

    #[tokio::test]
    async fn members_sent_before_peer_was_known_are_requested_again() {
        let node = RoutingTestNode::new();
        node.routing.presence_sync_received(
            &node.peer,
            PresenceSyncMessage::SnapshotBegin { number: 1, parts: u64::MAX },
        );
        node.routing.set_peers(Vec::new(), Vec::new());
        node.finds_the_peer();
        node.has_a_link();
        node.routing
            .presence_sync_received(&node.peer, PresenceSyncMessage::SnapshotEnd { number: 1, streams: 1 });
        let request = PeerItem::presence_sync(PresenceSyncMessage::SnapshotRequest { parts: u64::MAX });
        node.routing.ask_for_members(&[PEER]);
        assert_eq!(node.says(), [request]);
    }

    #[tokio::test]
    async fn peer_that_ends_before_sending_members_makes_node_ask_others() {
        let request = PeerItem::presence_sync(PresenceSyncMessage::SnapshotRequest { parts: u64::MAX });
        for has_sent in [false, true] {
            let node = RoutingTestNode::new();
            let addr = SocketAddr::from(([127, 0, 0, 1], 1));
            let other = Peer { node_id: "n8".into(), incarnation: 8 };
            let of = |peer: &Peer| PeerAddr { peer: peer.clone(), addr };
            node.routing.set_peers(vec![of(&node.peer), of(&other)], vec![PEER, 8]);
            node.has_a_link();
            if has_sent {
                node.routing.presence_sync_received(
                    &node.peer,
                    PresenceSyncMessage::SnapshotBegin { number: 1, parts: u64::MAX },
                );
                node.routing.presence_sync_received(
                    &node.peer,
                    PresenceSyncMessage::SnapshotEnd { number: 1, streams: 1 },
                );
                while !node.routing.presence.is_known(PEER) {
                    tokio::task::yield_now().await;
                }
            }
            node.routing.set_peers(vec![of(&other)], vec![8]);
            assert_eq!(node.says(), if has_sent { vec![] } else { vec![request.clone()] });
        }
    }

    #[tokio::test]
    async fn peer_is_asked_again_if_forwarding_could_not_be_confirmed() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.receives_interest();
        node.receives_snapshot_end(1);
        assert!(!node.knows());
        node.has_a_link();
        node.routing.link(&node.peer, true);
        assert!(node.says().starts_with(&asked()));
        node.receives_interest();
        node.receives_snapshot_end(2);
        assert!(node.knows());
    }

    #[tokio::test]
    async fn batches_of_peers_are_reported_to_the_hub() {
        let node = RoutingTestNode::new();
        let before = node.routing.hub.peer_batch_interval();
        node.routing.batch_received(usize::MAX);
        assert!(node.routing.hub.peer_batch_interval() < before);
    }
}
