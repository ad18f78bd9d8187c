//! Names and ids from peers, checked.

use fanfare_proto::peer::v1;

use super::{MalformedItem, NAME_BYTES_MAX};
use crate::model::{AccountId, ChannelKey, ChannelName, ClientId, check_name};

/// Reads a channel key. Only its form is checked: the peer has applied the limits of its clients.
pub(super) fn channel_key(channel: v1::Channel) -> Result<ChannelKey, MalformedItem> {
    let v1::Channel { account, name } = channel;
    let account = account_id(&account)?;
    if check_name(&name, NAME_BYTES_MAX).is_err() || name.starts_with('[') {
        return Err(MalformedItem("a bad channel"));
    }
    Ok(ChannelKey::new(account, ChannelName::stored(&name)))
}

pub(super) fn account_id(account: &str) -> Result<AccountId, MalformedItem> {
    if !is_id(account) {
        return Err(MalformedItem("a bad account"));
    }
    Ok(AccountId::new(account))
}

/// True for a well-formed id of an account or a tenant.
pub(super) fn is_id(id: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    !id.is_empty() && id.len() <= 64 && id.bytes().all(plain)
}

pub(super) fn client_id(id: &str) -> Result<ClientId, MalformedItem> {
    check_name(id, NAME_BYTES_MAX).map_err(|_| MalformedItem("a bad clientId"))?;
    Ok(ClientId::stored(id))
}
