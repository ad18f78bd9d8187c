//! Encoding of presence items.

use bytes::Bytes;
use fanfare_proto::peer::v1;

use super::PeerItem;
use super::forward::named;
use crate::cluster::inbound::PresenceSyncMessage;
use crate::model::{
    ChannelKey, MemberData, MemberId, PresenceAction, PresenceEvent, RemoteMember, SessionOwner,
};

impl PeerItem {
    /// A presence change of this node. Changes that came from a peer have another type, so they are not sent on.
    pub fn presence_changed(event: &PresenceEvent) -> Self {
        use v1::presence_delta::Action;
        let PresenceEvent { key, member, owner, action, data, timestamp_ms, .. } = event;
        let action = match action {
            PresenceAction::Enter => Action::Enter,
            PresenceAction::Update => Action::Update,
            PresenceAction::Leave => Action::Leave,
        };
        Self::of(v1::item::Kind::PresenceDelta(v1::PresenceDelta {
            channel: Some(named(key)),
            action: action.into(),
            member: Some(written(member, *owner, data, *timestamp_ms)),
        }))
    }

    /// One part of the members of a channel.
    pub fn presence_members(
        number: u64,
        key: &ChannelKey,
        after: Option<&MemberId>,
        members: &[RemoteMember],
        is_last: bool,
    ) -> Self {
        let none = SessionOwner { epoch: 0, incarnation: 0 };
        let write =
            |remote: &RemoteMember| written(&remote.member, remote.owner, &remote.data, remote.timestamp_ms);
        Self::of(v1::item::Kind::PresenceSnapshot(v1::PresenceSnapshot {
            channel: Some(named(key)),
            number,
            after: after.map(|member| written(member, none, &None, 0)),
            members: members.iter().map(write).collect(),
            last: is_last,
        }))
    }

    pub fn presence_sync(message: PresenceSyncMessage) -> Self {
        use v1::presence_sync::Kind;
        let kind = match message {
            PresenceSyncMessage::SnapshotBegin { number, parts } => {
                Kind::Begun(v1::PresenceBegun { number, parts })
            }
            PresenceSyncMessage::SnapshotEnd { number, streams } => {
                Kind::Ended(v1::PresenceEnded { number, streams })
            }
            PresenceSyncMessage::Digests { parts, digests } => {
                Kind::Digests(v1::PresenceDigests { parts, digests })
            }
            PresenceSyncMessage::SnapshotRequest { parts } => Kind::Asked(v1::PresenceRequest { parts }),
        };
        Self::of(v1::item::Kind::PresenceSync(v1::PresenceSync { kind: Some(kind) }))
    }
}

fn written(member: &MemberId, owner: SessionOwner, data: &MemberData, timestamp_ms: u64) -> v1::Member {
    v1::Member {
        client_id: member.client_id.as_str().to_owned(),
        connection_id: Bytes::copy_from_slice(member.connection_id.as_bytes()),
        incarnation: owner.incarnation,
        epoch: owner.epoch,
        timestamp_ms,
        data: data.as_ref().map(|data| Bytes::copy_from_slice(data.get().as_bytes())),
    }
}
