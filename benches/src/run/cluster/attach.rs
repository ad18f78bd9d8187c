//! An attach to a channel without interest, on a node that is alone and on one of three.

use serde::Serialize;

use super::super::bars::{Bar, insufficient_runs};
use super::super::generator::{load, result_of};
use super::super::markdown::{Table, pair};
use super::super::report::median;
use super::super::server::Server;
use super::nodes::{BinaryPaths, Cluster};
use crate::Result;
use crate::load::AttachOutcome;

const NODES: usize = 3;
const ADDED_P50_MS_MAX: f64 = 2.0;

#[derive(Serialize, Default)]
pub(super) struct Attach {
    pub(super) alone: Vec<AttachOutcome>,
    pub(super) three: Vec<AttachOutcome>,
}

impl Attach {
    pub(super) fn measure(&mut self, places: &BinaryPaths) -> Result<()> {
        let alone = Server::node(&places.node, &places.data, "none", None)?;
        self.alone.push(result_of(load(&places.bench, "attach", &alone))?);
        drop(alone);
        let cluster = Cluster::start(places, NODES)?;
        self.three.push(result_of(cluster.load(&places.bench, "attach", 0))?);
        Ok(())
    }

    pub(super) fn bar(&self) -> Option<Bar> {
        if self.alone.is_empty() || self.three.is_empty() {
            return None;
        }
        let added = median(&self.three, |run| run.p50_ms) - median(&self.alone, |run| run.p50_ms);
        let what = format!("attach at one of {NODES} nodes: p50 ms added");
        let runs = self.alone.len().min(self.three.len());
        let bar = Bar::at_most(what, added, ADDED_P50_MS_MAX, |ms| format!("{ms:.2}"));
        Some(bar.judged_unless(insufficient_runs(runs)))
    }

    pub(super) fn table(&self) -> String {
        let attaches = self.three.first().map_or(0, |run| run.attaches);
        let title = format!("{attaches} attaches to channels that nobody wants, one after another");
        let mut table = Table::new(&title, &["p50 / p99 ms", "µs of CPU each, all nodes"]);
        for (name, runs) in [("one node", &self.alone), ("one of three", &self.three)] {
            let us = median(runs, |run| run.cost.server_cpu_s * 1e6 / run.attaches as f64);
            let times = pair(median(runs, |run| run.p50_ms), median(runs, |run| run.p99_ms));
            table.row(name, runs.len(), vec![times, format!("{us:.0}")]);
        }
        table.text()
    }
}
