//! Greatest throughput of publishes with one subscriber for each channel, on the node of the publishers or on
//! the other one; and the throughput of publishers that wait for each ack.

use serde::Serialize;

use super::super::companion::Companion;
use super::super::generator::result_of;
use super::super::markdown::{Table, pair};
use super::super::report::median;
use super::nodes::{BinaryPaths, Cluster};
use crate::Result;
use crate::load::{HoldOutcome, PublishOutcome};

/// Number of connections, and the publishes under way on each.
const UNDER_WAY: [(usize, usize); 2] = [(16, 64), (1, 1)];
const MESSAGE_BYTES: usize = 200;

#[derive(Serialize)]
pub(super) struct PublishPath {
    connections: usize,
    window: usize,
    pub(super) local: Vec<PublishOutcome>,
    pub(super) remote: Vec<PublishOutcome>,
}

impl PublishPath {
    pub(super) fn all() -> Vec<Self> {
        let new = |(connections, window)| Self { connections, window, local: vec![], remote: vec![] };
        UNDER_WAY.map(new).into()
    }

    pub(super) fn measure(&mut self, places: &BinaryPaths, seconds: u32) -> Result<()> {
        self.local.push(self.once(places, seconds, 0)?);
        self.remote.push(self.once(places, seconds, 1)?);
        Ok(())
    }

    pub(super) fn table(&self) -> String {
        let Self { connections, window, .. } = self;
        let title = format!(
            "{connections} × {window} publishes under way, {MESSAGE_BYTES} B, one subscriber for each channel"
        );
        let columns = [
            "acked publishes/s",
            "ack p50 / p99 ms",
            "µs of CPU for a publish, both nodes",
            "generator: cores",
        ];
        let mut table = Table::new(&title, &columns);
        for (name, runs) in [("local", &self.local), ("remote", &self.remote)] {
            let us = median(runs, |run| run.cost.server_cpu_s * 1e6 / (run.acked_per_s * run.cost.wall_s));
            let cells = vec![
                format!("{:.0}", median(runs, |run| run.acked_per_s)),
                pair(median(runs, |run| run.ack_p50_ms), median(runs, |run| run.ack_p99_ms)),
                format!("{us:.2}"),
                format!("{:.2}", median(runs, |run| run.cost.generator_cpu_s / run.cost.wall_s)),
            ];
            table.row(name, runs.len(), cells);
        }
        table.text()
    }

    /// Measures once, with the subscribers on node `subscribed`.
    fn once(&self, places: &BinaryPaths, seconds: u32, subscribed: usize) -> Result<PublishOutcome> {
        let cluster = Cluster::start(places, 2)?;
        let connections = self.connections.to_string();
        let mut hold = cluster.load(&places.bench, "hold", subscribed);
        hold.args(["--connections", &connections, "--prefix", "bench:publish:"]);
        let hold = Companion::start(hold)?;
        let mut command = cluster.load(&places.bench, "publish", 0);
        command.args(["--connections", &connections, "--window", &self.window.to_string()]);
        command.args(["--seconds", &seconds.to_string(), "--bytes", &MESSAGE_BYTES.to_string()]);
        let outcome: PublishOutcome = result_of(command)?;
        let held: HoldOutcome = serde_json::from_str(&hold.end()?)?;
        if (held.received as f64) < outcome.acked_per_s * outcome.cost.wall_s {
            return Err(format!("the subscribers heard {} frames only", held.received).into());
        }
        Ok(outcome)
    }
}
