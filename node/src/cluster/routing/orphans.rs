//! Members whose node has ended: who of the others lets them leave.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;
use crate::model::{ConnectionId, Digest, Owner};

/// Where the one that is to let them leave has not by then, each node does so for itself. They are the same events.
const LATE: Duration = Duration::from_secs(5);
/// By then the other nodes that have noticed an end have let its members go too.
const OTHERS_LATE: Duration = Duration::from_secs(3);

/// Runs whose members' connections are lost.
#[derive(Debug, Default)]
pub(super) struct Orphaned {
    /// Those that have members here, and since when they are lost.
    since: HashMap<u64, Instant>,
    /// Those that have none any more, or are about to.
    let_go: HashMap<u64, LetGo>,
}

#[derive(Debug)]
struct LetGo {
    since: Instant,
    /// Others may not have come to it yet, or this node has not with all of them.
    is_recent: bool,
    /// Another node had some of its members meanwhile.
    passed_over: bool,
}

impl Orphaned {
    /// These runs have members here whose connections are lost. Gives how long they are, of those that are for as long as `grace`.
    fn look(
        &mut self,
        lost: &[u64],
        has_ended: impl Fn(u64) -> bool,
        grace: Duration,
        now: Instant,
    ) -> HashMap<u64, Duration> {
        let gone = self.since.extract_if(|run, _| !lost.contains(run)).map(|(run, _)| run);
        let gone: Vec<u64> = gone.filter(|run| has_ended(*run)).collect();
        let waited = |run: &u64| now.saturating_duration_since(*self.since.entry(*run).or_insert(now));
        let due = lost.iter().copied().zip(lost.iter().map(waited));
        let due: HashMap<u64, Duration> = due.filter(|(_, waited)| *waited >= grace).collect();
        for run in due.keys().chain(&gone) {
            self.let_go.entry(*run).or_insert(LetGo { since: now, is_recent: true, passed_over: false });
        }
        due
    }

    fn passes_over(&mut self, run: u64) -> bool {
        let let_go = self.let_go.get_mut(&run).filter(|let_go| let_go.is_recent);
        let_go.is_some_and(|let_go| {
            let_go.passed_over = true;
            true
        })
    }

    /// True when others may have members by now that were passed over.
    fn settle(&mut self, due: &HashMap<u64, Duration>, now: Instant) -> bool {
        let mut asks = false;
        self.let_go.retain(|run, let_go| {
            let is_late = now.saturating_duration_since(let_go.since) >= OTHERS_LATE;
            let_go.is_recent = !is_late || due.contains_key(run);
            asks |= !let_go.is_recent && let_go.passed_over;
            let_go.is_recent
        });
        asks
    }
}

impl Routing {
    /// Whether the connections of a run are lost, as far as this node can tell: nobody hears it, or it has said goodbye, and it cannot
    /// be reached.
    pub(super) fn has_ended(&self, run: u64) -> bool {
        let is_alive = self.runs.lock().alive().any(|alive| alive == run);
        !is_alive && !self.is_up(run) && !self.deaths.lock().is_elsewhere(run)
    }

    /// Its members have just left here, or are about to. Who still has them mostly comes to that within moments, and they do not
    /// enter again for it; but that node may have heard the run for longer, so it is asked once more after that.
    pub(super) fn passes_over(&self, run: u64) -> bool {
        self.orphaned.lock().passes_over(run)
    }

