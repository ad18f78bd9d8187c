//! Wire form of nonces, of message ids given by clients, and of revocations.

use std::num::NonZeroU64;

use bytes::Bytes;
use fanfare_proto::peer::v1;

use super::{MalformedItem, NAME_BYTES_MAX, channel_key, client_id};
use crate::model::{
    ChannelKey, ClaimedNonce, ClientId, ClientMessageIds, IdScope, Nonce, Revocation, Stamp, StampedIds,
    check_name,
};

/// Most seen nodes that are taken from one answer, far more than a cluster has.
const NODES_MAX: usize = 4_096;

/// Answer of a node to a nonce claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NonceClaimAnswer {
    /// True if the node knows no other claim of the nonce.
    pub first: bool,
    /// True if the node counts for the quorum: it has learned the nonces of the others.
    pub counts: bool,
    /// Time by the node's clock, in milliseconds since the Unix epoch.
    pub now_ms: u64,
}

/// Identifies one claim among all claims of the same nonce.
pub type ClaimId = NonZeroU64;

/// A remembered nonce, as nodes send it to each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerNonce {
    pub kept: ClaimedNonce,
    /// The claim that used the nonce; None if it is unknown or over.
    pub claim: Option<ClaimId>,
}

/// One page of the nonces that a node remembers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerNoncePage {
    pub nonces: Vec<PeerNonce>,
    /// Cursor of the next page; None on the last page.
    pub next: Option<Box<[u8]>>,
    pub counts: bool,
    pub now_ms: u64,
    /// Nodes that the answering node has seen, and how many milliseconds ago.
    pub seen: Vec<(Box<str>, u64)>,
}

/// Reason why an id is not free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdConflict {
    /// A message was published under the id.
    Known(Stamp),
    /// A publish under the id is in progress.
    UnderWay,
}

/// Ids of a request that are not free, by their index in the request.
pub type IdConflicts = Vec<(u32, IdConflict)>;

pub(in crate::cluster) fn write_ids<'a>(
    (key, key_name, client_id): (&ChannelKey, &str, Option<&ClientId>),
    ids: impl Iterator<Item = &'a str>,
) -> v1::GivenIds {
    v1::GivenIds {
        channel: Some(v1::Channel { account: key.account().as_str().into(), name: key.channel().into() }),
        key_name: key_name.to_owned(),
        client_id: client_id.map(|id| id.as_str().to_owned()),
        ids: ids.map(str::to_owned).collect(),
    }
}

pub(in crate::cluster) fn write_claim_ids(ids: &[ClientMessageIds]) -> v1::request::Kind {
    let written = ids.iter().map(|ClientMessageIds { scope: IdScope { key, key_name, client_id }, ids }| {
        write_ids((key, key_name, client_id.as_ref()), ids.iter().map(|id| &**id))
    });
    v1::request::Kind::ClaimIds(v1::ClaimIds { ids: written.collect() })
}

pub(in crate::cluster) fn write_taken(taken: &IdConflicts) -> v1::ClaimedIds {
    let mut claimed = v1::ClaimedIds::default();
    for &(index, taken) in taken {
        match taken {
            IdConflict::Known(Stamp { incarnation, sequence }) => {
                let stamp = Some(v1::Stamp { incarnation, sequence });
                claimed.known.push(v1::claimed_ids::Known { place: index, stamp });
            }
            IdConflict::UnderWay => claimed.under_way.push(index),
        }
    }
    claimed
}

pub(super) fn taken(claimed: v1::ClaimedIds) -> Result<IdConflicts, MalformedItem> {
    let known = claimed.known.into_iter().map(|v1::claimed_ids::Known { place: index, stamp }| {
        Ok((index, IdConflict::Known(super::stamp(stamp.ok_or(MalformedItem("no stamp"))?))))
    });
    let under_way = claimed.under_way.into_iter().map(|index| Ok((index, IdConflict::UnderWay)));
    known.chain(under_way).collect()
}

