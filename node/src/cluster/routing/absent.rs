//! Runs from which nobody comes back any more need not stand in positions.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;

/// A run is forgotten within twice of that, which is before the store forgets what it kept (`scylla::policies`): from then on nobody could be
/// resumed where something is owed of it.
const LOOK_MAX: Duration = Duration::from_secs(15);

/// Runs that stand in positions, or of which others have told, and are no members, as many as there are, and since when.
#[derive(Debug, Default)]
pub(super) struct Absent(HashMap<u64, Instant>);

impl Absent {
    /// Those of them that have been absent for longer than that.
    fn look(&mut self, absent: &HashSet<u64>, keeps_for: Duration, now: Instant) -> Vec<u64> {
        self.0.retain(|run, _| absent.contains(run));
        for run in absent {
            self.0.entry(*run).or_insert(now);
        }
        let is_over = |since: &Instant| now.saturating_duration_since(*since) > keeps_for;
        self.0.iter().filter(|(_, since)| is_over(since)).map(|(run, _)| *run).collect()
    }
}

impl Routing {
    /// Takes runs out of positions, forever, and what others have told of them with them.
    pub(super) async fn forget_the_absent(&self) {
        let keeps_for = self.hub.keeps_for();
        loop {
            tokio::time::sleep((keeps_for / 8).clamp(Duration::from_millis(100), LOOK_MAX)).await;
            self.forget_absent(keeps_for, Instant::now());
        }
    }

    fn forget_absent(&self, keeps_for: Duration, now: Instant) {
        let mut absent = self.hub.runs();
        for own in self.own.lock().values() {
            absent.extend(own.gone.entries().iter().map(|(run, _)| *run));
        }
        absent.retain(|run| !self.peers.read().contains_key(run) && !self.deaths.lock().has_lanes(*run));
        let gone = self.absent.lock().look(&absent, keeps_for, now);
        if gone.is_empty() {
            return;
        }
        // Of these nothing is owed any more. One that may be taking publishes owes what it takes.
        let over: Vec<u64> = gone.iter().copied().filter(|run| !self.may_come(*run)).collect();
        for own in self.own.lock().values_mut() {
            own.gone.retain(|run| !gone.contains(&run));
            own.confirmed.retain(|run| !over.contains(run));
        }
        self.hub.forget_runs(&gone);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::Inbound as _;
    use super::super::fixture::{Node, PEER};
    use super::*;
    use crate::model::Stamp;

    #[tokio::test]
    async fn retired_incarnations_told_by_peers_are_forgotten_in_time() {
        let node = Node::new();
        node.finds_the_peer();
        node.is_attached_to();
        let (keeps_for, now) = (Duration::from_secs(9), Instant::now());
        let look = |seconds| node.routing.forget_absent(keeps_for, now + Duration::from_secs(seconds));
        let told = || node.routing.own.lock()[&node.number()].gone.entries().to_vec();
        node.says_joined(0, 0, vec![Stamp { incarnation: 99, sequence: 4 }]);
        look(0);
        node.says_joined(0, 1, vec![Stamp { incarnation: 98, sequence: 2 }]);
        look(5);
        look(9);
        assert_eq!(told(), [(98, 2), (99, 4)]);
        look(10);
        assert_eq!(told(), [(98, 2)]);
        look(15);
        assert!(told().is_empty());
    }

    #[tokio::test]
    async fn absent_forwarder_is_forgotten_once_its_peer_stream_ended() {
        let node = Node::new();
        node.finds_the_peer();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.routing.lane_opened(&node.peer, 0);
        let now = Instant::now();
        let look = |seconds| {
            node.routing.forget_absent(Duration::from_secs(9), now + Duration::from_secs(seconds));
            let owed = node.routing.own.lock()[&node.number()].confirmed.len();
            assert_eq!(owed, node.routing.hub.runs().len());
            owed
        };
        assert_eq!((look(0), look(10)), (1, 1));
        node.loses_the_peer();
        assert_eq!((look(11), look(21)), (1, 1), "something of it may come");
        node.routing.lane_ended(&node.peer, 0, true);
        assert_eq!((look(22), look(32)), (1, 0));
    }

    /// A machine that lost its power, or that is behind a cut.
    #[tokio::test]
    async fn forgotten_incarnation_that_was_in_doubt_stays_owed() {
        for (is_whole, owed) in [(true, vec![]), (false, vec![PEER])] {
            let node = Node::new();
            node.sees_the_peer_die(is_whole);
            let now = Instant::now();
            for seconds in [0, 10] {
                node.routing.forget_absent(Duration::from_secs(9), now + Duration::from_secs(seconds));
            }
            assert!(node.routing.hub.runs().is_empty());
            let channel = node.routing.hub.live(&node.key).expect("it is attached to");
            assert_eq!(node.routing.owed(&channel), owed);
        }
    }

    #[test]
    fn incarnation_absent_without_a_break_is_forgotten() {
        let (mut absent, now) = (Absent::default(), Instant::now());
        let keeps_for = Duration::from_secs(9);
        let mut look = |runs: &[u64], seconds: u64| {
            let runs = runs.iter().copied().collect();
            absent.look(&runs, keeps_for, now + Duration::from_secs(seconds))
        };
        assert_eq!(look(&[1, 2], 0), [0; 0]);
        assert_eq!(look(&[1], 5), [0; 0]);
        assert_eq!(look(&[1, 2], 9), [0; 0]);
        assert_eq!(look(&[1, 2], 10), [1]);
        assert_eq!(look(&[2], 19), [2]);
    }
}
