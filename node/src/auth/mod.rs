//! Authentication: credential → `Principal`, or the one `Unauthorized`; signed requests → tokens.
//!
//! No status number is known here, and no output of this module contains a secret, a key or a token.

mod connection_key;
mod credentials;
mod exchange;
mod failures;
mod inspect;
mod jwt;
mod principal;
mod refused;
mod revocation;
mod store;
#[cfg(test)]
mod tests;
mod used_nonces;

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use crate::accounts::{Account, Accounts, Directory, Key, Secret};
use crate::model::{AccountId, Capability, Clock, Limits, random_bytes};
use used_nonces::UsedNonces;

pub use connection_key::ConnectionKeys;
pub use credentials::Credentials;
pub use exchange::ExchangeError;
pub use inspect::{Inspection, inspect};
pub use principal::{Principal, PrincipalKind};
pub use refused::{Reason, RefusedCredential};
pub use revocation::RevokeError;
pub use store::{NonceClaim, RevocationWrite, TokenStore, TokenStoreError};

use credentials::PresentedCredential;
use failures::Failures;
use jwt::UnverifiedToken;
use refused::RefusalLog;
use revocation::RevokedTokens;

/// No usable credential, as reported to the client. Only the operator learns whether it was malformed, wrong, unknown or revoked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unauthorized;

impl fmt::Display for Unauthorized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unauthorized")
    }
}

impl std::error::Error for Unauthorized {}

/// Checks credentials against the current directory.
pub struct Authenticator {
    accounts: Arc<Accounts>,
    tokens: Box<dyn TokenStore>,
    revocations: RevokedTokens,
    clock: Clock,
    limits: Limits,
    failures: Failures,
    refusals: RefusalLog,
    used_nonces: UsedNonces,
    /// Name that a token's `aud` must contain. `None`: a token with `aud` is refused.
    audience: Option<String>,
    /// Time up to which the nonces of token requests may have been used without a trace here.
    nonces_known_after_ms: u64,
    /// Account of every caller when authentication is off.
    anonymous: Option<Arc<Account>>,
    /// Secret that stands in for an unknown key, so that its refusal takes as long as that of a wrong secret.
    decoy: Secret,
}

impl Authenticator {
    /// Account of every caller when authentication is off.
    pub const ANONYMOUS_ACCOUNT: &str = "default";

    pub fn new(
        accounts: Arc<Accounts>,
        tokens: impl TokenStore,
        clock: Clock,
        limits: &Limits,
        auth_on: bool,
    ) -> Self {
        let anonymous = (!auth_on).then(|| {
            let account = Account::plain(Self::ANONYMOUS_ACCOUNT);
            let usage = accounts.usages().of(&account.id);
            Arc::new(Account { usage, retention_hours: limits.history_retention_hours, ..account })
        });
        let decoy: String = random_bytes::<32>().iter().map(|byte| format!("{byte:02x}")).collect();
        Self {
            accounts,
            tokens: Box::new(tokens),
            revocations: RevokedTokens::new(limits),
            clock,
            limits: limits.clone(),
            failures: Failures::new(limits.failed_token_requests_per_second),
            refusals: RefusalLog::new(),
            used_nonces: UsedNonces::new(),
            audience: None,
            nonces_known_after_ms: 0,
            anonymous,
            decoy: Secret::new(&decoy).expect("hexadecimal digits make a secret"),
        }
    }

    /// Accepts tokens that name this service as their audience.
    #[must_use]
    pub fn for_audience(self, audience: Option<&str>) -> Self {
        Self { audience: audience.map(str::to_owned), ..self }
    }

    /// Refuses token requests up to this time: their nonces may have been claimed without a trace here.
    #[must_use]
    pub fn knowing_nonces_after(self, nonces_known_after_ms: u64) -> Self {
        Self { nonces_known_after_ms, ..self }
    }

    /// Authenticates a request, by the Authorization header or, for the socket, also by the query. A refusal is counted and logged.
    pub fn authenticate(&self, credentials: &Credentials<'_>) -> Result<Principal, Unauthorized> {
        self.check_credentials(credentials).map_err(|refused| {
            self.note(&refused, credentials.address);
            Unauthorized
        })
    }

    /// Authenticates the token with which a connection refreshes itself. The session decides whether the principal may take the connection
    /// over, and the caller logs a refusal.
    pub fn authenticate_token(&self, jwt: &str) -> Result<Principal, RefusedCredential> {
        match &self.anonymous {
            Some(account) => Ok(Principal::anonymous(account.clone())),
            None => self.check_token(jwt),
        }
    }

    /// Counts a refusal, and logs it at a limited rate.
    pub fn note(&self, refused: &RefusedCredential, address: Option<IpAddr>) {
        self.refusals.note(refused, address, &self.accounts.current());
    }

    /// A number that changes with the directory and with each revocation.
    pub fn generation(&self) -> u64 {
        self.accounts.generation() + self.revocations.changes()
    }

