//! Remote members: presence changes and member lists of peers. Made by `cluster::inbound` alone; they are delivered and shown here, and
//! nothing turns them into a `PresenceEvent`, so they are neither stored nor sent on.

use super::ids::ChannelKey;
use super::presence::{MemberData, MemberId, PresenceAction};
use super::session_ownership::SessionOwner;

/// A presence change made by another node.
#[derive(Debug, Clone)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct ForwardedPresence {
    pub key: ChannelKey,
    pub action: PresenceAction,
    pub remote: RemoteMember,
    _made_by_inbound: (),
}

/// A member of another node, as that node has it.
#[derive(Debug, Clone)]
pub struct RemoteMember {
    pub member: MemberId,
    /// Owner of the member's connection.
    pub owner: SessionOwner,
    pub data: MemberData,
    /// Time of the event that made the member so.
    pub timestamp_ms: u64,
}

/// A page of the members of a channel that a node has, or knows of ended incarnations.
#[derive(Debug, Clone)]
#[expect(clippy::manual_non_exhaustive, reason = "within this crate too, only its maker may fill it")]
pub struct RemoteMembersPage {
    pub key: ChannelKey,
    /// Incarnation of the announcing node.
    pub by: u64,
    /// The member before the page; none for the first page.
    pub after: Option<MemberId>,
    /// Members in their order, without a gap.
    pub members: Vec<RemoteMember>,
    /// Whether this is the channel's last page.
    pub is_last: bool,
    _made_by_inbound: (),
}

impl ForwardedPresence {
    pub(crate) fn new(key: ChannelKey, action: PresenceAction, remote: RemoteMember) -> Self {
        Self { key, action, remote, _made_by_inbound: () }
    }
}

impl RemoteMembersPage {
    pub(crate) fn new(
        key: ChannelKey,
        by: u64,
        after: Option<MemberId>,
        members: Vec<RemoteMember>,
        is_last: bool,
    ) -> Self {
        Self { key, by, after, members, is_last, _made_by_inbound: () }
    }
}
