//! The thread of membership: gossip, probes and their answers, and nothing else.

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

use super::contest::{self, Candidate, Contests};
use super::facts::{Facts, Member, Members};
use super::liveness::{Liveness, SUSPECT_AFTER, State};
use super::relayed::Relayed;
use super::transport::Wire;
use crate::names::Names;
use crate::pulse;

const GOSSIP_EVERY: Duration = Duration::from_millis(250);
const SEEDS_EVERY: Duration = Duration::from_secs(1);
/// A seed that was heard within this is not asked who it is.
const SEED_QUIET: Duration = Duration::from_millis(1_500);
const DEAD_LAST: Duration = Duration::from_secs(15 * 60);
/// Who knows nobody for so long is alone.
const ANEW: Duration = Duration::from_secs(2);
const TELL_EVERY: Duration = Duration::from_secs(60);
/// A node that stops because another one has its id is heard by that until then.
const HEARD_WITHIN: Duration = Duration::from_secs(1);
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
    pub(super) contests: Contests,
    pub(super) relayed: Relayed,
    pub(super) told: Option<Instant>,
    /// Since when it is known that another node has the id of this one, which is to stop.
    pub(super) ends: Option<Instant>,
    pub(super) failed: CancellationToken,
}

impl Run {
    /// Ends by being dropped.
    pub(super) async fn run(mut self) {
        let (seeds, names) = (std::mem::take(&mut self.seeds), std::mem::take(&mut self.names));
        let seeds = seek(self.wire.clone(), seeds, self.advertise, names);
        let mut liveness = Liveness::new(pulse::EVERY, Instant::now());
        let gossip = async {
            loop {
                if let Err(error) = self.gossip(&mut liveness).await {
                    tracing::error!(%error, "gossip has ended and begins anew");
                    tokio::time::sleep(SEEDS_EVERY).await;
                    self.generation += 1;
                }
            }
        };
        tokio::join!(seeds, gossip);
    }

