//! Bounds for Fanfare's figures beside those of the other servers; the best of them is named.

use std::cmp::Ordering;

use super::super::bars::{Bar, RUNS_MIN, insufficient_runs};
use super::super::report::{Publish, deliveries_per_core_second, median};
use super::connection_storms::{ConnectionStorms, STORM_CONNECTIONS};
use super::contender::Contender;
use super::holding::{CROWD_CONNECTIONS, Crowd, IDLE_CONNECTIONS, holding_us};
use super::measure::{FixedRate, HighestRate, Measurements, Row};
use super::slow::SlowReader;
use super::workload::{W1_SUBSCRIBERS, W2_DELIVERIES_PER_S};
use crate::load::IdleOutcome;

/// Acked publishes per second, on a fast enough disk.
const ACKED_PER_S: f64 = 100_000.0;

/// Makes the bars of the measured parts. Without a row of Fanfare a part has no bar; without a figure it has one
/// without a verdict. `connections` bounds the opened connections: a part that needs more is not judged.
pub(super) fn bars(measured: &Measurements, connections: Option<u32>) -> Vec<Bar> {
    // The groups are no published part, so their bars come last.
    let (groups, fan_outs): (Vec<_>, Vec<_>) = measured.fixed.iter().partition(|fixed| fixed.workload.groups);
    let [fan_outs, groups] = [fan_outs, groups].map(|all| all.into_iter().flat_map(of_fan_out));
    let mosts = measured.most.iter().flat_map(of_most);
    let durable = measured.durable.iter().flat_map(of_durable);
    let slow = measured.slow.iter().flat_map(|slow| of_slow(&slow.rows));
    let of_all = |bars: Vec<Bar>, all| {
        let too_small =
            connections.filter(|most| *most < all).map(|most| format!("{most} connections of {all}"));
        bars.into_iter().map(move |bar| match &too_small {
            Some(reason) => bar.judged_unless(Some(reason.clone())),
            None => bar,
        })
    };
    fan_outs
        .chain(mosts)
        .chain(of_all(of_idle(&measured.idle), IDLE_CONNECTIONS))
        .chain(of_all(of_storms(&measured.connection_storms), STORM_CONNECTIONS))
        .chain(durable)
        .chain(of_all(of_crowds(&measured.crowds).into_iter().collect(), CROWD_CONNECTIONS))
        .chain(slow)
        .chain(groups)
        .collect()
}

fn of_fan_out(FixedRate { workload, rows }: &FixedRate) -> Vec<Bar> {
    let figures = Figures { rows, title: workload.title(), measured: |_| true };
    let cost = deliveries_per_core_second;
    let mut bars = Vec::new();
    if workload.channels == 1 {
        bars.extend(figures.at_least_of_baseline(cost, 0.85));
        bars.extend(figures.at_least(cost, 2.5, "of the best peer", Contender::is_peer));
        if workload.subscribers == W1_SUBSCRIBERS[1] {
            bars.extend(figures.at_most(
                |run| run.p50_ms,
                0.75,
                "p50, of the best peer's",
                Contender::is_peer,
            ));
        }
    } else if workload.deliveries_per_s == W2_DELIVERIES_PER_S[0] {
        bars.extend(figures.at_least(cost, 2.5, "of the best plain peer", Contender::is_plain_peer));
        bars.extend(figures.own_at_most(|run| run.p99_ms, 5.0, "p99 ms", |ms| format!("{ms:.2}")));
    } else {
        bars.extend(figures.at_least(cost, 4.0, "of the best plain peer", Contender::is_plain_peer));
        bars.extend(figures.at_least(
            cost,
            2.2,
            "of the best with 5 ms batching",
            Contender::is_batching_peer,
        ));
        bars.extend(figures.at_most(|run| run.p99_ms, 1.0, "p99, of the best peer's", Contender::is_peer));
    }
    bars
}

fn of_most(HighestRate { message_bytes, rows }: &HighestRate) -> Option<Bar> {
    let figures = Figures { rows, title: format!("the most, {message_bytes} B"), measured: |_| true };
    figures.at_least(|run| f64::from(run.deliveries_per_s), 2.0, "of the best peer", Contender::is_peer)
}

