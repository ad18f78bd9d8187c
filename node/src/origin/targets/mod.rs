//! Sends one batch of events to one target. The outbox decides which, when and how often.

mod answer;
mod guard;
mod names;
#[cfg(test)]
mod tests;
mod webhook;

use std::time::Duration;

use bytes::Bytes;

use crate::model::AccountId;

pub use webhook::{Unusable, Webhooks};

/// One batch of one channel on its way to a target; the same for each retry.
#[derive(Debug, Clone)]
pub struct Delivery {
    pub account_id: AccountId,
    pub channel: Box<str>,
    /// `channel.message` or `channel.presence`.
    pub source: &'static str,
    /// The same on every retry.
    pub event_id: Box<str>,
    pub rule_id: Box<str>,
    /// The envelope, JSON.
    pub body: Bytes,
}

/// The end of one attempt. A reason holds no secret, no user info and no query of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Outcome {
    Delivered,
    /// The batch is to be sent again, not before `after` where the target asked for that.
    Retry {
        reason: String,
        after: Option<Duration>,
    },
    /// The batch goes to the dead letters at once.
    Rejected {
        reason: String,
    },
    /// The target is disabled until the directory changes.
    Gone,
}

impl Outcome {
    fn retry(reason: impl Into<String>) -> Self {
        Self::Retry { reason: reason.into(), after: None }
    }
}
