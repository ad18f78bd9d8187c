//! The path of an occupancy event to the integrations of its account: into the outbox alone, since no history keeps it.

use tokio::sync::oneshot;

use super::Publisher;
use crate::accounts::Account;
use crate::model::ChannelKey;
use crate::origin::outbox::EventSource;

impl Publisher {
    /// Announces to the account's integrations that the channel has become occupied or vacated. False if the outbox did not take it; the
    /// caller retries.
    pub async fn announce_occupancy(&self, account: &Account, key: &ChannelKey, is_occupied: bool) -> bool {
        let source = if is_occupied { EventSource::Occupied } else { EventSource::Vacated };
        let targets = &self.inner.targets;
        let Ok(wanting) = targets.of(account, key, source) else { return false };
        let Some(outbox) = targets.outbox().filter(|_| !wanting.is_empty()) else { return true };
        let (answer, written) = oneshot::channel();
        outbox.put_occupancy(
            key,
            source,
            &wanting,
            Box::new(move |result| {
                // The waiting task may have been cancelled.
                answer.send(result.is_ok()).ok();
            }),
        );
        written.await.unwrap_or(false)
    }
}
