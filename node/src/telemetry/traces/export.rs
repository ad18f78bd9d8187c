//! The way of ended spans to the collector: a bounded queue, and a task that sends what it holds in batches.

use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter as _, SpanProcessor};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Collector;
use crate::telemetry::OFTEN;

/// Ended spans that wait; further ones are dropped and counted.
pub(super) const QUEUE: usize = 4_096;
/// The most of them in one request.
const BATCH: usize = 512;
/// How long the first of a batch waits for others.
const LINGER: Duration = Duration::from_millis(500);
/// What a stop gives the spans that wait.
const FLUSH: Duration = Duration::from_secs(1);

const EXPORTED: &str = "fanfare_spans_exported_total";
const DROPPED: &str = "fanfare_spans_dropped_total";

/// Why a span does not reach the collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Dropped {
    /// The collector takes less than there is, or nothing.
    QueueFull,
    /// It did not take the batch.
    Export,
    /// The node has stopped.
    Stop,
}

impl Dropped {
    const ALL: [Self; 3] = [Self::QueueFull, Self::Export, Self::Stop];

    fn name(self) -> &'static str {
        match self {
            Self::QueueFull => "queue_full",
            Self::Export => "export",
            Self::Stop => "stop",
        }
    }

    fn count(self, spans: usize) {
        metrics::counter!(DROPPED, "reason" => self.name()).increment(spans as u64);
    }
}

/// Makes the counters, so that they are there before the first span.
pub(in crate::telemetry) fn begin_to_count() {
    for reason in Dropped::ALL {
        reason.count(0);
    }
    metrics::counter!(EXPORTED).increment(0);
}

/// Where spans go when they end.
#[derive(Debug)]
pub(super) struct Queued(mpsc::Sender<SpanData>);

/// Sends what was recorded.
#[derive(Debug)]
pub struct Exporter {
    collector: Collector,
    ended: mpsc::Receiver<SpanData>,
}

/// Spans that end while it is full are dropped.
pub(super) fn queue() -> (Queued, mpsc::Receiver<SpanData>) {
    let (sender, ended) = mpsc::channel(QUEUE);
    (Queued(sender), ended)
}

impl SpanProcessor for Queued {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        match self.0.try_send(span) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => Dropped::QueueFull.count(1),
            Err(mpsc::error::TrySendError::Closed(_)) => Dropped::Stop.count(1),
        }
    }

    fn force_flush(&self) -> OTelSdkResult {
        Ok(())
    }

    fn shutdown_with_timeout(&self, _: Duration) -> OTelSdkResult {
        Ok(())
    }
}

impl Exporter {
    pub(super) fn new(
        mut collector: Collector,
        resource: &Resource,
        ended: mpsc::Receiver<SpanData>,
    ) -> Self {
        collector.0.set_resource(resource);
        Self { collector, ended }
    }

    /// Sends until the node stops, and then for a second at most what still waits.
    pub async fn run(mut self, stopping: CancellationToken) {
        let over = async {
            stopping.cancelled().await;
            tokio::time::sleep(FLUSH).await;
        };
        tokio::pin!(over);
        loop {
            let batch = tokio::select! {
                batch = next(&mut self.ended, &stopping) => batch,
                () = &mut over => break,
            };
            if batch.is_empty() {
                break;
            }
            let count = batch.len();
            tokio::select! {
                () = self.collector.send(batch) => {}
                () = &mut over => {
                    Dropped::Stop.count(count);
                    break;
                }
            }
        }
        self.ended.close();
        let mut left = 0;
        while self.ended.try_recv().is_ok() {
            left += 1;
        }
        Dropped::Stop.count(left);
    }
}

/// The next batch; of a node that stops what is there, which may be nothing.
async fn next(ended: &mut mpsc::Receiver<SpanData>, stopping: &CancellationToken) -> Vec<SpanData> {
    let mut batch = Vec::new();
    let gathered = async {
        if ended.recv_many(&mut batch, BATCH).await == 0 {
            return;
        }
        let lingers = tokio::time::sleep(LINGER);
        tokio::pin!(lingers);
        while batch.len() < BATCH {
            let lacking = BATCH - batch.len();
            tokio::select! {
                come = ended.recv_many(&mut batch, lacking) => if come == 0 { return },
                () = &mut lingers => return,
            }
        }
    };
    stopping.run_until_cancelled(gathered).await;
    while batch.len() < BATCH
        && let Ok(span) = ended.try_recv()
    {
        batch.push(span);
    }
    batch
}

impl Collector {
    async fn send(&self, batch: Vec<SpanData>) {
        let spans = batch.len();
        match self.0.export(batch).await {
            Ok(()) => metrics::counter!(EXPORTED).increment(spans as u64),
            Err(error) => {
                Dropped::Export.count(spans);
                tracing::warn!(target: OFTEN, spans, %error, "spans were not exported");
            }
        }
    }
}
