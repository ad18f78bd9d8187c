//! TokenRequests, what they sign, and the claims of a service JWT.

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

pub const CLAIM_CAPABILITY: &str = "x-service-capability";
pub const CLAIM_CLIENT_ID: &str = "x-service-client-id";

/// What the form of a TokenRequest is held against.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRequestBounds {
    pub nesting_max: usize,
    pub ttl_ms_max: u64,
    pub nonce_characters: RangeInclusive<usize>,
}

/// The signed request for a token; without `mac` it is the body of an unsigned exchange.
///
/// Numbers are kept beside the exact decimal text that was sent, which is what the MAC covers.
#[derive(Clone, PartialEq, Eq)]
pub struct TokenRequest {
    pub key_name: String,
    pub ttl: Option<Decimal>,
    /// The capability map as JSON text; absent and empty mean the same.
    pub capability: Option<String>,
    /// Absent and empty mean the same.
    pub client_id: Option<String>,
    /// Epoch milliseconds.
    pub timestamp: Decimal,
    pub nonce: String,
    pub mac: Option<String>,
}

/// An integer with the text it was sent as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Decimal {
    pub value: u64,
    pub text: String,
}

impl From<u64> for Decimal {
    fn from(value: u64) -> Self {
        Self { value, text: value.to_string() }
    }
}

/// A bound that a TokenRequest is beyond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TokenRequestBound {
    Nesting,
    Ttl,
    NonceShort,
    NonceLong,
}

/// Why a body is no TokenRequest.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TokenRequestError {
    /// HTTP 400; the text names the field and no value.
    Malformed(String),
    /// The same of a value that is well formed.
    Beyond { bound: TokenRequestBound, text: String },
    /// All else is well formed: HTTP 401 `invalid token request mac`, after a MAC computation.
    CapabilityNotText { key_name: String },
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
    /// Reads a body. Checked here: types, duplicate keys, control characters, the ranges of `ttl` and `nonce`.
    /// The key, the time, the clientId and what the capability says are the caller's to check.
    pub fn parse(body: &[u8], bounds: &TokenRequestBounds) -> Result<Self, TokenRequestError> {
        let malformed = TokenRequestError::Malformed;
        let text = json::tidy(body, bounds.nesting_max)?;
        // Serde would quote a lone string in its error, and that may be a key or a token.
        if !text.starts_with('{') {
            return Err(malformed("body must be an object".into()));
        }
        let fields: Fields<'_> =
            serde_json::from_str(&text).map_err(|error| malformed(json::error_text(&error)))?;
        fields.check(bounds)
    }

    /// keyName, ttl, capability, clientId, timestamp and nonce, each followed by a newline.
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

    /// The body to send.
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

/// By hand, so that no MAC reaches a log.
impl fmt::Debug for TokenRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenRequest").field("key_name", &self.key_name).finish_non_exhaustive()
    }
}

/// HMAC-SHA256 in the standard base64 alphabet with padding.
pub fn mac(secret: &[u8], text: &str) -> String {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes a key of any length");
    mac.update(text.as_bytes());
    STANDARD.encode(mac.finalize().into_bytes())
}

/// What the exchange answers. Times in epoch milliseconds, `capability` the canonical map as JSON text.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenDetails {
    pub token: String,
    pub key_name: String,
    pub issued: u64,
    pub expires: u64,
    pub capability: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
}

/// By hand, so that no token reaches a log.
impl fmt::Debug for TokenDetails {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("TokenDetails").field("key_name", &self.key_name).finish_non_exhaustive()
    }
}

/// The body that takes back tokens of a key; `{}` is all of them that were issued until now.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RevokeRequest {
    /// Only tokens that force this clientId.
    pub client_id: Option<String>,
    /// Only tokens issued before it, in epoch milliseconds.
    pub issued_before: Option<u64>,
}

impl RevokeRequest {
    /// Reads a body. An unknown field is refused: misspelt, it would take back the tokens of everybody.
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

/// What is refused from now on. `issued_before` in epoch milliseconds.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Revoked {
    pub key_name: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    pub issued_before: u64,
}

