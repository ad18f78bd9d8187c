//! Stored queues and rules of one account, and their changes.

use fanfare_proto::queue::{Filter, FilterSource, Queue, QueueEdit, QueueRequest, Rule, RuleRequest};
use serde::{Deserialize, Serialize};

use super::QueueError;
use crate::model::{AccountId, Capability, Operation, random_bytes};

/// Largest stored text.
const BYTES_MAX: usize = 1024 * 1024;
const PATTERN_BYTES_MAX: usize = 512;
const FILTER_BYTES_MAX: usize = 256;

/// All queues of an account, in the order in which they were made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Definitions {
    /// Random id of each change, by which a change whose answer was lost is recognised.
    #[serde(default)]
    pub(super) change: String,
    pub(super) queues: Vec<Definition>,
}

/// A queue and its rules, in the order in which they were made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Definition {
    pub(super) queue: Queue,
    pub(super) rules: Vec<Rule>,
}

impl Definition {
    /// Returns whether the capability covers every channel that feeds the queue.
    pub(super) fn is_covered_by(&self, capability: &Capability) -> bool {
        let covers = |pattern: &str| capability.covers(pattern, Operation::AmqpSubscribe);
        match &self.rules[..] {
            [] => covers("*"),
            rules => rules.iter().all(|rule| covers(&rule.source_pattern)),
        }
    }
}

impl Definitions {
    /// Serialises the definitions.
    ///
    /// # Errors
    /// The text is larger than `BYTES_MAX`.
    pub(super) fn to_text(&self) -> Result<String, QueueError> {
        let text = serde_json::to_string(self).map_err(|_| QueueError::TooLarge)?;
        if text.len() > BYTES_MAX { Err(QueueError::TooLarge) } else { Ok(text) }
    }

    pub(super) fn by_name(&self, name: &str) -> Option<&Definition> {
        self.queues.iter().find(|found| found.queue.name == name)
    }

    /// Returns the queue if the capability covers it.
    pub(super) fn covered(&self, id: &str, capability: &Capability) -> Result<&Definition, QueueError> {
        let found = self.queues.iter().find(|found| found.queue.id == id).ok_or(QueueError::UnknownQueue)?;
        if found.is_covered_by(capability) { Ok(found) } else { Err(QueueError::Forbidden) }
    }

    fn covered_mut(&mut self, id: &str, capability: &Capability) -> Result<&mut Definition, QueueError> {
        self.covered(id, capability)?;
        self.queues.iter_mut().find(|found| found.queue.id == id).ok_or(QueueError::UnknownQueue)
    }

    /// Adds the queue, or edits the one of that name.
    pub(super) fn put(
        &mut self,
        account: &AccountId,
        request: &QueueRequest,
        queues_max: Option<u64>,
        capability: &Capability,
    ) -> Result<Queue, QueueError> {
        if !is_queue_name(&request.name) {
            let text = "name must be 1 to 128 of A-Z, a-z, 0-9, ., _ and -";
            return Err(QueueError::Malformed(text.to_owned()));
        }
        if let Some(id) = self.by_name(&request.name).map(|found| found.queue.id.clone()) {
            return self.edit(&id, request.edit, capability);
        }
        if let Some(queues_max) = queues_max.filter(|max| self.queues.len() as u64 >= *max) {
            return Err(QueueError::TooMany { queues_max });
        }
        let queue = Queue {
            id: new_id(),
            account_id: account.as_str().to_owned(),
            name: request.name.clone(),
            max_length: request.edit.max_length.flatten(),
            enabled: request.edit.enabled.unwrap_or(true),
        };
        self.queues.push(Definition { queue: queue.clone(), rules: Vec::new() });
        self.covered(&queue.id, capability)?;
        Ok(queue)
    }

    pub(super) fn edit(
        &mut self,
        id: &str,
        edit: QueueEdit,
        capability: &Capability,
    ) -> Result<Queue, QueueError> {
        let queue = &mut self.covered_mut(id, capability)?.queue;
        queue.max_length = edit.max_length.unwrap_or(queue.max_length);
        queue.enabled = edit.enabled.unwrap_or(queue.enabled);
        Ok(queue.clone())
    }

    pub(super) fn remove(&mut self, id: &str, capability: &Capability) -> Result<Queue, QueueError> {
        let queue = self.covered(id, capability)?.queue.clone();
        self.queues.retain(|found| found.queue.id != id);
        Ok(queue)
    }

    /// Adds a rule. The capability must cover the queue before and after.
    pub(super) fn add_rule(
        &mut self,
        id: &str,
        request: &RuleRequest,
        capability: &Capability,
    ) -> Result<Rule, QueueError> {
        check_pattern("sourcePattern", &request.source_pattern, PATTERN_BYTES_MAX)?;
        if let Some(name) = request.filter.as_ref().and_then(|filter| filter.name.as_deref()) {
            check_pattern("filter.name", name, FILTER_BYTES_MAX)?;
        }
        let found = self.covered_mut(id, capability)?;
        let rule = Rule {
            id: new_id(),
            account_id: found.queue.account_id.clone(),
            queue_name: found.queue.name.clone(),
            source_pattern: request.source_pattern.clone(),
            filter: request.filter.clone(),
            enabled: true,
        };
        found.rules.push(rule.clone());
        self.covered(id, capability)?;
        Ok(rule)
    }

    /// Removes a rule. The capability must cover the queue before and after.
    pub(super) fn remove_rule(
        &mut self,
        id: &str,
        rule_id: &str,
        capability: &Capability,
    ) -> Result<(), QueueError> {
        let found = self.covered_mut(id, capability)?;
        let before = found.rules.len();
        found.rules.retain(|rule| rule.id != rule_id);
        if found.rules.len() == before {
            return Err(QueueError::UnknownRule);
        }
        self.covered(id, capability).map(drop)
    }
}

/// Returns whether the name is valid for a queue.
pub(super) fn is_queue_name(name: &str) -> bool {
    let is_of_name = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-');
    (1..=128).contains(&name.len()) && name.bytes().all(is_of_name)
}

/// Returns whether the filter passes events of messages, and of presence.
pub(super) fn sources(filter: Option<&Filter>) -> (bool, bool) {
    let listed = filter.and_then(|filter| filter.source.as_ref());
    let lists = |source| listed.is_none_or(|sources| sources.contains(&source));
    (lists(FilterSource::Message), lists(FilterSource::Presence))
}

fn check_pattern(field: &str, pattern: &str, bytes_max: usize) -> Result<(), QueueError> {
    let wrong = match pattern {
        "" => "must not be empty".to_owned(),
        _ if pattern.len() > bytes_max => format!("must not be longer than {bytes_max} bytes"),
        _ if pattern.chars().any(char::is_control) => "must not hold a control character".to_owned(),
        _ => return Ok(()),
    };
    Err(QueueError::Malformed(format!("{field} {wrong}")))
}

pub(super) fn new_id() -> String {
    uuid::Builder::from_random_bytes(random_bytes()).into_uuid().to_string()
}
