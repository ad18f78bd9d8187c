//! The path of ended spans to the collector: a bounded queue, and a task that sends its spans in batches.

use std::time::Duration;

use opentelemetry::Context;
use opentelemetry_sdk::Resource;
use opentelemetry_sdk::error::OTelSdkResult;
use opentelemetry_sdk::trace::{Span, SpanData, SpanExporter as _, SpanProcessor};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::Collector;
use crate::telemetry::RATE_LIMITED;

/// Ended spans that wait; further ones are dropped and counted.
pub(super) const QUEUE: usize = 4_096;
/// Spans in one request at most.
const BATCH: usize = 512;
/// Time for which the first span of a batch waits for others.
const LINGER: Duration = Duration::from_millis(500);
/// Time at a stop for sending the waiting spans.
const FLUSH: Duration = Duration::from_secs(1);

const EXPORTED: &str = "fanfare_spans_exported_total";
const DROPPED: &str = "fanfare_spans_dropped_total";

/// Reason for which a span does not reach the collector.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SpanDropReason {
    /// The collector is slower than spans end, or unreachable.
    QueueFull,
    /// The collector did not take the batch.
    Export,
    /// The node has stopped.
    Stop,
}

impl SpanDropReason {
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

/// Registers the counters, so that they exist before the first span.
pub(in crate::telemetry) fn begin_to_count() {
    for reason in SpanDropReason::ALL {
        reason.count(0);
    }
    metrics::counter!(EXPORTED).increment(0);
}

/// Sender of ended spans.
#[derive(Debug)]
pub(super) struct SpanQueue(mpsc::Sender<SpanData>);

/// Sends the recorded spans.
#[derive(Debug)]
pub struct Exporter {
    collector: Collector,
    ended: mpsc::Receiver<SpanData>,
}

/// The queue of ended spans; spans that end while it is full are dropped.
pub(super) fn queue() -> (SpanQueue, mpsc::Receiver<SpanData>) {
    let (sender, ended) = mpsc::channel(QUEUE);
    (SpanQueue(sender), ended)
}

impl SpanProcessor for SpanQueue {
    fn on_start(&self, _: &mut Span, _: &Context) {}

    fn on_end(&self, span: SpanData) {
        match self.0.try_send(span) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(_)) => SpanDropReason::QueueFull.count(1),
            Err(mpsc::error::TrySendError::Closed(_)) => SpanDropReason::Stop.count(1),
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

    /// Sends spans until the node stops, and the waiting ones for at most a second afterwards.
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
                    SpanDropReason::Stop.count(count);
                    break;
                }
            }
        }
        self.ended.close();
        let mut left = 0;
        while self.ended.try_recv().is_ok() {
            left += 1;
        }
        SpanDropReason::Stop.count(left);
    }
}

/// The next batch; while the node stops, the waiting spans, possibly none.
async fn next(ended: &mut mpsc::Receiver<SpanData>, stopping: &CancellationToken) -> Vec<SpanData> {
    let mut batch = Vec::new();
    let batching = async {
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
    stopping.run_until_cancelled(batching).await;
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
                SpanDropReason::Export.count(spans);
                tracing::warn!(target: RATE_LIMITED, spans, %error, "span export failed");
            }
        }
    }
}
