//! Directory files for tests.

use std::fmt::Write as _;

/// Capability for all operations on every channel.
pub const ALL: &str = r#"{ "*" = ["subscribe", "publish", "presence", "history", "amqp-subscribe"] }"#;

/// A directory file in the making: one tenant and account for each call of [`Directory::account`].
#[derive(Debug, Clone, Default)]
pub struct Directory {
    toml: String,
}

impl Directory {
    /// Adds an account, with a tenant of the same id; the keys that follow belong to it.
    pub fn account(mut self, id: &str) -> Self {
        let _ = write!(self.toml, "[[tenants]]\nid = \"{id}\"\n\n[[tenants.accounts]]\nid = \"{id}\"\n\n");
        self
    }

    /// Adds a tenant; the accounts that follow by [`Directory::account_of_tenant`] belong to it.
    pub fn tenant(mut self, id: &str, connection_limit: Option<u64>) -> Self {
        let _ = write!(self.toml, "[[tenants]]\nid = \"{id}\"\n");
        if let Some(limit) = connection_limit {
            let _ = writeln!(self.toml, "connection_limit = {limit}");
        }
        self
    }

    /// Adds an account of the last tenant.
    pub fn account_of_tenant(mut self, id: &str) -> Self {
        let _ = write!(self.toml, "\n[[tenants.accounts]]\nid = \"{id}\"\n\n");
        self
    }

    /// Adds a rule for channels to the last account, before its keys. `rule` is the inside of the table.
    pub fn channels(mut self, rule: &str) -> Self {
        let _ = write!(self.toml, "[[tenants.accounts.channels]]\n{rule}\n\n");
        self
    }

    /// Adds an active key of the last account. `capability` is an inline TOML table.
    pub fn key(self, name: &str, secret: &str, capability: &str) -> Self {
        self.key_with_status(name, secret, "active", capability)
    }

    pub fn revoked_key(self, name: &str, secret: &str) -> Self {
        self.key_with_status(name, secret, "revoked", ALL)
    }

    /// Adds an integration of the last account, before its keys; `fields` are lines of TOML.
    pub fn integration(mut self, id: &str, fields: &str) -> Self {
        let _ = write!(self.toml, "[[tenants.accounts.integrations]]\nid = \"{id}\"\n{fields}\n");
        self
    }

    /// Sets the greatest number of queues of the last account, before its keys.
    pub fn queue_limit(mut self, queues: u64) -> Self {
        let _ = writeln!(self.toml, "queue_limit = {queues}\n");
        self
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
