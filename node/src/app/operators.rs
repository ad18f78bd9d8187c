//! Operator requests to a running node, over the admin listener.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::backup::NodeBackups;
use super::cluster::{self, HasMetPeers};
use super::outbox::NodeOutbox;
use super::{Addresses, clock, rebalance};
use crate::cluster::link;
use crate::cluster::membership::{ClusterMember, ClusterMembers, Facts, LivenessState, Membership};
use crate::cluster::routing::Routing;
use crate::config::Config;
use crate::edge::admin::{
    AdminState, AdminToken, Degradation, MemberState, MemberView, MembersView, NodeView, Readiness,
    RebalanceReport,
};
use crate::edge::files::ClientFiles;
use crate::edge::memory::MemoryMonitor;
use crate::edge::socket::Shards;
use crate::model::Clock;
use crate::origin::history::HistoryStore;
use crate::origin::queues::Queues;
use crate::tasks::{OnStop, Tasks};

/// Interval of the check whether the node has met its peers.
const READY_LOOK: Duration = Duration::from_millis(100);

/// State that operators read, and their requests.
pub(super) struct Operators {
    store: Arc<dyn HistoryStore>,
    clock: Clock,
    files: Arc<ClientFiles>,
    outbox: Arc<NodeOutbox>,
    has_met: HasMetPeers,
    routing: Option<Arc<Routing>>,
    shards: Arc<Shards>,
    backups: NodeBackups,
    draining: AtomicBool,
    drain_requested: CancellationToken,
    /// Set once the node is up.
    known: OnceLock<NodeAndMembers>,
}

struct NodeAndMembers {
    node: NodeView,
    /// Membership; none for a single node.
    members: Option<watch::Receiver<Arc<ClusterMembers>>>,
}

impl Operators {
    pub(super) fn new(
        config: &Config,
        store: &Arc<dyn HistoryStore>,
        clock: &Clock,
        (files, outbox): (&Arc<ClientFiles>, &Arc<NodeOutbox>),
        routing: Option<&Arc<Routing>>,
        shards: &Arc<Shards>,
    ) -> Arc<Self> {
        Arc::new(Self {
            store: Arc::clone(store),
            clock: clock.clone(),
            files: Arc::clone(files),
            outbox: Arc::clone(outbox),
            has_met: cluster::has_met(config, routing),
            routing: routing.map(Arc::clone),
            shards: Arc::clone(shards),
            backups: NodeBackups::new(config, store, outbox, clock),
            draining: AtomicBool::new(false),
            drain_requested: CancellationToken::new(),
            known: OnceLock::new(),
        })
    }

    pub(super) fn met(&self) -> HasMetPeers {
        Arc::clone(&self.has_met)
    }

    pub(super) fn admin_state(
        self: &Arc<Self>,
        token: AdminToken,
        queues: Option<Queues>,
        metrics: PrometheusHandle,
    ) -> AdminState {
        let [measured, outbox, ready, drain, members, backup, rebalance] = [(); 7].map(|()| Arc::clone(self));
        AdminState {
            metrics: Arc::new(move || {
                measured.set_waiting_gauges();
                metrics.render()
            }),
            token: Arc::new(token),
            queues,
            outbox: Arc::new(move || outbox.outbox.opened()),
            readiness: Arc::new(move || ready.readiness()),
            drain: Arc::new(move || drain.ask_drain()),
            members: Arc::new(move || members.members()),
            backup: Arc::new(move || {
                let operators = Arc::clone(&backup);
                Box::pin(async move { operators.backups.begin(operators.node_id()).await })
            }),
            rebalance: Arc::new(move || {
                let operators = Arc::clone(&rebalance);
                Box::pin(async move { operators.rebalance().await })
            }),
        }
    }

    /// Starts to answer operators, once the node is up.
    pub(super) fn begin(
        self: &Arc<Self>,
        config: &Config,
        (node_id, incarnation): (&str, u64),
        addresses: Addresses,
        membership: Option<&Membership>,
        tasks: &Tasks,
    ) {
        if let Some(membership) = membership {
            let (operators, facts, members) = (Arc::clone(self), membership.facts(), membership.members());
            let seeds = config.seeds.join(",");
            tasks.spawn("readiness", OnStop::Cancel, async move {
                announce_ready(|| (operators.has_met)(), &facts).await;
                let is_alone = members.borrow().0.is_empty();
                if is_alone && seeds.is_empty() {
                    tracing::info!("no seeds configured: serving as a single node");
                } else if is_alone {
                    tracing::warn!(
                        seeds,
                        "no seed answered, serving as a single node: check --seed (gossip addresses) and --cluster-key-file"
                    );
                }
                let routing = operators.routing.as_ref();
                while !routing.is_some_and(|routing| routing.expected() > 0 && routing.is_complete()) {
                    tokio::time::sleep(READY_LOOK).await;
                }
                facts.send_modify(|facts| facts.met = true);
            });
        }
        let Addresses { listen, gossip, peer, .. } = addresses;
        let reached = |address| cluster::under(config, address);
        let facts = Facts {
            peer: peer.map(reached),
            listen: reached(listen),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_minor: link::minor(),
            ..Facts::default()
        };
        let node = view(node_id, incarnation, gossip.map(reached), &facts);
        self.known.set(NodeAndMembers { node, members: membership.map(Membership::members) }).ok();
    }