    /// The principal of a live connection under the current directory, to be called when the generation has changed. A key has its present
    /// capability; a token's must still be covered by its key's.
    ///
    /// `None`: the credential would be refused now, apart from its expiry.
    pub fn review(&self, principal: &Principal) -> Option<Principal> {
        let Some(previous) = principal.key() else {
            return self.anonymous.as_ref().map(|_| principal.clone());
        };
        if self.is_revoked(principal) {
            return None;
        }
        let directory = self.accounts.current();
        let key = directory.key(&previous.name).filter(|key| {
            key.active && key.account.id == previous.account.id && key.secret == previous.secret
        })?;
        let renewed = principal.renewed(key);
        renewed.capability.is_subset_of(&key.capability).then_some(renewed)
    }

    /// The account as it is now, with defaults if it is gone, and the capabilities of its active keys. Together they are the most that a
    /// client of the previous incarnation may do, as it may have changed its key meanwhile; none: nothing any more.
    pub fn restored_grants(&self, account: &AccountId) -> (Arc<Account>, Vec<Arc<Capability>>) {
        if let Some(anonymous) = self.anonymous.as_ref().filter(|anonymous| anonymous.id == *account) {
            return (Arc::clone(anonymous), vec![Arc::new(Capability::everything())]);
        }
        let directory = self.accounts.current();
        let known = directory.account(account).cloned();
        let keys = directory.keys().filter(|key| key.active && key.account.id == *account);
        let granted = keys.map(|key| Arc::clone(&key.capability)).collect();
        (known.unwrap_or_else(|| Arc::new(Account::plain(account.as_str()))), granted)
    }

    fn check_credentials(&self, credentials: &Credentials<'_>) -> Result<Principal, RefusedCredential> {
        if let Some(account) = &self.anonymous {
            return Ok(Principal::anonymous(account.clone()));
        }
        let principal = self.check(credentials.presented()?)?;
        match (&principal.client_id, credentials.chosen_client_id()) {
            (Some(forced), Some(chosen)) if forced.as_str() != chosen => {
                Err(RefusedCredential::of(&principal.key_name, Reason::OtherClientId))
            }
            _ => Ok(principal),
        }
    }

    fn check(&self, presented: PresentedCredential<'_>) -> Result<Principal, RefusedCredential> {
        match presented {
            PresentedCredential::Key(text) => self.check_key(&text),
            PresentedCredential::Token(jwt) => self.check_token(&jwt),
        }
    }

    /// Checks `<secret>.<keyName>`.
    fn check_key(&self, text: &str) -> Result<Principal, RefusedCredential> {
        let (secret, name) = text.rsplit_once('.').ok_or(Reason::Malformed)?;
        let directory = self.accounts.current();
        let (key, own_secret) = self.key_or_decoy(&directory, name);
        let matches = own_secret.matches(secret.as_bytes());
        // Without a key of that name the text may be a secret, with the parts of the key swapped.
        let key = key.ok_or(Reason::UnknownKey)?;
        if !matches {
            return Err(RefusedCredential::of(name, Reason::BadSecret));
        }
        if !key.active {
            return Err(RefusedCredential::of(name, Reason::RevokedKey));
        }
        Ok(Principal::of_key(key.clone(), self.clock.now_ms() / 1000))
    }

    fn check_token(&self, token: &str) -> Result<Principal, RefusedCredential> {
        let unverified = UnverifiedToken::read(token, &self.limits)?;
        self.verify(&unverified).map_err(|reason| {
            let detail = (reason == Reason::BadClaims).then(|| unverified.bad_claim(&self.limits));
            RefusedCredential::of(&unverified.key_name, reason).with_detail(detail)
        })
    }

    fn verify(&self, unverified: &UnverifiedToken<'_>) -> Result<Principal, Reason> {
        let directory = self.accounts.current();
        let (key, secret) = self.key_or_decoy(&directory, &unverified.key_name);
        let key = jwt::usable_key(key, unverified.is_signed_with(secret))?;
        let granted = unverified.claimed(&self.limits, self.audience.as_deref(), self.clock.now_ms())?;
        let granted = granted.within(key)?;
        let principal = Principal::of_token(key.clone(), granted);
        if self.is_revoked(&principal) { Err(Reason::Revoked) } else { Ok(principal) }
    }

    fn is_revoked(&self, principal: &Principal) -> bool {
        let Principal { key_name, client_id, issued_s, .. } = principal;
        principal.kind == PrincipalKind::Token
            && self.revocations.covers(key_name, client_id.as_ref(), *issued_s)
    }

    fn key_or_decoy<'a>(
        &'a self,
        directory: &'a Directory,
        name: &str,
    ) -> (Option<&'a Arc<Key>>, &'a Secret) {
        let key = directory.key(name);
        (key, key.map_or(&self.decoy, |key| &key.secret))
    }
}
