//! What the tests of several modules need of a directory and of a store of credentials.

use std::fmt::Write as _;

use crate::auth::{Claim, Kept, Nonce, TokenStore};
use crate::model::Revocation;

/// Takes every nonce for new, and remembers nothing.
pub(crate) struct NoTokens;

impl TokenStore for NoTokens {
    fn claim_nonce(&self, _: Nonce) -> Claim {
        Box::pin(async { Ok(true) })
    }

    fn keep_revocation(&self, _: Revocation) -> Kept {
        Box::pin(async { Ok(()) })
    }
}

/// The text of a directory in the making. What is added belongs to the account named last.
#[derive(Default)]
pub(crate) struct DirectoryText(String);

impl DirectoryText {
    /// An account in a tenant of the same id.
    pub(crate) fn account(mut self, id: &str) -> Self {
        write!(self.0, "[[tenants]]\nid = \"{id}\"\n[[tenants.accounts]]\nid = \"{id}\"\n").unwrap();
        self
    }

    /// A rule for channels; `rule` is a line such as `history = false`.
    pub(crate) fn channels(mut self, pattern: &str, rule: &str) -> Self {
        write!(self.0, "[[tenants.accounts.channels]]\npattern = \"{pattern}\"\n{rule}\n").unwrap();
        self
    }

    /// A key with the secret `secret-of-<name>`; `capability` is an inline table.
    pub(crate) fn key(self, name: &str, capability: &str) -> Self {
        self.key_with(name, &format!("secret-of-{name}"), "active", capability)
    }

    pub(crate) fn revoked_key(self, name: &str) -> Self {
        self.key_with(name, &format!("secret-of-{name}"), "revoked", r#"{ "*" = ["publish"] }"#)
    }

    pub(crate) fn key_with(mut self, name: &str, secret: &str, status: &str, capability: &str) -> Self {
        write!(
            self.0,
            "[[tenants.accounts.keys]]\nname = \"{name}\"\nsecret = \"{secret}\"\nstatus = \"{status}\"\n\
             capability = {capability}\n"
        )
        .unwrap();
        self
    }

    pub(crate) fn text(&self) -> &str {
        &self.0
    }
}
