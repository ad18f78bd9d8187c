//! Which run counts of a node id that more than one gossips.
//!
//! A node that was started again is another run of it. But where the one before still answers these are two nodes with one id,
//! and that which was there first keeps its place: it has clients, and others would forward to the newcomer alone.

use std::cmp::Reverse;
use std::collections::{HashMap, HashSet};
use std::iter;
use std::time::{Duration, Instant};

use super::facts::{Member, Members};
use super::liveness::{Liveness, State};

/// What a run gets to show that it lives once another one has its address: it is most likely gone. Where that has another one
/// nothing but its death is waited for.
const SHOWS_WITHIN: Duration = Duration::from_millis(200);

struct Contest {
    since: Instant,
    told: bool,
}

/// Node ids with two runs that may both live, by the incarnation of that which came to the other.
#[derive(Default)]
pub(super) struct Contests {
    open: HashMap<u64, Contest>,
    /// Runs whose place another one has taken, and when: they count again when they are heard after that.
    given_up: HashMap<u64, Instant>,
}

/// The run of a node that others are told of, and those that may take its place, the best one first.
pub(super) struct Candidate {
    pub(super) told: Member,
    pub(super) rivals: Vec<Member>,
}

/// Of the entries of each run that which was made last. `all` are in the order of node ids and generations.
pub(super) fn runs(all: impl Iterator<Item = Member>) -> Vec<Member> {
    let mut runs: Vec<Member> = Vec::new();
    for member in all {
        let same = runs.iter().rposition(|run| run.incarnation == member.incarnation);
        match same.filter(|same| runs[*same].node_id == member.node_id) {
            Some(same) => runs[same] = member,
            None => runs.push(member),
        }
    }
    runs
}

impl Candidate {
    /// `all` are as [`runs`] has them; `is_heard` says of which something has come lately.
    pub(super) fn of(all: &[Member], told: &Members, is_heard: impl Fn(u64) -> bool) -> Vec<Self> {
        let of_node = |runs: &[Member]| {
            let is_told = |member: &&Member| {
                told.get(&member.node_id).is_some_and(|told| told.incarnation == member.incarnation)
            };
            let told = runs.iter().find(is_told);
            let others =
                runs.iter().filter(|member| told.is_none_or(|told| told.incarnation != member.incarnation));
            // Nobody is to be preferred for what it said before it fell silent.
            let rank = |member: &&Member| {
                let (is_heard, facts) = (is_heard(member.incarnation), &member.facts);
                (is_heard, is_heard && facts.met, is_heard && facts.ready, member.generation)
            };
            let mut rivals: Vec<Member> = others.cloned().collect();
            rivals.sort_by_key(|member| Reverse(rank(&member)));
            // Of those that are silent one is enough: a node that was started often left many.
            let heard = rivals.iter().take_while(|member| is_heard(member.incarnation)).count();
            rivals.truncate(heard.max(1));
            let told = told.cloned().or_else(|| (!rivals.is_empty()).then(|| rivals.remove(0)))?;
            Some(Self { told, rivals })
        };
        all.chunk_by(|one, other| one.node_id == other.node_id).filter_map(of_node).collect()
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = &Member> {
        iter::once(&self.told).chain(&self.rivals)
    }
}

impl Contests {
    /// One run of each node, and the incarnations that are to show now whether they live. `late`: for so long nothing could show.
    pub(super) fn decide(
        &mut self,
        candidates: Vec<Candidate>,
        liveness: &Liveness,
        late: Duration,
        now: Instant,
    ) -> (Vec<Member>, Vec<u64>) {
        let rivals: HashSet<_> = candidates
            .iter()
            .flat_map(|candidate| &candidate.rivals)
            .map(|rival| rival.incarnation)
            .collect();
        self.given_up.retain(|run, _| rivals.contains(run));
        self.open.values_mut().for_each(|contest| contest.since = (contest.since + late).min(now));
        let mut open = std::mem::take(&mut self.open);
        let (mut members, mut ask) = (Vec::with_capacity(candidates.len()), Vec::new());
        for Candidate { told, rivals } in candidates {
            let state = liveness.state(told.incarnation);
            let mut rivals = rivals.into_iter();
            let Some(rival) = rivals.find(|rival| self.may_count(rival, &told, state, liveness)) else {
                members.push(told);
                continue;
            };
            let mut contest = open.remove(&rival.incarnation).unwrap_or(Contest { since: now, told: false });
            let shows = liveness.heard_at(told.incarnation).is_some_and(|heard| heard > contest.since);
            let may_show =
                told.gossip != rival.gossip || now.saturating_duration_since(contest.since) < SHOWS_WITHIN;
            let is_alive = state != State::Dead && (shows || may_show);
            // Who drains has said that it goes.
            if !is_alive || told.facts.draining {
                self.given_up.insert(told.incarnation, now);
                members.push(rival);
                continue;
            }
            if !shows {
                ask.push(told.incarnation);
            } else if !std::mem::replace(&mut contest.told, true) {
                let (node, one, other) = (&told.node_id, told.gossip, rival.gossip);
                tracing::error!(%node, %one, %other, "two nodes have the same id, and the other one is left out: give each one its own with --node-id");
            }
            self.open.insert(rival.incarnation, contest);
            members.push(told);
        }
        (members, ask)
    }

