//! Orphaned members: selects the node that lets the members of an ended node leave.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;
use crate::model::{ConnectionId, Digest, SessionOwner};

/// Time after which each node lets orphaned members leave by itself, if the selected node has not. The leave events are the same.
const LATE: Duration = Duration::from_secs(5);
/// Time within which the other nodes that noticed an end have let its members leave, too.
const OTHERS_LATE: Duration = Duration::from_secs(3);

/// Ended incarnations with orphaned members.
#[derive(Debug, Default)]
pub(super) struct OrphanedIncarnations {
    /// Incarnations that have members here, and the time at which their connections were lost.
    since: HashMap<u64, Instant>,
    /// Incarnations whose members have left here, or are about to.
    let_go: HashMap<u64, ReleasedIncarnation>,
}

#[derive(Debug)]
struct ReleasedIncarnation {
    since: Instant,
    /// True while this node or another one may not have let all members leave.
    is_recent: bool,
    /// True if another node's snapshot held members of it, which were skipped.
    passed_over: bool,
}

impl OrphanedIncarnations {
    /// Takes the incarnations with members here whose connections are lost. Returns those that are due after the presence timeout, with
    /// the time since the loss.
    fn look(
        &mut self,
        lost: &[u64],
        has_ended: impl Fn(u64) -> bool,
        presence_timeout: Duration,
        now: Instant,
    ) -> HashMap<u64, Duration> {
        let ended = self
            .since
            .extract_if(|incarnation, _| !lost.contains(incarnation))
            .map(|(incarnation, _)| incarnation);
        let ended: Vec<u64> = ended.filter(|incarnation| has_ended(*incarnation)).collect();
        let waited =
            |incarnation: &u64| now.saturating_duration_since(*self.since.entry(*incarnation).or_insert(now));
        let due = lost.iter().copied().zip(lost.iter().map(waited));
        let due: HashMap<u64, Duration> = due.filter(|(_, waited)| *waited >= presence_timeout).collect();
        for incarnation in due.keys().chain(&ended) {
            self.let_go.entry(*incarnation).or_insert(ReleasedIncarnation {
                since: now,
                is_recent: true,
                passed_over: false,
            });
        }
        due
    }

    fn passes_over(&mut self, incarnation: u64) -> bool {
        let let_go = self.let_go.get_mut(&incarnation).filter(|let_go| let_go.is_recent);
        let_go.is_some_and(|let_go| {
            let_go.passed_over = true;
            true
        })
    }

    /// Forgets incarnations whose release is complete. True if peers must be asked again for members that were skipped.
    fn settle(&mut self, due: &HashMap<u64, Duration>, now: Instant) -> bool {
        let mut must_ask = false;
        self.let_go.retain(|incarnation, let_go| {
            let is_late = now.saturating_duration_since(let_go.since) >= OTHERS_LATE;
            let_go.is_recent = !is_late || due.contains_key(incarnation);
            must_ask |= !let_go.is_recent && let_go.passed_over;
            let_go.is_recent
        });
        must_ask
    }
}

impl Routing {
    /// True if the connections of an incarnation are lost, as far as this node can tell: it is unreachable, and no node sees it or it has
    /// said goodbye.
    pub(super) fn has_ended(&self, incarnation: u64) -> bool {
        let is_alive = self.incarnations.lock().alive().any(|alive| alive == incarnation);
        !is_alive && !self.is_up(incarnation) && !self.node_failures.lock().is_seen_by_others(incarnation)
    }

    /// True if members of the incarnation are to be skipped in a peer's snapshot, since they have just left here or are about to. Mostly
    /// the peer lets them leave within moments. It may have seen the incarnation for longer, so it is asked once more later.
    pub(super) fn passes_over(&self, incarnation: u64) -> bool {
        self.orphaned.lock().passes_over(incarnation)
    }

    /// Connections whose orphaned members this node lets leave now, with their owners: the incarnation ended at least the presence
    /// timeout ago, and no node has taken the session over. Called often.
    pub fn orphaned_connections(
        &self,
        presence_timeout: Duration,
        now: Instant,
    ) -> Vec<(ConnectionId, SessionOwner)> {
        let own = self.hub.incarnation();
        let mut lost = self.hub.member_incarnations();
        lost.retain(|incarnation| *incarnation != own && self.has_ended(*incarnation));
        let (due, must_ask) = {
            let mut orphaned = self.orphaned.lock();
            let due = orphaned.look(&lost, |incarnation| self.has_ended(incarnation), presence_timeout, now);
            let must_ask = orphaned.settle(&due, now);
            (due, must_ask)
        };
        if must_ask {
            self.ask_all_for_members();
        }
        if due.is_empty() {
            return Vec::new();
        }
        let survivors: HashMap<u64, Vec<u64>> = {
            let known = self.incarnations.lock();
            due.keys()
                .map(|incarnation| (*incarnation, known.survivors_of(*incarnation).chain([own]).collect()))
                .collect()
        };
        let mut connections = self.hub.present_connections(|incarnation| due.contains_key(&incarnation));
        connections.retain(|(connection_id, SessionOwner { incarnation, .. })| {
            due.get(incarnation).is_some_and(|waited| *waited >= presence_timeout + LATE)
                || chosen(*connection_id, &survivors[incarnation]) == Some(own)
        });
        connections
    }
}

/// Selects one incarnation for a connection: the same on all nodes that know the same incarnations, and mostly the same after one ends.
fn chosen(connection_id: ConnectionId, incarnations: &[u64]) -> Option<u64> {
    let weight = |incarnation: &u64| {
        Digest::default().of(connection_id.as_bytes()).of(&incarnation.to_be_bytes()).number()
    };
    incarnations.iter().copied().max_by_key(|incarnation| (weight(incarnation), *incarnation))
}

