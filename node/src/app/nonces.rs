//! The origin's store as the authenticator's memory of nonces.

use std::sync::Arc;

use crate::auth::{Claim, Nonce, NonceStore, NonceStoreError};
use crate::origin::history::{self, HistoryStore};
use crate::publish::ANSWER_WAIT;

pub(super) struct StoredNonces(pub(super) Arc<dyn HistoryStore>);

impl NonceStore for StoredNonces {
    fn claim_nonce(&self, nonce: Nonce) -> Claim {
        let Nonce { key_name, timestamp_ms, nonce } = nonce;
        let claim = self.0.claim_nonce(history::Nonce { key_name, timestamp_ms, nonce });
        Box::pin(async move {
            match tokio::time::timeout(ANSWER_WAIT, claim).await {
                Ok(Ok(new)) => Ok(new),
                Ok(Err(error)) => {
                    tracing::warn!(%error, "a nonce was not claimed");
                    Err(NonceStoreError)
                }
                Err(_) => {
                    tracing::warn!("a nonce was not claimed in time");
                    Err(NonceStoreError)
                }
            }
        })
    }
}
