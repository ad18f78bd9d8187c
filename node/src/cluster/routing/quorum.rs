//! Quorum of the nodes of which a majority must remember a nonce, and whether this node counts for it. No I/O; the time is passed in.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

/// Time after which a node that was not seen leaves the quorum: the nonces that it remembers are over by then.
const SEEN_LAST: Duration = Duration::from_secs(15 * 60);
/// Most nodes that are held, far more than a cluster has. A further one is not recorded while it is away.
const NODES_MAX: usize = 4_096;
/// Longest time between the moments at which two nodes notice that a third one is away.
const NOTICED_APART: Duration = Duration::from_secs(5);
/// Largest difference of a correct clock from the median of the others, in milliseconds.
const CLOCKS_APART_MS: u64 = 60_000;

/// State of the quorum that a node keeps over a restart.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct KeptNodes {
    /// True if the node counts: it remembers all nonces that it must.
    pub counts: bool,
    /// Ids of the other nodes, and how many milliseconds ago each was seen.
    pub seen: Vec<(Box<str>, u64)>,
    /// Nodes of `seen` that were away when this node last counted, and were not seen since. Without meaning while `counts` is true.
    pub away: Vec<Box<str>>,
}

pub(super) struct NonceQuorum {
    own: Arc<str>,
    /// False if a shared store remembers the nonces for all nodes.
    is_needed: bool,
    counts: bool,
    /// True if this node counted before it was started, and still has those nonces.
    counted: bool,
    /// True once every live node has had enough time to be reached.
    is_late: bool,
    alive: HashMap<u64, Arc<str>>,
    seen: HashMap<Box<str>, Instant>,
    /// Nodes that were away when this node last counted, and when each had been seen last by then.
    away: HashMap<Box<str>, Instant>,
    /// True once this node has sent its nonces to the others in order to leave.
    has_left: bool,
    /// Incarnations that have sent their nonces to the others in order to leave.
    handed_off: HashSet<u64>,
    /// Incarnations whose nonces are all here, if they had any.
    asked: HashSet<u64>,
    /// Whether each node counted when it was asked, by node id.
    answered: HashMap<Box<str>, bool>,
}

impl NonceQuorum {
    pub(super) fn new(own: &Arc<str>, kept: KeptNodes, now: Instant) -> Self {
        let mut quorum = Self {
            own: Arc::clone(own),
            is_needed: false,
            counts: false,
            counted: kept.counts,
            is_late: false,
            alive: HashMap::new(),
            seen: HashMap::new(),
            away: HashMap::new(),
            has_left: false,
            handed_off: HashSet::new(),
            asked: HashSet::new(),
            answered: HashMap::new(),
        };
        quorum.learn_nodes(&kept.seen, now);
        // If this node counted and was killed, these nodes may have been back since the list was stored.
        let away = quorum.seen.iter().filter(|(node_id, _)| !kept.counts && kept.away.contains(node_id));
        quorum.away = away.map(|(node_id, at)| (node_id.clone(), *at)).collect();
        quorum
    }

    pub(super) fn begin(&mut self) {
        self.is_needed = true;
    }

    pub(super) fn is_needed(&self) -> bool {
        self.is_needed
    }

    pub(super) fn counts(&self) -> bool {
        self.counts
    }

    /// Sets the live nodes, and records that those until now were seen.
    pub(super) fn see(&mut self, alive: HashMap<u64, Arc<str>>, now: Instant) {
        for (incarnation, node_id) in std::mem::replace(&mut self.alive, alive) {
            if !self.handed_off.contains(&incarnation) && self.seen.len() < NODES_MAX {
                self.seen.insert((&*node_id).into(), now);
            }
        }
        let alive = &self.alive;
        self.asked.retain(|incarnation| alive.contains_key(incarnation));
        self.handed_off.retain(|incarnation| alive.contains_key(incarnation));
        self.seen.retain(|_, at| now.saturating_duration_since(*at) < SEEN_LAST);
    }

    /// Records that an incarnation has sent its nonces to the others in order to leave.
    pub(super) fn leaves(&mut self, incarnation: u64) {
        let Some(node_id) = self.alive.get(&incarnation) else { return };
        self.seen.remove(&**node_id);
        self.handed_off.insert(incarnation);
    }

    /// Records that this node sends its nonces to the others in order to leave. It may not learn of later claims, so it does not count.
    pub(super) fn leave(&mut self, now: Instant) {
        if self.counts {
            let mut away = self.others(now);
            away.retain(|node_id| !self.lives(node_id));
            let seen = |node_id: Box<str>| {
                let at = self.seen.get(&node_id).copied().unwrap_or(now);
                (node_id, at)
            };
            self.away = away.into_iter().map(seen).collect();
        }
        self.answered.clear();
        (self.counts, self.counted, self.has_left) = (false, false, true);
    }

