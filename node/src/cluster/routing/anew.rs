//! A node that stood still for so long that others held it for dead comes back as another run.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Routing;

/// Who stood still for less goes on as the run that it was, as behind a cut.
const PAUSE_MIN: Duration = Duration::from_secs(2);
/// Who says since when it held this run for dead is heard within this. No cut that comes after the pause is a death so soon.
const HEARD_WITHIN: Duration = Duration::from_secs(2);
/// The earliest is forgotten.
const PAUSES_MAX: usize = 16;

#[derive(Default)]
pub(super) struct Anew {
    /// When other runs were held for dead, the last time that they were.
    deaths: Mutex<HashMap<u64, Instant>>,
    /// When this node stood still, from when until when.
    pauses: Mutex<VecDeque<(Instant, Instant)>>,
    begins: CancellationToken,
}

impl Anew {
    pub(super) fn hold_for_dead(&self, run: u64) {
        self.deaths.lock().insert(run, Instant::now());
    }

    pub(super) fn held_for_dead(&self, run: u64) -> Option<Duration> {
        self.deaths.lock().get(&run).map(Instant::elapsed)
    }

    /// It is no member any more.
    pub(super) fn forget(&self, run: u64) {
        self.deaths.lock().remove(&run);
    }
}

impl Routing {
    /// To be called several times a second.
    pub(super) fn look_at_the_clock(&self) {
        let now = Instant::now();
        let Some(since) = self.deaths.lock().looked(now) else { return };
        if now.saturating_duration_since(since) >= PAUSE_MIN {
            let mut pauses = self.anew.pauses.lock();
            pauses.truncate(PAUSES_MAX - 1);
            pauses.push_front((since, now));
        }
    }

    /// Another node began to hold this run for dead so long ago. Where it stood still then that was its death; else there was a cut.
    pub(super) fn begin_anew_if_still(&self, ago: Duration) {
        // It may be told before the next look.
        self.look_at_the_clock();
        let Some(died) = Instant::now().checked_sub(ago) else { return };
        let was_still = |(since, until): &(Instant, Instant)| *since <= died && died <= *until + HEARD_WITHIN;
        if self.anew.pauses.lock().iter().any(was_still) {
            self.anew.begins.cancel();
        }
    }

    /// Resolves when another node says that it held this one for dead while it stood still for 2 s or more: it is to go on as another run.
    pub async fn begins_anew(&self) {
        self.anew.begins.cancelled().await;
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use futures_util::FutureExt as _;

    use super::super::Inbound as _;
    use super::super::fixture::{Node, PEER};
    use super::*;

    const TICK: Duration = Duration::from_millis(100);

    fn begins_anew(node: &Node) -> bool {
        pin!(node.routing.begins_anew()).now_or_never().is_some()
    }

    /// Every task stands still with it.
    async fn stands_still(node: &Node, how_long: Duration) {
        node.routing.look_at_the_clock();
        tokio::time::advance(how_long).await;
    }

    async fn runs(node: &Node, how_long: Duration) {
        let end = Instant::now() + how_long;
        while Instant::now() < end {
            stands_still(node, TICK).await;
        }
        node.routing.look_at_the_clock();
    }

    #[tokio::test(start_paused = true)]
    async fn who_stood_still_when_it_was_held_for_dead_begins_anew() {
        let node = Node::new();
        stands_still(&node, PAUSE_MIN).await;
        runs(&node, TICK).await;
        assert!(!begins_anew(&node), "nobody has noticed");
        node.routing.was_held_for_dead(2 * TICK);
        assert!(begins_anew(&node));
    }

    #[tokio::test(start_paused = true)]
    async fn it_need_not_have_noticed_before_it_is_told() {
        let node = Node::new();
        stands_still(&node, PAUSE_MIN).await;
        node.routing.was_held_for_dead(TICK);
        assert!(begins_anew(&node));
    }

    #[tokio::test(start_paused = true)]
    async fn it_may_be_told_much_later() {
        let node = Node::new();
        stands_still(&node, PAUSE_MIN).await;
        for _ in 1..PAUSES_MAX {
            runs(&node, 50 * TICK).await;
            stands_still(&node, PAUSE_MIN).await;
        }
        runs(&node, 600 * TICK).await;
        let since = Duration::from_secs(60 + 5 * 15 + 2 * 15) + TICK;
        node.routing.was_held_for_dead(since);
        assert!(begins_anew(&node));
    }

    #[tokio::test(start_paused = true)]
    async fn who_ran_all_the_time_was_behind_a_cut() {
        for stood_still in [Duration::ZERO, PAUSE_MIN - Duration::from_millis(1)] {
            let node = Node::new();
            stands_still(&node, stood_still).await;
            node.routing.was_held_for_dead(TICK);
            assert!(!begins_anew(&node), "{stood_still:?}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_cut_before_or_after_it_stood_still_is_another_matter() {
        let node = Node::new();
        runs(&node, 50 * TICK).await;
        stands_still(&node, 2 * PAUSE_MIN).await;
        // A silence of 2.3 s is a death, so this cut began when it ran on.
        runs(&node, Duration::from_millis(2_300)).await;
        for ago in [Duration::ZERO, Duration::from_secs(7), Duration::MAX] {
            node.routing.was_held_for_dead(ago);
            assert!(!begins_anew(&node), "{ago:?}");
        }
        node.routing.was_held_for_dead(Duration::from_secs(4));
        assert!(begins_anew(&node));
    }

    #[tokio::test(start_paused = true)]
    async fn others_are_told_when_they_were_held_for_dead_last() {
        let node = Node::new();
        node.finds_the_peer();
        node.does_not_hear_the_peer(false);
        assert_eq!(node.routing.held_for_dead(PEER), None);
        node.does_not_hear_the_peer(true);
        tokio::time::advance(TICK).await;
        assert_eq!(node.routing.held_for_dead(PEER), Some(TICK));
        node.does_not_hear_the_peer(false);
        assert_eq!(node.routing.held_for_dead(PEER), Some(TICK), "it is back");
        node.does_not_hear_the_peer(true);
        assert_eq!(node.routing.held_for_dead(PEER), Some(Duration::ZERO));
        node.routing.look_for_deaths(&[]);
        assert_eq!(node.routing.held_for_dead(PEER), None, "what is no member is forgotten");
    }
}
