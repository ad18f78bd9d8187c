//! Nodes that end in good order: this one says goodbye when all that it had for others is there, and others do.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep, timeout, timeout_at};

use super::super::inbound::{Answer, Interest, Request};
use super::super::link::{Item, PeerAddr, Receipt};
use super::hand_over::TakingBack;
use super::{Own, Routing};

/// A node that does not say within this how many connections it has is left out.
const LOADS_WAIT: Duration = Duration::from_secs(1);
/// How often it is looked whether a peer has died that does not confirm.
const DEATH_LOOK: Duration = Duration::from_millis(50);

/// Who leaves, and who stays.
pub(super) struct Leaving {
    /// This node does.
    pub(super) has_begun: AtomicBool,
    /// Those that are alive and do not leave.
    pub(super) survivors: Mutex<Vec<u64>>,
    /// Those of them that take clients.
    ready: Mutex<Vec<u64>>,
    /// Of this node's channels, by their numbers, who has taken them over; none where it only knows how far this node is.
    pub(super) handed: Mutex<HashMap<u64, Option<u64>>>,
    pub(super) handing: Semaphore,
    pub(super) taking: Arc<Semaphore>,
    pub(super) taking_back: TakingBack,
    /// The same for rewinds.
    pub(super) rewinding: TakingBack,
    /// The same of those in which others are asked for what they have of runs that have ended.
    pub(super) learning: TakingBack,
    /// Held while members change, so that what comes of two changes does not mix.
    pub(super) changing: Mutex<()>,
    peers: Mutex<Peers>,
}

#[derive(Default)]
struct Peers {
    /// As they were told last, with those that have left.
    members: Vec<PeerAddr>,
    expected: Vec<u64>,
    /// Of each run that leaves, on how many lanes it has said so.
    lanes: HashMap<u64, u32>,
    left: HashSet<u64>,
}

impl Default for Leaving {
    fn default() -> Self {
        let (handing, taking) = super::hand_over::bounds();
        Self {
            has_begun: AtomicBool::new(false),
            survivors: Mutex::default(),
            ready: Mutex::default(),
            handed: Mutex::default(),
            handing,
            taking,
            taking_back: TakingBack::default(),
            rewinding: TakingBack::default(),
            learning: TakingBack::default(),
            changing: Mutex::default(),
            peers: Mutex::default(),
        }
    }
}

impl Leaving {
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

    /// There has been no other node for as long as gossip knows of one.
    pub(super) fn is_alone(&self) -> bool {
        self.peers.lock().members.is_empty()
    }

    /// A member that has said goodbye is none any more, although gossip knows it for a while.
    pub(super) fn without_left(&self) -> (Vec<PeerAddr>, Vec<u64>) {
        let mut peers = self.peers.lock();
        let Peers { members, expected, lanes, left } = &mut *peers;
        let is_member = |run: &u64| members.iter().any(|member| member.peer.incarnation == *run);
        left.retain(is_member);
        lanes.retain(|run, _| is_member(run));
        let members = members.iter().filter(|member| !left.contains(&member.peer.incarnation)).cloned();
        let expected = expected.iter().filter(|run| !left.contains(run)).copied();
        (members.collect(), expected.collect())
    }

    /// The node id of the peer, once, with the last of its lanes.
    fn lane_left(&self, peer: u64, lanes: u32) -> Option<Arc<str>> {
        let node = self.name_of(peer)?;
        let mut peers = self.peers.lock();
        let said = peers.lanes.entry(peer).or_default();
        *said = said.saturating_add(1);
        (*said >= lanes && peers.left.insert(peer)).then_some(node)
    }
}

impl Routing {
    /// The members that are alive and do not leave, and of these who takes clients.
    pub fn set_survivors(&self, survivors: Vec<u64>, ready: Vec<u64>) {
        *self.leaving.survivors.lock() = survivors;
        *self.leaving.ready.lock() = ready;
    }

    /// The number of connections of each node that has room for more clients and answers in time.
    pub async fn loads(&self) -> Vec<u64> {
        let ready = self.leaving.ready.lock().clone();
        let mut loads = Vec::with_capacity(ready.len());
        let mut answers = self.ask(ready, 0, &Request::Load);
        let until = Instant::now() + LOADS_WAIT;
        while let Ok(Some(answer)) = timeout_at(until, answers.next()).await {
            if let Answer::Loaded(connections) = answer {
                loads.push(connections);
            }
        }
        loads
    }

    /// This node leaves; it takes nothing over from now on. False where there is nobody to whom its clients could go.
    pub fn begin_to_leave(&self) -> bool {
        self.leaving.has_begun.store(true, Ordering::Relaxed);
        self.leaving.survivors.lock().iter().any(|peer| self.is_up(*peer))
    }