    /// Ends where it is to begin anew with another generation.
    async fn gossip(&mut self, liveness: &mut Liveness) -> anyhow::Result<()> {
        let chitchat_id = ChitchatId::new(&*self.node_id, self.generation, self.advertise);
        let facts = self.own_facts();
        let entries = facts.entries(self.incarnation).into_iter();
        let mut entries: Vec<_> = entries.map(|(key, text)| (key.to_owned(), text)).collect();
        if facts.protocol_minor > MINOR {
            // As a node may that comes after this one, which a build for tests can be told to be.
            entries.push(("next".to_owned(), "what is not known yet".to_owned()));
        }
        let handle = spawn_chitchat(self.config(chitchat_id), entries, &self.wire).await?;
        let begun = Instant::now();
        // What was not heard meanwhile was not to be heard.
        liveness.tick(begun);
        // Where gossip begins anew it knows nobody.
        self.gossip_with_all(&handle)?;
        let mut due = tokio::time::interval(pulse::EVERY);
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
            pulse::beat();
            if is_new {
                self.say(&handle).await?;
            }
            let former = self.pulse(&handle, liveness, begun).await?;
            if let Some(above) =
                former.filter(|former| *former >= self.generation).and_then(|former| former.checked_add(1))
            {
                tracing::info!(
                    "a run with the id of this node, which is gone, was said to be newer: this one is raised above it"
                );
                self.generation = above;
                return handle.shutdown().await;
            }
        }
    }

    /// Tells all that are alive at once what is new of this node: who leaves may be gone before its turn comes.
    async fn say(&mut self, handle: &ChitchatHandle) -> anyhow::Result<()> {
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
            // Nothing may speak for it any more, or the other one ends too.
            (facts.ready, facts.met, facts.left) = (false, false, false);
        }
        facts
    }

    fn gossip_with_all(&self, handle: &ChitchatHandle) -> anyhow::Result<()> {
        let members = self.members.borrow();
        let mut alive = members.0.iter().filter(|member| member.state == State::Alive);
        alive.try_for_each(|member| handle.gossip(member.gossip))
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

    /// Gives the highest generation of a run of this node that nobody hears any more.
    async fn pulse(
        &mut self,
        handle: &ChitchatHandle,
        liveness: &mut Liveness,
        begun: Instant,
    ) -> anyhow::Result<Option<u64>> {
        // They come by node id and generation.
        let states: Vec<(Member, Heartbeat)> = {
            let chitchat = handle.chitchat();
            let chitchat = chitchat.lock().await;
            let states = chitchat.node_states().iter();
            states.filter_map(|(id, state)| Some((member(id, state)?, state.heartbeat()))).collect()
        };
        let counts = states.iter().map(|(member, count)| (member.run(), *count)).collect();
        let all = contest::runs(states.into_iter().map(|(member, _)| member));
        let is_other = |member: &Member| member.incarnation != self.incarnation;
        let (namesakes, others): (Vec<_>, Vec<_>) =
            all.into_iter().filter(is_other).partition(|member| member.node_id == self.node_id);
        let now = Instant::now();
        // Gossip that has just begun anew tells of nobody yet.
        let is_blank =
            now.saturating_duration_since(begun) < ANEW && others.is_empty() && namesakes.is_empty();
        if !is_blank {
            self.relayed.see(&counts, now);
        }
        let (heard, fresh) = {
            let mut sealed = self.wire.sealed.lock();
            (sealed.heard().collect::<HashMap<_, _>>(), sealed.take_fresh())
        };
        let is_heard =
            |run: u64| heard.get(&run).is_some_and(|at| now.saturating_duration_since(*at) < SUSPECT_AFTER);
        let candidates = Candidate::of(&others, &self.members.borrow(), is_heard);
        let watched = candidates.iter().flat_map(Candidate::runs).chain(&namesakes);
        let gossip: HashMap<_, _> = watched.map(|member| (member.incarnation, member.gossip)).collect();
        if !is_blank {
            liveness.watch(gossip.keys().copied(), now);
        }
        heard.into_iter().for_each(|(incarnation, at)| liveness.heard(incarnation, at));
        let due = liveness.tick(now);
        if let Some(paused) = due.paused {
            tracing::warn!(
                paused_ms = u64::try_from(paused.as_millis()).unwrap_or(u64::MAX),
                "gossip stood still, and others may have held this node for dead"
            );
            metrics::counter!("fanfare_pauses_total").increment(1);
        }
        let (others, contested) = match is_blank {
            true => Default::default(),
            false => self.contests.decide(candidates, liveness, due.late, now),
        };
        for incarnation in due.ask.into_iter().chain(contested) {
            let known = self.wire.sealed.lock().address_of(incarnation);
            let address = known.or_else(|| gossip.get(&incarnation).copied());
            // A former run of this node had its address.
            if let Some(address) = address.filter(|address| *address != self.advertise) {
                self.wire.challenge(address);
            }
        }
        for address in fresh {
            handle.gossip(address)?;
        }
        // Nor of others where a namesake came first.
        if !others.is_empty() || now.saturating_duration_since(begun) >= ANEW {
            self.tell(others, liveness, now);
        }
        if self.among_namesakes(handle, &namesakes, liveness, now)? {
            self.say(handle).await?;
        }
        let has_ended = |member: &&Member| {
            self.relayed.has_ended(member.run(), liveness.heard_at(member.incarnation), now)
        };
        Ok(namesakes.iter().filter(has_ended).map(|member| member.generation).max())
    }

    fn tell(&self, mut others: Vec<Member>, liveness: &Liveness, now: Instant) {
        for member in &mut others {
            member.state = liveness.state(member.incarnation);
            let heard_here = liveness.heard_at(member.incarnation);
            member.is_elsewhere =
                member.state == State::Dead && self.relayed.is_heard(member.run(), heard_here, now);
        }
        self.members.send_if_modified(|members| {
            let changed = members.0 != others;
            if changed {
                log_changes(members, &others, |run| liveness.heard_at(run).is_some());
                *members = Arc::new(Members(others));
            }
            changed
        });
    }

    /// Another node may have the id of this one. Both know of each other which of them goes on. True when this one is found to end.
    fn among_namesakes(
        &mut self,
        handle: &ChitchatHandle,
        namesakes: &[Member],
        liveness: &Liveness,
        now: Instant,
    ) -> anyhow::Result<bool> {
        let lives =
            |member: &&Member| liveness.state(member.incarnation) == State::Alive && !member.facts.draining;
        let own = self.facts.borrow().clone();
        let other = namesakes.iter().find(lives);
        if let Some(since) = self.ends {
            if now.saturating_duration_since(since) >= HEARD_WITHIN {
                self.failed.cancel();
            }
            other.map_or(Ok(()), |other| handle.gossip(other.gossip))?;
            return Ok(false);
        }
        let Some(other) = other.filter(|_| !own.draining) else { return Ok(false) };
        let begun = (self.generation, self.incarnation).cmp(&(other.generation, other.incarnation));
        let goes_on = match (own.met, own.ready).cmp(&(other.facts.met, other.facts.ready)) {
            // They did not hear each other, so the later one has taken the place of the other.
            Ordering::Equal if own.met => begun.is_gt(),
            Ordering::Equal => begun.is_lt(),
            unequal => unequal.is_gt(),
        };
        let (node, other) = (&self.node_id, other.gossip);
        if !goes_on {
            tracing::error!(%node, %other, "another node has the same id and goes on, so this one stops: give each one its own with --node-id");
            self.ends = Some(now);
        } else if self.told.is_none_or(|told| now.saturating_duration_since(told) >= TELL_EVERY) {
            self.told = Some(now);
            tracing::error!(%node, %other, "another node has the same id: give each one its own with --node-id");
        }
        Ok(!goes_on)
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
        is_elsewhere: false,
    })
}

