//! Failure detection: a state machine that receives the time and the sightings of peers, and returns the peers to probe.

use std::collections::HashMap;
use std::time::{Duration, Instant};

/// Silence after which a live node is probed directly.
const ASK_AFTER: Duration = Duration::from_millis(500);
pub(super) const SUSPECT_AFTER: Duration = Duration::from_millis(1_500);
/// Time that a suspect has to answer a probe.
const ANSWER_WITHIN: Duration = Duration::from_millis(800);
const ASK_EVERY: Duration = Duration::from_millis(250);
/// Interval at which nodes that are down are probed, so that their return is noticed.
const ASK_DOWN_EVERY: Duration = Duration::from_secs(1);
/// Delay of a tick from which on the silence of others does not count, because this node itself did not run.
const LATE: Duration = Duration::from_millis(300);
/// Delay of a tick from which on other nodes may hold this node for down.
const PAUSED: Duration = Duration::from_secs(2);

/// State of another node as this node sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LivenessState {
    Alive,
    /// Nothing received for 1.5 s, or never yet.
    Suspect,
    /// Nothing received, and a direct probe was not answered either.
    Down,
}

#[derive(Debug)]
struct WatchedMember {
    /// None: never seen.
    last_seen: Option<Instant>,
    since: Instant,
    probed: Option<Instant>,
    /// Time of the first probe since the node became a suspect.
    probed_since: Option<Instant>,
    state: LivenessState,
}

/// Actions that a tick asks for.
#[derive(Debug, Default, PartialEq, Eq)]
pub(in crate::cluster) struct LivenessActions {
    /// Incarnations to probe.
    pub(in crate::cluster) to_probe: Vec<u64>,
    /// Time for which nothing could be received because this node itself did not run.
    pub(super) late: Duration,
    /// Time for which this node itself did not run, if other nodes may have noticed.
    pub(super) stalled_for: Option<Duration>,
}

/// All watched members, by incarnation.
#[derive(Debug)]
pub(in crate::cluster) struct Liveness {
    every: Duration,
    ticked: Instant,
    watched: HashMap<u64, WatchedMember>,
}

impl Liveness {
    /// Creates the detector. [`Liveness::tick`] must be called once in `every`.
    pub(in crate::cluster) fn new(every: Duration, now: Instant) -> Self {
        Self { every, ticked: now, watched: HashMap::new() }
    }

    /// Watches exactly these incarnations. A new one is a suspect until it is seen.
    pub(in crate::cluster) fn watch(
        &mut self,
        incarnations: impl Iterator<Item = u64> + Clone,
        now: Instant,
    ) {
        for incarnation in incarnations.clone() {
            let new = || WatchedMember {
                last_seen: None,
                since: now,
                probed: None,
                probed_since: None,
                state: LivenessState::Suspect,
            };
            self.watched.entry(incarnation).or_insert_with(new);
        }
        self.watched.retain(|watched, _| incarnations.clone().any(|incarnation| incarnation == *watched));
    }

    /// Records a sighting: at `at` something arrived that only this incarnation can have sent.
    pub(in crate::cluster) fn record_seen(&mut self, incarnation: u64, at: Instant) {
        let Some(watched) = self.watched.get_mut(&incarnation) else { return };
        if watched.last_seen.is_none_or(|last_seen| last_seen < at) {
            let (last_seen, probed_since) = (Some(at), None);
            *watched =
                WatchedMember { last_seen, since: at, probed_since, state: LivenessState::Alive, ..*watched };
        }
    }

    pub(in crate::cluster) fn state(&self, incarnation: u64) -> LivenessState {
        self.watched.get(&incarnation).map_or(LivenessState::Suspect, |watched| watched.state)
    }

    /// Gives the time at which the incarnation was last seen.
    pub(super) fn last_seen(&self, incarnation: u64) -> Option<Instant> {
        self.watched.get(&incarnation).and_then(|watched| watched.last_seen)
    }

    /// Updates all states. Must be called after all sightings have been recorded.
    pub(in crate::cluster) fn tick(&mut self, now: Instant) -> LivenessActions {
        let gap = now.saturating_duration_since(self.ticked);
        let late = gap.saturating_sub(self.every);
        self.ticked = now;
        let paused = (late >= PAUSED).then_some(gap);
        let late = if late >= LATE { late } else { Duration::ZERO };
        let mut due = LivenessActions { to_probe: Vec::new(), late, stalled_for: paused };
        for (incarnation, watched) in &mut self.watched {
            if watched.state != LivenessState::Down {
                watched.since = (watched.since + late).min(now);
                watched.probed_since =
                    watched.probed_since.map(|probed_since| (probed_since + late).min(now));
            }
            if watched.due(now) {
                due.to_probe.push(*incarnation);
            }
        }
        due
    }
}

