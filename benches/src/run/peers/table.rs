//! Tables of the comparison, as Markdown.

use std::collections::BTreeSet;

use super::super::bars::Bar;
use super::super::markdown::{Table, bar_table, failed, pair};
use super::super::report::{Publish, deliveries_per_core_second, median};
use super::connection_storms::ConnectionStorms;
use super::contender::Contender;
use super::holding::{Crowd, holding_us};
use super::measure::{FixedRate, HighestRate, Measurements, P99_MS_MAX, Row, SlowReaderRows};
use super::slow::SlowReader;
use crate::load::{Cost, FanoutOutcome, IdleOutcome, SlowReaderStats};

/// Cores of the generator above which a server may be waiting for it, since it reads with one thread.
const GENERATOR_CORES_MAX: f64 = 0.85;

pub(super) fn of(measured: &Measurements, bars: &[Bar], failures: &[String]) -> String {
    let mut text = String::new();
    measured.fixed.iter().for_each(|fixed| text += &fixed_table(fixed));
    measured.most.iter().for_each(|most| text += &most_table(most));
    text += &idle_table(&measured.idle);
    text += &storm_table(&measured.connection_storms);
    text += &measured.durable.as_ref().map_or_else(String::new, durable_table);
    text += &crowd_table(&measured.crowds);
    text += &measured.slow.as_ref().map_or_else(String::new, slow_table);
    text + &bar_table(bars) + &failed(failures)
}

pub(super) fn fixed_table(FixedRate { workload, rows }: &FixedRate) -> String {
    let mut table = table_of(
        &workload.title(),
        &[
            "deliveries per core-second",
            "Fanfare's ÷ this",
            "µs each",
            "p50 / p99 ms",
            "deliveries per segment",
            "RSS MB",
            "sockets MB",
            "generator: cores",
            "lag p99 / max ms",
            "lost / doubled / reordered / astray",
        ],
    );
    let fanfare = runs_of_fanfare(rows).map(|runs| median(runs, deliveries_per_core_second));
    for row @ Row { runs, .. } in rows {
        let per_core_second = median(runs, deliveries_per_core_second);
        let mut cells = vec![
            format!("{per_core_second:.0}"),
            multiple(fanfare, per_core_second),
            spread(runs, 2, |run| 1e6 / deliveries_per_core_second(run)),
        ];
        cells.push(format!("{:.2} / {}", median(runs, |run| run.p50_ms), spread(runs, 2, |run| run.p99_ms)));
        cells.push(format!("{:.2}", median(runs, |run| run.deliveries as f64 / run.segments as f64)));
        cells.push(format!("{:.1}", median(runs, |run| run.memory.resident_bytes as f64 / 1e6)));
        cells.push(format!("{:.1}", median(runs, |run| run.memory.socket_bytes as f64 / 1e6)));
        cells.push(generator_cell(median(runs, |run| generator_cores(&run.cost))));
        cells.push(pair(median(runs, |run| run.lag_p99_ms), median(runs, |run| run.lag_max_ms)));
        cells.push(faults(runs));
        add(&mut table, row, cells);
    }
    table.text() + &not_carried(rows)
}

fn generator_cell(cores: f64) -> String {
    format!("{cores:.2}{}", if cores > GENERATOR_CORES_MAX { " (its limit)" } else { "" })
}

pub(super) fn most_table(HighestRate { message_bytes, rows }: &HighestRate) -> String {
    let title = format!("the most with p99 < {P99_MS_MAX} ms, {message_bytes} B");
    let columns = [
        "deliveries/s",
        "Fanfare's ÷ this",
        "µs each",
        "p50 / p99 ms",
        "generator: cores",
        "lag p99 / max ms",
    ];
    let mut table = table_of(&title, &columns);
    let fanfare = runs_of_fanfare(rows).map(|runs| median(runs, |run| f64::from(run.deliveries_per_s)));
    for row @ Row { runs, .. } in rows {
        let per_s = median(runs, |run| f64::from(run.deliveries_per_s));
        let cells = vec![
            spread(runs, 0, |run| f64::from(run.deliveries_per_s)),
            multiple(fanfare, per_s),
            format!("{:.2}", median(runs, |run| 1e6 / deliveries_per_core_second(&run.outcome))),
            pair(median(runs, |run| run.outcome.p50_ms), median(runs, |run| run.outcome.p99_ms)),
            generator_cell(median(runs, |run| generator_cores(&run.outcome.cost))),
            pair(median(runs, |run| run.outcome.lag_p99_ms), median(runs, |run| run.outcome.lag_max_ms)),
        ];
        add(&mut table, row, cells);
    }
    table.text() + &not_carried(rows)
}

