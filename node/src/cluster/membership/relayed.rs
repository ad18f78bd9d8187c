//! Whom other nodes hear: each node counts as it gossips, and others pass its count on.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chitchat::Heartbeat;

use super::liveness::SUSPECT_AFTER;

/// So long a count may take from one node to the next ones.
const PASSED_ON_WITHIN: Duration = Duration::from_secs(3);

/// The counts of runs, by incarnation and generation.
#[derive(Debug, Default)]
pub(super) struct Relayed(HashMap<(u64, u64), Count>);

#[derive(Debug)]
struct Count {
    heartbeat: Heartbeat,
    since: Instant,
    risen: Option<Instant>,
}

impl Relayed {
    /// All that gossip has now.
    pub(super) fn see(&mut self, counts: &HashMap<(u64, u64), Heartbeat>, now: Instant) {
        self.0.retain(|run, _| counts.contains_key(run));
        for (run, heartbeat) in counts {
            let new = Count { heartbeat: *heartbeat, since: now, risen: None };
            let count = self.0.entry(*run).or_insert(new);
            if *heartbeat > count.heartbeat {
                (count.heartbeat, count.risen) = (*heartbeat, Some(now));
            }
        }
    }

    /// Whether nobody has heard it for so long that it has ended, or its count was seen for long enough to say so.
    pub(super) fn has_ended(&self, run: (u64, u64), heard_here: Option<Instant>, now: Instant) -> bool {
        let Some(Count { since, risen, .. }) = self.0.get(&run) else { return false };
        let last = [Some(*since), *risen, heard_here].into_iter().flatten().max().unwrap_or(now);
        now.saturating_duration_since(last) >= SUSPECT_AFTER + PASSED_ON_WITHIN
    }

    /// Whether others have heard it since this node could. A count that was on its way when it fell silent says nothing.
    pub(super) fn is_heard(&self, run: (u64, u64), heard_here: Option<Instant>, now: Instant) -> bool {
        let Some(Count { since, risen: Some(risen), .. }) = self.0.get(&run) else { return false };
        let silent_since = heard_here.unwrap_or(*since);
        *risen >= silent_since + SUSPECT_AFTER && now.saturating_duration_since(*risen) < PASSED_ON_WITHIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: (u64, u64) = (7, 1);

    /// What has come by then, and whether others hear it, in ms since the run was heard here, or seen first.
    fn is_heard(counts: &[(u64, u64)], at_ms: u64) -> bool {
        let (mut relayed, start) = (Relayed::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let heartbeat = |count: u64| serde_json::from_value::<Heartbeat>(count.into()).expect("a number");
        for (ms, count) in counts {
            relayed.see(&HashMap::from([(RUN, heartbeat(*count))]), at(*ms));
        }
        let is_heard = relayed.is_heard(RUN, Some(start), at(at_ms));
        assert_eq!(relayed.is_heard(RUN, None, at(at_ms)), is_heard, "{counts:?}");
        relayed.see(&HashMap::new(), at(at_ms));
        assert!(!relayed.is_heard(RUN, None, at(at_ms)) && relayed.0.is_empty());
        is_heard
    }

    #[test]
    fn incarnation_with_heartbeat_unchanged_for_long_has_ended() {
        let (mut relayed, start) = (Relayed::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let mut see = |run: (u64, u64), count: u64, ms| {
            let heartbeat = serde_json::from_value::<Heartbeat>(count.into()).expect("a number");
            relayed.see(&HashMap::from([(run, heartbeat)]), at(ms));
            relayed.has_ended(run, None, at(ms))
        };
        assert!(!see(RUN, 5, 0) && !see(RUN, 5, 4_400) && see(RUN, 5, 4_500));
        assert!(!see(RUN, 6, 4_600) && !see(RUN, 6, 9_000) && see(RUN, 6, 9_100));
        // It has begun its gossip anew.
        let anew = (RUN.0, RUN.1 + 1);
        assert!(!see(anew, 1, 9_200) && !see(anew, 2, 13_700));
        assert!(!relayed.has_ended(anew, Some(at(14_000)), at(18_400)));
        assert!(!relayed.has_ended(RUN, None, at(60_000)), "it is not known");
    }

    #[test]
    fn others_hear_whose_count_goes_on() {
        assert!(!is_heard(&[(0, 5)], 2_000), "it is known for the first time");
        assert!(!is_heard(&[(0, 5), (1_400, 6)], 2_000), "that was on its way");
        assert!(is_heard(&[(0, 5), (1_600, 6)], 2_000));
        assert!(is_heard(&[(0, 5), (1_600, 6), (2_000, 6)], 4_500));
        assert!(!is_heard(&[(0, 5), (1_600, 6), (2_000, 6)], 4_600), "it went on no further");
        assert!(!is_heard(&[(0, 5), (1_600, 4)], 2_000), "that is an older one");
    }
}
