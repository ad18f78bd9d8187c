//! How far one connection has been sent the member list of a channel, and what it must not miss meanwhile.

use std::sync::Arc;

use super::members::Page;
use super::presence::PresenceDelivery;
use crate::model::MemberId;

/// A member list on its way to one connection.
///
/// Each page is made when it is sent, so it covers for its members all events up to then, and no copy of the list is
/// kept for a slow reader. What a later page will cover is dropped; what a former page does not cover waits for the end.
/// The waiting events are bounded by the connection's outbox, against which they count.
#[derive(Debug, Default)]
pub struct Sync {
    /// The last member of each page sent so far, with what the page covers.
    pages: Vec<(MemberId, u64)>,
    /// What the last page covers, once that is sent.
    last: Option<u64>,
    held: Vec<Arc<PresenceDelivery>>,
    held_bytes: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Verdict {
    /// In the list already, or will be.
    Covered,
    /// Kept here until the list ends.
    Held,
    Send,
}

impl Sync {
    /// Where the next page begins; none: at the first member.
    pub fn after(&self) -> Option<&MemberId> {
        self.pages.last().map(|(end, _)| end)
    }

    /// The last page has been sent.
    pub fn is_sent(&self) -> bool {
        self.last.is_some()
    }

    /// A page was sent. With the last one comes what had to wait for it.
    pub fn sent(&mut self, page: &Page) -> Vec<Arc<PresenceDelivery>> {
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

    /// Pages all of one state: what it covers is said by the number of its last event alone.
    pub fn covers_up_to(&self) -> Option<u64> {
        let last = self.last?;
        self.pages.iter().all(|(_, sequence)| *sequence == last).then_some(last)
    }

    /// After this event, the last of the list's time, nothing needs the pages any more.
    pub fn ends_with(&self, sequence: u64) -> bool {
        self.last.is_some_and(|last| sequence >= last)
    }

    /// Events come in the order of their numbers.
    pub fn judge(&mut self, delivery: &Arc<PresenceDelivery>) -> Verdict {
        let event = &delivery.event;
        let place = self.pages.partition_point(|(end, _)| *end < event.member);
        let page = self.pages.get(place).map(|(_, sequence)| *sequence);
        // A member that is on no page yet will be on a later one, as it is by then.
        let covered = page.or(self.last).is_none_or(|sequence| event.sequence <= sequence);
        match (covered, self.last) {
            (true, _) => Verdict::Covered,
            (false, Some(_)) => Verdict::Send,
            (false, None) => {
                self.held_bytes += delivery.bytes();
                self.held.push(Arc::clone(delivery));
                Verdict::Held
            }
        }
    }

    pub fn held_bytes(&self) -> usize {
        self.held_bytes
    }
}
