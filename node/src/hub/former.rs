//! Runs that are gone for longer than anybody may come back from: clients need not keep them in their positions.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, Hub, State};
use super::mark::Mark;
use crate::model::Stamp;

/// Runs that a channel remembers; who has kept a position with others is not resumed.
const RUNS_MAX: usize = 64;

/// What a channel had of runs that are gone, and that stand in no position any more.
#[derive(Debug, Default)]
pub(super) struct Former(Option<Box<Gone>>);

#[derive(Debug, Default)]
struct Gone {
    runs: Serial,
    /// Whoever has this of the channel's own was told of a position in which they do not stand.
    since: u64,
}

impl Former {
    /// Takes these runs out of where the channel stands. The node gives itself a number without a message, by which positions
    /// from now on are told from those of before.
    fn take(&mut self, mark: &mut Mark, runs: &[u64]) {
        let Some(others) = &mark.others else { return };
        let is_gone = |run: &u64| runs.contains(run);
        if !others.entries().iter().any(|(run, _)| is_gone(run)) {
            return;
        }
        let gone = self.0.get_or_insert_default();
        let mut kept = Serial::default();
        for (run, sequence) in others.entries().iter().copied() {
            if !is_gone(&run) {
                kept.advance(run, sequence);
            } else if gone.runs.entries().len() < RUNS_MAX {
                gone.runs.advance(run, sequence);
            }
        }
        mark.others = Some(Arc::new(kept));
        mark.own.sequence += 1;
        gone.since = mark.own.sequence;
    }

    /// The position with what need not stand in it.
    pub(super) fn complete(&self, position: &Serial, own: u64) -> Serial {
        match &self.0 {
            Some(gone) if position.covers_one(own, gone.since) => position.join(&gone.runs),
            _ => position.clone(),
        }
    }

    /// Where the channel stands, with these runs.
    pub(super) fn and(&self, here: &Serial) -> Serial {
        self.0.as_ref().map_or_else(|| here.clone(), |gone| here.join(&gone.runs))
    }

    fn names(&self, run: u64) -> bool {
        self.0.as_ref().is_some_and(|gone| gone.runs.sequence_of(run).is_some())
    }

    pub(super) fn covers(&self, stamp: Stamp) -> bool {
        self.0.as_ref().is_some_and(|gone| gone.runs.covers_one(stamp.incarnation, stamp.sequence))
    }
}

impl State {
    /// Whether a message was handed on by then, or there is none, or it need not be told of any more.
    pub(super) fn knows(&self, stamp: Stamp) -> bool {
        let is_without = self.whole.reached(stamp.incarnation) >= Some(stamp.sequence);
        self.mark.covers(stamp) || self.former.covers(stamp) || is_without
    }

    /// Something of the run, or that it forwards the channel, was heard here.
    pub(super) fn is_named(&self, run: u64) -> bool {
        let is_heard = self.mark.others.as_ref().is_some_and(|others| others.sequence_of(run).is_some());
        is_heard || self.former.names(run) || self.whole.contains(run) || run == self.mark.own.incarnation
    }
}

impl Hub {
    /// The runs of other nodes that stand in a position, or forward a channel.
    pub fn runs(&self) -> HashSet<u64> {
        let channels: Vec<Arc<Channel>> = self.channels.iter().map(|entry| Arc::clone(&entry)).collect();
        let mut runs = HashSet::new();
        for channel in &channels {
            let state = channel.state.lock();
            runs.extend(state.whole.runs());
            if let Some(others) = &state.mark.others {
                runs.extend(others.entries().iter().map(|(run, _)| *run));
            }
        }
        runs
    }

    /// These runs have been gone for so long that nobody comes back who has not heard all of them.
    pub fn forget_runs(&self, runs: &[u64]) {
        for channel in &self.all() {
            let state = &mut *channel.state.lock();
            // A number without a message may stand in the position of who came from there.
            let known = |run: &u64| state.whole.reached(*run).map(|sequence| (*run, sequence));
            let known: Vec<(u64, u64)> = runs.iter().filter_map(known).filter(|(_, of)| *of > 0).collect();
            if !known.is_empty() || runs.iter().any(|run| state.stands(*run)) {
                self.begin_ring(state);
            }
            for (incarnation, sequence) in known {
                let stamp = Stamp { incarnation, sequence };
                if !state.mark.covers(stamp) {
                    state.mark.hear(stamp, 0);
                }
            }
            let before = state.mark.own.sequence;
            state.former.take(&mut state.mark, runs);
            if state.mark.own.sequence > before {
                self.skipped.store(true, Ordering::SeqCst);
            }
            runs.iter().for_each(|run| state.whole.remove(*run));
        }
    }
}
