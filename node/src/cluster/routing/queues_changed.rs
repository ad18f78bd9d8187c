//! A change of the queues in the store, which every node has in memory.

use std::time::Duration;

use futures_util::future::join_all;

use super::super::inbound::PeerRequest;
use super::Routing;

/// Time for the answers. A node that does not answer reads the store by itself soon after.
const WAIT: Duration = Duration::from_millis(1_000);

impl Routing {
    /// Resolves when every reachable node has read the queues, or has not answered in time.
    pub async fn announce_queues_changed(&self) {
        let answers =
            self.linked().into_iter().map(|peer| self.ask_one(peer, 0, &PeerRequest::QueuesChanged, WAIT));
        join_all(answers).await;
    }
}
