//! TokenRequests and the text that they sign, tokens, their claims and their revocation.

#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::fmt;
use std::ops::RangeInclusive;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit as _, Mac as _};
use serde::de::{self, Deserializer, MapAccess, Visitor};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::Sha256;

use crate::json;
use crate::writer::Object;

/// Name of the claim with the capability map of a service JWT.
pub const CLAIM_CAPABILITY: &str = "x-service-capability";
/// Name of the claim with the client id that a service JWT forces.
pub const CLAIM_CLIENT_ID: &str = "x-service-client-id";

/// Limits for [`TokenRequest::parse`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRequestBounds {
    /// Levels of nesting of the body.
    pub nesting_max: usize,
    /// Greatest `ttl`, in milliseconds.
    pub ttl_ms_max: u64,
    /// Length of the nonce, in characters.
    pub nonce_characters: RangeInclusive<usize>,
}

/// A request for a token, signed if it has a `mac`.
///
/// Numbers are kept with the decimal text that was sent, which the MAC covers.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenRequest {
    /// Name of the key that signs.
    pub key_name: String,
    /// Lifetime of the token, in milliseconds; `None`: the node's default.
    pub ttl: Option<Decimal>,
    /// Capability map as JSON text; absent and empty both mean all that the key holds.
    pub capability: Option<String>,
    /// Client id that the token forces; absent and empty both mean none.
    pub client_id: Option<String>,
    /// Time of the signature, in epoch milliseconds.
    pub timestamp: Decimal,
    /// Text that is used once with the key and timestamp.
    pub nonce: String,
    /// [`mac`] of [`Self::signing_text`] under the key's secret; `None` in an unsigned request.
    pub mac: Option<String>,
}

/// An integer with the text by which it was sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decimal {
    /// Value of the text.
    pub value: u64,
    /// Decimal digits, as sent.
    pub text: String,
}

impl From<u64> for Decimal {
    fn from(value: u64) -> Self {
        Self { value, text: value.to_string() }
    }
}

/// Limits that a TokenRequest can be beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenRequestBound {
    /// Levels of nesting.
    Nesting,
    /// Greatest `ttl`.
    Ttl,
    /// Least length of the nonce.
    NonceShort,
    /// Greatest length of the nonce.
    NonceLong,
}

/// Reasons for which a body is no TokenRequest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenRequestError {
    /// Body that is malformed: HTTP 400 with a sentence that names the field and no value.
    Malformed(String),
    /// Well-formed value beyond a limit: HTTP 400.
    Beyond {
        /// Limit that the value is beyond.
        bound: TokenRequestBound,
        /// Sentence that names the field and no value.
        text: String,
    },
    /// Capability that is no text, in a body that is else well formed: HTTP 401 `invalid token request mac`,
    /// after the time of a MAC's computation.
    CapabilityNotText {
        /// Name of the key in the request.
        key_name: String,
    },
}

impl fmt::Display for TokenRequestError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Malformed(text) | Self::Beyond { text, .. } => f.write_str(text),
            Self::CapabilityNotText { .. } => f.write_str("invalid token request mac"),
        }
    }
}

impl std::error::Error for TokenRequestError {}

impl From<json::Error> for TokenRequestError {
    fn from(error: json::Error) -> Self {
        let text = error.to_string();
        match error {
            json::Error::Nesting { .. } => Self::Beyond { bound: TokenRequestBound::Nesting, text },
            json::Error::Utf8 | json::Error::LoneSurrogate => Self::Malformed(text),
        }
    }
}