fn of_idle(rows: &[Row<IdleOutcome>]) -> Vec<Bar> {
    let figures = Figures { rows, title: "idle connections".to_owned(), measured: Contender::is_plain };
    let kb = figures.own_at_most(|run| run.resident_bytes / 1024.0, 3.0, "KB each", |kb| format!("{kb:.2}"));
    let baseline = |contender| contender == Contender::Baseline;
    let us = figures.at_most(holding_us, 1.3, "CPU with heartbeats, of the floor's", baseline);
    kb.into_iter().chain(us).collect()
}

fn of_storms(rows: &[Row<ConnectionStorms>]) -> Vec<Bar> {
    let figures = Figures { rows, title: "connections".to_owned(), measured: Contender::is_plain };
    let cost = figures.at_least(
        ConnectionStorms::per_core_second,
        1.3,
        "per core-second, of the best peer",
        Contender::is_peer,
    );
    let wall = "a herd's time, of the time that its CPU takes";
    let wall = figures.own_at_most(ConnectionStorms::wall_of_cpu, 1.0, wall, |ratio| format!("{ratio:.2}"));
    let refused = |runs: &[ConnectionStorms]| {
        runs.iter().map(|run| run.in_turn.refused + run.at_once.refused).sum::<usize>()
    };
    let refused = figures.runs(Contender::Fanfare).map(|runs| refused(runs) as f64);
    let refused = figures.own(refused, 0.0, "refused", |count| format!("{count:.0}"));
    cost.into_iter().chain(wall).chain(refused).collect()
}

fn of_durable(publish: &Publish) -> Vec<Bar> {
    let (of_loop, per_s, ack) = (
        "durable publishes: of the bare loop".to_owned(),
        "durable publishes: acked per second".to_owned(),
        "durable publishes: ack p50, of the loop's commit".to_owned(),
    );
    if publish.node.is_empty() || publish.bare_loop.is_empty() {
        let failed = |what| Bar::without_figure(what, "it failed".to_owned());
        return [of_loop, per_s, ack].map(failed).into();
    }
    let ack_ms = median(&publish.node, |run| run.ack_p50_ms);
    let commit_ms = median(&publish.bare_loop, |run| run.commit_p50_ms);
    let runs = publish.node.len().min(publish.bare_loop.len());
    let not_judged = || insufficient_runs(runs);
    vec![
        Bar::share(of_loop, publish.ratio(), 0.60).judged_unless(not_judged()),
        Bar::at_least(per_s, median(&publish.node, |run| run.acked_per_s), ACKED_PER_S, |per_s| {
            format!("{per_s:.0}")
        })
        .judged_unless(not_judged()),
        Bar::at_most(ack, ack_ms / commit_ms, 2.0, |ratio| format!("{ratio:.2}")).judged_unless(not_judged()),
    ]
}

fn of_crowds(rows: &[Row<Crowd>]) -> Option<Bar> {
    let figures =
        Figures { rows, title: "channels of one subscriber".to_owned(), measured: Contender::is_plain };
    let what = "bytes each, beyond the connection";
    figures.own_at_most(Crowd::channel_bytes, 600.0, what, |bytes| format!("{bytes:.0}"))
}

fn of_slow(rows: &[Row<SlowReader>]) -> Option<Bar> {
    let figures =
        Figures { rows, title: "one of 100 reads nothing".to_owned(), measured: Contender::is_plain };
    let ratio = figures.runs(Contender::Fanfare).map(SlowReader::p99_ratio_of);
    figures.own(ratio, 1.2, "p99 of the others, of without it", |ratio| format!("{ratio:.2}"))
}

/// Rows of one table.
struct Figures<'a, Run> {
    rows: &'a [Row<Run>],
    title: String,
    /// Whether a contender has a row in this table if all are measured.
    measured: fn(Contender) -> bool,
}

