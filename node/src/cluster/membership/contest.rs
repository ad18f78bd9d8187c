//! Which run counts of a node id that more than one gossips.
//!
//! A node that was started again is its later run. But where the one before still answers these are two nodes with one id,
//! and that which was there first keeps its place: it has clients, and others would forward to the newcomer alone.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::facts::{Member, Members};
use super::liveness::{Liveness, State};

/// What a run that is alive gets to show it once a later one is there.
const SHOWS_WITHIN: Duration = Duration::from_millis(500);

struct Contest {
    since: Instant,
    told: bool,
}

/// Node ids with two runs that may both live, by the incarnation of the later one.
#[derive(Default)]
pub(super) struct Contests(HashMap<u64, Contest>);

/// Of each node the latest run, behind it that which others are told of as long as it is another one.
pub(super) struct Candidate {
    pub(super) latest: Member,
    pub(super) former: Option<Member>,
}

impl Candidate {
    /// `all` are in the order of node ids and generations.
    pub(super) fn of(all: Vec<Member>, told: &Members) -> Vec<Self> {
        let mut candidates: Vec<Self> = Vec::new();
        for member in all {
            let is_told = |member: &Member| {
                told.get(&member.node_id).is_some_and(|told| told.incarnation == member.incarnation)
            };
            match candidates.last_mut().filter(|candidate| candidate.latest.node_id == member.node_id) {
                None => candidates.push(Self { latest: member, former: None }),
                Some(Self { latest, former }) => {
                    let before = std::mem::replace(latest, member);
                    if is_told(&before) {
                        *former = Some(before);
                    }
                }
            }
        }
        for Self { latest, former } in &mut candidates {
            // It gossips as a later generation now.
            former.take_if(|former| former.incarnation == latest.incarnation);
        }
        candidates
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = &Member> {
        [Some(&self.latest), self.former.as_ref()].into_iter().flatten()
    }
}

impl Contests {
    /// One run of each node, and the incarnations that are to show now whether they live.
    pub(super) fn decide(
        &mut self,
        candidates: Vec<Candidate>,
        liveness: &Liveness,
        now: Instant,
    ) -> (Vec<Member>, Vec<u64>) {
        let contested = |latest: u64| {
            let is_it = |candidate: &Candidate| candidate.latest.incarnation == latest;
            candidates.iter().any(|candidate| candidate.former.is_some() && is_it(candidate))
        };
        self.0.retain(|latest, _| contested(*latest));
        let (mut members, mut ask) = (Vec::with_capacity(candidates.len()), Vec::new());
        for Candidate { latest, former } in candidates {
            let Some(former) = former else {
                members.push(latest);
                continue;
            };
            let contest = self.0.entry(latest.incarnation).or_insert(Contest { since: now, told: false });
            let state = liveness.state(former.incarnation);
            let shows = liveness.heard_at(former.incarnation).is_some_and(|heard| heard > contest.since);
            let may_show = now.saturating_duration_since(contest.since) < SHOWS_WITHIN;
            let is_alive = if shows { state != State::Dead } else { state == State::Alive && may_show };
            // Only one can have the address; and who drains has said that it goes.
            if !is_alive || former.gossip == latest.gossip || former.facts.draining {
                members.push(latest);
                continue;
            }
            if !shows {
                ask.push(former.incarnation);
            } else if !std::mem::replace(&mut contest.told, true) {
                let (node, one, other) = (&latest.node_id, former.gossip, latest.gossip);
                tracing::error!(%node, %one, %other, "two nodes have the same id, and that which came later is left out: give each one its own with --node-id");
            }
            members.push(former);
        }
        (members, ask)
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use super::super::facts::Facts;
    use super::*;

    const FORMER: u64 = 10;
    const LATER: u64 = 20;

    fn run(incarnation: u64, generation: u64) -> Member {
        Member {
            node_id: "a".into(),
            incarnation,
            generation,
            gossip: SocketAddr::from(([127, 0, 0, 1], incarnation as u16)),
            facts: Facts {
                peer: None,
                listen: String::new(),
                version: String::new(),
                protocol_minor: 0,
                ready: true,
                draining: false,
            },
            state: State::Alive,
        }
    }

    struct Seen {
        contests: Contests,
        liveness: Liveness,
        told: Members,
        start: Instant,
    }

    impl Seen {
        /// A node that has heard the former run at the beginning.
        fn new() -> Self {
            let start = Instant::now();
            let mut liveness = Liveness::new(Duration::from_millis(100), start);
            liveness.watch([FORMER].into_iter(), start);
            liveness.heard(FORMER, start);
            let told = Members(vec![run(FORMER, 1)]);
            Self { contests: Contests::default(), liveness, told, start }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        fn hear(&mut self, incarnation: u64, ms: u64) {
            self.liveness.heard(incarnation, self.at(ms));
        }

        /// Which run counts at that time, and who is asked.
        fn sees(&mut self, all: &[Member], ms: u64) -> (u64, Vec<u64>) {
            let now = self.at(ms);
            let candidates = Candidate::of(all.to_vec(), &self.told);
            let runs = candidates.iter().flat_map(Candidate::runs);
            let watched: Vec<_> = runs.map(|member| member.incarnation).collect();
            self.liveness.watch(watched.iter().copied(), now);
            self.liveness.tick(now);
            let (members, ask) = self.contests.decide(candidates, &self.liveness, now);
            let [member] = &members[..] else { panic!("not one run counts: {members:?}") };
            let counts = member.incarnation;
            self.told = Members(members);
            (counts, ask)
        }
    }

    #[test]
    fn a_later_run_takes_the_place_of_one_that_does_not_answer() {
        let (mut seen, both) = (Seen::new(), [run(FORMER, 1), run(LATER, 2)]);
        assert_eq!(seen.sees(&both, 100), (FORMER, vec![FORMER]));
        assert_eq!(seen.sees(&both, 500), (FORMER, vec![FORMER]));
        assert_eq!(seen.sees(&both, 600), (LATER, vec![]));
        seen.hear(FORMER, 650);
        assert_eq!(seen.sees(&both, 700), (LATER, vec![]), "it was given up");
    }

    #[test]
    fn a_run_that_lives_on_keeps_its_place_until_it_is_dead() {
        let (mut seen, both) = (Seen::new(), [run(FORMER, 1), run(LATER, 2)]);
        assert_eq!(seen.sees(&both, 100), (FORMER, vec![FORMER]));
        seen.hear(FORMER, 150);
        assert_eq!(seen.sees(&both, 200), (FORMER, vec![]));
        for ms in (300..=1_600).step_by(100) {
            assert_eq!(seen.sees(&both, ms).0, FORMER, "{ms}");
        }
        // It is a suspect by now, and does not answer.
        let later = (1_700..4_000).step_by(100).find(|ms| seen.sees(&both, *ms).0 == LATER);
        assert!(later.is_some_and(|ms| ms <= 2_600), "{later:?}");
    }

    #[test]
    fn a_run_at_the_same_address_or_of_one_that_drains_or_is_dead_counts_at_once() {
        let same = Member { gossip: run(FORMER, 1).gossip, ..run(LATER, 2) };
        assert_eq!(Seen::new().sees(&[run(FORMER, 1), same], 100), (LATER, vec![]));
        let mut draining = run(FORMER, 1);
        draining.facts.draining = true;
        assert_eq!(Seen::new().sees(&[draining, run(LATER, 2)], 100), (LATER, vec![]));
        let mut seen = Seen::new();
        for ms in (100..3_000).step_by(100) {
            assert_eq!(seen.sees(&[run(FORMER, 1)], ms).0, FORMER);
        }
        assert_eq!(seen.sees(&[run(FORMER, 1), run(LATER, 2)], 3_000), (LATER, vec![]));
    }

    #[test]
    fn who_gossips_as_a_later_generation_is_the_same_run() {
        let (mut seen, anew) = (Seen::new(), run(FORMER, 3));
        assert_eq!(seen.sees(&[run(FORMER, 1), run(LATER, 2), anew.clone()], 100), (FORMER, vec![]));
        assert_eq!(seen.told.0, [anew]);
        let (mut seen, both) = (Seen::new(), [run(LATER, 1), run(FORMER, 1), run(FORMER, 2), run(LATER, 3)]);
        seen.sees(&both, 100);
        assert_eq!(seen.told.0, [run(FORMER, 2)], "of the former run what it said last");
    }
}
