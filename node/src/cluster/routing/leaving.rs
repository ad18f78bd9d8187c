//! Clean ends of nodes: this node says goodbye once its peers have all its items, and handles the goodbyes of peers.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::super::inbound::{InterestMessage, PeerAnswer, PeerRequest};
use super::super::link::{PeerAck, PeerAddr, PeerItem};
use super::handoff::ReplayFetchSlots;
use super::{LocalInterest, Routing};

/// Time after which a node without an answer is left out of the loads.
const LOADS_WAIT: Duration = Duration::from_secs(1);
/// Interval of the check whether a peer that does not confirm is down.
const FAILURE_CHECK_INTERVAL: Duration = Duration::from_millis(50);

/// State of the drain of this node, and of members that drain, have left or stay.
pub(super) struct LeavingNodes {
    /// True once this node drains.
    pub(super) has_begun: AtomicBool,
    /// Members that are alive and do not drain.
    pub(super) survivors: Mutex<Vec<u64>>,
    /// Survivors that accept clients.
    ready: Mutex<Vec<u64>>,
    /// Peer that keeps a channel of this node, by channel number. None if the peer knows only this node's sequence in the channel.
    pub(super) handed_off: Mutex<HashMap<u64, Option<u64>>>,
    pub(super) handing: Semaphore,
    pub(super) taking: Arc<Semaphore>,
    pub(super) replay_fetches: ReplayFetchSlots,
    /// Slots of the replay fetches for rewinds.
    pub(super) rewinding: ReplayFetchSlots,
    /// Slots of the channels in which peers are asked for their sequences of ended incarnations.
    pub(super) learning: ReplayFetchSlots,
    /// Held while members change, so that two changes do not mix.
    pub(super) changing: Mutex<()>,
    peers: Mutex<ReportedMembers>,
}

#[derive(Default)]
struct ReportedMembers {
    /// Members as they were set last, including those that have left.
    members: Vec<PeerAddr>,
    expected: Vec<u64>,
    /// Number of the streams on which an incarnation has said goodbye.
    streams_left: HashMap<u64, u32>,
    left: HashSet<u64>,
}

impl Default for LeavingNodes {
    fn default() -> Self {
        let (handing, taking) = super::handoff::bounds();
        Self {
            has_begun: AtomicBool::new(false),
            survivors: Mutex::default(),
            ready: Mutex::default(),
            handed_off: Mutex::default(),
            handing,
            taking,
            replay_fetches: ReplayFetchSlots::default(),
            rewinding: ReplayFetchSlots::default(),
            learning: ReplayFetchSlots::default(),
            changing: Mutex::default(),
            peers: Mutex::default(),
        }
    }
}

impl LeavingNodes {
    pub(super) fn has_left(&self, peer: u64) -> bool {
        self.peers.lock().left.contains(&peer)
    }

    /// The node id of a member.
    pub(super) fn name_of(&self, peer: u64) -> Option<Arc<str>> {
        let peers = self.peers.lock();
        let member = peers.members.iter().find(|member| member.peer.incarnation == peer);
        member.map(|member| Arc::clone(&member.peer.node_id))
    }

    pub(super) fn set_members(&self, members: Vec<PeerAddr>, expected: Vec<u64>) {
        let mut peers = self.peers.lock();
        (peers.members, peers.expected) = (members, expected);
    }

    /// True if gossip knows no other node, not even one that has left.
    pub(super) fn is_alone(&self) -> bool {
        self.peers.lock().members.is_empty()
    }

    /// Returns the members, and those that are alive, without the ones that have said goodbye. Gossip still reports these for a while.
    pub(super) fn without_left(&self) -> (Vec<PeerAddr>, Vec<u64>) {
        let mut peers = self.peers.lock();
        let ReportedMembers { members, expected, streams_left, left } = &mut *peers;
        let is_member =
            |incarnation: &u64| members.iter().any(|member| member.peer.incarnation == *incarnation);
        left.retain(is_member);
        streams_left.retain(|incarnation, _| is_member(incarnation));
        let members = members.iter().filter(|member| !left.contains(&member.peer.incarnation)).cloned();
        let expected = expected.iter().filter(|incarnation| !left.contains(incarnation)).copied();
        (members.collect(), expected.collect())
    }

    /// Counts a goodbye. Returns the node id of the peer once, with the goodbye on its last stream.
    fn stream_left(&self, peer: u64, streams: u32) -> Option<Arc<str>> {
        let node = self.name_of(peer)?;
        let mut peers = self.peers.lock();
        let streams_left = peers.streams_left.entry(peer).or_default();
        *streams_left = streams_left.saturating_add(1);
        (*streams_left >= streams && peers.left.insert(peer)).then_some(node)
    }
}

impl Routing {
    /// Sets the members that are alive and do not drain, and those of them that accept clients.
    pub fn set_survivors(&self, survivors: Vec<u64>, ready: Vec<u64>) {
        *self.leaving.survivors.lock() = survivors;
        *self.leaving.ready.lock() = ready;
    }

    /// Asks the nodes that accept clients for their number of connections, and leaves out those that do not answer in time.
    pub async fn loads(&self) -> Vec<u64> {
        let ready = self.leaving.ready.lock().clone();
        let mut loads = Vec::with_capacity(ready.len());
        let mut answers = self.ask(ready, 0, &PeerRequest::Load);
        let until = Instant::now() + LOADS_WAIT;
        while let Ok(Some(answer)) = timeout_at(until, answers.next()).await {
            if let PeerAnswer::Loaded(connections) = answer {
                loads.push(connections);
            }
        }
        loads
    }