fn log_changes(before: &Members, now: &[Member], was_heard: impl Fn(u64) -> bool) {
    for member in now {
        let former = before.get(&member.node_id).filter(|former| former.incarnation == member.incarnation);
        if former.is_none_or(|former| former.state != member.state) {
            let Member { node_id: node, gossip, state, .. } = member;
            match state {
                State::Alive => tracing::info!(%node, %gossip, "a node is alive"),
                State::Suspect => tracing::debug!(%node, %gossip, "a node is not heard"),
                // Told by its goodbye, or by those who have waited for that.
                State::Dead if member.facts.draining => {
                    tracing::debug!(%node, %gossip, "a node that was leaving is dead")
                }
                State::Dead if !was_heard(member.incarnation) => {
                    tracing::info!(%node, %gossip, "a node that others have known of is not there")
                }
                State::Dead => tracing::warn!(%node, %gossip, "a node is dead"),
            }
        }
        if member.is_elsewhere && !former.is_some_and(|former| former.is_elsewhere) {
            let Member { node_id: node, gossip, .. } = member;
            tracing::warn!(%node, %gossip, "a node is dead for this one, and others hear it: something is wrong between the two");
        }
    }
}

/// Asks at every seed who is there, as long as nobody was heard from it. Names are looked up each time, and whoever is found is
/// asked at once: no name waits for another one.
async fn seek(wire: Wire, seeds: Vec<String>, own: SocketAddr, mut names: Names) {
    let mut every = tokio::time::interval(SEEDS_EVERY);
    every.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    // When each name that is not known was told of last.
    let mut told: HashMap<String, Instant> = HashMap::new();
    loop {
        let mut addresses = HashSet::new();
        tokio::select! {
            _ = every.tick() => for seed in &seeds {
                names.look_up(seed);
                addresses.extend(names.known(seed));
            },
            (seed, found) = names.answered() => match found {
                Ok(()) => addresses.extend(names.known(&seed)),
                Err(error) => {
                    let is_told = told.get(&seed).is_some_and(|at| at.elapsed() < TELL_EVERY);
                    if !is_told {
                        tracing::warn!(seed, %error, "a seed cannot be looked up");
                        told.insert(seed, Instant::now());
                    }
                }
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
