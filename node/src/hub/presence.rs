//! Who is present on channels: changes that are made here, under the channel's lock, and all events to subscribers.

use std::fmt;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fanfare_proto::frame::{self, Format, PresenceOut};
use fanfare_proto::serial::Serial;

use super::channels::{Channel, Hub, State};
use super::mark::Mark;
use super::member_bytes::of_member;
use super::members::{Member, Members, Outcome, Page};
use super::wire;
use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, Digest, FormerMember, Limits, MemberData,
    MemberId, Owner, PresenceAction, PresenceEvent, PresenceStamp,
};

/// A change of a member, on whatever node it entered, as this node counts them.
#[derive(Debug, Clone)]
pub struct MemberEvent {
    pub key: ChannelKey,
    pub member: MemberId,
    pub action: PresenceAction,
    pub data: MemberData,
    pub timestamp_ms: u64,
    /// Counted apart from messages, rising within a channel.
    pub sequence: u64,
}

impl From<&PresenceEvent> for MemberEvent {
    fn from(event: &PresenceEvent) -> Self {
        let PresenceEvent { key, member, action, data, timestamp_ms, sequence, .. } = event;
        let (key, member, data) = (key.clone(), member.clone(), data.clone());
        Self { key, member, action: *action, data, timestamp_ms: *timestamp_ms, sequence: *sequence }
    }
}

/// A presence event on its way to subscribers, with the channel number that shards know it by.
#[derive(Debug)]
pub struct PresenceDelivery {
    pub channel: u64,
    pub event: MemberEvent,
    /// Where the channel stood when it happened.
    mark: Mark,
    json: OnceLock<Bytes>,
    msgpack: OnceLock<Bytes>,
}

impl PresenceDelivery {
    fn new(channel: u64, mark: Mark, event: MemberEvent) -> Self {
        Self { channel, event, mark, json: OnceLock::new(), msgpack: OnceLock::new() }
    }

    /// The place of the last message before it.
    pub fn place(&self) -> u64 {
        self.mark.place
    }

    /// Memory that an undelivered frame holds, roughly.
    pub fn bytes(&self) -> usize {
        256 + self.event.data.as_ref().map_or(0, |data| data.get().len())
    }

    /// For who has all messages that the channel had handed on.
    pub fn frame(&self, format: Format) -> Bytes {
        let kept = match format {
            Format::Json => &self.json,
            Format::MsgPack => &self.msgpack,
        };
        kept.get_or_init(|| self.frame_at(format, &self.mark.serial())).clone()
    }

    /// For who has all messages up to `position`.
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

/// What a connection wants to be on a channel.
#[derive(Debug, Clone)]
pub struct Change {
    pub member: MemberId,
    /// Of the connection; one of a former epoch changes nothing.
    pub epoch: u64,
    pub action: PresenceAction,
    pub data: MemberData,
}

/// A bound was reached; nothing was changed. That of the node may be the part of it that an account may have.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PresenceRefused {
    Channel { members_max: usize },
    Connection { members_max: usize },
    Node { bytes_max: usize },
}

impl fmt::Display for PresenceRefused {
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

impl std::error::Error for PresenceRefused {}

impl Hub {
    /// Carries out a change and hands the event that `build` makes of it to every target with interest.
    ///
    /// `build` runs under the channel's lock, so whatever it queues stands in the order of the numbers. It does not run
    /// when the state is already as wanted.
    pub fn present(
        &self,
        key: &ChannelKey,
        change: Change,
        limits: &Limits,
        build: impl FnOnce(PresenceAction, MemberData, PresenceStamp) -> Arc<PresenceEvent>,
    ) -> Result<(), PresenceRefused> {
        let Change { member, epoch, action, data } = change;
        let connection_id = member.connection_id;
        let owner = Owner { epoch, incarnation: self.incarnation };
        self.with_channel(key, |channel, state| {
            if self.roster.owner(connection_id).is_some_and(|present| present > owner) {
                return Ok(());
            }
            let none = Members::default();
            let members = state.members.as_deref().unwrap_or(&none);
            let (action, data) = match members.outcome(&member, action, &data, limits.presence_members) {
                Outcome::Nothing => return Ok(()),
                Outcome::Full => {
                    return Err(PresenceRefused::Channel { members_max: limits.presence_members });
                }
                Outcome::Happens(action, data) => (action, data),
            };
            let members_max = limits.presence_connection_members;
            if action == PresenceAction::Enter && self.roster.count(connection_id) >= members_max {
                return Err(PresenceRefused::Connection { members_max });
            }
            let bytes_max = limits.presence_bytes;
            if action != PresenceAction::Leave {
                let former = members.get(&member).map_or(0, |former| of_member(key, &member, &former.data));
                let bytes = of_member(key, &member, &data);
                if !self.member_bytes.exchange(key.account(), former, bytes, bytes_max) {
                    return Err(PresenceRefused::Node { bytes_max });
                }
            }
            let event = build(action, data, self.presence_stamp(channel.key(), state));
            self.happened(channel, state, owner, MemberEvent::from(&*event));
            Ok(())
        })
    }

