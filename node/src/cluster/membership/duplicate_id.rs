//! Choice of the incarnation that counts if several of them gossip one node id.
//!
//! A node that restarted is a new incarnation. But if the earlier incarnation still answers, two nodes have one id. The first one then
//! keeps its place: it has clients, and other nodes would forward to the newcomer alone.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::iter;
use std::time::{Duration, Instant};

use super::facts::{ClusterMember, ClusterMembers};
use super::liveness::{Liveness, LivenessState};

/// Time in which an incarnation must show that it lives once another one gossips its address: most likely it has ended. If the other one
/// has another address, the earlier incarnation counts until it is down.
const SHOWS_WITHIN: Duration = Duration::from_millis(200);

struct DuplicateId {
    since: Instant,
    is_reported: bool,
}

/// Node ids with two incarnations that may both live, by the incarnation of the later one.
#[derive(Default)]
pub(super) struct DuplicateIds {
    open: HashMap<u64, DuplicateId>,
    /// Incarnations that were replaced, and when: they count again only if they are seen after that time.
    given_up: HashMap<u64, Instant>,
}

/// The incarnation of a node that counts at present, and the rivals that may replace it, the best one first.
pub(super) struct MemberCandidate {
    pub(super) current: ClusterMember,
    pub(super) rivals: Vec<ClusterMember>,
}

/// Latest entry of each incarnation. `all` are in the order of node ids and generations.
pub(super) fn latest_incarnations(all: impl Iterator<Item = ClusterMember>) -> Vec<ClusterMember> {
    let mut members: Vec<ClusterMember> = Vec::new();
    for member in all {
        let same = members.iter().rposition(|known| known.incarnation == member.incarnation);
        match same.filter(|same| members[*same].node_id == member.node_id) {
            Some(same) => members[same] = member,
            None => members.push(member),
        }
    }
    members
}

impl MemberCandidate {
    /// Groups the incarnations by node. `all` are as [`latest_incarnations`] returns them; `is_seen` is true for incarnations that were
    /// seen lately.
    pub(super) fn of(
        all: &[ClusterMember],
        current: &ClusterMembers,
        is_seen: impl Fn(u64) -> bool,
    ) -> Vec<Self> {
        let of_node = |members: &[ClusterMember]| {
            let is_current = |member: &&ClusterMember| {
                current.get(&member.node_id).is_some_and(|current| current.incarnation == member.incarnation)
            };
            let current = members.iter().find(is_current);
            let others = members
                .iter()
                .filter(|member| current.is_none_or(|current| current.incarnation != member.incarnation));
            // An incarnation that is silent gets no preference for its last facts.
            let rank = |member: &&ClusterMember| {
                let (is_seen, facts) = (is_seen(member.incarnation), &member.facts);
                (is_seen, is_seen && facts.met, is_seen && facts.ready, member.generation)
            };
            let mut rivals: Vec<ClusterMember> = others.cloned().collect();
            rivals.sort_by_key(|member| Reverse(rank(&member)));
            // One of the silent incarnations is enough: a node that restarted often leaves many.
            let seen = rivals.iter().take_while(|member| is_seen(member.incarnation)).count();
            rivals.truncate(seen.max(1));
            let current = current.cloned().or_else(|| (!rivals.is_empty()).then(|| rivals.remove(0)))?;
            Some(Self { current, rivals })
        };
        all.chunk_by(|one, other| one.node_id == other.node_id).filter_map(of_node).collect()
    }

    pub(super) fn incarnations(&self) -> impl Iterator<Item = &ClusterMember> {
        iter::once(&self.current).chain(&self.rivals)
    }
}

