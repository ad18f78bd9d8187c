//! What nodes tell each other of nonces and revocations, as it stands on the wire and as it is read.

use bytes::Bytes;
use fanfare_proto::peer::v1;

use super::{Malformed, NAME_BYTES_MAX, client_id};
use crate::model::{ClientId, KeptNonce, Nonce, NoncePage, Revocation, check_name};

/// Nodes that are taken from one answer, far more than there are.
const NODES_MAX: usize = 4_096;

/// What a node says of a claim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claimed {
    /// Nobody claimed it there before.
    pub first: bool,
    /// It knows what others remember.
    pub counts: bool,
    /// By its clock.
    pub now_ms: u64,
}

/// Some of what a node remembers of nonces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NoncesKnown {
    pub page: NoncePage,
    pub counts: bool,
    pub now_ms: u64,
    /// The nodes that it has seen, and how long ago.
    pub seen: Vec<(Box<str>, u64)>,
}

pub(in crate::cluster) fn write_nonce(nonce: &Nonce, age_ms: u64) -> v1::Nonce {
    let Nonce { key_name, timestamp_ms, nonce } = nonce;
    v1::Nonce {
        key_name: key_name.to_string(),
        timestamp_ms: *timestamp_ms,
        nonce: nonce.to_string(),
        age_ms,
    }
}

pub(in crate::cluster) fn write_nonces(kept: &[KeptNonce]) -> Vec<v1::Nonce> {
    kept.iter().map(|kept| write_nonce(&kept.nonce, kept.age_ms)).collect()
}

pub(in crate::cluster) fn write_known(known: &NoncesKnown) -> v1::Nonces {
    let seen =
        |(node_id, age_ms): &(Box<str>, u64)| v1::SeenNode { node_id: node_id.to_string(), age_ms: *age_ms };
    v1::Nonces {
        nonces: write_nonces(&known.page.nonces),
        next: known.page.next.as_deref().map(Bytes::copy_from_slice).unwrap_or_default(),
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

pub(super) fn revocations(revocations: Vec<v1::Revocation>) -> Result<Vec<Revocation>, Malformed> {
    let read = revocations.into_iter().map(|revocation| {
        let v1::Revocation { key_name, client_id: id, issued_before_ms } = revocation;
        check_name(&key_name, NAME_BYTES_MAX).map_err(|_| Malformed("a bad name of a key"))?;
        let client_id = id.as_deref().map(client_id).transpose()?;
        Ok(Revocation { key_name: key_name.into(), client_id, issued_before_ms })
    });
    read.collect()
}

pub(super) fn nonce(nonce: v1::Nonce) -> Result<KeptNonce, Malformed> {
    let v1::Nonce { key_name, timestamp_ms, nonce, age_ms } = nonce;
    if [&key_name, &nonce].into_iter().any(|text| check_name(text, NAME_BYTES_MAX).is_err()) {
        return Err(Malformed("a bad nonce"));
    }
    let nonce = Nonce { key_name: key_name.into(), timestamp_ms, nonce: nonce.into() };
    Ok(KeptNonce { nonce, age_ms })
}

pub(super) fn nonces(nonces: Vec<v1::Nonce>) -> Result<Vec<KeptNonce>, Malformed> {
    nonces.into_iter().map(nonce).collect()
}

pub(super) fn known(known: v1::Nonces) -> Result<NoncesKnown, Malformed> {
    let v1::Nonces { nonces, next, counts, now_ms, seen } = known;
    let is_plain = |node: &v1::SeenNode| check_name(&node.node_id, NAME_BYTES_MAX).is_ok();
    if seen.len() > NODES_MAX || !seen.iter().all(is_plain) {
        return Err(Malformed("nodes that none can be"));
    }
    let page =
        NoncePage { nonces: self::nonces(nonces)?, next: (!next.is_empty()).then(|| next.as_ref().into()) };
    let seen = seen.into_iter().map(|node| (node.node_id.into(), node.age_ms)).collect();
    Ok(NoncesKnown { page, counts, now_ms, seen })
}
