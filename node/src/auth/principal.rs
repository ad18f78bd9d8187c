//! Principal: the authenticated caller, and its rights.

use std::sync::Arc;

use super::jwt::TokenGrant;
use super::refused::{Reason, RefusedCredential};
use crate::accounts::{Account, Key};
use crate::model::{Capability, ChannelKey, ChannelName, ClientId, KeyName, Operation};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PrincipalKind {
    Key,
    Token,
    /// Authentication is off.
    Anonymous,
}

/// An authenticated caller. Made by the `Authenticator` alone.
#[derive(Debug, Clone)]
pub struct Principal {
    pub account: Arc<Account>,
    /// Name of the key, or of the key that signed the token.
    pub key_name: KeyName,
    pub capability: Arc<Capability>,
    /// ClientId forced by the token; `None` leaves the choice to the client.
    pub client_id: Option<ClientId>,
    pub kind: PrincipalKind,
    /// Epoch seconds: the token's `iat`, or the time at which the key was presented.
    pub issued_s: u64,
    /// Epoch milliseconds, from which the token is refused.
    pub expires_ms: Option<u64>,
    key: Option<Arc<Key>>,
}

impl Principal {
    /// The key of a channel in the caller's account: the only way to name a channel to the rest of the node.
    pub fn channel(&self, name: ChannelName) -> ChannelKey {
        ChannelKey::new(self.account.id.clone(), name)
    }

    pub fn allows(&self, channel: &str, operation: Operation) -> bool {
        self.capability.allows(channel, operation)
    }

    /// A refusal of this authenticated caller.
    pub fn refused(&self, reason: Reason) -> RefusedCredential {
        RefusedCredential::of(&self.key_name, reason)
    }

    pub(super) fn of_key(key: Arc<Key>, now_s: u64) -> Self {
        Self {
            account: key.account.clone(),
            key_name: key.name.clone(),
            capability: key.capability.clone(),
            client_id: None,
            kind: PrincipalKind::Key,
            issued_s: now_s,
            expires_ms: None,
            key: Some(key),
        }
    }

    pub(super) fn of_token(key: Arc<Key>, granted: TokenGrant) -> Self {
        Self {
            account: key.account.clone(),
            key_name: key.name.clone(),
            capability: Arc::new(granted.capability),
            client_id: granted.client_id,
            kind: PrincipalKind::Token,
            issued_s: granted.issued_s,
            expires_ms: Some(granted.expires_ms),
            key: Some(key),
        }
    }

    /// The same credential under a later reading of its key.
    pub(super) fn renewed(&self, key: &Arc<Key>) -> Self {
        let capability = match self.kind {
            PrincipalKind::Key => &key.capability,
            PrincipalKind::Token | PrincipalKind::Anonymous => &self.capability,
        };
        Self {
            account: key.account.clone(),
            capability: capability.clone(),
            key: Some(key.clone()),
            ..self.clone()
        }
    }

    pub(crate) fn anonymous(account: Arc<Account>) -> Self {
        Self {
            account,
            key_name: "anonymous".into(),
            capability: Arc::new(Capability::everything()),
            client_id: None,
            kind: PrincipalKind::Anonymous,
            issued_s: 0,
            expires_ms: None,
            key: None,
        }
    }

    pub(super) fn key(&self) -> Option<&Key> {
        self.key.as_deref()
    }
}
