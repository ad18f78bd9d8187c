//! Check of the messages that a client must have received.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::client::ContinuityEpoch;

/// All numbered publishes of one channel, by incarnation and sequence.
pub(super) type SimPublishLog = BTreeMap<(u64, u64), SimPublish>;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct SimPublish {
    pub(super) at: Duration,
    pub(super) acked: bool,
}

/// Asserts the continuity of one epoch. Of each incarnation the client has seen a gapless run of messages, from the first one after the
/// epoch's position on. In the last epoch nothing may be missing, of an incarnation that is down only acknowledged messages count. If the
/// position does not name the incarnation, the messages published since the epoch began count.
pub(super) fn check(
    at: &str,
    epoch: &ContinuityEpoch,
    log: &SimPublishLog,
    living: &BTreeSet<u64>,
    is_last: bool,
) {
    let incarnations: BTreeSet<u64> = log.keys().map(|(incarnation, _)| *incarnation).collect();
    for incarnation in incarnations {
        let after = epoch.after.sequence_of(incarnation);
        let lives = if living.contains(&incarnation) { "living" } else { "dead" };
        let numbered: Vec<(u64, &SimPublish)> = log
            .range((incarnation, 0)..=(incarnation, u64::MAX))
            .map(|((_, sequence), sent)| (*sequence, sent))
            .collect();
        let is_expected = |(sequence, sent): &(u64, &SimPublish)| match after {
            Some(after) => *sequence > after,
            None => sent.at > epoch.at,
        };
        let seen: Vec<u64> =
            epoch.seen.iter().filter(|(of, _)| *of == incarnation).map(|(_, sequence)| *sequence).collect();
        let expected_begin = numbered.iter().position(is_expected).unwrap_or(numbered.len());
        let begin = numbered.iter().position(|(sequence, _)| Some(sequence) == seen.first());
        let begin = begin.unwrap_or(expected_begin);
        let all: Vec<u64> = numbered[begin..].iter().map(|(sequence, _)| *sequence).collect();
        let first_expected = numbered.get(expected_begin);
        assert!(
            all.starts_with(&seen) && begin <= expected_begin && (after.is_none() || begin == expected_begin),
            "{at}, {lives} run {incarnation:x} after {after:?}, from {first_expected:?}: seen {seen:?} of {all:?}"
        );
        if is_last {
            let missing = numbered[begin + seen.len()..].iter();
            // Messages lost with a node were reported when the client's new epoch began.
            let missing =
                missing.filter(|(_, sent)| living.contains(&incarnation) || sent.acked && sent.at > epoch.at);
            let missing: Vec<u64> = missing.map(|(sequence, _)| *sequence).collect();
            assert!(
                missing.is_empty(),
                "{at}, {lives} run {incarnation:x} after {after:?}: {missing:?} never came"
            );
        }
    }
}
