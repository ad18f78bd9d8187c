//! Presence on channels: changes that are made here, under the channel's lock, and all events to subscribers.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, PresenceOut};
use fanfare_proto::serial::Serial;

use super::channel_position::ChannelPosition;
use super::channels::{Channel, Hub, State};
use super::member_bytes::of_member;
use super::members::{ChannelMembers, MemberChangeOutcome, MemberPage, PresentMember};
use super::wire;
use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, Digest, Limits, MemberData, MemberId,
    PresenceAction, PresenceEvent, PresenceStamp, RestoredMember, SessionOwner,
};

/// A change of a member at any node, numbered by this node.
#[derive(Debug, Clone)]
pub struct MemberEvent {
    pub key: ChannelKey,
    pub member: MemberId,
    pub action: PresenceAction,
    pub data: MemberData,
    pub timestamp_ms: u64,
    /// Number of the event, apart from messages, rising within a channel.
    pub sequence: u64,
}

impl From<&PresenceEvent> for MemberEvent {
    fn from(event: &PresenceEvent) -> Self {
        let PresenceEvent { key, member, action, data, timestamp_ms, sequence, .. } = event;
        let (key, member, data) = (key.clone(), member.clone(), data.clone());
        Self { key, member, action: *action, data, timestamp_ms: *timestamp_ms, sequence: *sequence }
    }
}

/// A presence event for subscribers, with the channel number of the shards.
#[derive(Debug)]
pub struct PresenceDelivery {
    pub channel: u64,
    pub event: MemberEvent,
    /// Position of the channel at the event.
    position: ChannelPosition,
    json: OnceLock<Bytes>,
    msgpack: OnceLock<Bytes>,
}

impl PresenceDelivery {
    fn new(channel: u64, position: ChannelPosition, event: MemberEvent) -> Self {
        Self { channel, event, position, json: OnceLock::new(), msgpack: OnceLock::new() }
    }

    /// Local offset of the last message before the event.
    pub fn offset(&self) -> u64 {
        self.position.offset
    }

    /// Memory that an undelivered frame holds, roughly.
    pub fn bytes(&self) -> usize {
        256 + self.event.data.as_ref().map_or(0, |data| data.get().len())
    }

    /// The frame for a client that has every message the channel delivered before.
    pub fn frame(&self, format: Format) -> Bytes {
        let kept = match format {
            Format::Json => &self.json,
            Format::MsgPack => &self.msgpack,
        };
        kept.get_or_init(|| self.frame_at(format, &self.position.serial())).clone()
    }

    /// The frame for a client that has every message up to `position`.
    pub fn frame_at(&self, format: Format, position: &Serial) -> Bytes {
        wire::encoded(format, self.bytes(), |mut out| {
            self.write(&position.to_string(), &mut out);
            out
        })
    }

    fn write(&self, serial: &str, out: &mut Vec<u8>) {
        let MemberEvent { key, member, action, data, timestamp_ms, .. } = &self.event;
        let event = PresenceOut {
            action: action.as_str(),
            client_id: member.client_id.as_str(),
            connection_id: &member.connection_id.to_string(),
            data: data.as_deref(),
            timestamp: *timestamp_ms,
        };
        frame::encode_presence(key.channel(), serial, &event, out);
    }
}

/// A change that a connection asks for on a channel.
#[derive(Debug, Clone)]
pub struct PresenceChange {
    pub member: MemberId,
    /// Epoch of the connection; a change of an earlier epoch has no effect.
    pub epoch: u64,
    pub action: PresenceAction,
    pub data: MemberData,
}

/// A reached bound; nothing was changed. The node's bound may be the share of it that one account may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PresenceRefusal {
    Channel { members_max: usize },
    Connection { members_max: usize },
    Node { bytes_max: usize },
}

impl fmt::Display for PresenceRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Channel { members_max } => {
                write!(f, "more than {members_max} presence members on one channel")
            }
            Self::Connection { members_max } => {
                write!(f, "more than {members_max} presence members of one connection")
            }
            Self::Node { bytes_max } => {
                write!(f, "the node has no room for more presence members, of {bytes_max} bytes in all")
            }
        }
    }
}

impl std::error::Error for PresenceRefusal {}