impl WatchedMember {
    /// Updates the state from the silence. True if the member must be probed now.
    fn due(&mut self, now: Instant) -> bool {
        let silence = now.saturating_duration_since(self.since);
        let is_unseen = self.last_seen.is_none();
        if self.state == LivenessState::Alive && silence >= SUSPECT_AFTER {
            self.state = LivenessState::Suspect;
        }
        let unanswered = self
            .probed_since
            .is_some_and(|probed_since| now.saturating_duration_since(probed_since) >= ANSWER_WITHIN);
        if self.state == LivenessState::Suspect && silence >= SUSPECT_AFTER && unanswered {
            self.state = LivenessState::Down;
        }
        let every = if self.state == LivenessState::Down { ASK_DOWN_EVERY } else { ASK_EVERY };
        let probed = self.probed.is_some_and(|probed| now.saturating_duration_since(probed) < every);
        if probed && self.probed_since.is_some() == (self.state != LivenessState::Alive)
            || silence < ASK_AFTER && !is_unseen
        {
            return false;
        }
        self.probed = Some(now);
        if self.state != LivenessState::Alive {
            self.probed_since.get_or_insert(now);
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVERY: Duration = Duration::from_millis(100);
    const A: u64 = 1;

    struct LivenessTest {
        liveness: Liveness,
        start: Instant,
        now_ms: u64,
    }

    impl LivenessTest {
        fn new() -> Self {
            let start = Instant::now();
            let mut liveness = Liveness::new(EVERY, start);
            liveness.watch([A].into_iter(), start);
            Self { liveness, start, now_ms: 0 }
        }

        fn seen() -> Self {
            let mut test = Self::new();
            test.see();
            test
        }

        fn now(&self) -> Instant {
            self.start + Duration::from_millis(self.now_ms)
        }

        fn see(&mut self) {
            self.liveness.record_seen(A, self.now());
        }

        fn state(&self) -> LivenessState {
            self.liveness.state(A)
        }

        /// Times of probes, and of changes to another state, until `until_ms`.
        fn until(&mut self, until_ms: u64) -> (Vec<u64>, Vec<(u64, LivenessState)>) {
            let (mut probes, mut changes) = (Vec::new(), Vec::new());
            while self.now_ms < until_ms {
                self.now_ms += 100;
                let before = self.state();
                let due = self.liveness.tick(self.now());
                assert_eq!(due.stalled_for, None);
                probes.extend(due.to_probe.iter().map(|_| self.now_ms));
                changes.extend((self.state() != before).then(|| (self.now_ms, self.state())));
            }
            (probes, changes)
        }
    }

    #[test]
    fn silent_peer_is_suspected_probed_and_down_within_3s() {
        let mut test = LivenessTest::seen();
        let (probes, changes) = test.until(5_000);
        assert_eq!(changes, [(1_500, LivenessState::Suspect), (2_300, LivenessState::Down)]);
        assert_eq!(probes[..5], [500, 800, 1_100, 1_400, 1_500]);
        assert!(probes.iter().any(|at| (2_300..=3_500).contains(at)), "{probes:?}");
    }

    #[test]
    fn an_answer_keeps_a_silent_node_alive() {
        let mut test = LivenessTest::seen();
        assert_eq!(test.until(1_600).1, [(1_500, LivenessState::Suspect)]);
        test.see();
        assert_eq!(test.state(), LivenessState::Alive);
        assert_eq!(test.until(3_000).1, []);
        assert_eq!(test.until(4_000).1, [(3_100, LivenessState::Suspect), (3_900, LivenessState::Down)]);
    }

    #[test]
    fn down_peer_with_a_new_heartbeat_is_alive() {
        let mut test = LivenessTest::seen();
        test.until(20_000);
        assert_eq!(test.state(), LivenessState::Down);
        let before = test.now() - Duration::from_secs(20);
        test.liveness.record_seen(A, before);
        assert_eq!(test.state(), LivenessState::Down, "that was known");
        test.see();
        assert_eq!(test.state(), LivenessState::Alive);
        assert_eq!(test.until(21_400).1, []);
    }

    #[test]
    fn peer_without_heartbeats_is_probed_at_once_and_goes_down() {
        let mut test = LivenessTest::new();
        assert_eq!(test.state(), LivenessState::Suspect);
        let (probes, changes) = test.until(2_500);
        assert_eq!(probes[0], 100);
        assert_eq!(changes, [(1_500, LivenessState::Down)]);
        let mut test = LivenessTest::new();
        test.until(300);
        test.see();
        assert_eq!(test.until(1_000).1, []);
        assert_eq!(test.state(), LivenessState::Alive);
    }

    #[test]
    fn peer_with_regular_heartbeats_is_not_probed() {
        let mut test = LivenessTest::seen();
        for until_ms in (400..8_000).step_by(400) {
            assert_eq!(test.until(until_ms), (vec![], vec![]));
            test.see();
        }
    }

    #[test]
    fn own_delay_is_not_counted_as_silence_of_peers() {
        for late_ms in [1_000, 5_000, 60_000] {
            let mut test = LivenessTest::seen();
            test.until(1_000);
            test.now_ms += 100 + late_ms;
            let due = test.liveness.tick(test.now());
            let gap = Duration::from_millis(100 + late_ms);
            assert_eq!(due.late, Duration::from_millis(late_ms));
            assert_eq!(due.stalled_for, (late_ms >= 2_000).then_some(gap));
            assert_eq!(test.state(), LivenessState::Alive, "{late_ms}");
            let resumed = test.now_ms;
            let (_, changes) = test.until(resumed + 3_000);
            assert_eq!(
                changes,
                [(resumed + 400, LivenessState::Suspect), (resumed + 1_200, LivenessState::Down)]
            );
        }
    }

    #[test]
    fn only_known_peers_are_watched() {
        let mut test = LivenessTest::seen();
        test.liveness.record_seen(7, test.now());
        assert_eq!(test.liveness.state(7), LivenessState::Suspect);
        test.liveness.watch([7].into_iter(), test.now());
        assert_eq!(test.liveness.watched.len(), 1);
        assert_eq!(test.state(), LivenessState::Suspect);
    }
}
