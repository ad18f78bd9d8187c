//! The service JWT: HS256 with a key's secret, `kid` naming the key.

use std::collections::HashSet;

use fanfare_proto::token::ServiceClaims;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, decode_header, encode};

use crate::accounts::{Key, Secret};
use crate::model::{Capability, ClientId, Limits};

/// What the claims of a verified token grant.
pub(super) struct Granted {
    pub(super) capability: Capability,
    pub(super) client_id: Option<ClientId>,
    pub(super) issued_s: u64,
    pub(super) expires_ms: u64,
}

/// The signature and nothing else: times are checked on the node's own clock, `aud` and `iss` mean nothing here.
pub(super) fn validation() -> Validation {
    let mut validation = Validation::new(Algorithm::HS256);
    validation.required_spec_claims = HashSet::new();
    validation.validate_exp = false;
    validation.validate_aud = false;
    validation
}

/// The `kid`, if the header is one that is understood.
pub(super) fn key_name(token: &str) -> Option<String> {
    let header = decode_header(token).ok()?;
    let understood = header.alg == Algorithm::HS256 && header.crit.is_none();
    header.kid.filter(|_| understood)
}

pub(super) fn verify(token: &str, secret: &Secret, validation: &Validation) -> Option<ServiceClaims> {
    let key = DecodingKey::from_secret(secret.as_bytes());
    Some(decode::<ServiceClaims>(token, &key, validation).ok()?.claims)
}

/// Everything about the claims that needs no key. The lifetime is also what catches an `exp` in milliseconds.
pub(super) fn check_claims(claims: &ServiceClaims, limits: &Limits, now_ms: u64) -> Option<Granted> {
    let lifetime_s = claims.exp.checked_sub(claims.iat)?;
    let expires_ms = claims.exp.checked_mul(1000)?;
    let timely = (1..=limits.jwt_lifetime_ms / 1000).contains(&lifetime_s)
        && claims.iat.checked_mul(1000)? <= now_ms.saturating_add(limits.jwt_ahead_ms)
        && now_ms < expires_ms;
    if !timely {
        return None;
    }
    Some(Granted {
        capability: Capability::parse_json(&claims.capability).ok()?,
        client_id: claims.client_id.as_deref().map(|id| ClientId::new(id, limits)).transpose().ok()?,
        issued_s: claims.iat,
        expires_ms,
    })
}

pub(super) fn issue(key: &Key, claims: &ServiceClaims) -> String {
    let header = Header { kid: Some(key.name.to_string()), ..Header::new(Algorithm::HS256) };
    encode(&header, claims, &EncodingKey::from_secret(key.secret.as_bytes()))
        .expect("HS256 takes a secret of any length, and claims are plain JSON")
}
