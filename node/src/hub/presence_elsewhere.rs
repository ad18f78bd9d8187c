//! Members whose connections are of other nodes: they are shown here as they are told, and compared with what is there.

use std::collections::BTreeSet;

use super::channels::{Channel, Hub, State};
use super::member_bytes::of_member;
use super::members::{Member, same};
use super::presence::MemberEvent;
use super::roster::Digests;
use crate::model::{
    ChannelKey, ConnectionId, ForwardedPresence, MemberData, MemberId, Owner, PresenceAction, ToldMember,
    ToldMembers,
};

impl Hub {
    /// Another node has made this change. It counts unless the connection has a greater owner by now. Changes of one channel
    /// and node are to come in their order.
    pub fn presented(&self, forwarded: ForwardedPresence) {
        let ForwardedPresence { key, action, told, .. } = forwarded;
        if action == PresenceAction::Leave && self.live(&key).is_none() {
            return;
        }
        self.with_channel(&key, |channel, state| match action {
            PresenceAction::Leave => {
                if self.may_say(&told.member, told.owner) {
                    self.leave_elsewhere(channel, state, told.member, told.data, told.timestamp_ms);
                }
            }
            PresenceAction::Enter | PresenceAction::Update => {
                self.be_elsewhere(channel, state, told, action == PresenceAction::Update);
            }
        });
    }

    /// Another node tells a part of the members of a channel. Whom it has not among them any more leaves, unless something of
    /// that member happened here after the event of the number `known`; without it nobody does. Members of further runs count
    /// unless `passes_over` holds of their run, as of one that tells of them itself.
    pub fn told_members(&self, told: ToldMembers, known: Option<u64>, passes_over: impl Fn(u64) -> bool) {
        let ToldMembers { key, by, after, members, is_last, .. } = told;
        if members.is_empty() && self.live(&key).is_none() {
            return;
        }
        self.with_channel(&key, |channel, state| {
            if let Some(known) = known {
                let end = members.last().map(|last| last.member.clone()).filter(|_| !is_last);
                let is_told = |id: &MemberId| members.binary_search_by(|told| told.member.cmp(id)).is_ok();
                let behind = state.members.iter().flat_map(|present| present.behind(after.as_ref()));
                let within = behind.take_while(|(id, _)| end.as_ref().is_none_or(|end| *id <= end));
                let gone = within.filter(|(id, member)| !is_told(id) && self.is_stale(id, member, by, known));
                let gone: Vec<_> = gone.map(|(id, member)| (id.clone(), member.data.clone())).collect();
                self.leave_unseen(channel, state, gone);
            }
            for told in members {
                // Of whom it does not have itself it may know less than this node: also that somebody has left.
                let run = told.owner.incarnation;
                if run == by || (!is_present(state, &told.member) && !passes_over(run)) {
                    self.be_elsewhere(channel, state, told, false);
                }
            }
        });
    }

    /// The node has told all that it has in these parts of the channels, and these channels were not among them.
    pub fn untold_members(&self, key: &ChannelKey, by: u64, known: u64) {
        let Some(_) = self.live(key) else { return };
        self.with_channel(key, |channel, state| {
            let present = state.members.iter().flat_map(|present| present.iter());
            let gone = present.filter(|(id, member)| self.is_stale(id, member, by, known));
            let gone: Vec<_> = gone.map(|(id, member)| (id.clone(), member.data.clone())).collect();
            self.leave_unseen(channel, state, gone);
        });
    }

