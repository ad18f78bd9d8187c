//! Revocation of tokens before they expire: the state in memory, and its changes.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use fanfare_proto::token::{RevokeRequest, Revoked, TokenRequestError};
use parking_lot::RwLock;

use super::Authenticator;
use super::exchange::{DurationText, limit_of};
use super::principal::{Principal, PrincipalKind};
use crate::model::{ClientId, KeyName, Limits, Revocation};
use crate::telemetry::Limit;

/// Factor by which the revoked clientIds of a key may exceed the local limit through revocations by other nodes.
const OTHER_NODES_FACTOR: usize = 4;
/// Bound of the keys with revocations, far above their real number.
const KEYS_MAX: usize = 1_000_000;

/// Reason for which no token was revoked; the text is sent to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RevokeError {
    /// The credential is a token, or another key.
    NotTheKey,
    Malformed(String),
    TooManyClientIds {
        client_ids_max: usize,
    },
    /// Revoked from now on, but possibly not after a restart.
    Unavailable,
}

impl fmt::Display for RevokeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotTheKey => f.write_str("only the key itself may revoke its tokens"),
            Self::Malformed(text) => f.write_str(text),
            Self::TooManyClientIds { client_ids_max } => write!(
                f,
                "tokens of {client_ids_max} clientIds of this key are revoked already; revoke all of the key instead"
            ),
            Self::Unavailable => f.write_str("the revocation could not be recorded, send it again"),
        }
    }
}

impl std::error::Error for RevokeError {}

impl Authenticator {
    /// Revokes tokens of the key `path_key`, and stores the revocation before it answers.
    pub async fn revoke_tokens(
        &self,
        principal: &Principal,
        path_key: &str,
        body: &[u8],
    ) -> Result<Revoked, RevokeError> {
        if principal.kind != PrincipalKind::Key || *principal.key_name != *path_key {
            return Err(RevokeError::NotTheKey);
        }
        let now_ms = self.clock.now_ms();
        let revocation = self.read_revocation(principal, body, now_ms)?;
        let answer = Revoked {
            key_name: revocation.key_name.to_string(),
            client_id: revocation.client_id.as_ref().map(|id| id.as_str().to_owned()),
            issued_before: revocation.issued_before_ms,
        };
        let expiry_ms = self.clock.expiry_ms();
        if revocation.has_ended(expiry_ms, self.limits.revocation_kept_ms()) {
            return Ok(answer);
        }
        // In force before it is durable, so that no token passes between the answer and its effect.
        self.revocations.add(&revocation, expiry_ms)?;
        self.tokens.keep_revocation(revocation).await.map_err(|_| RevokeError::Unavailable)?;
        tracing::info!("tokens of a key were revoked");
        Ok(answer)
    }

    /// Applies revocations of another node, and returns those that were new here, to be stored too.
    ///
    /// # Errors
    /// There are more than a node accepts: some are not in force here.
    pub fn take_revocations(&self, revocations: Vec<Revocation>) -> Result<Vec<Revocation>, RevokeError> {
        let now_ms = self.clock.expiry_ms();
        let kept_ms = self.limits.revocation_kept_ms();
        let (mut new, mut outcome) = (Vec::new(), Ok(()));
        for revocation in revocations.into_iter().filter(|one| !one.has_ended(now_ms, kept_ms)) {
            match self.revocations.take(&revocation) {
                Ok(true) => new.push(revocation),
                Ok(false) => {}
                Err(error) => outcome = Err(error),
            }
        }
        outcome.map(|()| new)
    }

    /// All revocations in force, in any order.
    pub fn revocations(&self) -> Vec<Revocation> {
        self.revocations.all()
    }

    /// Restores the revocations stored before the start.
    pub fn restore_revocations(&self, revocations: &[Revocation]) {
        let now_ms = self.clock.expiry_ms();
        for revocation in revocations
            .iter()
            .filter(|revocation| !revocation.has_ended(now_ms, self.limits.revocation_kept_ms()))
        {
            self.revocations.restore(revocation);
        }
    }

    /// Drops revocations whose tokens have all expired; to be called every few minutes.
    pub fn forget_ended_revocations(&self) {
        self.revocations.forget_ended(self.clock.expiry_ms());
    }

    fn read_revocation(
        &self,
        principal: &Principal,
        body: &[u8],
        now_ms: u64,
    ) -> Result<Revocation, RevokeError> {
        let malformed = RevokeError::Malformed;
        let request = RevokeRequest::parse(body, self.limits.nesting).map_err(|error| {
            if let TokenRequestError::Beyond { bound, .. } = error {
                limit_of(bound).hit();
            }
            malformed(error.to_string())
        })?;
        let client_id = request.client_id.as_deref().map(|id| self.client_id(id)).transpose();
        let client_id = client_id.map_err(|error| malformed(format!("clientId {error}")))?;
        let issued_before_ms = request.issued_before.unwrap_or(now_ms);
        // One second less, so that the next token, with its whole second, is valid at once.
        let ahead_ms = self.limits.jwt_ahead_ms;
        if issued_before_ms > now_ms + ahead_ms.saturating_sub(1000) {
            let ahead = DurationText(ahead_ms);
            let text = format!("issuedBefore must be less than {ahead} ahead of the server's clock");
            return Err(malformed(text));
        }
        Ok(Revocation { key_name: principal.key_name.clone(), client_id, issued_before_ms })
    }
}

