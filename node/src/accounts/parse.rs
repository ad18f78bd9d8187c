//! Parser of the directory file: text → `Directory`, or all mistakes.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::Deserialize as _;
use sha2::{Digest as _, Sha256};
use toml::de::{DeTable, ValueDeserializer};

use super::directory::{
    Account, ChannelRule, Directory, Integration, IntegrationKind, IntegrationTarget, Key, Tenant,
};
use super::reach::IntegrationFields;
use super::reader::{DirectoryMistake, DirectoryMistakes, DirectoryValue, TableReader};
use super::secret::Secret;
use super::usages::Usages;
use super::{amqp, aws, webhook};
use crate::model::{AccountId, AllowRule, Capability, bare_secret};

const RETENTION_HOURS_MAX: u64 = 10 * 366 * 24;

/// Reads the content of a `secret_file`, whose path is already resolved.
pub(super) type ReadSecret<'a> = &'a mut dyn FnMut(PathBuf) -> std::io::Result<String>;

/// The settings of the node that concern the directory.
#[derive(Debug, Clone)]
pub(super) struct NodeSettings {
    /// Default where the text has none.
    pub(super) retention_hours: u32,
    /// Rules for addresses that targets may use; none: targets are not checked.
    pub(super) allow: Option<Box<[AllowRule]>>,
}

/// Parses the text. `folder` is the base of a relative `secret_file`; `usages` gives each account its counters.
pub(super) fn parse(
    text: &str,
    folder: &Path,
    read_secret: ReadSecret<'_>,
    usages: &Usages,
    settings: &NodeSettings,
) -> Result<Directory, Vec<DirectoryMistake>> {
    let mut mistakes = DirectoryMistakes::of(text);
    let (document, errors) = DeTable::parse_recoverable(text);
    if !errors.is_empty() {
        for error in errors {
            mistakes.add(&error.span().unwrap_or(0..0), "", error.message());
        }
        return Err(mistakes.list);
    }
    let directory = Directory::default();
    let key_names = HashSet::new();
    let mut parser = Parser { mistakes, directory, key_names, folder, read_secret, usages, settings };
    parser.document(TableReader::root(document.get_ref()));
    let Parser { mistakes, mut directory, .. } = parser;
    let [list, warnings] = [mistakes.list, mistakes.warnings].map(|mut found| {
        found.sort_by_key(|mistake| mistake.line);
        found
    });
    directory.warnings = warnings;
    if list.is_empty() { Ok(directory) } else { Err(list) }
}

struct Parser<'a, 'i> {
    mistakes: DirectoryMistakes<'i>,
    directory: Directory,
    /// Names of all keys, including those with mistakes.
    key_names: HashSet<String>,
    folder: &'a Path,
    read_secret: ReadSecret<'a>,
    usages: &'a Usages,
    settings: &'a NodeSettings,
}

impl Parser<'_, '_> {
    fn document(&mut self, mut root: TableReader<'_, '_>) {
        let tenants = root.tables("tenants", &mut self.mistakes);
        // A file that is half-written or empty must not revoke every key.
        if tenants.is_empty() && self.mistakes.list.is_empty() {
            self.mistakes.add(&root.span, "tenants", "is missing");
        }
        tenants.into_iter().for_each(|tenant| self.tenant(tenant));
        root.finish(&mut self.mistakes);
    }

    fn tenant(&mut self, mut table: TableReader<'_, '_>) {
        let id: Arc<str> = self.id(&mut table).into();
        let connection_limit = table.integer("connection_limit", 0..=u64::MAX, &mut self.mistakes);
        let tenant = Arc::new(Tenant { id: id.clone(), connection_limit });
        if self.directory.tenants.insert(id.clone(), tenant.clone()).is_some() && !id.is_empty() {
            self.mistakes.add(&table.span, &table.key("id"), format!("repeats the tenant {id:?}"));
        }
        for account in table.tables("accounts", &mut self.mistakes) {
            self.account(account, &tenant);
        }
        table.finish(&mut self.mistakes);
    }