    /// Hands a part of the channel's members to `tell`, of the owners of whom `wanted` holds: those behind `after`, of roughly
    /// `bytes_max` at most, and whether they are the last. Nothing happens in the channel meanwhile.
    pub fn tell_members<R>(
        &self,
        key: &ChannelKey,
        after: Option<&MemberId>,
        bytes_max: usize,
        wanted: impl Fn(u64) -> bool,
        tell: impl FnOnce(&[ToldMember], bool) -> R,
    ) -> R {
        self.with_channel(key, |_, state| {
            let (mut part, mut bytes, mut is_last) = (Vec::new(), 0, true);
            for (id, present) in state.members.iter().flat_map(|members| members.behind(after)) {
                let owner = self.roster.owner(id.connection_id).filter(|owner| wanted(owner.incarnation));
                let Some(owner) = owner else { continue };
                if bytes >= bytes_max {
                    is_last = false;
                    break;
                }
                bytes += of_member(key, id, &present.data);
                let (member, data) = (id.clone(), present.data.clone());
                part.push(ToldMember { member, owner, data, timestamp_ms: present.timestamp_ms });
            }
            tell(&part, is_last)
        })
    }

    /// Runs of whose connections members are known.
    pub fn present_runs(&self) -> Vec<u64> {
        self.roster.runs()
    }

    /// What the members of a run come to.
    pub fn presence_digests(&self, run: u64) -> Digests {
        self.roster.digests(run)
    }

    /// Connections with members of the runs of which `wanted` holds. Looks at every connection.
    pub fn present_connections(&self, wanted: impl Fn(u64) -> bool) -> Vec<(ConnectionId, Owner)> {
        self.roster.of_runs(wanted)
    }

    /// The channels of their members in these parts. Looks at every member.
    pub fn present_channels(&self, wanted: impl Fn(u64) -> bool, parts: u64) -> BTreeSet<ChannelKey> {
        self.roster.channels(wanted, parts)
    }

    /// Of what is served here this node knows best, and of anything else the greatest owner.
    fn may_say(&self, member: &MemberId, owner: Owner) -> bool {
        owner.incarnation != self.incarnation
            && self.roster.owner(member.connection_id).is_none_or(|known| known <= owner)
    }

    fn is_stale(&self, id: &MemberId, member: &Member, by: u64, known: u64) -> bool {
        let owned = self.roster.owned_since(id.connection_id);
        let is_theirs = owned.is_some_and(|(owner, since)| owner.incarnation == by && since <= known);
        is_theirs && member.sequence <= known
    }

    /// The member is like this there. Whose data is so already is no event, unless it `changes`: at another time it entered
    /// where it was not known that it was present.
    fn be_elsewhere(&self, channel: &Channel, state: &mut State, told: ToldMember, changes: bool) {
        let ToldMember { member, owner, data, timestamp_ms } = told;
        if !self.may_say(&member, owner) {
            return;
        }
        let former = state.members.as_ref().and_then(|members| members.get(&member));
        let is_same = former.is_some_and(|former| same(&former.data, &data)) && !changes;
        if is_same && former.is_some_and(|former| former.timestamp_ms == timestamp_ms) {
            return self.roster.take_over(member.connection_id, owner, self.presence_sequence());
        }
        let action = if former.is_some() { PresenceAction::Update } else { PresenceAction::Enter };
        let key = channel.key();
        let bytes = |data: &MemberData| of_member(key, &member, data);
        let former = former.map_or(0, |former| bytes(&former.data));
        // It had its room where it entered.
        self.member_bytes.exchange(key.account(), former, bytes(&data), usize::MAX);
        let sequence = self.next_presence_sequence();
        let event = MemberEvent { key: key.clone(), member, action, data, timestamp_ms, sequence };
        match is_same {
            true => self.change(key, state, owner, &event),
            false => self.happened(channel, state, owner, event),
        }
    }

    fn leave_unseen(&self, channel: &Channel, state: &mut State, gone: Vec<(MemberId, MemberData)>) {
        for (member, data) in gone {
            let timestamp_ms = self.clock.stamp_ms(channel.key());
            self.leave_elsewhere(channel, state, member, data, timestamp_ms);
        }
    }

    fn leave_elsewhere(
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
        self.happened(channel, state, owner, event);
    }
}

fn is_present(state: &State, member: &MemberId) -> bool {
    state.members.as_ref().is_some_and(|members| members.get(member).is_some())
}
