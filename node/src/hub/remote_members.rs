//! Remote members, whose connections are at other nodes: peers announce them, and anti-entropy compares them.

use std::collections::BTreeSet;

use super::channels::{Channel, Hub, State};
use super::member_bytes::of_member;
use super::members::{PresentMember, same};
use super::presence::MemberEvent;
use super::roster::PresenceDigests;
use crate::model::{
    ChannelKey, ConnectionId, ForwardedPresence, MemberData, MemberId, PresenceAction, RemoteMember,
    RemoteMembersPage, SessionOwner,
};

impl Hub {
    /// Applies a peer's presence change, unless the connection has a greater owner by now. Changes of one channel and node must come in
    /// their order.
    pub fn apply_remote_change(&self, forwarded: ForwardedPresence) {
        let ForwardedPresence { key, action, remote, .. } = forwarded;
        if action == PresenceAction::Leave && self.live(&key).is_none() {
            return;
        }
        self.with_channel(&key, |channel, state| match action {
            PresenceAction::Leave => {
                if self.may_change(&remote.member, remote.owner) {
                    self.remove_remote_member(
                        channel,
                        state,
                        remote.member,
                        remote.data,
                        remote.timestamp_ms,
                    );
                }
            }
            PresenceAction::Enter | PresenceAction::Update => {
                self.put_remote_member(channel, state, remote, action == PresenceAction::Update);
            }
        });
    }

    /// Applies a page of a channel's members from a peer. Members that the page lacks are removed, unless this node counted an event of
    /// theirs after the number `known`; without `known` none is removed. Members of further incarnations count unless `passes_over` holds,
    /// as for one that announces them itself.
    pub fn apply_remote_members(
        &self,
        page: RemoteMembersPage,
        known: Option<u64>,
        passes_over: impl Fn(u64) -> bool,
    ) {
        let RemoteMembersPage { key, by, after, members, is_last, .. } = page;
        if members.is_empty() && self.live(&key).is_none() {
            return;
        }
        self.with_channel(&key, |channel, state| {
            if let Some(known) = known {
                let end = members.last().map(|last| last.member.clone()).filter(|_| !is_last);
                let is_listed =
                    |id: &MemberId| members.binary_search_by(|remote| remote.member.cmp(id)).is_ok();
                let behind = state.members.iter().flat_map(|present| present.behind(after.as_ref()));
                let within = behind.take_while(|(id, _)| end.as_ref().is_none_or(|end| *id <= end));
                let unlisted =
                    within.filter(|(id, member)| !is_listed(id) && self.is_stale(id, member, by, known));
                let unlisted: Vec<_> =
                    unlisted.map(|(id, member)| (id.clone(), member.data.clone())).collect();
                self.remove_unlisted(channel, state, unlisted);
            }
            for remote in members {
                // The peer may know less than this node about members of other nodes, for example that one has left.
                let incarnation = remote.owner.incarnation;
                if incarnation == by || (!is_present(state, &remote.member) && !passes_over(incarnation)) {
                    self.put_remote_member(channel, state, remote, false);
                }
            }
        });
    }

    /// Removes the peer's members of channels that its complete list of these parts did not contain.
    pub fn remove_unlisted_members(&self, key: &ChannelKey, by: u64, known: u64) {
        let Some(_) = self.live(key) else { return };
        self.with_channel(key, |channel, state| {
            let present = state.members.iter().flat_map(|present| present.iter());
            let unlisted = present.filter(|(id, member)| self.is_stale(id, member, by, known));
            let unlisted: Vec<_> = unlisted.map(|(id, member)| (id.clone(), member.data.clone())).collect();
            self.remove_unlisted(channel, state, unlisted);
        });
    }

    /// Passes a page of the channel's members to `give`: owners for which `is_match` holds, after `after`, roughly `bytes_max` at most, and
    /// whether it is the last page. The channel stays locked meanwhile.
    pub fn with_members_page<R>(
        &self,
        key: &ChannelKey,
        after: Option<&MemberId>,
        bytes_max: usize,
        is_match: impl Fn(u64) -> bool,
        give: impl FnOnce(&[RemoteMember], bool) -> R,
    ) -> R {
        self.with_channel(key, |_, state| {
            let (mut part, mut bytes, mut is_last) = (Vec::new(), 0, true);
            for (id, present) in state.members.iter().flat_map(|members| members.behind(after)) {
                let owner = self.roster.owner(id.connection_id).filter(|owner| is_match(owner.incarnation));
                let Some(owner) = owner else { continue };
                if bytes >= bytes_max {
                    is_last = false;
                    break;
                }
                bytes += of_member(key, id, &present.data);
                let (member, data) = (id.clone(), present.data.clone());
                part.push(RemoteMember { member, owner, data, timestamp_ms: present.timestamp_ms });
            }
            give(&part, is_last)
        })
    }

