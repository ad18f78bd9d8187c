//! The settings of a target that the outbox reads.

use std::sync::Arc;

use super::store::BatchBounds;
use crate::accounts::{Account, AwsBatching, Integration, Target};
use crate::origin::targets::{Endpoint, TargetKind};

/// The settings under which a target is sent to.
#[derive(Debug, Clone)]
pub(super) struct TargetSettings {
    pub(super) account: Arc<Account>,
    pub(super) kind: TargetKind,
    pub(super) endpoint: Endpoint,
    pub(super) sending: Sending,
    /// Another number where the settings differ.
    pub(super) hash: u64,
}

impl TargetSettings {
    pub(super) fn of_integration(account: Arc<Account>, integration: &Integration) -> Self {
        Self {
            account,
            kind: integration.kind.into(),
            sending: Sending::of(integration),
            endpoint: Endpoint::Integration(integration.target.clone()),
            hash: integration.settings_hash,
        }
    }
}

/// Batches, and how many are under way.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sending {
    pub(super) bounds: BatchBounds,
    pub(super) linger_ms: u64,
    /// Channels at the same time.
    pub(super) parallel: usize,
}

impl Sending {
    /// To a queue: consumers take and confirm each event by itself.
    pub(super) const QUEUE: Self =
        Self { bounds: BatchBounds { events: 1, bytes: usize::MAX }, linger_ms: 0, parallel: 64 };

    pub(super) fn of(integration: &Integration) -> Self {
        match &integration.target {
            Target::Webhook(webhook) => Self {
                bounds: BatchBounds { events: webhook.batch_events, bytes: webhook.batch_bytes },
                linger_ms: u64::try_from(webhook.linger.as_millis()).unwrap_or(u64::MAX),
                parallel: webhook.parallel,
            },
            Target::Amqp(amqp) => Self {
                bounds: BatchBounds { events: amqp.batch_events, bytes: amqp.batch_bytes },
                linger_ms: u64::try_from(amqp.linger.as_millis()).unwrap_or(u64::MAX),
                parallel: amqp.parallel,
            },
            Target::Lambda(function) => Self::of_aws(function.batching),
            Target::Sns(topic) => Self::of_aws(topic.batching),
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
