//! Measurements and their order: within a repetition the servers take turns, and each repetition begins with
//! another one. So a drift of the machine hits all alike, and no server always follows the same one. Each
//! measurement has a fresh server and a fresh generator.

use serde::Serialize;

use super::super::durable::Durable;
use super::super::generator::{load, result_of};
use super::super::report::Publish;
use super::Options;
use super::connection_storms::ConnectionStorms;
use super::contender::{Contender, ServerDescription, ServerPaths};
use super::holding::Crowd;
use super::slow::SlowReader;
use super::table;
use super::workload::{self, Part, Reading, Workload};
use crate::load::{FanoutOutcome, IdleOutcome};
use crate::{NotCarried, Result};

/// Greatest 99th percentile at which a rate counts as carried, if nothing is lost.
pub(super) const P99_MS_MAX: f64 = 100.0;
const FIRST_TRIAL_PER_S: f64 = 200_000.0;
/// Factor from one trial to the next, until both sides of the limit are known. Then the step is halved
/// `HALVINGS` times.
const STEP: f64 = 1.4;
const HALVINGS: u32 = 2;
/// Least length of a part with durable publishes or a slow reader, in seconds. In a shorter one a database
/// that sorts its files meanwhile makes a difference by chance, and the 99th percentiles differ too much
/// between runs.
pub(super) const SECONDS_MIN: u32 = 10;
/// Bounds of the search: no server is that slow or that fast.
const TRIALS_PER_S: std::ops::Range<f64> = 10_000.0..20_000_000.0;

pub(super) struct Comparison<'a> {
    pub(super) places: ServerPaths,
    pub(super) contenders: Vec<Contender>,
    pub(super) options: &'a Options,
}

#[derive(Serialize, Default)]
pub(super) struct Measurements {
    pub(super) fixed: Vec<FixedRate>,
    pub(super) most: Vec<HighestRate>,
    pub(super) idle: Vec<Row<IdleOutcome>>,
    #[serde(rename = "herds")]
    pub(super) connection_storms: Vec<Row<ConnectionStorms>>,
    pub(super) durable: Option<Publish>,
    pub(super) crowds: Vec<Row<Crowd>>,
    pub(super) slow: Option<SlowReaderRows>,
}

/// A workload at a given rate.
#[derive(Serialize)]
pub(super) struct FixedRate {
    pub(super) workload: Workload,
    pub(super) rows: Vec<Row<FanoutOutcome>>,
}

/// The highest rate that each server carried.
#[derive(Serialize)]
pub(super) struct HighestRate {
    pub(super) message_bytes: u32,
    pub(super) rows: Vec<Row<Trial>>,
}

#[derive(Serialize)]
pub(super) struct SlowReaderRows {
    pub(super) workload: Workload,
    pub(super) rows: Vec<Row<SlowReader>>,
}

#[derive(Serialize)]
pub(super) struct Row<Run> {
    pub(super) contender: Contender,
    pub(super) runs: Vec<Run>,
    /// Reasons for which other runs have no figures: the server did not carry the load.
    pub(super) not_carried: Vec<String>,
}

impl<Run> Row<Run> {
    pub(super) fn new(contender: Contender) -> Self {
        Self { contender, runs: Vec::new(), not_carried: Vec::new() }
    }

    /// Keeps the outcome of a run. Gives the text of a failure; a load that Fanfare does not carry is one.
    fn take(&mut self, run: Result<Run>) -> Option<String> {
        let name = self.contender.name();
        match run {
            Ok(run) => {
                self.runs.push(run);
                None
            }
            Err(error) => {
                let not_carried = error.downcast_ref().map(|NotCarried(reason)| reason.clone());
                let failed = not_carried.is_none() || self.contender.is_fanfare();
                self.not_carried.extend(not_carried);
                failed.then(|| format!("{name}: {error}"))
            }
        }
    }
}

#[derive(Serialize)]
pub(super) struct Trial {
    pub(super) deliveries_per_s: u32,
    pub(super) outcome: FanoutOutcome,
}