impl TokenRequest {
    /// Reads a body and checks types, duplicate keys, control characters and the ranges of `ttl` and `nonce`.
    /// The caller checks key, time, client id and capability.
    ///
    /// # Errors
    /// [`TokenRequestError`] says what is wrong.
    pub fn parse(body: &[u8], bounds: &TokenRequestBounds) -> Result<Self, TokenRequestError> {
        let malformed = TokenRequestError::Malformed;
        let text = json::tidy(body, bounds.nesting_max)?;
        // Serde would quote a lone string in its error, and the string may be a key or a token.
        if !text.starts_with('{') {
            return Err(malformed("body must be an object".into()));
        }
        let fields: Fields<'_> =
            serde_json::from_str(&text).map_err(|error| malformed(json::error_text(&error)))?;
        fields.check(bounds)
    }

    /// Gives the text that is signed: keyName, ttl, capability, clientId, timestamp and nonce, each followed
    /// by a newline. An absent field is an empty line.
    pub fn signing_text(&self) -> String {
        let ttl = self.ttl.as_ref().map_or("", |ttl| &ttl.text);
        let capability = self.capability.as_deref().unwrap_or_default();
        let client_id = self.client_id.as_deref().unwrap_or_default();
        let Self { key_name, timestamp: Decimal { text: timestamp, .. }, nonce, .. } = self;
        format!("{key_name}\n{ttl}\n{capability}\n{client_id}\n{timestamp}\n{nonce}\n")
    }

    /// Sets the MAC.
    #[must_use]
    pub fn sign(mut self, secret: &[u8]) -> Self {
        self.mac = Some(mac(secret, &self.signing_text()));
        self
    }

    /// Writes the body to send.
    pub fn to_json(&self) -> String {
        let mut out = Vec::new();
        let mut object = Object::begin(&mut out);
        object.text("keyName", &self.key_name);
        if let Some(ttl) = &self.ttl {
            object.field("ttl").extend_from_slice(ttl.text.as_bytes());
        }
        object
            .text_if("capability", self.capability.as_deref())
            .text_if("clientId", self.client_id.as_deref());
        object.field("timestamp").extend_from_slice(self.timestamp.text.as_bytes());
        object.text("nonce", &self.nonce).text_if("mac", self.mac.as_deref()).end();
        String::from_utf8(out).expect("only UTF-8 is written")
    }
}

/// Shows the key's name alone, so that no MAC reaches a log.
impl fmt::Debug for TokenRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenRequest").field("key_name", &self.key_name).finish_non_exhaustive()
    }
}

/// Computes the HMAC-SHA256 of a text, in the standard base64 alphabet with padding.
pub fn mac(secret: &[u8], text: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes a key of any length");
    mac.update(text.as_bytes());
    STANDARD.encode(mac.finalize().into_bytes())
}

/// The answer to a TokenRequest.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenDetails {
    /// Service JWT. Secret.
    pub token: String,
    /// Name of the key that the token is of.
    pub key_name: String,
    /// Beginning of the token, in epoch milliseconds.
    pub issued: u64,
    /// End of the token, in epoch milliseconds.
    pub expires: u64,
    /// Capability map as JSON text: compact, with sorted keys and lists.
    pub capability: String,
    /// Client id that the token forces; `None` if it forces none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
}

/// Shows the key's name alone, so that no token reaches a log.
impl fmt::Debug for TokenDetails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenDetails").field("key_name", &self.key_name).finish_non_exhaustive()
    }
}

/// The body that revokes tokens of a key. `{}` revokes all that were issued until now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RevokeRequest {
    /// Client id that the tokens force; `None`: all tokens of the key.
    pub client_id: Option<String>,
    /// Time before which the tokens were issued, in epoch milliseconds; `None`: now.
    pub issued_before: Option<u64>,
}