    fn account(&mut self, mut table: TableReader<'_, '_>, tenant: &Tenant) {
        let id = self.id(&mut table);
        let retention_hours = self.retention(&mut table).unwrap_or(self.settings.retention_hours);
        let queue_limit = table.integer("queue_limit", 0..=u64::MAX, &mut self.mistakes);
        let rules = table.tables("channels", &mut self.mistakes);
        let channels = rules.into_iter().filter_map(|rule| self.channel_rule(rule)).collect();
        let integrations = self.integrations(&id, &mut table);
        let account_id = AccountId::new(&id);
        let account = Arc::new(Account {
            usage: self.usages.of(&account_id),
            id: account_id,
            tenant: tenant.id.clone(),
            tenant_connection_limit: tenant.connection_limit,
            retention_hours,
            queue_limit,
            channels,
            integrations,
        });
        if self.directory.accounts.insert(account.id.clone(), account.clone()).is_some() && !id.is_empty() {
            self.mistakes.add(&table.span, &table.key("id"), format!("repeats the account {id:?}"));
        }
        for key in table.tables("keys", &mut self.mistakes) {
            self.api_key(key, &account);
        }
        table.finish(&mut self.mistakes);
    }

    fn channel_rule(&mut self, mut table: TableReader<'_, '_>) -> Option<ChannelRule> {
        let pattern = self.pattern(&mut table);
        let history = table.boolean("history", &mut self.mistakes).unwrap_or(true);
        let retention_hours = self.retention(&mut table);
        table.finish(&mut self.mistakes);
        Some(ChannelRule { pattern: pattern?, history, retention_hours })
    }

    fn pattern(&mut self, table: &mut TableReader<'_, '_>) -> Option<Box<str>> {
        let found = table.required("pattern", &mut self.mistakes)?;
        let pattern = found.text(&mut self.mistakes)?;
        if pattern.is_empty() {
            self.mistakes.add(&found.span, &found.key, "must not be empty");
        }
        Some(pattern.into())
    }

    fn retention(&mut self, table: &mut TableReader<'_, '_>) -> Option<u32> {
        let hours = table.integer("retention_hours", 1..=RETENTION_HOURS_MAX, &mut self.mistakes)?;
        u32::try_from(hours).ok()
    }

    fn api_key(&mut self, mut table: TableReader<'_, '_>, account: &Arc<Account>) {
        let name = self.named("name", &mut table, is_key_name, "must be 1 to 64 of A-Z, a-z, 0-9, _ and -");
        let secret = self.secret(&name, &mut table);
        let active = self.status(&mut table);
        let capability = self.capability(&mut table);
        if !name.is_empty() && !self.key_names.insert(name.clone()) {
            self.mistakes.add(&table.span, &table.key("name"), format!("repeats the key {name:?}"));
        }
        table.finish(&mut self.mistakes);
        if let (Some(secret), Some(capability)) = (secret, capability) {
            let name: Arc<str> = name.into();
            let key = Key { name: name.clone(), account: account.clone(), secret, active, capability };
            self.directory.keys.insert(name, Arc::new(key));
        }
    }

    fn status(&mut self, table: &mut TableReader<'_, '_>) -> bool {
        let Some(found) = table.get("status") else { return true };
        match found.value.as_str() {
            Some("active") => true,
            Some("revoked") => false,
            _ => {
                self.mistakes.add(&found.span, &found.key, "must be \"active\" or \"revoked\"");
                false
            }
        }
    }

    fn capability(&mut self, table: &mut TableReader<'_, '_>) -> Option<Arc<Capability>> {
        let found = table.required("capability", &mut self.mistakes)?;
        let Some(map) = found.value.as_table() else {
            let reason = "must be a table of patterns with lists of operations";
            self.mistakes.add(&found.span, &found.key, reason);
            return None;
        };
        let before = self.mistakes.list.len();
        let mut entries = Vec::new();
        for (pattern, operations) in map.iter() {
            let key = format!("{}.{:?}", found.key, pattern.get_ref());
            let list = DirectoryValue { value: operations.get_ref(), span: operations.span(), key };
            let names = list.texts(&mut self.mistakes).into_iter().map(str::to_owned).collect();
            entries.push((pattern.get_ref().to_string(), names));
        }
        if self.mistakes.list.len() > before {
            return None;
        }
        match Capability::from_map(entries) {
            Ok(capability) => Some(Arc::new(capability)),
            Err(error) => {
                self.mistakes.add(&found.span, &found.key, error.to_string());
                None
            }
        }
    }

