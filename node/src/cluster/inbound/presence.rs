//! Presence items of peers: reads changes, snapshots and sync messages.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use fanfare_proto::peer::v1;
use serde_json::value::RawValue;

use super::{MalformedItem, Peer, channel_key, client_id, connection_id};
use crate::model::{
    ForwardedPresence, MemberData, MemberId, PresenceAction, RemoteMember, RemoteMembersPage, SessionOwner,
};

/// Message of the presence sync between two nodes: snapshots and digests. Each bit of `parts` stands for one part of the channels.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PresenceSyncMessage {
    /// Begin of a presence snapshot of these parts.
    SnapshotBegin { number: u64, parts: u64 },
    /// End of the snapshot on one of `streams` streams.
    SnapshotEnd { number: u64, streams: u32 },
    /// Digests of the sending node's members, one for each of `parts`, in their order.
    Digests { parts: u64, digests: Vec<u64> },
    /// Request for a presence snapshot of these parts.
    SnapshotRequest { parts: u64 },
}

/// Environment variable that makes a debug build drop incoming presence changes on one channel.
const LOST_ON: &str = "PEER_PRESENCE_LOST_ON";

/// True if a test wants the change to be dropped. Real links never lose a change without a report.
pub(super) fn is_to_be_lost(change: &ForwardedPresence) -> bool {
    static LOST: OnceLock<Option<String>> = OnceLock::new();
    let from_env = || std::env::var(LOST_ON).ok();
    cfg!(debug_assertions) && LOST.get_or_init(from_env).as_deref() == Some(change.key.channel())
}

/// Reads a presence change; None for an action of a later minor version, whose effect the digests reveal.
pub(super) fn changed(
    delta: v1::PresenceDelta,
    from: &Peer,
) -> Result<Option<ForwardedPresence>, MalformedItem> {
    use v1::presence_delta::Action;
    let action = match Action::try_from(delta.action) {
        Ok(Action::Enter) => PresenceAction::Enter,
        Ok(Action::Update) => PresenceAction::Update,
        Ok(Action::Leave) => PresenceAction::Leave,
        Ok(Action::Unspecified) => return Err(MalformedItem("no action")),
        Err(_) => return Ok(None),
    };
    let key = channel_key(delta.channel.ok_or(MalformedItem("no channel"))?)?;
    let remote = snapshot_member(delta.member.ok_or(MalformedItem("no member"))?)?;
    if action != PresenceAction::Leave && remote.owner.incarnation != from.incarnation {
        return Err(MalformedItem("a member of another node"));
    }
    Ok(Some(ForwardedPresence::new(key, action, remote)))
}

pub(super) fn members(
    part: v1::PresenceSnapshot,
    from: &Peer,
) -> Result<(u64, RemoteMembersPage), MalformedItem> {
    let v1::PresenceSnapshot { channel, number, after, members, last } = part;
    let key = channel_key(channel.ok_or(MalformedItem("no channel"))?)?;
    let after = after.map(|member| member_id(&member)).transpose()?;
    let members = members.into_iter().map(snapshot_member).collect::<Result<Vec<_>, _>>()?;
    let is_behind = after.is_none() || after.as_ref() < members.first().map(|first| &first.member);
    let is_sorted = members.is_sorted_by(|one, next| one.member < next.member);
    if !is_sorted || (!members.is_empty() && !is_behind) {
        return Err(MalformedItem("members out of their order"));
    }
    Ok((number, RemoteMembersPage::new(key, from.incarnation, after, members, last)))
}

/// Reads a sync message; None for a kind of a later minor version.
pub(super) fn sync_message(message: v1::PresenceSync) -> Result<Option<PresenceSyncMessage>, MalformedItem> {
    use v1::presence_sync::Kind;
    Ok(Some(match message.kind {
        Some(Kind::Begun(v1::PresenceBegun { number, parts })) => {
            PresenceSyncMessage::SnapshotBegin { number, parts }
        }
        Some(Kind::Ended(v1::PresenceEnded { number, streams })) => {
            PresenceSyncMessage::SnapshotEnd { number, streams }
        }
        Some(Kind::Digests(v1::PresenceDigests { parts, digests })) => {
            if digests.len() != parts.count_ones() as usize {
                return Err(MalformedItem("not a digest for each part"));
            }
            PresenceSyncMessage::Digests { parts, digests }
        }
        Some(Kind::Asked(v1::PresenceRequest { parts })) => PresenceSyncMessage::SnapshotRequest { parts },
        None => return Ok(None),
    }))
}

