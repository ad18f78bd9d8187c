//! Effect of one subscriber in a hundred that reads nothing on the others.

use serde::Serialize;

use super::super::report::median;
use super::contender::Contender;
use super::measure::{Comparison, Row, SECONDS_MIN};
use super::workload::{Part, Reading, Workload};
use crate::load::{FanoutOutcome, SlowReaderStats};
use crate::{NotCarried, Result};

/// The same load twice, with and without a slow reader, each time on a fresh server.
#[derive(Serialize)]
pub(super) struct SlowReader {
    pub(super) without: FanoutOutcome,
    pub(super) with: FanoutOutcome,
}

/// Least share of the measured part in which a slow reader must be attached.
const ATTACHED_MIN: f64 = 0.9;
/// Number of runs of Fanfare in each repetition. Its bar compares two of its own 99th percentiles, and each of them
/// varies by up to a factor of two between runs.
const TIMES_OF_FANFARE: u32 = 3;

impl SlowReader {
    /// Gives a share of the run with a slow reader.
    pub(super) fn slow(&self, share: impl Fn(&SlowReaderStats) -> f64) -> f64 {
        self.with.slow.as_ref().map_or(0.0, share)
    }

    /// The 99th percentile of the other subscribers, as a multiple of that without a slow reader.
    pub(super) fn p99_ratio(&self) -> f64 {
        self.with.p99_ms / self.without.p99_ms
    }

    /// The same ratio for the medians of several runs.
    pub(super) fn p99_ratio_of(runs: &[Self]) -> f64 {
        median(runs, |run| run.with.p99_ms) / median(runs, |run| run.without.p99_ms)
    }
}

impl Comparison<'_> {
    pub(super) fn slow_reader(&self, workload: Workload, failures: &mut Vec<String>) -> Vec<Row<SlowReader>> {
        let title = format!("{}, one reads nothing", workload.title());
        let times = |contender: Contender| match contender {
            Contender::Fanfare => TIMES_OF_FANFARE,
            contender => u32::from(Part::W7.measures(contender)),
        };
        let run = |contender, nth| self.both(contender, workload, nth);
        let rows = self.rows_where(times, &title, failures, run);
        for row in rows.iter().filter(|row| row.contender.is_fanfare()) {
            let runs = row.runs.iter().flat_map(|run| [&run.without, &run.with]);
            let faulty = runs.filter(|run| run.faults.any());
            failures
                .extend(faulty.map(|run| format!("{title}: {} had {:?}", row.contender.name(), run.faults)));
        }
        rows
    }

    /// Measures with and without a slow reader; which comes first alternates with `nth`. Returns an error if no slow
    /// reader was attached for most of the time.
    fn both(&self, contender: Contender, workload: Workload, nth: u32) -> Result<SlowReader> {
        let fan_out =
            |reading| self.fan_out(contender, workload, reading, self.options.seconds.max(SECONDS_MIN));
        let both = if nth.is_multiple_of(2) {
            SlowReader { without: fan_out(Reading::All)?, with: fan_out(Reading::AllButOne)? }
        } else {
            SlowReader { with: fan_out(Reading::AllButOne)?, without: fan_out(Reading::All)? }
        };
        match both.slow(|slow| slow.attached) {
            share if share < ATTACHED_MIN => {
                let percent = share * 100.0;
                Err(NotCarried(format!("a slow reader was attached in {percent:.0} % of the time")).into())
            }
            _ => Ok(both),
        }
    }
}
