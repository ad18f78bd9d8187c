//! Thread of membership: gossip, probes and their answers, and nothing else.

use std::cmp::Ordering;
use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use chitchat::{
    ChitchatConfig, ChitchatHandle, ChitchatId, FailureDetectorConfig, Heartbeat, NodeState, spawn_chitchat,
};
use fanfare_proto::peer::MINOR;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::duplicate_id::{self, DuplicateIds, MemberCandidate};
use super::facts::{ClusterMember, ClusterMembers, Facts};
use super::indirect_heartbeats::IndirectHeartbeats;
use super::liveness::{Liveness, LivenessState, SUSPECT_AFTER};
use super::transport::GossipWire;
use crate::dns_cache::DnsCache;
use crate::stall_detector;

const GOSSIP_EVERY: Duration = Duration::from_millis(250);
const SEEDS_EVERY: Duration = Duration::from_secs(1);
/// A seed that was heard within this time is not asked for its identity.
const SEED_QUIET: Duration = Duration::from_millis(1_500);
const DOWN_KEPT_FOR: Duration = Duration::from_secs(15 * 60);
/// Time without any known node after which a node counts as alone.
const ALONE_AFTER: Duration = Duration::from_secs(2);
const TELL_EVERY: Duration = Duration::from_secs(60);
/// Time that a node keeps gossiping before it stops for a duplicate id, so that the other node learns of it.
const SEEN_WITHIN: Duration = Duration::from_secs(1);
const CLUSTER: &str = "fanfare";

/// State of the membership thread.
pub(super) struct MembershipWorker {
    pub(super) wire: GossipWire,
    pub(super) node_id: Arc<str>,
    pub(super) incarnation: u64,
    pub(super) generation: u64,
    pub(super) advertise: SocketAddr,
    pub(super) seeds: Vec<String>,
    pub(super) names: DnsCache,
    pub(super) facts: watch::Receiver<Facts>,
    pub(super) members: watch::Sender<Arc<ClusterMembers>>,
    pub(super) duplicate_ids: DuplicateIds,
    pub(super) indirect_heartbeats: IndirectHeartbeats,
    pub(super) reported_at: Option<Instant>,
    /// Time at which another node with this node's id was found to keep running, so that this node stops.
    pub(super) ends: Option<Instant>,
    pub(super) failed: CancellationToken,
}

impl MembershipWorker {
    /// Runs until dropped.
    pub(super) async fn run(mut self) {
        let (seeds, names) = (std::mem::take(&mut self.seeds), std::mem::take(&mut self.names));
        let seeds = seek(self.wire.clone(), seeds, self.advertise, names);
        let mut liveness = Liveness::new(stall_detector::BEAT_INTERVAL, Instant::now());
        let gossip = async {
            loop {
                if let Err(error) = self.gossip(&mut liveness).await {
                    tracing::error!(%error, "gossip failed, restarting it");
                    tokio::time::sleep(SEEDS_EVERY).await;
                    self.generation += 1;
                }
            }
        };
        tokio::join!(seeds, gossip);
    }

    /// Gossips until it must restart with another generation.
    async fn gossip(&mut self, liveness: &mut Liveness) -> anyhow::Result<()> {
        let chitchat_id = ChitchatId::new(&*self.node_id, self.generation, self.advertise);
        let facts = self.own_facts();
        let entries = facts.entries(self.incarnation).into_iter();
        let mut entries: Vec<_> = entries.map(|(key, text)| (key.to_owned(), text)).collect();
        if facts.protocol_minor > MINOR {
            // An entry of a later version, for test builds that act as one.
            entries.push(("next".to_owned(), "what is not known yet".to_owned()));
        }
        let handle = spawn_chitchat(self.config(chitchat_id), entries, &self.wire).await?;
        let begun = Instant::now();
        // The silence before this point does not count.
        liveness.tick(begun);
        // Gossip that has just restarted knows no other node.
        self.gossip_with_all(&handle)?;
        let mut due = tokio::time::interval(stall_detector::BEAT_INTERVAL);
        due.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut ended = Box::pin(handle.termination_watcher());
        loop {
            let mut is_new = false;
            tokio::select! {
                end = &mut ended => {
                    end?;
                    anyhow::bail!("its task is over");
                }
                Ok(()) = self.facts.changed() => is_new = true,
                _ = due.tick() => {}
            }
            stall_detector::beat();
            if is_new {
                self.publish_facts(&handle).await?;
            }
            let earlier = self.tick(&handle, liveness, begun).await?;
            if let Some(above) = earlier
                .filter(|earlier| *earlier >= self.generation)
                .and_then(|earlier| earlier.checked_add(1))
            {
                tracing::info!("gossip generation raised above a retired incarnation of this node id");
                self.generation = above;
                return handle.shutdown().await;
            }
        }
    }

