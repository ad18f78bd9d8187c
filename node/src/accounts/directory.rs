//! One reading of the directory file, immutable.

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, OnceLock};

use sha2::{Digest as _, Sha256};

use super::amqp::AmqpTarget;
use super::aws::{LambdaTarget, SnsTarget};
use super::parse::is_key_name;
use super::reader::DirectoryMistake;
use super::secret::Secret;
use super::webhook::WebhookTarget;
use crate::model::{AccountId, Capability, KeyName, Limits, Usage, pattern_matches};

const HOUR_MS: u64 = 3_600_000;
/// Step in which the retention cut moves, so that equal queries meanwhile share one read of the store.
pub const CUT_MS: u64 = 1_000;

/// The content of the file. A reload makes a new one; holders of an old one keep it unchanged.
#[derive(Debug, Default)]
pub struct Directory {
    pub(super) tenants: HashMap<Arc<str>, Arc<Tenant>>,
    pub(super) accounts: HashMap<AccountId, Arc<Account>>,
    pub(super) keys: HashMap<KeyName, Arc<Key>>,
    /// Odd entries that the node accepts.
    pub(super) warnings: Vec<DirectoryMistake>,
    /// Cached, as it is asked for often.
    pub(super) history_policies: OnceLock<u64>,
}

impl Directory {
    pub fn warnings(&self) -> &[DirectoryMistake] {
        &self.warnings
    }

    pub fn tenant(&self, id: &str) -> Option<&Arc<Tenant>> {
        self.tenants.get(id)
    }

    pub fn account(&self, id: &AccountId) -> Option<&Arc<Account>> {
        self.accounts.get(id)
    }

    /// The key of this name, revoked ones included.
    pub fn key(&self, name: &str) -> Option<&Arc<Key>> {
        self.keys.get(name)
    }

    /// A key name sent by a client, if it may be logged: it has the form of a key name and is not a secret in the wrong place.
    pub fn loggable<'n>(&self, name: &'n str) -> Option<&'n str> {
        let is_secret = || self.keys().any(|key| key.secret.matches(name.as_bytes()));
        let is_loggable = self.key(name).is_some() || (is_key_name(name) && !is_secret());
        is_loggable.then_some(name)
    }

    pub fn tenants(&self) -> impl Iterator<Item = &Arc<Tenant>> {
        self.tenants.values()
    }

    pub fn accounts(&self) -> impl Iterator<Item = &Arc<Account>> {
        self.accounts.values()
    }

    /// A hash of which channels keep history; differs if any channel's policy differs. An account that keeps everything counts like an
    /// absent one, for which nothing is delivered.
    pub fn history_policies(&self) -> u64 {
        *self.history_policies.get_or_init(|| self.hash_of_policies())
    }

    fn hash_of_policies(&self) -> u64 {
        let leaves_out = |account: &&Arc<Account>| account.channels.iter().any(|rule| !rule.history);
        let mut accounts: Vec<&Arc<Account>> = self.accounts().filter(leaves_out).collect();
        accounts.sort_by(|one, other| one.id.cmp(&other.id));
        let mut hash = Sha256::new();
        for account in accounts {
            let rules = account.channels.iter().map(|rule| (&rule.pattern, rule.history));
            // Quoted, so that adjacent names cannot be confused.
            hash.update(format!("{:?}{:?}", account.id.as_str(), rules.collect::<Vec<_>>()));
        }
        let hash = hash.finalize();
        u64::from_be_bytes(std::array::from_fn(|index| hash[index]))
    }

    /// Whether every account of the former directory keeps the history of the same channels now.
    pub(super) fn keeps_as(&self, previous: &Self) -> bool {
        let rules = |account: &Account| -> Vec<(Box<str>, bool)> {
            account.channels.iter().map(|rule| (rule.pattern.clone(), rule.history)).collect()
        };
        previous
            .accounts()
            .all(|before| self.account(&before.id).is_some_and(|now| rules(now) == rules(before)))
    }

    pub fn keys(&self) -> impl Iterator<Item = &Arc<Key>> {
        self.keys.values()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tenant {
    /// `[a-z0-9-]{1,64}`.
    pub id: Arc<str>,
    /// Connection limit over all accounts and nodes; `None`: no limit.
    pub connection_limit: Option<u64>,
}

/// An account: the scope of every channel name.
#[derive(Debug, Clone)]
pub struct Account {
    pub id: AccountId,
    pub tenant: Arc<str>,
    /// The tenant's limit, copied because it is needed for each connection.
    pub tenant_connection_limit: Option<u64>,
    pub retention_hours: u32,
    /// Limit of queues; `None`: no limit.
    pub queue_limit: Option<u64>,
    /// Rules in the order of the file: the first match decides.
    pub channels: Vec<ChannelRule>,
    pub integrations: Vec<Arc<Integration>>,
    /// Counters of the account, shared by all readings of the directory.
    pub usage: Arc<Usage>,
}

impl Account {
    /// An account with every default, alone in a tenant of the same name and without usage counts.
    pub fn plain(id: &str) -> Self {
        Self {
            id: AccountId::new(id),
            tenant: id.into(),
            tenant_connection_limit: None,
            retention_hours: Limits::default().history_retention_hours,
            queue_limit: None,
            channels: Vec::new(),
            integrations: Vec::new(),
            usage: Arc::default(),
        }
    }

    pub fn policy(&self, channel: &str) -> ChannelPolicy {
        let rule = self.channels.iter().find(|rule| pattern_matches(&rule.pattern, channel));
        ChannelPolicy {
            history: rule.is_none_or(|rule| rule.history),
            retention_hours: rule.and_then(|rule| rule.retention_hours).unwrap_or(self.retention_hours),
        }
    }
}

/// A rule of an account for the channels that match a pattern (syntax of a capability's patterns).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChannelRule {
    pub pattern: Box<str>,
    /// False: messages are delivered and not stored.
    pub history: bool,
    /// Retention in hours; `None`: the account's.
    pub retention_hours: Option<u32>,
}

