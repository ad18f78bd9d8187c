//! Ack of a publish on a node with one target, beside that without a target.

use serde::Serialize;

use super::super::bars::Bar;
use super::super::generator::{load, result_of};
use super::super::markdown::{Table, pair};
use super::super::report::median;
use super::Bench;
use crate::Result;
use crate::load::PublishOutcome;

const CONNECTIONS: usize = 16;
const COST_MAX: f64 = 1.3;

#[derive(Serialize)]
pub(super) struct Acks {
    shapes: Vec<Shape>,
}

/// Runs with `window` publishes under way on each connection.
#[derive(Serialize)]
struct Shape {
    window: usize,
    without: Vec<PublishOutcome>,
    with_one: Vec<PublishOutcome>,
}

impl Acks {
    pub(super) fn new() -> Self {
        let shape = |window| Shape { window, without: Vec::new(), with_one: Vec::new() };
        Self { shapes: [1, 64].map(shape).into() }
    }

    pub(super) fn measure(&mut self, bench: &Bench) -> Result<()> {
        for shape in &mut self.shapes {
            shape.without.push(publish(bench, shape.window, &[])?);
            let receiver = bench.receiver()?;
            shape.with_one.push(publish(bench, shape.window, &[("ok", receiver.url("/ok"))])?);
        }
        Ok(())
    }

    pub(super) fn bars(&self) -> Vec<Bar> {
        let bar = |shape: &Shape| {
            let what = format!("ack with one target, of that without, {} under way", shape.window);
            Bar::at_most(what, shape.cost(), COST_MAX, |cost| format!("{cost:.2} ×"))
        };
        self.shapes.iter().map(bar).collect()
    }

    pub(super) fn table(&self) -> String {
        let columns = ["acks/s", "p50 / p99 ms", "node CPU µs per ack"];
        let mut table = Table::new(&format!("{CONNECTIONS} connections, 128 B"), &columns);
        for shape in &self.shapes {
            for (name, runs) in [("no target", &shape.without), ("one webhook", &shape.with_one)] {
                let figure = |figure: fn(&PublishOutcome) -> f64| median(runs, figure);
                let cells = vec![
                    format!("{:.0}", figure(|run| run.acked_per_s)),
                    pair(figure(|run| run.ack_p50_ms), figure(|run| run.ack_p99_ms)),
                    format!(
                        "{:.1}",
                        figure(|run| 1e6 * run.cost.server_cpu_s / run.cost.wall_s / run.acked_per_s)
                    ),
                ];
                table.row(&format!("{} under way each, {name}", shape.window), runs.len(), cells);
            }
        }
        table.text()
    }
}

impl Shape {
    fn cost(&self) -> f64 {
        median(&self.with_one, |run| run.ack_p50_ms) / median(&self.without, |run| run.ack_p50_ms)
    }
}

fn publish(bench: &Bench, window: usize, webhooks: &[(&str, String)]) -> Result<PublishOutcome> {
    let node = bench.node(webhooks, None)?;
    let mut command = load(&bench.this, "publish", &node);
    command.args(["--connections", &CONNECTIONS.to_string(), "--window", &window.to_string()]);
    command.args(["--seconds", &bench.seconds.to_string()]);
    result_of(command)
}
