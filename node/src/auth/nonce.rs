//! What the exchange needs of a store.

use std::fmt;
use std::pin::Pin;

use crate::model::KeyName;

/// What makes a token request usable once.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Nonce {
    pub key_name: KeyName,
    /// Epoch milliseconds, as the request says.
    pub timestamp_ms: u64,
    pub nonce: Box<str>,
}

/// The claim was not made, or nobody knows whether it was.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NonceStoreError;

impl fmt::Display for NonceStoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the store of nonces cannot be reached")
    }
}

impl std::error::Error for NonceStoreError {}

/// True: new, and durably remembered for at least ten minutes. False: claimed before.
pub type Claim = Pin<Box<dyn Future<Output = Result<bool, NonceStoreError>> + Send>>;

pub trait NonceStore: Send + Sync + 'static {
    fn claim_nonce(&self, nonce: Nonce) -> Claim;
}