    /// Records that the nonces of an incarnation are here, whether it counts, and the nodes that it has seen.
    pub(super) fn taken(&mut self, incarnation: u64, counts: bool, seen: &[(Box<str>, u64)], now: Instant) {
        let Some(node_id) = self.alive.get(&incarnation) else { return };
        self.answered.insert((&**node_id).into(), counts);
        self.asked.insert(incarnation);
        self.learn_nodes(seen, now);
    }

    pub(super) fn has_asked(&self, incarnation: u64) -> bool {
        self.asked.contains(&incarnation)
    }

    /// True if this node counts or has had enough time to, and every live node has been asked.
    pub(super) fn is_settled(&self) -> bool {
        !self.is_needed || ((self.counts || self.is_late) && self.has_asked_all())
    }

    /// Lets this node serve although it does not count yet.
    pub(super) fn wait_no_longer(&mut self) {
        self.is_late = true;
    }

    /// True if every live node has been asked.
    pub(super) fn has_asked_all(&self) -> bool {
        self.alive.keys().all(|incarnation| self.asked.contains(incarnation))
    }

    /// Decides whether this node begins to count; true if it does now. A node that has kept its nonces begins once all reachable nodes
    /// have been asked. A node without nonces needs those of a majority of the counting nodes, so that any majority of them is known
    /// here. A node that was away when this one stopped, and still is, is left out: it has remembered nothing since.
    pub(super) fn decide(&mut self, is_asked: bool, now: Instant) -> bool {
        if self.counts || self.has_left || !is_asked {
            return false;
        }
        let mut others = self.others(now);
        others.retain(|node_id| !self.is_still_away(node_id));
        let answers = others.iter().map(|node_id| self.answered.get(node_id).copied());
        let of_those: Vec<_> = answers.filter(|answer| *answer != Some(false)).collect();
        let taken = of_those.iter().filter(|answer| answer.is_some()).count();
        self.counts = self.counted || of_those.is_empty() || 2 * taken > of_those.len();
        self.counts
    }

    /// True if `remembering` nodes, this one included, are a majority of the nodes that were seen.
    pub(super) fn is_majority(&self, remembering: usize, now: Instant) -> bool {
        2 * remembering > self.others(now).len() + 1
    }

    pub(super) fn kept(&self, now: Instant) -> KeptNodes {
        let others = self.others(now);
        let away: Vec<Box<str>> = others.iter().filter(|id| self.is_still_away(id)).cloned().collect();
        let seen = others.into_iter().map(|node_id| {
            let before = self.away.get(&node_id).filter(|_| away.contains(&node_id));
            let last = before.or(self.seen.get(&node_id)).filter(|_| !self.lives(&node_id));
            let age = now.saturating_duration_since(last.copied().unwrap_or(now));
            (node_id, u64::try_from(age.as_millis()).unwrap_or(u64::MAX))
        });
        KeptNodes { counts: self.counts || self.counted, seen: seen.collect(), away }
    }

    fn lives(&self, node_id: &str) -> bool {
        self.alive.values().any(|alive| **alive == *node_id)
    }

    fn is_still_away(&self, node_id: &str) -> bool {
        let (Some(before), Some(seen)) = (self.away.get(node_id), self.seen.get(node_id)) else {
            return false;
        };
        *seen <= *before + NOTICED_APART && !self.lives(node_id) && !self.answered.contains_key(node_id)
    }

    fn others(&self, now: Instant) -> BTreeSet<Box<str>> {
        let alive = self.alive.iter().filter(|(incarnation, _)| !self.handed_off.contains(incarnation));
        let alive = alive.map(|(_, node_id)| Box::from(&**node_id));
        let seen = self.seen.iter().filter(|(_, at)| now.saturating_duration_since(**at) < SEEN_LAST);
        alive.chain(seen.map(|(node_id, _)| node_id.clone())).collect()
    }

    fn learn_nodes(&mut self, nodes: &[(Box<str>, u64)], now: Instant) {
        for (node_id, age_ms) in nodes {
            let Some(at) = now.checked_sub(Duration::from_millis(*age_ms)) else { continue };
            let is_known = self.seen.contains_key(node_id) || self.seen.len() < NODES_MAX;
            if is_known && **node_id != *self.own && now.saturating_duration_since(at) < SEEN_LAST {
                let seen = self.seen.entry(node_id.clone()).or_insert(at);
                *seen = at.max(*seen);
            }
        }
    }
}

