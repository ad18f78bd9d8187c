//! Token exchange: TokenRequest → token, with the order of the checks.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use fanfare_proto::token::{
    ServiceClaims, TokenDetails, TokenRequest, TokenRequestBound, TokenRequestBounds, TokenRequestError, mac,
};
use subtle::ConstantTimeEq as _;

use super::credentials::Credentials;
use super::principal::PrincipalKind;
use super::refused::{Reason, RefusedCredential};
use super::{Authenticator, jwt};
use crate::accounts::Key;
use crate::model::{Capability, ClientId, Limits, NameError, Nonce, UsageKind};
use crate::telemetry::Limit;

/// Reason for which no token was issued, in the order of the checks; the text is sent to the client.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExchangeError {
    /// The request fails, and so many of this address and key have failed within the second that the reason is
    /// withheld.
    TooMany,
    Malformed(String),
    /// Unknown or revoked key, wrong MAC, or an accompanying credential of another key; only the operator learns which.
    Mac(Reason),
    Timestamp {
        window_ms: u64,
    },
    /// The capability exceeds that of the key.
    Capability {
        key_name: String,
    },
    NonceUsed,
    /// The nonce cannot be stored.
    Unavailable,
}

impl fmt::Display for ExchangeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::TooMany => f.write_str("too many failed token requests"),
            Self::Malformed(text) => f.write_str(text),
            Self::Mac(_) => f.write_str("invalid token request mac"),
            Self::Timestamp { window_ms } => {
                let window = DurationText(*window_ms);
                write!(f, "token request timestamp is not within {window} of the server's clock")
            }
            Self::Capability { key_name } => {
                write!(f, "token request asks for more than the capability of key {key_name}")
            }
            Self::NonceUsed => f.write_str("token request nonce has been used"),
            Self::Unavailable => f.write_str("token requests cannot be recorded at present"),
        }
    }
}

impl std::error::Error for ExchangeError {}

impl ExchangeError {
    /// The reason to log; `None` if the request may be valid.
    fn reason(&self) -> Option<Reason> {
        match self {
            Self::Malformed(_) => Some(Reason::Malformed),
            Self::Mac(reason) => Some(*reason),
            Self::Timestamp { .. } => Some(Reason::Timestamp),
            Self::Capability { .. } => Some(Reason::CapabilityExceedsKey),
            Self::NonceUsed => Some(Reason::NonceUsed),
            Self::TooMany | Self::Unavailable => None,
        }
    }
}

impl Authenticator {
    /// Exchanges a token request. `path_key` is the decoded key name of the path; `authorization` the values of those
    /// headers; `address` the client's, by which failures are limited and logged.
    pub async fn exchange(
        &self,
        address: Option<IpAddr>,
        path_key: &str,
        authorization: &[&[u8]],
        body: &[u8],
    ) -> Result<TokenDetails, ExchangeError> {
        let now_ms = self.clock.now_ms();
        let outcome = self.try_exchange(path_key, authorization, body, now_ms).await;
        // Only failures count against the limit, so that others behind the same address go on.
        if let Some(reason) = outcome.as_ref().err().and_then(ExchangeError::reason) {
            self.note(&RefusedCredential::of(path_key, reason), address);
            if self.failures.is_one_too_many(address, path_key, now_ms) {
                Limit::FailedTokenRequestsPerSecond.hit();
                return Err(ExchangeError::TooMany);
            }
        }
        outcome
    }

    async fn try_exchange(
        &self,
        path_key: &str,
        authorization: &[&[u8]],
        body: &[u8],
        now_ms: u64,
    ) -> Result<TokenDetails, ExchangeError> {
        let checked = self.read(path_key, body)?;
        let key = self.check_signer(&checked.request, authorization)?;
        let window_ms = self.limits.token_request_window_ms;
        if checked.request.timestamp.value.abs_diff(now_ms) > window_ms {
            return Err(ExchangeError::Timestamp { window_ms });
        }
        // Made before the nonce is claimed, so that a refusal leaves the nonce unused.
        let details = self.issue(&key, &checked, now_ms)?;
        let timestamp_ms = checked.request.timestamp.value;
        let nonce = Nonce { key_name: key.name.clone(), timestamp_ms, nonce: checked.request.nonce.into() };
        // A known repeat is answered here: the claim would ask the store, or every node.
        if self.used_nonces.holds(&nonce) {
            return Err(ExchangeError::NonceUsed);
        }
        let claimed = self.tokens.claim_nonce(nonce.clone()).await;
        if claimed.is_ok() {
            self.used_nonces.add(&nonce);
        }
        match claimed {
            Ok(true) if timestamp_ms <= self.nonces_known_after_ms => Err(ExchangeError::Unavailable),
            Ok(true) => {
                key.account.usage.count(UsageKind::Token, 1, 0);
                Ok(details)
            }
            Ok(false) => Err(ExchangeError::NonceUsed),
            Err(_) => Err(ExchangeError::Unavailable),
        }
    }

