//! What is known of a peer: whether it can be reached, and what it wants.

use super::super::inbound::Interest;
use super::{Routing, hash_of};
use crate::model::ChannelKey;

/// Nodes that are remembered although they are not known as members; of a further one it is not known that it was early.
const EARLY_MAX: usize = 1024;

/// What there is to say of a run of another node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Known {
    pub is_up: bool,
    pub is_interest_known: bool,
    /// It has said goodbye.
    pub has_left: bool,
}

/// How much is known of what a peer wants; until it is all, it counts as wanting everything.
#[derive(Debug, Default)]
pub(super) struct Wants {
    epoch: u64,
    lanes: u32,
    pub(super) is_known: bool,
    /// Something was passed over of what it says now: it is to say all once more.
    is_partial: bool,
}

impl Wants {
    /// Of a new member, that has or has not said something before.
    pub(super) fn begin(is_partial: bool) -> Self {
        Self { is_partial, ..Self::default() }
    }

    /// What was said before may still come on other lanes. False when it was said on all, and is to be said once more.
    fn said(&mut self, epoch: u64, lanes: u32) -> bool {
        if epoch > self.epoch {
            (self.epoch, self.lanes) = (epoch, 0);
        }
        self.lanes += u32::from(epoch == self.epoch);
        if self.lanes < lanes || self.is_known {
            return true;
        }
        self.is_known = !std::mem::take(&mut self.is_partial);
        self.is_known
    }
}

impl Routing {
    /// [`Routing::set_peers`] told of it last, also where it has left since.
    pub fn is_known(&self, peer: u64) -> bool {
        self.leaving.name_of(peer).is_some()
    }

    pub fn known_of(&self, peer: u64) -> Known {
        let is_interest_known = self.peers.read().get(&peer).is_some_and(|wants| wants.is_known);
        Known { is_up: self.is_up(peer), is_interest_known, has_left: self.leaving.has_left(peer) }
    }

    /// A peer has said all that it wants, on one lane.
    pub(super) fn all_said(&self, from: u64, epoch: u64, lanes: u32) {
        let is_enough = self.peers.write().get_mut(&from).is_none_or(|wants| wants.said(epoch, lanes));
        if !is_enough {
            self.send(from, 0, &Interest::Asked);
        }
        self.count_known();
    }

    /// The peer wants the channel: nothing is numbered in it while that is noted. Where it cannot be told so, as nodes do not
    /// come to know each other at once, it has to say it again.
    pub(super) fn want(&self, from: u64, key: ChannelKey, number: u64, round: u64) {
        self.hub.standing(&key, |sequence, known| {
            let peers = self.peers.read();
            if !peers.contains_key(&from) {
                let mut early = self.early.lock();
                if early.len() < EARLY_MAX {
                    early.insert(from);
                }
                return;
            }
            drop(peers);
            let mut wanting = self.wanted.entry(key.clone()).or_default();
            if !wanting.contains(&from) {
                wanting.push(from);
            }
            drop(wanting);
            let (hash, gone) = (hash_of(&key), self.gone(&known));
            let joined = Interest::Joined { key: key.clone(), number, sequence, round, gone };
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

    use super::super::super::inbound::{Inbound as _, Peer, PresenceSaid};
    use super::super::super::link::{Item, PeerAddr};
    use super::super::fixture::{Node, PEER};
    use super::*;

    #[test]
    fn all_is_known_when_every_lane_has_said_the_same() {
        let mut wants = Wants::default();
        for (epoch, is_known) in [(1, false), (2, false), (1, false), (2, true), (3, true)] {
            assert!(wants.said(epoch, 2));
            assert_eq!(wants.is_known, is_known, "{epoch}");
        }
    }

    fn asked() -> Vec<Item> {
        vec![Item::interest(&Interest::Asked)]
    }

    #[tokio::test]
    async fn interest_of_unknown_peer_is_asked_for_when_it_is_found() {
        let node = Node::new();
        node.is_told_a_want();
        node.finds_the_peer();
        node.has_a_link();
        node.is_told_all(1);
        assert!(!node.knows());
        assert_eq!(node.says(), asked());
        node.is_told_a_want();
        node.is_told_all(2);
        assert!(node.knows());
        assert_eq!(node.says().len(), 1, "that it is forwarded");
    }

    #[tokio::test]
    async fn members_told_before_peer_was_known_are_asked_for_again() {
        let node = Node::new();
        node.routing.presence_said(&node.peer, PresenceSaid::Begun { number: 1, parts: u64::MAX });
        node.routing.set_peers(Vec::new(), Vec::new());
        node.finds_the_peer();
        node.has_a_link();
        node.routing.presence_said(&node.peer, PresenceSaid::Ended { number: 1, lanes: 1 });
        let asked = Item::presence_said(PresenceSaid::Asked { parts: u64::MAX });
        node.routing.ask_for_members(&[PEER]);
        assert_eq!(node.says(), [asked]);
    }

    #[tokio::test]
    async fn peer_that_ends_before_telling_members_makes_node_ask_others() {
        let asked = Item::presence_said(PresenceSaid::Asked { parts: u64::MAX });
        for has_told in [false, true] {
            let node = Node::new();
            let addr = SocketAddr::from(([127, 0, 0, 1], 1));
            let other = Peer { node_id: "n8".into(), incarnation: 8 };
            let of = |peer: &Peer| PeerAddr { peer: peer.clone(), addr };
            node.routing.set_peers(vec![of(&node.peer), of(&other)], vec![PEER, 8]);
            node.has_a_link();
            if has_told {
                node.routing.presence_said(&node.peer, PresenceSaid::Begun { number: 1, parts: u64::MAX });
                node.routing.presence_said(&node.peer, PresenceSaid::Ended { number: 1, lanes: 1 });
                while !node.routing.presence.is_known(PEER) {
                    tokio::task::yield_now().await;
                }
            }
            node.routing.set_peers(vec![of(&other)], vec![8]);
            assert_eq!(node.says(), if has_told { vec![] } else { vec![asked.clone()] });
        }
    }

    #[tokio::test]
    async fn peer_is_asked_again_if_forwarding_could_not_be_confirmed() {
        let node = Node::new();
        node.finds_the_peer();
        node.is_told_a_want();
        node.is_told_all(1);
        assert!(!node.knows());
        node.has_a_link();
        node.routing.link(&node.peer, true);
        assert!(node.says().starts_with(&asked()));
        node.is_told_a_want();
        node.is_told_all(2);
        assert!(node.knows());
    }

    #[tokio::test]
    async fn the_hub_is_told_of_batches() {
        let node = Node::new();
        let before = node.routing.hub.batches_apart();
        node.routing.batch_came(usize::MAX);
        assert!(node.routing.hub.batches_apart() < before);
    }
}
