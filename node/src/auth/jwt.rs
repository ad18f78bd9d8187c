//! The service JWT: HS256 with a key's secret, `kid` naming the key.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::json as text;
use fanfare_proto::token::ServiceClaims;
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, crypto, encode};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::{Map, Value, json};

use super::refused::Reason;
use crate::accounts::{Key, Secret};
use crate::model::{Capability, ClientId, Limits};
use crate::telemetry::Limit;

const CAPABILITY: &str = "x-service-capability";
const CLIENT_ID: &str = "x-service-client-id";
const TIME: &str = "must be a number of seconds since 1970";
/// Bound above which milliseconds overflow u64.
const SECONDS_MAX: f64 = (u64::MAX / 1000) as f64;
/// Bound of a fault's text in the log, which may quote a name of the token.
const FAULT_CHARS_MAX: usize = 200;

/// A token whose signature is still to be verified.
#[derive(Debug)]
pub(super) struct UnverifiedToken<'a> {
    /// Key name as the header has it, in any form.
    pub(super) key_name: String,
    /// Signed text: header and claims.
    signed: &'a str,
    claims: &'a str,
    signature: &'a str,
}

/// The grant by the claims of a verified token.
#[derive(Debug)]
pub(super) struct TokenGrant {
    pub(super) capability: Capability,
    pub(super) client_id: Option<ClientId>,
    pub(super) issued_s: u64,
    pub(super) expires_ms: u64,
}

/// The relevant fields of a header. `crit` lists extensions that must be understood, and none is.
#[derive(Deserialize)]
struct JwtHeader {
    alg: String,
    kid: Option<String>,
    crit: Option<IgnoredAny>,
}

impl<'a> UnverifiedToken<'a> {
    pub(super) fn read(token: &'a str, limits: &Limits) -> Result<Self, Reason> {
        if token.len() > limits.token_bytes {
            Limit::TokenBytes.hit();
            return Err(Reason::TooLong);
        }
        let (signed, signature) = token.rsplit_once('.').ok_or(Reason::Malformed)?;
        let (header, claims) = signed.split_once('.').ok_or(Reason::Malformed)?;
        let header = counted_object(header, limits).ok_or(Reason::Malformed)?;
        let header: JwtHeader = serde_json::from_str(&header).map_err(|_| Reason::Malformed)?;
        if header.alg != "HS256" || header.crit.is_some() {
            return Err(Reason::Unsupported);
        }
        let key_name = header.kid.ok_or(Reason::NoKid)?;
        Ok(Self { key_name, signed, claims, signature })
    }

    pub(super) fn is_signed_with(&self, secret: &Secret) -> bool {
        let key = DecodingKey::from_secret(secret.as_bytes());
        crypto::verify(self.signature, self.signed.as_bytes(), &key, Algorithm::HS256).unwrap_or(false)
    }

    /// The grant by the claims; the caller checks the signature.
    pub(super) fn claimed(
        &self,
        limits: &Limits,
        audience: Option<&str>,
        now_ms: u64,
    ) -> Result<TokenGrant, Reason> {
        let claims = counted_object(self.claims, limits).ok_or(Reason::BadClaims)?;
        check_claims(&claims, limits, audience, now_ms)
    }

    /// The claim for which [`UnverifiedToken::claimed`] returns [`Reason::BadClaims`], and its fault.
    pub(super) fn bad_claim(&self, limits: &Limits) -> String {
        let claims = self.claims_text(limits).and_then(|text| serde_json::from_str(&text).ok());
        let Some(claims) = claims else {
            return "the claims are no JSON object, not UTF-8, or nested deeper than the limit nesting"
                .to_owned();
        };
        let mut fault = fault_of(&claims, limits);
        if let Some((end, _)) = fault.char_indices().nth(FAULT_CHARS_MAX) {
            fault.truncate(end);
        }
        fault
    }

    /// JSON text of the claims; `None` if they are no object, not UTF-8, or nested too deep.
    pub(super) fn claims_text(&self, limits: &Limits) -> Option<String> {
        object(self.claims, limits)
    }
}

impl TokenGrant {
    /// The grant, unless it exceeds the key's capability.
    pub(super) fn within(self, key: &Key) -> Result<Self, Reason> {
        match self.capability.is_subset_of(&key.capability) {
            true => Ok(self),
            false => Err(Reason::CapabilityExceedsKey),
        }
    }
}

/// The key that a token names, if that key signed the token.
pub(super) fn usable_key(key: Option<&Arc<Key>>, is_signed: bool) -> Result<&Arc<Key>, Reason> {
    let key = key.ok_or(Reason::UnknownKey)?;
    if !is_signed {
        return Err(Reason::BadSignature);
    }
    if key.active { Ok(key) } else { Err(Reason::RevokedKey) }
}