impl Comparison<'_> {
    /// Describes each server, and the loop beside durable publishes.
    pub(super) fn described(&self) -> Vec<ServerDescription> {
        let servers = self.contenders.iter().map(|contender| contender.describe(&self.places));
        let bare_loop = self.options.is_asked(Part::W5, &self.contenders).then(ServerDescription::bare_loop);
        servers.chain(bare_loop).collect()
    }

    /// Measures all that can be measured, printing each table as soon as it is known, and gives the failures as text.
    pub(super) fn measure(&self) -> (Measurements, Vec<String>) {
        let print = |table: String| eprint!("\n{table}");
        let asked = |part| self.options.is_asked(part, &self.contenders);
        let (mut measured, mut failures) = (Measurements::default(), Vec::new());
        for workload in workload::of_parts(asked) {
            let title = workload.title();
            let rows = self.rows(&title, &mut failures, |contender| {
                self.fan_out(contender, workload, Reading::All, self.options.seconds)
            });
            failures.extend(faults_of_fanfare(&title, &rows));
            let fixed = FixedRate { workload, rows };
            print(table::fixed_table(&fixed));
            measured.fixed.push(fixed);
        }
        for message_bytes in workload::W2_BYTES.into_iter().filter(|_| asked(Part::Most)) {
            let title = format!("the most, {message_bytes} B");
            let most = |contender| self.most(contender, message_bytes);
            let rows = self.rows_of(Part::Most, &title, &mut failures, most);
            let most = HighestRate { message_bytes, rows };
            print(table::most_table(&most));
            measured.most.push(most);
        }
        if asked(Part::W3) {
            measured.idle = self.idle(&mut failures);
            print(table::idle_table(&measured.idle));
        }
        if asked(Part::W4) {
            measured.connection_storms = self.connection_storms(&mut failures);
            print(table::storm_table(&measured.connection_storms));
        }
        if asked(Part::W5) {
            let (publish, ended) = self.durable();
            failures.extend(ended.err().map(|error| format!("durable publishes: {error}")));
            print(table::durable_table(&publish));
            measured.durable = Some(publish);
        }
        if asked(Part::W6) {
            measured.crowds = self.crowds(&mut failures);
            print(table::crowd_table(&measured.crowds));
        }
        if asked(Part::W7) {
            let workload = workload::hundred();
            let rows = self.slow_reader(workload, &mut failures);
            let slow = SlowReaderRows { workload, rows };
            print(table::slow_table(&slow));
            measured.slow = Some(slow);
        }
        (measured, failures)
    }

    fn rows<Run>(
        &self,
        title: &str,
        failures: &mut Vec<String>,
        run: impl Fn(Contender) -> Result<Run>,
    ) -> Vec<Row<Run>> {
        self.rows_where(|_| 1, title, failures, |contender, _| run(contender))
    }

    /// Measures the contenders of a part, each once in a repetition.
    pub(super) fn rows_of<Run>(
        &self,
        part: Part,
        title: &str,
        failures: &mut Vec<String>,
        run: impl Fn(Contender) -> Result<Run>,
    ) -> Vec<Row<Run>> {
        let times = |contender| u32::from(part.measures(contender));
        self.rows_where(times, title, failures, |contender, _| run(contender))
    }

    /// Measures the contenders. `times` gives the runs of each within a repetition; one without runs has no row. `run`
    /// also gets the number of the run for its contender.
    pub(super) fn rows_where<Run>(
        &self,
        times: impl Fn(Contender) -> u32,
        title: &str,
        failures: &mut Vec<String>,
        run: impl Fn(Contender, u32) -> Result<Run>,
    ) -> Vec<Row<Run>> {
        let contenders = self.contenders.iter().copied().filter(|contender| times(*contender) > 0);
        let mut rows: Vec<Row<Run>> = contenders.map(Row::new).collect();
        for repetition in 0..self.options.repetitions {
            for at in turns(repetition, rows.len()) {
                let row = &mut rows[at];
                let (name, times) = (row.contender.name(), times(row.contender));
                for nth in repetition * times..(repetition + 1) * times {
                    eprintln!("bench: {title}: {name}, {} of {}", nth + 1, self.options.repetitions * times);
                    let failed = row.take(run(row.contender, nth));
                    failures.extend(failed.map(|reason| format!("{title}: {reason}")));
                }
            }
        }
        rows
    }

    fn durable(&self) -> (Publish, Result<()>) {
        let ServerPaths { bench, node, data, .. } = &self.places;
        let Options { repetitions, seconds, .. } = *self.options;
        let say = |repetition| eprintln!("bench: durable publishes, {repetition} of {repetitions}");
        Durable { bench, node, data, seconds: seconds.max(SECONDS_MIN) }.measure(repetitions, say)
    }

    /// Gives `connections`, or the number of `--connections` if it is smaller.
    pub(super) fn scaled(&self, connections: u32) -> u32 {
        self.options.connections.map_or(connections, |most| connections.min(most))
    }

    pub(super) fn fan_out(
        &self,
        contender: Contender,
        workload: Workload,
        reading: Reading,
        seconds: u32,
    ) -> Result<FanoutOutcome> {
        let server = contender.start(&self.places)?;
        let mut command = load(&self.places.bench, "fanout", &server);
        command.args(["--dialect", contender.dialect().name()]);
        for (option, value) in [
            ("--subscribers", workload.subscribers),
            ("--channels", workload.channels),
            ("--attached", workload.attached),
            ("--slow", reading as u32),
            ("--publishers", workload.publishers),
            ("--bytes", workload.message_bytes),
            ("--seconds", seconds),
            ("--rest-us", self.options.rest_us),
        ] {
            command.args([option, &value.to_string()]);
        }
        command.args(["--rate", &workload.messages_per_s().to_string()]);
        if workload.groups {
            command.arg("--groups");
        }
        result_of(command)
    }

    /// Tries rates until the limit is known within a tenth. A rate that is not carried is tried once more, as it may be
    /// chance.
    fn most(&self, contender: Contender, message_bytes: u32) -> Result<Trial> {
        let (mut best, mut failed) = (None, None);
        let mut carried = |per_s: f64| {
            let deliveries_per_s = per_s.round() as u32;
            let workload = workload::many_channels(deliveries_per_s, message_bytes);
            match self.fan_out(contender, workload, Reading::All, self.options.seconds) {
                Ok(outcome) => {
                    let carried = outcome.p99_ms < P99_MS_MAX && !outcome.faults.any();
                    let faults = table::faults(std::slice::from_ref(&outcome));
                    eprintln!(
                        "bench: {deliveries_per_s}/s: p99 {:.1} ms, lost / doubled / reordered / astray {faults}",
                        outcome.p99_ms
                    );
                    if carried {
                        best = Some(Trial { deliveries_per_s, outcome });
                    }
                    carried
                }
                Err(error) => {
                    eprintln!("bench: {deliveries_per_s}/s: {error}");
                    failed = failed.take().or_else(|| (!error.is::<NotCarried>()).then_some(error));
                    false
                }
            }
        };
        search(|per_s| carried(per_s) || carried(per_s));
        match failed {
            Some(error) => Err(error),
            None => best.ok_or_else(|| NotCarried("no rate was carried".to_owned()).into()),
        }
    }
}

