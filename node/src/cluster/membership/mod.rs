//! Who is in the cluster, what each node says of itself, and who is alive.
//!
//! Facts travel by gossip (chitchat). Whether a node lives is decided here, by what it sent to this node itself.

mod contest;
mod facts;
mod liveness;
mod relayed;
mod run;
mod sealed;
#[cfg(test)]
mod tests;
mod transport;
mod window;

use std::io;
use std::net::{SocketAddr, UdpSocket};
use std::sync::Arc;

use tokio::sync::watch;

pub use facts::{Facts, Member, Members};
#[cfg(test)]
pub(super) use liveness::Liveness;
pub use liveness::State;

use super::ClusterKey;
use crate::model::Clock;
use crate::names::Names;
use crate::pulse;
use crate::tasks::Tasks;

/// So that a burst of datagrams waits for a thread that is late, and is not lost.
const RECEIVE_BYTES: usize = 1 << 20;

/// What a node brings along to be a member.
pub struct Options {
    pub node_id: Arc<str>,
    /// 48 random bits, new in every run.
    pub incarnation: u64,
    pub socket: UdpSocket,
    /// Where others reach the socket.
    pub advertise: SocketAddr,
    /// Each a host and a port of gossip.
    pub seeds: Vec<String>,
    /// Where they are looked up.
    pub names: Names,
    pub key: ClusterKey,
    pub facts: Facts,
    pub clock: Clock,
}

/// This node among the others. Its thread ends when the tasks that it was started with are told to stop. Where another node has the same
/// id and goes on these have failed.
#[derive(Debug)]
pub struct Membership {
    facts: watch::Sender<Facts>,
    members: watch::Receiver<Arc<Members>>,
}

impl Membership {
    pub fn start(options: Options, tasks: &Tasks) -> io::Result<Self> {
        let Options { node_id, incarnation, socket, advertise, seeds, names, key, facts, clock } = options;
        transport::begin_metrics();
        metrics::counter!("fanfare_pauses_total").increment(0);
        // A smaller buffer is no reason to stay alone.
        socket2::SockRef::from(&socket).set_recv_buffer_size(RECEIVE_BYTES).ok();
        socket.set_nonblocking(true)?;
        let runtime = tokio::runtime::Builder::new_current_thread()
            .on_thread_unpark(pulse::pass)
            .enable_all()
            .build()?;
        let socket = {
            let _in_runtime = runtime.enter();
            tokio::net::UdpSocket::from_std(socket)?
        };
        let (facts, facts_seen) = watch::channel(facts);
        let (members_told, members) = watch::channel(Arc::new(Members::default()));
        let run = run::Run {
            wire: transport::Wire::new(socket, sealed::Sealed::new(key, incarnation)),
            node_id,
            incarnation,
            generation: clock.highest_ms(),
            advertise,
            seeds,
            names,
            facts: facts_seen,
            members: members_told,
            contests: contest::Contests::default(),
            relayed: relayed::Relayed::default(),
            told: None,
            ends: None,
            failed: tasks.failed(),
        };
        let stopping = tasks.stopping();
        tasks.spawn_thread("membership", move || {
            raise_priority();
            runtime.block_on(stopping.run_until_cancelled(run.run()));
            // A name that is being looked up is not waited for.
            runtime.shutdown_background();
        })?;
        Ok(Self { facts, members })
    }

    /// The others; the view changes when a node comes, goes, or says something else of itself.
    pub fn members(&self) -> watch::Receiver<Arc<Members>> {
        self.members.clone()
    }

    /// Where those gossip that are not dead.
    pub fn addresses(&self) -> Vec<SocketAddr> {
        let members = self.members.borrow();
        let living = members.0.iter().filter(|member| member.state != State::Dead);
        living.map(|member| member.gossip).collect()
    }

    /// What is said of this node, for whoever changes it later.
    pub fn facts(&self) -> watch::Sender<Facts> {
        self.facts.clone()
    }

    /// Says something else of this node from now on.
    pub fn update(&self, change: impl FnOnce(&mut Facts)) {
        self.facts.send_if_modified(|facts| {
            let before = facts.clone();
            change(facts);
            *facts != before
        });
    }
}

/// Before what serves clients, so that a busy node is not held for dead. Where that is not allowed the thread is as good as any.
#[expect(unsafe_code, reason = "there is no safe call for the priority of a thread")]
fn raise_priority() {
    #[cfg(target_os = "linux")]
    // SAFETY: it changes nothing but the priority of the thread that calls.
    unsafe {
        libc::setpriority(libc::PRIO_PROCESS, 0, -10);
    }
}
