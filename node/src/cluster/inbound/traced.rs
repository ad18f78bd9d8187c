//! The span in which messages of a peer are taken and delivered.

use fanfare_proto::peer::v1;
use fanfare_proto::trace::TraceContext;

use super::Peer;
use crate::telemetry::Span;
use crate::telemetry::traces::Kind;

/// Of taking and delivering it here. A context that is malformed is as none.
pub(super) fn span_of(forward: &v1::Forward, from: &Peer) -> Span {
    if forward.traceparent.is_empty() {
        return Span::default();
    }
    let trace = TraceContext::parse(&forward.traceparent, &forward.tracestate);
    let mut span = Span::within(trace.as_ref(), "receive", Kind::Consumer);
    span.concerns(forward.channel.as_ref().map_or("", |channel| &channel.name), forward.messages.len());
    span.set("fanfare.peer", || from.node_id.to_string().into());
    span
}
