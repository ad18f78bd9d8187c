//! A node that stood still for so long that others held it for dead comes back as another run.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::Routing;

/// Who stood still for less goes on as the run that it was, as behind a cut.
const PAUSE_MIN: Duration = Duration::from_secs(2);
/// So much later than it was a death may seem to be, by the way of what tells it. A cut that comes after the pause is none before 1.5 s.
const TOLD_WITHIN: Duration = Duration::from_millis(1_400);
/// The earliest is forgotten.
const PAUSES_MAX: usize = 16;
/// Of each run, and runs, members or not: one that stood still for hours comes back to who has long forgotten that it was one.
const DEATHS_MAX: usize = 4;
const RUNS_MAX: usize = 1024;

#[derive(Default)]
pub(super) struct Anew {
    /// When other runs were held for dead, the last time first.
    deaths: Mutex<HashMap<u64, VecDeque<Instant>>>,
    /// When this node stood still, from when until when.
    pauses: Mutex<VecDeque<(Instant, Instant)>>,
    begins: CancellationToken,
}

impl Anew {
    pub(super) fn hold_for_dead(&self, run: u64) {
        let mut deaths = self.deaths.lock();
        if deaths.len() >= RUNS_MAX && !deaths.contains_key(&run) {
            let earliest = deaths.iter().min_by_key(|(_, deaths)| deaths.front()).map(|(run, _)| *run);
            earliest.map(|earliest| deaths.remove(&earliest));
        }
        let deaths = deaths.entry(run).or_default();
        deaths.truncate(DEATHS_MAX - 1);
        deaths.push_front(Instant::now());
    }

    pub(super) fn held_for_dead(&self, run: u64) -> Vec<Duration> {
        self.deaths.lock().get(&run).into_iter().flatten().map(Instant::elapsed).collect()
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
        let was_still = |(since, until): &(Instant, Instant)| *since <= died && died <= *until + TOLD_WITHIN;
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
        // A silence of 1.5 s is a death where the run was never heard, so that cut began when it ran on.
        runs(&node, Duration::from_millis(1_500)).await;
        for ago in [Duration::ZERO, Duration::from_secs(6), Duration::MAX] {
            node.routing.was_held_for_dead(ago);
            assert!(!begins_anew(&node), "{ago:?}");
        }
        node.routing.was_held_for_dead(Duration::from_secs(4));
        assert!(begins_anew(&node));
    }

    #[tokio::test(start_paused = true)]
    async fn others_are_told_when_they_were_held_for_dead() {
        let node = Node::new();
        node.finds_the_peer();
        node.does_not_hear_the_peer(false);
        assert!(node.routing.held_for_dead(PEER).is_empty());
        node.does_not_hear_the_peer(true);
        tokio::time::advance(TICK).await;
        assert_eq!(node.routing.held_for_dead(PEER), [TICK]);
        node.does_not_hear_the_peer(false);
        node.does_not_hear_the_peer(true);
        assert_eq!(node.routing.held_for_dead(PEER), [Duration::ZERO, TICK]);
        node.routing.look_for_deaths(&[]);
        assert_eq!(
            node.routing.held_for_dead(PEER).len(),
            2,
            "it may come back when it is no member any more"
        );
        for _ in 0..DEATHS_MAX {
            node.routing.anew.hold_for_dead(PEER);
        }
        assert_eq!(node.routing.held_for_dead(PEER), [Duration::ZERO; DEATHS_MAX]);
    }

    #[tokio::test(start_paused = true)]
    async fn of_too_many_runs_that_which_died_first_is_forgotten() {
        let node = Node::new();
        for run in 0..=RUNS_MAX as u64 {
            node.routing.anew.hold_for_dead(run);
            tokio::time::advance(Duration::from_millis(1)).await;
        }
        let is_known = |run| !node.routing.held_for_dead(run).is_empty();
        assert_eq!([0, 1, RUNS_MAX as u64].map(is_known), [false, true, true]);
    }
}
