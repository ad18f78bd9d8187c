//! Who is alive: a state machine that is given the time and what was heard, and says whom to probe.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Silence after which a node is asked directly, as long as nothing is wrong.
const ASK_AFTER: Duration = Duration::from_millis(500);
pub(super) const SUSPECT_AFTER: Duration = Duration::from_millis(1_500);
/// What a suspect has to answer a probe.
const ANSWER_WITHIN: Duration = Duration::from_millis(800);
const ASK_EVERY: Duration = Duration::from_millis(250);
/// The dead are asked too, so that they are noticed when they are back.
const ASK_DEAD_EVERY: Duration = Duration::from_secs(1);
/// We did not run, so others could not be heard: that is no silence of theirs.
const LATE: Duration = Duration::from_millis(300);
/// Others may hold us dead by now.
const PAUSED: Duration = Duration::from_secs(2);

/// What this node knows of whether another one runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    Alive,
    /// Not heard for 1.5 s, or not heard yet at all.
    Suspect,
    /// Not heard, and a direct probe was not answered either.
    Dead,
}

#[derive(Debug)]
struct Watched {
    /// None: never.
    heard: Option<Instant>,
    since: Instant,
    asked: Option<Instant>,
    /// When the first probe went out since it is a suspect.
    doubted: Option<Instant>,
    state: State,
}

/// What is to be done now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::cluster) struct Due {
    /// Incarnations to probe.
    pub(in crate::cluster) ask: Vec<u64>,
    /// For how long nobody could be heard because this node itself did not run.
    pub(super) late: Duration,
    /// For how long this node itself did not run, if others may have noticed.
    pub(super) paused: Option<Duration>,
}

/// Everybody who is watched, by incarnation.
#[derive(Debug)]
pub(in crate::cluster) struct Liveness {
    every: Duration,
    ticked: Instant,
    watched: HashMap<u64, Watched>,
}

impl Liveness {
    /// [`Liveness::tick`] is going to be called once in `every`.
    pub(in crate::cluster) fn new(every: Duration, now: Instant) -> Self {
        Self { every, ticked: now, watched: HashMap::new() }
    }

    /// Watches exactly these; who is new is a suspect until it is heard.
    pub(in crate::cluster) fn watch(
        &mut self,
        incarnations: impl Iterator<Item = u64> + Clone,
        now: Instant,
    ) {
        for incarnation in incarnations.clone() {
            let new =
                || Watched { heard: None, since: now, asked: None, doubted: None, state: State::Suspect };
            self.watched.entry(incarnation).or_insert_with(new);
        }
        self.watched.retain(|watched, _| incarnations.clone().any(|incarnation| incarnation == *watched));
    }

    /// `at` is when something came that only this run of the node can have sent.
    pub(in crate::cluster) fn heard(&mut self, incarnation: u64, at: Instant) {
        let Some(watched) = self.watched.get_mut(&incarnation) else { return };
        if watched.heard.is_none_or(|heard| heard < at) {
            let (heard, doubted) = (Some(at), None);
            *watched = Watched { heard, since: at, doubted, state: State::Alive, ..*watched };
        }
    }

    pub(in crate::cluster) fn state(&self, incarnation: u64) -> State {
        self.watched.get(&incarnation).map_or(State::Suspect, |watched| watched.state)
    }

    /// When it was heard last.
    pub(super) fn heard_at(&self, incarnation: u64) -> Option<Instant> {
        self.watched.get(&incarnation).and_then(|watched| watched.heard)
    }

    /// To be called after all that was heard has been told.
    pub(in crate::cluster) fn tick(&mut self, now: Instant) -> Due {
        let gap = now.saturating_duration_since(self.ticked);
        let late = gap.saturating_sub(self.every);
        self.ticked = now;
        let paused = (late >= PAUSED).then_some(gap);
        let late = if late >= LATE { late } else { Duration::ZERO };
        let mut due = Due { ask: Vec::new(), late, paused };
        for (incarnation, watched) in &mut self.watched {
            if watched.state != State::Dead {
                watched.since = (watched.since + late).min(now);
                watched.doubted = watched.doubted.map(|doubted| (doubted + late).min(now));
            }
            if watched.due(now) {
                due.ask.push(*incarnation);
            }
        }
        due
    }
}

