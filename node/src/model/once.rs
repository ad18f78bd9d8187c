//! What counts once: the nonce of a token request, and a message id that a client gave.

use super::ids::{ChannelKey, ClientId, KeyName};
use super::message::Stamp;

/// What makes a token request usable once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Nonce {
    pub key_name: KeyName,
    /// Epoch milliseconds, as the request says.
    pub timestamp_ms: u64,
    pub nonce: Box<str>,
}

/// A nonce that was claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KeptNonce {
    pub nonce: Nonce,
    /// How long ago.
    pub age_ms: u64,
}

/// Some of the nonces that are remembered.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NoncePage {
    pub nonces: Vec<KeptNonce>,
    /// Where the next page begins; none: these are the last.
    pub next: Option<Box<[u8]>>,
}

/// Within which a client-given message id is unique.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdScope {
    pub key: ChannelKey,
    pub key_name: KeyName,
    pub client_id: Option<ClientId>,
}

/// Ids of one scope, each with what it was published as.
pub type StampedIds = Vec<(Box<str>, Stamp)>;

/// Ids of one scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GivenIds {
    pub scope: IdScope,
    pub ids: Vec<Box<str>>,
}
