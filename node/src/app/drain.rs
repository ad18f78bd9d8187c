//! The way of a node that leaves a cluster: its clients go to others, and first what they may have missed.

use std::time::{Duration, Instant};

use crate::cluster::routing::Routing;
use crate::edge::socket::Shards;

/// What the last client that was asked to go gets, of the time in which all are.
const LAST: Duration = Duration::from_millis(1_500);
/// How often it is looked for who has gone.
const LOOK: Duration = Duration::from_millis(20);

/// Of the time for a stop, what is kept for the steps behind its clients: a tenth, within these bounds and no more than half.
const STEPS_MIN: Duration = Duration::from_millis(500);
const STEPS_MAX: Duration = Duration::from_secs(3);
/// What a step gets when the ones before have used up the time.
const STEP_MIN: Duration = Duration::from_millis(200);

/// The time that a stop may take.
pub(super) struct Time {
    until: Instant,
    of_steps: Duration,
}

impl Time {
    pub(super) fn begin(timeout: Duration) -> Self {
        let of_steps = (timeout / 10).clamp(STEPS_MIN, STEPS_MAX).min(timeout / 2);
        Self { until: Instant::now() + timeout, of_steps }
    }

    fn left(&self) -> Duration {
        self.until.saturating_duration_since(Instant::now())
    }

    /// What clients have from now on.
    pub(super) fn for_clients(&self) -> Duration {
        self.left().saturating_sub(self.of_steps)
    }

    /// What the next step has: half of what is left, so that one that hangs does not take it from all others.
    pub(super) fn for_step(&self) -> Duration {
        (self.left() / 2).max(STEP_MIN)
    }
}

/// Asks all clients to come back elsewhere, over three fifths of the time for a drain, while another node takes over what they
/// may have missed. Does nothing where there is no other node.
pub(super) async fn move_clients(routing: &Routing, shards: &Shards, drain_timeout: Duration) {
    if !routing.begin_to_leave() {
        return;
    }
    let until = Instant::now() + drain_timeout * 3 / 5;
    let left = || until.saturating_duration_since(Instant::now());
    shards.ask_to_leave(usize::MAX, left().saturating_sub(LAST));
    let gone = async {
        while shards.connection_count() > 0 {
            tokio::time::sleep(LOOK).await;
        }
    };
    if tokio::time::timeout(left(), async { tokio::join!(routing.hand_over(), gone) }).await.is_err() {
        tracing::warn!(
            connections = shards.connection_count(),
            "not all clients have gone elsewhere in time"
        );
    }
    // What somebody attached to, or a node had that has ended since.
    if tokio::time::timeout(drain_timeout / 5, routing.hand_over()).await.is_err() {
        tracing::warn!("not all channels were taken over in time");
    }
}
