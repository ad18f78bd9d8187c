//! Time of an attach to a channel without interest, one attach after another.

use clap::Args;
use serde::{Deserialize, Serialize};

use super::opening::Opening;
use super::{Cost, Meter, Target};
use crate::histogram::Histogram;
use crate::{Result, os};

#[derive(Args, Clone)]
pub struct Attach {
    #[command(flatten)]
    pub target: Target,
    /// Number of connections, opened one after another; all stay open.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u32).range(1..))]
    pub connections: u32,
    /// Number of own channels to which each connection attaches, one after another.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(1..))]
    pub attached: u32,
}

#[derive(Serialize, Deserialize)]
pub struct Outcome {
    pub attaches: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub cost: Cost,
}

impl Attach {
    /// Runs the workload. The first connection warms up and is not counted, unless it is the only one.
    pub fn run(&self) -> Result<Outcome> {
        let target = &self.target;
        let upgrade = target.dialect.upgrade(&target.address.to_string(), target.authorization()?.as_deref());
        let (mut times, mut opened) = (Histogram::default(), Vec::new());
        let mut meter = Meter::start(&target.server_pids)?;
        for connection in 0..self.connections {
            if connection == 1 {
                times = Histogram::default();
                meter = Meter::start(&target.server_pids)?;
            }
            let mut opening = Opening::begin(target, &upgrade)?;
            opening.greeted()?;
            for nth in 0..self.attached {
                let began_ns = os::monotonic_ns();
                opening.subscribe(nth + 1, &format!("bench:attach:{connection}:{nth}"))?;
                opening.answered()?;
                times.record(os::monotonic_ns().saturating_sub(began_ns));
            }
            opened.push(opening);
        }
        let cost = meter.stop()?;
        let (p50_ms, p99_ms) = (times.quantile_ms(0.5), times.quantile_ms(0.99));
        Ok(Outcome { attaches: times.total(), p50_ms, p99_ms, cost })
    }
}
