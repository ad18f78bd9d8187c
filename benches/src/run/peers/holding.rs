//! Idle load: cost of a connection, and of each channel beyond its connection.

use serde::Serialize;

use super::super::generator::{load, result_of};
use super::contender::Contender;
use super::measure::{Comparison, Row};
use super::workload::Part;
use crate::Result;
use crate::load::IdleOutcome;

pub(super) const IDLE_CONNECTIONS: u32 = 15_000;
/// Length of the idle part, in seconds: half-way between the second and the third heartbeat, which come every 15 s.
const IDLE_SECONDS: u32 = 37;
pub(super) const CROWD_CONNECTIONS: u32 = 10_000;
const CROWD_ATTACHED: u32 = 10;
const CROWD_SECONDS: u32 = 5;

/// Memory and CPU of the same number of connections without channels and with several channels each.
#[derive(Serialize)]
pub(super) struct Crowd {
    pub(super) attached: u32,
    pub(super) without: IdleOutcome,
    pub(super) with: IdleOutcome,
}

impl Crowd {
    /// Memory of a channel with one subscriber, beyond its connection.
    pub(super) fn channel_bytes(&self) -> f64 {
        (self.with.resident_bytes - self.without.resident_bytes) / f64::from(self.attached)
    }
}

/// CPU of the server for each connection and second.
pub(super) fn holding_us(run: &IdleOutcome) -> f64 {
    run.holding.server_cpu_s * 1e6 / run.connections as f64 / run.holding.wall_s
}

impl Comparison<'_> {
    pub(super) fn idle(&self, failures: &mut Vec<String>) -> Vec<Row<IdleOutcome>> {
        let title = format!("{} idle connections", self.scaled(IDLE_CONNECTIONS));
        self.rows_of(Part::W3, &title, failures, |contender| {
            self.hold(contender, IDLE_CONNECTIONS, 1, IDLE_SECONDS)
        })
    }

    pub(super) fn crowds(&self, failures: &mut Vec<String>) -> Vec<Row<Crowd>> {
        let title = format!("{} connections of {CROWD_ATTACHED} channels", self.scaled(CROWD_CONNECTIONS));
        self.rows_of(Part::W6, &title, failures, |contender| {
            let hold = |attached| self.hold(contender, CROWD_CONNECTIONS, attached, CROWD_SECONDS);
            Ok(Crowd { attached: CROWD_ATTACHED, without: hold(0)?, with: hold(CROWD_ATTACHED)? })
        })
    }

    fn hold(
        &self,
        contender: Contender,
        connections: u32,
        attached: u32,
        seconds: u32,
    ) -> Result<IdleOutcome> {
        let server = contender.start_with_heartbeats(&self.places)?;
        let mut command = load(&self.places.bench, "idle", &server);
        command.args(["--dialect", contender.dialect().name()]);
        for (option, value) in [
            ("--connections", self.scaled(connections)),
            ("--attached", attached),
            ("--settle-seconds", seconds),
        ] {
            command.args([option, &value.to_string()]);
        }
        result_of(command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Cost;

    fn holding(resident_bytes: f64) -> IdleOutcome {
        let cost = || Cost { wall_s: 30.0, server_cpu_s: 0.3, generator_cpu_s: 0.1 };
        IdleOutcome {
            connections: 1_000,
            resident_bytes,
            socket_bytes: 0.0,
            opening: cost(),
            holding: cost(),
            received: 2.0,
            sent: 2.0,
        }
    }

    #[test]
    fn a_channel_is_what_comes_on_top_of_its_connection() {
        let crowd = Crowd { attached: 10, without: holding(2_000.0), with: holding(7_000.0) };
        assert_eq!(crowd.channel_bytes(), 500.0);
    }

    #[test]
    fn holding_cost_is_reported_per_connection_and_second() {
        assert!((holding_us(&holding(0.0)) - 10.0).abs() < 1e-9);
    }
}
