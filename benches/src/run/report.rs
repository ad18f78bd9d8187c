//! All figures of a run, and those that are compared: medians over the repetitions.

use serde::Serialize;

use super::bars::{Bar, bars};
use super::machine::Machine;
use crate::load::{FanoutOutcome, IdleOutcome, PresenceOutcome, PublishOutcome};
use crate::store_loop;

#[derive(Serialize)]
pub(super) struct Report {
    pub(super) machine: Machine,
    pub(super) measured: Measurements,
    pub(super) bars: Vec<Bar>,
    pub(super) failures: Vec<String>,
}

impl Report {
    pub(super) fn new(machine: Machine, measured: Measurements, failures: Vec<String>) -> Self {
        let bars = bars(&measured);
        Self { machine, measured, bars, failures }
    }
}

#[derive(Serialize, Default)]
pub(super) struct Measurements {
    pub(super) fanouts: Vec<Fanout>,
    pub(super) idle: Option<Idle>,
    pub(super) publish: Option<Publish>,
    pub(super) presences: Vec<Presence>,
}

#[derive(Serialize)]
pub(super) struct Fanout {
    pub(super) subscribers: usize,
    pub(super) messages_per_s: u32,
    pub(super) message_bytes: usize,
    pub(super) node: Vec<FanoutOutcome>,
    #[serde(rename = "floor")]
    pub(super) baseline: Vec<FanoutOutcome>,
}

impl Fanout {
    pub(super) fn new(subscribers: usize, messages_per_s: u32, message_bytes: usize) -> Self {
        Self { subscribers, messages_per_s, message_bytes, node: Vec::new(), baseline: Vec::new() }
    }

    /// Node's deliveries per core-second, as a share of the baseline's.
    pub(super) fn ratio(&self) -> f64 {
        median(&self.node, deliveries_per_core_second) / median(&self.baseline, deliveries_per_core_second)
    }

    pub(super) fn faults(&self) -> Vec<String> {
        let named = [("the node", &self.node), ("the floor", &self.baseline)];
        let runs = named.iter().flat_map(|(name, runs)| runs.iter().map(move |run| (name, &run.faults)));
        runs.filter(|(_, faults)| faults.any())
            .map(|(name, faults)| format!("fan-out × {}: {name} had {faults:?}", self.subscribers))
            .collect()
    }
}

pub(super) fn deliveries_per_core_second(run: &FanoutOutcome) -> f64 {
    run.deliveries as f64 / run.cost.server_cpu_s
}

#[derive(Serialize)]
pub(super) struct Idle {
    pub(super) runs: Vec<IdleOutcome>,
}

impl Idle {
    pub(super) fn resident_kb(&self) -> f64 {
        median(&self.runs, |run| run.resident_bytes / 1024.0)
    }
}

#[derive(Serialize)]
pub(super) struct Publish {
    pub(super) connections: usize,
    pub(super) window: usize,
    pub(super) message_bytes: usize,
    pub(super) node: Vec<PublishOutcome>,
    pub(super) bare_loop: Vec<store_loop::Outcome>,
}

impl Publish {
    pub(super) fn new(connections: usize, window: usize, message_bytes: usize) -> Self {
        Self { connections, window, message_bytes, node: Vec::new(), bare_loop: Vec::new() }
    }

    /// Node's acked publishes per second, as a share of the bare loop's rows.
    pub(super) fn ratio(&self) -> f64 {
        median(&self.node, |run| run.acked_per_s) / median(&self.bare_loop, |run| run.rows_per_s)
    }
}

/// Figures of members that enter in front of `subscribers` subscribers.
#[derive(Serialize)]
pub(super) struct Presence {
    pub(super) members: usize,
    pub(super) subscribers: usize,
    pub(super) runs: Vec<PresenceOutcome>,
}

impl Presence {
    pub(super) fn newcomer_cpu_ms(&self) -> f64 {
        median(&self.runs, |run| run.newcomer_cpu_ms)
    }

    /// Gives the sent bytes as a multiple of the needed ones.
    pub(super) fn sent_of_needed(&self) -> f64 {
        median(&self.runs, |run| run.sent_bytes as f64 / run.needed_bytes as f64)
    }
}

/// Middle figure, or the mean of the two middle ones; NaN without runs.
pub(super) fn median<Run>(runs: &[Run], figure: impl Fn(&Run) -> f64) -> f64 {
    let mut figures: Vec<f64> = runs.iter().map(figure).collect();
    figures.sort_by(f64::total_cmp);
    let middle = figures.len() / 2;
    match figures.len() {
        0 => f64::NAN,
        count if count % 2 == 1 => figures[middle],
        _ => f64::midpoint(figures[middle - 1], figures[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_middle() {
        assert_eq!(median(&[3.0, 1.0, 2.0], |figure| *figure), 2.0);
        assert_eq!(median(&[4.0, 1.0], |figure| *figure), 2.5);
        assert!(median::<f64>(&[], |figure| *figure).is_nan());
    }
}