/// The claims of a service JWT; times in epoch seconds. A NumericDate with a fraction is floored.
///
/// Only JSON text is read into it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ServiceClaims {
    #[serde(deserialize_with = "numeric_date")]
    pub iat: u64,
    #[serde(deserialize_with = "numeric_date")]
    pub exp: u64,
    /// From when on the token is valid.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "some_numeric_date")]
    pub nbf: Option<u64>,
    /// The services that the token is for.
    #[serde(default, skip_serializing_if = "Option::is_none", deserialize_with = "some")]
    pub aud: Option<Audience>,
    /// The capability map as JSON text.
    #[serde(rename = "x-service-capability")]
    pub capability: String,
    /// Forced on the connection when present; `null` is refused.
    #[serde(
        rename = "x-service-client-id",
        default,
        skip_serializing_if = "Option::is_none",
        deserialize_with = "some"
    )]
    pub client_id: Option<String>,
}

/// RFC 7519 §4.1.3: one name, or a list of names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Audience {
    One(String),
    Several(Vec<String>),
}

impl Audience {
    pub fn names(&self, service: &str) -> bool {
        match self {
            Self::One(name) => name == service,
            Self::Several(names) => names.iter().any(|name| name == service),
        }
    }
}

/// Present, so that `null` is not taken for absent.
fn some<'de, D: Deserializer<'de>, T: Deserialize<'de>>(deserializer: D) -> Result<Option<T>, D::Error> {
    T::deserialize(deserializer).map(Some)
}

fn some_numeric_date<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<u64>, D::Error> {
    numeric_date(deserializer).map(Some)
}

/// From the text of the number, since a float cannot hold every second with its fraction.
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

/// The fields of a TokenRequest, each still as text.
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
        // Last, because anything malformed goes before it.
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

/// Digits only: the text is signed, and no other spelling of a number has one meaning for every signer.
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

#[cfg(test)]
mod tests {
    use super::*;

    /// RFC 4231, case 2.
    #[test]
    fn a_mac_is_padded_base64_of_hmac_sha256() {
        let expected = "W9zBRr9gdU5qBCQmCJV1x1oAPwidJzmDnexYuWTsOEM=";
        assert_eq!(mac(b"Jefe", "what do ya want for nothing?"), expected);
    }

    #[test]
    fn a_numeric_date_is_floored() {
        for (text, seconds) in [
            ("1767225600", Some(1_767_225_600)),
            ("1767225600.5", Some(1_767_225_600)),
            ("1767225600.99999999999999999", Some(1_767_225_600)),
            ("1.7672256005e9", Some(1_767_225_600)),
            ("17672256005E-1", Some(1_767_225_600)),
            ("0.9", Some(0)),
            ("18446744073709551616", None),
            ("1e30", None),
            ("-1", None),
            ("-0.5", None),
            ("\"1767225600\"", None),
            ("null", None),
            ("[1]", None),
        ] {
            assert_eq!(floored(text), seconds, "{text}");
        }
    }

    #[test]
    fn an_audience_is_a_name_or_several() {
        let names = |text: &str| serde_json::from_str::<Audience>(text).map(|aud| aud.names("chat"));
        for (text, expected) in [
            (r#""chat""#, Some(true)),
            (r#"["other","chat"]"#, Some(true)),
            (r#""chat2""#, Some(false)),
            ("[]", Some(false)),
            ("null", None),
            ("{}", None),
            (r#"["chat",1]"#, None),
        ] {
            assert_eq!(names(text).ok(), expected, "{text}");
        }
    }

    #[test]
    fn an_error_repeats_nothing_of_the_body() {
        let bounds =
            TokenRequestBounds { nesting_max: 64, ttl_ms_max: 172_800_000, nonce_characters: 16..=128 };
        for body in [
            r#""k:hush""#,
            r#"["hush"]"#,
            r#"{"keyName":"k","nonce":"hush\n","timestamp":1}"#,
            r#"{"keyName":"k","nonce":"0123456789abcdef","timestamp":"hush"}"#,
            r#"{"hush":1,"hush":2}"#,
            r#"{"mac":hush}"#,
        ] {
            let error = TokenRequest::parse(body.as_bytes(), &bounds).expect_err(body);
            assert!(!error.to_string().contains("hush"), "{body}: {error}");
        }
    }
}