pub(super) fn ids(ids: v1::GivenIds) -> Result<ClientMessageIds, MalformedItem> {
    let v1::GivenIds { channel, key_name, client_id: client, ids } = ids;
    let key = channel_key(channel.ok_or(MalformedItem("no channel"))?)?;
    let is_plain = |text: &String| check_name(text, NAME_BYTES_MAX).is_ok();
    if !is_plain(&key_name) || !ids.iter().all(is_plain) {
        return Err(MalformedItem("a bad message id"));
    }
    let client_id = client.as_deref().map(client_id).transpose()?;
    let scope = IdScope { key, key_name: key_name.into(), client_id };
    Ok(ClientMessageIds { scope, ids: ids.into_iter().map(String::into_boxed_str).collect() })
}

/// Reads published ids, each with the stamp of its message at the peer of this incarnation.
pub(super) fn settled(
    settled: v1::IdsSettled,
    incarnation: u64,
) -> Result<(IdScope, StampedIds), MalformedItem> {
    let ClientMessageIds { scope, ids } = self::ids(settled.ids.ok_or(MalformedItem("no ids"))?)?;
    if ids.len() != settled.sequences.len() {
        return Err(MalformedItem("not a sequence for each id"));
    }
    let stamps = settled.sequences.into_iter().map(|sequence| Stamp { incarnation, sequence });
    Ok((scope, ids.into_iter().zip(stamps).collect()))
}

pub(in crate::cluster) fn write_deliver(
    channel: v1::Channel,
    Stamp { incarnation, sequence }: Stamp,
) -> v1::request::Kind {
    let stamp = Some(v1::Stamp { incarnation, sequence });
    v1::request::Kind::Deliver(v1::Deliver { channel: Some(channel), stamp })
}

pub(in crate::cluster) fn write_claim(nonce: &PeerNonce) -> v1::request::Kind {
    v1::request::Kind::Claim(v1::Claim { nonce: Some(write_nonce(nonce)) })
}

fn write_nonce(peer_nonce: &PeerNonce) -> v1::Nonce {
    let PeerNonce { kept: ClaimedNonce { nonce, age_ms }, claim } = peer_nonce;
    let Nonce { key_name, timestamp_ms, nonce } = nonce;
    v1::Nonce {
        key_name: key_name.to_string(),
        timestamp_ms: *timestamp_ms,
        nonce: nonce.to_string(),
        age_ms: *age_ms,
        claim: claim.map_or(0, ClaimId::get),
    }
}

pub(in crate::cluster) fn write_nonces(peer_nonces: &[PeerNonce]) -> Vec<v1::Nonce> {
    peer_nonces.iter().map(write_nonce).collect()
}

pub(in crate::cluster) fn write_known(known: &PeerNoncePage) -> v1::Nonces {
    let seen =
        |(node_id, age_ms): &(Box<str>, u64)| v1::SeenNode { node_id: node_id.to_string(), age_ms: *age_ms };
    v1::Nonces {
        nonces: write_nonces(&known.nonces),
        next: known.next.as_deref().map(Bytes::copy_from_slice).unwrap_or_default(),
        counts: known.counts,
        now_ms: known.now_ms,
        seen: known.seen.iter().map(seen).collect(),
    }
}

pub(in crate::cluster) fn write_revocations(revocations: &[Revocation]) -> Vec<v1::Revocation> {
    let written = revocations.iter().map(|revocation| v1::Revocation {
        key_name: revocation.key_name.to_string(),
        client_id: revocation.client_id.as_ref().map(ClientId::as_str).map(str::to_owned),
        issued_before_ms: revocation.issued_before_ms,
    });
    written.collect()
}

pub(super) fn revocations(revocations: Vec<v1::Revocation>) -> Result<Vec<Revocation>, MalformedItem> {
    let read = revocations.into_iter().map(|revocation| {
        let v1::Revocation { key_name, client_id: id, issued_before_ms } = revocation;
        check_name(&key_name, NAME_BYTES_MAX).map_err(|_| MalformedItem("a bad name of a key"))?;
        let client_id = id.as_deref().map(client_id).transpose()?;
        Ok(Revocation { key_name: key_name.into(), client_id, issued_before_ms })
    });
    read.collect()
}

pub(super) fn nonce(nonce: v1::Nonce) -> Result<PeerNonce, MalformedItem> {
    let v1::Nonce { key_name, timestamp_ms, nonce, age_ms, claim } = nonce;
    if [&key_name, &nonce].into_iter().any(|text| check_name(text, NAME_BYTES_MAX).is_err()) {
        return Err(MalformedItem("a bad nonce"));
    }
    let nonce = Nonce { key_name: key_name.into(), timestamp_ms, nonce: nonce.into() };
    Ok(PeerNonce { kept: ClaimedNonce { nonce, age_ms }, claim: ClaimId::new(claim) })
}