    /// Connections whose members are to leave now by this node, with whose they were: their run has ended for as long as `grace`
    /// by what this node knows, and nobody has taken them up. To be called often.
    pub fn orphans(&self, grace: Duration, now: Instant) -> Vec<(ConnectionId, Owner)> {
        let own = self.hub.incarnation();
        let mut lost = self.hub.present_runs();
        lost.retain(|run| *run != own && self.has_ended(*run));
        let (due, asks) = {
            let mut orphaned = self.orphaned.lock();
            let due = orphaned.look(&lost, |run| self.has_ended(run), grace, now);
            let asks = orphaned.settle(&due, now);
            (due, asks)
        };
        if asks {
            self.ask_all_for_members();
        }
        if due.is_empty() {
            return Vec::new();
        }
        let survivors: HashMap<u64, Vec<u64>> = {
            let runs = self.runs.lock();
            due.keys().map(|run| (*run, runs.survivors_of(*run).chain([own]).collect())).collect()
        };
        let mut orphans = self.hub.present_connections(|run| due.contains_key(&run));
        orphans.retain(|(connection_id, Owner { incarnation, .. })| {
            due.get(incarnation).is_some_and(|waited| *waited >= grace + LATE)
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
    use super::super::Standing;
    use super::super::fixture::Node;
    use super::*;
    use crate::model::{ClientId, MemberId, ToldMember, ToldMembers};

    const GRACE: Duration = Duration::from_secs(15);

    fn told(connection: u8, run: u64) -> ToldMember {
        let connection_id = ConnectionId::from_bytes([connection; 16]);
        let member = MemberId { connection_id, client_id: ClientId::of("a") };
        ToldMember { member, owner: Owner { epoch: 0, incarnation: run }, data: None, timestamp_ms: 1 }
    }

    #[tokio::test]
    async fn members_let_go_reenter_only_after_other_nodes_had_time() {
        let (node, now) = (Node::new(), Instant::now());
        let tells = |members: Vec<ToldMember>| {
            node.routing.take_members(7, 1, ToldMembers::new(node.key.clone(), 7, None, members, true));
            node.routing.hub.present_connections(|_| true).len()
        };
        assert_eq!(tells(vec![told(1, 99)]), 1);
        assert!(node.routing.orphans(GRACE, now).is_empty());
        assert_eq!(node.routing.orphans(GRACE, now + GRACE).len(), 1);
        assert_eq!(tells(vec![told(1, 99), told(2, 99)]), 1);
        assert_eq!(tells(vec![told(3, 98)]), 2);
        let asks = |after: Duration| {
            node.finds_the_peer();
            node.has_a_link();
            node.says();
            node.routing.orphans(GRACE, now + GRACE + after);
            let says = node.says();
            node.loses_its_links();
            !says.is_empty()
        };
        let taken_up = Owner { epoch: 1, incarnation: 98 };
        node.routing.hub.take_over_presence(ConnectionId::from_bytes([1; 16]), taken_up);
        assert!(!asks(OTHERS_LATE / 2) && asks(OTHERS_LATE) && !asks(2 * OTHERS_LATE));
        assert_eq!(tells(vec![told(1, 99), told(2, 99)]), 3);
    }

    #[tokio::test]
    async fn orphaned_members_stay_while_another_node_hears_their_node() {
        let (node, now) = (Node::new(), Instant::now());
        let member = ToldMembers::new(node.key.clone(), 99, None, vec![told(1, 99)], true);
        node.routing.take_members(99, 1, member);
        let is_heard_by_others = |is_elsewhere| {
            let standing = Standing { incarnation: 99, is_dead: true, is_elsewhere, ..Standing::default() };
            node.routing.look_for_deaths(&[standing]);
        };
        let leave_at = |graces| node.routing.orphans(GRACE, now + graces * GRACE).len();
        is_heard_by_others(true);
        assert_eq!([0, 1, 2].map(leave_at), [0; 3]);
        is_heard_by_others(false);
        assert_eq!([3, 4].map(leave_at), [0, 1]);
        is_heard_by_others(true);
        assert_eq!([5, 6].map(leave_at), [0; 2]);
        node.routing.look_for_deaths(&[]);
        assert_eq!([7, 8].map(leave_at), [0, 1], "gossip knows of it no more");
    }

    #[test]
    fn incarnation_is_let_go_when_members_due_or_gone_and_not_back() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let (mut orphaned, back) = (Orphaned::default(), 3);
        let mut look = |lost: &[u64], seconds| {
            let due = orphaned.look(lost, |run| run != back, GRACE, at(seconds));
            orphaned.settle(&due, at(seconds));
            [1, 2, back].map(|run| orphaned.passes_over(run))
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
