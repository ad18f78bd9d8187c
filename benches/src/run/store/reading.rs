//! Pages of history from a node, beside the same rows read with the driver alone, one read at a time.

use serde::Serialize;

use super::super::bars::Bar;
use super::super::generator::{load, result_of};
use super::super::markdown::{Table, pair};
use super::super::report::median;
use super::{ACCOUNT, Bench, Database, microseconds};
use crate::Result;
use crate::cql::select;
use crate::load::HistoryOutcome;

const LIMIT: u32 = 100;
const FILL: u32 = 1_000;
const P50_MAX: f64 = 1.3;

#[derive(Serialize, Default)]
pub(super) struct Reading {
    pub(super) bare: Vec<select::Outcome>,
    pub(super) node: Vec<HistoryOutcome>,
}

impl Reading {
    /// Measures both once, in turn. The rows are those that the node has just written.
    pub(super) fn measure(&mut self, bench: &Bench<'_>, database: &Database, seconds: u32) -> Result<()> {
        let channel = format!("bench:history:{}", bench.fresh_prefix());
        let node = bench.node(database)?;
        let mut pages = load(&bench.this, "history", &node);
        pages.args(["--channel", &channel, "--fill", &FILL.to_string()]);
        pages.args(["--limit", &LIMIT.to_string(), "--seconds", &seconds.to_string()]);
        database.add_pids(&mut pages);
        self.node.push(result_of(pages)?);
        let mut rows = bench.bare("cql-select", database);
        rows.args(["--account", ACCOUNT, "--channel", &channel]);
        rows.args(["--limit", &LIMIT.to_string(), "--seconds", &seconds.to_string()]);
        database.add_pids(&mut rows);
        self.bare.push(result_of(rows)?);
        Ok(())
    }

    fn ratio(&self) -> f64 {
        median(&self.node, |run| run.p50_ms) / median(&self.bare, |run| run.p50_ms)
    }

    pub(super) fn bar(&self, database: &str) -> Option<Bar> {
        if self.bare.is_empty() || self.node.is_empty() {
            return None;
        }
        let what = format!("{database}: p50 of a page of {LIMIT}, of a bare select");
        Some(Bar::at_most(what, self.ratio(), P50_MAX, |ratio| format!("{ratio:.2} ×")))
    }

    pub(super) fn table(&self, database: &str) -> String {
        let title = format!("{database}: the newest {LIMIT} of {FILL}");
        let columns = [
            "p50 / p99 ms",
            "of the bare select",
            "µs of CPU for each: database",
            "driver, node",
            "generator",
        ];
        let mut table = Table::new(&title, &columns);
        let each_us = |cpu_s: f64, reads: u64| cpu_s * 1e6 / reads as f64;
        let (bare, node) = (&self.bare, &self.node);
        let reads = pair(median(bare, |run| run.p50_ms), median(bare, |run| run.p99_ms));
        let stored = microseconds(median(bare, |run| each_us(run.cost.server_cpu_s, run.reads)));
        let driven = microseconds(median(bare, |run| each_us(run.cost.generator_cpu_s, run.reads)));
        let cells = vec![reads, "1.00 ×".to_owned(), stored, driven, String::new()];
        table.row("bare select", bare.len(), cells);
        let pages = pair(median(node, |run| run.p50_ms), median(node, |run| run.p99_ms));
        let stored = microseconds(median(node, |run| each_us(run.database_cpu_s, run.pages)));
        let served = microseconds(median(node, |run| each_us(run.cost.server_cpu_s, run.pages)));
        let generated = microseconds(median(node, |run| each_us(run.cost.generator_cpu_s, run.pages)));
        let cells = vec![pages, format!("{:.2} ×", self.ratio()), stored, served, generated];
        table.row("Fanfare, a page over HTTP", node.len(), cells);
        table.text()
    }
}
