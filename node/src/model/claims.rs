//! Values that are used once: the nonce of a token request, and a message id that a client gave.

use super::ids::{ChannelKey, ClientId, KeyName};
use super::message::Stamp;

/// The identity of a token request, which makes it usable only once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Nonce {
    pub key_name: KeyName,
    /// Timestamp of the request, epoch milliseconds.
    pub timestamp_ms: u64,
    pub nonce: Box<str>,
}

/// A nonce that was claimed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClaimedNonce {
    pub nonce: Nonce,
    /// Time since the claim, in milliseconds.
    pub age_ms: u64,
}

/// A page of the remembered nonces.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct NoncePage {
    pub nonces: Vec<ClaimedNonce>,
    /// Start of the next page; none on the last page.
    pub next: Option<Box<[u8]>>,
}

/// The scope within which a client-given message id is unique.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct IdScope {
    pub key: ChannelKey,
    pub key_name: KeyName,
    pub client_id: Option<ClientId>,
}

/// Ids of one scope with the stamps of their messages.
pub type StampedIds = Vec<(Box<str>, Stamp)>;

/// Ids of one scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ClientMessageIds {
    pub scope: IdScope,
    pub ids: Vec<Box<str>>,
}
