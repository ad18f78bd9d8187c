//! Retirement of incarnations: takes those out of channel positions from which no client can resume any more.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;

/// Longest interval of the check. An incarnation is retired at most twice this time late, before the store drops its messages
/// (`scylla::policies`). After that, no client could resume a channel that still awaits messages of the incarnation.
const LOOK_MAX: Duration = Duration::from_secs(15);

/// Incarnations in channel positions or in reports of peers that are not members, and since when.
#[derive(Debug, Default)]
pub(super) struct RetirementCandidates(HashMap<u64, Instant>);

impl RetirementCandidates {
    /// Returns the incarnations that have been absent for longer than `keeps_for`.
    fn look(&mut self, absent: &HashSet<u64>, keeps_for: Duration, now: Instant) -> Vec<u64> {
        self.0.retain(|incarnation, _| absent.contains(incarnation));
        for incarnation in absent {
            self.0.entry(*incarnation).or_insert(now);
        }
        let is_expired = |since: &Instant| now.saturating_duration_since(*since) > keeps_for;
        self.0.iter().filter(|(_, since)| is_expired(since)).map(|(incarnation, _)| *incarnation).collect()
    }
}

impl Routing {
    /// Removes retired incarnations from channel positions and from the reports of peers, until it is cancelled.
    pub(super) async fn retire_absent_in_time(&self) {
        let keeps_for = self.hub.retention();
        loop {
            tokio::time::sleep((keeps_for / 8).clamp(Duration::from_millis(100), LOOK_MAX)).await;
            self.retire_absent(keeps_for, Instant::now());
        }
    }

    fn retire_absent(&self, keeps_for: Duration, now: Instant) {
        let mut absent = self.hub.known_incarnations();
        for own in self.local_interest.lock().values() {
            absent.extend(own.retired.entries().iter().map(|(incarnation, _)| *incarnation));
        }
        absent.retain(|incarnation| {
            !self.peers.read().contains_key(incarnation)
                && !self.node_failures.lock().has_open_streams(*incarnation)
        });
        let retired = self.retirement.lock().look(&absent, keeps_for, now);
        if retired.is_empty() {
            return;
        }
        // Nothing is awaited from these any more. One that may be taking publishes stays in `confirmed`.
        let over: Vec<u64> =
            retired.iter().copied().filter(|incarnation| !self.may_still_deliver(*incarnation)).collect();
        for own in self.local_interest.lock().values_mut() {
            own.retired.retain(|incarnation| !retired.contains(&incarnation));
            own.confirmed.retain(|incarnation| !over.contains(incarnation));
        }
        self.hub.retire_incarnations(&retired);
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::Inbound as _;
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::*;
    use crate::model::Stamp;

    #[tokio::test]
    async fn retired_incarnations_sent_by_peers_are_forgotten_in_time() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.is_attached_to();
        let (keeps_for, now) = (Duration::from_secs(9), Instant::now());
        let look = |seconds| node.routing.retire_absent(keeps_for, now + Duration::from_secs(seconds));
        let retired = || node.routing.local_interest.lock()[&node.number()].retired.entries().to_vec();
        node.says_joined(0, 0, vec![Stamp { incarnation: 99, sequence: 4 }]);
        look(0);
        node.says_joined(0, 1, vec![Stamp { incarnation: 98, sequence: 2 }]);
        look(5);
        look(9);
        assert_eq!(retired(), [(98, 2), (99, 4)]);
        look(10);
        assert_eq!(retired(), [(98, 2)]);
        look(15);
        assert!(retired().is_empty());
    }

    #[tokio::test]
    async fn absent_forwarder_is_forgotten_once_its_peer_stream_ended() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.routing.stream_opened(&node.peer, 0);
        let now = Instant::now();
        let look = |seconds| {
            node.routing.retire_absent(Duration::from_secs(9), now + Duration::from_secs(seconds));
            let confirmed = node.routing.local_interest.lock()[&node.number()].confirmed.len();
            assert_eq!(confirmed, node.routing.hub.known_incarnations().len());
            confirmed
        };
        assert_eq!((look(0), look(10)), (1, 1));
        node.loses_the_peer();
        assert_eq!((look(11), look(21)), (1, 1), "something of it may come");
        node.routing.stream_ended(&node.peer, 0, true);
        assert_eq!((look(22), look(32)), (1, 0));
    }

    /// A peer in doubt is a machine that lost its power, or one that is partitioned.
    #[tokio::test]
    async fn forgotten_incarnation_that_was_in_doubt_stays_confirmed() {
        for (is_contiguous, confirmed) in [(true, vec![]), (false, vec![PEER])] {
            let node = RoutingTestNode::new();
            node.sees_the_peer_die(is_contiguous);
            let now = Instant::now();
            for seconds in [0, 10] {
                node.routing.retire_absent(Duration::from_secs(9), now + Duration::from_secs(seconds));
            }
            assert!(node.routing.hub.known_incarnations().is_empty());
            let channel = node.routing.hub.live(&node.key).expect("it is attached to");
            assert_eq!(node.routing.confirmed_incarnations(&channel), confirmed);
        }
    }

    #[test]
    fn incarnation_absent_without_a_break_is_forgotten() {
        let (mut absent, now) = (RetirementCandidates::default(), Instant::now());
        let keeps_for = Duration::from_secs(9);
        let mut look = |incarnations: &[u64], seconds: u64| {
            let incarnations = incarnations.iter().copied().collect();
            absent.look(&incarnations, keeps_for, now + Duration::from_secs(seconds))
        };
        assert_eq!(look(&[1, 2], 0), [0; 0]);
        assert_eq!(look(&[1], 5), [0; 0]);
        assert_eq!(look(&[1, 2], 9), [0; 0]);
        assert_eq!(look(&[1, 2], 10), [1]);
        assert_eq!(look(&[2], 19), [2]);
    }
}