    /// Takes a member out, if it still is what it was when its connection went: of this owner, and not changed since
    /// the event of that number.
    pub fn depart(
        &self,
        key: &ChannelKey,
        member: MemberId,
        owner: Owner,
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
            self.happened(channel, state, owner, MemberEvent::from(&*event));
        });
    }

    /// Puts a member back who was present before this run. Nobody is told, since it never left. To be called before
    /// anybody is attached.
    pub fn restore(&self, former: FormerMember) {
        let FormerMember { key, member, epoch, data, timestamp_ms } = former;
        let owner = Owner { epoch, incarnation: self.incarnation };
        self.with_channel(&key, |_, state| {
            self.enroll(&key, &member, owner, &data, timestamp_ms);
            let bytes = of_member(&key, &member, &data);
            // It had its room in the run before, under whatever bound.
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
            position: state.mark.own,
        }
    }

    pub(super) fn next_presence_sequence(&self) -> u64 {
        self.presence_sequence.fetch_add(1, Ordering::SeqCst) + 1
    }

    /// What the members come to by this change, and who is told; the bytes of who enters or changes are taken by then.
    pub(super) fn happened(&self, channel: &Channel, state: &mut State, owner: Owner, event: MemberEvent) {
        self.change(channel.key(), state, owner, &event);
        if state.targets == 0 {
            return;
        }
        let delivery = Arc::new(PresenceDelivery::new(channel.number, state.mark.clone(), event));
        for (bit, target) in self.targets.iter().enumerate() {
            if state.targets & (1 << bit) != 0 {
                target.deliver_presence(Arc::clone(&delivery));
            }
        }
    }

    /// The same, and nobody is told.
    pub(super) fn change(&self, key: &ChannelKey, state: &mut State, owner: Owner, event: &MemberEvent) {
        let members = state.members.get_or_insert_default();
        let MemberEvent { member, data, timestamp_ms, .. } = event;
        if event.action == PresenceAction::Leave {
            if let Some(former) = members.get(member) {
                self.member_bytes.give_back(key.account(), of_member(key, member, &former.data));
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
        owner: Owner,
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
        let place = (key.clone(), client_id.clone());
        self.roster.put(*connection_id, owner, self.presence_sequence(), place, digest);
    }

    /// Whether there are members, and the number of the last event that the answer covers. Events after it come to
    /// the target that is attached by then.
    pub fn presence_mark(&self, channel: &Channel) -> (bool, u64) {
        let state = channel.state.lock();
        (state.members.is_some(), self.presence_sequence.load(Ordering::SeqCst))
    }

    /// The page of the member list that begins behind `after`.
    pub fn presence_page(&self, channel: &Channel, format: Format, after: Option<&MemberId>) -> Page {
        let mut state = channel.state.lock();
        match &mut state.members {
            Some(members) => members.page(channel.key().channel(), format, after),
            None => {
                let page = Members::default().page(channel.key().channel(), format, after);
                Page { sequence: self.presence_sequence.load(Ordering::SeqCst), ..page }
            }
        }
    }

    /// All members as they are now. Their data is shared, not copied.
    pub fn members(&self, key: &ChannelKey) -> Vec<(MemberId, Member)> {
        let Some(channel) = self.live(key) else { return Vec::new() };
        let state = channel.state.lock();
        let members = state.members.iter().flat_map(|members| members.iter());
        members.map(|(id, member)| (id.clone(), member.clone())).collect()
    }

    /// How many members there are now.
    pub fn member_count(&self, key: &ChannelKey) -> usize {
        let Some(channel) = self.live(key) else { return 0 };
        let state = channel.state.lock();
        state.members.as_ref().map_or(0, |members| members.len())
    }

    /// The account's channels with members whose connections are of this run, and how many.
    pub fn crowded(&self, account: &AccountId) -> Vec<(ChannelName, usize)> {
        self.roster.crowded(account)
    }

    /// The number of the last presence event so far.
    pub fn presence_sequence(&self) -> u64 {
        self.presence_sequence.load(Ordering::SeqCst)
    }

    /// Of a connection with members.
    pub fn presence_owner(&self, connection_id: ConnectionId) -> Option<Owner> {
        self.roster.owner(connection_id)
    }

    /// From now on only what this owner says of the connection's members counts, or a greater one.
    pub fn take_over_presence(&self, connection_id: ConnectionId, owner: Owner) {
        self.roster.take_over(connection_id, owner, self.next_presence_sequence());
    }

    pub fn memberships(&self, connection_id: ConnectionId) -> Vec<(ChannelKey, ClientId)> {
        self.roster.members(connection_id)
    }

    /// Whether the connection has a member on a channel of which `wanted` holds.
    pub fn has_member(&self, connection_id: ConnectionId, wanted: impl Fn(&ChannelKey) -> bool) -> bool {
        self.roster.any(connection_id, wanted)
    }
}
