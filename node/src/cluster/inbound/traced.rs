//! The span in which messages of a peer are taken and delivered.

use fanfare_proto::peer::v1;
use fanfare_proto::trace::TraceContext;

use super::Peer;
use crate::telemetry::TraceSpan;
use crate::telemetry::traces::TraceSpanKind;

/// Span of receiving and delivering forwarded messages; empty without a trace context. A malformed context counts as none.
pub(super) fn span_of(forward: &v1::Forward, from: &Peer) -> TraceSpan {
    if forward.traceparent.is_empty() {
        return TraceSpan::default();
    }
    let trace = TraceContext::parse(&forward.traceparent, &forward.tracestate);
    let mut span = TraceSpan::within(trace.as_ref(), "receive", TraceSpanKind::Consumer);
    span.concerns(forward.channel.as_ref().map_or("", |channel| &channel.name), forward.messages.len());
    span.set("fanfare.peer", || from.node_id.to_string().into());
    span
}