    /// Sends the changed facts to all live nodes at once: a node that leaves may be gone before its turn in gossip.
    async fn publish_facts(&mut self, handle: &ChitchatHandle) -> anyhow::Result<()> {
        let entries = self.own_facts().entries(self.incarnation);
        {
            let chitchat = handle.chitchat();
            let mut chitchat = chitchat.lock().await;
            for (key, text) in entries {
                chitchat.self_node_state().set(key, text);
            }
        }
        self.gossip_with_all(handle)
    }

    fn own_facts(&mut self) -> Facts {
        let mut facts = self.facts.borrow_and_update().clone();
        if self.ends.is_some() {
            // The facts must not prefer this node any more, or the other one stops too.
            (facts.ready, facts.met, facts.left) = (false, false, false);
        }
        facts
    }

    fn gossip_with_all(&self, handle: &ChitchatHandle) -> anyhow::Result<()> {
        let members = self.members.borrow();
        let mut alive = members.0.iter().filter(|member| member.state == LivenessState::Alive);
        alive.try_for_each(|member| handle.gossip(member.gossip))
    }

    fn config(&self, chitchat_id: ChitchatId) -> ChitchatConfig {
        ChitchatConfig {
            chitchat_id,
            cluster_id: CLUSTER.to_owned(),
            gossip_interval: GOSSIP_EVERY,
            listen_addr: self.advertise,
            // `seek` asks the seeds, and looks up their names more often.
            seed_nodes: Vec::new(),
            // Chitchat's failure detector only chooses gossip partners, and when nodes that are down are forgotten.
            failure_detector_config: FailureDetectorConfig {
                initial_interval: GOSSIP_EVERY,
                dead_node_grace_period: DOWN_KEPT_FOR,
                ..FailureDetectorConfig::default()
            },
            marked_for_deletion_grace_period: DOWN_KEPT_FOR,
            catchup_callback: None,
            extra_liveness_predicate: None,
        }
    }

