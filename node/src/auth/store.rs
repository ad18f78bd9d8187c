//! Store interface of the authenticator.

use std::fmt;
use std::pin::Pin;

use crate::model::{Nonce, Revocation};

/// The operation failed, or its outcome is unknown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenStoreError;

impl fmt::Display for TokenStoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store of nonces and revocations cannot be reached")
    }
}

impl std::error::Error for TokenStoreError {}

/// True: new, and durably stored for `nonce_memory_ms`. False: claimed before.
pub type NonceClaim = Pin<Box<dyn Future<Output = Result<bool, TokenStoreError>> + Send>>;

/// Resolves when the revocation is durable.
pub type RevocationWrite = Pin<Box<dyn Future<Output = Result<(), TokenStoreError>> + Send>>;

pub trait TokenStore: Send + Sync + 'static {
    fn claim_nonce(&self, nonce: Nonce) -> NonceClaim;

    /// Stores a revocation, for `Authenticator::restore_revocations` at the next start.
    fn keep_revocation(&self, revocation: Revocation) -> RevocationWrite;
}
