//! Throughput of one link: both ends alone, each a process of its own, over TCP and mutual TLS on loopback.

use std::process::Command;

use serde::Serialize;

use super::super::bars::{Bar, insufficient_runs};
use super::super::companion::Companion;
use super::super::generator::result_of;
use super::super::markdown::Table;
use super::super::report::median;
use super::nodes::{BinaryPaths, write_key};
use crate::Result;
use crate::link::source::{FeedMode, Outcome};

const MESSAGES_PER_S_MIN: f64 = 500_000.0;
const MESSAGE_BYTES: u32 = 200;

#[derive(Serialize)]
pub(super) struct Link {
    pub(super) fed: FeedMode,
    /// Messages of one publish.
    pub(super) together: u32,
    pub(super) runs: Vec<Outcome>,
}

impl Link {
    /// Gives one measurement for each way to feed the link.
    pub(super) fn all() -> Vec<Self> {
        let ways = [(FeedMode::Encoded, 1), (FeedMode::Published, 1), (FeedMode::Published, 10)];
        ways.map(|(fed, together)| Self { fed, together, runs: Vec::new() }).into()
    }

    pub(super) fn title(&self) -> String {
        let fed = match self.fed {
            FeedMode::Encoded => "encoded before, put into the lanes' queues",
            FeedMode::Published => "each numbered, encoded and acked by the publish path",
        };
        match self.together {
            1 => fed.to_owned(),
            together => format!("{fed}, {together} to a publish"),
        }
    }

    pub(super) fn measure(&mut self, places: &BinaryPaths, seconds: u32) -> Result<()> {
        let folder = tempfile::Builder::new().prefix("link-").tempdir_in(&places.data)?;
        let key = folder.path().join("cluster.key");
        write_key(&key)?;
        let mut sink = Command::new(&places.bare);
        sink.arg("link-sink").arg("--cluster-key-file").arg(&key);
        let sink = Companion::start(sink)?;
        let mut source = Command::new(&places.bare);
        source.arg("link-source").arg("--cluster-key-file").arg(&key);
        source.arg("--folder").arg(folder.path().join("source"));
        source.args(["--sink", &sink.first_line, "--sink-pid", &sink.pid().to_string()]);
        source.args(["--fed", if self.fed == FeedMode::Encoded { "encoded" } else { "published" }]);
        source.args(["--together", &self.together.to_string(), "--bytes", &MESSAGE_BYTES.to_string()]);
        source.args(["--seconds", &seconds.to_string()]);
        let outcome: Outcome = result_of(source)?;
        let taken: u64 = sink.end()?.parse()?;
        if taken != outcome.sent {
            return Err(format!("{} messages were sent and {taken} came", outcome.sent).into());
        }
        self.runs.push(outcome);
        Ok(())
    }

    fn messages_per_s(&self) -> f64 {
        median(&self.runs, |run| run.messages_per_s)
    }
}

pub(super) fn bars(links: &[Link]) -> Vec<Bar> {
    let alone = links.iter().filter(|link| link.fed == FeedMode::Encoded && !link.runs.is_empty());
    let bar = |link: &Link| {
        let what = format!("one link, {MESSAGE_BYTES} B: messages/s");
        Bar::at_least(what, link.messages_per_s(), MESSAGES_PER_S_MIN, |per_s| format!("{per_s:.0}"))
            .judged_unless(insufficient_runs(link.runs.len()))
    };
    alone.map(bar).collect()
}

pub(super) fn table(links: &[Link]) -> String {
    let title = format!("one link, messages of {MESSAGE_BYTES} B");
    let columns =
        ["messages/s", "bytes of a publish", "µs of CPU for a message: sender / receiver", "cores in use"];
    let mut table = Table::new(&title, &columns);
    for link in links {
        let runs = &link.runs;
        let us = |cpu_s: fn(&Outcome) -> f64| {
            median(runs, |run| cpu_s(run) * 1e6 / (run.messages_per_s * run.cost.wall_s))
        };
        let (sender, receiver) = (us(|run| run.cost.generator_cpu_s), us(|run| run.cost.server_cpu_s));
        let cores = |run: &Outcome| (run.cost.generator_cpu_s + run.cost.server_cpu_s) / run.cost.wall_s;
        let cells = vec![
            format!("{:.0}", link.messages_per_s()),
            format!("{:.0}", median(runs, |run| run.item_bytes as f64)),
            format!("{sender:.2} / {receiver:.2}"),
            format!("{:.2}", median(runs, cores)),
        ];
        table.row(&link.title(), runs.len(), cells);
    }
    table.text()
}
