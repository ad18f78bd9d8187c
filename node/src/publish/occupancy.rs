//! The way of an occupancy event to the integrations of its account: into the outbox alone, since no history keeps it.

use tokio::sync::oneshot;

use super::Publisher;
use crate::accounts::Account;
use crate::model::ChannelKey;
use crate::origin::outbox::Source;

impl Publisher {
    /// Tells the account's integrations that the channel has become occupied, or vacated. False where that could not be written; then it
    /// is to be tried again.
    pub async fn tell_occupied(&self, account: &Account, key: &ChannelKey, is_occupied: bool) -> bool {
        let source = if is_occupied { Source::Occupied } else { Source::Vacated };
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
