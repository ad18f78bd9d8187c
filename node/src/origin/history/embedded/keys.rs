//! Keys of rows. Every variable part is preceded by its length, so that no two scopes share a prefix.

use crate::model::Nonce;
use crate::model::{AccountId, ChannelKey, ClientId, MemberId};
use crate::origin::history::{HistoryPosition, IdScope};
use crate::origin::metering::MetricRow;

/// The first bytes of all rows of a channel.
pub(super) fn channel_prefix(key: &ChannelKey, out: &mut Vec<u8>) {
    out.clear();
    push_part(out, key.account().as_str());
    push_part(out, key.channel());
}

/// Builds the key of a member's row; the clientId follows without a length.
pub(super) fn member_key(key: &ChannelKey, member: &MemberId, out: &mut Vec<u8>) {
    channel_prefix(key, out);
    out.extend_from_slice(member.connection_id.as_bytes());
    out.extend_from_slice(member.client_id.as_str().as_bytes());
}

/// Builds the end of a message's key: the position inverted, so that keys ascend from the newest to the oldest.
pub(super) fn position_suffix(position: HistoryPosition) -> [u8; HistoryPosition::BYTES] {
    position.to_bytes().map(|byte| !byte)
}

pub(super) fn position_of(message_key: &[u8]) -> Option<HistoryPosition> {
    let suffix: [u8; HistoryPosition::BYTES] = *message_key.last_chunk()?;
    Some(HistoryPosition::from_bytes(suffix.map(|byte| !byte)))
}

/// Builds the first bytes of all client-given ids of a scope; the id follows without a length.
pub(super) fn id_prefix(scope: &IdScope, out: &mut Vec<u8>) {
    channel_prefix(&scope.key, out);
    push_part(out, &scope.key_name);
    // A clientId is never empty, so an empty part says that there is none.
    push_part(out, scope.client_id.as_ref().map_or("", |id| id.as_str()));
}

/// Parses the key of an id: account, channel, key name, clientId (empty for none), and the id.
pub(super) fn read_id_key(key: &[u8]) -> Option<[&str; 5]> {
    let (account, rest) = take_part(key)?;
    let (channel, rest) = take_part(rest)?;
    let (key_name, rest) = take_part(rest)?;
    let (client_id, id) = take_part(rest)?;
    Some([account, channel, key_name, client_id, std::str::from_utf8(id).ok()?])
}

pub(super) fn nonce_key(nonce: &Nonce) -> Vec<u8> {
    let mut key = Vec::with_capacity(nonce.key_name.len() + nonce.nonce.len() + 10);
    push_part(&mut key, &nonce.key_name);
    key.extend_from_slice(&nonce.timestamp_ms.to_be_bytes());
    key.extend_from_slice(nonce.nonce.as_bytes());
    key
}

pub(super) fn read_nonce_key(key: &[u8]) -> Option<Nonce> {
    let (key_name, rest) = take_part(key)?;
    let (timestamp_ms, nonce) = rest.split_first_chunk()?;
    let timestamp_ms = u64::from_be_bytes(*timestamp_ms);
    Some(Nonce { key_name: key_name.into(), timestamp_ms, nonce: std::str::from_utf8(nonce).ok()?.into() })
}

/// Builds the key of a revocation; the clientId follows without a length. Without a clientId nothing follows, so the row of a whole key is
/// the prefix of the rows of its clientIds.
pub(super) fn revocation_key(key_name: &str, client_id: Option<&ClientId>) -> Vec<u8> {
    let mut key = Vec::with_capacity(key_name.len() + client_id.map_or(0, |id| id.as_str().len()) + 1);
    push_part(&mut key, key_name);
    key.extend_from_slice(client_id.map_or("", ClientId::as_str).as_bytes());
    key
}

/// Parses the key of a revocation: key name, and clientId (empty for none).
pub(super) fn read_revocation_key(key: &[u8]) -> Option<(&str, &str)> {
    // Key names are always short enough for a length of one byte.
    let (length, rest) = key.split_first().filter(|(length, _)| **length < u8::MAX)?;
    let (key_name, client_id) = rest.split_at_checked(usize::from(*length))?;
    Some((std::str::from_utf8(key_name).ok()?, std::str::from_utf8(client_id).ok()?))
}

pub(super) fn metric_key(row: &MetricRow, out: &mut Vec<u8>) {
    out.clear();
    push_part(out, row.account.as_str());
    out.extend_from_slice(&row.minute_ms.to_be_bytes());
    push_part(out, &row.node_id);
    out.extend_from_slice(&row.incarnation.to_be_bytes());
    out.extend_from_slice(row.kind.as_str().as_bytes());
}

/// Range of keys from the first possible row of the minute to the end of the account, which is no row's key.
pub(super) fn metric_range(account: &AccountId, from_ms: u64) -> (Vec<u8>, Vec<u8>) {
    let mut first = Vec::new();
    push_part(&mut first, account.as_str());
    let end = [first.as_slice(), &u64::MAX.to_be_bytes()].concat();
    first.extend_from_slice(&from_ms.to_be_bytes());
    (first, end)
}

/// Parses the key of a metric row: minute, node, incarnation and kind.
pub(super) fn metric_parts<'a>(account: &AccountId, key: &'a [u8]) -> Option<(u64, &'a str, u64, &'a str)> {
    let (own, rest) = take_part(key)?;
    let (minute, rest) = rest.split_first_chunk()?;
    let (node_id, rest) = take_part(rest)?;
    let (incarnation, kind) = rest.split_first_chunk()?;
    let kind = std::str::from_utf8(kind).ok()?;
    let (minute, incarnation) = (u64::from_be_bytes(*minute), u64::from_be_bytes(*incarnation));
    (own == account.as_str()).then_some((minute, node_id, incarnation, kind))
}

/// Splits off the first part that `push_part` wrote; returns it and the rest.
pub(super) fn take_part(key: &[u8]) -> Option<(&str, &[u8])> {
    let (length, rest) = match key.split_first()? {
        (&u8::MAX, rest) => {
            let (length, rest) = rest.split_first_chunk()?;
            (u32::from_be_bytes(*length) as usize, rest)
        }
        (&length, rest) => (usize::from(length), rest),
    };
    let (part, rest) = rest.split_at_checked(length)?;
    Some((std::str::from_utf8(part).ok()?, rest))
}

pub(super) fn push_part(out: &mut Vec<u8>, part: &str) {
    // Names are far below this; a longer one must not share the prefix of a shorter one.
    let length = u32::try_from(part.len()).unwrap_or(u32::MAX);
    match u8::try_from(length) {
        Ok(short) if short < u8::MAX => out.push(short),
        _ => {
            out.push(u8::MAX);
            out.extend_from_slice(&length.to_be_bytes());
        }
    }
    out.extend_from_slice(part.as_bytes());
}
