//! How simulated nodes begin and end, and how they hear of each other.

use std::time::{Duration, Instant};

use super::node::{Node, Settings};
use super::{NODES, NOWHERE, TICK, World};
use crate::cluster::link::{Ending, PeerAddr};
use crate::cluster::membership::State;
use crate::cluster::routing::Standing;

const GOSSIP_EVERY: Duration = Duration::from_millis(250);
/// Two nodes have not the same time.
const CLOCK_MS: u64 = 1_700_000_000_000;
const CLOCKS_APART_MS: u64 = 5_000;

impl World {
    pub(super) fn start_node(&mut self) {
        let (index, run) = (self.nodes.len(), self.random.u64(1..));
        // Now and then more comes than a lane holds.
        let items = if self.random.u8(..6) == 0 { 60 } else { 10_000 };
        let clock_ms = CLOCK_MS + self.random.u64(..CLOCKS_APART_MS) + self.now.as_millis() as u64;
        let mut soon = || self.now + Duration::from_millis(self.random.u64(..2_000));
        let due = [self.now, soon(), soon()];
        let settings = Settings { run, lanes: self.lanes, items, grace: self.grace, clock_ms, due };
        self.nodes.push(Node::start(index, &settings, (self.began + self.ticked).into_std()));
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
            for lane in 0..self.lanes {
                let is_cut = !self.passes(node, other) || !self.passes(other, node);
                self.end_lane(node, other, lane, if is_cut { Ending::Silent } else { Ending::Broken });
                self.cut_one(other, node, lane);
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

    /// A node that died is started again.
    pub(super) fn start_after(&mut self, node: usize) {
        self.successors.insert(node, self.nodes.len());
        self.start_node();
    }

    /// Gossip, and what nodes make of its absence.
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
                self.pulse(node, at);
            }
            self.cut.retain(|_, until| *until > self.ticked);
            for (from, to) in self.cut.keys().copied().collect::<Vec<_>>() {
                // A lane over which nothing comes is given up, by either end.
                if self.nodes[from].is_alive && self.random.u8(..15) == 0 {
                    (0..self.lanes).for_each(|lane| self.cut_one(from, to, lane));
                }
            }
        }
    }

    /// What one node says of itself and of others, to one that is its seed.
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
        let told = self.nodes[from].known.clone();
        let is_new = |other: &usize| {
            *other != to && !self.is_superseded(from, *other) && !self.is_superseded(to, *other)
        };
        let told: Vec<usize> = told.into_iter().filter(is_new).collect();
        self.nodes[to].known.extend(told);
    }

    /// It is answered by a node that runs, and only who has answered is believed.
    fn challenge(&mut self, from: usize, to: usize, at: Instant) {
        if !self.passes(from, to) || !self.nodes[to].is_alive {
            return;
        }
        if let Some(heard) = self.nodes[to].met.get_mut(&from) {
            *heard = at;
        }
        if self.passes(to, from) {
            self.nodes[from].met.insert(to, at);
            self.nodes[from].known.insert(to);
        }
    }

    /// A run of the same node that ended before.
    pub(super) fn is_former_run(&self, node: usize, run: u64) -> bool {
        let of_run = self.nodes.iter().position(|node| node.peer.incarnation == run);
        let mut later = std::iter::successors(of_run, |index| self.successors.get(index).copied());
        later.any(|index| index == node)
    }

    /// A later run of the other one is known there.
    fn is_superseded(&self, node: usize, other: usize) -> bool {
        let mut later = std::iter::successors(self.successors.get(&other), |next| self.successors.get(next));
        later.any(|next| *next == node || self.nodes[node].known.contains(next))
    }

    fn pulse(&mut self, node: usize, at: Instant) {
        let known: Vec<usize> = self.nodes[node].known.iter().copied().collect();
        let members: Vec<usize> =
            known.into_iter().filter(|other| !self.is_superseded(node, *other)).collect();
        let run = |index: &usize| self.nodes[*index].peer.incarnation;
        let runs: Vec<u64> = members.iter().map(run).collect();
        let heard: Vec<(u64, Instant)> =
            self.nodes[node].met.iter().map(|(other, heard)| (run(other), *heard)).collect();
        let liveness = &mut self.nodes[node].liveness;
        liveness.watch(runs.iter().copied(), at);
        heard.into_iter().for_each(|(run, heard)| liveness.heard(run, heard));
        let ask = liveness.tick(at).ask;
        for (run, other) in runs.into_iter().zip(members.iter().copied()) {
            if ask.contains(&run) {
                self.challenge(node, other, at);
            }
        }
        self.look(node, &members);
        self.nodes[node].routing.doubt_the_unreached(at.into());
    }

    /// The node's view of the others, when it has changed.
    fn look(&mut self, node: usize, members: &[usize]) {
        let state = |index: usize| self.nodes[node].liveness.state(self.nodes[index].peer.incarnation);
        let passes = |one: usize, other: usize| self.passes(one, other) && self.passes(other, one);
        let others = || self.alive().into_iter().filter(|index| *index != node);
        let is_elsewhere = |index: usize| {
            let is_heard =
                others().any(|other| other != index && passes(other, index) && passes(node, other));
            self.nodes[index].is_alive && state(index) == State::Dead && is_heard
        };
        let view = members.iter().map(|index| (*index, state(*index), is_elsewhere(*index)));
        let view: Vec<(usize, State, bool)> = view.collect();
        if view == self.nodes[node].view {
            return;
        }
        let run = |index: usize| self.nodes[index].peer.incarnation;
        let alive = view.iter().filter(|(_, state, _)| *state == State::Alive).map(|(index, ..)| run(*index));
        let peers =
            view.iter().map(|(index, ..)| PeerAddr { peer: self.nodes[*index].peer.clone(), addr: NOWHERE });
        self.nodes[node].routing.set_peers(peers.collect(), alive.collect());
        let standing = view.iter().map(|(index, state, is_elsewhere)| Standing {
            incarnation: run(*index),
            is_dead: *state == State::Dead,
            is_draining: false,
            is_elsewhere: *is_elsewhere,
            has_clients: true,
        });
        self.nodes[node].routing.look_for_deaths(&standing.collect::<Vec<_>>());
        self.nodes[node].view = view;
    }
}