    /// Runs one tick. Returns the highest generation among earlier incarnations of this node that have ended.
    async fn tick(
        &mut self,
        handle: &ChitchatHandle,
        liveness: &mut Liveness,
        begun: Instant,
    ) -> anyhow::Result<Option<u64>> {
        // In the order of node id and generation.
        let states: Vec<(ClusterMember, Heartbeat)> = {
            let chitchat = handle.chitchat();
            let chitchat = chitchat.lock().await;
            let states = chitchat.node_states().iter();
            states.filter_map(|(id, state)| Some((member(id, state)?, state.heartbeat()))).collect()
        };
        let counts = states.iter().map(|(member, count)| (member.incarnation_key(), *count)).collect();
        let all = duplicate_id::latest_incarnations(states.into_iter().map(|(member, _)| member));
        let is_other = |member: &ClusterMember| member.incarnation != self.incarnation;
        let (namesakes, others): (Vec<_>, Vec<_>) =
            all.into_iter().filter(is_other).partition(|member| member.node_id == self.node_id);
        let now = Instant::now();
        // Gossip that has just restarted knows no node yet.
        let is_blank =
            now.saturating_duration_since(begun) < ALONE_AFTER && others.is_empty() && namesakes.is_empty();
        if !is_blank {
            self.indirect_heartbeats.see(&counts, now);
        }
        let (last_seen, fresh) = {
            let mut sealed = self.wire.sealed.lock();
            (sealed.peers_seen().collect::<HashMap<_, _>>(), sealed.take_fresh())
        };
        let is_seen = |incarnation: u64| {
            last_seen.get(&incarnation).is_some_and(|at| now.saturating_duration_since(*at) < SUSPECT_AFTER)
        };
        let candidates = MemberCandidate::of(&others, &self.members.borrow(), is_seen);
        let watched = candidates.iter().flat_map(MemberCandidate::incarnations).chain(&namesakes);
        let gossip: HashMap<_, _> = watched.map(|member| (member.incarnation, member.gossip)).collect();
        if !is_blank {
            liveness.watch(gossip.keys().copied(), now);
        }
        last_seen.into_iter().for_each(|(incarnation, at)| liveness.record_seen(incarnation, at));
        let due = liveness.tick(now);
        if let Some(paused) = due.stalled_for {
            tracing::warn!(
                paused_ms = u64::try_from(paused.as_millis()).unwrap_or(u64::MAX),
                "gossip stalled: peers may have declared this node down"
            );
            metrics::counter!("fanfare_pauses_total").increment(1);
        }
        let (others, contested) = match is_blank {
            true => Default::default(),
            false => self.duplicate_ids.decide(candidates, liveness, due.late, now),
        };
        for incarnation in due.to_probe.into_iter().chain(contested) {
            let known = self.wire.sealed.lock().address_of(incarnation);
            let address = known.or_else(|| gossip.get(&incarnation).copied());
            // An earlier incarnation of this node may have had its address.
            if let Some(address) = address.filter(|address| *address != self.advertise) {
                self.wire.challenge(address);
            }
        }
        for address in fresh {
            handle.gossip(address)?;
        }
        // No view is published either while only a node with the same id has arrived.
        if !others.is_empty() || now.saturating_duration_since(begun) >= ALONE_AFTER {
            self.publish_members(others, liveness, now);
        }
        if self.resolve_duplicate_id(handle, &namesakes, liveness, now)? {
            self.publish_facts(handle).await?;
        }
        let has_ended = |member: &&ClusterMember| {
            self.indirect_heartbeats.has_ended(
                member.incarnation_key(),
                liveness.last_seen(member.incarnation),
                now,
            )
        };
        Ok(namesakes.iter().filter(has_ended).map(|member| member.generation).max())
    }

    fn publish_members(&self, mut others: Vec<ClusterMember>, liveness: &Liveness, now: Instant) {
        for member in &mut others {
            member.state = liveness.state(member.incarnation);
            let seen_here = liveness.last_seen(member.incarnation);
            member.is_seen_by_others = member.state == LivenessState::Down
                && self.indirect_heartbeats.is_seen_by_others(member.incarnation_key(), seen_here, now);
        }
        self.members.send_if_modified(|members| {
            let changed = members.0 != others;
            if changed {
                log_changes(members, &others, |incarnation| liveness.last_seen(incarnation).is_some());
                *members = Arc::new(ClusterMembers(others));
            }
            changed
        });
    }

