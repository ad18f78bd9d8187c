//! Names and identifiers, each checked once where it is made.

use std::fmt;
use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::limits::Limits;

/// The account that a credential belongs to: `[a-z0-9-]{1,64}`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AccountId(Arc<str>);

impl AccountId {
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for AccountId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl fmt::Debug for AccountId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The name of an API key (`kid`): `[A-Za-z0-9_-]{1,64}`.
pub type KeyName = Arc<str>;

/// Reason for which a channel name, clientId or event name was refused. The text contains no value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NameError {
    Empty,
    TooLong { bytes_max: usize },
    ControlCharacter,
    Reserved,
}

impl fmt::Display for NameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("must not be empty"),
            Self::TooLong { bytes_max } => write!(f, "is longer than {bytes_max} bytes"),
            Self::ControlCharacter => f.write_str("holds a control character"),
            Self::Reserved => f.write_str("is reserved"),
        }
    }
}

impl std::error::Error for NameError {}

impl NameError {
    pub fn is_too_long(self) -> bool {
        matches!(self, Self::TooLong { .. })
    }
}

/// Refuses a text that is empty, longer than `bytes_max`, or has a C0 control character.
pub(crate) fn check_name(text: &str, bytes_max: usize) -> Result<(), NameError> {
    if text.is_empty() {
        return Err(NameError::Empty);
    }
    if text.len() > bytes_max {
        return Err(NameError::TooLong { bytes_max });
    }
    if text.bytes().any(|b| b < 0x20) {
        return Err(NameError::ControlCharacter);
    }
    Ok(())
}

/// A channel's name within its account: UTF-8, not empty, no C0 control characters, not beginning with `[`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ChannelName(Arc<str>);

impl ChannelName {
    pub fn new(name: &str, limits: &Limits) -> Result<Self, NameError> {
        check_name(name, limits.channel_name_bytes)?;
        if name.starts_with('[') {
            return Err(NameError::Reserved);
        }
        Ok(Self(name.into()))
    }

    /// A name that was checked when it was written: stays valid even if the rules are stricter since.
    pub(crate) fn stored(name: &str) -> Self {
        Self(name.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// The name that a client claims: not empty, no C0 control characters, not `*`.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ClientId(Arc<str>);

impl ClientId {
    pub fn new(id: &str, limits: &Limits) -> Result<Self, NameError> {
        check_name(id, limits.client_id_bytes)?;
        if id == "*" {
            return Err(NameError::Reserved);
        }
        Ok(Self(id.into()))
    }

    /// An id that was checked when it was written: stays valid even if the rules are stricter since.
    pub(crate) fn stored(id: &str) -> Self {
        Self(id.into())
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// A channel with its account: the only name of a channel that a store, the hub or another node sees.
///
/// Made by `auth::Principal::channel` alone, so that no request can name another account's channel.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct ChannelKey {
    account: AccountId,
    channel: ChannelName,
}

impl ChannelKey {
    pub(crate) fn new(account: AccountId, channel: ChannelName) -> Self {
        Self { account, channel }
    }

    pub fn account(&self) -> &AccountId {
        &self.account
    }

    pub fn channel(&self) -> &str {
        self.channel.as_str()
    }

    pub fn name(&self) -> &ChannelName {
        &self.channel
    }
}

/// A connection's public identifier: `c_` and 22 base64url characters (16 random bytes).
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId([u8; 16]);

impl ConnectionId {
    pub fn random() -> Self {
        Self(random_bytes())
    }

    pub const fn from_bytes(bytes: [u8; 16]) -> Self {
        Self(bytes)
    }

    pub fn as_bytes(&self) -> &[u8; 16] {
        &self.0
    }

    /// Parses the text form.
    pub fn parse(text: &str) -> Option<Self> {
        let bytes = URL_SAFE_NO_PAD.decode(text.strip_prefix("c_")?).ok()?;
        bytes.try_into().ok().map(Self)
    }
}

impl fmt::Display for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // One buffer, so that `to_string` allocates once.
        let mut text = *b"c_0000000000000000000000";
        URL_SAFE_NO_PAD.encode_slice(self.0, &mut text[2..]).map_err(|_| fmt::Error)?;
        f.write_str(std::str::from_utf8(&text).map_err(|_| fmt::Error)?)
    }
}

impl fmt::Debug for ConnectionId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// Random bytes from the operating system.
pub(crate) fn random_bytes<const N: usize>() -> [u8; N] {
    let mut bytes = [0; N];
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    bytes
}

#[cfg(test)]
impl ChannelName {
    pub(crate) fn of(name: &str) -> Self {
        Self::new(name, &Limits::default()).expect("a name within the defaults")
    }
}

#[cfg(test)]
impl ClientId {
    pub(crate) fn of(id: &str) -> Self {
        Self::new(id, &Limits::default()).expect("a clientId within the defaults")
    }
}
