//! The request that carries events to a webhook: its headers and its signature, in the format of
//! `docs/guides/webhooks.md`.

use hmac::{Hmac, KeyInit as _, Mac as _};
use sha2::Sha256;

/// Name of the header with the account.
pub const ACCOUNT_ID: &str = "x-service-account-id";
/// Name of the header with the channel, percent-encoded as in a path ([`crate::path::encode_channel`]).
pub const CHANNEL: &str = "x-service-channel";
/// Name of the header with `channel.message`, `channel.presence`, `channel.occupied` or `channel.vacated`.
pub const SOURCE: &str = "x-service-source";
/// Name of the header with the id of the batch, the same on every retry.
pub const EVENT_ID: &str = "x-service-event-id";
/// Name of the header with the id of the integration or of the queue's rule.
pub const RULE_ID: &str = "x-service-rule-id";
/// Name of the header with the time of the attempt, in epoch milliseconds.
pub const TIMESTAMP: &str = "x-service-timestamp";
/// Name of the header with the [`signature`].
pub const SIGNATURE: &str = "x-service-signature";

const VERSION: &str = "v1=";

/// Computes `v1=` and the HMAC-SHA256 of timestamp, full stop and body, in hexadecimal.
pub fn signature(secret: &[u8], timestamp: &str, body: &[u8]) -> String {
    let digest = mac(secret, timestamp, body).finalize().into_bytes();
    digest.iter().fold(VERSION.to_owned(), |mut text, byte| {
        text.extend([byte >> 4, byte & 15].map(|digit| char::from(b"0123456789abcdef"[usize::from(digit)])));
        text
    })
}

/// Tells whether `signature` is that of timestamp and body. The comparison takes the same time wherever they
/// differ.
pub fn is_signed(secret: &[u8], timestamp: &str, body: &[u8], signature: &str) -> bool {
    let digest = signature.strip_prefix(VERSION).and_then(unhexed);
    digest.is_some_and(|digest| mac(secret, timestamp, body).verify_slice(&digest).is_ok())
}

fn mac(secret: &[u8], timestamp: &str, body: &[u8]) -> Hmac<Sha256> {
    let mut mac = Hmac::<Sha256>::new_from_slice(secret).expect("HMAC takes a key of any length");
    mac.update(timestamp.as_bytes());
    mac.update(b".");
    mac.update(body);
    mac
}

fn unhexed(text: &str) -> Option<[u8; 32]> {
    let mut bytes = [0; 32];
    if text.len() != 2 * bytes.len() {
        return None;
    }
    for (byte, digits) in bytes.iter_mut().zip(text.as_bytes().chunks(2)) {
        let digit = |place: usize| char::from(digits[place]).to_digit(16);
        *byte = u8::try_from((digit(0)? << 4) | digit(1)?).ok()?;
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Made with `printf '1764324000000.{"items":[]}' | openssl dgst -sha256 -hmac hook-secret`.
    const GOLDEN: &str = "v1=298350f13f0e9d6a9edb7c85f779f54f7fe515eae5bbf4a40dce5c4e75c9a851";

    #[test]
    fn a_signature_is_that_of_timestamp_and_body() {
        let (secret, timestamp, body) = (b"hook-secret", "1764324000000", br#"{"items":[]}"#);
        assert_eq!(signature(secret, timestamp, body), GOLDEN);
        assert!(is_signed(secret, timestamp, body, GOLDEN));
        assert!(is_signed(secret, timestamp, body, &GOLDEN.to_uppercase().replace("V1", "v1")));
        for (secret, timestamp, body, signature) in [
            (&b"other"[..], timestamp, &body[..], GOLDEN),
            (secret, "1764324000001", body, GOLDEN),
            (secret, "176432400000", br#"0.{"items":[]}"#, GOLDEN),
            (secret, timestamp, br#"{"items":[1]}"#, GOLDEN),
            (secret, timestamp, body, &GOLDEN[3..]),
            (secret, timestamp, body, &GOLDEN[..66]),
            (secret, timestamp, body, &GOLDEN.replace("v1=", "v2=")),
            (secret, timestamp, body, ""),
            (secret, timestamp, body, &format!("v1={}", "é".repeat(32))),
        ] {
            assert!(!is_signed(secret, timestamp, body, signature), "{signature}");
        }
    }
}