    /// Begins the drain: from now on this node accepts no handoff. False if there is no node to which its clients could go.
    pub fn begin_to_leave(&self) -> bool {
        self.leaving.has_begun.store(true, Ordering::Relaxed);
        self.leaving.survivors.lock().iter().any(|peer| self.is_up(*peer))
    }

    /// True if no other node could be told anything or could await an answer.
    pub fn is_alone(&self) -> bool {
        self.leaving.is_alone()
    }

    /// Says goodbye to all peers, and waits for at most `wait` until they have all items of this node.
    pub async fn say_goodbye(&self, wait: Duration) {
        let Some(links) = self.links.get() else { return };
        let streams = u32::try_from(links.stream_count()).unwrap_or(u32::MAX);
        let is_all = self.has_handed_off();
        let goodbye = PeerItem::interest(&InterestMessage::Goodbye { streams, is_all });
        // Includes linked peers that gossip does not see.
        let peers = self.linked();
        if !is_all && !peers.is_empty() {
            tracing::warn!("channel handoff incomplete");
        }
        let acked = peers.into_iter().map(|peer| {
            let acks = (0..links.stream_count()).map(|stream| links.send(peer, stream as u64, &goodbye));
            let acks: Vec<PeerAck> = acks.collect();
            async move {
                tokio::select! {
                    _ = join_all(acks) => {}
                    () = self.until_down(peer) => {}
                }
            }
        });
        if timeout(wait, join_all(acked)).await.is_err() {
            tracing::warn!("peer acks missing at stop");
        }
    }

    /// Resolves when the peer has no link and is not alive by gossip, so that it will not confirm anything more.
    async fn until_down(&self, peer: u64) {
        while self.is_up(peer) || self.expected.lock().contains(&peer) {
            sleep(FAILURE_CHECK_INTERVAL).await;
        }
    }

    /// Takes the goodbye of a peer on one of its streams.
    pub(super) fn peer_stream_left(&self, peer: u64, streams: u32, is_all: bool) {
        let Some(node) = self.leaving.stream_left(peer, streams) else { return };
        tracing::info!(%node, "peer left");
        if is_all {
            self.incarnations.lock().left(peer);
        } else {
            self.node_failures.lock().record_incomplete_handoff();
        }
        self.mark_left(peer);
        self.tenants_left(peer);
        // All messages that the peer forwarded are here. In a channel whose interest could not be sent to the peer, its messages are lost
        // here.
        let is_unannounced =
            |own: &LocalInterest| !own.confirmed.contains(&peer) && !own.waits.contains(&peer);
        let unannounced = |own: &BTreeMap<u64, LocalInterest>| {
            own.iter()
                .filter(|(_, own)| is_unannounced(own))
                .map(|(number, _)| *number)
                .collect::<HashSet<_>>()
        };
        let unannounced = unannounced(&self.local_interest.lock());
        if !unannounced.is_empty() {
            self.hub.abandon_incarnation_in(peer, &unannounced);
        }
        for own in self.local_interest.lock().values_mut() {
            own.rounds.iter_mut().for_each(|round| round.waits.retain(|waited| *waited != peer));
            for round in own.rounds.extract_if(.., |round| round.waits.is_empty()) {
                round.done.send(()).ok();
            }
        }
        let _changing = self.leaving.changing.lock();
        self.apply_members();
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::Inbound as _;
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::*;

    #[tokio::test]
    async fn a_goodbye_does_not_wait_for_a_peer_that_has_died() {
        let node = RoutingTestNode::new();
        node.has_a_link();
        node.finds_the_peer();
        let begun = Instant::now();
        let dies = async {
            sleep(Duration::from_millis(100)).await;
            // It may come back.
            node.loses_its_links();
            sleep(Duration::from_millis(200)).await;
            node.loses_the_peer();
        };
        tokio::join!(node.routing.say_goodbye(Duration::from_secs(60)), dies);
        let waited = begun.elapsed();
        assert!(waited >= Duration::from_millis(300) && waited < Duration::from_secs(30), "{waited:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn peer_that_takes_no_clients_is_not_asked_for_its_load() {
        let (node, other) = RoutingTestNode::of_three();
        let other = other.incarnation;
        for (ready, requests) in [(vec![PEER, other], 2), (vec![other], 1), (vec![], 0)] {
            node.says();
            node.routing.set_survivors(vec![PEER, other], ready);
            assert!(node.routing.loads().await.is_empty(), "nobody answers");
            assert_eq!(node.says().len(), requests);
        }
    }

    #[tokio::test]
    async fn leaving_node_says_all_only_if_peers_know_its_channels() {
        let node = RoutingTestNode::new();
        node.has_a_link();
        node.finds_the_peer();
        node.is_attached_to();
        let says = async || {
            node.routing.say_goodbye(Duration::ZERO).await;
            let left = [true, false]
                .map(|is_all| PeerItem::interest(&InterestMessage::Goodbye { streams: 1, is_all }));
            let items = node.says();
            left.map(|item| items.contains(&item))
        };
        assert_eq!(says().await, [true, false], "nothing was numbered there");
        node.says_joined(5, 0, Vec::new());
        assert_eq!(says().await, [false, true]);
        node.routing.leaving.handed_off.lock().insert(node.number(), None);
        assert_eq!(says().await, [true, false]);
    }

    #[tokio::test]
    async fn left_peer_is_not_expected_but_node_is_not_alone() {
        let node = RoutingTestNode::new();
        assert!(node.routing.is_alone());
        node.has_a_link();
        node.finds_the_peer();
        node.routing.interest(&node.peer, InterestMessage::Goodbye { streams: 1, is_all: true });
        node.finds_the_peer();
        assert_eq!((node.routing.expected(), node.routing.is_alone()), (0, false));
    }
}
