//! What is needed of a store.

use std::fmt;
use std::pin::Pin;

use crate::model::{Nonce, Revocation};

/// It was not done, or nobody knows whether it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenStoreError;

impl fmt::Display for TokenStoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store of nonces and revocations cannot be reached")
    }
}

impl std::error::Error for TokenStoreError {}

/// True: new, and durably remembered for `nonce_memory_ms`. False: claimed before.
pub type Claim = Pin<Box<dyn Future<Output = Result<bool, TokenStoreError>> + Send>>;

/// Resolves when the revocation is durable.
pub type Kept = Pin<Box<dyn Future<Output = Result<(), TokenStoreError>> + Send>>;

pub trait TokenStore: Send + Sync + 'static {
    fn claim_nonce(&self, nonce: Nonce) -> Claim;

    /// To be given to `Authenticator::restore_revocations` at the next start.
    fn keep_revocation(&self, revocation: Revocation) -> Kept;
}