impl Watched {
    /// Whether it is to be probed now; its state follows the silence.
    fn due(&mut self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.since);
        let unheard = self.heard.is_none();
        if self.state == State::Alive && silence >= SUSPECT_AFTER {
            self.state = State::Suspect;
        }
        let unanswered =
            self.doubted.is_some_and(|doubted| now.saturating_duration_since(doubted) >= ANSWER_WITHIN);
        if self.state == State::Suspect && silence >= SUSPECT_AFTER && unanswered {
            self.state = State::Dead;
        }
        let every = if self.state == State::Dead { ASK_DEAD_EVERY } else { ASK_EVERY };
        let asked = self.asked.is_some_and(|asked| now.saturating_duration_since(asked) < every);
        if asked && self.doubted.is_some() == (self.state != State::Alive) || silence < ASK_AFTER && !unheard
        {
            return false;
        }
        self.asked = Some(now);
        if self.state != State::Alive {
            self.doubted.get_or_insert(now);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_millis(100);
    const A: u64 = 1;

    struct Run {
        liveness: Liveness,
        start: Instant,
        now_ms: u64,
    }

    impl Run {
        fn new() -> Self {
            let start = Instant::now();
            let mut liveness = Liveness::new(EVERY, start);
            liveness.watch([A].into_iter(), start);
            Self { liveness, start, now_ms: 0 }
        }

        fn heard() -> Self {
            let mut run = Self::new();
            run.hear();
            run
        }

        fn now(&self) -> Instant {
            self.start + Duration::from_millis(self.now_ms)
        }

        fn hear(&mut self) {
            self.liveness.heard(A, self.now());
        }

        fn state(&self) -> State {
            self.liveness.state(A)
        }

        /// Times of probes, and of changes to another state, until `until_ms`.
        fn until(&mut self, until_ms: u64) -> (Vec<u64>, Vec<(u64, State)>) {
            let (mut probes, mut changes) = (Vec::new(), Vec::new());
            while self.now_ms < until_ms {
                self.now_ms += 100;
                let before = self.state();
                let due = self.liveness.tick(self.now());
                assert_eq!(due.paused, None);
                probes.extend(due.ask.iter().map(|_| self.now_ms));
                changes.extend((self.state() != before).then(|| (self.now_ms, self.state())));
            }
            (probes, changes)
        }
    }

    #[test]
    fn silent_peer_is_suspected_probed_and_down_within_3s() {
        let mut run = Run::heard();
        let (probes, changes) = run.until(5_000);
        assert_eq!(changes, [(1_500, State::Suspect), (2_300, State::Dead)]);
        assert_eq!(probes[..5], [500, 800, 1_100, 1_400, 1_500]);
        assert!(probes.iter().any(|at| (2_300..=3_500).contains(at)), "{probes:?}");
    }

    #[test]
    fn an_answer_keeps_a_silent_node_alive() {
        let mut run = Run::heard();
        assert_eq!(run.until(1_600).1, [(1_500, State::Suspect)]);
        run.hear();
        assert_eq!(run.state(), State::Alive);
        assert_eq!(run.until(3_000).1, []);
        assert_eq!(run.until(4_000).1, [(3_100, State::Suspect), (3_900, State::Dead)]);
    }

    #[test]
    fn down_peer_that_is_heard_again_is_alive() {
        let mut run = Run::heard();
        run.until(20_000);
        assert_eq!(run.state(), State::Dead);
        let before = run.now() - Duration::from_secs(20);
        run.liveness.heard(A, before);
        assert_eq!(run.state(), State::Dead, "that was known");
        run.hear();
        assert_eq!(run.state(), State::Alive);
        assert_eq!(run.until(21_400).1, []);
    }

    #[test]
    fn peer_never_heard_is_probed_at_once_and_down_in_the_end() {
        let mut run = Run::new();
        assert_eq!(run.state(), State::Suspect);
        let (probes, changes) = run.until(2_500);
        assert_eq!(probes[0], 100);
        assert_eq!(changes, [(1_500, State::Dead)]);
        let mut run = Run::new();
        run.until(300);
        run.hear();
        assert_eq!(run.until(1_000).1, []);
        assert_eq!(run.state(), State::Alive);
    }

    #[test]
    fn peer_that_is_heard_regularly_is_not_probed() {
        let mut run = Run::heard();
        for until_ms in (400..8_000).step_by(400) {
            assert_eq!(run.until(until_ms), (vec![], vec![]));
            run.hear();
        }
    }

    #[test]
    fn own_delay_is_no_silence_of_others() {
        for late_ms in [1_000, 5_000, 60_000] {
            let mut run = Run::heard();
            run.until(1_000);
            run.now_ms += 100 + late_ms;
            let due = run.liveness.tick(run.now());
            let gap = Duration::from_millis(100 + late_ms);
            assert_eq!(due.late, Duration::from_millis(late_ms));
            assert_eq!(due.paused, (late_ms >= 2_000).then_some(gap));
            assert_eq!(run.state(), State::Alive, "{late_ms}");
            let resumed = run.now_ms;
            let (_, changes) = run.until(resumed + 3_000);
            assert_eq!(changes, [(resumed + 400, State::Suspect), (resumed + 1_200, State::Dead)]);
        }
    }

    #[test]
    fn only_who_is_known_is_watched() {
        let mut run = Run::heard();
        run.liveness.heard(7, run.now());
        assert_eq!(run.liveness.state(7), State::Suspect);
        run.liveness.watch([7].into_iter(), run.now());
        assert_eq!(run.liveness.watched.len(), 1);
        assert_eq!(run.state(), State::Suspect);
    }
}