    fn read(&self, path_key: &str, body: &[u8]) -> Result<CheckedTokenRequest, ExchangeError> {
        let for_another = || ExchangeError::Malformed("keyName differs from the path".into());
        let Limits { nesting, token_ttl_max_ms, nonce_characters_min, nonce_characters_max, .. } =
            self.limits;
        let bounds = TokenRequestBounds {
            nesting_max: nesting,
            ttl_ms_max: token_ttl_max_ms,
            nonce_characters: nonce_characters_min..=nonce_characters_max,
        };
        let request = match TokenRequest::parse(body, &bounds) {
            Ok(request) => request,
            Err(TokenRequestError::Malformed(text)) => return Err(ExchangeError::Malformed(text)),
            Err(TokenRequestError::Beyond { bound, text }) => {
                limit_of(bound).hit();
                return Err(ExchangeError::Malformed(text));
            }
            Err(TokenRequestError::CapabilityNotText { key_name }) if key_name != path_key => {
                return Err(for_another());
            }
            Err(TokenRequestError::CapabilityNotText { key_name }) => {
                let _same_time_as_a_wrong_mac = self.mac_of(&key_name, "");
                return Err(ExchangeError::Mac(Reason::Malformed));
            }
        };
        if request.key_name != path_key {
            return Err(for_another());
        }
        let client_id = given(request.client_id.as_deref()).map(|id| self.client_id(id)).transpose();
        let client_id = client_id.map_err(|error| ExchangeError::Malformed(format!("clientId {error}")))?;
        let capability = given(request.capability.as_deref()).map(Capability::parse_json).transpose();
        let capability = capability.map_err(|error| ExchangeError::Malformed(error.to_string()))?;
        Ok(CheckedTokenRequest { request, client_id, capability })
    }

    /// Parses a clientId of a request.
    pub(super) fn client_id(&self, text: &str) -> Result<ClientId, NameError> {
        ClientId::new(text, &self.limits)
            .inspect_err(|error| Limit::ClientIdBytes.hit_if(error.is_too_long()))
    }

    /// The key that signed the request by a MAC, or without one by Basic. A MAC is computed in every case.
    fn check_signer(
        &self,
        request: &TokenRequest,
        authorization: &[&[u8]],
    ) -> Result<Arc<Key>, ExchangeError> {
        let (key, expected) = self.mac_of(&request.key_name, &request.signing_text());
        let beside = if authorization.is_empty() {
            None
        } else {
            let authorization = authorization.to_vec();
            let credentials = Credentials { authorization, query: "", socket: false, address: None };
            let presented = credentials.presented().map_err(RefusedCredential::from);
            let principal = presented.and_then(|presented| self.check(presented));
            let principal = principal.map_err(|refused| ExchangeError::Mac(refused.reason))?;
            if *principal.key_name != *request.key_name {
                return Err(ExchangeError::Mac(Reason::OtherKey));
            }
            Some(principal.kind)
        };
        let vouched = match &request.mac {
            Some(mac) => mac.as_bytes().ct_eq(expected.as_bytes()).into(),
            None => beside == Some(PrincipalKind::Key),
        };
        let reason = match key {
            None => Reason::UnknownKey,
            Some(_) if !vouched => Reason::BadMac,
            Some(key) if !key.active => Reason::RevokedKey,
            Some(key) => return Ok(key),
        };
        Err(ExchangeError::Mac(reason))
    }

    fn mac_of(&self, key_name: &str, text: &str) -> (Option<Arc<Key>>, String) {
        let directory = self.accounts.current();
        let (key, secret) = self.key_or_decoy(&directory, key_name);
        (key.cloned(), mac(secret.as_bytes(), text))
    }

    fn issue(
        &self,
        key: &Key,
        checked: &CheckedTokenRequest,
        now_ms: u64,
    ) -> Result<TokenDetails, ExchangeError> {
        let capability = match &checked.capability {
            None => Capability::all_channels_of(&key.capability),
            Some(capability) if capability.is_subset_of(&key.capability) => capability.clone(),
            Some(_) => return Err(ExchangeError::Capability { key_name: key.name.to_string() }),
        };
        let ttl_ms = checked.request.ttl.as_ref().map_or(self.limits.token_ttl_default_ms, |ttl| ttl.value);
        // In the second of a revocation the token gets the next second as `iat`, or it would be refused with the
        // revoked ones.
        let revoked_ms = self.revocations.before_ms(&key.name, checked.client_id.as_ref());
        let iat = (now_ms / 1000).max(revoked_ms.div_ceil(1000));
        let claims = ServiceClaims {
            iat,
            exp: iat + ttl_ms.div_ceil(1000),
            nbf: None,
            aud: None,
            capability: capability.canonical(),
            client_id: checked.client_id.as_ref().map(|id| id.as_str().to_owned()),
        };
        let token = jwt::issue(key, &claims);
        if token.len() > self.limits.token_bytes {
            Limit::TokenBytes.hit();
            let text = format!("the token would be longer than {} bytes", self.limits.token_bytes);
            return Err(ExchangeError::Malformed(text));
        }
        Ok(TokenDetails {
            token,
            key_name: key.name.to_string(),
            issued: claims.iat * 1000,
            expires: claims.exp * 1000,
            capability: claims.capability,
            client_id: claims.client_id,
        })
    }
}

/// A duration in words.
pub(super) struct DurationText(pub(super) u64);

impl fmt::Display for DurationText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            ms if ms % 60_000 == 0 => write!(f, "{} minutes", ms / 60_000),
            ms if ms % 1_000 == 0 => write!(f, "{} seconds", ms / 1_000),
            ms => write!(f, "{ms} milliseconds"),
        }
    }
}

/// A request that is well-formed throughout.
struct CheckedTokenRequest {
    request: TokenRequest,
    client_id: Option<ClientId>,
    /// Requested capability; `None`: the key's.
    capability: Option<Capability>,
}

pub(super) fn limit_of(bound: TokenRequestBound) -> Limit {
    match bound {
        TokenRequestBound::Nesting => Limit::Nesting,
        TokenRequestBound::Ttl => Limit::TokenTtlMaxMs,
        TokenRequestBound::NonceShort => Limit::NonceCharactersMin,
        TokenRequestBound::NonceLong => Limit::NonceCharactersMax,
    }
}

/// The text, with empty treated as absent.
fn given(text: Option<&str>) -> Option<&str> {
    text.filter(|text| !text.is_empty())
}
