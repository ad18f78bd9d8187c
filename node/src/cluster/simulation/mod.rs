//! A cluster in one process and without a clock: nodes, the lanes between them and their clients take turns as a seed has it.
//!
//! Channels, routing, lanes and liveness are those of a node. What is simulated is the network, which is slow, cut and healed at
//! any moment, the shards, and the clients. Afterwards everything is mended, and each client must have seen all that it
//! could rely on: once, in order, and without a gap that it was not told of.
//!
//! `SIMULATION_SEED=7 cargo test -p fanfare --lib simulation` runs one seed alone.

mod check;
mod client;
mod net;
mod node;

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use check::{Log, check};
use client::{At, Client};
use net::{LANES, Late};
use node::Node;
use parking_lot::Mutex;

use super::link::PeerAddr;
use super::membership::State;
use super::routing::Standing;
use crate::accounts::Account;
use crate::model::{AccountId, ChannelKey, ChannelName, ConnectionId, Draft};
use crate::publish::PublishRequest;

const SEEDS: u64 = 50;
const THREADS: usize = 10;
const NODES: usize = 3;
const CLIENTS: usize = 6;
const CHANNELS: usize = 2;
const STEPS: usize = 4_000;
/// Of settling; more are needed only where something waits for the clock.
const ROUNDS_QUICK: usize = 400;
const TICK: Duration = Duration::from_millis(100);
/// No address is ever used.
const NOWHERE: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 9);

#[test]
fn nobody_misses_anything_unheard() {
    let seeds = match std::env::var("SIMULATION_SEED") {
        Ok(seed) => {
            let seed = seed.parse().expect("a seed is a number");
            seed..seed + 1
        }
        Err(_) => 0..SEEDS,
    };
    let seeds: Vec<u64> = seeds.collect();
    // What waits for the clock in one run does not hold up the others.
    let worlds = std::thread::scope(|scope| {
        let runs = seeds
            .chunks(seeds.len().div_ceil(THREADS))
            .map(|seeds| scope.spawn(|| seeds.iter().map(|seed| Outcome::of(*seed)).collect::<Vec<_>>()));
        let runs: Vec<_> = runs.collect();
        runs.into_iter().flat_map(|run| run.join().expect("a seed that failed says so")).collect::<Vec<_>>()
    });
    let sum = |of: fn(&Outcome) -> usize| worlds.iter().map(of).sum::<usize>();
    let (seen, resumed, told) = (sum(|one| one.seen), sum(|one| one.resumed), sum(|one| one.told));
    println!("{seen} deliveries, {resumed} attaches resumed, {told} told that something may be missing");
    let is_one = worlds.len() == 1;
    assert!(is_one || seen > 0 && 2 * resumed > told, "it is of little use when most are told that");
}

/// What came of one seed.
struct Outcome {
    seen: usize,
    resumed: usize,
    told: usize,
}

impl Outcome {
    fn of(seed: u64) -> Self {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let world = runtime.expect("a runtime starts").block_on(World::run(seed));
        let clients = &world.clients;
        let epochs = clients.iter().flat_map(|client| client.epochs.values().flatten());
        Self {
            seen: epochs.map(|epoch| epoch.seen.len()).sum(),
            resumed: clients.iter().map(|client| client.counts.resumed).sum(),
            told: clients.iter().map(|client| client.counts.told).sum(),
        }
    }
}

struct World {
    seed: u64,
    random: fastrand::Rng,
    began: Instant,
    now: Duration,
    ticked: Duration,
    nodes: Vec<Node>,
    clients: Vec<Client>,
    keys: Vec<ChannelKey>,
    logs: Vec<Arc<Mutex<Log>>>,
    /// From the one to the other nothing passes.
    cut: BTreeSet<(usize, usize)>,
    late: Vec<Late>,
    /// The next runs of nodes that died.
    successors: BTreeMap<usize, usize>,
    is_calm: bool,
}

impl World {
    async fn run(seed: u64) -> Self {
        let key =
            |index: usize| ChannelKey::new(AccountId::new("acme"), ChannelName::of(&format!("c{index}")));
        let mut world = Self {
            seed,
            random: fastrand::Rng::with_seed(seed),
            began: Instant::now(),
            now: Duration::ZERO,
            ticked: Duration::ZERO,
            nodes: Vec::new(),
            clients: (0..CLIENTS).map(|_| Client::default()).collect(),
            keys: (0..CHANNELS).map(key).collect(),
            logs: (0..CHANNELS).map(|_| Arc::default()).collect(),
            cut: BTreeSet::new(),
            late: Vec::new(),
            successors: BTreeMap::new(),
            is_calm: true,
        };
        for _ in 0..NODES {
            world.start_node();
        }
        world.settle().await;
        world.is_calm = false;
        for _ in 0..STEPS {
            world.step();
            tokio::task::yield_now().await;
        }
        world.mend();
        world.settle().await;
        world.publish_everywhere();
        world.settle().await;
        world.check();
        world
    }