/// True if a clock is near enough to the median of the others, or there are no others.
pub(super) fn is_near(now_ms: u64, others_ms: &[u64]) -> bool {
    let mut others_ms = others_ms.to_vec();
    others_ms.sort_unstable();
    let middle = |at: usize| others_ms.get(at).copied();
    let (Some(low), Some(high)) =
        (middle(others_ms.len().saturating_sub(1) / 2), middle(others_ms.len() / 2))
    else {
        return true;
    };
    now_ms.abs_diff(low.midpoint(high)) <= CLOCKS_APART_MS
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quorum(kept: KeptNodes) -> (NonceQuorum, Instant) {
        let now = Instant::now();
        (NonceQuorum::new(&"own".into(), kept, now), now)
    }

    fn alive(nodes: &[(u64, &str)]) -> HashMap<u64, Arc<str>> {
        nodes.iter().map(|(incarnation, node_id)| (*incarnation, Arc::from(*node_id))).collect()
    }

    #[test]
    fn down_nodes_count_for_the_majority_for_a_quarter_hour() {
        let (mut quorum, now) = quorum(KeptNodes::default());
        assert!(quorum.is_majority(1, now), "alone");
        quorum.see(alive(&[(1, "a"), (2, "b")]), now);
        assert!(quorum.is_majority(2, now) && !quorum.is_majority(1, now));
        quorum.see(alive(&[]), now);
        assert!(!quorum.is_majority(1, now + SEEN_LAST / 2));
        quorum.see(alive(&[(3, "a")]), now);
        assert!(quorum.is_majority(2, now), "another run of a node is the same node");
        quorum.see(alive(&[]), now);
        assert!(quorum.is_majority(1, now + SEEN_LAST));
    }

    #[test]
    fn node_that_handed_off_does_not_count_until_it_is_back() {
        let (mut quorum, now) = quorum(KeptNodes::default());
        quorum.see(alive(&[(1, "a"), (2, "b")]), now);
        quorum.leaves(1);
        quorum.leaves(2);
        assert!(quorum.is_majority(1, now));
        quorum.see(alive(&[(2, "b"), (3, "a")]), now);
        assert!(!quorum.is_majority(1, now), "until it is back");
        assert!(quorum.is_majority(2, now));
    }

    #[test]
    fn node_without_memory_needs_majority_of_nodes_with_memory() {
        let (mut quorum, now) = quorum(KeptNodes::default());
        quorum.see(alive(&[(1, "a"), (2, "b"), (3, "c"), (4, "new")]), now);
        quorum.taken(1, true, &[("dead".into(), 0), ("own".into(), 0)], now);
        quorum.taken(4, false, &[], now);
        assert!(!quorum.decide(false, now));
        assert!(!quorum.decide(true, now), "one of four");
        quorum.taken(2, true, &[], now);
        assert!(!quorum.decide(true, now), "two of four");
        quorum.taken(3, true, &[], now);
        assert!(quorum.has_asked_all() && quorum.decide(true, now) && quorum.counts());
    }

    #[test]
    fn quorum_is_not_settled_by_the_first_found_peers_alone() {
        let (mut quorum, now) = quorum(KeptNodes::default());
        quorum.begin();
        quorum.see(alive(&[(1, "a")]), now);
        quorum.taken(1, true, &[("b".into(), 0)], now);
        assert!(!quorum.decide(true, now) && !quorum.is_settled(), "b is known and not found yet");
        quorum.see(alive(&[(1, "a"), (2, "b")]), now);
        quorum.taken(2, true, &[], now);
        assert!(quorum.decide(true, now) && quorum.is_settled());
        let (mut quorum, _) = self::quorum(KeptNodes::default());
        quorum.begin();
        quorum.wait_no_longer();
        assert!(quorum.is_settled() && !quorum.counts(), "alone");
    }

    #[test]
    fn nodes_without_any_memory_all_begin_to_count() {
        let (mut quorum, now) = quorum(KeptNodes::default());
        quorum.see(alive(&[(1, "a"), (2, "b")]), now);
        quorum.taken(1, false, &[], now);
        quorum.taken(2, false, &[], now);
        assert!(quorum.decide(true, now));
    }

    #[test]
    fn restart_keeps_the_seen_nodes_and_whether_the_node_counts() {
        let (mut before, now) = quorum(KeptNodes::default());
        before.see(alive(&[(1, "a"), (2, "b")]), now);
        assert!(!before.decide(true, now));
        let kept = before.kept(now);
        let seen = vec![("a".into(), 0), ("b".into(), 0)];
        assert_eq!(kept, KeptNodes { seen, ..KeptNodes::default() });
        let (mut quorum, now) = quorum(KeptNodes { counts: true, ..kept });
        assert!(!quorum.is_majority(1, now));
        assert!(!quorum.counts() && quorum.decide(true, now));
        quorum.leave(now);
        assert!(!quorum.counts() && !quorum.kept(now).counts);
    }

    /// A node that counts, as `b` does, while `c` did and is down.
    fn beside_down_peer() -> (NonceQuorum, Instant) {
        let (mut quorum, now) = quorum(KeptNodes::default());
        quorum.see(alive(&[(1, "b"), (2, "c")]), now);
        quorum.taken(1, true, &[], now);
        quorum.taken(2, true, &[], now);
        assert!(quorum.decide(true, now));
        quorum.see(alive(&[(1, "b")]), now);
        (quorum, now)
    }

    /// State that a node keeps after a clean stop, while `b` ran on and `c` had been down for a minute.
    fn stopped() -> KeptNodes {
        let (mut before, now) = beside_down_peer();
        before.leave(now);
        assert!(!before.decide(true, now), "it has handed over what it had");
        before.see(HashMap::new(), now);
        before.kept(now + Duration::from_secs(60))
    }

    #[test]
    fn node_away_at_stop_and_still_away_need_not_be_learned_from() {
        let kept = stopped();
        assert_eq!(kept.away, [Box::from("c")]);
        let (mut quorum, now) = quorum(kept.clone());
        quorum.see(alive(&[(1, "b")]), now);
        quorum.taken(1, true, &[("c".into(), 58_000)], now);
        assert!(quorum.decide(true, now));
        assert!(quorum.is_majority(2, now) && !quorum.is_majority(1, now), "it is one of three");
        let (mut quorum, now) = self::quorum(KeptNodes { seen: vec![("c".into(), 60_000)], ..kept });
        assert!(quorum.decide(true, now), "the last one that stopped");
    }

    #[test]
    fn node_that_has_not_learned_keeps_its_list_of_away_nodes() {
        let mut kept = stopped();
        for _ in 0..3 {
            let (mut quorum, now) = self::quorum(kept.clone());
            // The time at which `c` was seen last stays, whatever peers report.
            quorum.learn_nodes(&[("c".into(), 56_000)], now);
            assert!(!quorum.decide(true, now), "b has not said what it knows");
            kept = quorum.kept(now);
            assert_eq!((kept.counts, &*kept.away), (false, &["c".into()][..]));
            assert!(kept.seen.iter().any(|(id, age_ms)| **id == *"c" && *age_ms >= 60_000), "{kept:?}");
            quorum.see(alive(&[(2, "new")]), now);
            quorum.taken(2, false, &[], now);
            quorum.see(alive(&[]), now);
            assert_eq!(
                quorum.kept(now).away,
                [Box::from("c")],
                "nor has it anything from who came meanwhile"
            );
        }
        let fresh = KeptNodes { seen: vec![("b".into(), 0), ("c".into(), 0)], ..KeptNodes::default() };
        let (mut quorum, now) = self::quorum(fresh);
        assert!(!quorum.decide(true, now));
        assert!(quorum.kept(now).away.is_empty());
    }

    #[test]
    fn killed_node_keeps_no_list_of_away_nodes() {
        let kept = stopped();
        let (mut quorum, now) = quorum(KeptNodes { counts: true, ..kept });
        quorum.leave(now);
        assert!(quorum.kept(now).away.is_empty(), "it may have been back since that was kept");
    }

    #[test]
    fn node_that_was_back_meanwhile_must_be_learned_from() {
        for seen in [&[("c".into(), 30_000)][..], &[("c".into(), 0)]] {
            let (mut quorum, now) = quorum(stopped());
            quorum.see(alive(&[(1, "b")]), now);
            quorum.taken(1, true, seen, now);
            assert!(!quorum.decide(true, now), "one of two");
        }
        let (mut quorum, now) = quorum(stopped());
        quorum.see(alive(&[(2, "c")]), now);
        quorum.taken(2, true, &[], now);
        assert!(!quorum.decide(true, now), "one of two");
    }

    #[test]
    fn a_clock_is_held_against_the_median() {
        let hour = 3_600_000;
        for (others, is_good) in [
            (&[][..], true),
            (&[10 * hour], true),
            (&[10 * hour + CLOCKS_APART_MS + 1], false),
            (&[10 * hour, 20 * hour, 10 * hour + 5], true),
            (&[11 * hour, 10 * hour, 11 * hour], false),
            (&[9 * hour, 11 * hour], true),
        ] {
            assert_eq!(is_near(10 * hour, others), is_good, "{others:?}");
        }
    }
}