#[cfg(test)]
mod tests {
    use super::super::GossipStatus;
    use super::super::fixture::RoutingTestNode;
    use super::*;
    use crate::model::{ClientId, MemberId, RemoteMember, RemoteMembersPage};

    const PRESENCE_TIMEOUT: Duration = Duration::from_secs(15);

    fn snapshot_member(connection: u8, incarnation: u64) -> RemoteMember {
        let connection_id = ConnectionId::from_bytes([connection; 16]);
        let member = MemberId { connection_id, client_id: ClientId::of("a") };
        RemoteMember { member, owner: SessionOwner { epoch: 0, incarnation }, data: None, timestamp_ms: 1 }
    }

    #[tokio::test]
    async fn members_let_go_reenter_only_after_other_nodes_had_time() {
        let (node, now) = (RoutingTestNode::new(), Instant::now());
        let count_after = |members: Vec<RemoteMember>| {
            node.routing.take_members(7, 1, RemoteMembersPage::new(node.key.clone(), 7, None, members, true));
            node.routing.hub.present_connections(|_| true).len()
        };
        assert_eq!(count_after(vec![snapshot_member(1, 99)]), 1);
        assert!(node.routing.orphaned_connections(PRESENCE_TIMEOUT, now).is_empty());
        assert_eq!(node.routing.orphaned_connections(PRESENCE_TIMEOUT, now + PRESENCE_TIMEOUT).len(), 1);
        assert_eq!(count_after(vec![snapshot_member(1, 99), snapshot_member(2, 99)]), 1);
        assert_eq!(count_after(vec![snapshot_member(3, 98)]), 2);
        let must_ask = |after: Duration| {
            node.finds_the_peer();
            node.has_a_link();
            node.says();
            node.routing.orphaned_connections(PRESENCE_TIMEOUT, now + PRESENCE_TIMEOUT + after);
            let says = node.says();
            node.loses_its_links();
            !says.is_empty()
        };
        let new_owner = SessionOwner { epoch: 1, incarnation: 98 };
        node.routing.hub.take_over_presence(ConnectionId::from_bytes([1; 16]), new_owner);
        assert!(!must_ask(OTHERS_LATE / 2) && must_ask(OTHERS_LATE) && !must_ask(2 * OTHERS_LATE));
        assert_eq!(count_after(vec![snapshot_member(1, 99), snapshot_member(2, 99)]), 3);
    }

    #[tokio::test]
    async fn orphaned_members_stay_while_another_node_hears_their_node() {
        let (node, now) = (RoutingTestNode::new(), Instant::now());
        let member = RemoteMembersPage::new(node.key.clone(), 99, None, vec![snapshot_member(1, 99)], true);
        node.routing.take_members(99, 1, member);
        let set_seen_by_others = |is_seen_by_others| {
            let status =
                GossipStatus { incarnation: 99, is_down: true, is_seen_by_others, ..GossipStatus::default() };
            node.routing.update_node_failures(&[status]);
        };
        let leave_at = |timeouts| {
            node.routing.orphaned_connections(PRESENCE_TIMEOUT, now + timeouts * PRESENCE_TIMEOUT).len()
        };
        set_seen_by_others(true);
        assert_eq!([0, 1, 2].map(leave_at), [0; 3]);
        set_seen_by_others(false);
        assert_eq!([3, 4].map(leave_at), [0, 1]);
        set_seen_by_others(true);
        assert_eq!([5, 6].map(leave_at), [0; 2]);
        node.routing.update_node_failures(&[]);
        assert_eq!([7, 8].map(leave_at), [0, 1], "gossip knows of it no more");
    }

    #[test]
    fn incarnation_is_let_go_when_members_due_or_gone_and_not_back() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let (mut orphaned, back) = (OrphanedIncarnations::default(), 3);
        let mut look = |lost: &[u64], seconds| {
            let due = orphaned.look(lost, |incarnation| incarnation != back, PRESENCE_TIMEOUT, at(seconds));
            orphaned.settle(&due, at(seconds));
            [1, 2, back].map(|incarnation| orphaned.passes_over(incarnation))
        };
        assert_eq!(look(&[1, 2, back], 0), [false; 3]);
        assert_eq!(look(&[1], 14), [false, true, false], "another node had 2 leave");
        assert_eq!(look(&[1], 15), [true, true, false]);
        assert_eq!(look(&[1], 17), [true, false, false]);
        assert_eq!(look(&[1], 19), [true, false, false], "some of its members are about to leave");
        assert_eq!(look(&[], 20), [false; 3]);
        assert!(orphaned.let_go.is_empty() && orphaned.since.is_empty());
    }

    #[test]
    fn connection_keeps_its_chosen_incarnation_until_that_one_ends() {
        let incarnations: Vec<u64> = (1..=5).collect();
        let mut counts = HashMap::<u64, usize>::new();
        for number in 0..200_u8 {
            let connection_id = ConnectionId::from_bytes([number; 16]);
            let of = |incarnations: &[u64]| chosen(connection_id, incarnations).expect("there is a run");
            let first = of(&incarnations);
            *counts.entry(first).or_default() += 1;
            let mut turned = incarnations.clone();
            turned.reverse();
            assert_eq!(of(&turned), first);
            for ended in &incarnations {
                let left: Vec<u64> =
                    incarnations.iter().copied().filter(|incarnation| incarnation != ended).collect();
                assert_eq!(of(&left) == first, *ended != first);
            }
        }
        assert!(counts.len() == 5 && counts.values().all(|count| *count > 20), "{counts:?}");
    }
}