impl RevokeRequest {
    /// Reads a body. An unknown field is refused: a misspelt one would revoke the tokens of all clients.
    ///
    /// # Errors
    /// [`TokenRequestError::Malformed`] names the field.
    pub fn parse(body: &[u8], nesting_max: usize) -> Result<Self, TokenRequestError> {
        let malformed = TokenRequestError::Malformed;
        let body = json::tidy(body, nesting_max)?;
        if !body.starts_with('{') {
            return Err(malformed("body must be an object".into()));
        }
        let fields: RevokeFields<'_> =
            serde_json::from_str(&body).map_err(|error| malformed(json::error_text(&error)))?;
        let issued_before = integer("issuedBefore", fields.issued_before)?;
        Ok(Self {
            client_id: text("clientId", fields.client_id)?,
            issued_before: issued_before.map(|decimal| decimal.value),
        })
    }
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct RevokeFields<'a> {
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    client_id: Option<&'a RawValue>,
    #[serde(borrow, default, deserialize_with = "json::present_ref")]
    issued_before: Option<&'a RawValue>,
}

/// The answer to a revocation: the tokens that no node accepts any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Revoked {
    /// Name of the key.
    pub key_name: String,
    /// Client id that the tokens force; `None`: all tokens of the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// Time before which the tokens were issued, in epoch milliseconds.
    pub issued_before: u64,
}

/// The claims of a service JWT, read from JSON text alone. A NumericDate (RFC 7519 §2) with a fraction is
/// rounded down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceClaims {
    /// Time at which the token was issued, in epoch seconds.
    #[serde(deserialize_with = "numeric_date")]
    pub iat: u64,
    /// End of the token, in epoch seconds.
    #[serde(deserialize_with = "numeric_date")]
    pub exp: u64,
    /// Beginning of the token, in epoch seconds; `None`: valid from the start.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "some_numeric_date")]
    pub nbf: Option<u64>,
    /// Services that the token is for; `None`: any.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "some")]
    pub aud: Option<Audience>,
    /// Capability map as JSON text.
    #[serde(rename = "x-service-capability")]
    pub capability: String,
    /// Client id that the token forces; `null` is refused.
    #[serde(
        rename = "x-service-client-id",
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some"
    )]
    pub client_id: Option<String>,
}

/// The claim `aud` (RFC 7519 §4.1.3).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Audience {
    /// Name of one service.
    One(String),
    /// List of names.
    Several(Vec<String>),
}

impl Audience {
    /// Tells whether the service is among the names.
    pub fn names(&self, service: &str) -> bool {
        match self {
            Self::One(name) => name == service,
            Self::Several(names) => names.iter().any(|name| name == service),
        }
    }
}

/// Reads a field that is present, so that `null` is refused rather than taken for absent.
fn some<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

fn some_numeric_date<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    numeric_date(deserializer).map(Some)
}

/// Reads a NumericDate from its text, since a float cannot hold every second with its fraction.
fn numeric_date<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let value = Box::<RawValue>::deserialize(deserializer)?;
    floored(value.get()).ok_or_else(|| de::Error::custom("a time must be a number of seconds, not negative"))
}

fn floored(number: &str) -> Option<u64> {
    if !number.starts_with(|first: char| first.is_ascii_digit()) {
        return None;
    }
    if number.contains(['e', 'E']) {
        let seconds: f64 = number.parse().ok()?;
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_sign_loss,
            reason = "within the range of a u64"
        )]
        return (0.0..u64::MAX as f64).contains(&seconds).then_some(seconds as u64);
    }
    number.split_once('.').map_or(number, |(seconds, _)| seconds).parse().ok()
}

/// The fields of a TokenRequest as JSON texts.
#[derive(Default)]
struct Fields<'a> {
    key_name: Option<&'a RawValue>,
    ttl: Option<&'a RawValue>,
    capability: Option<&'a RawValue>,
    client_id: Option<&'a RawValue>,
    timestamp: Option<&'a RawValue>,
    nonce: Option<&'a RawValue>,
    mac: Option<&'a RawValue>,
}

