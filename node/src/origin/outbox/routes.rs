//! The targets of one publish or presence event.

use fanfare_proto::trace::TraceContext;

use super::event::{Addressee, TargetId};
use crate::origin::queues::Feed;

/// The targets that the events of one publish may be for.
#[derive(Debug, Default)]
pub struct Routes {
    pub(super) integrations: Vec<TargetId>,
    pub(super) queues: Vec<Feed>,
    /// Of the publish, where it is traced.
    pub(super) trace: Option<Box<TraceContext>>,
}

impl Routes {
    /// The span that deliveries of the events are within.
    pub fn set_trace(&mut self, trace: Option<Box<TraceContext>>) {
        self.trace = trace;
    }

    /// True: no event of the channel is for a target.
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
