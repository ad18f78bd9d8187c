//! Directory files for tests.

use std::fmt::Write as _;

/// All operations on every channel.
pub const ALL: &str = r#"{ "*" = ["subscribe", "publish", "presence", "history", "amqp-subscribe"] }"#;

/// A directory file in the making: one tenant and account for each call of [`Directory::account`].
#[derive(Debug, Clone, Default)]
pub struct Directory {
    toml: String,
}

impl Directory {
    /// An account of a tenant of the same id; the keys that follow belong to it.
    pub fn account(mut self, id: &str) -> Self {
        let _ = write!(self.toml, "[[tenants]]\nid = \"{id}\"\n\n[[tenants.accounts]]\nid = \"{id}\"\n\n");
        self
    }

    /// An active key of the last account. `capability` is an inline TOML table.
    pub fn key(self, name: &str, secret: &str, capability: &str) -> Self {
        self.key_with_status(name, secret, "active", capability)
    }

    pub fn revoked_key(self, name: &str, secret: &str) -> Self {
        self.key_with_status(name, secret, "revoked", ALL)
    }

    pub fn toml(&self) -> &str {
        &self.toml
    }

    fn key_with_status(mut self, name: &str, secret: &str, status: &str, capability: &str) -> Self {
        let _ = write!(
            self.toml,
            "[[tenants.accounts.keys]]\nname = \"{name}\"\nsecret = \"{secret}\"\nstatus = \"{status}\"\n\
             capability = {capability}\n\n"
        );
        self
    }
}