impl<Run> Figures<'_, Run> {
    fn at_least_of_baseline(&self, figure: impl Fn(&Run) -> f64, at_least: f64) -> Option<Bar> {
        let what = format!("{}: of the floor", self.title);
        let not_judged = self.not_judged(|contender| contender == Contender::Baseline);
        self.is_asked().then(|| match (self.fanfare(&figure), self.of(Contender::Baseline, &figure)) {
            (Some(ours), Some(baseline)) => {
                Bar::share(what, ours / baseline, at_least).judged_unless(not_judged)
            }
            _ => self.without_figure(what, not_judged),
        })
    }

    /// Bar for a figure of which more is better, as a multiple of the best of the others that are `among`.
    fn at_least(
        &self,
        figure: impl Fn(&Run) -> f64,
        at_least: f64,
        what: &str,
        among: impl Fn(Contender) -> bool,
    ) -> Option<Bar> {
        let bar = |what, ratio| Bar::multiple(what, ratio, at_least);
        self.beside_the_best(figure, what, among, f64::total_cmp, bar)
    }

    /// Bar for a figure of which less is better.
    fn at_most(
        &self,
        figure: impl Fn(&Run) -> f64,
        at_most: f64,
        what: &str,
        among: impl Fn(Contender) -> bool,
    ) -> Option<Bar> {
        let bar = |what, ratio| Bar::at_most(what, ratio, at_most, |ratio| format!("{ratio:.2}"));
        self.beside_the_best(figure, what, among, |one, other| other.total_cmp(one), bar)
    }

    /// Bar beside the best of the others. `goodness` orders a worse figure before a better one.
    fn beside_the_best(
        &self,
        figure: impl Fn(&Run) -> f64,
        what: &str,
        among: impl Fn(Contender) -> bool,
        goodness: impl Fn(&f64, &f64) -> Ordering,
        bar: impl Fn(String, f64) -> Bar,
    ) -> Option<Bar> {
        let not_judged = self.not_judged(&among);
        let best = self.others(&figure, among).into_iter().max_by(|one, other| goodness(&one.1, &other.1));
        self.is_asked().then(|| match self.fanfare(&figure).zip(best) {
            Some((ours, (best, other))) => {
                let what = format!("{}: {what} ({})", self.title, best.name());
                bar(what, ours / other).judged_unless(not_judged)
            }
            None => self.without_figure(format!("{}: {what}", self.title), not_judged),
        })
    }

    /// Bar for a figure of Fanfare alone.
    fn own_at_most(
        &self,
        figure: impl Fn(&Run) -> f64,
        at_most: f64,
        what: &str,
        show: impl Fn(f64) -> String,
    ) -> Option<Bar> {
        self.own(self.fanfare(figure), at_most, what, show)
    }

    /// Bar for a figure; `None`: every run failed.
    fn own(
        &self,
        figure: Option<f64>,
        at_most: f64,
        what: &str,
        show: impl Fn(f64) -> String,
    ) -> Option<Bar> {
        let (what, not_judged) = (format!("{}: {what}", self.title), self.not_judged(|_| false));
        self.is_asked().then(|| match figure {
            Some(figure) => Bar::at_most(what, figure, at_most, show).judged_unless(not_judged),
            None => self.without_figure(what, not_judged),
        })
    }

    /// Whether Fanfare has a row, without which there is no bar.
    fn is_asked(&self) -> bool {
        self.rows.iter().any(|row| row.contender == Contender::Fanfare)
    }

    fn without_figure(&self, what: String, not_judged: Option<String>) -> Bar {
        Bar::without_figure(what, not_judged.unwrap_or_else(|| "nobody carried it".to_owned()))
    }

    /// Names what is missing to compare Fanfare with the best `among` the others. Each of them must have been
    /// measured often enough, even if it did not keep up.
    fn not_judged(&self, among: impl Fn(Contender) -> bool) -> Option<String> {
        let needed = Contender::chosen(&[]).into_iter().filter(|contender| (self.measured)(*contender));
        let needed = needed.filter(|contender| *contender == Contender::Fanfare || among(*contender));
        let mut left_out = 0;
        let lacking: Vec<String> = needed
            .filter_map(|contender| {
                let Some(row) = self.rows.iter().find(|row| row.contender == contender) else {
                    left_out += 1;
                    return None;
                };
                // A run that a peer did not carry counts as a result. For Fanfare it is a missing figure.
                let beaten = if contender.is_fanfare() { 0 } else { row.not_carried.len() };
                let runs = row.runs.len() + beaten;
                (runs < RUNS_MIN).then(|| format!("{runs} of {}", contender.name()))
            })
            .collect();
        let lacking_runs =
            (!lacking.is_empty()).then(|| format!("runs are fewer than {RUNS_MIN}: {}", lacking.join("; ")));
        let left_out = (left_out > 0).then(|| format!("servers were left out: {left_out}"));
        lacking_runs
            .into_iter()
            .chain(left_out)
            .reduce(|lacking_runs, left_out| lacking_runs + "; " + &left_out)
    }

    fn fanfare(&self, figure: impl Fn(&Run) -> f64) -> Option<f64> {
        self.of(Contender::Fanfare, figure)
    }

    fn of(&self, contender: Contender, figure: impl Fn(&Run) -> f64) -> Option<f64> {
        self.runs(contender).map(|runs| median(runs, figure))
    }

    fn others(
        &self,
        figure: impl Fn(&Run) -> f64,
        among: impl Fn(Contender) -> bool,
    ) -> Vec<(Contender, f64)> {
        let named = self.rows.iter().map(|row| row.contender).filter(|contender| among(*contender));
        named.filter_map(|contender| Some((contender, self.of(contender, &figure)?))).collect()
    }

    /// Runs of a contender; `None` if every run failed.
    fn runs(&self, contender: Contender) -> Option<&[Run]> {
        let row = self.rows.iter().find(|row| row.contender == contender)?;
        (!row.runs.is_empty()).then_some(&row.runs)
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::super::workload;
    use super::*;
    use crate::load::{Cost, FanoutOutcome, Faults, Memory};

    pub(in super::super) fn run(server_cpu_s: f64, p99_ms: f64) -> FanoutOutcome {
        FanoutOutcome {
            deliveries: 1_000_000,
            p50_ms: 1.0,
            p99_ms,
            cost: Cost { wall_s: 10.0, server_cpu_s, generator_cpu_s: 5.0 },
            segments: 500_000,
            memory: Memory::default(),
            faults: Faults::default(),
            slow: None,
            lag_p99_ms: 0.1,
            lag_max_ms: 0.2,
        }
    }

    fn row(contender: Contender, server_cpu_s: f64, p99_ms: f64) -> Row<FanoutOutcome> {
        Row { runs: vec![run(server_cpu_s, p99_ms)], ..Row::new(contender) }
    }

    #[test]
    fn each_bar_is_set_on_the_best_of_its_kind() {
        let rows = vec![
            row(Contender::Fanfare, 1.0, 6.0),
            row(Contender::FanfareWindow5, 0.1, 1.0),
            row(Contender::CentrifugeJson, 5.0, 9.0),
            row(Contender::CentrifugeProtobuf, 3.0, 8.0),
            row(Contender::CentrifugeProtobufBatching, 2.0, 7.0),
        ];
        let bars = of_fan_out(&FixedRate { workload: workload::many_channels(400_000, 128), rows });
        let figures_of: Vec<(&str, &str, bool)> =
            bars.iter().map(|bar| (bar.what.as_str(), bar.measured.as_str(), bar.met)).collect();
        let title = "500 × 20 of 125 channels, 400000 deliveries/s, 128 B";
        let expected = [
            (format!("{title}: of the best plain peer (centrifuge, Protobuf)"), "3.00 ×", false),
            (
                format!("{title}: of the best with 5 ms batching (centrifuge, Protobuf, 5 ms batching)"),
                "2.00 ×",
                false,
            ),
            (format!("{title}: p99, of the best peer's (centrifuge, Protobuf, 5 ms batching)"), "0.86", true),
        ];
        assert_eq!(figures_of, expected.each_ref().map(|(what, figure, met)| (what.as_str(), *figure, *met)));
    }

    #[test]
    fn bar_with_fewer_than_three_runs_is_not_judged() {
        let repeated = |contender, server_cpu_s| {
            let runs = (0..3).map(|_| run(server_cpu_s, 1.0)).collect();
            Row { runs, ..Row::new(contender) }
        };
        let ours = || repeated(Contender::Fanfare, 1.0);
        let judge = |rows| -> Vec<(String, Option<String>)> {
            let bars = of_fan_out(&FixedRate { workload: workload::of_parts(|_| true)[0], rows });
            bars.into_iter().map(|bar| (bar.measured, bar.not_judged)).collect()
        };
        let peers = || Contender::chosen(&[]).into_iter().filter(|contender| contender.is_peer());
        let single_baseline = row(Contender::Baseline, 0.8, 1.0);
        let bars = judge(vec![ours(), single_baseline]);
        assert_eq!(bars[0], ("80 %".to_owned(), Some("runs are fewer than 3: 1 of floor".to_owned())));
        let left_out = peers().count();
        assert_eq!(bars[1], ("–".to_owned(), Some(format!("servers were left out: {left_out}"))));
        let all = |baseline| {
            [ours(), baseline].into_iter().chain(peers().map(|peer| repeated(peer, 3.0))).collect()
        };
        let open = |rows| judge(rows).into_iter().filter_map(|(_, open)| open).collect::<Vec<_>>();
        assert_eq!(open(all(repeated(Contender::Baseline, 0.8))), Vec::<String>::new());
        let not_carried = vec!["late".to_owned(); 3];
        let beaten = Row { not_carried, ..Row::new(Contender::Baseline) };
        assert_eq!(open(all(beaten)), ["nobody carried it"]);
        let late = Row { not_carried: vec!["late".to_owned(); 2], ..row(Contender::Fanfare, 1.0, 1.0) };
        let others = peers().map(|peer| repeated(peer, 3.0));
        let rows = [late, repeated(Contender::Baseline, 0.8)].into_iter().chain(others).collect();
        assert_eq!(open(rows)[0], "runs are fewer than 3: 1 of Fanfare");
        assert!(judge(Vec::new()).is_empty(), "without Fanfare there is nothing to hold it to");
        let bars = judge(vec![Row::new(Contender::Fanfare)]);
        assert_eq!(bars.len(), 2, "what failed is told: {bars:?}");
        assert!(bars.iter().all(|(measured, open)| measured == "–" && open.is_some()), "{bars:?}");
        let slow = of_slow(&[Row::new(Contender::Fanfare)]).expect("it was asked for");
        assert_eq!(slow.not_judged.as_deref(), Some("runs are fewer than 3: 0 of Fanfare"));
    }

    #[test]
    fn fewer_connections_than_a_part_has_leave_its_bars_open() {
        let cost = || Cost { wall_s: 30.0, server_cpu_s: 0.3, generator_cpu_s: 0.1 };
        let held = || IdleOutcome {
            connections: 300,
            resident_bytes: 2_000.0,
            socket_bytes: 0.0,
            opening: cost(),
            holding: cost(),
            received: 2.0,
            sent: 2.0,
        };
        let held = |contender| Row { runs: vec![held(), held(), held()], ..Row::new(contender) };
        let idle = vec![held(Contender::Fanfare), held(Contender::Baseline)];
        let measured = Measurements { idle, ..Measurements::default() };
        let open = |connections| bars(&measured, connections).into_iter().map(|bar| bar.not_judged);
        assert!(open(None).chain(open(Some(IDLE_CONNECTIONS))).all(|open| open.is_none()));
        let reason = format!("300 connections of {IDLE_CONNECTIONS}");
        assert_eq!(open(Some(300)).collect::<Vec<_>>(), [Some(reason.clone()), Some(reason)]);
    }

    #[test]
    fn failed_durable_publishes_leave_their_bars_not_judged() {
        let figures_of = of_durable(&Publish::new(8, 16, 128)).into_iter().map(|bar| bar.not_judged);
        assert_eq!(figures_of.collect::<Vec<_>>(), vec![Some("it failed".to_owned()); 3]);
    }
}
