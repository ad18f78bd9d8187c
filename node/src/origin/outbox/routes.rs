//! Routes of a publish or presence event: its possible targets.

use fanfare_proto::trace::TraceContext;

use super::event::{Addressee, TargetId};
use crate::origin::queues::CandidateQueue;

/// Targets that the events of one publish may have.
#[derive(Debug, Default)]
pub struct Routes {
    pub(super) integrations: Vec<TargetId>,
    pub(super) queues: Vec<CandidateQueue>,
    /// Trace context of the publish, if it is traced.
    pub(super) trace: Option<Box<TraceContext>>,
}

impl Routes {
    /// Sets the span to which the deliveries of the events belong.
    pub fn set_trace(&mut self, trace: Option<Box<TraceContext>>) {
        self.trace = trace;
    }

    /// Returns whether no event of the channel has a target.
    pub fn is_empty(&self) -> bool {
        self.integrations.is_empty() && self.queues.is_empty()
    }

    /// The targets of the event with this name.
    pub(super) fn of(&self, name: Option<&str>) -> Vec<Addressee> {
        let integrations = self.integrations.iter().cloned().map(Addressee::from);
        let queues = self.queues.iter().filter_map(|feed| feed.addressee(name));
        integrations.chain(queues).collect()
    }
}