/// The text of a part that is a JSON object.
fn object(part: &str, limits: &Limits) -> Option<String> {
    read_object(part, limits, || {})
}

/// The text of a part that is a JSON object; counts a part that is nested too deep.
fn counted_object(part: &str, limits: &Limits) -> Option<String> {
    read_object(part, limits, || Limit::Nesting.hit())
}

fn read_object(part: &str, limits: &Limits, too_deep: impl FnOnce()) -> Option<String> {
    let bytes = URL_SAFE_NO_PAD.decode(part).ok()?;
    let tidied = text::tidy(&bytes, limits.nesting);
    if matches!(tidied, Err(text::Error::Nesting { .. })) {
        too_deep();
    }
    let tidied = tidied.ok()?;
    tidied.starts_with('{').then(|| tidied.into_owned())
}

/// Checks everything about the claims that needs no key. The lifetime check also catches an `exp` in milliseconds.
fn check_claims(
    text: &str,
    limits: &Limits,
    audience: Option<&str>,
    now_ms: u64,
) -> Result<TokenGrant, Reason> {
    let bad = Reason::BadClaims;
    let claims: ServiceClaims = serde_json::from_str(text).map_err(|_| bad)?;
    let ms = |seconds: u64| seconds.checked_mul(1000).ok_or(bad);
    let lifetime_s = claims.exp.checked_sub(claims.iat).ok_or(Reason::Lifetime)?;
    let (issued_ms, expires_ms) = (ms(claims.iat)?, ms(claims.exp)?);
    if !(1..=limits.jwt_lifetime_ms / 1000).contains(&lifetime_s) {
        return Err(Reason::Lifetime);
    }
    if expires_ms <= now_ms {
        return Err(Reason::Expired);
    }
    if issued_ms > now_ms.saturating_add(limits.jwt_ahead_ms) {
        return Err(Reason::IssuedInFuture);
    }
    if claims.nbf.is_some_and(|nbf| nbf.saturating_mul(1000) > now_ms) {
        return Err(Reason::NotYetValid);
    }
    if claims.aud.is_some_and(|aud| !audience.is_some_and(|own| aud.names(own))) {
        return Err(Reason::WrongAudience);
    }
    Ok(TokenGrant {
        capability: Capability::parse_json(&claims.capability).map_err(|_| bad)?,
        client_id: claims
            .client_id
            .as_deref()
            .map(|id| {
                ClientId::new(id, limits)
                    .inspect_err(|error| Limit::ClientIdBytes.hit_if(error.is_too_long()))
            })
            .transpose()
            .map_err(|_| bad)?,
        issued_s: claims.iat,
        expires_ms,
    })
}

/// Names the first claim that can never be accepted, in reading order.
fn fault_of(claims: &Map<String, Value>, limits: &Limits) -> String {
    for (name, is_needed, expected) in [
        ("iat", true, TIME),
        ("exp", true, TIME),
        ("nbf", false, TIME),
        ("aud", false, "must be a name or a list of names"),
        (CAPABILITY, true, "must be a string that holds JSON text, not an object"),
        (CLIENT_ID, false, "must be a string"),
    ] {
        let Some(value) = claims.get(name) else {
            if is_needed {
                return format!("{name} is missing");
            }
            continue;
        };
        let mut sample = json!({"iat": 1, "exp": 2, CAPABILITY: ""});
        sample[name] = value.clone();
        if serde_json::from_value::<ServiceClaims>(sample).is_err() {
            return format!("{name} {expected}");
        }
        let text = value.as_str().unwrap_or_default();
        let fault = match name {
            CAPABILITY => Capability::parse_json(text).err().map(|error| error.to_string()),
            CLIENT_ID => ClientId::new(text, limits).err().map(|error| error.to_string()),
            "iat" | "exp" if value.as_f64().is_some_and(|seconds| seconds > SECONDS_MAX) => {
                Some("is no time in seconds".to_owned())
            }
            _ => None,
        };
        if let Some(fault) = fault {
            return format!("{name}: {fault}");
        }
    }
    "a claim is given twice".to_owned()
}

pub(super) fn issue(key: &Key, claims: &ServiceClaims) -> String {
    let header = Header { kid: Some(key.name.to_string()), ..Header::new(Algorithm::HS256) };
    encode(&header, claims, &EncodingKey::from_secret(key.secret.as_bytes()))
        .expect("HS256 takes a secret of any length, and claims are plain JSON")
}
