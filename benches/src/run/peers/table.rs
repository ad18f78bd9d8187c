//! The tables as Markdown.

use std::fmt::Write as _;

use super::super::report::{deliveries_per_core_second, median};
use super::contender::Contender;
use super::measure::{Fixed, Measured, Most, P99_MS_MAX, Row};
use crate::load::FanoutOutcome;

pub(super) fn of(measured: &Measured, failures: &[String]) -> String {
    let mut text = String::new();
    measured.fixed.iter().for_each(|fixed| text += &fixed_table(fixed));
    measured.most.iter().for_each(|most| text += &most_table(most));
    for failure in failures {
        let _ = writeln!(text, "FAILED {failure}");
    }
    text
}

fn fixed_table(Fixed { workload, rows }: &Fixed) -> String {
    let mut table = Table::new(
        &workload.title(),
        &[
            "deliveries per core-second",
            "µs each",
            "Fanfare's, of it",
            "p50 / p99 ms",
            "RSS MB",
            "sockets MB",
            "generator: cores",
            "lag p99 / max ms",
            "lost / doubled / reordered / astray",
        ],
    );
    let fanfare = runs_of_fanfare(rows).map(|runs| median(runs, deliveries_per_core_second));
    for Row { contender, runs } in rows {
        let per_core_second = median(runs, deliveries_per_core_second);
        let mut cells = vec![
            format!("{per_core_second:.0}"),
            format!("{:.2}", 1e6 / per_core_second),
            multiple(fanfare, per_core_second),
        ];
        cells.push(pair(median(runs, |run| run.p50_ms), median(runs, |run| run.p99_ms)));
        cells.push(format!("{:.1}", median(runs, |run| run.memory.resident_bytes as f64 / 1e6)));
        cells.push(format!("{:.1}", median(runs, |run| run.memory.socket_bytes as f64 / 1e6)));
        cells.push(format!("{:.2}", median(runs, generator_cores)));
        cells.push(pair(median(runs, |run| run.lag_p99_ms), median(runs, |run| run.lag_max_ms)));
        cells.push(faults(runs));
        table.row(*contender, runs.len(), cells);
    }
    table.text + "\n"
}

fn most_table(Most { message_bytes, rows }: &Most) -> String {
    let title = format!("the most with p99 < {P99_MS_MAX} ms, {message_bytes} B");
    let columns = [
        "deliveries/s",
        "Fanfare's, of it",
        "µs each",
        "p50 / p99 ms",
        "generator: cores",
        "lag p99 / max ms",
    ];
    let mut table = Table::new(&title, &columns);
    let fanfare = runs_of_fanfare(rows).map(|runs| median(runs, |run| f64::from(run.deliveries_per_s)));
    for Row { contender, runs } in rows {
        let per_s = median(runs, |run| f64::from(run.deliveries_per_s));
        let cells = vec![
            format!("{per_s:.0}"),
            multiple(fanfare, per_s),
            format!("{:.2}", median(runs, |run| 1e6 / deliveries_per_core_second(&run.outcome))),
            pair(median(runs, |run| run.outcome.p50_ms), median(runs, |run| run.outcome.p99_ms)),
            format!("{:.2}", median(runs, |run| generator_cores(&run.outcome))),
            pair(median(runs, |run| run.outcome.lag_p99_ms), median(runs, |run| run.outcome.lag_max_ms)),
        ];
        table.row(*contender, runs.len(), cells);
    }
    table.text + "\n"
}

struct Table {
    text: String,
    columns: usize,
}

impl Table {
    fn new(title: &str, columns: &[&str]) -> Self {
        let rule = "---|".repeat(columns.len() + 1);
        Self { text: format!("| {title} | {} |\n|{rule}\n", columns.join(" | ")), columns: columns.len() }
    }

    /// A server without a single run has no figures.
    fn row(&mut self, contender: Contender, runs: usize, cells: Vec<String>) {
        let cells = if runs == 0 { vec!["–".to_owned(); self.columns] } else { cells };
        let _ = writeln!(self.text, "| {} | {} |", contender.name(), cells.join(" | "));
    }
}

fn runs_of_fanfare<Run>(rows: &[Row<Run>]) -> Option<&[Run]> {
    rows.iter().find(|row| row.contender == Contender::Fanfare).map(|row| row.runs.as_slice())
}

fn multiple(fanfare: Option<f64>, figure: f64) -> String {
    fanfare
        .filter(|fanfare| fanfare.is_finite())
        .map_or_else(|| "–".to_owned(), |fanfare| format!("{:.2} ×", fanfare / figure))
}

fn generator_cores(run: &FanoutOutcome) -> f64 {
    run.cost.generator_cpu_s / run.cost.wall_s
}

fn faults(runs: &[FanoutOutcome]) -> String {
    let sum = |count: fn(&FanoutOutcome) -> u64| runs.iter().map(count).sum::<u64>();
    let (lost, duplicated) = (sum(|run| run.faults.lost), sum(|run| run.faults.duplicated));
    let (reordered, astray) = (sum(|run| run.faults.reordered), sum(|run| run.faults.astray));
    format!("{lost} / {duplicated} / {reordered} / {astray}")
}

fn pair(one: f64, other: f64) -> String {
    format!("{one:.2} / {other:.2}")
}

#[cfg(test)]
mod tests {
    use super::super::workload;
    use super::*;
    use crate::load::{Cost, Faults, Memory};

    fn run(server_cpu_s: f64) -> FanoutOutcome {
        FanoutOutcome {
            deliveries: 1_000_000,
            p50_ms: 1.0,
            p99_ms: 2.0,
            cost: Cost { wall_s: 10.0, server_cpu_s, generator_cpu_s: 5.0 },
            memory: Memory::default(),
            faults: Faults { lost: 3, ..Faults::default() },
            lag_p99_ms: 0.1,
            lag_max_ms: 0.2,
        }
    }

    #[test]
    fn each_server_is_told_as_a_multiple() {
        let rows = vec![
            Row { contender: Contender::Fanfare, runs: vec![run(1.0), run(2.0), run(9.0)] },
            Row { contender: Contender::Nats, runs: vec![run(6.0)] },
            Row { contender: Contender::Floor, runs: Vec::new() },
        ];
        let table = fixed_table(&Fixed { workload: workload::many_channels(100_000, 128), rows });
        let lines: Vec<&str> = table.lines().collect();
        assert!(lines[2].starts_with("| Fanfare | 500000 | 2.00 | 1.00 × | 1.00 / 2.00 |"), "{table}");
        assert!(lines[2].ends_with("| 0.50 | 0.10 / 0.20 | 9 / 0 / 0 / 0 |"), "{table}");
        assert!(lines[3].starts_with("| NATS | 166667 | 6.00 | 3.00 × |"), "{table}");
        assert!(lines[4].starts_with("| floor | – | – |"), "{table}");
        let cells = |line: &str| line.matches('|').count();
        assert!(lines[..5].iter().all(|line| cells(line) == cells(lines[0])), "{table}");
    }
}
