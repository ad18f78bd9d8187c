//! Isolation: live deliveries and those to a working webhook, beside webhooks that hang, answer with a gigabyte, and
//! are down.

use serde::Serialize;

use super::super::bars::Bar;
use super::super::generator::{load, result_of};
use super::super::markdown::{Table, pair};
use super::super::report::median;
use super::Bench;
use crate::Result;
use crate::load::FanoutOutcome;
use crate::targets::receiver::Tally;

const SUBSCRIBERS: usize = 100;
const RATE: u32 = 200;
const CHANNELS: usize = 10;
const SLOWER_MAX: f64 = 1.2;
/// Address without a listener.
const DOWN: &str = "http://127.0.0.1:1/";

#[derive(Serialize, Default)]
pub(super) struct Isolation {
    alone: Vec<IsolationRun>,
    beside: Vec<IsolationRun>,
}

#[derive(Serialize)]
struct IsolationRun {
    live: FanoutOutcome,
    webhook: Tally,
}

impl Isolation {
    pub(super) fn measure(&mut self, bench: &Bench) -> Result<()> {
        self.alone.push(deliver(bench, false)?);
        self.beside.push(deliver(bench, true)?);
        Ok(())
    }

    fn of_alone(&self, figure: fn(&IsolationRun) -> f64) -> f64 {
        median(&self.beside, figure) / median(&self.alone, figure)
    }

    pub(super) fn bars(&self) -> Vec<Bar> {
        let show = |ratio: f64| format!("{ratio:.2} ×");
        let (live, webhook) = (self.of_alone(|run| run.live.p99_ms), self.of_alone(|run| run.webhook.p99_ms));
        vec![
            Bar::at_most("p99 of live deliveries beside failing targets".to_owned(), live, SLOWER_MAX, show),
            Bar::at_most("p99 of a webhook beside failing targets".to_owned(), webhook, SLOWER_MAX, show),
        ]
    }

    pub(super) fn table(&self) -> String {
        let title = format!("{SUBSCRIBERS} subscribers, {CHANNELS} channels, {RATE} messages/s");
        let mut table = Table::new(&title, &["live p50 / p99 ms", "webhook p99 ms", "webhook events"]);
        for (name, runs) in [("one webhook", &self.alone), ("beside three that fail", &self.beside)] {
            let figure = |figure: fn(&IsolationRun) -> f64| median(runs, figure);
            let cells = vec![
                pair(figure(|run| run.live.p50_ms), figure(|run| run.live.p99_ms)),
                format!("{:.2}", figure(|run| run.webhook.p99_ms)),
                format!("{:.0}", figure(|run| run.webhook.events as f64)),
            ];
            table.row(name, runs.len(), cells);
        }
        table.text()
    }
}

fn deliver(bench: &Bench, beside: bool) -> Result<IsolationRun> {
    let receiver = bench.receiver()?;
    let mut webhooks = vec![("ok", receiver.url("/ok"))];
    if beside {
        webhooks.extend([
            ("hang", receiver.url("/hang")),
            ("huge", receiver.url("/huge")),
            ("down", DOWN.to_owned()),
        ]);
    }
    let node = bench.node(&webhooks, None)?;
    let mut command = load(&bench.this, "fanout", &node);
    command.args(["--subscribers", &SUBSCRIBERS.to_string(), "--channels", &CHANNELS.to_string()]);
    command.args(["--rate", &RATE.to_string(), "--seconds", &bench.seconds.to_string()]);
    let live: FanoutOutcome = result_of(command)?;
    if live.faults.any() {
        return Err(format!("live deliveries had {:?}", live.faults).into());
    }
    Ok(IsolationRun { live, webhook: receiver.tally()? })
}
