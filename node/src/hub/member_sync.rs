//! Sync of the member list of a channel to one connection, and the events that the connection must not miss meanwhile.

use std::sync::Arc;

use super::members::MemberPage;
use super::presence::PresenceDelivery;
use crate::model::MemberId;

/// A member list that is being sent to one connection.
///
/// Each page is made when it is sent, so it includes all events of its members up to then, and no copy of the list is
/// kept for a slow reader. An event that a later page will include is dropped; one that an earlier page does not
/// include waits for the end. Waiting events count against the connection's outbox, which bounds them.
#[derive(Debug, Default)]
pub struct MemberSync {
    /// Last member of each page sent so far, with the last event that the page includes.
    pages: Vec<(MemberId, u64)>,
    /// Last event that the last page includes, once it is sent.
    last: Option<u64>,
    held: Vec<Arc<PresenceDelivery>>,
    held_bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub enum SyncVerdict {
    /// The list includes the event, or will.
    Covered,
    /// The event waits here until the list ends.
    Held,
    Send,
}

impl MemberSync {
    /// The member before the next page; none for the first page.
    pub fn after(&self) -> Option<&MemberId> {
        self.pages.last().map(|(end, _)| end)
    }

    /// Whether the last page has been sent.
    pub fn is_sent(&self) -> bool {
        self.last.is_some()
    }

    /// Records a sent page. The last one returns the events that had to wait for it.
    pub fn sent(&mut self, page: &MemberPage) -> Vec<Arc<PresenceDelivery>> {
        match &page.end {
            Some(end) => {
                self.pages.push((end.clone(), page.sequence));
                Vec::new()
            }
            None => {
                self.last = Some(page.sequence);
                self.held_bytes = 0;
                std::mem::take(&mut self.held)
            }
        }
    }

    /// The last event that the list includes, if all pages are of one state.
    pub fn included_until(&self) -> Option<u64> {
        let last = self.last?;
        self.pages.iter().all(|(_, sequence)| *sequence == last).then_some(last)
    }

    /// Whether no event up to this one needs the pages any more.
    pub fn ends_with(&self, sequence: u64) -> bool {
        self.last.is_some_and(|last| sequence >= last)
    }

    /// Decides whether an event is sent. Events come in the order of their numbers.
    pub fn judge(&mut self, delivery: &Arc<PresenceDelivery>) -> SyncVerdict {
        let event = &delivery.event;
        let index = self.pages.partition_point(|(end, _)| *end < event.member);
        let page = self.pages.get(index).map(|(_, sequence)| *sequence);
        // A later page will contain a member that no page contained yet, in its state of then.
        let is_included = page.or(self.last).is_none_or(|sequence| event.sequence <= sequence);
        match (is_included, self.last) {
            (true, _) => SyncVerdict::Covered,
            (false, Some(_)) => SyncVerdict::Send,
            (false, None) => {
                self.held_bytes += delivery.bytes();
                self.held.push(Arc::clone(delivery));
                SyncVerdict::Held
            }
        }
    }

    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }
}
