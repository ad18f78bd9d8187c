//! The origin's store as the authenticator's memory of nonces and revocations.

use std::sync::Arc;
use std::time::Duration;

use crate::auth::{Claim, Kept, TokenStore, TokenStoreError};
use crate::model::{Nonce, Revocation};
use crate::origin::history::{BoxFuture, HistoryStore, StoreError};

pub(super) struct StoredTokens {
    pub(super) store: Arc<dyn HistoryStore>,
    /// Of any answer.
    pub(super) wait: Duration,
}

impl TokenStore for StoredTokens {
    fn claim_nonce(&self, nonce: Nonce) -> Claim {
        Box::pin(in_time("claim of a nonce", self.wait, self.store.claim_nonce(nonce)))
    }

    fn keep_revocation(&self, revocation: Revocation) -> Kept {
        Box::pin(in_time("revocation", self.wait, self.store.revoke_tokens(revocation)))
    }
}

async fn in_time<T>(
    what: &'static str,
    wait: Duration,
    answer: BoxFuture<'static, Result<T, StoreError>>,
) -> Result<T, TokenStoreError> {
    match tokio::time::timeout(wait, answer).await {
        Ok(Ok(answer)) => Ok(answer),
        Ok(Err(error)) => {
            tracing::warn!(what, %error, "not stored");
            Err(TokenStoreError)
        }
        Err(_) => {
            tracing::warn!(what, "not stored in time");
            Err(TokenStoreError)
        }
    }
}
