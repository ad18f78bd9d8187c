//! The settings of a target that the outbox reads.

use std::sync::Arc;

use super::store::BatchBounds;
use crate::accounts::{Account, AwsBatching, Integration, IntegrationTarget};
use crate::origin::targets::{TargetEndpoint, TargetKind};

/// The settings under which a target is sent to.
#[derive(Debug, Clone)]
pub(super) struct TargetSettings {
    pub(super) account: Arc<Account>,
    pub(super) kind: TargetKind,
    pub(super) endpoint: TargetEndpoint,
    pub(super) sending: SendSettings,
    /// Hash of the settings; it differs if any of them does.
    pub(super) hash: u64,
}

impl TargetSettings {
    pub(super) fn of_integration(account: Arc<Account>, integration: &Integration) -> Self {
        Self {
            account,
            kind: integration.kind.into(),
            sending: SendSettings::of(integration),
            endpoint: TargetEndpoint::Integration(integration.target.clone()),
            hash: integration.settings_hash,
        }
    }
}

/// Bounds of batches, and their concurrency.
#[derive(Debug, Clone, Copy)]
pub(super) struct SendSettings {
    pub(super) bounds: BatchBounds,
    pub(super) linger_ms: u64,
    /// Channels that are sent concurrently.
    pub(super) parallel: usize,
}

impl SendSettings {
    /// Settings of a queue, whose consumers receive and confirm each event separately.
    pub(super) const QUEUE: Self =
        Self { bounds: BatchBounds { events: 1, bytes: usize::MAX }, linger_ms: 0, parallel: 64 };

    pub(super) fn of(integration: &Integration) -> Self {
        match &integration.target {
            IntegrationTarget::Webhook(webhook) => Self {
                bounds: BatchBounds { events: webhook.batch_events, bytes: webhook.batch_bytes },
                linger_ms: u64::try_from(webhook.linger.as_millis()).unwrap_or(u64::MAX),
                parallel: webhook.parallel,
            },
            IntegrationTarget::Amqp(amqp) => Self {
                bounds: BatchBounds { events: amqp.batch_events, bytes: amqp.batch_bytes },
                linger_ms: u64::try_from(amqp.linger.as_millis()).unwrap_or(u64::MAX),
                parallel: amqp.parallel,
            },
            IntegrationTarget::Lambda(function) => Self::of_aws(function.batching),
            IntegrationTarget::Sns(topic) => Self::of_aws(topic.batching),
        }
    }

    fn of_aws(batching: AwsBatching) -> Self {
        Self {
            bounds: BatchBounds { events: batching.events, bytes: batching.bytes },
            linger_ms: u64::try_from(batching.linger.as_millis()).unwrap_or(u64::MAX),
            parallel: batching.parallel,
        }
    }
}
