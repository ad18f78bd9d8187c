//! Forged credentials.

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use hmac::{Hmac, KeyInit, Mac};
use serde_json::Value;
use sha2::{Sha256, Sha384, Sha512};

/// Signature of a forged JWT.
#[derive(Debug, Clone, Copy)]
pub enum Signature {
    Hs256,
    Hs384,
    Hs512,
    Empty,
}

/// Makes a JWT with any header and claims, signed with any secret.
pub fn jwt(header: &Value, claims: &Value, secret: &str, signature: Signature) -> String {
    let text = format!("{}.{}", part(header), part(claims));
    let (secret, bytes) = (secret.as_bytes(), text.as_bytes());
    let signature = match signature {
        Signature::Hs256 => mac::<Hmac<Sha256>>(secret, bytes),
        Signature::Hs384 => mac::<Hmac<Sha384>>(secret, bytes),
        Signature::Hs512 => mac::<Hmac<Sha512>>(secret, bytes),
        Signature::Empty => Vec::new(),
    };
    format!("{text}.{}", URL_SAFE_NO_PAD.encode(signature))
}

/// Makes the `mac` of a TokenRequest over any text.
pub fn token_request_mac(secret: &str, text: &str) -> String {
    STANDARD.encode(mac::<Hmac<Sha256>>(secret.as_bytes(), text.as_bytes()))
}

fn part(value: &Value) -> String {
    URL_SAFE_NO_PAD.encode(value.to_string())
}

fn mac<M: Mac + KeyInit>(secret: &[u8], bytes: &[u8]) -> Vec<u8> {
    let mut mac = <M as KeyInit>::new_from_slice(secret).expect("a secret of any length");
    mac.update(bytes);
    mac.finalize().into_bytes().to_vec()
}
