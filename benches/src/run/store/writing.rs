//! Acked publishes of a node, beside the same writes with the driver alone.

use serde::Serialize;

use super::super::bars::Bar;
use super::super::generator::{load, result_of};
use super::super::markdown::{Table, pair};
use super::super::report::median;
use super::{Bench, Database, microseconds};
use crate::Result;
use crate::cql::insert;
use crate::load::{Cost, PublishOutcome};

const MESSAGE_BYTES: u32 = 128;
const SHARE_MIN: f64 = 0.8;
/// Number of connections. A publisher stands for a server, with a connection and many channels.
const CONNECTIONS: u32 = 16;

/// Number of channels that are published to at a time, and of publishes under way on each.
#[derive(Clone, Copy, Serialize)]
pub(super) struct Shape {
    channels: u32,
    under_way: u32,
}

/// Measured shapes. A write to a channel holds all rows that wait for it: one, or as many as its publisher has under
/// way.
pub(super) const SHAPES: [Shape; 2] =
    [Shape { channels: 256, under_way: 1 }, Shape { channels: 16, under_way: 64 }];

impl Shape {
    pub(super) fn title(self) -> String {
        let Self { channels, under_way } = self;
        match under_way {
            1 => format!("{channels} channels, one row under way each"),
            _ => format!("{channels} channels, {under_way} rows under way each"),
        }
    }
}

#[derive(Serialize)]
pub(super) struct Writing {
    pub(super) shape: Shape,
    pub(super) bare: Vec<insert::Outcome>,
    pub(super) node: Vec<PublishOutcome>,
    /// Results of publishes whose messages have an id each.
    pub(super) with_ids: Vec<PublishOutcome>,
}

impl Writing {
    pub(super) fn new(shape: Shape) -> Self {
        Self { shape, bare: Vec::new(), node: Vec::new(), with_ids: Vec::new() }
    }

    /// Measures each once, in turn.
    pub(super) fn measure(&mut self, bench: &Bench<'_>, database: &Database, seconds: u32) -> Result<()> {
        self.bare.push(bare(self.shape, bench, database, seconds)?);
        self.node.push(through_node(self.shape, bench, database, seconds, false)?);
        if bench.options.ids {
            self.with_ids.push(through_node(self.shape, bench, database, seconds, true)?);
        }
        Ok(())
    }

    fn share(&self, node: &[PublishOutcome]) -> f64 {
        median(node, |run| run.acked_per_s) / median(&self.bare, |run| run.rows_per_s)
    }

    pub(super) fn bar(&self, database: &str) -> Option<Bar> {
        if self.bare.is_empty() || self.node.is_empty() {
            return None;
        }
        let what = format!("{database}, {}: of the driver alone", self.shape.title());
        Some(Bar::share(what, self.share(&self.node), SHARE_MIN))
    }

    pub(super) fn table(&self, database: &str) -> String {
        let title = format!("{database}: {}, {MESSAGE_BYTES} B", self.shape.title());
        let columns = [
            "rows/s",
            "of the driver alone",
            "ack, write p50 / p99 ms",
            "µs of CPU for each row: database",
            "driver, node",
            "generator",
        ];
        let mut table = Table::new(&title, &columns);
        let bare = &self.bare;
        let writes = pair(median(bare, |run| run.write_p50_ms), median(bare, |run| run.write_p99_ms));
        let rows = format!("{:.0}", median(bare, |run| run.rows_per_s));
        let of_bare =
            |cpu_s: fn(&Cost) -> f64| median(bare, |run| row_us(cpu_s(&run.cost), &run.cost, run.rows_per_s));
        let stored = microseconds(of_bare(|cost| cost.server_cpu_s));
        let driven = microseconds(of_bare(|cost| cost.generator_cpu_s));
        let cells = vec![rows, "100 %".to_owned(), writes, stored, driven, String::new()];
        table.row("driver alone", bare.len(), cells);
        table.row("Fanfare, acked", self.node.len(), self.cells(&self.node));
        if !self.with_ids.is_empty() {
            table.row("with an id each", self.with_ids.len(), self.cells(&self.with_ids));
        }
        table.text()
    }

    fn cells(&self, node: &[PublishOutcome]) -> Vec<String> {
        let acks = pair(median(node, |run| run.ack_p50_ms), median(node, |run| run.ack_p99_ms));
        let acked = format!("{:.0}", median(node, |run| run.acked_per_s));
        let of_node = |cpu_s: fn(&PublishOutcome) -> f64| {
            microseconds(median(node, |run| row_us(cpu_s(run), &run.cost, run.acked_per_s)))
        };
        let stored = of_node(|run| run.database_cpu_s);
        let served = of_node(|run| run.cost.server_cpu_s);
        let generated = of_node(|run| run.cost.generator_cpu_s);
        let share = format!("{:.0} %", self.share(node) * 100.0);
        vec![acked, share, acks, stored, served, generated]
    }
}

fn row_us(cpu_s: f64, cost: &Cost, per_s: f64) -> f64 {
    cpu_s * 1e6 / (per_s * cost.wall_s)
}

/// Measures writes to the database without a node, `under_way` at a time, each as large as one of the node can be.
pub(super) fn bare(
    shape: Shape,
    bench: &Bench<'_>,
    database: &Database,
    seconds: u32,
) -> Result<insert::Outcome> {
    let mut command = bench.bare("cql-insert", database);
    for (option, value) in
        [("--writers", shape.channels), ("--rows", shape.under_way), ("--seconds", seconds)]
    {
        command.args([option, &value.to_string()]);
    }
    command.args(["--prefix", &bench.fresh_prefix()]);
    database.add_pids(&mut command);
    result_of(command)
}

fn through_node(
    shape: Shape,
    bench: &Bench<'_>,
    database: &Database,
    seconds: u32,
    ids: bool,
) -> Result<PublishOutcome> {
    let node = bench.node(database)?;
    let mut command = load(&bench.this, "publish", &node);
    for (option, value) in [
        ("--connections", CONNECTIONS),
        ("--channels", shape.channels / CONNECTIONS),
        ("--window", shape.under_way),
        ("--seconds", seconds),
        ("--bytes", MESSAGE_BYTES),
    ] {
        command.args([option, &value.to_string()]);
    }
    if ids {
        command.arg("--ids");
    }
    database.add_pids(&mut command);
    result_of(command)
}
