//! Catalog of the queues of all accounts, in the memory of a node.

use std::collections::HashMap;
use std::sync::Arc;

use parking_lot::RwLock;

use super::definitions::{Definition, Definitions, sources};
use super::{BrokerQueue, QueueError};
use crate::model::{AccountId, pattern_matches};
use crate::origin::history::StoredQueues;
use crate::origin::outbox::{Addressee, EventSource, TargetId};
use crate::telemetry::RATE_LIMITED;

/// All queues. Cheap to clone.
#[derive(Clone, Default)]
pub struct QueueCatalog {
    accounts: Arc<RwLock<HashMap<AccountId, Arc<AccountQueues>>>>,
}

/// Queues of one account, as of one revision.
#[derive(Debug, Default)]
pub(super) struct AccountQueues {
    /// Revision of the row; 0 if there is none yet.
    pub(super) revision: u64,
    pub(super) definitions: Definitions,
    /// Feeds of the enabled queues.
    feeds: Vec<QueueFeed>,
}

#[derive(Debug)]
struct QueueFeed {
    target: TargetId,
    rules: Vec<RuleFeed>,
}

#[derive(Debug)]
struct RuleFeed {
    rule: EventSelector,
    pattern: Box<str>,
    messages: bool,
    presence: bool,
}

/// Selection of events for a queue.
#[derive(Debug, Clone)]
struct EventSelector {
    /// Id of the rule; `None` if the queue has no rules.
    rule_id: Option<Arc<str>>,
    /// Pattern of the event's name.
    name: Option<Arc<str>>,
}

/// A queue that may receive events of a channel.
#[derive(Debug)]
pub struct CandidateQueue {
    target: TargetId,
    /// Rules that match the channel and the source.
    rules: Vec<EventSelector>,
}

impl CandidateQueue {
    /// Returns the queue if one of its rules selects the event with this name, with the first such rule.
    pub fn addressee(&self, name: Option<&str>) -> Option<Addressee> {
        let matches = |rule: &&EventSelector| {
            rule.name.as_ref().is_none_or(|pattern| pattern_matches(pattern, name.unwrap_or("")))
        };
        let rule = self.rules.iter().find(matches)?;
        Some(Addressee { target: self.target.clone(), rule_id: rule.rule_id.clone() })
    }
}

/// Result of looking up a queue.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueLookup {
    Queue(Arc<BrokerQueue>),
    Deleted,
    /// The account has never had queues in this catalog.
    Unknown,
}

impl QueueCatalog {
    /// Returns the queues that may receive events of the channel.
    pub fn feeds(&self, account: &AccountId, channel: &str, source: EventSource) -> Vec<CandidateQueue> {
        let Some(of_account) = self.accounts.read().get(account).map(Arc::clone) else { return Vec::new() };
        let fed = of_account.feeds.iter().filter_map(|feed| {
            let is_fed = |rule: &&RuleFeed| {
                let is_source = match source {
                    EventSource::Message => rule.messages,
                    EventSource::Presence => rule.presence,
                    EventSource::Occupied | EventSource::Vacated => false,
                };
                is_source && pattern_matches(&rule.pattern, channel)
            };
            let rules: Vec<_> = feed.rules.iter().filter(is_fed).map(|rule| rule.rule.clone()).collect();
            (!rules.is_empty()).then(|| CandidateQueue { target: feed.target.clone(), rules })
        });
        fed.collect()
    }

    pub fn find(&self, account: &AccountId, queue_id: &str) -> QueueLookup {
        let of_account = self.of(account);
        if of_account.revision == 0 {
            return QueueLookup::Unknown;
        }
        let found = of_account.definitions.queues.iter().find(|found| found.queue.id == queue_id);
        found
            .map_or(QueueLookup::Deleted, |found| QueueLookup::Queue(Arc::new(BrokerQueue::of(&found.queue))))
    }

    pub(super) fn of(&self, account: &AccountId) -> Arc<AccountQueues> {
        self.accounts.read().get(account).map(Arc::clone).unwrap_or_default()
    }

    /// Returns whether no account has a queue.
    pub fn is_empty(&self) -> bool {
        self.accounts.read().values().all(|of_account| of_account.definitions.queues.is_empty())
    }

    pub(super) fn all(&self) -> Vec<BrokerQueue> {
        let accounts = self.accounts.read();
        let queues = accounts.values().flat_map(|of_account| &of_account.definitions.queues);
        queues.map(|found| BrokerQueue::of(&found.queue)).collect()
    }

    /// Revisions of the known rows.
    pub(super) fn revisions(&self) -> HashMap<AccountId, u64> {
        let accounts = self.accounts.read();
        accounts.iter().map(|(account, of_account)| (account.clone(), of_account.revision)).collect()
    }

    /// Returns the queue that has this name on the broker now.
    pub(super) fn by_physical(&self, physical: &str) -> Option<BrokerQueue> {
        let (account, name) = BrokerQueue::parse(physical)?;
        self.of(&account).named(name).ok().map(|found| BrokerQueue::of(&found.queue))
    }

    /// Applies the rows that are newer. A row that cannot be read is logged and changes nothing.
    pub(super) fn apply_rows(&self, rows: Vec<StoredQueues>) {
        for StoredQueues { account, revision, definitions } in rows {
            if self.accounts.read().get(&account).is_some_and(|known| known.revision >= revision) {
                continue;
            }
            match serde_json::from_str(&definitions) {
                Ok(definitions) => self.set(&account, revision, definitions),
                Err(error) => {
                    metrics::counter!("fanfare_queue_rows_unreadable_total").increment(1);
                    tracing::error!(target: RATE_LIMITED, account = %account, %error, "queue definitions cannot be decoded");
                }
            }
        }
    }

    /// Replaces the account's queues, unless the revision is not newer.
    pub(super) fn set(&self, account: &AccountId, revision: u64, definitions: Definitions) {
        let of_account = Arc::new(AccountQueues::new(account, revision, definitions));
        let mut accounts = self.accounts.write();
        let known = accounts.entry(account.clone()).or_default();
        if known.revision < revision {
            *known = of_account;
        }
    }
}

impl AccountQueues {
    fn new(account: &AccountId, revision: u64, definitions: Definitions) -> Self {
        let fed = definitions.queues.iter().filter(|found| found.queue.enabled);
        let feeds = fed.map(|found| QueueFeed {
            target: TargetId::of_queue(account, &found.queue.id),
            rules: rules_of(found),
        });
        Self { revision, feeds: feeds.collect(), definitions }
    }

    pub(super) fn named(&self, name: &str) -> Result<&Definition, QueueError> {
        self.definitions.by_name(name).ok_or(QueueError::UnknownQueue)
    }
}

/// Returns the rules of a queue. A queue without rules receives every message.
fn rules_of(found: &Definition) -> Vec<RuleFeed> {
    if found.rules.is_empty() {
        let rule = EventSelector { rule_id: None, name: None };
        return vec![RuleFeed { rule, pattern: "*".into(), messages: true, presence: false }];
    }
    let enabled = found.rules.iter().filter(|rule| rule.enabled);
    let feed = |rule: &fanfare_proto::queue::Rule| {
        let (messages, presence) = sources(rule.filter.as_ref());
        let name = rule.filter.as_ref().and_then(|filter| filter.name.as_deref()).map(Arc::from);
        let fed_by = EventSelector { rule_id: Some(rule.id.as_str().into()), name };
        RuleFeed { rule: fed_by, pattern: rule.source_pattern.as_str().into(), messages, presence }
    };
    enabled.map(feed).collect()
}
