//! A change of the queues in the store, which every node has in memory.

use std::time::Duration;

use futures_util::future::join_all;

use super::super::inbound::Request;
use super::Routing;

/// A node that does not answer reads the store by itself soon after.
const WAIT: Duration = Duration::from_millis(1_000);

impl Routing {
    /// Resolves when every node that can be reached has read the queues, or has not answered in time.
    pub async fn tell_queues_changed(&self) {
        let told = self.linked().into_iter().map(|peer| self.ask_one(peer, 0, &Request::QueuesChanged, WAIT));
        join_all(told).await;
    }
}
