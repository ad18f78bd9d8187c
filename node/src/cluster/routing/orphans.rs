//! Members whose node has ended: who of the others lets them leave.

use std::collections::HashMap;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::Routing;
use crate::model::{ConnectionId, Digest, Owner};

/// Where the one that is to let them leave has not by then, each node does so for itself. They are the same events.
const LATE: Duration = Duration::from_secs(5);

impl Routing {
    /// Whether the connections of a run are lost, as far as this node can tell: it is not heard, or has said goodbye, and cannot
    /// be reached.
    pub(super) fn has_ended(&self, run: u64) -> bool {
        let is_alive = self.runs.lock().alive().any(|alive| alive == run);
        !is_alive && !self.is_up(run)
    }

    /// Its members have left here, or are about to: who still has them comes to that by itself, and they do not enter again for it.
    pub(super) fn is_let_go(&self, run: u64) -> bool {
        let gone_for = self.runs.lock().gone_for(run, tokio::time::Instant::now());
        gone_for.is_some_and(|gone| gone.as_millis() >= u128::from(self.grace_ms.load(Ordering::Relaxed)))
    }

    /// Connections whose members are to leave now by this node, with whose they were: their run has ended for as long as `grace`
    /// by what this node knows, and nobody has taken them up. To be called often.
    pub fn orphans(&self, grace: Duration, now: Instant) -> Vec<(ConnectionId, Owner)> {
        let grace_ms = u64::try_from(grace.as_millis()).unwrap_or(u64::MAX);
        self.grace_ms.store(grace_ms, Ordering::Relaxed);
        let own = self.hub.incarnation();
        let mut ended = self.hub.present_runs();
        ended.retain(|run| *run != own && self.has_ended(*run));
        let mut since = self.orphaned.lock();
        since.retain(|run, _| ended.contains(run));
        for run in ended {
            since.entry(run).or_insert(now);
        }
        let due: HashMap<u64, bool> = since
            .iter()
            .map(|(run, since)| (*run, now.saturating_duration_since(*since)))
            .filter(|(_, waited)| *waited >= grace)
            .map(|(run, waited)| (run, waited >= grace + LATE))
            .collect();
        drop(since);
        if due.is_empty() {
            return Vec::new();
        }
        let survivors: HashMap<u64, Vec<u64>> = {
            let runs = self.runs.lock();
            due.keys().map(|run| (*run, runs.survivors_of(*run).chain([own]).collect())).collect()
        };
        let mut orphans = self.hub.present_connections(|run| due.contains_key(&run));
        orphans.retain(|(connection_id, Owner { incarnation, .. })| {
            due.get(incarnation) == Some(&true)
                || chosen(*connection_id, &survivors[incarnation]) == Some(own)
        });
        orphans
    }
}

/// The same one on all nodes that know of the same runs, and mostly the same when one of them ends.
fn chosen(connection_id: ConnectionId, runs: &[u64]) -> Option<u64> {
    let weight = |run: &u64| Digest::default().of(connection_id.as_bytes()).of(&run.to_be_bytes()).number();
    runs.iter().copied().max_by_key(|run| (weight(run), *run))
}

#[cfg(test)]
mod tests {
    use super::super::fixture::Node;
    use super::*;
    use crate::model::{ClientId, MemberId, ToldMember, ToldMembers};

    #[tokio::test]
    async fn who_was_let_go_does_not_enter_again_where_another_node_is_late() {
        let node = Node::new();
        let (grace, now) = (Duration::from_secs(15), Instant::now());
        assert!(node.routing.orphans(grace, now).is_empty());
        node.routing.take_ended(&[(99, 15_000), (98, 14_000)]);
        let members = [99_u8, 98, 97].map(|run| ToldMember {
            member: MemberId {
                connection_id: ConnectionId::from_bytes([run; 16]),
                client_id: ClientId::of("a"),
            },
            owner: Owner { epoch: 0, incarnation: run.into() },
            data: None,
            timestamp_ms: 1,
        });
        let mut members = members.to_vec();
        members.reverse();
        node.routing.take_members(7, 1, ToldMembers::new(node.key.clone(), 7, None, members, true));
        let mut present = node.routing.hub.present_runs();
        present.sort_unstable();
        assert_eq!(present, [97, 98]);
    }

    #[test]
    fn each_connection_has_one_run_and_another_only_when_that_has_ended() {
        let runs: Vec<u64> = (1..=5).collect();
        let mut counts = HashMap::<u64, usize>::new();
        for number in 0..200_u8 {
            let connection_id = ConnectionId::from_bytes([number; 16]);
            let of = |runs: &[u64]| chosen(connection_id, runs).expect("there is a run");
            let first = of(&runs);
            *counts.entry(first).or_default() += 1;
            let mut turned = runs.clone();
            turned.reverse();
            assert_eq!(of(&turned), first);
            for gone in &runs {
                let left: Vec<u64> = runs.iter().copied().filter(|run| run != gone).collect();
                assert_eq!(of(&left) == first, *gone != first);
            }
        }
        assert!(counts.len() == 5 && counts.values().all(|count| *count > 20), "{counts:?}");
    }
}
