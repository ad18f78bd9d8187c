//! Queues of accounts: their definitions, their feeds, and the broker that holds them.
//!
//! The store has the definitions, one row for each account. Every node has all of them in memory, and changes a row only from the revision
//! that it knows. The outbox sends to a queue as to any other target.

mod broker;
mod catalog;
mod consumers;
mod definitions;
mod management;
mod service;
#[cfg(test)]
mod tests;
mod upkeep;

use std::fmt;

use fanfare_proto::queue::Queue;

use super::history::StoreError;
use crate::model::AccountId;

pub use catalog::{CandidateQueue, QueueCatalog, QueueLookup};
pub use consumers::BrokerRequest;
pub use service::{BrokerAddresses, PeerNotifier, Queues};

/// A queue as the broker has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerQueue {
    /// Name on the broker: `accountId:name`.
    pub physical: Box<str>,
    /// Bound of its messages; `None` if it has none.
    max_length: Option<u64>,
}

/// Suffix of the dead-letter queue's name. No queue's own name holds a colon.
const DEAD: &str = ":dead";

impl BrokerQueue {
    fn of(queue: &Queue) -> Self {
        let physical = format!("{}:{}", queue.account_id, queue.name).into();
        Self { physical, max_length: queue.max_length }
    }

    /// Names a queue without a bound.
    fn unbound(physical: Box<str>) -> Self {
        Self { physical, max_length: None }
    }

    fn dead(&self) -> String {
        format!("{}{DEAD}", self.physical)
    }

    /// Parses a name on the broker as account and queue; that of a dead-letter queue gives its queue.
    fn parse(physical: &str) -> Option<(AccountId, &str)> {
        let (account, name) = physical.split_once(':')?;
        let name = name.strip_suffix(DEAD).unwrap_or(name);
        definitions::is_queue_name(name).then(|| (AccountId::new(account), name))
    }
}

/// Reason why a call failed; the text names no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum QueueError {
    UnknownQueue,
    UnknownRule,
    Malformed(String),
    /// The capability does not cover all channels that feed the queue.
    Forbidden,
    /// The account has as many queues as it may.
    TooMany {
        queues_max: u64,
    },
    /// The account's queues and rules together exceed the largest stored text.
    TooLarge,
    /// Other calls change the account's queues at the same time.
    Busy,
    Store(StoreError),
    Broker(BrokerError),
}

impl fmt::Display for QueueError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::UnknownQueue => f.write_str("the account has no such queue"),
            Self::UnknownRule => f.write_str("the queue has no such rule"),
            Self::Malformed(text) => f.write_str(text),
            Self::Forbidden => {
                f.write_str("the capability does not cover every channel that feeds the queue")
            }
            Self::TooMany { queues_max } => write!(f, "the account may have {queues_max} queues"),
            Self::TooLarge => f.write_str("the account has no room for further queues or rules"),
            Self::Busy => f.write_str("the queues are being changed by other calls, try again"),
            Self::Store(error) => error.fmt(f),
            Self::Broker(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for QueueError {}

impl From<StoreError> for QueueError {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}

impl From<BrokerError> for QueueError {
    fn from(error: BrokerError) -> Self {
        Self::Broker(error)
    }
}

/// Error of a request to the broker; the reason holds no credential.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BrokerError(pub(super) String);

impl fmt::Display for BrokerError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the broker of the queues: {}", self.0)
    }
}

impl std::error::Error for BrokerError {}