    fn start_node(&mut self) {
        let (index, run) = (self.nodes.len(), self.random.u64(1..));
        // Now and then more comes than a lane holds.
        let items = if self.random.u8(..6) == 0 { 30 } else { 10_000 };
        self.nodes.push(Node::start(index, run, items, self.began + self.ticked));
    }

    fn alive(&self) -> Vec<usize> {
        (0..self.nodes.len()).filter(|index| self.nodes[*index].is_alive).collect()
    }

    fn any_alive(&mut self) -> usize {
        let alive = self.alive();
        alive[self.random.usize(..alive.len())]
    }

    fn step(&mut self) {
        self.now += Duration::from_millis(self.random.u64(..10));
        self.tick();
        match self.random.u32(..1000) {
            0..700 => self.move_lane(),
            700..800 => self.publish(),
            800..920 => {
                let client = self.random.usize(..CLIENTS);
                self.clients[client].turn(self.now);
            }
            920..955 => self.reconnect(),
            955..970 => {
                let (client, channel) = (self.random.usize(..CLIENTS), self.random.usize(..CHANNELS));
                self.clients[client].attach(&self.keys[channel].clone(), self.now);
            }
            970..982 => self.late_arrival(),
            982..989 => self.cut_lane(),
            989..991 => self.change_network(),
            991..998 => self.cut.clear(),
            _ => self.kill_and_start(),
        }
    }

    /// Heartbeats, and what nodes make of their absence.
    fn tick(&mut self) {
        while self.ticked + TICK <= self.now {
            self.ticked += TICK;
            let at = self.began + self.ticked;
            let alive = self.alive();
            for to in alive.iter().copied() {
                for from in alive.iter().copied().filter(|from| *from != to) {
                    if !self.cut.contains(&(from, to)) {
                        self.nodes[to].known.insert(from);
                    }
                }
                let runs: Vec<u64> =
                    self.nodes[to].known.iter().map(|known| self.nodes[*known].peer.incarnation).collect();
                self.nodes[to].liveness.watch(runs.iter().copied(), at);
                for from in alive.iter().copied().filter(|from| *from != to) {
                    if !self.cut.contains(&(from, to)) {
                        let run = self.nodes[from].peer.incarnation;
                        self.nodes[to].liveness.heard(run, at);
                    }
                }
                self.nodes[to].liveness.tick(at);
                self.look(to);
            }
            for (from, to) in self.cut.clone() {
                // A lane over which nothing comes is given up, by either end.
                if self.nodes[from].is_alive && self.random.u8(..15) == 0 {
                    (0..LANES).for_each(|lane| self.cut_one(from, to, lane));
                }
            }
        }
    }

    /// The node's view of the others, when it has changed.
    fn look(&mut self, node: usize) {
        let state =
            |known: &usize| (*known, self.nodes[node].liveness.state(self.nodes[*known].peer.incarnation));
        let known = &self.nodes[node].known;
        let is_last = |index: &&usize| self.successors.get(index).is_none_or(|next| !known.contains(next));
        let view: Vec<(usize, State)> = known.iter().filter(is_last).map(state).collect();
        if view == self.nodes[node].view {
            return;
        }
        let run = |index: usize| self.nodes[index].peer.incarnation;
        let alive = view.iter().filter(|(_, state)| *state == State::Alive).map(|(index, _)| run(*index));
        let peers =
            view.iter().map(|(index, _)| PeerAddr { peer: self.nodes[*index].peer.clone(), addr: NOWHERE });
        self.nodes[node].routing.set_peers(peers.collect(), alive.collect());
        let standing = view.iter().map(|(index, state)| Standing {
            incarnation: run(*index),
            is_dead: *state == State::Dead,
            is_draining: false,
        });
        self.nodes[node].routing.look_for_deaths(&standing.collect::<Vec<_>>());
        self.nodes[node].view = view;
    }