impl Fields<'_> {
    fn check(self, bounds: &TokenRequestBounds) -> Result<TokenRequest, TokenRequestError> {
        let timestamp = integer("timestamp", self.timestamp)?.ok_or_else(|| missing("timestamp"))?;
        let ttl = integer("ttl", self.ttl)?;
        let ttl_ms_max = bounds.ttl_ms_max;
        if let Some(ttl) = ttl.as_ref().filter(|ttl| !(1..=ttl_ms_max).contains(&ttl.value)) {
            let text = format!("ttl must be from 1 to {ttl_ms_max}");
            return Err(match ttl.value {
                0 => TokenRequestError::Malformed(text),
                _ => TokenRequestError::Beyond { bound: TokenRequestBound::Ttl, text },
            });
        }
        let nonce = text("nonce", self.nonce)?.ok_or_else(|| missing("nonce"))?;
        let characters = nonce.chars().count();
        if !bounds.nonce_characters.contains(&characters) {
            let (least, most) = bounds.nonce_characters.clone().into_inner();
            let text = format!("nonce must be {least} to {most} characters long");
            let is_short = characters < least;
            let bound = if is_short { TokenRequestBound::NonceShort } else { TokenRequestBound::NonceLong };
            return Err(TokenRequestError::Beyond { bound, text });
        }
        let key_name = text("keyName", self.key_name)?.ok_or_else(|| missing("keyName"))?;
        let client_id = text("clientId", self.client_id)?;
        let mac = text("mac", self.mac)?;
        // The capability comes last: an error of any other field goes before this one.
        if self.capability.is_some_and(|capability| !capability.get().starts_with('"')) {
            return Err(TokenRequestError::CapabilityNotText { key_name });
        }
        let capability = text("capability", self.capability)?;
        Ok(TokenRequest { key_name, ttl, capability, client_id, timestamp, nonce, mac })
    }
}

fn missing(field: &str) -> TokenRequestError {
    TokenRequestError::Malformed(format!("{field} is missing"))
}

/// Reads an integer of decimal digits alone. The text is signed, and no other spelling of a number has one
/// meaning for every signer.
fn integer(field: &str, value: Option<&RawValue>) -> Result<Option<Decimal>, TokenRequestError> {
    let Some(value) = value else { return Ok(None) };
    let text = value.get();
    let malformed = || TokenRequestError::Malformed(format!("{field} must be an integer written in digits"));
    if !text.bytes().all(|byte| byte.is_ascii_digit()) {
        return Err(malformed());
    }
    Ok(Some(Decimal { value: text.parse().map_err(|_| malformed())?, text: text.to_owned() }))
}

fn text(field: &str, value: Option<&RawValue>) -> Result<Option<String>, TokenRequestError> {
    let Some(value) = value else { return Ok(None) };
    let malformed = |what| TokenRequestError::Malformed(format!("{field} {what}"));
    let text = json::as_text(value).ok_or_else(|| malformed("must be a string"))?;
    // A newline could move text from one signed field to the next under the same MAC.
    if text.bytes().any(|byte| byte < 0x20) {
        return Err(malformed("holds a control character"));
    }
    Ok(Some(text.into_owned()))
}

impl<'de> Deserialize<'de> for Fields<'de> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(FieldsVisitor)
    }
}

struct FieldsVisitor;

impl<'de> Visitor<'de> for FieldsVisitor {
    type Value = Fields<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a TokenRequest object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Fields<'de>, A::Error> {
        let mut fields = Fields::default();
        let mut seen = HashSet::new();
        while let Some(name) = map.next_key::<String>()? {
            let value = Some(map.next_value()?);
            match name.as_str() {
                "keyName" => fields.key_name = value,
                "ttl" => fields.ttl = value,
                "capability" => fields.capability = value,
                "clientId" => fields.client_id = value,
                "timestamp" => fields.timestamp = value,
                "nonce" => fields.nonce = value,
                "mac" => fields.mac = value,
                _ => {}
            }
            if !seen.insert(name) {
                return Err(de::Error::custom("body holds a key twice"));
            }
        }
        Ok(fields)
    }
}
