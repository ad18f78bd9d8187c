//! What a client must have seen.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use super::client::Epoch;

/// Of one channel: what each run numbered.
pub(super) type Log = BTreeMap<(u64, u64), Sent>;

#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Sent {
    pub(super) at: Duration,
    pub(super) acked: bool,
}

/// Of each run a client has seen what it numbered after the client began, from the first on and without a gap; if it goes on to
/// the end, all of it, of a dead run at least what was acknowledged. Of a run that was not heard where it began, that is what was
/// published since.
pub(super) fn check(at: &str, epoch: &Epoch, log: &Log, living: &BTreeSet<u64>, is_last: bool) {
    let runs: BTreeSet<u64> = log.keys().map(|(run, _)| *run).collect();
    for run in runs {
        let after = epoch.after.sequence_of(run);
        let lives = if living.contains(&run) { "living" } else { "dead" };
        let numbered: Vec<(u64, &Sent)> =
            log.range((run, 0)..=(run, u64::MAX)).map(|((_, sequence), sent)| (*sequence, sent)).collect();
        let is_owed = |(sequence, sent): &(u64, &Sent)| match after {
            Some(after) => *sequence > after,
            None => sent.at > epoch.at,
        };
        let seen: Vec<u64> =
            epoch.seen.iter().filter(|(of, _)| *of == run).map(|(_, sequence)| *sequence).collect();
        let owed = numbered.iter().position(is_owed).unwrap_or(numbered.len());
        let begin = numbered.iter().position(|(sequence, _)| Some(sequence) == seen.first());
        let begin = begin.unwrap_or(owed);
        let all: Vec<u64> = numbered[begin..].iter().map(|(sequence, _)| *sequence).collect();
        let owed_first = numbered.get(owed);
        assert!(
            all.starts_with(&seen) && begin <= owed && (after.is_none() || begin == owed),
            "{at}, {lives} run {run:x} after {after:?}, from {owed_first:?}: seen {seen:?} of {all:?}"
        );
        if is_last {
            let missing = numbered[begin + seen.len()..].iter();
            // What died with its run was told of when the client began anew.
            let missing =
                missing.filter(|(_, sent)| living.contains(&run) || sent.acked && sent.at > epoch.at);
            let missing: Vec<u64> = missing.map(|(sequence, _)| *sequence).collect();
            assert!(missing.is_empty(), "{at}, {lives} run {run:x} after {after:?}: {missing:?} never came");
        }
    }
}
