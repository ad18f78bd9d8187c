//! The origin's store as the authenticator's memory of nonces and revocations.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use super::{StartError, backup};
use crate::accounts::Accounts;
use crate::auth::{Authenticator, NonceClaim, RevocationWrite, TokenStore, TokenStoreError};
use crate::cluster::routing::Routing;
use crate::config::Config;
use crate::model::{Clock, Nonce, Revocation};
use crate::origin::history::{BoxFuture, HistoryStore, StoreError};
use crate::telemetry::RATE_LIMITED;

/// Interval within which revocations stored by others take effect here, also of processes that are no peers, such as
/// `history copy`.
const REVOCATIONS_EVERY: Duration = Duration::from_secs(10);

struct StoredTokens {
    store: Arc<dyn HistoryStore>,
    others: RoutingCell,
    /// Time limit of each answer.
    wait: Duration,
}

/// Routing to the peers, once it is known whether there may be some.
#[derive(Clone, Default)]
pub(super) struct RoutingCell(Arc<OnceLock<Arc<Routing>>>);

impl RoutingCell {
    /// Sets the routing; to be called before clients are served.
    pub(super) fn know(&self, routing: &Arc<Routing>) {
        self.0.set(Arc::clone(routing)).ok();
    }
}

/// Opens the authenticator with the stored revocations loaded.
pub(super) async fn open_auth(
    config: &Config,
    accounts: &Arc<Accounts>,
    store: &Arc<dyn HistoryStore>,
    clock: &Clock,
) -> Result<(Arc<Authenticator>, RoutingCell), StartError> {
    let others = RoutingCell::default();
    let tokens = StoredTokens {
        store: Arc::clone(store),
        others: others.clone(),
        wait: Duration::from_millis(config.limits.store_wait_ms),
    };
    let auth = Authenticator::new(Arc::clone(accounts), tokens, clock.clone(), &config.limits, config.auth)
        .for_audience(config.audience.as_deref())
        .knowing_nonces_after(backup::unknown_until_ms(config, clock)?);
    let revoked = revoked_tokens(store).await;
    auth.restore_revocations(&revoked.map_err(StartError::at("cannot read the revocations in the store"))?);
    Ok((Arc::new(auth), others))
}

/// Applies new revocations of a shared store.
pub(super) async fn follow_revocations(store: Arc<dyn HistoryStore>, auth: Arc<Authenticator>) {
    loop {
        tokio::time::sleep(REVOCATIONS_EVERY).await;
        match revoked_tokens(&store).await.map(|revoked| auth.take_revocations(revoked)) {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => {
                tracing::error!(target: RATE_LIMITED, %error, "revocation from the store not applied");
            }
            Err(error) => {
                tracing::warn!(target: RATE_LIMITED, %error, "revocations not read from the store");
            }
        }
    }
}

async fn revoked_tokens(store: &Arc<dyn HistoryStore>) -> Result<Vec<Revocation>, StoreError> {
    let store = Arc::clone(store);
    let read = tokio::task::spawn_blocking(move || store.revoked_tokens()).await;
    read.unwrap_or_else(|error| Err(StoreError::Failed(error.to_string())))
}

impl TokenStore for StoredTokens {
    fn claim_nonce(&self, nonce: Nonce) -> NonceClaim {
        let claim: BoxFuture<'static, _> = match self.others.0.get() {
            Some(routing) if !self.store.is_shared() => {
                let routing = Arc::clone(routing);
                let unknown = || StoreError::Failed("too few nodes remember it".to_owned());
                Box::pin(async move { routing.claim_nonce(nonce).await.ok_or_else(unknown) })
            }
            _ => self.store.claim_nonce(nonce),
        };
        Box::pin(in_time("claim of a nonce", self.wait, claim))
    }

    fn keep_revocation(&self, revocation: Revocation) -> RevocationWrite {
        let (routing, stored) = (self.others.0.get().cloned(), self.store.revoke_tokens(revocation.clone()));
        let kept = async move {
            let Some(routing) = routing else { return stored.await };
            let (stored, is_acknowledged) = tokio::join!(stored, routing.revoke(revocation));
            let unacknowledged =
                || StoreError::Failed("a node that can be reached does not remember it".to_owned());
            stored.and(is_acknowledged.then_some(()).ok_or_else(unacknowledged))
        };
        Box::pin(in_time("revocation", self.wait, Box::pin(kept)))
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
            tracing::warn!(target: RATE_LIMITED, what, %error, "token write failed");
            Err(TokenStoreError)
        }
        Err(_) => {
            tracing::warn!(target: RATE_LIMITED, what, "token write timed out");
            Err(TokenStoreError)
        }
    }
}
