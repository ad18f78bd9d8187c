//! Life cycle of simulated nodes, and their gossip.

use std::time::{Duration, Instant};

use super::node::{SimNode, SimNodeSettings};
use super::{NODES, NOWHERE, SimWorld, TICK};
use crate::cluster::link::{PeerAddr, StreamEnd};
use crate::cluster::membership::LivenessState;
use crate::cluster::routing::GossipStatus;

const GOSSIP_EVERY: Duration = Duration::from_millis(250);
/// Start of the nodes' clocks. No two nodes have the same time.
const CLOCK_MS: u64 = 1_700_000_000_000;
const CLOCKS_APART_MS: u64 = 5_000;

impl SimWorld {
    pub(super) fn start_node(&mut self) {
        let (index, incarnation) = (self.nodes.len(), self.random.u64(1..));
        // Under some seeds more items come than a stream's queue holds.
        let items = if self.random.u8(..6) == 0 { 60 } else { 10_000 };
        let clock_ms = CLOCK_MS + self.random.u64(..CLOCKS_APART_MS) + self.now.as_millis() as u64;
        let mut soon = || self.now + Duration::from_millis(self.random.u64(..2_000));
        let due = [self.now, soon(), soon()];
        let settings = SimNodeSettings {
            incarnation,
            stream_count: self.stream_count,
            items,
            presence_timeout: self.presence_timeout,
            clock_ms,
            due,
        };
        self.nodes.push(SimNode::start(index, &settings, (self.began + self.ticked).into_std()));
    }