pub(super) fn idle_table(rows: &[Row<IdleOutcome>]) -> String {
    let Some(connections) = rows.iter().flat_map(|row| &row.runs).map(|run| run.connections).next() else {
        return String::new();
    };
    let mut table = table_of(
        &format!("{connections} idle connections, one channel each"),
        &[
            "KB RSS each",
            "KB in socket buffers each",
            "µs of CPU each and second",
            "Fanfare's ÷ this",
            "frames each: heard / said",
            "seconds held",
            "generator: cores",
        ],
    );
    let fanfare = runs_of_fanfare(rows).map(|runs| median(runs, holding_us));
    for row @ Row { runs, .. } in rows {
        let us = median(runs, holding_us);
        let cells = vec![
            spread(runs, 2, |run| run.resident_bytes / 1024.0),
            format!("{:.2}", median(runs, |run| run.socket_bytes / 1024.0)),
            spread(runs, 2, holding_us),
            multiple(fanfare, us),
            pair(median(runs, |run| run.received), median(runs, |run| run.sent)),
            format!("{:.0}", median(runs, |run| run.holding.wall_s)),
            format!("{:.2}", median(runs, |run| generator_cores(&run.holding))),
        ];
        add(&mut table, row, cells);
    }
    table.text() + &not_carried(rows)
}

pub(super) fn storm_table(rows: &[Row<ConnectionStorms>]) -> String {
    let Some(run) = rows.iter().flat_map(|row| &row.runs).next() else { return String::new() };
    let columns = [
        "connections per core-second",
        "Fanfare's ÷ this",
        "µs of CPU each",
        "at once: wall s, of its CPU on all cores",
        "server CPU s",
        "generator CPU s",
        "each p50 / p99 ms",
        "refused",
    ];
    let title = format!("{} connections, opened and attached", run.in_turn.connections);
    let mut table = table_of(&title, &columns);
    let fanfare = runs_of_fanfare(rows).map(|runs| median(runs, ConnectionStorms::per_core_second));
    for row @ Row { runs, .. } in rows {
        let per_core_second = median(runs, ConnectionStorms::per_core_second);
        let seconds = |figure: fn(&ConnectionStorms) -> f64| format!("{:.2}", median(runs, figure));
        let refused: usize = runs.iter().map(|run| run.in_turn.refused + run.at_once.refused).sum();
        let cells = vec![
            format!("{per_core_second:.0}"),
            multiple(fanfare, per_core_second),
            spread(runs, 0, |run| 1e6 / run.per_core_second()),
            format!(
                "{}, {}",
                seconds(|run| run.at_once.cost.wall_s),
                spread(runs, 2, ConnectionStorms::wall_of_cpu)
            ),
            seconds(|run| run.at_once.cost.server_cpu_s),
            seconds(|run| run.at_once.cost.generator_cpu_s),
            pair(median(runs, |run| run.at_once.p50_ms), median(runs, |run| run.at_once.p99_ms)),
            refused.to_string(),
        ];
        add(&mut table, row, cells);
    }
    table.text() + &not_carried(rows)
}

pub(super) fn crowd_table(rows: &[Row<Crowd>]) -> String {
    let Some(crowd) = rows.iter().flat_map(|row| &row.runs).next() else { return String::new() };
    let title = format!("{} connections × {} channels of their own", crowd.with.connections, crowd.attached);
    let columns = [
        "bytes of RSS for each channel",
        "Fanfare's ÷ this",
        "KB RSS for each connection: without / with",
        "generator: cores",
    ];
    let mut table = table_of(&title, &columns);
    let fanfare = runs_of_fanfare(rows).map(|runs| median(runs, Crowd::channel_bytes));
    for row @ Row { runs, .. } in rows {
        let bytes = median(runs, Crowd::channel_bytes);
        let kb = |hold: fn(&Crowd) -> &IdleOutcome| median(runs, |run| hold(run).resident_bytes / 1024.0);
        let cells = vec![
            spread(runs, 0, Crowd::channel_bytes),
            multiple(fanfare, bytes),
            pair(kb(|run| &run.without), kb(|run| &run.with)),
            format!("{:.2}", median(runs, |run| generator_cores(&run.with.holding))),
        ];
        add(&mut table, row, cells);
    }
    table.text() + &not_carried(rows)
}