    /// Whether a run may take the place of one that is told of.
    fn may_count(&self, rival: &Member, told: &Member, told_is: State, liveness: &Liveness) -> bool {
        let is_dead = told_is == State::Dead;
        let heard = liveness.heard_at(rival.incarnation);
        let is_back =
            self.given_up.get(&rival.incarnation).is_none_or(|at| heard.is_some_and(|heard| heard > *at));
        let lives = match liveness.state(rival.incarnation) {
            State::Alive => is_dead || !rival.facts.draining,
            // It may be heard by others alone.
            State::Suspect => is_dead && rival.generation > told.generation,
            State::Dead => false,
        };
        lives && is_back
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
            facts: Facts { ready: true, met: true, ..Facts::default() },
            state: State::Alive,
            is_elsewhere: false,
        }
    }

    struct Seen {
        contests: Contests,
        liveness: Liveness,
        told: Members,
        start: Instant,
        /// Of the other runs.
        others: Vec<u64>,
    }

    impl Seen {
        /// A node that has heard the former run at the beginning, and hears the later one all the time.
        fn new() -> Self {
            let start = Instant::now();
            let mut liveness = Liveness::new(Duration::from_millis(100), start);
            liveness.watch([FORMER].into_iter(), start);
            liveness.heard(FORMER, start);
            let told = Members(vec![run(FORMER, 1)]);
            Self { contests: Contests::default(), liveness, told, start, others: vec![LATER] }
        }

        fn at(&self, ms: u64) -> Instant {
            self.start + Duration::from_millis(ms)
        }

        fn hear(&mut self, incarnation: u64, ms: u64) {
            self.liveness.heard(incarnation, self.at(ms));
        }

        /// Which run counts at that time, and who is asked.
        fn sees(&mut self, all: &[Member], ms: u64) -> (u64, Vec<u64>) {
            let (now, heard) = (self.at(ms), self.others.clone());
            let candidates =
                Candidate::of(&runs(all.iter().cloned()), &self.told, |run| heard.contains(&run));
            let watched: Vec<_> =
                candidates.iter().flat_map(Candidate::runs).map(|member| member.incarnation).collect();
            self.liveness.watch(watched.iter().copied(), now);
            heard.iter().for_each(|run| self.liveness.heard(*run, now));
            let late = self.liveness.tick(now).late;
            let (members, ask) = self.contests.decide(candidates, &self.liveness, late, now);
            let [member] = &members[..] else { panic!("not one run counts: {members:?}") };
            let counts = member.incarnation;
            self.told = Members(members);
            (counts, ask)
        }
    }

    #[test]
    fn another_run_takes_the_place_of_one_that_does_not_answer() {
        // Whether the clock has gone back or not.
        for generation in [0, 2] {
            let (mut seen, later) = (Seen::new(), run(LATER, generation));
            let mut both = [run(FORMER, 1), later];
            both.sort_by_key(|run| run.generation);
            for ms in (100..2_300).step_by(100) {
                assert_eq!(seen.sees(&both, ms), (FORMER, vec![FORMER]), "{ms}");
            }
            assert_eq!(seen.sees(&both, 2_300), (LATER, vec![]));
            seen.others.push(FORMER);
            assert_eq!(seen.sees(&both, 2_400).0, LATER, "it was given up");
        }
    }

