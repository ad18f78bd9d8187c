//! Presence: what a member does on a channel.

use std::fmt;
use std::sync::Arc;

use serde_json::value::RawValue;

use super::ids::{ChannelKey, ClientId, ConnectionId};
use super::message::Stamp;

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
    /// Of the connection: it rises each time that another socket takes it up.
    pub epoch: u64,
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
        let PresenceStamp { timestamp_ms, incarnation, sequence, position } = stamp;
        let _made_by_publish = ();
        Arc::new(Self {
            key,
            member,
            epoch,
            action,
            data,
            timestamp_ms,
            incarnation,
            sequence,
            position,
            _made_by_publish,
        })
    }
}
