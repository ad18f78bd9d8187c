//! Indirect heartbeats: each node counts up as it gossips, and other nodes pass its count on.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use chitchat::Heartbeat;

use super::liveness::SUSPECT_AFTER;

/// Longest time that a count may take from one node to the next ones.
const PASSED_ON_WITHIN: Duration = Duration::from_secs(3);

/// Heartbeat counts of incarnations, by incarnation and generation.
#[derive(Debug, Default)]
pub(super) struct IndirectHeartbeats(HashMap<(u64, u64), HeartbeatCount>);

#[derive(Debug)]
struct HeartbeatCount {
    heartbeat: Heartbeat,
    since: Instant,
    risen: Option<Instant>,
}

impl IndirectHeartbeats {
    /// Takes in all counts that gossip has at present.
    pub(super) fn see(&mut self, counts: &HashMap<(u64, u64), Heartbeat>, now: Instant) {
        self.0.retain(|incarnation, _| counts.contains_key(incarnation));
        for (incarnation, heartbeat) in counts {
            let new = HeartbeatCount { heartbeat: *heartbeat, since: now, risen: None };
            let count = self.0.entry(*incarnation).or_insert(new);
            if *heartbeat > count.heartbeat {
                (count.heartbeat, count.risen) = (*heartbeat, Some(now));
            }
        }
    }

    /// True if nothing was heard of the incarnation for so long, here or by others, that it must have ended.
    pub(super) fn has_ended(
        &self,
        incarnation: (u64, u64),
        seen_here: Option<Instant>,
        now: Instant,
    ) -> bool {
        let Some(HeartbeatCount { since, risen, .. }) = self.0.get(&incarnation) else { return false };
        let last = [Some(*since), *risen, seen_here].into_iter().flatten().max().unwrap_or(now);
        now.saturating_duration_since(last) >= SUSPECT_AFTER + PASSED_ON_WITHIN
    }

    /// True if other nodes have heard the incarnation after this node last could. A count that was on its way when this node last heard it
    /// proves nothing.
    pub(super) fn is_seen_by_others(
        &self,
        incarnation: (u64, u64),
        seen_here: Option<Instant>,
        now: Instant,
    ) -> bool {
        let Some(HeartbeatCount { since, risen: Some(risen), .. }) = self.0.get(&incarnation) else {
            return false;
        };
        let silent_since = seen_here.unwrap_or(*since);
        *risen >= silent_since + SUSPECT_AFTER && now.saturating_duration_since(*risen) < PASSED_ON_WITHIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const INCARNATION: (u64, u64) = (7, 1);

    /// Feeds counts with their arrival times. Returns whether others hear the incarnation at `at_ms`. Times are ms since it was last heard
    /// here, or first seen.
    fn is_seen(counts: &[(u64, u64)], at_ms: u64) -> bool {
        let (mut heartbeats, start) = (IndirectHeartbeats::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let heartbeat = |count: u64| serde_json::from_value::<Heartbeat>(count.into()).expect("a number");
        for (ms, count) in counts {
            heartbeats.see(&HashMap::from([(INCARNATION, heartbeat(*count))]), at(*ms));
        }
        let is_seen_by_others = heartbeats.is_seen_by_others(INCARNATION, Some(start), at(at_ms));
        assert_eq!(
            heartbeats.is_seen_by_others(INCARNATION, None, at(at_ms)),
            is_seen_by_others,
            "{counts:?}"
        );
        heartbeats.see(&HashMap::new(), at(at_ms));
        assert!(!heartbeats.is_seen_by_others(INCARNATION, None, at(at_ms)) && heartbeats.0.is_empty());
        is_seen_by_others
    }

    #[test]
    fn incarnation_with_heartbeat_unchanged_for_long_has_ended() {
        let (mut heartbeats, start) = (IndirectHeartbeats::default(), Instant::now());
        let at = |ms| start + Duration::from_millis(ms);
        let mut see = |incarnation: (u64, u64), count: u64, ms| {
            let heartbeat = serde_json::from_value::<Heartbeat>(count.into()).expect("a number");
            heartbeats.see(&HashMap::from([(incarnation, heartbeat)]), at(ms));
            heartbeats.has_ended(incarnation, None, at(ms))
        };
        assert!(!see(INCARNATION, 5, 0) && !see(INCARNATION, 5, 4_400) && see(INCARNATION, 5, 4_500));
        assert!(!see(INCARNATION, 6, 4_600) && !see(INCARNATION, 6, 9_000) && see(INCARNATION, 6, 9_100));
        // The node has restarted its gossip.
        let restarted = (INCARNATION.0, INCARNATION.1 + 1);
        assert!(!see(restarted, 1, 9_200) && !see(restarted, 2, 13_700));
        assert!(!heartbeats.has_ended(restarted, Some(at(14_000)), at(18_400)));
        assert!(!heartbeats.has_ended(INCARNATION, None, at(60_000)), "it is not known");
    }

    #[test]
    fn incarnation_with_a_rising_heartbeat_count_is_seen_by_peers() {
        assert!(!is_seen(&[(0, 5)], 2_000), "it is known for the first time");
        assert!(!is_seen(&[(0, 5), (1_400, 6)], 2_000), "that was on its way");
        assert!(is_seen(&[(0, 5), (1_600, 6)], 2_000));
        assert!(is_seen(&[(0, 5), (1_600, 6), (2_000, 6)], 4_500));
        assert!(!is_seen(&[(0, 5), (1_600, 6), (2_000, 6)], 4_600), "it went on no further");
        assert!(!is_seen(&[(0, 5), (1_600, 4)], 2_000), "that is an older one");
    }
}