    fn pair(&mut self) -> Option<(usize, usize)> {
        let from = self.any_alive();
        let others: Vec<usize> = self.nodes[from].known.iter().copied().collect();
        let to = *others.get(self.random.usize(..others.len().max(1)))?;
        Some((from, to))
    }

    fn move_lane(&mut self) {
        let Some((from, to)) = self.pair() else { return };
        let (lane, what) = (self.random.usize(..LANES), self.random.u8(..3));
        self.move_one(from, to, lane, what);
    }

    fn move_one(&mut self, from: usize, to: usize, lane: usize, what: u8) {
        let Some(link) = self.nodes[from].links.link(self.nodes[to].peer.incarnation) else { return };
        if !link.is_open(lane) {
            let passes = !self.cut.contains(&(from, to)) && !self.cut.contains(&(to, from));
            if passes && self.nodes[to].is_alive {
                link.open(lane, &self.nodes[from].side(), &self.nodes[to].side());
            }
            return;
        }
        let is_open = match what {
            0 => link.send(lane),
            1 if self.cut.contains(&(from, to)) || !self.nodes[to].is_alive => true,
            1 => link.arrive(lane, &*self.nodes[to].routing),
            _ => {
                if !self.cut.contains(&(to, from)) {
                    link.confirm(lane);
                }
                true
            }
        };
        if !is_open {
            self.cut_one(from, to, lane);
        }
    }

    fn cut_lane(&mut self) {
        let Some((from, to)) = self.pair() else { return };
        let lane = self.random.usize(..LANES);
        self.cut_one(from, to, lane);
    }

    fn cut_one(&mut self, from: usize, to: usize, lane: usize) {
        self.end_lane(from, to, lane, false);
    }

    /// Unless it is `whole`, the sender may live on, and acknowledge what it cannot send.
    fn end_lane(&mut self, from: usize, to: usize, lane: usize, whole: bool) {
        let Some(link) = self.nodes[from].links.link(self.nodes[to].peer.incarnation) else { return };
        let Some(mut late) = link.cut(lane, &self.nodes[from].side(), whole) else { return };
        // What was on its way may be read after the sender is gone.
        if self.random.bool() {
            return self.late.push(late);
        }
        if !whole {
            late.drop_all();
        }
        if self.nodes[to].is_alive {
            while late.arrive(&*self.nodes[to].routing) {}
        }
    }

    fn late_arrival(&mut self) {
        if self.late.is_empty() {
            return;
        }
        let index = self.random.usize(..self.late.len());
        let to = self.nodes.iter().find(|node| node.peer.incarnation == self.late[index].to());
        let is_over = to.is_none_or(|to| !to.is_alive || !self.late[index].arrive(&*to.routing));
        if is_over {
            self.late.swap_remove(index);
        }
    }

    fn change_network(&mut self) {
        let (from, to) = (self.any_alive(), self.any_alive());
        if from != to {
            self.cut.insert((from, to));
            if self.random.bool() {
                self.cut.insert((to, from));
            }
        }
    }

    fn kill_and_start(&mut self) {
        if self.nodes.len() >= 3 * NODES {
            return;
        }
        let node = self.any_alive();
        for other in self.alive().into_iter().filter(|other| *other != node) {
            for lane in 0..LANES {
                let is_cut = self.cut.contains(&(node, other)) || self.cut.contains(&(other, node));
                self.end_lane(node, other, lane, !is_cut);
                self.cut_one(other, node, lane);
            }
        }
        self.nodes[node].is_alive = false;
        let successor = self.nodes.len();
        self.successors.insert(node, successor);
        for client in &mut self.clients {
            if client.at.as_ref().is_some_and(|at| at.node == node) {
                if self.random.bool() {
                    client.turn(self.now);
                }
                client.disconnect(false);
            }
        }
        self.start_node();
    }

    fn reconnect(&mut self) {
        let index = self.random.usize(..CLIENTS);
        let alive =
            |client: &Client, nodes: &[Node]| client.at.as_ref().is_some_and(|at| nodes[at.node].is_alive);
        let is_alive = alive(&self.clients[index], &self.nodes);
        self.clients[index].disconnect(is_alive);
        if self.is_calm || self.random.u8(..4) > 0 {
            let node = self.any_alive();
            self.connect(index, node);
        }
    }

    fn connect(&mut self, client: usize, node: usize) {
        let Node { hub, routing, tasks, mailboxes, .. } = &self.nodes[node];
        let (hub, routing, tasks) = (Arc::clone(hub), Arc::clone(routing), Arc::clone(tasks));
        let mailbox = Arc::clone(&mailboxes[client]);
        self.clients[client].connect(At { node, slot: client, hub, routing, tasks, mailbox }, self.now);
    }

