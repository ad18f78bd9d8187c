//! Events per second to a webhook and to a queue, from the first publish until the last event has arrived.

use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use serde::Serialize;

use super::super::admin::Admin;
use super::super::bars::Bar;
use super::super::generator::{load, result_of};
use super::super::markdown::Table;
use super::super::report::median;
use super::super::server::Server;
use super::{Bench, RabbitMq};
use crate::Result;
use crate::load::PublishOutcome;
use crate::targets::confirm;

const CHANNELS: usize = 16;
const WEBHOOK_MIN: f64 = 5_000.0;
const QUEUE_SHARE_MIN: f64 = 0.6;
/// The size of an envelope with a message of 128 bytes.
const ENVELOPE_BYTES: usize = 400;
const GLANCE: Duration = Duration::from_millis(50);
/// Time without a further event after which the measurement fails.
const PATIENCE: Duration = Duration::from_secs(20);

#[derive(Serialize, Default)]
pub(super) struct Throughput {
    webhook: Vec<ThroughputRun>,
    queue: Vec<ThroughputRun>,
    confirm_loop: Vec<confirm::Outcome>,
}

#[derive(Serialize)]
struct ThroughputRun {
    events: f64,
    events_per_s: f64,
}

impl Throughput {
    pub(super) fn measure(&mut self, bench: &Bench) -> Result<()> {
        let receiver = bench.receiver()?;
        let node = bench.node(&[("ok", receiver.url("/ok"))], None)?;
        self.webhook.push(deliver(bench, &node, "webhook", 64)?);
        drop(node);
        let broker = RabbitMq::start(&bench.data)?;
        self.confirm_loop.push(confirm_loop(bench, &broker)?);
        let node = bench.node(&[], Some(&broker))?;
        bench.api(&node)?.post("/api/queues", r#"{"name":"bench"}"#)?.success("the queue")?;
        self.queue.push(deliver(bench, &node, "queue", 1)?);
        Ok(())
    }

    pub(super) fn bars(&self) -> Vec<Bar> {
        let webhook = median(&self.webhook, |run| run.events_per_s);
        let share = median(&self.queue, |run| run.events_per_s)
            / median(&self.confirm_loop, |run| run.confirmed_per_s);
        vec![
            Bar::at_least("signed events/s to a webhook".to_owned(), webhook, WEBHOOK_MIN, |rate| {
                format!("{rate:.0}")
            }),
            Bar::share("events/s to a queue, of the confirm loop".to_owned(), share, QUEUE_SHARE_MIN),
        ]
    }

    pub(super) fn table(&self) -> String {
        let mut table = Table::new(&format!("{CHANNELS} channels, 128 B"), &["events/s"]);
        let rate = |runs: &[ThroughputRun]| vec![format!("{:.0}", median(runs, |run| run.events_per_s))];
        table.row("webhook, in batches", self.webhook.len(), rate(&self.webhook));
        table.row("queue", self.queue.len(), rate(&self.queue));
        let confirmed = median(&self.confirm_loop, |run| run.confirmed_per_s);
        table.row("confirm loop alone", self.confirm_loop.len(), vec![format!("{confirmed:.0}")]);
        table.text()
    }
}

/// Publishes for a while, and waits until all events are delivered.
fn deliver(bench: &Bench, node: &Server, kind: &str, window: usize) -> Result<ThroughputRun> {
    let began = Instant::now();
    let mut command = load(&bench.this, "publish", node);
    command.args(["--connections", &CHANNELS.to_string(), "--window", &window.to_string()]);
    command.args(["--seconds", &bench.seconds.to_string()]);
    let _published: PublishOutcome = result_of(command)?;
    let mut admin = Admin::of(node)?;
    let published = admin.metric("fanfare_published_messages_total")?;
    let delivered_name = format!("fanfare_integration_events_total{{kind=\"{kind}\",outcome=\"delivered\"}}");
    let (mut delivered, mut since) = (0.0, Instant::now());
    while delivered < published {
        let now = admin.metric(&delivered_name)?;
        if now > delivered {
            (delivered, since) = (now, Instant::now());
        } else if since.elapsed() > PATIENCE {
            return Err(format!("{delivered} of {published} events have arrived, and no further one").into());
        }
        thread::sleep(GLANCE);
    }
    Ok(ThroughputRun { events: delivered, events_per_s: delivered / began.elapsed().as_secs_f64() })
}

fn confirm_loop(bench: &Bench, broker: &RabbitMq) -> Result<confirm::Outcome> {
    let mut command = Command::new(&bench.this);
    command.args(["confirm-loop", "--url", &broker.amqp, "--channels", &CHANNELS.to_string()]);
    command.args(["--seconds", &bench.seconds.to_string(), "--bytes", &ENVELOPE_BYTES.to_string()]);
    result_of(command)
}
