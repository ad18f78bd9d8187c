//! Fan-out to subscribers of the publishers' node, and to those of another node.

use serde::Serialize;

use super::super::bars::{Bar, insufficient_runs};
use super::super::generator::result_of;
use super::super::markdown::{Table, pair};
use super::super::report::{deliveries_per_core_second, median};
use super::nodes::{BinaryPaths, Cluster};
use crate::Result;
use crate::load::FanoutOutcome;

/// Subscribers, as in the comparison with peers: 80 for each channel.
const SUBSCRIBERS: u32 = 500;
const CHANNELS: u32 = 125;
const ATTACHED: u32 = 20;
const PUBLISHERS: u32 = 10;
const FAN_OUT: u32 = SUBSCRIBERS * ATTACHED / CHANNELS;
const MESSAGE_BYTES: u32 = 128;
pub(super) const DELIVERIES_PER_S: [u32; 2] = [100_000, 400_000];

/// Greatest ratio of the CPU of a remote delivery, both nodes counted, to that of a local one.
const CPU_MAX: f64 = 1.3;
const ADDED_P50_MS_MAX: f64 = 1.0;

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum SubscriberNode {
    Publishing,
    Other,
}

#[derive(Serialize)]
pub(super) struct FanOut {
    pub(super) deliveries_per_s: u32,
    pub(super) local: Vec<FanoutOutcome>,
    pub(super) remote: Vec<FanoutOutcome>,
}

impl FanOut {
    pub(super) fn new(deliveries_per_s: u32) -> Self {
        Self { deliveries_per_s, local: Vec::new(), remote: Vec::new() }
    }

    pub(super) fn title(&self) -> String {
        format!("fan-out of {FAN_OUT}, {} deliveries/s, {MESSAGE_BYTES} B", self.deliveries_per_s)
    }

    /// Measures both cases once, in turn.
    pub(super) fn measure(&mut self, places: &BinaryPaths, seconds: u32) -> Result<()> {
        self.local.push(self.once(places, seconds, SubscriberNode::Publishing)?);
        self.remote.push(self.once(places, seconds, SubscriberNode::Other)?);
        Ok(())
    }

    /// Measures one case. Two nodes run in either case, and both count.
    fn once(&self, places: &BinaryPaths, seconds: u32, subscribed: SubscriberNode) -> Result<FanoutOutcome> {
        let cluster = Cluster::start(places, 2)?;
        let mut command = cluster.load(&places.bench, "fanout", 0);
        if subscribed == SubscriberNode::Other {
            command.args(["--publish-at", &cluster.nodes[1].address.to_string()]);
        }
        for (option, value) in [
            ("--subscribers", SUBSCRIBERS),
            ("--channels", CHANNELS),
            ("--attached", ATTACHED),
            ("--publishers", PUBLISHERS),
            ("--bytes", MESSAGE_BYTES),
            ("--seconds", seconds),
            ("--rate", self.deliveries_per_s / FAN_OUT),
        ] {
            command.args([option, &value.to_string()]);
        }
        let outcome = result_of(command)?;
        let sent: f64 =
            (0..2).map(|node| cluster.metric(node, "fanfare_forwards_sent_total")).sum::<Result<f64>>()?;
        match (subscribed, sent > 0.0) {
            (SubscriberNode::Publishing, true) => Err("what is wanted here alone was forwarded".into()),
            (SubscriberNode::Other, false) => Err("nothing was forwarded".into()),
            _ => Ok(outcome),
        }
    }

    pub(super) fn faults(&self) -> Vec<String> {
        let named = [("local", &self.local), ("remote", &self.remote)];
        let runs = named.iter().flat_map(|(name, runs)| runs.iter().map(move |run| (name, &run.faults)));
        let faulty = runs.filter(|(_, faults)| faults.any());
        faulty.map(|(name, faults)| format!("{}: {name}: {faults:?}", self.title())).collect()
    }

    /// CPU of a remote delivery, as a multiple of that of a local one.
    fn cpu(&self) -> f64 {
        median(&self.local, deliveries_per_core_second) / median(&self.remote, deliveries_per_core_second)
    }

