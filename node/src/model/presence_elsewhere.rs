//! Who is present on other nodes, as they say. Made by `cluster::inbound` alone: it is delivered and shown here, and nothing
//! turns it into a `PresenceEvent`, so it is neither stored nor sent on.

use super::ids::ChannelKey;
use super::presence::{MemberData, MemberId, PresenceAction};
use super::tenure::Owner;

/// One change that another node has made.
#[derive(Debug, Clone)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct ForwardedPresence {
    pub key: ChannelKey,
    pub action: PresenceAction,
    pub told: ToldMember,
    _made_by_inbound: (),
}

/// A member of another node, as it is there.
#[derive(Debug, Clone)]
pub struct ToldMember {
    pub member: MemberId,
    /// Of its connection.
    pub owner: Owner,
    pub data: MemberData,
    /// Of the event that made it so.
    pub timestamp_ms: u64,
}

/// A part of the members of a channel that a node has, or knows of runs that have ended.
#[derive(Debug, Clone)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct ToldMembers {
    pub key: ChannelKey,
    /// Who says so.
    pub by: u64,
    /// The part begins behind this member; none: with the first.
    pub after: Option<MemberId>,
    /// In their order, without a gap.
    pub members: Vec<ToldMember>,
    /// None follow in this channel.
    pub is_last: bool,
    _made_by_inbound: (),
}

impl ForwardedPresence {
    pub(crate) fn new(key: ChannelKey, action: PresenceAction, told: ToldMember) -> Self {
        Self { key, action, told, _made_by_inbound: () }
    }
}

impl ToldMembers {
    pub(crate) fn new(
        key: ChannelKey,
        by: u64,
        after: Option<MemberId>,
        members: Vec<ToldMember>,
        is_last: bool,
    ) -> Self {
        Self { key, by, after, members, is_last, _made_by_inbound: () }
    }
}
