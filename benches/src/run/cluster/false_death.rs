//! Three nodes on a machine without CPU to spare, where no node may be declared down.

use std::fs;
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::super::bars::Bar;
use super::super::companion::Companion;
use super::super::markdown::Table;
use super::nodes::{BinaryPaths, Cluster};
use crate::{Result, os};

const NODES: usize = 3;
/// Level at which a node logs every change of membership.
const LOG: &str = "info,fanfare::cluster::membership=debug";
const GLANCE: Duration = Duration::from_secs(1);

#[derive(Serialize)]
pub(super) struct FalseDeath {
    pub(super) minutes: f64,
    pub(super) burning_threads: usize,
    /// Share of the machine's CPU that was in use.
    pub(super) busy: f64,
    /// Average number of cores that all nodes used together.
    pub(super) nodes_cpu: f64,
    #[serde(rename = "told")]
    pub(super) peer_events: PeerEventCounts,
}

/// Numbers of log lines of the nodes about each other, over all nodes.
#[derive(Serialize, Default, PartialEq, Eq, Debug)]
pub(super) struct PeerEventCounts {
    /// Lines that say that a node was suspected, after 1.5 s without a sign of life.
    pub(super) suspected: usize,
    #[serde(rename = "dead")]
    pub(super) down: usize,
    /// Stalls of a node's gossip for 2 s or more, which the node reports of itself.
    pub(super) paused: usize,
    /// Restarts in place after a process stall.
    #[serde(rename = "anew")]
    pub(super) restarted: usize,
    /// Peer streams that were silent or ended.
    pub(super) links_down: usize,
}

/// Least length of a measurement from which the bar is judged, in minutes.
pub(super) const MINUTES: f64 = 10.0;

impl FalseDeath {
    pub(super) fn measure(places: &BinaryPaths, minutes: f64, burning_threads: usize) -> Result<Self> {
        let cluster = Cluster::logging(places, NODES, LOG)?;
        let logged: Vec<usize> =
            cluster.nodes.iter().map(|node| Ok(node.log()?.len())).collect::<Result<_>>()?;
        let mut burn = Command::new(&places.bench);
        burn.args(["burn", "--threads", &burning_threads.to_string()]);
        let burn = Companion::start(burn)?;
        let nodes_cpu = || -> Result<Duration> {
            Ok(cluster
                .nodes
                .iter()
                .map(|node| os::cpu_time(node.pid()))
                .sum::<std::io::Result<Duration>>()?)
        };
        let (began, machine, nodes) = (Instant::now(), CpuTicks::now()?, nodes_cpu()?);
        let length = Duration::from_secs_f64(minutes * 60.0);
        let mut minute = 1;
        while began.elapsed() < length {
            thread::sleep(GLANCE.min(length.saturating_sub(began.elapsed())));
            if began.elapsed() > minute * Duration::from_secs(60) {
                eprintln!(
                    "bench: false deaths, minute {minute}: {:?}",
                    count_peer_events(&cluster, &logged)?
                );
                minute += 1;
            }
        }
        let busy = CpuTicks::now()?.since(&machine);
        let nodes_cpu = (nodes_cpu()? - nodes).as_secs_f64() / began.elapsed().as_secs_f64();
        let peer_events = count_peer_events(&cluster, &logged)?;
        drop(burn.end());
        Ok(Self { minutes, burning_threads, busy, nodes_cpu, peer_events })
    }

    pub(super) fn bar(&self) -> Bar {
        let Self { minutes, peer_events, .. } = self;
        let what =
            format!("{NODES} nodes, {minutes} minutes without CPU to spare: held for dead, or begun anew");
        let too_short = (*minutes < MINUTES).then(|| format!("minutes are fewer than {MINUTES}: {minutes}"));
        Bar::at_most(what, (peer_events.down + peer_events.restarted) as f64, 0.0, |count| {
            format!("{count:.0}")
        })
        .judged_unless(too_short)
    }

    pub(super) fn table(&self) -> String {
        let Self { minutes, burning_threads, busy, nodes_cpu, peer_events } = self;
        let title = format!("{NODES} nodes, {minutes} minutes");
        let columns = [
            "CPU in use",
            "cores of the nodes",
            "suspected",
            "held for dead",
            "gossip stood still",
            "begun anew",
            "links down",
        ];
        let mut table = Table::new(&title, &columns);
        let PeerEventCounts { suspected, down, paused, restarted, links_down } = peer_events;
        let counts = [suspected, down, paused, restarted, links_down].map(ToString::to_string);
        let cells = [format!("{:.1} %", busy * 100.0), format!("{nodes_cpu:.3}")].into_iter().chain(counts);
        table.row(&format!("beside {burning_threads} threads that only burn"), 1, cells.collect());
        table.text()
    }
}

/// Counts the log lines of each node after its byte offset in `logged`.
fn count_peer_events(cluster: &Cluster, logged: &[usize]) -> Result<PeerEventCounts> {
    let mut peer_events = PeerEventCounts::default();
    for (node, from) in cluster.nodes.iter().zip(logged) {
        peer_events.count(node.log()?.get(*from..).unwrap_or_default());
    }
    Ok(peer_events)
}

impl PeerEventCounts {
    fn count(&mut self, log: &str) {
        #[derive(Deserialize)]
        struct Line {
            message: String,
        }
        for line in log.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok()) {
            match &*line.message {
                "peer suspected" => self.suspected += 1,
                "peer is down" => self.down += 1,
                "gossip stalled: peers may have declared this node down" => self.paused += 1,
                "restarted in place after a process stall" => {
                    self.restarted += 1;
                }
                "peer stream lost" => self.links_down += 1,
                _ => {}
            }
        }
    }
}

/// Ticks of all cores since the machine started.
struct CpuTicks {
    all: u64,
    idle: u64,
}

impl CpuTicks {
    fn now() -> Result<Self> {
        let stat = fs::read_to_string("/proc/stat")?;
        Self::read(&stat).ok_or_else(|| "no cpu line in /proc/stat".into())
    }

    fn read(stat: &str) -> Option<Self> {
        let ticks = stat.lines().next()?.strip_prefix("cpu ")?.split_whitespace();
        // The first eight columns include the ticks of virtual machines.
        let ticks: Vec<u64> = ticks.take(8).map(|ticks| ticks.parse().ok()).collect::<Option<_>>()?;
        Some(Self { all: ticks.iter().sum(), idle: ticks.get(3)? + ticks.get(4)? })
    }

    fn since(&self, before: &Self) -> f64 {
        1.0 - (self.idle - before.idle) as f64 / (self.all - before.all).max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn node_log_events_about_peers_are_counted() {
        let mut peer_events = PeerEventCounts::default();
        peer_events.count(
            "{\"message\":\"peer suspected\",\"node\":\"n1\"}\n{\"message\":\"peer is alive\"}\nno JSON\n\
             {\"message\":\"peer is down\"}\n{\"message\":\"peer stream lost\"}\n\
             {\"message\":\"restarted in place after a process stall\"}\n",
        );
        assert_eq!(
            peer_events,
            PeerEventCounts { suspected: 1, down: 1, paused: 0, restarted: 1, links_down: 1 }
        );
    }

    #[test]
    fn the_share_in_use_is_that_between_two_looks() {
        let before = CpuTicks::read("cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 1").expect("a line of all cores");
        let after = CpuTicks::read("cpu  100 0 10 90 0 0 0 0 0 0\n").expect("a line of all cores");
        assert!((after.since(&before) - 0.9).abs() < 1e-9);
        assert!(CpuTicks::read("intr 1").is_none());
    }
}
