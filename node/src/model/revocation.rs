//! Revocations: tokens that are refused though they have not expired.

use super::ids::{ClientId, KeyName};

/// Revokes the tokens of a key that were issued before a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    pub key_name: KeyName,
    /// The revoked clientId; `None` for every token, with or without a clientId.
    pub client_id: Option<ClientId>,
    /// Epoch milliseconds, exclusive.
    pub issued_before_ms: u64,
}

impl Revocation {
    /// Whether no token is left that the revocation could refuse. `kept_ms` is
    /// [`Limits::revocation_kept_ms`](super::Limits::revocation_kept_ms).
    pub fn has_ended(&self, now_ms: u64, kept_ms: u64) -> bool {
        self.issued_before_ms.saturating_add(kept_ms) <= now_ms
    }
}