/// Table of the node and the bare loop. The peers have no durable publishes.
pub(super) fn durable_table(publish: &Publish) -> String {
    let Publish { connections, window, message_bytes, node, bare_loop } = publish;
    let length = length(node.first().map(|run| &run.cost));
    let title = format!("{connections} × {window} durable publishes under way, {message_bytes} B{length}");
    let columns = [
        "runs",
        "rows per second",
        "of the loop",
        "ack, commit p50 ms",
        "p99 ms",
        "µs of CPU each",
        "cores: it / generator",
    ];
    let mut table = Table::new(&title, &columns);
    let cells = vec![
        node.len().to_string(),
        spread(node, 0, |run| run.acked_per_s),
        format!("{:.0} %", publish.ratio() * 100.0),
        spread(node, 2, |run| run.ack_p50_ms),
        spread(node, 2, |run| run.ack_p99_ms),
        spread(node, 2, |run| 1e6 * run.cost.server_cpu_s / (run.acked_per_s * run.cost.wall_s)),
        pair(
            median(node, |run| run.cost.server_cpu_s / run.cost.wall_s),
            median(node, |run| generator_cores(&run.cost)),
        ),
    ];
    table.row("Fanfare, store embedded", node.len(), cells);
    let cells = vec![
        bare_loop.len().to_string(),
        spread(bare_loop, 0, |run| run.rows_per_s),
        "100 %".to_owned(),
        spread(bare_loop, 2, |run| run.commit_p50_ms),
        spread(bare_loop, 2, |run| run.commit_p99_ms),
        spread(bare_loop, 2, |run| run.cpu_us_each),
        format!("{:.2} / –", median(bare_loop, |run| run.cores)),
    ];
    table.row("bare store loop", bare_loop.len(), cells);
    table.text()
}

pub(super) fn slow_table(SlowReaderRows { workload, rows }: &SlowReaderRows) -> String {
    let length = length(rows.iter().flat_map(|row| &row.runs).map(|run| &run.with.cost).next());
    let title = format!("one of {} reads nothing{length}", workload.title());
    let columns = [
        "p99 ms of the others: without / with",
        "with, of without (pairs from, to)",
        "% of the time: attached / blocked",
        "given up",
        "RSS MB: without / with",
        "generator: cores, without / with",
        "lag p99 ms: without / with",
        "lost, of the others",
    ];
    let mut table = table_of(&title, &columns);
    for row @ Row { runs, .. } in rows {
        let rss = |run: &FanoutOutcome| run.memory.resident_bytes as f64 / 1e6;
        let shares = |share: fn(&SlowReaderStats) -> f64| median(runs, |run| run.slow(share));
        let lost: u64 = runs.iter().map(|run| run.without.faults.lost + run.with.faults.lost).sum();
        let cells = vec![
            pair(median(runs, |run| run.without.p99_ms), median(runs, |run| run.with.p99_ms)),
            around(runs, SlowReader::p99_ratio_of(runs), 2, SlowReader::p99_ratio),
            pair(100.0 * shares(|slow| slow.attached), 100.0 * shares(|slow| slow.blocked)),
            format!("{:.0}", shares(|slow| slow.given_up as f64)),
            pair(median(runs, |run| rss(&run.without)), median(runs, |run| rss(&run.with))),
            pair(
                median(runs, |run| generator_cores(&run.without.cost)),
                median(runs, |run| generator_cores(&run.with.cost)),
            ),
            pair(median(runs, |run| run.without.lag_p99_ms), median(runs, |run| run.with.lag_p99_ms)),
            lost.to_string(),
        ];
        add(&mut table, row, cells);
    }
    table.text() + &not_carried(rows)
}

/// Gives the length of the measured part, which may be longer than requested.
fn length(cost: Option<&Cost>) -> String {
    cost.map_or_else(String::new, |cost| format!(", {:.0} s", cost.wall_s))
}

/// Makes a table that also has the number of runs of each row.
fn table_of(title: &str, columns: &[&str]) -> Table {
    Table::new(title, &[&["runs"], columns].concat())
}

fn add<Run>(table: &mut Table, row: &Row<Run>, mut cells: Vec<String>) {
    let (runs, not_carried) = (row.runs.len(), row.not_carried.len());
    if runs == 0 && not_carried > 0 {
        cells.fill("–".to_owned());
        cells[0] = "did not carry it".to_owned();
    }
    let shown = if not_carried == 0 { runs.to_string() } else { format!("{runs} of {}", runs + not_carried) };
    cells.insert(0, shown);
    table.row(row.contender.name(), runs + not_carried, cells);
}

