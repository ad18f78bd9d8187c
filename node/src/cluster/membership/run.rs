//! The thread of membership: gossip, probes and their answers, and nothing else.

use std::collections::HashSet;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, NodeState, spawn_chitchat,
};
use tokio::sync::watch;

use super::facts::{Facts, Member, Members};
use super::liveness::{Liveness, State};
use super::transport::Wire;
use crate::cluster::names::Names;

const GOSSIP_EVERY: Duration = Duration::from_millis(250);
/// How often silence is looked at.
const PULSE_EVERY: Duration = Duration::from_millis(100);
const SEEDS_EVERY: Duration = Duration::from_secs(1);
/// A seed that was heard within this is not asked who it is.
const SEED_QUIET: Duration = Duration::from_millis(1_500);
const DEAD_LAST: Duration = Duration::from_secs(15 * 60);
const TELL_EVERY: Duration = Duration::from_secs(60);
const CLUSTER: &str = "fanfare";

/// What the thread has of its node.
pub(super) struct Run {
    pub(super) wire: Wire,
    pub(super) node_id: Arc<str>,
    pub(super) incarnation: u64,
    pub(super) generation: u64,
    pub(super) advertise: SocketAddr,
    pub(super) seeds: Vec<String>,
    pub(super) names: Names,
    pub(super) facts: watch::Receiver<Facts>,
    pub(super) members: watch::Sender<Arc<Members>>,
    pub(super) told: Option<Instant>,
}

impl Run {
    /// Ends by being dropped.
    pub(super) async fn run(mut self) {
        let (seeds, names) = (std::mem::take(&mut self.seeds), std::mem::take(&mut self.names));
        let seeds = seek(self.wire.clone(), seeds, self.advertise, names);
        let gossip = async {
            loop {
                let again = match self.gossip().await {
                    Ok(generation) => generation,
                    Err(error) => {
                        tracing::error!(%error, "gossip has ended and begins anew");
                        tokio::time::sleep(SEEDS_EVERY).await;
                        self.generation + 1
                    }
                };
                self.generation = again;
            }
        };
        tokio::join!(seeds, gossip);
    }

    /// Gossips until it must do so as a later generation, which it returns.
    async fn gossip(&mut self) -> anyhow::Result<u64> {
        let chitchat_id = ChitchatId::new(&*self.node_id, self.generation, self.advertise);
        let entries = self.facts.borrow_and_update().entries(self.incarnation);
        let entries = entries.into_iter().map(|(key, text)| (key.to_owned(), text)).collect();
        let handle = spawn_chitchat(self.config(chitchat_id), entries, &self.wire).await?;
        let mut liveness = Liveness::new(PULSE_EVERY, Instant::now());
        let mut pulse = tokio::time::interval(PULSE_EVERY);
        pulse.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ended = Box::pin(handle.termination_watcher());
        loop {
            tokio::select! {
                end = &mut ended => {
                    end?;
                    anyhow::bail!("its task is over");
                }
                _ = pulse.tick() => {}
            }
            if let Some(generation) = self.pulse(&handle, &mut liveness).await? {
                handle.shutdown().await?;
                return Ok(generation);
            }
        }
    }

    fn config(&self, chitchat_id: ChitchatId) -> ChitchatConfig {
        ChitchatConfig {
            chitchat_id,
            cluster_id: CLUSTER.to_owned(),
            gossip_interval: GOSSIP_EVERY,
            listen_addr: self.advertise,
            // They are asked by `seek`, who looks up names more often.
            seed_nodes: Vec::new(),
            // It decides only whom to gossip with, and when the dead are forgotten.
            failure_detector_config: FailureDetectorConfig {
                initial_interval: GOSSIP_EVERY,
                dead_node_grace_period: DEAD_LAST,
                ..FailureDetectorConfig::default()
            },
            marked_for_deletion_grace_period: DEAD_LAST,
            catchup_callback: None,
            extra_liveness_predicate: None,
        }
    }