    /// Asks connections to reconnect to nodes that have fewer.
    async fn rebalance(&self) -> RebalanceReport {
        rebalance::rebalance(self.routing.as_deref(), &self.shards).await
    }

    pub(super) fn set_draining(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Requests a drain; the node is not ready by the time the waiter learns of it.
    fn ask_drain(&self) {
        self.set_draining();
        self.drain_requested.cancel();
    }

    pub(super) async fn drain_requested(&self) {
        self.drain_requested.cancelled().await;
    }

    fn readiness(&self) -> Readiness {
        if self.draining.load(Ordering::Relaxed) {
            return Readiness::Draining;
        }
        if !(self.has_met)() {
            return Readiness::Starting;
        }
        match self.degradations() {
            none if none.is_empty() => Readiness::Ready,
            some => Readiness::Degraded(some),
        }
    }

    pub(super) fn memory(&self) -> Arc<MemoryMonitor> {
        Arc::clone(self.files.memory())
    }

    fn degradations(&self) -> Vec<Degradation> {
        let fails = |part: &Degradation| match part {
            Degradation::Store => self.store.health().is_err(),
            Degradation::Clock => clock::is_apart(&self.clock),
            Degradation::Files => self.files.is_full(),
            Degradation::Outbox => self.outbox.health().is_err(),
            Degradation::Memory => self.files.memory().is_full(),
        };
        Degradation::ALL.into_iter().filter(fails).collect()
    }

    /// Sets the gauges; to be called every few seconds.
    pub(super) fn set_gauges(&self) {
        self.files.set_gauges();
        Degradation::set_gauges(&self.degradations());
        self.set_waiting_gauges();
    }

    /// Sets the gauges of waiting work, which are computed at each scrape.
    fn set_waiting_gauges(&self) {
        let is_draining = self.draining.load(Ordering::Relaxed);
        let to_move = if is_draining { self.shards.connection_count() } else { 0 };
        metrics::gauge!("fanfare_draining").set(u8::from(is_draining));
        metrics::gauge!("fanfare_drain_connections").set(to_move as f64);
        self.shards.set_gauges();
        let queued = self.store.queued();
        metrics::gauge!("fanfare_store_queue_rows").set(queued.rows as f64);
        metrics::gauge!("fanfare_store_queue_bytes").set(queued.bytes as f64);
        if let Some(routing) = &self.routing {
            routing.report_lag();
        }
    }

    /// The node id; empty while the node starts.
    fn node_id(&self) -> String {
        self.known.get().map(|known| known.node.node_id.clone()).unwrap_or_default()
    }

    fn members(&self) -> Option<MembersView> {
        let NodeAndMembers { node, members } = self.known.get()?;
        let readiness = self.readiness();
        let node = NodeView {
            ready: matches!(readiness, Readiness::Ready | Readiness::Degraded(_)),
            draining: readiness == Readiness::Draining,
            ..node.clone()
        };
        let others = members.as_ref().map(|members| Arc::clone(&members.borrow()));
        let others = others.iter().flat_map(|members| &members.0);
        Some(MembersView { node, members: others.map(|member| self.member(member)).collect() })
    }

    fn member(&self, member: &ClusterMember) -> MemberView {
        let ClusterMember { node_id, incarnation, gossip, facts, state, .. } = member;
        let known =
            self.routing.as_ref().map(|routing| routing.peer_status(*incarnation)).unwrap_or_default();
        let state = match state {
            _ if known.has_left || member.has_left() => MemberState::Left,
            LivenessState::Alive => MemberState::Alive,
            LivenessState::Suspect => MemberState::Suspect,
            LivenessState::Down => MemberState::Dead,
        };
        let is_there = matches!(state, MemberState::Alive | MemberState::Suspect);
        let node = view(node_id, *incarnation, Some(gossip.to_string()), facts);
        MemberView {
            node: NodeView { ready: node.ready && is_there, ..node },
            state,
            link_up: known.is_up,
            interest_known: known.is_interest_known,
        }
    }
}

/// Announces readiness once the node has met its peers.
async fn announce_ready(has_met: impl Fn() -> bool, facts: &watch::Sender<Facts>) {
    while !has_met() {
        tokio::time::sleep(READY_LOOK).await;
    }
    facts.send_if_modified(|facts| {
        facts.ready = !facts.draining;
        facts.ready
    });
}

fn view(node_id: &str, incarnation: u64, gossip: Option<String>, facts: &Facts) -> NodeView {
    NodeView {
        node_id: node_id.to_owned(),
        incarnation: format!("{incarnation:016x}"),
        listen: facts.listen.clone(),
        gossip,
        peer: facts.peer.clone(),
        version: facts.version.clone(),
        protocol_minor: facts.protocol_minor,
        ready: facts.ready,
        draining: facts.draining,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn node_reports_ready_once_it_has_met_its_peers() {
        for draining in [false, true] {
            let facts = Facts { draining, ..Facts::default() };
            let (facts, receiver) = watch::channel(facts);
            let looks = std::cell::Cell::new(0);
            let has_met = || {
                assert!(!receiver.borrow().ready);
                looks.set(looks.get() + 1);
                looks.get() > 2
            };
            announce_ready(has_met, &facts).await;
            assert_eq!(receiver.borrow().ready, !draining);
        }
    }
}