fn snapshot_member(member: v1::Member) -> Result<RemoteMember, MalformedItem> {
    Ok(RemoteMember {
        member: member_id(&member)?,
        owner: SessionOwner { epoch: member.epoch, incarnation: member.incarnation },
        data: member.data.map(data).transpose()?.flatten(),
        timestamp_ms: member.timestamp_ms,
    })
}

fn member_id(member: &v1::Member) -> Result<MemberId, MalformedItem> {
    let (connection_id, client_id) = (connection_id(&member.connection_id)?, client_id(&member.client_id)?);
    Ok(MemberId { connection_id, client_id })
}

/// Checks that member data is JSON, since subscribers receive the text unchanged.
fn data(text: Bytes) -> Result<MemberData, MalformedItem> {
    let text = String::from_utf8(text.into()).map_err(|_| MalformedItem("data that is no text"))?;
    let data = RawValue::from_string(text).map_err(|_| MalformedItem("data that is no JSON"))?;
    Ok(Some(Arc::from(data)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const FROM: u64 = 7;

    fn member(connection: u8) -> v1::Member {
        v1::Member {
            client_id: "ada".to_owned(),
            connection_id: vec![connection; 16].into(),
            incarnation: FROM,
            data: Some(Bytes::from_static(b"{}")),
            ..v1::Member::default()
        }
    }

    fn channel() -> Option<v1::Channel> {
        Some(v1::Channel { account: "acme".to_owned(), name: "room".to_owned() })
    }

    fn from() -> Peer {
        Peer { node_id: "n".into(), incarnation: FROM }
    }

    #[test]
    fn a_change_that_no_node_sends_is_named() {
        let good = |action: v1::presence_delta::Action| v1::PresenceDelta {
            channel: channel(),
            action: action.into(),
            member: Some(member(1)),
        };
        use v1::presence_delta::Action::{Enter, Leave, Unspecified, Update};
        for action in [Enter, Update, Leave] {
            assert!(changed(good(action), &from()).is_ok());
        }
        let anothers = Some(v1::Member { incarnation: 8, ..member(1) });
        let leave = v1::PresenceDelta { member: anothers.clone(), ..good(Leave) };
        assert!(changed(leave, &from()).is_ok(), "its run may have ended");
        let bad =
            |data: &'static [u8]| Some(v1::Member { data: Some(Bytes::from_static(data)), ..member(1) });
        for (delta, fault) in [
            (good(Unspecified), "no action"),
            (v1::PresenceDelta { channel: None, ..good(Enter) }, "no channel"),
            (v1::PresenceDelta { member: None, ..good(Enter) }, "no member"),
            (v1::PresenceDelta { member: anothers, ..good(Update) }, "a member of another node"),
            (v1::PresenceDelta { member: bad(b"{"), ..good(Enter) }, "data that is no JSON"),
            (v1::PresenceDelta { member: bad(b"\"\xff\""), ..good(Enter) }, "data that is no text"),
        ] {
            assert_eq!(changed(delta, &from()).err(), Some(MalformedItem(fault)));
        }
    }

    #[test]
    fn members_come_in_their_order() {
        let of = |after: Option<u8>, members_of: &[u8]| {
            let part = v1::PresenceSnapshot {
                channel: channel(),
                after: after.map(member),
                members: members_of.iter().map(|connection| member(*connection)).collect(),
                ..v1::PresenceSnapshot::default()
            };
            members(part, &from()).is_ok()
        };
        for (after, members, is_good) in [
            (None, &[1, 2, 3][..], true),
            (Some(1), &[2, 3], true),
            (Some(1), &[], true),
            (Some(2), &[2, 3], false),
            (None, &[1, 1], false),
            (None, &[2, 1], false),
        ] {
            assert_eq!(of(after, members), is_good, "{after:?} {members:?}");
        }
    }
}