    pub(super) fn alive(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|index| self.nodes[*index].is_alive).collect()
    }

    pub(super) fn any_alive(&mut self) -> usize {
        let alive = self.alive();
        alive[self.random.usize(..alive.len())]
    }

    pub(super) fn kill_and_start(&mut self) {
        if self.nodes.len() >= 3 * NODES {
            return;
        }
        let node = self.any_alive();
        self.kill(node);
        self.start_after(node);
    }

    pub(super) fn kill(&mut self, node: usize) {
        for other in self.alive().into_iter().filter(|other| *other != node) {
            for stream in 0..self.stream_count {
                let is_cut = !self.passes(node, other) || !self.passes(other, node);
                self.end_stream(
                    node,
                    other,
                    stream,
                    if is_cut { StreamEnd::Silent } else { StreamEnd::Broken },
                );
                self.cut_one(other, node, stream);
            }
        }
        self.nodes[node].is_alive = false;
        for client in &mut self.clients {
            if client.at.as_ref().is_some_and(|at| at.node == node) {
                if self.random.bool() {
                    client.turn(self.now);
                }
                client.disconnect(false);
            }
        }
    }

    /// Restarts a failed node.
    pub(super) fn start_after(&mut self, node: usize) {
        self.successors.insert(node, self.nodes.len());
        self.start_node();
    }

    /// Runs gossip and failure detection.
    pub(super) fn tick(&mut self) {
        while self.ticked + TICK <= self.now {
            self.ticked += TICK;
            let at = (self.began + self.ticked).into_std();
            let alive = self.alive();
            for node in alive.iter().copied() {
                self.nodes[node].clock.pass_to(self.nodes[node].clock.now_ms() + TICK.as_millis() as u64);
                if self.nodes[node].due[0] <= self.ticked {
                    self.nodes[node].due[0] += GOSSIP_EVERY;
                    alive.iter().filter(|to| **to != node).for_each(|to| self.gossip(node, *to, at));
                }
            }
            for node in alive {
                self.tick_node(node, at);
            }
            self.cut.retain(|_, until| *until > self.ticked);
            for (from, to) in self.cut.keys().copied().collect::<Vec<_>>() {
                // Either end gives up a stream over which nothing arrives.
                if self.nodes[from].is_alive && self.random.u8(..15) == 0 {
                    (0..self.stream_count).for_each(|stream| self.cut_one(from, to, stream));
                }
            }
        }
    }

    /// Gossip of one node about itself and others, sent to a node that is its seed.
    fn gossip(&mut self, from: usize, to: usize, at: Instant) {
        if !self.nodes[from].met.contains_key(&to) {
            return self.challenge(from, to, at);
        }
        if !self.passes(from, to) {
            return;
        }
        if !self.nodes[to].met.contains_key(&from) {
            return self.challenge(to, from, at);
        }
        self.nodes[to].met.insert(from, at);
        let known = self.nodes[from].known.clone();
        let is_new = |other: &usize| {
            *other != to && !self.is_superseded(from, *other) && !self.is_superseded(to, *other)
        };
        let known: Vec<usize> = known.into_iter().filter(is_new).collect();
        self.nodes[to].known.extend(known);
    }

    /// Challenge of a node. Only a running node answers, and only a node that has answered is believed.
    fn challenge(&mut self, from: usize, to: usize, at: Instant) {
        if !self.passes(from, to) || !self.nodes[to].is_alive {
            return;
        }
        if let Some(last_seen) = self.nodes[to].met.get_mut(&from) {
            *last_seen = at;
        }
        if self.passes(to, from) {
            self.nodes[from].met.insert(to, at);
            self.nodes[from].known.insert(to);
        }
    }

    /// True if this is an earlier incarnation of the same node, which has ended.
    pub(super) fn is_earlier_incarnation(&self, node: usize, incarnation: u64) -> bool {
        let of_incarnation = self.nodes.iter().position(|node| node.peer.incarnation == incarnation);
        let mut later = std::iter::successors(of_incarnation, |index| self.successors.get(index).copied());
        later.any(|index| index == node)
    }

    /// True if the node knows a later incarnation of the other one.
    fn is_superseded(&self, node: usize, other: usize) -> bool {
        let mut later = std::iter::successors(self.successors.get(&other), |next| self.successors.get(next));
        later.any(|next| *next == node || self.nodes[node].known.contains(next))
    }

    fn tick_node(&mut self, node: usize, at: Instant) {
        let known: Vec<usize> = self.nodes[node].known.iter().copied().collect();
        let members: Vec<usize> =
            known.into_iter().filter(|other| !self.is_superseded(node, *other)).collect();
        let incarnation_of = |index: &usize| self.nodes[*index].peer.incarnation;
        let incarnations: Vec<u64> = members.iter().map(incarnation_of).collect();
        let last_seen: Vec<(u64, Instant)> = self.nodes[node]
            .met
            .iter()
            .map(|(other, last_seen)| (incarnation_of(other), *last_seen))
            .collect();
        let liveness = &mut self.nodes[node].liveness;
        liveness.watch(incarnations.iter().copied(), at);
        last_seen
            .into_iter()
            .for_each(|(incarnation, last_seen)| liveness.record_seen(incarnation, last_seen));
        let to_probe = liveness.tick(at).to_probe;
        for (incarnation, other) in incarnations.into_iter().zip(members.iter().copied()) {
            if to_probe.contains(&incarnation) {
                self.challenge(node, other, at);
            }
        }
        self.look(node, &members);
        self.nodes[node].routing.mark_unreachable_in_doubt(at.into());
    }

    /// Publishes the node's view of the others, if it has changed.
    fn look(&mut self, node: usize, members: &[usize]) {
        let state = |index: usize| self.nodes[node].liveness.state(self.nodes[index].peer.incarnation);
        let passes = |one: usize, other: usize| self.passes(one, other) && self.passes(other, one);
        let others = || self.alive().into_iter().filter(|index| *index != node);
        let is_seen_by_others = |index: usize| {
            let is_seen = others().any(|other| other != index && passes(other, index) && passes(node, other));
            self.nodes[index].is_alive && state(index) == LivenessState::Down && is_seen
        };
        let view = members.iter().map(|index| (*index, state(*index), is_seen_by_others(*index)));
        let view: Vec<(usize, LivenessState, bool)> = view.collect();
        if view == self.nodes[node].view {
            return;
        }
        let incarnation_of = |index: usize| self.nodes[index].peer.incarnation;
        let alive = view
            .iter()
            .filter(|(_, state, _)| *state == LivenessState::Alive)
            .map(|(index, ..)| incarnation_of(*index));
        let peers =
            view.iter().map(|(index, ..)| PeerAddr { peer: self.nodes[*index].peer.clone(), addr: NOWHERE });
        self.nodes[node].routing.set_peers(peers.collect(), alive.collect());
        let statuses = view.iter().map(|(index, state, is_seen_by_others)| GossipStatus {
            incarnation: incarnation_of(*index),
            is_down: *state == LivenessState::Down,
            is_draining: false,
            is_seen_by_others: *is_seen_by_others,
            has_clients: true,
        });
        self.nodes[node].routing.update_node_failures(&statuses.collect::<Vec<_>>());
        self.nodes[node].view = view;
    }
}
