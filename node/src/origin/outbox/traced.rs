//! The span of one attempt to deliver a batch.

use std::sync::Arc;

use super::board::TargetLineup;
use super::event::OutboxEvent;
use crate::origin::targets::{DeliveryOutcome, TargetKind};
use crate::telemetry::TraceSpan;
use crate::telemetry::traces::TraceSpanKind;

/// Links of a span; further publishes of the batch are left out.
const LINKS_MAX: usize = 32;

/// Starts a span in the trace of the batch's first traced publish. If the batch has several, the span links to each of them.
pub(super) fn span_of(
    lineup: &TargetLineup,
    kind: TargetKind,
    events: &[(u64, Arc<OutboxEvent>)],
    failures: u32,
) -> TraceSpan {
    let mut traces = events.iter().filter_map(|(_, event)| event.trace.as_deref());
    let Some(first) = traces.next() else { return TraceSpan::default() };
    // Events of one publish are adjacent.
    let mut links = vec![first];
    for trace in traces {
        if links.len() < LINKS_MAX && links.last() != Some(&trace) {
            links.push(trace);
        }
    }
    if links.len() == 1 {
        links.clear();
    }
    let span_kind = match kind {
        TargetKind::Webhook | TargetKind::Lambda | TargetKind::Sns => TraceSpanKind::Client,
        TargetKind::Amqp | TargetKind::Queue => TraceSpanKind::Producer,
    };
    let mut span = TraceSpan::linked(first, &links, "deliver", span_kind);
    span.concerns(&events[0].1.channel, events.len());
    span.set("fanfare.target", || lineup.target.to_string().into());
    span.set("fanfare.target.kind", || kind.as_str().into());
    if failures > 0 {
        span.set("fanfare.retries", || i64::from(failures).into());
    }
    span
}

pub(super) fn end(span: &mut TraceSpan, outcome: &DeliveryOutcome) {
    match outcome {
        DeliveryOutcome::Delivered => {}
        DeliveryOutcome::Retry { .. } => span.fail("retry"),
        DeliveryOutcome::Rejected { .. } => span.fail("rejected"),
        DeliveryOutcome::Unavailable { .. } => span.fail("unavailable"),
        DeliveryOutcome::Gone => span.fail("gone"),
    }
}
