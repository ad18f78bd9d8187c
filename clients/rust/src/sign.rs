//! Signing of TokenRequests and service JWTs with a key, without a call to a node.

use std::time::UNIX_EPOCH;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_proto::token;
use jsonwebtoken::{Algorithm, EncodingKey, Header};
use serde::{Deserialize, Serialize};

use crate::{Error, Key};

/// The parameters of a TokenRequest. An absent one is not sent and signs as an empty line.
#[derive(Debug, Clone, Default)]
pub struct TokenParams {
    /// Lifetime of the token, in milliseconds, at most 48 hours; `None`: an hour.
    pub ttl_ms: Option<u64>,
    /// Capability map as JSON text, signed and sent exactly as it is; `None`: all that the key holds.
    pub capability: Option<String>,
    /// Client id that the token forces on the connection; `None`: none.
    pub client_id: Option<String>,
    /// Time of the signature, in epoch milliseconds; `None`: now.
    pub timestamp_ms: Option<u64>,
    /// Text that is used once with the key and timestamp; `None`: 22 random characters.
    pub nonce: Option<String>,
}

/// A signed TokenRequest, to be posted as JSON to `/keys/{keyName}/requestToken`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TokenRequest {
    /// Name of the key that signs.
    pub key_name: String,
    /// Lifetime of the token, in milliseconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ttl: Option<u64>,
    /// Capability map as JSON text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub capability: Option<String>,
    /// Client id that the token forces.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub client_id: Option<String>,
    /// Time of the signature, in epoch milliseconds.
    pub timestamp: u64,
    /// Text that is used once with the key and timestamp.
    pub nonce: String,
    /// HMAC-SHA256 of the other fields, in base64.
    pub mac: String,
}

/// Signs a TokenRequest.
///
/// # Errors
/// No value is refused today.
pub fn token_request(key: &Key, params: TokenParams) -> Result<TokenRequest, Error> {
    let timestamp = params.timestamp_ms.unwrap_or_else(now_ms);
    let nonce = params.nonce.unwrap_or_else(random_nonce);
    let ttl = params.ttl_ms.map(|ttl| ttl.to_string()).unwrap_or_default();
    let capability = params.capability.as_deref().unwrap_or_default();
    let client_id = params.client_id.as_deref().unwrap_or_default();
    let text = format!("{}\n{ttl}\n{capability}\n{client_id}\n{timestamp}\n{nonce}\n", key.name());
    let mac = token::mac(key.secret().as_bytes(), &text);
    Ok(TokenRequest {
        key_name: key.name().into(),
        ttl: params.ttl_ms,
        capability: params.capability,
        client_id: params.client_id,
        timestamp,
        nonce,
        mac,
    })
}

/// The claims of a service JWT that a key's owner signs itself.
#[derive(Debug, Clone)]
pub struct JwtParams {
    /// Capability map as JSON text, within that of the key. A JWT must carry one.
    pub capability: String,
    /// Client id that the token forces on the connection; `None`: none.
    pub client_id: Option<String>,
    /// Time at which the token is issued, in epoch seconds; `None`: now.
    pub issued_s: Option<u64>,
    /// Lifetime from `issued_s`, in seconds, at most 48 hours.
    pub ttl_s: u64,
}

/// Signs a service JWT: HS256, with the key's name as `kid`.
///
/// # Errors
/// [`Error::BadValue`] if the claims cannot be signed.
pub fn jwt(key: &Key, params: &JwtParams) -> Result<String, Error> {
    #[derive(Serialize)]
    struct Claims<'a> {
        iat: u64,
        exp: u64,
        #[serde(rename = "x-service-capability")]
        capability: &'a str,
        #[serde(rename = "x-service-client-id", skip_serializing_if = "Option::is_none")]
        client_id: Option<&'a str>,
    }

    let issued_s = params.issued_s.unwrap_or_else(|| now_ms() / 1000);
    let claims = Claims {
        iat: issued_s,
        exp: issued_s.saturating_add(params.ttl_s),
        capability: &params.capability,
        client_id: params.client_id.as_deref(),
    };
    let header = Header { kid: Some(key.name().into()), ..Header::new(Algorithm::HS256) };
    jsonwebtoken::encode(&header, &claims, &EncodingKey::from_secret(key.secret().as_bytes()))
        .map_err(|e| Error::BadValue(format!("the token cannot be signed: {e}")))
}

fn random_nonce() -> String {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).expect("the operating system gives random bytes");
    URL_SAFE_NO_PAD.encode(bytes)
}

#[expect(clippy::disallowed_methods, reason = "a signer has the clock of its machine and no node's")]
fn now_ms() -> u64 {
    let since = std::time::SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key() -> Key {
        "secret.k1".parse().expect("a key")
    }

    #[test]
    fn a_token_request_signs_six_lines_and_sends_what_was_given() {
        let params = TokenParams {
            ttl_ms: Some(60_000),
            client_id: Some("ann".into()),
            timestamp_ms: Some(1_700_000_000_000),
            nonce: Some("0123456789abcdef".into()),
            ..TokenParams::default()
        };
        let request = token_request(&key(), params).expect("a request");
        let text = "k1\n60000\n\nann\n1700000000000\n0123456789abcdef\n";
        assert_eq!(request.mac, token::mac(b"secret", text));
        let json = serde_json::to_string(&request).expect("JSON");
        assert!(
            json.starts_with(r#"{"keyName":"k1","ttl":60000,"clientId":"ann","timestamp":1700000000000,"#)
        );
        assert!(!json.contains("capability"));
    }

    #[test]
    fn a_jwt_names_its_key_and_counts_in_seconds() {
        let params = JwtParams {
            capability: r#"{"*":["subscribe"]}"#.into(),
            client_id: None,
            issued_s: Some(1_700_000_000),
            ttl_s: 60,
        };
        let token = jwt(&key(), &params).expect("a token");
        let parts: Vec<_> =
            token.split('.').map(|part| URL_SAFE_NO_PAD.decode(part).expect("base64")).collect();
        let header: serde_json::Value = serde_json::from_slice(&parts[0]).expect("JSON");
        let claims: serde_json::Value = serde_json::from_slice(&parts[1]).expect("JSON");
        assert_eq!((header["alg"].as_str(), header["kid"].as_str()), (Some("HS256"), Some("k1")));
        assert_eq!(claims["exp"].as_u64(), Some(1_700_000_060));
        assert!(claims.get("x-service-client-id").is_none());
    }
}
