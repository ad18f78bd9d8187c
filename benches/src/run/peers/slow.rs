//! What one reader in a hundred that reads nothing costs the other ones.

use serde::Serialize;

use super::contender::Contender;
use super::measure::{Comparison, Row};
use super::workload::{Slow, Workload};
use crate::Result;
use crate::load::FanoutOutcome;

/// The same load twice, each time over a fresh server.
#[derive(Serialize)]
pub(super) struct SlowReader {
    pub(super) without: FanoutOutcome,
    pub(super) with: FanoutOutcome,
}

impl SlowReader {
    /// The 99th percentile of the others, as a multiple of what it is when all read.
    pub(super) fn p99_ratio(&self) -> f64 {
        self.with.p99_ms / self.without.p99_ms
    }
}

impl Comparison<'_> {
    pub(super) fn slow_reader(&self, workload: Workload, failures: &mut Vec<String>) -> Vec<Row<SlowReader>> {
        let title = format!("{}, one reads nothing", workload.title());
        let rows = self.rows_of_plain(&title, failures, |contender| self.both(contender, workload));
        for row in rows.iter().filter(|row| row.contender.is_ours()) {
            let runs = row.runs.iter().flat_map(|run| [&run.without, &run.with]);
            let faulty = runs.filter(|run| run.faults.any());
            failures
                .extend(faulty.map(|run| format!("{title}: {} had {:?}", row.contender.name(), run.faults)));
        }
        rows
    }

    fn both(&self, contender: Contender, workload: Workload) -> Result<SlowReader> {
        let fan_out = |slow| self.fan_out(contender, workload, slow, self.options.seconds);
        Ok(SlowReader { without: fan_out(Slow::Nobody)?, with: fan_out(Slow::One)? })
    }
}
