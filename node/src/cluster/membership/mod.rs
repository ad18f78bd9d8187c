//! Membership: the nodes of the cluster, the facts that each gossips, and their liveness.
//!
//! Facts travel by gossip (chitchat). Liveness is decided here, by the packets that this node itself receives.

mod duplicate_id;
mod facts;
mod indirect_heartbeats;
mod liveness;
mod sealed;
#[cfg(test)]
mod tests;
mod transport;
mod window;
mod worker;

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use tokio::sync::watch;

pub use facts::{ClusterMember, ClusterMembers, Facts};
#[cfg(test)]
pub(super) use liveness::Liveness;
pub use liveness::LivenessState;

use super::ClusterKey;
use crate::dns_cache::DnsCache;
use crate::model::Clock;
use crate::stall_detector;
use crate::tasks::Tasks;

/// Receive buffer of the socket, so that a burst of datagrams waits for a late thread and is not lost.
const RECEIVE_BYTES: usize = 1 << 20;

/// Parameters of a member.
pub struct Options {
    pub node_id: Arc<str>,
    /// 48 random bits, new in every incarnation.
    pub incarnation: u64,
    pub socket: UdpSocket,
    /// Address at which other nodes reach the socket.
    pub advertise: SocketAddr,
    /// Gossip addresses of the seeds, each `host:port`.
    pub seeds: Vec<String>,
    /// DNS cache for the seeds.
    pub names: DnsCache,
    pub key: ClusterKey,
    pub facts: Facts,
    pub clock: Clock,
}

/// Membership of this node. Its thread ends when its tasks are told to stop. If another node has the same id and keeps running, the tasks
/// are failed.
#[derive(Debug)]
pub struct Membership {
    facts: watch::Sender<Facts>,
    members: watch::Receiver<Arc<ClusterMembers>>,
}

impl Membership {
    pub fn start(options: Options, tasks: &Tasks) -> io::Result<Self> {
        let Options { node_id, incarnation, socket, advertise, seeds, names, key, facts, clock } = options;
        transport::begin_metrics();
        metrics::counter!("fanfare_pauses_total").increment(0);
        // A smaller buffer is no reason to fail.
        socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BYTES).ok();
        socket.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .on_thread_unpark(stall_detector::halt_if_stalled)
            .enable_all()
            .build()?;
        let socket = {
            let _in_runtime = runtime.enter();
            tokio::net::UdpSocket::from_std(socket)?
        };
        let (facts, facts_seen) = watch::channel(facts);
        let (members_sender, members) = watch::channel(Arc::new(ClusterMembers::default()));
        let worker = worker::MembershipWorker {
            wire: transport::GossipWire::new(socket, sealed::DatagramSealer::new(key, incarnation)),
            node_id,
            incarnation,
            generation: clock.highest_ms(),
            advertise,
            seeds,
            names,
            facts: facts_seen,
            members: members_sender,
            duplicate_ids: duplicate_id::DuplicateIds::default(),
            indirect_heartbeats: indirect_heartbeats::IndirectHeartbeats::default(),
            reported_at: None,
            ends: None,
            failed: tasks.failed(),
        };
        let stopping = tasks.stopping();
        tasks.spawn_thread("membership", move || {
            raise_priority();
            runtime.block_on(stopping.run_until_cancelled(worker.run()));
            // Look-ups that are under way are not waited for.
            runtime.shutdown_background();
        })?;
        Ok(Self { facts, members })
    }

    /// The other nodes. The view changes when a node joins or leaves, or changes its facts.
    pub fn members(&self) -> watch::Receiver<Arc<ClusterMembers>> {
        self.members.clone()
    }

    /// Gossip addresses of all nodes that are not down.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let members = self.members.borrow();
        let living = members.0.iter().filter(|member| member.state != LivenessState::Down);
        living.map(|member| member.gossip).collect()
    }

    /// Sender through which the facts of this node are changed later.
    pub fn facts(&self) -> watch::Sender<Facts> {
        self.facts.clone()
    }

    /// Changes the facts of this node.
    pub fn update(&self, change: impl FnOnce(&mut Facts)) {
        self.facts.send_if_modified(|facts| {
            let before = facts.clone();
            change(facts);
            *facts != before
        });
    }
}

/// Raises the priority of this thread above that of the threads that serve clients, so that a busy node is not taken for down. Without the
/// permission the priority stays as it is.
#[expect(unsafe_code, reason = "there is no safe call for the priority of a thread")]
fn raise_priority() {
    #[cfg(target_os = "linux")]
    // SAFETY: it changes nothing but the priority of the thread that calls.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, -10);
    }
}