    /// Handles another node with this node's id. Both nodes decide alike which of them keeps running. True if this node must stop.
    fn resolve_duplicate_id(
        &mut self,
        handle: &ChitchatHandle,
        namesakes: &[ClusterMember],
        liveness: &Liveness,
        now: Instant,
    ) -> anyhow::Result<bool> {
        let lives = |member: &&ClusterMember| {
            liveness.state(member.incarnation) == LivenessState::Alive && !member.facts.draining
        };
        let own = self.facts.borrow().clone();
        let other = namesakes.iter().find(lives);
        if let Some(since) = self.ends {
            if now.saturating_duration_since(since) >= SEEN_WITHIN {
                self.failed.cancel();
            }
            other.map_or(Ok(()), |other| handle.gossip(other.gossip))?;
            return Ok(false);
        }
        let Some(other) = other.filter(|_| !own.draining) else { return Ok(false) };
        let begun = (self.generation, self.incarnation).cmp(&(other.generation, other.incarnation));
        let goes_on = match (own.met, own.ready).cmp(&(other.facts.met, other.facts.ready)) {
            // The two did not hear each other, so the later one has replaced the other.
            Ordering::Equal if own.met => begun.is_gt(),
            Ordering::Equal => begun.is_lt(),
            unequal => unequal.is_gt(),
        };
        let (node, other) = (&self.node_id, other.gossip);
        if !goes_on {
            tracing::error!(%node, %other, "duplicate node id, this node stops: give each node its own --node-id");
            self.ends = Some(now);
        } else if self
            .reported_at
            .is_none_or(|logged_at| now.saturating_duration_since(logged_at) >= TELL_EVERY)
        {
            self.reported_at = Some(now);
            tracing::error!(%node, %other, "duplicate node id, this node goes on: give each node its own --node-id");
        }
        Ok(!goes_on)
    }
}

fn member(id: &ChitchatId, state: &NodeState) -> Option<ClusterMember> {
    let (incarnation, facts) = Facts::read(|key| state.get(key))?;
    Some(ClusterMember {
        node_id: Arc::clone(&id.node_id),
        incarnation,
        generation: id.generation_id,
        gossip: id.gossip_advertise_addr,
        facts,
        state: LivenessState::Suspect,
        is_seen_by_others: false,
    })
}

fn log_changes(before: &ClusterMembers, now: &[ClusterMember], was_seen: impl Fn(u64) -> bool) {
    for member in now {
        let earlier = before.get(&member.node_id).filter(|earlier| earlier.incarnation == member.incarnation);
        if earlier.is_none_or(|earlier| earlier.state != member.state) {
            let ClusterMember { node_id: node, gossip, state, .. } = member;
            match state {
                LivenessState::Alive => tracing::info!(%node, %gossip, "peer is alive"),
                LivenessState::Suspect => tracing::debug!(%node, %gossip, "peer suspected"),
                // Announced by its goodbye, or by the nodes that waited for it.
                LivenessState::Down if member.facts.draining => {
                    tracing::debug!(%node, %gossip, "draining peer is down")
                }
                LivenessState::Down if !was_seen(member.incarnation) => {
                    tracing::info!(%node, %gossip, "peer known to others is down")
                }
                LivenessState::Down => tracing::warn!(%node, %gossip, "peer is down"),
            }
        }
        if member.is_seen_by_others && !earlier.is_some_and(|earlier| earlier.is_seen_by_others) {
            let ClusterMember { node_id: node, gossip, .. } = member;
            tracing::warn!(%node, %gossip, "peer is down here but alive for others: check the network between the two nodes");
        }
    }
}

/// Asks every seed for its identity, as long as nothing was heard from it. Names are looked up each time, and each found address is asked
/// at once: no name waits for another one.
async fn seek(wire: GossipWire, seeds: Vec<String>, own: SocketAddr, mut names: DnsCache) {
    let mut every = tokio::time::interval(SEEDS_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // When each unknown name was last logged.
    let mut logged_at: HashMap<String, Instant> = HashMap::new();
    loop {
        let mut addresses = HashSet::new();
        tokio::select! {
            _ = every.tick() => for seed in &seeds {
                names.look_up(seed);
                addresses.extend(names.addresses(seed));
            },
            (seed, found) = names.next_answer() => match found {
                Ok(()) => addresses.extend(names.addresses(&seed)),
                Err(error) => {
                    let is_logged = logged_at.get(&seed).is_some_and(|at| at.elapsed() < TELL_EVERY);
                    if !is_logged {
                        tracing::warn!(seed, %error, "seed name lookup failed");
                        logged_at.insert(seed, Instant::now());
                    }
                }
            },
        }
        for address in addresses.into_iter().filter(|address| *address != own) {
            let last_seen = wire.sealed.lock().last_seen_at(address);
            if last_seen.is_none_or(|last_seen| last_seen.elapsed() >= SEED_QUIET) {
                wire.challenge(address);
            }
        }
    }
}