/// Median, with the least and the greatest value of the runs.
fn spread<Run>(runs: &[Run], decimals: usize, figure: impl Fn(&Run) -> f64) -> String {
    around(runs, median(runs, &figure), decimals, figure)
}

fn around<Run>(runs: &[Run], middle: f64, decimals: usize, figure: impl Fn(&Run) -> f64) -> String {
    let (least, most) = runs
        .iter()
        .map(figure)
        .fold((f64::INFINITY, f64::NEG_INFINITY), |(least, most), run| (least.min(run), most.max(run)));
    if runs.len() < 2 {
        return format!("{middle:.decimals$}");
    }
    format!("{middle:.decimals$} ({least:.decimals$}–{most:.decimals$})")
}

/// Reasons of runs that were not carried, each once.
fn not_carried<Run>(rows: &[Row<Run>]) -> String {
    let shown: BTreeSet<String> = rows
        .iter()
        .flat_map(|row| row.not_carried.iter().map(|reason| format!("{}: {reason}", row.contender.name())))
        .collect();
    if shown.is_empty() {
        return String::new();
    }
    shown.iter().map(|reason| format!("- not carried by {reason}\n")).chain(["\n".to_owned()]).collect()
}

fn runs_of_fanfare<Run>(rows: &[Row<Run>]) -> Option<&[Run]> {
    rows.iter().find(|row| row.contender == Contender::Fanfare).map(|row| row.runs.as_slice())
}

fn multiple(fanfare: Option<f64>, figure: f64) -> String {
    fanfare
        .filter(|fanfare| fanfare.is_finite())
        .map_or_else(|| "–".to_owned(), |fanfare| format!("{:.2} ×", fanfare / figure))
}

fn generator_cores(cost: &Cost) -> f64 {
    cost.generator_cpu_s / cost.wall_s
}

/// Counts of lost, duplicated, reordered and misdirected messages, over all runs.
pub(super) fn faults(runs: &[FanoutOutcome]) -> String {
    let sum = |count: fn(&FanoutOutcome) -> u64| runs.iter().map(count).sum::<u64>();
    let (lost, duplicated) = (sum(|run| run.faults.lost), sum(|run| run.faults.duplicated));
    let (reordered, astray) = (sum(|run| run.faults.reordered), sum(|run| run.faults.astray));
    format!("{lost} / {duplicated} / {reordered} / {astray}")
}

#[cfg(test)]
mod tests {
    use super::super::workload;
    use super::*;
    use crate::load::{Faults, Memory};

    fn run(server_cpu_s: f64) -> FanoutOutcome {
        FanoutOutcome {
            deliveries: 1_000_000,
            p50_ms: 1.0,
            p99_ms: 2.0,
            cost: Cost { wall_s: 10.0, server_cpu_s, generator_cpu_s: 5.0 },
            segments: 500_000,
            memory: Memory::default(),
            faults: Faults { lost: 3, ..Faults::default() },
            slow: None,
            lag_p99_ms: 0.1,
            lag_max_ms: 0.2,
        }
    }

    #[test]
    fn each_server_is_reported_as_a_multiple_of_fanfare() {
        let rows = vec![
            Row { runs: vec![run(1.0), run(2.0), run(9.0)], ..Row::new(Contender::Fanfare) },
            Row { runs: vec![run(6.0)], not_carried: vec!["slow".to_owned()], ..Row::new(Contender::Nats) },
            Row { not_carried: vec!["late".to_owned(); 2], ..Row::new(Contender::Baseline) },
        ];
        let table = fixed_table(&FixedRate { workload: workload::many_channels(100_000, 128), rows });
        let lines: Vec<&str> = table.lines().collect();
        assert!(
            lines[2].starts_with(
                "| Fanfare | 3 | 500000 | 1.00 × | 2.00 (1.00–9.00) | 1.00 / 2.00 (2.00–2.00) | 2.00 |"
            ),
            "{table}"
        );
        assert!(lines[2].ends_with("| 0.50 | 0.10 / 0.20 | 9 / 0 / 0 / 0 |"), "{table}");
        assert!(lines[3].starts_with("| NATS | 1 of 2 | 166667 | 3.00 × | 6.00 |"), "{table}");
        assert!(lines[4].starts_with("| floor | 0 of 2 | did not carry it | – |"), "{table}");
        assert_eq!(lines[6..8], ["- not carried by NATS: slow", "- not carried by floor: late"], "{table}");
        let cells = |line: &str| line.matches('|').count();
        assert!(lines[..5].iter().all(|line| cells(line) == cells(lines[0])), "{table}");
    }
}
