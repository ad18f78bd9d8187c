//! Presence: what a member does on a channel.

use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;

use super::digest::Digest;
use super::ids::{ChannelKey, ClientId, ConnectionId};
use super::message::Stamp;
use super::session_ownership::SessionOwner;

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

/// Identity of a member on a channel. A connection may be present under several clientIds, and a clientId over several
/// connections.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct MemberId {
    pub connection_id: ConnectionId,
    pub client_id: ClientId,
}

/// JSON text that a member, its events and its frames share.
pub type MemberData = Option<Arc<RawValue>>;

/// A member as the previous incarnation of this node left it.
#[derive(Debug, Clone)]
pub struct RestoredMember {
    pub key: ChannelKey,
    pub member: MemberId,
    /// Epoch of the connection: rises with each session takeover.
    pub epoch: u64,
    pub data: MemberData,
    /// Time of the event that made the member so.
    pub timestamp_ms: u64,
}

/// One change of a channel's members that entered at this node: made by `publish`, the only maker.
#[derive(Debug)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct PresenceEvent {
    pub key: ChannelKey,
    pub member: MemberId,
    /// Owner of the connection; of another incarnation if that has ended and this node removes its members.
    pub owner: SessionOwner,
    /// Whether the member leaves because its connection was lost and not taken over.
    pub is_delayed_leave: bool,
    pub action: PresenceAction,
    pub data: MemberData,
    pub timestamp_ms: u64,
    pub incarnation: u64,
    /// Number of the event, apart from messages, rising within a channel.
    pub sequence: u64,
    /// Last message of the channel at the event.
    pub position: Stamp,
    _made_by_publish: (),
}

/// Numbers and time that an event gets under the channel's lock.
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
        let owner = SessionOwner { epoch, incarnation: stamp.incarnation };
        Self::made(key, member, owner, false, (action, data), stamp)
    }

    /// The delayed leave of a member whose connection is lost.
    pub(crate) fn delayed_leave(
        key: ChannelKey,
        member: MemberId,
        owner: SessionOwner,
        data: MemberData,
        stamp: PresenceStamp,
    ) -> Arc<Self> {
        Self::made(key, member, owner, true, (PresenceAction::Leave, data), stamp)
    }

    fn made(
        key: ChannelKey,
        member: MemberId,
        owner: SessionOwner,
        is_delayed_leave: bool,
        (action, data): (PresenceAction, MemberData),
        stamp: PresenceStamp,
    ) -> Arc<Self> {
        let PresenceStamp { timestamp_ms, incarnation, sequence, position } = stamp;
        let _made_by_publish = ();
        Arc::new(Self {
            key,
            member,
            owner,
            is_delayed_leave,
            action,
            data,
            timestamp_ms,
            incarnation,
            sequence,
            position,
            _made_by_publish,
        })
    }

    /// The id of the event, in a form that no message id has. A delayed leave has the same id on every node, so that it
    /// counts once when two nodes make it: in one epoch a connection is lost once.
    pub fn id(&self) -> String {
        let MemberId { connection_id, client_id } = &self.member;
        if self.is_delayed_leave {
            let digest = Digest::default().of(connection_id.as_bytes()).of(client_id.as_str().as_bytes());
            return format!("{connection_id}:{}:{:016x}", self.owner.epoch, digest.number());
        }
        Self::id_at(self.incarnation, self.sequence)
    }

    /// The id of an event that is no delayed leave.
    pub fn id_at(incarnation: u64, sequence: u64) -> String {
        format!("p:{incarnation:016x}:{sequence}")
    }
}