    fn added_p50_ms(&self) -> f64 {
        median(&self.remote, |run| run.p50_ms) - median(&self.local, |run| run.p50_ms)
    }

    pub(super) fn bars(&self) -> Vec<Bar> {
        if self.local.is_empty() || self.remote.is_empty() {
            return Vec::new();
        }
        let title = self.title();
        let cpu = format!("{title}: CPU of a remote delivery, of a local one's");
        let added = format!("{title}: p50 ms added");
        [
            Bar::at_most(cpu, self.cpu(), CPU_MAX, |ratio| format!("{ratio:.2} ×")),
            Bar::at_most(added, self.added_p50_ms(), ADDED_P50_MS_MAX, |ms| format!("{ms:.2}")),
        ]
        .map(|bar| bar.judged_unless(insufficient_runs(self.local.len().min(self.remote.len()))))
        .into()
    }

    pub(super) fn table(&self) -> String {
        let columns = [
            "µs of CPU for a delivery, both nodes",
            "of local",
            "p50 / p99 ms",
            "RSS MB, both nodes",
            "generator: cores",
            "lag p99 / max ms",
            "lost / doubled / reordered / astray",
        ];
        let mut table = Table::new(&self.title(), &columns);
        let us = |runs: &[FanoutOutcome]| 1e6 / median(runs, deliveries_per_core_second);
        for (name, runs) in [("local", &self.local), ("remote", &self.remote)] {
            let sum = |count: fn(&FanoutOutcome) -> u64| runs.iter().map(count).sum::<u64>();
            let (lost, duplicated) = (sum(|run| run.faults.lost), sum(|run| run.faults.duplicated));
            let (reordered, astray) = (sum(|run| run.faults.reordered), sum(|run| run.faults.astray));
            let cells = vec![
                format!("{:.2}", us(runs)),
                format!("{:.2} ×", us(runs) / us(&self.local)),
                pair(median(runs, |run| run.p50_ms), median(runs, |run| run.p99_ms)),
                format!("{:.1}", median(runs, |run| run.memory.resident_bytes as f64 / 1e6)),
                format!("{:.2}", median(runs, |run| run.cost.generator_cpu_s / run.cost.wall_s)),
                pair(median(runs, |run| run.lag_p99_ms), median(runs, |run| run.lag_max_ms)),
                format!("{lost} / {duplicated} / {reordered} / {astray}"),
            ];
            table.row(name, runs.len(), cells);
        }
        table.text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Cost, Faults, Memory};

    fn run(server_cpu_s: f64, p50_ms: f64) -> FanoutOutcome {
        FanoutOutcome {
            deliveries: 1_000_000,
            p50_ms,
            p99_ms: 9.0,
            cost: Cost { wall_s: 10.0, server_cpu_s, generator_cpu_s: 5.0 },
            segments: 500_000,
            memory: Memory::default(),
            faults: Faults::default(),
            slow: None,
            lag_p99_ms: 0.1,
            lag_max_ms: 0.2,
        }
    }

    #[test]
    fn remote_delivery_cost_is_reported_as_a_multiple_of_local() {
        let fan_out =
            FanOut { deliveries_per_s: 100_000, local: vec![run(2.0, 1.0)], remote: vec![run(2.5, 2.5)] };
        let bars = fan_out.bars();
        assert_eq!(
            bars.iter().map(|bar| (&*bar.measured, bar.met)).collect::<Vec<_>>(),
            [("1.25 ×", true), ("1.50", false)]
        );
        assert!(bars.iter().all(|bar| bar.not_judged.as_deref() == Some("runs are fewer than 3: 1")));
        let thrice = |cpu_s, p50_ms| vec![run(cpu_s, p50_ms), run(cpu_s, p50_ms), run(cpu_s, p50_ms)];
        let repeated =
            FanOut { deliveries_per_s: 100_000, local: thrice(2.0, 1.0), remote: thrice(2.5, 2.5) };
        assert!(repeated.bars().iter().all(|bar| bar.not_judged.is_none()));
        let table = fan_out.table();
        assert!(table.contains("| remote | 2.50 | 1.25 × | 2.50 / 9.00 |"), "{table}");
    }
}