pub(super) fn nonces(nonces: Vec<v1::Nonce>) -> Result<Vec<PeerNonce>, MalformedItem> {
    nonces.into_iter().map(nonce).collect()
}

pub(super) fn known(known: v1::Nonces) -> Result<PeerNoncePage, MalformedItem> {
    let v1::Nonces { nonces, next, counts, now_ms, seen } = known;
    let is_plain = |node: &v1::SeenNode| check_name(&node.node_id, NAME_BYTES_MAX).is_ok();
    if seen.len() > NODES_MAX || !seen.iter().all(is_plain) {
        return Err(MalformedItem("nodes that none can be"));
    }
    let (nonces, next) = (self::nonces(nonces)?, (!next.is_empty()).then(|| next.as_ref().into()));
    let seen = seen.into_iter().map(|node| (node.node_id.into(), node.age_ms)).collect();
    Ok(PeerNoncePage { nonces, next, counts, now_ms, seen })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn written() -> v1::GivenIds {
        let scope = scope();
        write_ids((&scope.key, &scope.key_name, scope.client_id.as_ref()), ["a", "b"].into_iter())
    }

    fn scope() -> IdScope {
        let channel = v1::Channel { account: "acme".to_owned(), name: "room".to_owned() };
        let client_id = Some(ClientId::of("ana"));
        IdScope { key: channel_key(channel).expect("a channel"), key_name: "k1".into(), client_id }
    }

    #[test]
    fn nonces_are_read_as_they_are_written() {
        let kept = || {
            let nonce = Nonce { key_name: "k1".into(), timestamp_ms: 5, nonce: "n".into() };
            ClaimedNonce { nonce, age_ms: 3 }
        };
        for claim in [None, ClaimId::new(7), Some(ClaimId::MAX)] {
            let peer_nonce = PeerNonce { kept: kept(), claim };
            assert_eq!(nonce(write_nonce(&peer_nonce)), Ok(peer_nonce));
        }
    }

    #[test]
    fn ids_are_read_as_they_are_written() {
        let read = ids(written());
        assert_eq!(read, Ok(ClientMessageIds { scope: scope(), ids: vec!["a".into(), "b".into()] }));
        let without = ids(v1::GivenIds { client_id: None, ..written() }).expect("ids");
        assert_eq!(without.scope, IdScope { client_id: None, ..scope() });
        let stamp = |sequence| Stamp { incarnation: 7, sequence };
        let settled = settled(v1::IdsSettled { ids: Some(written()), sequences: vec![3, 5] }, 7);
        assert_eq!(settled, Ok((scope(), vec![("a".into(), stamp(3)), ("b".into(), stamp(5))])));
        let conflicts = vec![(4, IdConflict::Known(stamp(9))), (0, IdConflict::UnderWay)];
        assert_eq!(taken(write_taken(&conflicts)), Ok(conflicts));
    }

    #[test]
    fn malformed_ids_of_a_peer_are_named() {
        for (given, fault) in [
            (v1::GivenIds { channel: None, ..written() }, "no channel"),
            (v1::GivenIds { key_name: String::new(), ..written() }, "a bad message id"),
            (v1::GivenIds { ids: vec!["\n".to_owned()], ..written() }, "a bad message id"),
            (v1::GivenIds { client_id: Some(String::new()), ..written() }, "a bad clientId"),
        ] {
            assert_eq!(ids(given), Err(MalformedItem(fault)));
        }
        let settled = |ids, sequences| settled(v1::IdsSettled { ids, sequences }, 7);
        assert_eq!(settled(None, vec![]), Err(MalformedItem("no ids")));
        assert_eq!(settled(Some(written()), vec![1]), Err(MalformedItem("not a sequence for each id")));
        let known = vec![v1::claimed_ids::Known { place: 0, stamp: None }];
        assert_eq!(taken(v1::ClaimedIds { known, ..Default::default() }), Err(MalformedItem("no stamp")));
    }
}
