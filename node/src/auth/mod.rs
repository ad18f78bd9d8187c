//! A credential → the `Principal` who acts, or the one `Unauthorized`; signed requests → tokens.
//!
//! Nothing here knows a status number, and nothing that is printed from here holds a secret, a key or a token.

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
pub use refused::{Reason, Refused};
pub use revocation::RevokeError;
pub use store::{Claim, Kept, TokenStore, TokenStoreError};

use credentials::Presented;
use failures::Failures;
use jwt::Unverified;
use refused::Refusals;
use revocation::Revocations;

/// No usable credential, as the client is told. Malformed, wrong, unknown and revoked are told apart for the operator alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Unauthorized;

impl fmt::Display for Unauthorized {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unauthorized")
    }
}

impl std::error::Error for Unauthorized {}

/// Checks credentials against the directory of the moment.
pub struct Authenticator {
    accounts: Arc<Accounts>,
    tokens: Box<dyn TokenStore>,
    revocations: Revocations,
    clock: Clock,
    limits: Limits,
    failures: Failures,
    refusals: Refusals,
    used_nonces: UsedNonces,
    /// The name that `aud` of a token must hold. `None`: a token with `aud` is refused.
    audience: Option<String>,
    /// Token requests with a time up to this one may have been used before, unknown here.
    nonces_known_after_ms: u64,
    /// Whom everybody is when authentication is off.
    anonymous: Option<Arc<Account>>,
    /// Stands in for an unknown key, which then takes as long to refuse as a wrong secret.
    decoy: Secret,
}

impl Authenticator {
    /// The account of all work when authentication is off.
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
            revocations: Revocations::new(limits),
            clock,
            limits: limits.clone(),
            failures: Failures::new(limits.failed_token_requests_per_second),
            refusals: Refusals::new(),
            used_nonces: UsedNonces::new(),
            audience: None,
            nonces_known_after_ms: 0,
            anonymous,
            decoy: Secret::new(&decoy).expect("hexadecimal digits make a secret"),
        }
    }

    /// Takes tokens that are for this service by name.
    #[must_use]
    pub fn for_audience(self, audience: Option<&str>) -> Self {
        Self { audience: audience.map(str::to_owned), ..self }
    }

    /// Issues nothing for token requests with an earlier time, or with this one: their nonces may have been claimed without a trace here.
    #[must_use]
    pub fn knowing_nonces_after(self, nonces_known_after_ms: u64) -> Self {
        Self { nonces_known_after_ms, ..self }
    }

    /// For HTTP the Authorization header decides, for the socket also the query. A refusal is counted and logged.
    pub fn authenticate(&self, credentials: &Credentials<'_>) -> Result<Principal, Unauthorized> {
        self.check_credentials(credentials).map_err(|refused| {
            self.note(&refused, credentials.address);
            Unauthorized
        })
    }

    /// For the refresh of a connection; whether the principal may take it over is the session's to say. A refusal is
    /// the caller's to note.
    pub fn authenticate_token(&self, jwt: &str) -> Result<Principal, Refused> {
        match &self.anonymous {
            Some(account) => Ok(Principal::anonymous(account.clone())),
            None => self.check_token(jwt),
        }
    }

    /// Counts a refusal, and logs it once in a while.
    pub fn note(&self, refused: &Refused, address: Option<IpAddr>) {
        self.refusals.note(refused, address, &self.accounts.current());
    }

    /// Changes whenever the directory does, or a token is revoked.
    pub fn generation(&self) -> u64 {
        self.accounts.generation() + self.revocations.changes()
    }

    /// The principal behind a live connection as the directory has it now, to be asked whenever the generation has
    /// changed. A key's capability is what it is by then, a token's must still be covered by its key's.
    ///
    /// `None`: the credential would not be taken any more, its expiry apart.
    pub fn review(&self, principal: &Principal) -> Option<Principal> {
        let Some(former) = principal.key() else {
            return self.anonymous.as_ref().map(|_| principal.clone());
        };
        if self.is_revoked(principal) {
            return None;
        }
        let directory = self.accounts.current();
        let key = directory
            .key(&former.name)
            .filter(|key| key.active && key.account.id == former.account.id && key.secret == former.secret)?;
        let renewed = principal.renewed(key);
        renewed.capability.is_subset_of(&key.capability).then_some(renewed)
    }

    /// What the keys of an account grant at most to who was connected to a former run of the node, who may have changed from
    /// one of them to another meanwhile; none: nothing any more. With it the account as it is now, with every default when
    /// there is none.
    pub fn former(&self, account: &AccountId) -> (Arc<Account>, Vec<Arc<Capability>>) {
        if let Some(anonymous) = self.anonymous.as_ref().filter(|anonymous| anonymous.id == *account) {
            return (Arc::clone(anonymous), vec![Arc::new(Capability::everything())]);
        }
        let directory = self.accounts.current();
        let known = directory.account(account).cloned();
        let keys = directory.keys().filter(|key| key.active && key.account.id == *account);
        let granted = keys.map(|key| Arc::clone(&key.capability)).collect();
        (known.unwrap_or_else(|| Arc::new(Account::plain(account.as_str()))), granted)
    }

    fn check_credentials(&self, credentials: &Credentials<'_>) -> Result<Principal, Refused> {
        if let Some(account) = &self.anonymous {
            return Ok(Principal::anonymous(account.clone()));
        }
        let principal = self.check(credentials.presented()?)?;
        match (&principal.client_id, credentials.chosen_client_id()) {
            (Some(forced), Some(chosen)) if forced.as_str() != chosen => {
                Err(Refused::of(&principal.key_name, Reason::OtherClientId))
            }
            _ => Ok(principal),
        }
    }

    fn check(&self, presented: Presented<'_>) -> Result<Principal, Refused> {
        match presented {
            Presented::Key(text) => self.check_key(&text),
            Presented::Token(jwt) => self.check_token(&jwt),
        }
    }

    /// Takes `<secret>.<keyName>`.
    fn check_key(&self, text: &str) -> Result<Principal, Refused> {
        let (secret, name) = text.rsplit_once('.').ok_or(Reason::Malformed)?;
        let directory = self.accounts.current();
        let (key, own_secret) = self.key_or_decoy(&directory, name);
        let matches = own_secret.matches(secret.as_bytes());
        // Without a key by that name the text may be a secret, with its parts in the wrong order.
        let key = key.ok_or(Reason::UnknownKey)?;
        if !matches {
            return Err(Refused::of(name, Reason::BadSecret));
        }
        if !key.active {
            return Err(Refused::of(name, Reason::RevokedKey));
        }
        Ok(Principal::of_key(key.clone(), self.clock.now_ms() / 1000))
    }

    fn check_token(&self, token: &str) -> Result<Principal, Refused> {
        let unverified = Unverified::read(token, &self.limits)?;
        self.verify(&unverified).map_err(|reason| {
            let detail = (reason == Reason::BadClaims).then(|| unverified.bad_claim(&self.limits));
            Refused::of(&unverified.key_name, reason).with_detail(detail)
        })
    }

    fn verify(&self, unverified: &Unverified<'_>) -> Result<Principal, Reason> {
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