/// Order of the rows in a repetition; each repetition begins with another row.
fn turns(repetition: u32, rows: usize) -> impl Iterator<Item = usize> {
    (0..rows).map(move |at| (at + repetition as usize) % rows)
}

/// Calls `carried` with higher or lower rates until the limit lies between two trials, and then with rates between
/// them. The last rate that was carried is the highest.
fn search(mut carried: impl FnMut(f64) -> bool) {
    let mut per_s = FIRST_TRIAL_PER_S;
    let first = carried(per_s);
    let (mut yes, mut no) = loop {
        let next = if first { per_s * STEP } else { per_s / STEP };
        if !TRIALS_PER_S.contains(&next) {
            return;
        }
        if carried(next) != first {
            break if first { (per_s, next) } else { (next, per_s) };
        }
        per_s = next;
    };
    for _ in 0..HALVINGS {
        let middle = (yes * no).sqrt();
        if carried(middle) { yes = middle } else { no = middle }
    }
}

fn faults_of_fanfare(title: &str, rows: &[Row<FanoutOutcome>]) -> Vec<String> {
    let ours = rows.iter().filter(|row| row.contender.is_fanfare());
    let runs = ours.flat_map(|row| row.runs.iter().map(|run| (row.contender.name(), &run.faults)));
    let faulty = runs.filter(|(_, faults)| faults.any());
    faulty.map(|(name, faults)| format!("{title}: {name} had {faults:?}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_fanfare_has_to_carry_what_is_asked() {
        let not_carried = || Err(NotCarried("too much".to_owned()).into());
        for (contender, fails) in
            [(Contender::Baseline, false), (Contender::Nats, false), (Contender::FanfareWindow5, true)]
        {
            let mut row = Row::<u32>::new(contender);
            assert_eq!(row.take(Ok(7)), None);
            assert_eq!(row.take(not_carried()).is_some(), fails);
            assert!(row.take(Err("no such file".into())).is_some());
            assert_eq!((row.runs, row.not_carried), (vec![7], vec!["too much".to_owned()]));
        }
    }

    #[test]
    fn each_repetition_begins_with_another_one() {
        let turns = |repetition| turns(repetition, 3).collect::<Vec<_>>();
        assert_eq!([turns(0), turns(1), turns(2), turns(3)], [[0, 1, 2], [1, 2, 0], [2, 0, 1], [0, 1, 2]]);
        assert_eq!(super::turns(5, 0).count(), 0);
    }

    #[test]
    fn the_limit_is_found_from_both_sides() {
        for limit in [30_000.0, 150_000.0, 199_999.0, 200_000.0, 777_777.0, 5_000_000.0] {
            let mut last_yes = 0.0;
            search(|per_s| {
                let carried = per_s <= limit;
                assert!(!carried || per_s > last_yes, "a lower yes after a higher one");
                last_yes = if carried { per_s } else { last_yes };
                carried
            });
            assert!(last_yes <= limit && last_yes * 1.1 > limit, "{last_yes} for {limit}");
        }
    }

    #[test]
    fn a_search_without_a_limit_ends() {
        let (mut up, mut down) = (0, 0);
        search(|_| {
            up += 1;
            true
        });
        search(|_| {
            down += 1;
            false
        });
        assert!((2..30).contains(&up) && (2..30).contains(&down), "{up} {down}");
    }
}
