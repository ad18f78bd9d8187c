//! Presence as a client sees it: the list from a shard, page by page, and the events beside it.

use std::collections::BTreeMap;
use std::sync::Arc;

use fanfare_proto::frame::Format;
use serde::Deserialize;
use serde_json::value::RawValue;

use crate::hub::{Channel, Hub, MemberEvent, MemberSync, PresenceDelivery, PresenceMode, SyncVerdict};
use crate::model::{MemberData, MemberId, PresenceAction};

/// Members of one channel by their names, with their data.
pub(super) type SimMembers = BTreeMap<String, String>;

pub(super) fn name_of(member: &MemberId) -> String {
    format!("{} {}", member.connection_id, member.client_id.as_str())
}

pub(super) fn text_of(data: &MemberData) -> String {
    data.as_ref().map_or_else(String::new, |data| data.get().to_owned())
}

#[derive(Default)]
pub(super) struct SimPresenceWatch {
    mode: PresenceMode,
    sync: Option<MemberSync>,
    /// Pages so far of a list that is not complete.
    pages: SimMembers,
    /// Members that the client takes for present.
    pub(super) seen: SimMembers,
    /// Events after the list, in order.
    pub(super) events: Vec<(PresenceAction, String)>,
}

impl SimPresenceWatch {
    /// Starts a new list, after an attach or a continuity loss.
    pub(super) fn begin(&mut self, hub: &Hub, channel: &Channel) {
        let (follows, last_sequence) = hub.presence_state(channel);
        *self = Self {
            seen: std::mem::take(&mut self.seen),
            events: std::mem::take(&mut self.events),
            ..Self::default()
        };
        self.mode = if follows { PresenceMode::Syncing } else { PresenceMode::After(last_sequence) };
        self.sync = follows.then(MemberSync::default);
        if !follows {
            self.replace(SimMembers::new());
        }
    }

    /// Replaces the members by a complete list. Each difference counts as an unseen change.
    fn replace(&mut self, seen: SimMembers) {
        let before = std::mem::replace(&mut self.seen, seen);
        let removed = before.keys().filter(|name| !self.seen.contains_key(*name));
        self.events.extend(removed.map(|name| (PresenceAction::Leave, name.clone())));
        let came = self.seen.keys().filter(|name| !before.contains_key(*name));
        self.events.extend(came.map(|name| (PresenceAction::Enter, name.clone())));
    }

    pub(super) fn has_list(&self) -> bool {
        self.sync.as_ref().is_none_or(MemberSync::is_sent)
    }

    /// Takes the next page, if there is one.
    pub(super) fn pull(&mut self, hub: &Hub, channel: &Channel) {
        let Some(sync) = self.sync.as_mut().filter(|sync| !sync.is_sent()) else { return };
        let page = hub.presence_page(channel, Format::Json, sync.after());
        self.pages.extend(members_of(&page.frame));
        let held = sync.sent(&page);
        if let Some(last_sequence) = sync.included_until() {
            self.mode = PresenceMode::After(last_sequence);
            self.sync = None;
        }
        if page.end.is_none() {
            let pages = std::mem::take(&mut self.pages);
            self.replace(pages);
        }
        held.iter().for_each(|delivery| self.apply(&delivery.event));
    }

    pub(super) fn take_event(&mut self, delivery: &Arc<PresenceDelivery>) {
        let sequence = delivery.event.sequence;
        let verdict = match (self.mode, &mut self.sync) {
            (PresenceMode::After(last_sequence), _) if sequence > last_sequence => SyncVerdict::Send,
            (PresenceMode::Syncing, Some(sync)) => {
                let verdict = sync.judge(delivery);
                if sync.ends_with(sequence) {
                    self.mode = PresenceMode::After(sequence);
                    self.sync = None;
                }
                verdict
            }
            _ => return,
        };
        if verdict == SyncVerdict::Send {
            self.apply(&delivery.event);
        }
    }

    fn apply(&mut self, event: &MemberEvent) {
        let name = name_of(&event.member);
        let previous = match event.action {
            PresenceAction::Leave => self.seen.remove(&name),
            PresenceAction::Enter | PresenceAction::Update => {
                self.seen.insert(name.clone(), text_of(&event.data))
            }
        };
        let was_there = event.action != PresenceAction::Enter;
        assert_eq!(previous.is_some(), was_there, "{}: {name} after {:?}", event.action, self.events);
        self.events.push((event.action, name));
    }
}

/// A page as clients read it.
#[derive(Deserialize)]
struct SimPresencePage<'a> {
    #[serde(borrow)]
    members: Vec<SimListedMember<'a>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct SimListedMember<'a> {
    client_id: String,
    connection_id: String,
    #[serde(borrow)]
    data: Option<&'a RawValue>,
}

fn members_of(frame: &[u8]) -> SimMembers {
    // The header before the text depends on its length.
    let head = match frame[1] {
        126 => 4,
        127 => 10,
        _ => 2,
    };
    let page: SimPresencePage<'_> = serde_json::from_slice(&frame[head..]).expect("a page is JSON");
    let seen = |member: SimListedMember<'_>| {
        let data = member.data.map_or_else(String::new, |data| data.get().to_owned());
        (format!("{} {}", member.connection_id, member.client_id), data)
    };
    page.members.into_iter().map(seen).collect()
}
