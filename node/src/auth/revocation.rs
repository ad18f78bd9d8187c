//! Tokens taken back before they expire: what is held in memory, and who may add to it.

use std::collections::HashMap;
use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};

use fanfare_proto::token::{RevokeRequest, Revoked, TokenRequestError};
use parking_lot::RwLock;

use super::Authenticator;
use super::exchange::{Span, limit_of};
use super::principal::{Principal, PrincipalKind};
use crate::model::{ClientId, KeyName, Limits, Revocation};
use crate::telemetry::Limit;

/// Of what other nodes have revoked, so many times the clientIds of a key that may be revoked here are taken.
const ELSEWHERE: usize = 4;
/// Keys of which they are, far more than there are.
const KEYS_MAX: usize = 1_000_000;

/// Why no token was revoked; the text is what the client is told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RevokeError {
    /// A token, or another key.
    NotTheKey,
    Malformed(String),
    TooManyClientIds {
        client_ids_max: usize,
    },
    /// Refused from now on, but not known to be remembered over a restart.
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
    /// Refuses tokens of the key `path_key` from now on, and remembers it before it answers.
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

    /// Refuses from now on what another node has revoked; gives what was not refused here yet, to be remembered too.
    ///
    /// # Errors
    /// There are more than any node takes: some are not refused here.
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

    /// All that are in force, in any order.
    pub fn revocations(&self) -> Vec<Revocation> {
        self.revocations.all()
    }

    /// Takes up what was remembered before the node was started.
    pub fn restore_revocations(&self, revocations: &[Revocation]) {
        let now_ms = self.clock.expiry_ms();
        for revocation in revocations
            .iter()
            .filter(|revocation| !revocation.has_ended(now_ms, self.limits.revocation_kept_ms()))
        {
            self.revocations.restore(revocation);
        }
    }

    /// Frees what is held for tokens that have all expired; to be called every few minutes.
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
        // A second less, so that a token issued next, which says a whole second, is good at once.
        let ahead_ms = self.limits.jwt_ahead_ms;
        if issued_before_ms > now_ms + ahead_ms.saturating_sub(1000) {
            let ahead = Span(ahead_ms);
            let text = format!("issuedBefore must be less than {ahead} ahead of the server's clock");
            return Err(malformed(text));
        }
        Ok(Revocation { key_name: principal.key_name.clone(), client_id, issued_before_ms })
    }
}

/// What is revoked, by key. Bounded by the clientIds that each key may name.
pub(super) struct Revocations {
    keys: RwLock<HashMap<KeyName, OfKey>>,
    changes: AtomicU64,
    client_ids_max: usize,
    kept_ms: u64,
}

/// Epoch milliseconds, exclusive.
#[derive(Default)]
struct OfKey {
    all_before_ms: u64,
    /// Only what lies beyond `all_before_ms`.
    clients_before_ms: HashMap<ClientId, u64>,
}

impl Revocations {
    pub(super) fn new(limits: &Limits) -> Self {
        Self {
            keys: RwLock::default(),
            changes: AtomicU64::new(0),
            client_ids_max: limits.revoked_client_ids,
            kept_ms: limits.revocation_kept_ms(),
        }
    }

    /// Counts what was added.
    pub(super) fn changes(&self) -> u64 {
        self.changes.load(Ordering::Acquire)
    }

    /// The moment before which tokens of this key and clientId are refused; 0: none are.
    pub(super) fn before_ms(&self, key_name: &KeyName, client_id: Option<&ClientId>) -> u64 {
        let keys = self.keys.read();
        let Some(of_key) = keys.get(key_name) else { return 0 };
        let of_client = client_id.and_then(|id| of_key.clients_before_ms.get(id)).copied();
        of_key.all_before_ms.max(of_client.unwrap_or(0))
    }

    /// A token says its second of issue only: one of the very second in which the moment lies is refused as well.
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

    /// Without a bound: what was once taken holds, also when fewer clientIds are allowed since.
    fn restore(&self, revocation: &Revocation) {
        self.keys.write().entry(revocation.key_name.clone()).or_default().merge(revocation);
    }

    /// What another node took; as many nodes may take something at a time, there may be more than here. True: it is news.
    fn take(&self, revocation: &Revocation) -> Result<bool, RevokeError> {
        let mut keys = self.keys.write();
        let is_full = match keys.get(&revocation.key_name) {
            None => keys.len() >= KEYS_MAX,
            Some(of_key) => {
                let is_known = |id: &ClientId| of_key.clients_before_ms.contains_key(id);
                revocation.client_id.as_ref().is_some_and(|id| !is_known(id))
                    && of_key.clients_before_ms.len() >= self.client_ids_max.saturating_mul(ELSEWHERE)
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

impl OfKey {
    /// False: it is covered already.
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