impl Hub {
    /// Applies a change and delivers the event that `build` makes of it to every target with subscribers.
    ///
    /// `build` runs under the channel's lock, so everything that it queues is in the order of the numbers. It does not
    /// run when the member is already in that state.
    pub fn present(
        &self,
        key: &ChannelKey,
        change: PresenceChange,
        limits: &Limits,
        build: impl FnOnce(PresenceAction, MemberData, PresenceStamp) -> Arc<PresenceEvent>,
    ) -> Result<(), PresenceRefusal> {
        let PresenceChange { member, epoch, action, data } = change;
        let connection_id = member.connection_id;
        let owner = SessionOwner { epoch, incarnation: self.incarnation };
        self.with_channel(key, |channel, state| {
            if self.roster.owner(connection_id).is_some_and(|present| present > owner) {
                return Ok(());
            }
            let none = ChannelMembers::default();
            let members = state.members.as_deref().unwrap_or(&none);
            let (action, data) = match members.outcome(&member, action, &data, limits.presence_members) {
                MemberChangeOutcome::Nothing => return Ok(()),
                MemberChangeOutcome::Full => {
                    return Err(PresenceRefusal::Channel { members_max: limits.presence_members });
                }
                MemberChangeOutcome::Happens(action, data) => (action, data),
            };
            let members_max = limits.presence_connection_members;
            if action == PresenceAction::Enter && self.roster.count(connection_id) >= members_max {
                return Err(PresenceRefusal::Connection { members_max });
            }
            let bytes_max = limits.presence_bytes;
            if action != PresenceAction::Leave {
                let previous =
                    members.get(&member).map_or(0, |previous| of_member(key, &member, &previous.data));
                let bytes = of_member(key, &member, &data);
                if !self.member_bytes.exchange(key.account(), previous, bytes, bytes_max) {
                    return Err(PresenceRefusal::Node { bytes_max });
                }
            }
            let event = build(action, data, self.presence_stamp(channel.key(), state));
            self.apply_and_deliver(channel, state, owner, MemberEvent::from(&*event));
            Ok(())
        })
    }

    /// Removes a member of a lost connection, if it still has this owner and was not changed after the event of that
    /// number.
    pub fn remove_lost_member(
        &self,
        key: &ChannelKey,
        member: MemberId,
        owner: SessionOwner,
        up_to_sequence: u64,
        build: impl FnOnce(PresenceAction, MemberData, PresenceStamp) -> Arc<PresenceEvent>,
    ) {
        if self.live(key).is_none() {
            return;
        }
        self.with_channel(key, |channel, state| {
            let present = state.members.as_deref().and_then(|members| members.get(&member));
            let Some(present) = present.filter(|present| present.sequence <= up_to_sequence) else { return };
            if self.roster.owner(member.connection_id) != Some(owner) {
                return;
            }
            let data = present.data.clone();
            let event = build(PresenceAction::Leave, data, self.presence_stamp(channel.key(), state));
            self.apply_and_deliver(channel, state, owner, MemberEvent::from(&*event));
        });
    }

    /// Restores a member that was present before this incarnation, without an event, since it never left. To be called
    /// before the first attach.
    pub fn restore(&self, restored: RestoredMember) {
        let RestoredMember { key, member, epoch, data, timestamp_ms } = restored;
        let owner = SessionOwner { epoch, incarnation: self.incarnation };
        self.with_channel(&key, |_, state| {
            self.enroll(&key, &member, owner, &data, timestamp_ms);
            let bytes = of_member(&key, &member, &data);
            // The member was admitted by the incarnation before, under whatever bound.
            self.member_bytes.exchange(key.account(), 0, bytes, usize::MAX);
            let members = state.members.get_or_insert_default();
            members.restore(member, data, timestamp_ms);
        });
    }

    fn presence_stamp(&self, key: &ChannelKey, state: &State) -> PresenceStamp {
        PresenceStamp {
            timestamp_ms: self.clock.stamp_ms(key),
            incarnation: self.incarnation,
            sequence: self.next_presence_sequence(),
            position: state.position.own,
        }
    }