    async fn pulse(
        &mut self,
        handle: &ChitchatHandle,
        liveness: &mut Liveness,
    ) -> anyhow::Result<Option<u64>> {
        let (mut others, mut later) = (Vec::new(), None);
        {
            let chitchat = handle.chitchat();
            let mut chitchat = chitchat.lock().await;
            if self.facts.has_changed().unwrap_or_default() {
                for (key, text) in self.facts.borrow_and_update().entries(self.incarnation) {
                    chitchat.self_node_state().set(key, text);
                }
            }
            for (id, state) in chitchat.node_states() {
                if *id.node_id != *self.node_id {
                    others.extend(member(id, state));
                } else if id.generation_id >= self.generation && id != handle.chitchat_id() {
                    later = member(id, state);
                }
            }
        }
        // They come by node id and generation: the latest run of a node counts.
        others.reverse();
        others.dedup_by(|one, latest| one.node_id == latest.node_id);
        others.reverse();

        let now = Instant::now();
        let watched: Vec<_> = others.iter().chain(&later).map(|member| member.incarnation).collect();
        liveness.watch(watched.iter().copied(), now);
        let fresh = {
            let mut sealed = self.wire.sealed.lock();
            sealed.heard().for_each(|(incarnation, at)| liveness.heard(incarnation, at));
            sealed.take_fresh()
        };
        let due = liveness.tick(now);
        if let Some(paused) = due.paused {
            tracing::warn!(
                paused_ms = paused.as_millis(),
                "this node stood still, and others may have held it for dead"
            );
            metrics::counter!("fanfare_pauses_total").increment(1);
        }
        for incarnation in due.ask {
            let known = self.wire.sealed.lock().address_of(incarnation);
            let gossip = || others.iter().chain(&later).find(|member| member.incarnation == incarnation);
            if let Some(address) = known.or_else(|| gossip().map(|member| member.gossip)) {
                self.wire.challenge(address);
            }
        }
        for address in fresh {
            handle.gossip(address)?;
        }
        self.tell(others, liveness);
        Ok(later.and_then(|later| self.supersede(&later, liveness, now)))
    }

    fn tell(&self, mut others: Vec<Member>, liveness: &Liveness) {
        for member in &mut others {
            member.state = liveness.state(member.incarnation);
        }
        self.members.send_if_modified(|members| {
            let changed = members.0 != others;
            if changed {
                log_changes(members, &others);
                *members = Arc::new(Members(others));
            }
            changed
        });
    }

    /// A former run of this node had a clock that was ahead, and this one must be later. If it lives it is
    /// no former run.
    fn supersede(&mut self, later: &Member, liveness: &Liveness, now: Instant) -> Option<u64> {
        match liveness.state(later.incarnation) {
            State::Dead => later.generation.checked_add(1),
            State::Suspect => None,
            State::Alive => {
                if self.told.is_none_or(|told| now.saturating_duration_since(told) >= TELL_EVERY) {
                    self.told = Some(now);
                    let (node, other) = (&self.node_id, later.gossip);
                    tracing::error!(%node, %other, "another node has the same id: give each one its own with --node-id");
                }
                None
            }
        }
    }
}

fn member(id: &ChitchatId, state: &NodeState) -> Option<Member> {
    let (incarnation, facts) = Facts::read(|key| state.get(key))?;
    Some(Member {
        node_id: Arc::clone(&id.node_id),
        incarnation,
        generation: id.generation_id,
        gossip: id.gossip_advertise_addr,
        facts,
        state: State::Suspect,
    })
}

fn log_changes(before: &Members, now: &[Member]) {
    for member in now {
        let former = before.get(&member.node_id).filter(|former| former.incarnation == member.incarnation);
        if former.is_none_or(|former| former.state != member.state) {
            let Member { node_id: node, gossip, state, .. } = member;
            match state {
                State::Alive => tracing::info!(%node, %gossip, "a node is alive"),
                State::Suspect => tracing::debug!(%node, %gossip, "a node is not heard"),
                State::Dead if member.facts.draining => tracing::info!(%node, %gossip, "a node has left"),
                State::Dead => tracing::warn!(%node, %gossip, "a node is dead"),
            }
        }
    }
}

/// Asks at every seed who is there, as long as nobody was heard from it. Names are looked up each time, and whoever is found is
/// asked at once: no name waits for another one.
async fn seek(wire: Wire, seeds: Vec<String>, own: SocketAddr, mut names: Names) {
    let mut every = tokio::time::interval(SEEDS_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let mut addresses = HashSet::new();
        tokio::select! {
            _ = every.tick() => for seed in &seeds {
                names.look_up(seed);
                addresses.extend(names.known(seed));
            },
            (seed, found) = names.answered() => match found {
                Ok(()) => addresses.extend(names.known(&seed)),
                Err(error) => tracing::debug!(seed, %error, "a seed is not known"),
            },
        }
        for address in addresses.into_iter().filter(|address| *address != own) {
            let heard = wire.sealed.lock().heard_at(address);
            if heard.is_none_or(|heard| heard.elapsed() >= SEED_QUIET) {
                wire.challenge(address);
            }
        }
    }
}
