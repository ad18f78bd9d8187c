//! Presence: what a member does on a channel.

use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;

use super::digest::Digest;
use super::ids::{ChannelKey, ClientId, ConnectionId};
use super::message::Stamp;
use super::tenure::Owner;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PresenceAction {
    Enter,
    Update,
    Leave,
}

impl PresenceAction {
    pub fn parse(name: &str) -> Option<Self> {
        [Self::Enter, Self::Update, Self::Leave].into_iter().find(|action| action.as_str() == name)
    }

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Enter => "enter",
            Self::Update => "update",
            Self::Leave => "leave",
        }
    }
}

impl fmt::Display for PresenceAction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// Who is present on a channel. A connection may be there under several names, and a name over several connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId {
    pub connection_id: ConnectionId,
    pub client_id: ClientId,
}

/// JSON text that a state, its events and its frames share.
pub type MemberData = Option<Arc<RawValue>>;

/// A member as the run of the node before has left it.
#[derive(Debug, Clone)]
pub struct FormerMember {
    pub key: ChannelKey,
    pub member: MemberId,
    /// Of the connection: it rises each time that another socket takes it up.
    pub epoch: u64,
    pub data: MemberData,
    /// Of the event that made it so.
    pub timestamp_ms: u64,
}

/// One change of a channel's members that entered at this node: made by `publish`, the only maker.
#[derive(Debug)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct PresenceEvent {
    pub key: ChannelKey,
    pub member: MemberId,
    /// Of the connection; of another run when that has ended, and this one lets the member leave.
    pub owner: Owner,
    /// The member leaves because its connection is lost and did not come back.
    pub is_departure: bool,
    pub action: PresenceAction,
    pub data: MemberData,
    pub timestamp_ms: u64,
    pub incarnation: u64,
    /// Counted apart from messages, rising within a channel.
    pub sequence: u64,
    /// Where the channel's messages stood.
    pub position: Stamp,
    _made_by_publish: (),
}

/// What an event is given under the channel's lock.
#[derive(Debug, Clone, Copy)]
pub struct PresenceStamp {
    pub timestamp_ms: u64,
    pub incarnation: u64,
    pub sequence: u64,
    pub position: Stamp,
}

impl PresenceEvent {
    pub(crate) fn new(
        key: ChannelKey,
        member: MemberId,
        epoch: u64,
        action: PresenceAction,
        data: MemberData,
        stamp: PresenceStamp,
    ) -> Arc<Self> {
        let owner = Owner { epoch, incarnation: stamp.incarnation };
        Self::made(key, member, owner, false, (action, data), stamp)
    }

    /// Lets a member leave whose connection is lost.
    pub(crate) fn departure(
        key: ChannelKey,
        member: MemberId,
        owner: Owner,
        data: MemberData,
        stamp: PresenceStamp,
    ) -> Arc<Self> {
        Self::made(key, member, owner, true, (PresenceAction::Leave, data), stamp)
    }

    fn made(
        key: ChannelKey,
        member: MemberId,
        owner: Owner,
        is_departure: bool,
        (action, data): (PresenceAction, MemberData),
        stamp: PresenceStamp,
    ) -> Arc<Self> {
        let PresenceStamp { timestamp_ms, incarnation, sequence, position } = stamp;
        let _made_by_publish = ();
        Arc::new(Self {
            key,
            member,
            owner,
            is_departure,
            action,
            data,
            timestamp_ms,
            incarnation,
            sequence,
            position,
            _made_by_publish,
        })
    }

    /// Of a form that no message id has. That of a departure is the same on whatever node it is made, so that it counts
    /// once where two nodes make it: in one epoch a connection is lost once.
    pub fn id(&self) -> String {
        let MemberId { connection_id, client_id } = &self.member;
        if self.is_departure {
            let who = Digest::default().of(connection_id.as_bytes()).of(client_id.as_str().as_bytes());
            return format!("{connection_id}:{}:{:016x}", self.owner.epoch, who.number());
        }
        Self::id_at(self.incarnation, self.sequence)
    }

    /// The id of an event that is no departure.
    pub fn id_at(incarnation: u64, sequence: u64) -> String {
        format!("p:{incarnation:016x}:{sequence}")
    }
}