    pub(super) fn next_presence_sequence(&self) -> u64 {
        self.presence_sequence.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// Applies a change and delivers its event; memory for the member is reserved by then.
    pub(super) fn apply_and_deliver(
        &self,
        channel: &Channel,
        state: &mut State,
        owner: SessionOwner,
        event: MemberEvent,
    ) {
        self.apply_silently(channel.key(), state, owner, &event);
        if state.targets == 0 {
            return;
        }
        let delivery = Arc::new(PresenceDelivery::new(channel.number, state.position.clone(), event));
        for (bit, target) in self.targets.iter().enumerate() {
            if state.targets & (1 << bit) != 0 {
                target.deliver_presence(Arc::clone(&delivery));
            }
        }
    }

    /// Applies a change without an event.
    pub(super) fn apply_silently(
        &self,
        key: &ChannelKey,
        state: &mut State,
        owner: SessionOwner,
        event: &MemberEvent,
    ) {
        let members = state.members.get_or_insert_default();
        let MemberEvent { member, data, timestamp_ms, .. } = event;
        if event.action == PresenceAction::Leave {
            if let Some(previous) = members.get(member) {
                self.member_bytes.give_back(key.account(), of_member(key, member, &previous.data));
            }
            self.roster.remove(member.connection_id, key, &member.client_id);
        } else {
            self.enroll(key, member, owner, data, *timestamp_ms);
        }
        members.apply(event);
        if members.is_empty() {
            state.members = None;
        }
    }

    fn enroll(
        &self,
        key: &ChannelKey,
        member: &MemberId,
        owner: SessionOwner,
        data: &MemberData,
        timestamp_ms: u64,
    ) {
        let MemberId { connection_id, client_id } = member;
        let data = data.as_ref().map_or("", |data| data.get());
        let parts = [
            key.account().as_str().as_bytes(),
            key.channel().as_bytes(),
            connection_id.as_bytes(),
            client_id.as_str().as_bytes(),
            data.as_bytes(),
            &timestamp_ms.to_be_bytes(),
        ];
        let digest = parts.into_iter().fold(Digest::default(), Digest::of).number();
        let member_key = (key.clone(), client_id.clone());
        self.roster.put(*connection_id, owner, self.presence_sequence(), member_key, digest);
    }

    /// Whether the channel has members, and the number of the last event. Later events reach every target attached by
    /// then.
    pub fn presence_state(&self, channel: &Channel) -> (bool, u64) {
        let state = channel.state.lock();
        (state.members.is_some(), self.presence_sequence.load(Ordering::SeqCst))
    }

    /// The page of the member list that begins after `after`.
    pub fn presence_page(&self, channel: &Channel, format: Format, after: Option<&MemberId>) -> MemberPage {
        let mut state = channel.state.lock();
        match &mut state.members {
            Some(members) => members.page(channel.key().channel(), format, after),
            None => {
                let page = ChannelMembers::default().page(channel.key().channel(), format, after);
                MemberPage { sequence: self.presence_sequence.load(Ordering::SeqCst), ..page }
            }
        }
    }

    /// All present members. Their data is shared, not copied.
    pub fn members(&self, key: &ChannelKey) -> Vec<(MemberId, PresentMember)> {
        let Some(channel) = self.live(key) else { return Vec::new() };
        let state = channel.state.lock();
        let members = state.members.iter().flat_map(|members| members.iter());
        members.map(|(id, member)| (id.clone(), member.clone())).collect()
    }

    /// The number of present members.
    pub fn member_count(&self, key: &ChannelKey) -> usize {
        let Some(channel) = self.live(key) else { return 0 };
        let state = channel.state.lock();
        state.members.as_ref().map_or(0, |members| members.len())
    }

    /// The account's channels that have members with connections of this incarnation, and their number.
    pub fn channel_member_counts(&self, account: &AccountId) -> Vec<(ChannelName, usize)> {
        self.roster.channel_member_counts(account)
    }

    /// The number of the last presence event.
    pub fn presence_sequence(&self) -> u64 {
        self.presence_sequence.load(Ordering::SeqCst)
    }

    /// The owner of a connection that has members.
    pub fn presence_owner(&self, connection_id: ConnectionId) -> Option<SessionOwner> {
        self.roster.owner(connection_id)
    }

    /// Accepts changes of the connection's members only of this owner or a greater one from now on.
    pub fn take_over_presence(&self, connection_id: ConnectionId, owner: SessionOwner) {
        self.roster.take_over(connection_id, owner, self.next_presence_sequence());
    }

    pub fn memberships(&self, connection_id: ConnectionId) -> Vec<(ChannelKey, ClientId)> {
        self.roster.members(connection_id)
    }

    /// Whether the connection has a member on a channel for which `is_match` holds.
    pub fn has_member(&self, connection_id: ConnectionId, is_match: impl Fn(&ChannelKey) -> bool) -> bool {
        self.roster.any(connection_id, is_match)
    }
}