/// Revoked tokens by key. Bounded by the clientIds that each key may name.
pub(super) struct RevokedTokens {
    keys: RwLock<HashMap<KeyName, KeyRevocations>>,
    changes: AtomicU64,
    client_ids_max: usize,
    kept_ms: u64,
}

/// Epoch milliseconds, exclusive.
#[derive(Default)]
struct KeyRevocations {
    all_before_ms: u64,
    /// Only times after `all_before_ms`.
    clients_before_ms: HashMap<ClientId, u64>,
}

impl RevokedTokens {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            keys: RwLock::default(),
            changes: AtomicU64::new(0),
            client_ids_max: limits.revoked_client_ids,
            kept_ms: limits.revocation_kept_ms(),
        }
    }

    /// The number of revocations added.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// Time before which tokens of this key and clientId are refused; 0 for none.
    pub(super) fn before_ms(&self, key_name: &KeyName, client_id: Option<&ClientId>) -> u64 {
        let keys = self.keys.read();
        let Some(of_key) = keys.get(key_name) else { return 0 };
        let of_client = client_id.and_then(|id| of_key.clients_before_ms.get(id)).copied();
        of_key.all_before_ms.max(of_client.unwrap_or(0))
    }

    /// Whether a token is revoked. Tokens carry only their second of issue: those of the very second of the revocation
    /// are refused too.
    pub(super) fn covers(&self, key_name: &KeyName, client_id: Option<&ClientId>, issued_s: u64) -> bool {
        issued_s.saturating_mul(1000) < self.before_ms(key_name, client_id)
    }

    fn add(&self, revocation: &Revocation, now_ms: u64) -> Result<(), RevokeError> {
        let mut keys = self.keys.write();
        let of_key = keys.entry(revocation.key_name.clone()).or_default();
        of_key.forget_ended(now_ms, self.kept_ms);
        let clients = &of_key.clients_before_ms;
        let is_one_more = revocation.client_id.as_ref().is_some_and(|id| !clients.contains_key(id))
            && revocation.issued_before_ms > of_key.all_before_ms;
        if is_one_more && clients.len() >= self.client_ids_max {
            Limit::RevokedClientIds.hit();
            return Err(RevokeError::TooManyClientIds { client_ids_max: self.client_ids_max });
        }
        if of_key.merge(revocation) {
            self.changes.fetch_add(1, Ordering::Release);
        }
        Ok(())
    }

    /// Restores a revocation without a bound: what was accepted stays in force, even if fewer clientIds are allowed
    /// since.
    fn restore(&self, revocation: &Revocation) {
        self.keys.write().entry(revocation.key_name.clone()).or_default().merge(revocation);
    }

    /// Adds a revocation of another node; true if it is new. Several nodes may revoke at the same time, so the bound is
    /// higher than for local ones.
    fn take(&self, revocation: &Revocation) -> Result<bool, RevokeError> {
        let mut keys = self.keys.write();
        let is_full = match keys.get(&revocation.key_name) {
            None => keys.len() >= KEYS_MAX,
            Some(of_key) => {
                let is_known = |id: &ClientId| of_key.clients_before_ms.contains_key(id);
                revocation.client_id.as_ref().is_some_and(|id| !is_known(id))
                    && of_key.clients_before_ms.len()
                        >= self.client_ids_max.saturating_mul(OTHER_NODES_FACTOR)
            }
        };
        if is_full {
            return Err(RevokeError::TooManyClientIds { client_ids_max: self.client_ids_max });
        }
        let is_news = keys.entry(revocation.key_name.clone()).or_default().merge(revocation);
        if is_news {
            self.changes.fetch_add(1, Ordering::Release);
        }
        Ok(is_news)
    }

    fn all(&self) -> Vec<Revocation> {
        let mut all = Vec::new();
        for (key_name, of_key) in &*self.keys.read() {
            let mut add = |client_id: Option<&ClientId>, issued_before_ms| {
                let (key_name, client_id) = (key_name.clone(), client_id.cloned());
                all.push(Revocation { key_name, client_id, issued_before_ms });
            };
            if of_key.all_before_ms > 0 {
                add(None, of_key.all_before_ms);
            }
            of_key.clients_before_ms.iter().for_each(|(id, before_ms)| add(Some(id), *before_ms));
        }
        all
    }

    fn forget_ended(&self, now_ms: u64) {
        self.keys.write().retain(|_, of_key| {
            of_key.forget_ended(now_ms, self.kept_ms);
            of_key.all_before_ms > 0 || !of_key.clients_before_ms.is_empty()
        });
    }
}

impl KeyRevocations {
    /// Adds a revocation; false if it is covered already.
    fn merge(&mut self, revocation: &Revocation) -> bool {
        let before_ms = revocation.issued_before_ms;
        if before_ms <= self.all_before_ms {
            return false;
        }
        let Some(client_id) = &revocation.client_id else {
            self.all_before_ms = before_ms;
            self.clients_before_ms.retain(|_, of_client| *of_client > before_ms);
            return true;
        };
        let of_client = self.clients_before_ms.entry(client_id.clone()).or_default();
        let is_later = before_ms > *of_client;
        *of_client = before_ms.max(*of_client);
        is_later
    }

    fn forget_ended(&mut self, now_ms: u64, kept_ms: u64) {
        let has_ended = |before_ms: u64| before_ms.saturating_add(kept_ms) <= now_ms;
        self.clients_before_ms.retain(|_, before_ms| !has_ended(*before_ms));
        if has_ended(self.all_before_ms) {
            self.all_before_ms = 0;
        }
    }
}