impl DuplicateIds {
    /// Chooses one incarnation of each node. Also returns the incarnations that must be probed now. `late` is the time for which this node
    /// could receive nothing.
    pub(super) fn decide(
        &mut self,
        candidates: Vec<MemberCandidate>,
        liveness: &Liveness,
        late: Duration,
        now: Instant,
    ) -> (Vec<ClusterMember>, Vec<u64>) {
        let rivals: HashSet<_> = candidates
            .iter()
            .flat_map(|candidate| &candidate.rivals)
            .map(|rival| rival.incarnation)
            .collect();
        self.given_up.retain(|incarnation, _| rivals.contains(incarnation));
        self.open.values_mut().for_each(|duplicate| duplicate.since = (duplicate.since + late).min(now));
        let mut open = std::mem::take(&mut self.open);
        let (mut members, mut to_probe) = (Vec::with_capacity(candidates.len()), Vec::new());
        for MemberCandidate { current, rivals } in candidates {
            let state = liveness.state(current.incarnation);
            let mut rivals = rivals.into_iter();
            let Some(rival) = rivals.find(|rival| self.may_count(rival, &current, state, liveness)) else {
                members.push(current);
                continue;
            };
            let mut duplicate =
                open.remove(&rival.incarnation).unwrap_or(DuplicateId { since: now, is_reported: false });
            let shows =
                liveness.last_seen(current.incarnation).is_some_and(|last_seen| last_seen > duplicate.since);
            let may_show = current.gossip != rival.gossip
                || now.saturating_duration_since(duplicate.since) < SHOWS_WITHIN;
            let is_alive = state != LivenessState::Down && (shows || may_show);
            // A node that drains has announced that it leaves.
            if !is_alive || current.facts.draining {
                self.given_up.insert(current.incarnation, now);
                members.push(rival);
                continue;
            }
            if !shows {
                to_probe.push(current.incarnation);
            } else if !std::mem::replace(&mut duplicate.is_reported, true) {
                let (node, one, other) = (&current.node_id, current.gossip, rival.gossip);
                tracing::error!(%node, %one, %other, "duplicate node id among peers, one of them is ignored: give each node its own --node-id");
            }
            self.open.insert(rival.incarnation, duplicate);
            members.push(current);
        }
        (members, to_probe)
    }

