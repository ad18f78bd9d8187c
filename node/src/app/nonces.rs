//! The origin's store as the authenticator's memory of nonces.

use std::sync::Arc;

use crate::auth::{Claim, Nonce, NonceStore, NonceStoreError};
use crate::origin::history::{self, HistoryStore};

pub(super) struct StoredNonces(pub(super) Arc<dyn HistoryStore>);

impl NonceStore for StoredNonces {
    fn claim_nonce(&self, nonce: Nonce) -> Claim {
        let Nonce { key_name, timestamp_ms, nonce } = nonce;
        let claim = self.0.claim_nonce(history::Nonce { key_name, timestamp_ms, nonce });
        Box::pin(async move {
            claim.await.map_err(|error| {
                tracing::warn!(%error, "a nonce was not claimed");
                NonceStoreError
            })
        })
    }
}