    /// Incarnations of the connections that have known members.
    pub fn member_incarnations(&self) -> Vec<u64> {
        self.roster.incarnations()
    }

    /// The digests of an incarnation's members.
    pub fn presence_digests(&self, incarnation: u64) -> PresenceDigests {
        self.roster.digests(incarnation)
    }

    /// Connections with members, of the incarnations for which `is_match` holds. Visits every connection.
    pub fn present_connections(&self, is_match: impl Fn(u64) -> bool) -> Vec<(ConnectionId, SessionOwner)> {
        self.roster.connections_of(is_match)
    }

    /// The channels of such members in these parts. Visits every member.
    pub fn present_channels(&self, is_match: impl Fn(u64) -> bool, parts: u64) -> BTreeSet<ChannelKey> {
        self.roster.channels(is_match, parts)
    }

    /// Whether a peer may change a member: never one that is served here, otherwise only as the greatest owner.
    fn may_change(&self, member: &MemberId, owner: SessionOwner) -> bool {
        owner.incarnation != self.incarnation
            && self.roster.owner(member.connection_id).is_none_or(|known| known <= owner)
    }

    fn is_stale(&self, id: &MemberId, member: &PresentMember, by: u64, known: u64) -> bool {
        let owned = self.roster.owned_since(id.connection_id);
        let is_theirs = owned.is_some_and(|(owner, since)| owner.incarnation == by && since <= known);
        is_theirs && member.sequence <= known
    }

    /// Adds or updates a remote member. Equal data is no event unless it `changes`: the member entered again at a node that did not know
    /// it.
    fn put_remote_member(&self, channel: &Channel, state: &mut State, remote: RemoteMember, changes: bool) {
        let RemoteMember { member, owner, data, timestamp_ms } = remote;
        if !self.may_change(&member, owner) {
            return;
        }
        let previous = state.members.as_ref().and_then(|members| members.get(&member));
        let is_same = previous.is_some_and(|previous| same(&previous.data, &data)) && !changes;
        if is_same && previous.is_some_and(|previous| previous.timestamp_ms == timestamp_ms) {
            return self.roster.take_over(member.connection_id, owner, self.presence_sequence());
        }
        let action = if previous.is_some() { PresenceAction::Update } else { PresenceAction::Enter };
        let key = channel.key();
        let bytes = |data: &MemberData| of_member(key, &member, data);
        let previous = previous.map_or(0, |previous| bytes(&previous.data));
        // The member was admitted by the node where it entered.
        self.member_bytes.exchange(key.account(), previous, bytes(&data), usize::MAX);
        let sequence = self.next_presence_sequence();
        let event = MemberEvent { key: key.clone(), member, action, data, timestamp_ms, sequence };
        match is_same {
            true => self.apply_silently(key, state, owner, &event),
            false => self.apply_and_deliver(channel, state, owner, event),
        }
    }

    fn remove_unlisted(&self, channel: &Channel, state: &mut State, unlisted: Vec<(MemberId, MemberData)>) {
        for (member, data) in unlisted {
            let timestamp_ms = self.clock.stamp_ms(channel.key());
            self.remove_remote_member(channel, state, member, data, timestamp_ms);
        }
    }

    fn remove_remote_member(
        &self,
        channel: &Channel,
        state: &mut State,
        member: MemberId,
        data: MemberData,
        timestamp_ms: u64,
    ) {
        let owner = self.roster.owner(member.connection_id);
        let Some(owner) = owner.filter(|_| is_present(state, &member)) else { return };
        let (key, action) = (channel.key().clone(), PresenceAction::Leave);
        let sequence = self.next_presence_sequence();
        let event = MemberEvent { key, member, action, data, timestamp_ms, sequence };
        self.apply_and_deliver(channel, state, owner, event);
    }
}

fn is_present(state: &State, member: &MemberId) -> bool {
    state.members.as_ref().is_some_and(|members| members.get(member).is_some())
}