    fn publish(&mut self) {
        let (node, channel) = (self.any_alive(), self.random.usize(..CHANNELS));
        let count = self.random.usize(1..4);
        self.publish_on(node, channel, count);
    }

    fn publish_on(&mut self, node: usize, channel: usize, count: usize) {
        let request = PublishRequest {
            key: self.keys[channel].clone(),
            account: Arc::new(Account::plain("acme")),
            key_name: "k".into(),
            connection_id: ConnectionId::from_bytes([9; 16]),
            client_id: None,
            messages: vec![Draft::default(); count],
        };
        let Node { publisher, hub, .. } = &self.nodes[node];
        let (log, run) = (Arc::clone(&self.logs[channel]), hub.incarnation());
        let acked = Arc::clone(&log);
        let done = move |result: Result<crate::publish::PublishAck, _>| {
            for stamp in result.expect("the store takes all").stamps {
                acked.lock().entry((stamp.incarnation, stamp.sequence)).or_default().acked = true;
            }
        };
        publisher.publish(request, false, Box::new(done));
        let last = hub.position(&self.keys[channel]).own.sequence;
        for sequence in last + 1 - count as u64..=last {
            log.lock().entry((run, sequence)).or_default().at = self.now;
        }
    }

    /// From here on nothing is cut, and every client is connected.
    fn mend(&mut self) {
        self.is_calm = true;
        self.cut.clear();
        for client in 0..CLIENTS {
            if self.clients[client].at.is_none() {
                let node = self.any_alive();
                self.connect(client, node);
            }
        }
    }

    fn publish_everywhere(&mut self) {
        for node in self.alive() {
            (0..CHANNELS).for_each(|channel| self.publish_on(node, channel, 1));
        }
    }

    /// Until nothing moves any more.
    async fn settle(&mut self) {
        for round in 0..2_000 {
            self.now += Duration::from_millis(20);
            self.tick();
            while !self.late.is_empty() {
                self.late_arrival();
            }
            let alive = self.alive();
            for from in alive.iter().copied() {
                for to in alive.iter().copied().filter(|to| *to != from) {
                    for lane in 0..LANES {
                        (0..3).for_each(|what| self.move_one(from, to, lane, what));
                    }
                }
            }
            self.clients.iter_mut().for_each(|client| client.turn(self.now));
            for _ in 0..4 {
                tokio::task::yield_now().await;
            }
            if self.unsettled().is_none() {
                return;
            }
            if round > ROUNDS_QUICK {
                // Somebody waits for an answer that does not come, which ends by the clock.
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        }
        assert_eq!(self.unsettled(), None, "seed {}: it does not settle", self.seed);
    }

    /// What is still under way.
    fn unsettled(&self) -> Option<String> {
        let alive = self.alive();
        for from in alive.iter().copied() {
            for to in alive.iter().copied().filter(|to| *to != from) {
                let link = self.nodes[from].links.link(self.nodes[to].peer.incarnation);
                let Some(link) = link.filter(|link| link.is_up()) else {
                    return Some(format!("the link from {from} to {to} is not up"));
                };
                if !(0..LANES).all(|lane| link.is_idle(lane)) {
                    return Some(format!("the link from {from} to {to} is not idle"));
                }
            }
            if !self.nodes[from].routing.is_complete() {
                return Some(format!("{from} does not know all that the others want"));
            }
        }
        let unsettled = |client: &&Client| client.at.is_some() && !client.is_settled();
        self.clients.iter().find(unsettled).map(|client| format!("a client is not settled: {client:?}"))
    }

    fn check(&self) {
        let living: BTreeSet<u64> =
            self.alive().into_iter().map(|node| self.nodes[node].peer.incarnation).collect();
        for (index, client) in self.clients.iter().enumerate() {
            for (channel, key) in self.keys.iter().enumerate() {
                let log = self.logs[channel].lock();
                let epochs = client.epochs.get(key).map_or(&[][..], Vec::as_slice);
                for (number, epoch) in epochs.iter().enumerate() {
                    let is_last = number + 1 == epochs.len();
                    let at = format!("seed {}, client {index}, channel {channel}, epoch {number}", self.seed);
                    check(&at, epoch, &log, &living, is_last);
                }
            }
        }
    }
}