    /// True if the rival may replace the incarnation that counts at present.
    fn may_count(
        &self,
        rival: &ClusterMember,
        current: &ClusterMember,
        current_state: LivenessState,
        liveness: &Liveness,
    ) -> bool {
        let is_down = current_state == LivenessState::Down;
        let last_seen = liveness.last_seen(rival.incarnation);
        let is_back = self
            .given_up
            .get(&rival.incarnation)
            .is_none_or(|at| last_seen.is_some_and(|last_seen| last_seen > *at));
        let lives = match liveness.state(rival.incarnation) {
            LivenessState::Alive => is_down || !rival.facts.draining,
            // Perhaps only other nodes hear it.
            LivenessState::Suspect => is_down && rival.generation > current.generation,
            LivenessState::Down => false,
        };
        lives && is_back
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::super::facts::Facts;
    use super::*;

    const EARLIER: u64 = 10;
    const LATER: u64 = 20;

    fn gossip_member(incarnation: u64, generation: u64) -> ClusterMember {
        ClusterMember {
            node_id: "a".into(),
            incarnation,
            generation,
            gossip: SocketAddr::from(([127, 0, 0, 1], incarnation as u16)),
            facts: Facts { ready: true, met: true, ..Facts::default() },
            state: LivenessState::Alive,
            is_seen_by_others: false,
        }
    }

    struct DuplicateIdTest {
        duplicate_ids: DuplicateIds,
        liveness: Liveness,
        current: ClusterMembers,
        start: Instant,
        /// Incarnations from which something arrives all the time.
        others: Vec<u64>,
    }

    impl DuplicateIdTest {
        /// A node that has seen the earlier incarnation at the beginning, and sees the later one all the time.
        fn new() -> Self {
            let start = Instant::now();
            let mut liveness = Liveness::new(Duration::from_millis(100), start);
            liveness.watch([EARLIER].into_iter(), start);
            liveness.record_seen(EARLIER, start);
            let current = ClusterMembers(vec![gossip_member(EARLIER, 1)]);
            Self { duplicate_ids: DuplicateIds::default(), liveness, current, start, others: vec![LATER] }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        fn see(&mut self, incarnation: u64, ms: u64) {
            self.liveness.record_seen(incarnation, self.at(ms));
        }

        /// The incarnation that counts at that time, and the incarnations to probe.
        fn sees(&mut self, all: &[ClusterMember], ms: u64) -> (u64, Vec<u64>) {
            let (now, others) = (self.at(ms), self.others.clone());
            let candidates = MemberCandidate::of(
                &latest_incarnations(all.iter().cloned()),
                &self.current,
                |incarnation| others.contains(&incarnation),
            );
            let watched: Vec<_> = candidates
                .iter()
                .flat_map(MemberCandidate::incarnations)
                .map(|member| member.incarnation)
                .collect();
            self.liveness.watch(watched.iter().copied(), now);
            others.iter().for_each(|incarnation| self.liveness.record_seen(*incarnation, now));
            let late = self.liveness.tick(now).late;
            let (members, to_probe) = self.duplicate_ids.decide(candidates, &self.liveness, late, now);
            let [member] = &members[..] else { panic!("exactly one incarnation counts: {members:?}") };
            let counts = member.incarnation;
            self.current = ClusterMembers(members);
            (counts, to_probe)
        }
    }

    #[test]
    fn incarnation_replaces_one_that_does_not_answer() {
        // Whether or not the clock has gone back.
        for generation in [0, 2] {
            let (mut seen, later) = (DuplicateIdTest::new(), gossip_member(LATER, generation));
            let mut both = [gossip_member(EARLIER, 1), later];
            both.sort_by_key(|member| member.generation);
            for ms in (100..2_300).step_by(100) {
                assert_eq!(seen.sees(&both, ms), (EARLIER, vec![EARLIER]), "{ms}");
            }
            assert_eq!(seen.sees(&both, 2_300), (LATER, vec![]));
            seen.others.push(EARLIER);
            assert_eq!(seen.sees(&both, 2_400).0, LATER, "it was given up");
        }
    }

    #[test]
    fn stall_shorter_than_down_keeps_incarnation_despite_rivals() {
        let mut seen = DuplicateIdTest::new();
        for ms in (100..2_200).step_by(100) {
            let later = ms / 300;
            seen.others = vec![LATER + later];
            let all = [
                gossip_member(EARLIER, 1),
                gossip_member(LATER + later.saturating_sub(1), 2),
                gossip_member(LATER + later, 3),
            ];
            assert_eq!(seen.sees(&all, ms).0, EARLIER, "{ms}");
        }
        seen.others.push(EARLIER);
        assert_eq!(
            seen.sees(&[gossip_member(EARLIER, 1), gossip_member(LATER, 2)], 2_250),
            (EARLIER, vec![])
        );
    }

    #[test]
    fn live_incarnation_is_not_replaced_until_it_is_down() {
        let (mut seen, both) = (DuplicateIdTest::new(), [gossip_member(EARLIER, 1), gossip_member(LATER, 2)]);
        assert_eq!(seen.sees(&both, 100), (EARLIER, vec![EARLIER]));
        seen.see(EARLIER, 150);
        assert_eq!(seen.sees(&both, 200), (EARLIER, vec![]));
        for ms in (300..=1_600).step_by(100) {
            assert_eq!(seen.sees(&both, ms).0, EARLIER, "{ms}");
        }
        // The earlier incarnation is a suspect by now, and does not answer.
        let later = (1_700..4_000).step_by(100).find(|ms| seen.sees(&both, *ms).0 == LATER);
        assert!(later.is_some_and(|ms| ms <= 2_600), "{later:?}");
    }

    #[test]
    fn incarnation_replaces_draining_or_down_one_at_once() {
        let mut draining = gossip_member(EARLIER, 1);
        draining.facts.draining = true;
        assert_eq!(DuplicateIdTest::new().sees(&[draining, gossip_member(LATER, 2)], 100), (LATER, vec![]));
        let mut seen = DuplicateIdTest::new();
        for ms in (100..3_000).step_by(100) {
            assert_eq!(seen.sees(&[gossip_member(EARLIER, 1)], ms).0, EARLIER);
        }
        assert_eq!(seen.sees(&[gossip_member(EARLIER, 1), gossip_member(LATER, 2)], 3_000), (LATER, vec![]));
        // Even if this node does not see it, as over a cut between the two alone.
        seen.current = ClusterMembers(vec![gossip_member(EARLIER, 1)]);
        seen.others.clear();
        assert_eq!(seen.sees(&[gossip_member(EARLIER, 1), gossip_member(30, 3)], 3_100), (30, vec![]));
    }

    #[test]
    fn incarnation_at_the_same_address_replaces_another_once() {
        let both = [
            gossip_member(EARLIER, 1),
            ClusterMember { gossip: gossip_member(EARLIER, 1).gossip, ..gossip_member(LATER, 2) },
        ];
        let mut seen = DuplicateIdTest::new();
        let counts: Vec<_> = (100..=1_000).step_by(100).map(|ms| seen.sees(&both, ms).0).collect();
        assert_eq!(counts[..2], [EARLIER; 2]);
        assert_eq!(counts[2..], [LATER; 8], "of the other one nothing has come since");
        // Two live incarnations, each at the same address by mistake.
        let mut seen = DuplicateIdTest { others: vec![LATER, EARLIER], ..DuplicateIdTest::new() };
        for ms in (100..3_000).step_by(100) {
            assert_eq!(seen.sees(&both, ms).0, EARLIER, "{ms}");
        }
    }

    #[test]
    fn draining_incarnation_replaces_no_draining_one() {
        let draining = |mut member: ClusterMember| {
            member.facts.draining = true;
            member
        };
        let mut seen = DuplicateIdTest { others: vec![LATER, EARLIER], ..DuplicateIdTest::new() };
        for ms in (100..2_000).step_by(100) {
            let both = [draining(gossip_member(EARLIER, 1)), draining(gossip_member(LATER, 2))];
            assert_eq!(seen.sees(&both, ms), (EARLIER, vec![]), "{ms}");
        }
    }

    #[test]
    fn delay_of_the_observer_is_no_silence_of_a_peer() {
        let both = [
            gossip_member(EARLIER, 1),
            ClusterMember { gossip: gossip_member(EARLIER, 1).gossip, ..gossip_member(LATER, 2) },
        ];
        let mut seen = DuplicateIdTest::new();
        assert_eq!(seen.sees(&both, 100), (EARLIER, vec![EARLIER]));
        assert_eq!(seen.sees(&both, 1_300), (EARLIER, vec![EARLIER]));
        seen.see(EARLIER, 1_350);
        assert_eq!(seen.sees(&both, 1_400), (EARLIER, vec![]));
    }

    #[test]
    fn incarnation_without_a_heartbeat_replaces_no_other() {
        let (mut seen, both) = (DuplicateIdTest::new(), [gossip_member(EARLIER, 1), gossip_member(LATER, 2)]);
        seen.others.clear();
        for ms in (100..5_000).step_by(100) {
            assert_eq!(seen.sees(&both, ms), (EARLIER, vec![]), "{ms}");
        }
    }

    #[test]
    fn newcomer_picks_an_incarnation_with_heartbeats_that_has_met() {
        let unmet = |mut member: ClusterMember| {
            member.facts.met = false;
            member
        };
        let all = [
            unmet(gossip_member(LATER, 1)),
            gossip_member(EARLIER, 2),
            gossip_member(30, 3),
            unmet(gossip_member(40, 4)),
        ];
        for (others, counts) in [(vec![LATER, EARLIER, 40], EARLIER), (vec![LATER, 40], 40), (vec![], 40)] {
            let mut seen =
                DuplicateIdTest { current: ClusterMembers::default(), others, ..DuplicateIdTest::new() };
            assert_eq!(seen.sees(&all, 100).0, counts);
        }
    }

    #[test]
    fn latest_gossip_of_each_incarnation_counts() {
        let all = [
            gossip_member(LATER, 1),
            gossip_member(EARLIER, 1),
            gossip_member(EARLIER, 2),
            gossip_member(LATER, 3),
        ];
        assert_eq!(
            latest_incarnations(all.into_iter()),
            [gossip_member(LATER, 3), gossip_member(EARLIER, 2)]
        );
    }
}
