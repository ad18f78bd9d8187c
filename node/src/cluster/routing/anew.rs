//! A node that stood still for so long that others held it for dead comes back as another run.

use std::collections::HashSet;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Routing;
use crate::cluster::inbound::Interest;

/// Who stood still for less goes on as the run that it was, as behind a cut.
const STOOD_STILL: Duration = Duration::from_secs(2);
/// When it runs on it is told within this that it was held for dead.
const TOLD_WITHIN: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct Anew {
    /// Runs of others that are held for dead, and have not been told.
    held: Mutex<HashSet<u64>>,
    /// Until when this node stood still when it last did.
    stood_still: Mutex<Option<Instant>>,
    begins: CancellationToken,
}

impl Anew {
    pub(super) fn hold_for_dead(&self, run: u64) {
        self.held.lock().insert(run);
    }

    /// It is no member any more.
    pub(super) fn forget(&self, run: u64) {
        self.held.lock().remove(&run);
    }
}

impl Routing {
    /// To be called several times a second.
    pub(super) fn look_at_the_clock(&self) {
        let now = Instant::now();
        let stood_still = self.deaths.lock().looked(now);
        if stood_still.is_some_and(|stood_still| stood_still >= STOOD_STILL) {
            *self.anew.stood_still.lock() = Some(now);
        }
    }

    /// A run that is heard again, or that there is a link to, is told that it was held for dead, once.
    pub(super) fn say_held_for_dead(&self, to: u64) {
        if self.is_up(to) && self.anew.held.lock().remove(&to) {
            self.send(to, 0, &Interest::HeldForDead);
        }
    }

    pub(super) fn was_held_for_dead(&self) {
        // It may come before the next look.
        self.look_at_the_clock();
        let stood_still = *self.anew.stood_still.lock();
        if stood_still.is_some_and(|until| until.elapsed() <= TOLD_WITHIN) {
            self.anew.begins.cancel();
        }
    }

    /// Resolves when this node has stood still for 2 s or more, and another one says that it held it for dead: it is to go on as
    /// another run.
    pub async fn begins_anew(&self) {
        self.anew.begins.cancelled().await;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::super::fixture::{Node, PEER};
    use super::super::{Inbound as _, Item};
    use super::*;

    fn begins_anew(node: &Node) -> bool {
        pin!(node.routing.begins_anew()).now_or_never().is_some()
    }

    /// Every task stands still with it.
    async fn stands_still(node: &Node, how_long: Duration) {
        node.routing.look_at_the_clock();
        tokio::time::advance(how_long).await;
    }

    #[tokio::test(start_paused = true)]
    async fn who_stood_still_and_was_held_for_dead_begins_anew() {
        let node = Node::new();
        stands_still(&node, STOOD_STILL).await;
        node.routing.look_at_the_clock();
        assert!(!begins_anew(&node), "nobody has noticed");
        node.routing.interest(&node.peer, Interest::HeldForDead);
        assert!(begins_anew(&node));
    }

    #[tokio::test(start_paused = true)]
    async fn it_need_not_have_noticed_before_it_is_told() {
        let node = Node::new();
        stands_still(&node, STOOD_STILL).await;
        node.routing.interest(&node.peer, Interest::HeldForDead);
        assert!(begins_anew(&node));
    }

    #[tokio::test(start_paused = true)]
    async fn who_ran_all_the_time_was_behind_a_cut() {
        for stood_still in [Duration::ZERO, STOOD_STILL - Duration::from_millis(1)] {
            let node = Node::new();
            stands_still(&node, stood_still).await;
            node.routing.interest(&node.peer, Interest::HeldForDead);
            assert!(!begins_anew(&node), "{stood_still:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cut_long_after_it_stood_still_is_another_matter() {
        let node = Node::new();
        stands_still(&node, STOOD_STILL).await;
        node.routing.look_at_the_clock();
        let end = Instant::now() + TOLD_WITHIN;
        while Instant::now() <= end {
            stands_still(&node, Duration::from_millis(100)).await;
        }
        node.routing.interest(&node.peer, Interest::HeldForDead);
        assert!(!begins_anew(&node));
    }

    #[tokio::test]
    async fn who_is_heard_again_is_told_once_when_it_can_be_reached() {
        let node = Node::new();
        let is_told = || node.says().contains(&Item::interest(&Interest::HeldForDead));
        node.sees_the_peer_die(true);
        assert!(!is_told());
        node.finds_the_peer();
        node.does_not_hear_the_peer(false);
        assert!(!is_told(), "it cannot be reached");
        node.has_a_link();
        node.routing.link(&node.peer, true);
        assert!(is_told());
        node.routing.link(&node.peer, true);
        assert!(!is_told(), "it was");
    }

    #[tokio::test]
    async fn who_can_be_reached_is_told_when_it_is_heard_again_and_nobody_else() {
        let node = Node::new();
        let is_told = || node.says().contains(&Item::interest(&Interest::HeldForDead));
        node.finds_the_peer();
        node.has_a_link();
        node.does_not_hear_the_peer(false);
        node.routing.link(&node.peer, true);
        assert!(!is_told(), "it was never held for dead");
        node.does_not_hear_the_peer(true);
        assert!(!is_told());
        node.does_not_hear_the_peer(false);
        assert!(is_told());
        node.does_not_hear_the_peer(true);
        node.routing.look_for_deaths(&[]);
        assert!(!node.routing.anew.held.lock().contains(&PEER), "what is no member is forgotten");
    }
}