/// The policy of one channel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChannelPolicy {
    pub history: bool,
    pub retention_hours: u32,
}

impl ChannelPolicy {
    /// The retention cut: older messages are not returned, and a message with less than [`CUT_MS`] left may be omitted.
    pub fn oldest_ms(self, now_ms: u64) -> u64 {
        now_ms.saturating_sub(u64::from(self.retention_hours) * HOUR_MS).next_multiple_of(CUT_MS)
    }
}

#[derive(Debug)]
pub struct Key {
    pub name: KeyName,
    pub account: Arc<Account>,
    pub secret: Secret,
    /// False if the key is revoked.
    pub active: bool,
    pub capability: Arc<Capability>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IntegrationKind {
    Webhook,
    Amqp,
    Lambda,
    Sns,
}

impl IntegrationKind {
    pub const ALL: [Self; 4] = [Self::Webhook, Self::Amqp, Self::Lambda, Self::Sns];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Webhook => "webhook",
            Self::Amqp => "amqp",
            Self::Lambda => "lambda",
            Self::Sns => "sns",
        }
    }
}

/// Another destination of an account's messages.
#[derive(Clone, PartialEq)]
pub struct Integration {
    /// `[a-z0-9-]{1,64}`, unique within its account.
    pub id: Box<str>,
    pub kind: IntegrationKind,
    /// Patterns in the syntax of a capability's.
    pub channels: Vec<Box<str>>,
    pub messages: bool,
    pub presence: bool,
    /// Whether events are sent when a channel becomes occupied, and vacated.
    pub occupancy: bool,
    pub target: IntegrationTarget,
    /// Settings of the kind, as in the file; they may contain secrets.
    pub fields: toml::Table,
    /// Hash of the integration's settings in the file.
    pub settings_hash: u64,
}

/// The checked settings of an integration, by kind.
#[derive(Debug, Clone, PartialEq)]
pub enum IntegrationTarget {
    Webhook(Arc<WebhookTarget>),
    Amqp(Arc<AmqpTarget>),
    Lambda(Arc<LambdaTarget>),
    Sns(Arc<SnsTarget>),
}

impl fmt::Debug for Integration {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Integration")
            .field("id", &self.id)
            .field("kind", &self.kind)
            .field("channels", &self.channels)
            .field("messages", &self.messages)
            .field("presence", &self.presence)
            .field("occupancy", &self.occupancy)
            .field("target", &self.target)
            .field("fields", &self.fields.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}
