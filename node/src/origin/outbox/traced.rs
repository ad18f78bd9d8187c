//! The span of one attempt to deliver a batch.

use std::sync::Arc;

use super::board::Lineup;
use super::event::Event;
use crate::origin::targets::{Outcome, TargetKind};
use crate::telemetry::Span;
use crate::telemetry::traces::Kind;

/// Further events of a batch are not told of.
const LINKS_MAX: usize = 32;

/// Within the first publish of the batch that is traced; where there are several it has a link to each of them.
pub(super) fn span_of(
    lineup: &Lineup,
    kind: TargetKind,
    events: &[(u64, Arc<Event>)],
    failures: u32,
) -> Span {
    let mut traces = events.iter().filter_map(|(_, event)| event.trace.as_deref());
    let Some(first) = traces.next() else { return Span::default() };
    // Events of one publish stand one behind the other.
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
        TargetKind::Webhook | TargetKind::Lambda | TargetKind::Sns => Kind::Client,
        TargetKind::Amqp | TargetKind::Queue => Kind::Producer,
    };
    let mut span = Span::linked(first, &links, "deliver", span_kind);
    span.concerns(&events[0].1.channel, events.len());
    span.set("fanfare.target", || lineup.target.to_string().into());
    span.set("fanfare.target.kind", || kind.as_str().into());
    if failures > 0 {
        span.set("fanfare.retries", || i64::from(failures).into());
    }
    span
}

pub(super) fn end(span: &mut Span, outcome: &Outcome) {
    match outcome {
        Outcome::Delivered => {}
        Outcome::Retry { .. } => span.fail("retry"),
        Outcome::Rejected { .. } => span.fail("rejected"),
        Outcome::Unavailable { .. } => span.fail("unavailable"),
        Outcome::Gone => span.fail("gone"),
    }
}
