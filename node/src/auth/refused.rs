//! Refusals of credentials: counted and logged for the operator, with no detail for the client.

use std::fmt;
use std::net::IpAddr;

use crate::accounts::{Directory, is_key_name};
use crate::telemetry::Repeats;

const FAILURES: &str = "fanfare_auth_failures_total";

macro_rules! reasons {
    ($($variant:ident $name:literal $text:literal)*) => {
        /// The rule that refused a credential.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Reason {
            $(#[doc = $text] $variant),*
        }

        impl Reason {
            pub const ALL: &[Self] = &[$(Self::$variant),*];

            /// The label of the metric and the field of the log.
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$variant => $name),*
                }
            }
        }

        /// A sentence without a full stop.
        impl fmt::Display for Reason {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(match self {
                    $(Self::$variant => $text),*
                })
            }
        }
    };
}

reasons! {
    Missing "missing" "no credential was sent"
    Conflicting "conflicting" "several different credentials were sent"
    Malformed "malformed" "the credential or the token request cannot be read"
    TooLong "too_long" "the token is longer than the limit token_bytes"
    Unsupported "unsupported" "the header of the token asks for another algorithm than HS256, or for an extension"
    NoKid "no_kid" "the header of the token names no key (kid)"
    UnknownKey "unknown_key" "the directory has no key of this name"
    RevokedKey "revoked_key" "the key is revoked"
    BadSecret "bad_secret" "the secret is not that of the key"
    BadSignature "bad_signature" "the signature of the token is not made with the secret of its key"
    BadMac "bad_mac" "the token request is not signed with the secret of its key, or is unsigned and without the key"
    BadClaims "bad_claims" "a claim is missing, of another type, or has a value that is never accepted"
    Lifetime "lifetime" "the token's exp is not after its iat, or is further from it than the limit jwt_lifetime_ms"
    Expired "expired" "the token has expired (exp)"
    IssuedInFuture "issued_in_future" "the token's iat is further ahead of the clock than the limit jwt_ahead_ms"
    NotYetValid "not_yet_valid" "the token is not valid yet (nbf)"
    WrongAudience "wrong_audience" "the token is for another service (aud), or the setting audience is not given"
    CapabilityExceedsKey "capability_exceeds_key" "the capability goes beyond that of the key"
    Revoked "revoked" "the token was revoked"
    OtherKey "other_key" "the credential beside the token request is of another key"
    OtherAccount "other_account" "the new token of a connection is of another account"
    OtherClientId "other_client_id" "the credential is for another clientId"
    Timestamp "timestamp" "the timestamp of the token request is too far from the clock"
    NonceUsed "nonce_used" "the nonce of the token request has been used"
}

/// A refused credential, with the name of its key if the operator may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RefusedCredential {
    pub reason: Reason,
    key_name: Option<Box<str>>,
    /// The claim and its fault, for [`Reason::BadClaims`] of a token with a valid signature.
    detail: Option<Box<str>>,
}

impl RefusedCredential {
    /// A refusal. `key_name` is dropped unless it has the form of one.
    pub(super) fn of(key_name: &str, reason: Reason) -> Self {
        Self { reason, key_name: is_key_name(key_name).then(|| key_name.into()), detail: None }
    }

    pub(super) fn with_detail(self, detail: Option<String>) -> Self {
        Self { detail: detail.map(String::into_boxed_str), ..self }
    }
}

impl From<Reason> for RefusedCredential {
    fn from(reason: Reason) -> Self {
        Self { reason, key_name: None, detail: None }
    }
}

/// Counts every refusal, and logs each reason and known key at a limited rate.
pub(super) struct RefusalLog(Repeats);

impl RefusalLog {
    pub(super) fn new() -> Self {
        for reason in Reason::ALL {
            metrics::counter!(FAILURES, "reason" => reason.name()).increment(0);
        }
        Self(Repeats::default())
    }

    pub(super) fn note(&self, refused: &RefusedCredential, address: Option<IpAddr>, directory: &Directory) {
        let RefusedCredential { reason, key_name, detail } = refused;
        metrics::counter!(FAILURES, "reason" => reason.name()).increment(1);
        let known = key_name.as_deref().filter(|name| directory.key(name).is_some());
        // Unknown names share one entry, or a client could fill the log with invented ones.
        let Some(held_back) = self.0.happens(&(reason, known)) else { return };
        let kid = key_name.as_deref().and_then(|name| directory.loggable(name));
        let address = address.map(tracing::field::display);
        let detail = detail.as_deref();
        tracing::info!(reason = reason.name(), detail, kid, address, held_back, "credential refused");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_name_is_kept_only_in_the_form_of_one() {
        let kept = |name: &str| RefusedCredential::of(name, Reason::UnknownKey).key_name.is_some();
        assert!(kept("k1") && kept(&"k".repeat(64)));
        for name in ["", "secret.k1", "k\n1", "k\u{e9}", "a b", &"k".repeat(65)] {
            assert!(!kept(name), "{name:?}");
        }
    }

    #[test]
    fn no_two_reasons_have_one_name() {
        let names: std::collections::HashSet<_> = Reason::ALL.iter().map(|reason| reason.name()).collect();
        assert_eq!(names.len(), Reason::ALL.len());
    }
}
