//! Tokens that are no longer taken, though they have not expired.

use super::ids::{ClientId, KeyName};

/// Takes back the tokens of a key that were issued before a moment.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Revocation {
    pub key_name: KeyName,
    /// `None`: of whatever clientId, also of none.
    pub client_id: Option<ClientId>,
    /// Epoch milliseconds, exclusive.
    pub issued_before_ms: u64,
}

impl Revocation {
    /// The longest life of a token, and what a signer's clock may be ahead: afterwards none is left to refuse.
    pub const KEPT_MS: u64 = 48 * 3_600_000 + 120_000;

    pub fn has_ended(&self, now_ms: u64) -> bool {
        self.issued_before_ms.saturating_add(Self::KEPT_MS) <= now_ms
    }
}
