//! The members of one channel: pure merging, and the list cut into pages.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;
use fanfare_proto::frame::{Format, MemberOut, SyncPage};

use super::presence::MemberEvent;
use super::wire;
use crate::model::{MemberData, MemberId, PresenceAction};

/// Of the JSON text of one page.
const PAGE_BYTES_MAX: usize = 64 * 1024;
/// Pages kept for the next newcomer, of one channel. Longer lists are encoded for each.
const KEPT_BYTES_MAX: usize = 1024 * 1024;

/// What a member is known by beside its id.
#[derive(Debug, Clone)]
pub struct Member {
    pub data: MemberData,
    pub timestamp_ms: u64,
    /// Of the event that made it so, as this node counts them.
    pub sequence: u64,
}

/// What a change amounts to, given who is there.
#[derive(Debug, Clone)]
pub(super) enum Outcome {
    /// The state is already so.
    Nothing,
    Happens(PresenceAction, MemberData),
    /// One member more than the channel may have.
    Full,
}

/// One part of the member list, as a whole frame.
#[derive(Debug, Clone)]
pub struct Page {
    pub frame: Bytes,
    /// The last member in it; none when the list ends with this page.
    pub end: Option<MemberId>,
    /// The last event that it covers.
    pub sequence: u64,
}

#[derive(Debug, Default)]
pub(super) struct Members {
    list: BTreeMap<MemberId, Member>,
    /// Of the last event.
    sequence: u64,
    /// Pages of the present state, by format and by the member before them.
    pages: BTreeMap<(bool, Option<MemberId>), Page>,
    pages_bytes: usize,
}

impl Members {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn get(&self, member: &MemberId) -> Option<&Member> {
        self.list.get(member)
    }

    /// Those behind `after`, in their order.
    pub(super) fn behind<'a>(
        &'a self,
        after: Option<&'a MemberId>,
    ) -> impl Iterator<Item = (&'a MemberId, &'a Member)> {
        self.list.range((after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&MemberId, &Member)> {
        self.list.iter()
    }

    /// A leave without data carries what the member had last.
    pub(super) fn outcome(
        &self,
        member: &MemberId,
        action: PresenceAction,
        data: &MemberData,
        members_max: usize,
    ) -> Outcome {
        use PresenceAction::{Enter, Leave, Update};
        match (action, self.list.get(member)) {
            (Leave, None) => Outcome::Nothing,
            (Leave, Some(present)) => Outcome::Happens(Leave, data.clone().or_else(|| present.data.clone())),
            (Enter | Update, None) if self.list.len() >= members_max => Outcome::Full,
            (Enter | Update, None) => Outcome::Happens(Enter, data.clone()),
            (Enter, Some(present)) if same(&present.data, data) => Outcome::Nothing,
            (Enter | Update, Some(_)) => Outcome::Happens(Update, data.clone()),
        }
    }

    pub(super) fn apply(&mut self, event: &MemberEvent) {
        self.sequence = event.sequence;
        self.pages.clear();
        self.pages_bytes = 0;
        if event.action == PresenceAction::Leave {
            self.list.remove(&event.member);
            return;
        }
        let member =
            Member { data: event.data.clone(), timestamp_ms: event.timestamp_ms, sequence: event.sequence };
        self.list.insert(event.member.clone(), member);
    }

    /// A member of before the first event.
    pub(super) fn restore(&mut self, id: MemberId, data: MemberData, timestamp_ms: u64) {
        self.list.insert(id, Member { data, timestamp_ms, sequence: 0 });
    }

    /// The members behind `after`, as many as a page holds.
    pub(super) fn page(&mut self, channel: &str, format: Format, after: Option<&MemberId>) -> Page {
        let place = (format == Format::Json, after.cloned());
        if let Some(page) = self.pages.get(&place) {
            return page.clone();
        }
        let page = self.encode(channel, format, after);
        if self.pages_bytes + page.frame.len() <= KEPT_BYTES_MAX {
            self.pages_bytes += page.frame.len();
            self.pages.insert(place, page.clone());
        }
        page
    }

    fn encode(&self, channel: &str, format: Format, after: Option<&MemberId>) -> Page {
        let (mut end, mut more) = (None, false);
        let frame = wire::encoded(format, 1024, |buffer| {
            let mut text = SyncPage::begin(buffer, channel, PAGE_BYTES_MAX);
            for (id, member) in self.behind(after) {
                let fits = text.push(&MemberOut {
                    client_id: id.client_id.as_str(),
                    connection_id: &id.connection_id.to_string(),
                    data: member.data.as_deref(),
                    timestamp: member.timestamp_ms,
                });
                if !fits {
                    more = true;
                    break;
                }
                end = Some(id);
            }
            text.end(more)
        });
        Page { frame, end: end.filter(|_| more).cloned(), sequence: self.sequence }
    }
}

/// Equal as texts: the same value spelled otherwise counts as another.
pub(super) fn same(a: &MemberData, b: &MemberData) -> bool {
    a.as_ref().map(|data| data.get()) == b.as_ref().map(|data| data.get())
}
