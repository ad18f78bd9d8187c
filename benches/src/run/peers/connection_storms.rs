//! Cost of a connection until it is attached, and duration of a connection storm.

use std::thread;

use serde::Serialize;

use super::super::generator::{load, result_of};
use super::contender::Contender;
use super::measure::{Comparison, Row};
use super::workload::Part;
use crate::Result;
use crate::load::StormOutcome;

pub(super) const STORM_CONNECTIONS: u32 = 10_000;
/// Number of connections that are being opened at once when the server sets the pace.
const TOGETHER: u32 = 100;

/// The same connections twice, one after another and at once, each time to a fresh server.
#[derive(Serialize)]
pub(super) struct ConnectionStorms {
    pub(super) in_turn: StormOutcome,
    pub(super) at_once: StormOutcome,
    /// Cores of the machine.
    pub(super) cores: usize,
}

impl ConnectionStorms {
    /// Connections opened and attached per second of the server's CPU, when they come in turn.
    pub(super) fn per_core_second(&self) -> f64 {
        self.in_turn.connections as f64 / self.in_turn.cost.server_cpu_s
    }

    /// Duration of the storm, as a multiple of its CPU time on both sides over all cores. Above 1 there was idle time.
    pub(super) fn wall_of_cpu(&self) -> f64 {
        let cost = &self.at_once.cost;
        cost.wall_s / ((cost.server_cpu_s + cost.generator_cpu_s) / self.cores as f64)
    }
}

impl Comparison<'_> {
    pub(super) fn connection_storms(&self, failures: &mut Vec<String>) -> Vec<Row<ConnectionStorms>> {
        let title = format!("{} connections, in turn and at once", self.scaled(STORM_CONNECTIONS));
        let rows = self.rows_of(Part::W4, &title, failures, |contender| {
            let in_turn = self.connection_storm(contender, Some(TOGETHER))?;
            let cores = thread::available_parallelism()?.get();
            Ok(ConnectionStorms { in_turn, at_once: self.connection_storm(contender, None)?, cores })
        });
        for row in rows.iter().filter(|row| row.contender.is_fanfare()) {
            for run in
                row.runs.iter().flat_map(|run| [&run.in_turn, &run.at_once]).filter(|run| run.refused > 0)
            {
                let (name, why) =
                    (row.contender.name(), run.refusal.as_deref().unwrap_or("not attached in time"));
                failures.push(format!("{title}: {name}: {} refused: {why}", run.refused));
            }
        }
        rows
    }

    fn connection_storm(&self, contender: Contender, together: Option<u32>) -> Result<StormOutcome> {
        let server = contender.start(&self.places)?;
        let mut command = load(&self.places.bench, "herd", &server);
        command.args(["--dialect", contender.dialect().name()]);
        command.args(["--connections", &self.scaled(STORM_CONNECTIONS).to_string()]);
        if let Some(together) = together {
            command.args(["--together", &together.to_string()]);
        }
        command.args(server.key_file.is_some().then_some("--sign"));
        result_of(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Cost;

    fn storms_of(wall_s: f64, server_cpu_s: f64, cores: usize) -> ConnectionStorms {
        let outcome = || StormOutcome {
            connections: 10_000,
            refused: 0,
            refusal: None,
            p50_ms: 1.0,
            p99_ms: 2.0,
            cost: Cost { wall_s, server_cpu_s, generator_cpu_s: 1.0 },
        };
        ConnectionStorms { in_turn: outcome(), at_once: outcome(), cores }
    }

    #[test]
    fn storm_wall_time_is_compared_with_cpu_time_over_all_cores() {
        assert_eq!(storms_of(2.0, 1.0, 1).wall_of_cpu(), 1.0);
        assert_eq!(storms_of(3.0, 3.0, 2).wall_of_cpu(), 1.5);
    }
}
