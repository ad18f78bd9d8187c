//! The table on stdout.

use std::fmt::Write as _;

use super::bars::Bar;
use super::report::{Fanout, Idle, Presence, Publish, Report, deliveries_per_core_second, median};
use crate::load::FanoutOutcome;

/// Row: the subject, then the figures of node and of baseline or bare loop.
type Row = [String; 3];

pub(super) fn of(report: &Report) -> String {
    let measured = &report.measured;
    let mut text = String::new();
    for fanout in &measured.fanouts {
        text += &lines(fanout_rows(fanout));
    }
    if let Some(idle) = &measured.idle {
        text += &lines(idle_rows(idle));
    }
    if let Some(publish) = &measured.publish {
        text += &lines(publish_rows(publish));
    }
    for presence in &measured.presences {
        text += &lines(presence_rows(presence));
    }
    let _ = writeln!(text, "{:<40} {:>12} {:>10} {:>10}", "bar", "measured", "bar", "÷ the bar");
    for Bar { what, measured, bar, of_bar, met, .. } in &report.bars {
        let verdict = if *met { "met" } else { "missed" };
        let _ = writeln!(text, "{what:<40} {measured:>12} {bar:>10} {of_bar:>10.2}  {verdict}");
    }
    for failure in &report.failures {
        let _ = writeln!(text, "FAILED {failure}");
    }
    text
}

fn lines(rows: Vec<Row>) -> String {
    let line = |[what, node, other]: &Row| format!("{what:<40} {node:>16} {other:>16}\n");
    rows.iter().map(line).chain(["\n".to_owned()]).collect()
}

fn fanout_rows(fanout: &Fanout) -> Vec<Row> {
    let Fanout { subscribers, messages_per_s, message_bytes, node, baseline } = fanout;
    let both =
        |what: &str, cell: fn(&[FanoutOutcome]) -> String| [what.to_owned(), cell(node), cell(baseline)];
    vec![
        row(&format!("1 channel × {subscribers}, {messages_per_s}/s, {message_bytes} B"), "node", "floor"),
        both("deliveries per server core-second", |runs| {
            format!("{:.0}", median(runs, deliveries_per_core_second))
        }),
        both("µs of server CPU per delivery", |runs| {
            format!("{:.2}", median(runs, |run| 1e6 / deliveries_per_core_second(run)))
        }),
        both("delivery p50 / p99 ms", |runs| {
            pair(median(runs, |run| run.p50_ms), median(runs, |run| run.p99_ms))
        }),
        both("lost / duplicated / reordered", |runs| {
            let sum = |count: fn(&FanoutOutcome) -> u64| runs.iter().map(count).sum::<u64>();
            let (lost, duplicated) = (sum(|run| run.faults.lost), sum(|run| run.faults.duplicated));
            format!("{lost} / {duplicated} / {}", sum(|run| run.faults.reordered))
        }),
        both("generator: share of a core", |runs| {
            format!("{:.2}", median(runs, |run| run.cost.generator_cpu_s / run.cost.wall_s))
        }),
        both("generator: lag p99 / max ms", |runs| {
            pair(median(runs, |run| run.lag_p99_ms), median(runs, |run| run.lag_max_ms))
        }),
    ]
}

fn idle_rows(idle: &Idle) -> Vec<Row> {
    let connections = idle.runs.first().map_or(0, |run| run.connections);
    let kb = |bytes: f64| format!("{:.2}", bytes / 1024.0);
    let socket_kb = kb(median(&idle.runs, |run| run.socket_bytes));
    let opening = median(&idle.runs, |run| run.opening.server_cpu_s * 1e6 / run.connections as f64);
    vec![
        row(&format!("{connections} idle connections, one channel each"), "node", ""),
        row("KB resident per connection", &kb(median(&idle.runs, |run| run.resident_bytes)), ""),
        row("KB in socket buffers (both ends)", &socket_kb, ""),
        row("µs of server CPU to open and attach", &format!("{opening:.0}"), ""),
    ]
}

fn publish_rows(publish: &Publish) -> Vec<Row> {
    let Publish { connections, window, message_bytes, node, bare_loop } = publish;
    let acked = format!("{:.0}", median(node, |run| run.acked_per_s));
    let ack = pair(median(node, |run| run.ack_p50_ms), median(node, |run| run.ack_p99_ms));
    let rows = format!("{:.0}", median(bare_loop, |run| run.rows_per_s));
    let commit = pair(median(bare_loop, |run| run.commit_p50_ms), median(bare_loop, |run| run.commit_p99_ms));
    let cpu = median(node, |run| run.cost.server_cpu_s * 1e6 / (run.acked_per_s * run.cost.wall_s));
    let generator = median(node, |run| run.cost.generator_cpu_s / run.cost.wall_s);
    vec![
        row(&format!("{connections} × {window} publishes under way, {message_bytes} B"), "node", "bare loop"),
        row("durable rows per second", &acked, &rows),
        row("ack, commit p50 / p99 ms", &ack, &commit),
        row("µs of server CPU per publish", &format!("{cpu:.2}"), ""),
        row("generator: share of a core", &format!("{generator:.2}"), ""),
    ]
}

fn presence_rows(presence: &Presence) -> Vec<Row> {
    let Presence { members, subscribers, runs } = presence;
    let deliveries = (members * subscribers) as f64;
    let delivery = median(runs, |run| run.entering.server_cpu_s * 1e6 / deliveries);
    let newcomer = pair(presence.newcomer_cpu_ms(), median(runs, |run| run.newcomer_ms));
    let list_kb = median(runs, |run| run.list_bytes as f64 / 1024.0);
    vec![
        row(&format!("{members} members enter before {subscribers}"), "node", ""),
        row("µs of server CPU per event delivered", &format!("{delivery:.2}"), ""),
        row("bytes sent, of those needed", &format!("{:.4}", presence.sent_of_needed()), ""),
        row("newcomer: CPU / wall ms", &newcomer, ""),
        row("newcomer: list KB", &format!("{list_kb:.1}"), ""),
    ]
}

fn row(what: &str, node: &str, other: &str) -> Row {
    [what.to_owned(), node.to_owned(), other.to_owned()]
}

fn pair(one: f64, other: f64) -> String {
    format!("{one:.2} / {other:.2}")
}