    /// There is nobody who could be told anything, or who could wait for an answer.
    pub fn is_alone(&self) -> bool {
        self.leaving.is_alone()
    }

    /// Waits until others have all that there was for them, no longer than `wait`, and tells them that nothing follows.
    pub async fn say_goodbye(&self, wait: Duration) {
        let Some(links) = self.links.get() else { return };
        let lanes = u32::try_from(links.lanes()).unwrap_or(u32::MAX);
        let is_all = self.has_handed_over();
        let goodbye = Item::interest(&Interest::Left { lanes, is_all });
        // Those too that gossip is silent about.
        let peers = self.linked();
        if !is_all && !peers.is_empty() {
            tracing::warn!("not all channels were taken over by other nodes");
        }
        let told = peers.into_iter().map(|peer| {
            let receipts = (0..links.lanes()).map(|lane| links.send(peer, lane as u64, &goodbye));
            let receipts: Vec<Receipt> = receipts.collect();
            async move {
                tokio::select! {
                    _ = join_all(receipts) => {}
                    () = self.has_died(peer) => {}
                }
            }
        });
        if timeout(wait, join_all(told)).await.is_err() {
            tracing::warn!("not all other nodes have what there was for them");
        }
    }

    /// Resolves when neither gossip nor a link hears the peer: what it has not confirmed it never will.
    async fn has_died(&self, peer: u64) {
        while self.is_up(peer) || self.expected.lock().contains(&peer) {
            sleep(DEATH_LOOK).await;
        }
    }

    /// A peer has said goodbye on one of its lanes.
    pub(super) fn lane_left(&self, peer: u64, lanes: u32, is_all: bool) {
        let Some(node) = self.leaving.lane_left(peer, lanes) else { return };
        tracing::info!(%node, "a node has left");
        if is_all {
            self.runs.lock().left(peer);
        } else {
            self.deaths.lock().left_something();
        }
        self.has_left(peer);
        self.tenants_left(peer);
        // All that it forwarded is here. It forwarded nothing where it could not be told of the channel: that is lost.
        let is_untold = |own: &Own| !own.confirmed.contains(&peer) && !own.waits.contains(&peer);
        let untold = |own: &BTreeMap<u64, Own>| {
            own.iter().filter(|(_, own)| is_untold(own)).map(|(number, _)| *number).collect::<HashSet<_>>()
        };
        let untold = untold(&self.own.lock());
        if !untold.is_empty() {
            self.hub.gone_in(peer, &untold);
        }
        for own in self.own.lock().values_mut() {
            own.rounds.iter_mut().for_each(|round| round.waits.retain(|waited| *waited != peer));
            for round in own.rounds.extract_if(.., |round| round.waits.is_empty()) {
                round.done.send(()).ok();
            }
        }
        let _changing = self.leaving.changing.lock();
        self.members_changed();
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::Inbound as _;
    use super::super::fixture::{Node, PEER};
    use super::*;

    #[tokio::test]
    async fn a_goodbye_does_not_wait_for_a_peer_that_has_died() {
        let node = Node::new();
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
        let (node, other) = Node::of_three();
        let other = other.incarnation;
        for (ready, asked) in [(vec![PEER, other], 2), (vec![other], 1), (vec![], 0)] {
            node.says();
            node.routing.set_survivors(vec![PEER, other], ready);
            assert!(node.routing.loads().await.is_empty(), "nobody answers");
            assert_eq!(node.says().len(), asked);
        }
    }

    #[tokio::test]
    async fn leaving_node_says_all_only_if_peers_know_its_channels() {
        let node = Node::new();
        node.has_a_link();
        node.finds_the_peer();
        node.is_attached_to();
        let says = async || {
            node.routing.say_goodbye(Duration::ZERO).await;
            let left = [true, false].map(|is_all| Item::interest(&Interest::Left { lanes: 1, is_all }));
            let said = node.says();
            left.map(|item| said.contains(&item))
        };
        assert_eq!(says().await, [true, false], "nothing was numbered there");
        node.says_joined(5, 0, Vec::new());
        assert_eq!(says().await, [false, true]);
        node.routing.leaving.handed.lock().insert(node.number(), None);
        assert_eq!(says().await, [true, false]);
    }

    #[tokio::test]
    async fn left_peer_is_not_expected_but_node_is_not_alone() {
        let node = Node::new();
        assert!(node.routing.is_alone());
        node.has_a_link();
        node.finds_the_peer();
        node.routing.interest(&node.peer, Interest::Left { lanes: 1, is_all: true });
        node.finds_the_peer();
        assert_eq!((node.routing.expected(), node.routing.is_alone()), (0, false));
    }
}
