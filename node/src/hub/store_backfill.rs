//! Store backfill: messages that a failed incarnation stored and this node has not received are delivered, or at least recorded.

use std::collections::HashSet;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use super::channels::{Channel, Hub, State};
use super::interest::BarrierState;
use crate::model::{ChannelKey, ForwardedMessages, Stamp};

impl State {
    /// Whether the channel's position names the incarnation of another node.
    pub(super) fn has_received_from(&self, incarnation: u64) -> bool {
        self.position.others.as_ref().is_some_and(|others| others.sequence_of(incarnation).is_some())
    }

    fn lacks(&self, stamp: Stamp) -> bool {
        let is_interested =
            !self.removed && !matches!(self.attach_barrier, BarrierState::NotStarted) && self.is_active();
        let is_forwarded =
            self.has_received_from(stamp.incarnation) || self.contiguous.contains(stamp.incarnation);
        is_interested && is_forwarded && !self.accounts_for(stamp)
    }

    /// Marks the incarnation as in doubt: messages of it may be missing.
    pub(super) fn mark_in_doubt(&mut self, incarnation: u64) {
        self.in_doubt.add(incarnation);
    }
}

impl Hub {
    /// Channels with interest announced to the peers, whose position names this incarnation.
    pub fn channels_received_from(&self, incarnation: u64) -> Vec<Arc<Channel>> {
        self.interested_channels(|state| state.has_received_from(incarnation))
    }

    /// Channels that the incarnation forwards and of which nothing was received from it.
    pub fn channels_silent_from(&self, incarnation: u64) -> Vec<Arc<Channel>> {
        self.interested_channels(|state| {
            !state.has_received_from(incarnation) && state.contiguous.contains(incarnation)
        })
    }

    fn interested_channels(&self, is_meant: impl Fn(&State) -> bool) -> Vec<Arc<Channel>> {
        let mut channels = self.all();
        channels.retain(|channel| {
            let state = channel.state.lock();
            !matches!(state.attach_barrier, BarrierState::NotStarted) && is_meant(&state)
        });
        channels
    }

    /// Delivers the stored messages of an incarnation that this node has not received, in their order. Clears the doubt about the
    /// incarnation unless it `may_go_on`.
    pub fn apply_store_backfill(
        &self,
        channel: &Arc<Channel>,
        incarnation: u64,
        stored: Vec<ForwardedMessages>,
        may_go_on: bool,
    ) {
        let mut state = channel.state.lock();
        if state.removed {
            return;
        }
        for one in stored {
            let last = one.last();
            // Messages from before the retirement are in no position any more.
            if !state.position.includes(last) && !state.retired.includes(last) {
                self.deliver_new(channel, &mut state, one);
            }
        }
        if !may_go_on {
            state.in_doubt.remove(incarnation);
        }
        drop(state);
        self.enforce_budget();
    }

    /// Gives a late message up: attached clients are told of a continuity loss, and no older position is resumed here.
    pub fn lose_message(&self, channel: &Channel) {
        let mut state = channel.state.lock();
        state.invalidate_positions();
        self.has_unannounced_gap.store(true, Ordering::SeqCst);
        self.report_loss(channel, &state);
    }

    /// Reports a node failure in these channels alone, as `Hub::report_node_failure` does.
    pub fn report_node_failure_in(&self, numbers: &HashSet<u64>) {
        self.each_of(numbers, |channel, state| self.report_loss(channel, state));
    }

    /// Abandons the incarnation in these channels alone, as `Hub::abandon_incarnation` does.
    pub fn abandon_incarnation_in(&self, incarnation: u64, numbers: &HashSet<u64>) {
        self.each_of(numbers, |channel, state| self.invalidate_positions(channel, state, incarnation));
    }

    /// Marks the incarnation as in doubt in one channel, if `is_unconfirmed` returns true under the channel's lock.
    pub fn mark_in_doubt_in(
        &self,
        key: &ChannelKey,
        number: u64,
        incarnation: u64,
        is_unconfirmed: impl FnOnce() -> bool,
    ) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let mut state = channel.state.lock();
        if !matches!(state.attach_barrier, BarrierState::NotStarted) && is_unconfirmed() {
            state.mark_in_doubt(incarnation);
        }
    }

    /// Abandons the incarnation in all channels where it is in doubt.
    pub fn abandon_where_in_doubt(&self, incarnation: u64) {
        for channel in &self.all() {
            let mut state = channel.state.lock();
            if state.in_doubt.contains(&incarnation) {
                self.invalidate_positions(channel, &mut state, incarnation);
            }
        }
    }

    fn each_of(&self, numbers: &HashSet<u64>, act: impl Fn(&Channel, &mut State)) {
        for channel in self.all().iter().filter(|channel| numbers.contains(&channel.number)) {
            let mut state = channel.state.lock();
            if !matches!(state.attach_barrier, BarrierState::NotStarted) {
                act(channel, &mut state);
            }
        }
    }
}

impl Channel {
    /// Whether the channel is active and has not received this message of an incarnation that forwards it.
    pub fn lacks(&self, stamp: Stamp) -> bool {
        self.state.lock().lacks(stamp)
    }

    /// The last sequence received of another node's incarnation; 0 for none.
    pub fn received_sequence(&self, incarnation: u64) -> u64 {
        let state = self.state.lock();
        state.position.others.as_ref().and_then(|others| others.sequence_of(incarnation)).unwrap_or(0)
    }

    /// The last sequence of the incarnation that was delivered here, also if it is retired since; 0 for none.
    pub fn delivered_sequence(&self, incarnation: u64) -> u64 {
        let state = self.state.lock();
        let everything = state.retired.join_into(&state.position.serial());
        everything.sequence_of(incarnation).unwrap_or(0)
    }

    /// Adds sequences of incarnations that owe this node nothing to the position: later attaches and replays include them, and a client
    /// that lacks one of them is not resumed from the messages buffered here.
    pub fn learn_sequences(&self, stamps: &[Stamp]) {
        let state = &mut *self.state.lock();
        let news: Vec<Stamp> = stamps.iter().filter(|stamp| !state.accounts_for(**stamp)).copied().collect();
        if news.is_empty() {
            return;
        }
        news.iter().for_each(|stamp| state.position.receive(*stamp, 0));
        if let Some(replay_buffer) = &mut state.replay_buffer {
            replay_buffer.require_received(&news);
        }
    }

    /// Whether this node has received a message of the incarnation, or its announcement that it forwards the channel.
    pub fn knows_incarnation(&self, incarnation: u64) -> bool {
        self.state.lock().knows_incarnation(incarnation)
    }

    /// Whether an incarnation other than these is in doubt.
    pub fn is_in_doubt_except(&self, incarnations: &[u64]) -> bool {
        self.state.lock().in_doubt.iter().any(|incarnation| !incarnations.contains(incarnation))
    }
}
