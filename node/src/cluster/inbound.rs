//! What comes from other nodes: read, checked, and handed on. The only maker of `Forwarded`.

use std::fmt;
use std::sync::Arc;

use fanfare_proto::peer::v1;

use crate::model::{
    AccountId, ChannelKey, ChannelName, ClientId, ConnectionId, Forwarded, ForwardedParts, check_name,
};

/// Far above what any node may allow its clients.
const NAME_BYTES_MAX: usize = 64 * 1024;

/// A run of a node.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Peer {
    pub node_id: Arc<str>,
    pub incarnation: u64,
}

/// Who takes what other nodes send. No call may block: it holds up its lane.
///
/// What concerns one channel comes in the order in which the peer sent it, each item once.
pub trait Inbound: Send + Sync + 'static {
    fn forwarded(&self, from: &Peer, forwarded: Forwarded);

    /// Items that the peer had for this node are lost: its channels are to be refilled.
    fn continuity_lost(&self, from: &Peer);

    /// All lanes to the peer are open, or not any more. What was reported last is the state.
    fn link(&self, to: &Peer, up: bool);
}

/// The item holds what no node sends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Malformed(&'static str);

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "a peer's item has {}", self.0)
    }
}

impl std::error::Error for Malformed {}

/// Hands one item on. A kind that came with a later minor is passed over.
///
/// # Errors
/// Nothing was handed on.
pub(super) fn take(item: v1::Item, from: &Peer, inbound: &dyn Inbound) -> Result<(), Malformed> {
    match item.kind {
        Some(v1::item::Kind::Forward(forward)) => inbound.forwarded(from, forwarded(forward)?),
        _ => tracing::debug!(peer = &*from.node_id, "item of an unknown kind passed over"),
    }
    Ok(())
}

fn forwarded(forward: v1::Forward) -> Result<Forwarded, Malformed> {
    let key = channel_key(forward.channel.ok_or(Malformed("no channel"))?)?;
    let connection_id = <[u8; 16]>::try_from(&forward.connection_id[..])
        .map_err(|_| Malformed("a connection id of another length"))?;
    let client_id = forward.client_id.as_deref();
    if client_id.is_some_and(|id| check_name(id, NAME_BYTES_MAX).is_err()) {
        return Err(Malformed("a bad clientId"));
    }
    if forward.first == 0 || forward.last < forward.first {
        return Err(Malformed("no sequences"));
    }
    let parts = ForwardedParts {
        incarnation: forward.incarnation,
        first: forward.first,
        last: forward.last,
        timestamp_ms: forward.timestamp_ms,
        connection_id: ConnectionId::from_bytes(connection_id),
        client_id: client_id.map(ClientId::stored),
        frame: forward.frame,
        bytes: forward.bytes,
    };
    Ok(Forwarded::new(key, parts))
}

/// What a peer allows its clients holds here too, so only the form is checked.
fn channel_key(channel: v1::Channel) -> Result<ChannelKey, Malformed> {
    let v1::Channel { account, name } = channel;
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if account.is_empty() || account.len() > 64 || !account.bytes().all(plain) {
        return Err(Malformed("a bad account"));
    }
    if check_name(&name, NAME_BYTES_MAX).is_err() || name.starts_with('[') {
        return Err(Malformed("a bad channel"));
    }
    Ok(ChannelKey::new(AccountId::new(&account), ChannelName::stored(&name)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each fault alone, in what is taken without it.
    #[test]
    fn what_no_node_sends_is_named() {
        let good = || v1::Forward {
            channel: Some(v1::Channel { account: "acme".to_owned(), name: "room".to_owned() }),
            first: 1,
            last: 2,
            connection_id: vec![3; 16].into(),
            client_id: Some("ada".to_owned()),
            ..v1::Forward::default()
        };
        assert!(forwarded(good()).is_ok());
        let channel = |account: &str, name: &str| {
            Some(v1::Channel { account: account.to_owned(), name: name.to_owned() })
        };
        for (forward, fault) in [
            (v1::Forward { channel: None, ..good() }, "no channel"),
            (v1::Forward { channel: channel("", "room"), ..good() }, "a bad account"),
            (v1::Forward { channel: channel("Acme", "room"), ..good() }, "a bad account"),
            (v1::Forward { channel: channel(&"a".repeat(65), "room"), ..good() }, "a bad account"),
            (v1::Forward { channel: channel("acme", ""), ..good() }, "a bad channel"),
            (v1::Forward { channel: channel("acme", "[room"), ..good() }, "a bad channel"),
            (
                v1::Forward { connection_id: vec![3; 15].into(), ..good() },
                "a connection id of another length",
            ),
            (v1::Forward { client_id: Some("\n".to_owned()), ..good() }, "a bad clientId"),
            (v1::Forward { first: 0, ..good() }, "no sequences"),
            (v1::Forward { first: 3, ..good() }, "no sequences"),
        ] {
            assert_eq!(forwarded(forward.clone()), Err(Malformed(fault)), "{forward:?}");
        }
    }
}
