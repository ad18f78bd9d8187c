//! Reads a token for `fanfare token inspect`.

use serde_json::{Map, Value};

use super::jwt::{self, UnverifiedToken};
use super::refused::Reason;
use crate::accounts::Directory;
use crate::model::Limits;

/// A token, as far as it can be read.
#[derive(Debug)]
pub struct Inspection {
    pub key_name: Option<String>,
    pub claims: Map<String, Value>,
    /// The first rule that refuses the token. Revocation is unknown here.
    pub refused: Option<Reason>,
    /// The claim and what is wrong with it, for [`Reason::BadClaims`].
    pub detail: Option<String>,
}

/// Reads a token as a node does. Without a directory, the signature and the key's capability are not checked.
pub fn inspect(
    token: &str,
    directory: Option<&Directory>,
    limits: &Limits,
    audience: Option<&str>,
    now_ms: u64,
) -> Inspection {
    let unverified = match UnverifiedToken::read(token, limits) {
        Ok(unverified) => unverified,
        Err(reason) => {
            return Inspection { key_name: None, claims: Map::new(), refused: Some(reason), detail: None };
        }
    };
    let claims = unverified.claims_text(limits).and_then(|text| serde_json::from_str(&text).ok());
    let outcome = match directory {
        None => unverified.claimed(limits, audience, now_ms),
        Some(directory) => {
            let key = directory.key(&unverified.key_name);
            let is_signed = key.is_some_and(|key| unverified.is_signed_with(&key.secret));
            jwt::usable_key(key, is_signed).and_then(|key| {
                let granted = unverified.claimed(limits, audience, now_ms)?;
                granted.within(key)
            })
        }
    };
    let refused = outcome.err();
    let detail = (refused == Some(Reason::BadClaims)).then(|| unverified.bad_claim(limits));
    let key_name = Some(unverified.key_name);
    Inspection { key_name, claims: claims.unwrap_or_default(), refused, detail }
}
