//! The settings of a target that the outbox reads.

use sha2::{Digest as _, Sha256};

use super::store::BatchBounds;
use crate::accounts::{Integration, Target};

/// How a target is sent to; none: this version does not send to targets of its kind.
#[derive(Debug, Clone, Copy)]
pub(super) struct Sending {
    pub(super) bounds: BatchBounds,
    pub(super) linger_ms: u64,
    /// Channels at the same time.
    pub(super) parallel: usize,
}

impl Sending {
    pub(super) fn of(integration: &Integration) -> Option<Self> {
        match &integration.target {
            Target::Webhook(webhook) => Some(Self {
                bounds: BatchBounds { events: webhook.batch_events, bytes: webhook.batch_bytes },
                linger_ms: u64::try_from(webhook.linger.as_millis()).unwrap_or(u64::MAX),
                parallel: webhook.parallel,
            }),
            Target::Other => None,
        }
    }
}

/// Another number where the directory says something else of the integration.
pub(super) fn settings_hash(integration: &Integration) -> u64 {
    let text = toml::to_string(&integration.fields).unwrap_or_default();
    let hash = Sha256::digest(format!("{:?}{:?}{text}", integration.kind, integration.channels));
    u64::from_be_bytes(std::array::from_fn(|place| hash[place]))
}
