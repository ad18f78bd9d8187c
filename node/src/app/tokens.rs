//! The origin's store as the authenticator's memory of nonces and revocations.

use std::sync::Arc;
use std::time::Duration;

use crate::auth::{Claim, Kept, Nonce, TokenStore, TokenStoreError};
use crate::model::Revocation;
use crate::origin::history::{self, BoxFuture, HistoryStore, StoreError};

pub(super) struct StoredTokens {
    pub(super) store: Arc<dyn HistoryStore>,
    /// Of any answer.
    pub(super) wait: Duration,
}

impl TokenStore for StoredTokens {
    fn claim_nonce(&self, nonce: Nonce) -> Claim {
        let Nonce { key_name, timestamp_ms, nonce } = nonce;
        let claim = self.store.claim_nonce(history::Nonce { key_name, timestamp_ms, nonce });
        Box::pin(in_time("claim of a nonce", self.wait, claim))
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
