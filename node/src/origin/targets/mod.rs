//! Sends one batch of events to one target. The outbox decides which, when and how often.

mod amqp;
mod answer;
mod aws;
mod client;
mod names;
#[cfg(test)]
mod tests;
mod webhook;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fanfare_proto::trace::TraceContext;

use super::queues::BrokerQueue;
use crate::accounts::{IntegrationKind, Target};
use crate::model::{AccountId, UsageKind};

pub use amqp::{Brokers, Publish, Published};
pub use aws::Aws;
pub use client::{Clients, Unusable, client_tls};
pub use webhook::Webhooks;

/// The kinds of targets, as metrics name them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TargetKind {
    Webhook,
    Amqp,
    Lambda,
    Sns,
    Queue,
}

impl TargetKind {
    pub const ALL: [Self; 5] = [Self::Webhook, Self::Amqp, Self::Lambda, Self::Sns, Self::Queue];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Webhook => "webhook",
            Self::Amqp => "amqp",
            Self::Lambda => "lambda",
            Self::Sns => "sns",
            Self::Queue => "queue",
        }
    }

    /// The kinds that are counted for the account: of deliveries, and of failed attempts.
    pub fn usage(self) -> (UsageKind, UsageKind) {
        match self {
            Self::Webhook => (UsageKind::Webhook, UsageKind::WebhookFailed),
            Self::Amqp => (UsageKind::Amqp, UsageKind::AmqpFailed),
            Self::Lambda => (UsageKind::Lambda, UsageKind::LambdaFailed),
            Self::Sns => (UsageKind::Sns, UsageKind::SnsFailed),
            Self::Queue => (UsageKind::Queue, UsageKind::QueueFailed),
        }
    }
}

impl From<IntegrationKind> for TargetKind {
    fn from(kind: IntegrationKind) -> Self {
        match kind {
            IntegrationKind::Webhook => Self::Webhook,
            IntegrationKind::Amqp => Self::Amqp,
            IntegrationKind::Lambda => Self::Lambda,
            IntegrationKind::Sns => Self::Sns,
        }
    }
}

/// The receiver of a batch.
#[derive(Debug, Clone)]
pub enum Endpoint {
    Integration(Target),
    Queue(Arc<BrokerQueue>),
}

/// One batch of one channel on its way to a target; the same for each retry.
#[derive(Debug, Clone)]
pub struct Delivery {
    pub account_id: AccountId,
    pub channel: Box<str>,
    /// `channel.message`, `channel.presence`, `channel.occupied` or `channel.vacated`.
    pub source: &'static str,
    /// The same on every retry.
    pub event_id: Box<str>,
    pub rule_id: Box<str>,
    /// The envelope, JSON.
    pub body: Bytes,
    /// The span of this attempt, where it is traced: another one for each retry.
    pub trace: Option<Box<TraceContext>>,
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
    /// The target cannot be reached for any of its channels: nothing is sent to it before `after` has passed.
    Unavailable {
        reason: String,
        after: Duration,
    },
    /// The target is disabled until the directory changes.
    Gone,
}

impl Outcome {
    pub(super) fn retry(reason: impl Into<String>) -> Self {
        Self::Retry { reason: reason.into(), after: None }
    }
}
