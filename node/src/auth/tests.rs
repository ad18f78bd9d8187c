//! The rules of credentials as tables, over a directory, a manual clock and a store in memory.

mod credentials;
mod exchange;
mod jwt;
mod principal;
mod refused;
mod revocation;

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use base64::Engine as _;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use parking_lot::Mutex;
use serde_json::{Value, json};

use super::*;
use crate::model::{Nonce, Revocation};
use crate::testing::DirectoryText;

const NOW_MS: u64 = 1_767_225_600_500;
const NOW_S: u64 = NOW_MS / 1000;

fn directory() -> DirectoryText {
    DirectoryText::default()
        .account("acme")
        .key_with("k1", secret_of("k1"), "active", r#"{ "*" = ["subscribe", "publish", "history"] }"#)
        .key_with("narrow", secret_of("narrow"), "active", r#"{ "chat:*" = ["publish", "subscribe"] }"#)
        .key_with("gone", secret_of("gone"), "revoked", r#"{ "*" = ["publish"] }"#)
}

const PUBLISH: &str = r#"{"*":["publish"]}"#;

#[derive(Clone, Default)]
struct AuthTestTokens {
    claimed: Arc<Mutex<HashSet<Nonce>>>,
    requests: Arc<AtomicUsize>,
    kept: Arc<Mutex<Vec<Revocation>>>,
    down: Arc<AtomicBool>,
}

impl TokenStore for AuthTestTokens {
    fn claim_nonce(&self, nonce: Nonce) -> NonceClaim {
        let down = self.down.load(Ordering::Relaxed);
        self.requests.fetch_add(1, Ordering::Relaxed);
        let new = !down && self.claimed.lock().insert(nonce);
        Box::pin(async move { if down { Err(TokenStoreError) } else { Ok(new) } })
    }

    fn keep_revocation(&self, revocation: Revocation) -> RevocationWrite {
        let down = self.down.load(Ordering::Relaxed);
        if !down {
            self.kept.lock().push(revocation);
        }
        Box::pin(async move { if down { Err(TokenStoreError) } else { Ok(()) } })
    }
}

struct AuthFixture {
    auth: Authenticator,
    tokens: AuthTestTokens,
    clock: Clock,
}

impl AuthFixture {
    fn new() -> Self {
        Self::with(true)
    }

    fn with(auth_on: bool) -> Self {
        Self::over(Accounts::from_text(directory().text()).unwrap(), auth_on)
    }

    fn over(accounts: Arc<Accounts>, auth_on: bool) -> Self {
        Self::build(accounts, &Limits::default(), auth_on)
    }

    fn limited(limits: &Limits) -> Self {
        Self::build(Accounts::from_text(directory().text()).unwrap(), limits, true)
    }

    fn build(accounts: Arc<Accounts>, limits: &Limits, auth_on: bool) -> Self {
        let (tokens, clock) = (AuthTestTokens::default(), Clock::manual(NOW_MS));
        let auth = Authenticator::new(accounts, tokens.clone(), clock.clone(), limits, auth_on);
        Self { auth, tokens, clock }
    }

    fn http(&self, headers: &[&str]) -> Result<Principal, Unauthorized> {
        let authorization = headers.iter().map(|value| value.as_bytes()).collect();
        self.auth.authenticate(&Credentials {
            authorization,
            query: "accessToken=x&clientId=y",
            socket: false,
            address: None,
        })
    }

    fn socket(&self, headers: &[&str], query: &str) -> Result<Principal, Unauthorized> {
        let authorization = headers.iter().map(|value| value.as_bytes()).collect();
        self.auth.authenticate(&Credentials { authorization, query, socket: true, address: None })
    }
}

fn secret_of(key: &str) -> &'static str {
    match key {
        "k1" => "s.e.c",
        "narrow" => "narrow-secret",
        "gone" => "gone-secret",
        _ => "a-secret-of-nobody",
    }
}

fn basic(key: &str) -> String {
    format!("Basic {}", STANDARD.encode(key))
}

fn claims() -> Value {
    json!({ "iat": NOW_S, "exp": NOW_S + 3600, "x-service-capability": PUBLISH })
}

fn sign_with(header: &Header, claims: &Value, secret: &str) -> String {
    encode(header, claims, &EncodingKey::from_secret(secret.as_bytes())).unwrap()
}

fn header(key: &str) -> Header {
    Header { kid: Some(key.to_owned()), ..Header::new(Algorithm::HS256) }
}

fn sign(key: &str, claims: &Value) -> String {
    sign_with(&header(key), claims, secret_of(key))
}
