//! The secret of a key, hidden from all output.

use std::fmt;

use sha2::{Digest as _, Sha256};
use subtle::ConstantTimeEq as _;

/// The secret part of an API key: not empty, no `:`, no control characters; may contain dots.
#[derive(Clone)]
pub struct Secret {
    text: Box<str>,
    digest: [u8; 32],
}

impl Secret {
    /// Checks a secret. The error says what is wrong without showing the text.
    pub fn new(text: &str) -> Result<Self, &'static str> {
        if text.is_empty() {
            return Err("must not be empty");
        }
        if text.contains(':') {
            return Err("must not hold a colon");
        }
        if text.chars().any(char::is_control) {
            return Err("must not hold a control character");
        }
        Ok(Self { text: text.into(), digest: Sha256::digest(text).into() })
    }

    /// The text, for a service that needs it.
    pub fn as_str(&self) -> &str {
        &self.text
    }

    /// The bytes, for signing and for checking signatures.
    pub fn as_bytes(&self) -> &[u8] {
        self.text.as_bytes()
    }

    /// Compares digests, so that the time reveals neither content nor length.
    pub fn matches(&self, candidate: &[u8]) -> bool {
        let candidate: [u8; 32] = Sha256::digest(candidate).into();
        self.digest.ct_eq(&candidate).into()
    }
}

impl PartialEq for Secret {
    fn eq(&self, other: &Self) -> bool {
        self.digest.ct_eq(&other.digest).into()
    }
}

impl Eq for Secret {}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("[redacted]")
    }
}
