//! Sends one batch of events to one target. The outbox decides which, when and how often.

mod amqp;
mod answer;
mod aws;
mod client;
mod resolver;
#[cfg(test)]
mod tests;
mod webhook;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use fanfare_proto::trace::TraceContext;

use super::queues::BrokerQueue;
use crate::accounts::{IntegrationKind, IntegrationTarget};
use crate::model::{AccountId, UsageKind};

pub use amqp::{AmqpBrokers, AmqpPublish, AmqpPublishOutcome};
pub use aws::AwsClient;
pub use client::{ClientSetupError, TargetClients, client_tls};
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

    /// Usage kinds that are counted for the account: of deliveries, and of failed attempts.
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

/// Endpoint that receives a batch.
#[derive(Debug, Clone)]
pub enum TargetEndpoint {
    Integration(IntegrationTarget),
    Queue(Arc<BrokerQueue>),
}

/// One batch of one channel for a target; the same on each retry.
#[derive(Debug, Clone)]
pub struct TargetDelivery {
    pub account_id: AccountId,
    pub channel: Box<str>,
    /// `channel.message`, `channel.presence`, `channel.occupied` or `channel.vacated`.
    pub source: &'static str,
    /// Id of the batch, the same on every retry.
    pub event_id: Box<str>,
    pub rule_id: Box<str>,
    /// The envelope, JSON.
    pub body: Bytes,
    /// Span of this attempt, if it is traced; each retry has another one.
    pub trace: Option<Box<TraceContext>>,
}

/// Outcome of one attempt. A reason holds no secret, no user info and no query of an address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum DeliveryOutcome {
    Delivered,
    /// The batch must be sent again; not before `after` if the target asked for that.
    Retry {
        reason: String,
        after: Option<Duration>,
    },
    /// The batch goes to the dead letters at once.
    Rejected {
        reason: String,
    },
    /// The target is unreachable for all its channels; no attempt is made before `after` has passed.
    Unavailable {
        reason: String,
        after: Duration,
    },
    /// The target is disabled until the directory changes.
    Gone,
}

impl DeliveryOutcome {
    pub(super) fn retry(reason: impl Into<String>) -> Self {
        Self::Retry { reason: reason.into(), after: None }
    }
}
