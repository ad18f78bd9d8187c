//! What a run that is dead has stored and this node has not heard: handed on after all, or at least known.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::channels::{Channel, Hub, State};
use super::interest::Joining;
use crate::model::{ChannelKey, Forwarded, Stamp};

impl State {
    /// The run of another node is in its position.
    pub(super) fn stands(&self, incarnation: u64) -> bool {
        self.mark.others.as_ref().is_some_and(|others| others.sequence_of(incarnation).is_some())
    }

    fn lacks(&self, stamp: Stamp) -> bool {
        let is_wanted = !self.removed && !matches!(self.joining, Joining::Not) && self.is_heard();
        let is_forwarded = self.stands(stamp.incarnation) || self.whole.contains(stamp.incarnation);
        is_wanted && is_forwarded && !self.knows(stamp)
    }

    /// Something of it may be missing.
    pub(super) fn doubt(&mut self, incarnation: u64) {
        self.unsure.add(incarnation);
    }
}

impl Hub {
    /// The channels that are wanted from other nodes and in whose position this run stands.
    pub fn channels_with(&self, incarnation: u64) -> Vec<Arc<Channel>> {
        self.wanted_where(|state| state.stands(incarnation))
    }

    /// Those that the run forwards, and in whose position it does not stand: nothing was heard of it there.
    pub fn silent_with(&self, incarnation: u64) -> Vec<Arc<Channel>> {
        self.wanted_where(|state| !state.stands(incarnation) && state.whole.contains(incarnation))
    }

    fn wanted_where(&self, is_meant: impl Fn(&State) -> bool) -> Vec<Arc<Channel>> {
        let mut channels = self.all();
        channels.retain(|channel| {
            let state = channel.state.lock();
            !matches!(state.joining, Joining::Not) && is_meant(&state)
        });
        channels
    }

    /// Hands on all that a run has stored behind what was heard of it, in its order: nothing of it is missing then, unless it
    /// `may_go_on`.
    pub fn refilled(
        &self,
        channel: &Arc<Channel>,
        incarnation: u64,
        stored: Vec<Forwarded>,
        may_go_on: bool,
    ) {
        let mut state = channel.state.lock();
        if state.removed {
            return;
        }
        for one in stored {
            let last = one.last();
            // What came before the run was forgotten stands in no position any more.
            if !state.mark.covers(last) && !state.former.covers(last) {
                self.take(channel, &mut state, one);
            }
        }
        if !may_go_on {
            state.unsure.remove(incarnation);
        }
        drop(state);
        self.give_way();
    }

    /// A message does not come in time: whoever is attached is told of a loss, and no older position is resumed from here.
    pub fn miss(&self, channel: &Channel) {
        let mut state = channel.state.lock();
        state.end_positions();
        self.skipped.store(true, Ordering::SeqCst);
        self.tell_lost(channel, &state);
    }

    /// As [`Hub::died`], in these channels alone.
    pub fn died_in(&self, numbers: &HashSet<u64>) {
        self.each_of(numbers, |channel, state| self.tell_lost(channel, state));
    }

    /// As [`Hub::gone`], in these channels alone.
    pub fn gone_in(&self, incarnation: u64, numbers: &HashSet<u64>) {
        self.each_of(numbers, |channel, state| self.end_positions(channel, state, incarnation));
    }

    /// As [`Hub::doubt`], in one channel, where that `is_owed` while nothing is heard there.
    pub fn doubt_in(&self, key: &ChannelKey, number: u64, incarnation: u64, is_owed: impl FnOnce() -> bool) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let mut state = channel.state.lock();
        if !matches!(state.joining, Joining::Not) && is_owed() {
            state.doubt(incarnation);
        }
    }

    /// As [`Hub::gone`], in all channels in which something of it may be missing.
    pub fn give_up(&self, incarnation: u64) {
        for channel in &self.all() {
            let mut state = channel.state.lock();
            if state.unsure.contains(&incarnation) {
                self.end_positions(channel, &mut state, incarnation);
            }
        }
    }

    fn each_of(&self, numbers: &HashSet<u64>, act: impl Fn(&Channel, &mut State)) {
        for channel in self.all().iter().filter(|channel| numbers.contains(&channel.number)) {
            let mut state = channel.state.lock();
            if !matches!(state.joining, Joining::Not) {
                act(channel, &mut state);
            }
        }
    }
}

impl Channel {
    /// Somebody is attached, or was lately, and this message of a run that forwards the channel has not come.
    pub fn lacks(&self, stamp: Stamp) -> bool {
        self.state.lock().lacks(stamp)
    }

    /// How far a run of another node was heard.
    pub fn reached(&self, incarnation: u64) -> u64 {
        let state = self.state.lock();
        state.mark.others.as_ref().and_then(|others| others.sequence_of(incarnation)).unwrap_or(0)
    }

    /// The last sequence of the run that was handed on here, also where the run is forgotten since; 0 for none.
    pub fn handed(&self, incarnation: u64) -> u64 {
        let state = self.state.lock();
        let everything = state.former.and(&state.mark.serial());
        everything.sequence_of(incarnation).unwrap_or(0)
    }

    /// So far these runs have come, of which nothing is owed here: it stands in the positions of those who are attached, or given the
    /// recent messages, from now on, and who has not all of it is not resumed from these.
    pub fn know(&self, stamps: &[Stamp]) {
        let state = &mut *self.state.lock();
        let news: Vec<Stamp> = stamps.iter().filter(|stamp| !state.knows(**stamp)).copied().collect();
        if news.is_empty() {
            return;
        }
        news.iter().for_each(|stamp| state.mark.hear(*stamp, 0));
        if let Some(ring) = &mut state.ring {
            ring.know_all(&news);
        }
    }

    /// Something of the run, or that it forwards the channel, was heard here.
    pub fn names(&self, run: u64) -> bool {
        self.state.lock().is_named(run)
    }

    /// Something of another run than these may be missing here.
    pub fn is_unsure_but_for(&self, runs: &[u64]) -> bool {
        self.state.lock().unsure.iter().any(|run| !runs.contains(run))
    }
}