    fn secret(&mut self, key_name: &str, table: &mut TableReader<'_, '_>) -> Option<Secret> {
        self.secret_of(["secret", "secret_file", "secret_env"], key_name, table)
    }

    /// Reads a secret. `names` are the fields of the text itself, of a file and of a variable.
    fn secret_of(
        &mut self,
        names: [&'static str; 3],
        key_name: &str,
        table: &mut TableReader<'_, '_>,
    ) -> Option<Secret> {
        let given: Vec<_> = names.into_iter().filter_map(|name| table.get(name)).collect();
        let [found] = &given[..] else {
            let [text, file, variable] = names;
            let reason = format!("exactly one of {text}, {file} and {variable} is needed");
            self.mistakes.add(&table.span, &table.key(text), reason);
            return None;
        };
        let value = found.text(&mut self.mistakes)?;
        let bare = |text: String| bare_secret(&text).map(str::to_owned).map_err(str::to_owned);
        let text = if found.key.ends_with(names[1]) {
            let text = (self.read_secret)(self.folder.join(value));
            text.map_err(|error| format!("cannot be read: {error}")).and_then(bare)
        } else if found.key.ends_with(names[2]) {
            let text = std::env::var(value);
            text.map_err(|_| "names a variable that is not set to a text".to_owned()).and_then(bare)
        } else {
            // The quotes in the file mark where the secret begins and ends.
            let text = value.trim_end_matches(['\r', '\n']);
            if bare_secret(text) != Ok(text) {
                let reason = "has space, quotes or a byte order mark around it, which are part of the secret";
                self.mistakes.warn(&found.span, &found.key, reason);
            }
            Ok(text.to_owned())
        };
        let text = text.and_then(|text| {
            let is_whole = !key_name.is_empty() && text.ends_with(&format!(".{key_name}"));
            let whole = || format!("holds the whole key, <secret>.{key_name}; expected is the secret alone, without .{key_name}");
            if is_whole { Err(whole()) } else { Ok(text) }
        });
        let secret = text.and_then(|text| Secret::new(&text).map_err(Into::into));
        secret.map_err(|reason: String| self.mistakes.add(&found.span, &found.key, reason)).ok()
    }

    fn integrations(&mut self, account_id: &str, account: &mut TableReader<'_, '_>) -> Vec<Arc<Integration>> {
        let mut ids = HashSet::new();
        let mut integrations = Vec::new();
        for mut table in account.tables("integrations", &mut self.mistakes) {
            let id = self.id(&mut table);
            if !id.is_empty() && !ids.insert(id.clone()) {
                self.mistakes.add(&table.span, &table.key("id"), format!("repeats the integration {id:?}"));
            }
            let kind = self.kind(&mut table);
            let channels = self.channel_patterns(&mut table);
            let [messages, presence, occupancy] = self.events(&mut table);
            let fields = self.further_fields(&table);
            let integration_fields = IntegrationFields::of(&table);
            let target = kind.and_then(|kind| self.target(kind, table));
            if let Some(target) = &target {
                let rules = self.settings.allow.as_deref();
                integration_fields.warn(target, (account_id, &id), rules, &mut self.mistakes);
            }
            if let (Some(kind), Some(target)) = (kind, target) {
                let settings_hash = settings_hash(kind, &channels, &fields);
                let id = id.into();
                let integration = Integration {
                    id,
                    kind,
                    channels,
                    messages,
                    presence,
                    occupancy,
                    target,
                    fields,
                    settings_hash,
                };
                integrations.push(Arc::new(integration));
            }
        }
        integrations
    }

    fn target(&mut self, kind: IntegrationKind, mut table: TableReader<'_, '_>) -> Option<IntegrationTarget> {
        match kind {
            IntegrationKind::Webhook => {
                let secret = self.secret("", &mut table);
                let target = webhook::read(table, secret, &mut self.mistakes);
                target.map(|target| IntegrationTarget::Webhook(Arc::new(target)))
            }
            IntegrationKind::Amqp => {
                let target = amqp::read(table, &mut self.mistakes);
                target.map(|target| IntegrationTarget::Amqp(Arc::new(target)))
            }
            IntegrationKind::Lambda => {
                let secrets = self.aws_secrets(&mut table);
                let target = aws::read_lambda(table, secrets, &mut self.mistakes);
                target.map(|target| IntegrationTarget::Lambda(Arc::new(target)))
            }
            IntegrationKind::Sns => {
                let secrets = self.aws_secrets(&mut table);
                let target = aws::read_sns(table, secrets, &mut self.mistakes);
                target.map(|target| IntegrationTarget::Sns(Arc::new(target)))
            }
        }
    }

    fn aws_secrets(&mut self, table: &mut TableReader<'_, '_>) -> aws::AwsSecrets {
        let [key, token] = [aws::SECRET_KEY, aws::SESSION_TOKEN].map(|names| {
            let is_given = names.iter().any(|name| table.get(name).is_some());
            is_given.then(|| self.secret_of(names, "", table))
        });
        aws::AwsSecrets { key, token }
    }

    fn kind(&mut self, table: &mut TableReader<'_, '_>) -> Option<IntegrationKind> {
        let found = table.required("kind", &mut self.mistakes)?;
        let name = found.text(&mut self.mistakes)?;
        let kind = IntegrationKind::ALL.into_iter().find(|kind| kind.as_str() == name);
        if kind.is_none() {
            self.mistakes.add(&found.span, &found.key, "must be webhook, amqp, lambda or sns");
        }
        kind
    }

    fn channel_patterns(&mut self, table: &mut TableReader<'_, '_>) -> Vec<Box<str>> {
        let Some(found) = table.get("channels") else { return vec!["*".into()] };
        let before = self.mistakes.list.len();
        let patterns = found.texts(&mut self.mistakes);
        let usable = !patterns.is_empty() && patterns.iter().all(|pattern| !pattern.is_empty());
        if !usable && self.mistakes.list.len() == before {
            self.mistakes.add(&found.span, &found.key, "needs at least one pattern, and none that is empty");
        }
        patterns.into_iter().map(Into::into).collect()
    }

    /// Whether messages, presence and occupancy are sent; the first two by default.
    fn events(&mut self, table: &mut TableReader<'_, '_>) -> [bool; 3] {
        const NAMES: [&str; 3] = ["message", "presence", "occupancy"];
        let Some(found) = table.get("events") else { return [true, true, false] };
        let before = self.mistakes.list.len();
        let events = found.texts(&mut self.mistakes);
        let known = !events.is_empty() && events.iter().all(|event| NAMES.contains(event));
        if !known && self.mistakes.list.len() == before {
            self.mistakes.add(
                &found.span,
                &found.key,
                "must list some of \"message\", \"presence\" and \"occupancy\"",
            );
        }
        NAMES.map(|name| events.contains(&name))
    }

    fn further_fields(&mut self, table: &TableReader<'_, '_>) -> toml::Table {
        let mut fields = toml::Table::new();
        for (name, value) in table.rest() {
            match toml::Value::deserialize(ValueDeserializer::from(value.clone())) {
                Ok(value) => {
                    fields.insert(name.get_ref().to_string(), value);
                }
                Err(error) => self.mistakes.add(&value.span(), &table.key(name.get_ref()), error.message()),
            }
        }
        fields
    }

    /// Reads an id; empty if it was reported.
    fn id(&mut self, table: &mut TableReader<'_, '_>) -> String {
        self.named("id", table, is_id, "must be 1 to 64 of a-z, 0-9 and -")
    }

    fn named(
        &mut self,
        name: &'static str,
        table: &mut TableReader<'_, '_>,
        valid: fn(&str) -> bool,
        rule: &str,
    ) -> String {
        let Some(found) = table.required(name, &mut self.mistakes) else { return String::new() };
        let Some(text) = found.text(&mut self.mistakes) else { return String::new() };
        if !valid(text) {
            self.mistakes.add(&found.span, &found.key, rule);
            return String::new();
        }
        text.to_owned()
    }
}

fn settings_hash(kind: IntegrationKind, channels: &[Box<str>], fields: &toml::Table) -> u64 {
    let text = toml::to_string(fields).unwrap_or_default();
    let hash = Sha256::digest(format!("{kind:?}{channels:?}{text}"));
    u64::from_be_bytes(std::array::from_fn(|index| hash[index]))
}

fn is_id(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|byte| matches!(byte, b'a'..=b'z' | b'0'..=b'9' | b'-'))
}

/// Whether the text may name a key: `[A-Za-z0-9_-]{1,64}`.
pub fn is_key_name(text: &str) -> bool {
    (1..=64).contains(&text.len())
        && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'-'))
}
