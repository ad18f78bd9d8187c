//! The queues of all accounts in the memory of a node.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;

use super::definitions::{Definition, Definitions, sources};
use super::{BrokerQueue, QueueError};
use crate::model::{AccountId, pattern_matches};
use crate::origin::history::StoredQueues;
use crate::origin::outbox::{Addressee, Source, TargetId};
use crate::telemetry::OFTEN;

/// All queues. Cheap to clone.
#[derive(Clone, Default)]
pub struct Catalog {
    accounts: Arc<RwLock<HashMap<AccountId, Arc<OfAccount>>>>,
}

/// The queues of one account, as the row of that revision has them.
#[derive(Debug, Default)]
pub(super) struct OfAccount {
    /// 0: there is no row yet.
    pub(super) revision: u64,
    pub(super) definitions: Definitions,
    /// Of the queues that are fed.
    feeds: Vec<QueueFeed>,
}

#[derive(Debug)]
struct QueueFeed {
    target: TargetId,
    rules: Vec<RuleFeed>,
}

#[derive(Debug)]
struct RuleFeed {
    rule: FedBy,
    pattern: Box<str>,
    messages: bool,
    presence: bool,
}

/// The choice of an event for a queue.
#[derive(Debug, Clone)]
struct FedBy {
    /// None: the queue has no rules.
    rule_id: Option<Arc<str>>,
    /// A pattern of the event's name.
    name: Option<Arc<str>>,
}

/// A queue that events of a channel may be for.
#[derive(Debug)]
pub struct Feed {
    target: TargetId,
    /// The rules that match the channel and the source.
    rules: Vec<FedBy>,
}

impl Feed {
    /// The queue, if a rule chooses the event with this name: by the first one that does.
    pub fn addressee(&self, name: Option<&str>) -> Option<Addressee> {
        let matches = |rule: &&FedBy| {
            rule.name.as_ref().is_none_or(|pattern| pattern_matches(pattern, name.unwrap_or("")))
        };
        let rule = self.rules.iter().find(matches)?;
        Some(Addressee { target: self.target.clone(), rule_id: rule.rule_id.clone() })
    }
}

/// A queue that was looked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Found {
    Queue(Arc<BrokerQueue>),
    Deleted,
    /// The account has never had queues here.
    Unknown,
}

impl Catalog {
    /// The queues that events of the channel may be for.
    pub fn feeds(&self, account: &AccountId, channel: &str, source: Source) -> Vec<Feed> {
        let Some(of_account) = self.accounts.read().get(account).map(Arc::clone) else { return Vec::new() };
        let fed = of_account.feeds.iter().filter_map(|feed| {
            let is_fed = |rule: &&RuleFeed| {
                let is_source = match source {
                    Source::Message => rule.messages,
                    Source::Presence => rule.presence,
                    Source::Occupied | Source::Vacated => false,
                };
                is_source && pattern_matches(&rule.pattern, channel)
            };
            let rules: Vec<_> = feed.rules.iter().filter(is_fed).map(|rule| rule.rule.clone()).collect();
            (!rules.is_empty()).then(|| Feed { target: feed.target.clone(), rules })
        });
        fed.collect()
    }

    pub fn find(&self, account: &AccountId, queue_id: &str) -> Found {
        let of_account = self.of(account);
        if of_account.revision == 0 {
            return Found::Unknown;
        }
        let found = of_account.definitions.queues.iter().find(|found| found.queue.id == queue_id);
        found.map_or(Found::Deleted, |found| Found::Queue(Arc::new(BrokerQueue::of(&found.queue))))
    }

    pub(super) fn of(&self, account: &AccountId) -> Arc<OfAccount> {
        self.accounts.read().get(account).map(Arc::clone).unwrap_or_default()
    }

    /// No account has a queue.
    pub fn is_empty(&self) -> bool {
        self.accounts.read().values().all(|of_account| of_account.definitions.queues.is_empty())
    }

    /// Every queue.
    pub(super) fn all(&self) -> Vec<BrokerQueue> {
        let accounts = self.accounts.read();
        let queues = accounts.values().flat_map(|of_account| &of_account.definitions.queues);
        queues.map(|found| BrokerQueue::of(&found.queue)).collect()
    }

    /// The revisions of the rows that are known.
    pub(super) fn revisions(&self) -> HashMap<AccountId, u64> {
        let accounts = self.accounts.read();
        accounts.iter().map(|(account, of_account)| (account.clone(), of_account.revision)).collect()
    }

    /// The queue that has this name on the broker by now.
    pub(super) fn by_physical(&self, physical: &str) -> Option<BrokerQueue> {
        let (account, name) = BrokerQueue::parse(physical)?;
        self.of(&account).named(name).ok().map(|found| BrokerQueue::of(&found.queue))
    }

    /// Takes rows of the store up, as far as they are newer. One that cannot be read is told, and changes nothing.
    pub(super) fn take(&self, rows: Vec<StoredQueues>) {
        for StoredQueues { account, revision, definitions } in rows {
            if self.accounts.read().get(&account).is_some_and(|known| known.revision >= revision) {
                continue;
            }
            match serde_json::from_str(&definitions) {
                Ok(definitions) => self.set(&account, revision, definitions),
                Err(error) => {
                    metrics::counter!("fanfare_queue_rows_unreadable_total").increment(1);
                    tracing::error!(target: OFTEN, account = %account, %error, "the queues of an account cannot be read");
                }
            }
        }
    }

    /// An earlier revision changes nothing.
    pub(super) fn set(&self, account: &AccountId, revision: u64, definitions: Definitions) {
        let of_account = Arc::new(OfAccount::new(account, revision, definitions));
        let mut accounts = self.accounts.write();
        let known = accounts.entry(account.clone()).or_default();
        if known.revision < revision {
            *known = of_account;
        }
    }
}

impl OfAccount {
    fn new(account: &AccountId, revision: u64, definitions: Definitions) -> Self {
        let fed = definitions.queues.iter().filter(|found| found.queue.enabled);
        let feeds = fed.map(|found| QueueFeed {
            target: TargetId::of_queue(account, &found.queue.id),
            rules: rules_of(found),
        });
        Self { revision, feeds: feeds.collect(), definitions }
    }

    /// A queue by its name.
    pub(super) fn named(&self, name: &str) -> Result<&Definition, QueueError> {
        self.definitions.by_name(name).ok_or(QueueError::UnknownQueue)
    }
}

/// A queue without rules is fed every message.
fn rules_of(found: &Definition) -> Vec<RuleFeed> {
    if found.rules.is_empty() {
        let rule = FedBy { rule_id: None, name: None };
        return vec![RuleFeed { rule, pattern: "*".into(), messages: true, presence: false }];
    }
    let enabled = found.rules.iter().filter(|rule| rule.enabled);
    let feed = |rule: &fanfare_proto::queue::Rule| {
        let (messages, presence) = sources(rule.filter.as_ref());
        let name = rule.filter.as_ref().and_then(|filter| filter.name.as_deref()).map(Arc::from);
        let fed_by = FedBy { rule_id: Some(rule.id.as_str().into()), name };
        RuleFeed { rule: fed_by, pattern: rule.source_pattern.as_str().into(), messages, presence }
    };
    enabled.map(feed).collect()
}
