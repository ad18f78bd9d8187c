//! The members of one channel: pure merging, and the list cut into pages.

use std::collections::BTreeMap;
use std::ops::Bound;

use bytes::Bytes;
use fanfare_proto::frame::{Format, MemberOut, SyncPage};

use super::presence::MemberEvent;
use super::wire;
use crate::model::{MemberData, MemberId, PresenceAction};

/// Bound of the JSON text of one page.
const PAGE_BYTES_MAX: usize = 64 * 1024;
/// Bound of the encoded pages that one channel keeps for the next client. Longer lists are encoded for each.
const KEPT_BYTES_MAX: usize = 1024 * 1024;

/// Data, time and event of a member, beside its id.
#[derive(Debug, Clone)]
pub struct PresentMember {
    pub data: MemberData,
    pub timestamp_ms: u64,
    /// Number of the event that made the member so, in this node's count.
    pub sequence: u64,
}

/// The effect of a change, given the present members.
#[derive(Debug, Clone)]
pub(super) enum MemberChangeOutcome {
    /// No effect: the member is already so.
    Nothing,
    Happens(PresenceAction, MemberData),
    /// Refused: the channel has as many members as it may have.
    Full,
}

/// One part of the member list, as a complete frame.
#[derive(Debug, Clone)]
pub struct MemberPage {
    pub frame: Bytes,
    /// Last member of the page; none when the list ends with it.
    pub end: Option<MemberId>,
    /// Number of the last event that the page includes.
    pub sequence: u64,
}

#[derive(Debug, Default)]
pub(super) struct ChannelMembers {
    list: BTreeMap<MemberId, PresentMember>,
    /// Number of the last event.
    sequence: u64,
    /// Encoded pages of the present state, by format and by the member before them.
    pages: BTreeMap<(bool, Option<MemberId>), MemberPage>,
    pages_bytes: usize,
}

impl ChannelMembers {
    pub(super) fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.list.len()
    }

    pub(super) fn get(&self, member: &MemberId) -> Option<&PresentMember> {
        self.list.get(member)
    }

    /// The members after `after`, in their order.
    pub(super) fn behind<'a>(
        &'a self,
        after: Option<&'a MemberId>,
    ) -> impl Iterator<Item = (&'a MemberId, &'a PresentMember)> {
        self.list.range((after.map_or(Bound::Unbounded, Bound::Excluded), Bound::Unbounded))
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (&MemberId, &PresentMember)> {
        self.list.iter()
    }

    /// The effect of an action. A leave without data carries the member's last data.
    pub(super) fn outcome(
        &self,
        member: &MemberId,
        action: PresenceAction,
        data: &MemberData,
        members_max: usize,
    ) -> MemberChangeOutcome {
        use PresenceAction::{Enter, Leave, Update};
        match (action, self.list.get(member)) {
            (Leave, None) => MemberChangeOutcome::Nothing,
            (Leave, Some(present)) => {
                MemberChangeOutcome::Happens(Leave, data.clone().or_else(|| present.data.clone()))
            }
            (Enter | Update, None) if self.list.len() >= members_max => MemberChangeOutcome::Full,
            (Enter | Update, None) => MemberChangeOutcome::Happens(Enter, data.clone()),
            (Enter, Some(present)) if same(&present.data, data) => MemberChangeOutcome::Nothing,
            (Enter | Update, Some(_)) => MemberChangeOutcome::Happens(Update, data.clone()),
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
        let member = PresentMember {
            data: event.data.clone(),
            timestamp_ms: event.timestamp_ms,
            sequence: event.sequence,
        };
        self.list.insert(event.member.clone(), member);
    }

    /// Adds a member that was present before the first event.
    pub(super) fn restore(&mut self, id: MemberId, data: MemberData, timestamp_ms: u64) {
        self.list.insert(id, PresentMember { data, timestamp_ms, sequence: 0 });
    }

    /// The page of members after `after`.
    pub(super) fn page(&mut self, channel: &str, format: Format, after: Option<&MemberId>) -> MemberPage {
        let page_key = (format == Format::Json, after.cloned());
        if let Some(page) = self.pages.get(&page_key) {
            return page.clone();
        }
        let page = self.encode(channel, format, after);
        if self.pages_bytes + page.frame.len() <= KEPT_BYTES_MAX {
            self.pages_bytes += page.frame.len();
            self.pages.insert(page_key, page.clone());
        }
        page
    }

    fn encode(&self, channel: &str, format: Format, after: Option<&MemberId>) -> MemberPage {
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
        MemberPage { frame, end: end.filter(|_| more).cloned(), sequence: self.sequence }
    }
}

/// Whether two data are equal as texts: another spelling of the same value counts as different.
pub(super) fn same(a: &MemberData, b: &MemberData) -> bool {
    a.as_ref().map(|data| data.get()) == b.as_ref().map(|data| data.get())
}