    #[test]
    fn stall_shorter_than_down_keeps_incarnation_despite_rivals() {
        let mut seen = Seen::new();
        for ms in (100..2_200).step_by(100) {
            let later = ms / 300;
            seen.others = vec![LATER + later];
            let all = [run(FORMER, 1), run(LATER + later.saturating_sub(1), 2), run(LATER + later, 3)];
            assert_eq!(seen.sees(&all, ms).0, FORMER, "{ms}");
        }
        seen.others.push(FORMER);
        assert_eq!(seen.sees(&[run(FORMER, 1), run(LATER, 2)], 2_250), (FORMER, vec![]));
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
    fn another_run_of_one_that_drains_or_is_dead_counts_at_once() {
        let mut draining = run(FORMER, 1);
        draining.facts.draining = true;
        assert_eq!(Seen::new().sees(&[draining, run(LATER, 2)], 100), (LATER, vec![]));
        let mut seen = Seen::new();
        for ms in (100..3_000).step_by(100) {
            assert_eq!(seen.sees(&[run(FORMER, 1)], ms).0, FORMER);
        }
        assert_eq!(seen.sees(&[run(FORMER, 1), run(LATER, 2)], 3_000), (LATER, vec![]));
        // Also where it is not heard, as over a cut between these two alone.
        seen.told = Members(vec![run(FORMER, 1)]);
        seen.others.clear();
        assert_eq!(seen.sees(&[run(FORMER, 1), run(30, 3)], 3_100), (30, vec![]));
    }

    #[test]
    fn a_run_at_the_address_of_another_takes_its_place_once() {
        let both = [run(FORMER, 1), Member { gossip: run(FORMER, 1).gossip, ..run(LATER, 2) }];
        let mut seen = Seen::new();
        let counts: Vec<_> = (100..=1_000).step_by(100).map(|ms| seen.sees(&both, ms).0).collect();
        assert_eq!(counts[..2], [FORMER; 2]);
        assert_eq!(counts[2..], [LATER; 8], "of the other one nothing has come since");
        // Two that both live, each at that address by mistake.
        let mut seen = Seen { others: vec![LATER, FORMER], ..Seen::new() };
        for ms in (100..3_000).step_by(100) {
            assert_eq!(seen.sees(&both, ms).0, FORMER, "{ms}");
        }
    }

    #[test]
    fn of_two_that_drain_none_takes_the_place_of_the_other() {
        let draining = |mut run: Member| {
            run.facts.draining = true;
            run
        };
        let mut seen = Seen { others: vec![LATER, FORMER], ..Seen::new() };
        for ms in (100..2_000).step_by(100) {
            let both = [draining(run(FORMER, 1)), draining(run(LATER, 2))];
            assert_eq!(seen.sees(&both, ms), (FORMER, vec![]), "{ms}");
        }
    }

    #[test]
    fn delay_of_the_observer_is_no_silence_of_a_peer() {
        let both = [run(FORMER, 1), Member { gossip: run(FORMER, 1).gossip, ..run(LATER, 2) }];
        let mut seen = Seen::new();
        assert_eq!(seen.sees(&both, 100), (FORMER, vec![FORMER]));
        assert_eq!(seen.sees(&both, 1_300), (FORMER, vec![FORMER]));
        seen.hear(FORMER, 1_350);
        assert_eq!(seen.sees(&both, 1_400), (FORMER, vec![]));
    }

    #[test]
    fn a_run_of_which_nothing_was_heard_takes_no_place() {
        let (mut seen, both) = (Seen::new(), [run(FORMER, 1), run(LATER, 2)]);
        seen.others.clear();
        for ms in (100..5_000).step_by(100) {
            assert_eq!(seen.sees(&both, ms), (FORMER, vec![]), "{ms}");
        }
    }

    #[test]
    fn newcomer_picks_the_incarnation_that_is_heard_and_has_met() {
        let unmet = |mut run: Member| {
            run.facts.met = false;
            run
        };
        let all = [unmet(run(LATER, 1)), run(FORMER, 2), run(30, 3), unmet(run(40, 4))];
        for (heard, counts) in [(vec![LATER, FORMER, 40], FORMER), (vec![LATER, 40], 40), (vec![], 40)] {
            let mut seen = Seen { told: Members::default(), others: heard, ..Seen::new() };
            assert_eq!(seen.sees(&all, 100).0, counts);
        }
    }

    #[test]
    fn of_each_run_counts_what_it_said_last() {
        let all = [run(LATER, 1), run(FORMER, 1), run(FORMER, 2), run(LATER, 3)];
        assert_eq!(runs(all.into_iter()), [run(LATER, 3), run(FORMER, 2)]);
    }
}
