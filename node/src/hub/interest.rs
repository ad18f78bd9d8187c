//! Interest of this node in channels, and the attach barrier: an attach waits until the peers forward the channel.

use std::collections::HashSet;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, Hub, State};
use super::delivery::MessageDelivery;
use super::resume::ResumeStart;
use crate::model::{ChannelKey, Stamp};

/// Announces this node's interest to the peers. Called under the channel's lock, so announcements are in order.
pub trait InterestAnnouncer: Send + Sync {
    /// Announces interest. `sequence` is the last one given here, with or without a message.
    fn announce(&self, key: &ChannelKey, number: u64, sequence: u64) -> AnnounceResult;
    fn withdraw(&self, key: &ChannelKey, number: u64);

    /// Whether a node failed so lately that its clients may still resume, without the last messages that it published.
    fn has_recent_loss(&self) -> bool {
        false
    }
}

/// The peers that do not forward a channel yet.
#[derive(Debug)]
pub struct AnnounceResult {
    /// No peer has to be waited for; otherwise `Hub::pass_barrier` follows.
    pub is_done: bool,
    /// Live incarnations that could not be told: no client is resumed until they announce their sequence, or until
    /// `Hub::abandon_where_in_doubt`.
    pub unreachable: Vec<u64>,
}

/// A callback that runs once the channel can be attached to, on any thread.
pub type AttachWaiter = Box<dyn FnOnce() + Send>;

/// State of the attach barrier of a channel.
#[derive(Default)]
pub(super) enum BarrierState {
    /// The peers have not been told.
    #[default]
    NotStarted,
    /// The peers have been told and have not all answered.
    Waiting(Vec<AttachWaiter>),
    /// All peers forward the channel.
    Passed,
}

impl Hub {
    /// Sets the announcer, before the first attach. Without one the node has no cluster.
    pub fn set_interest(&self, interest: Arc<dyn InterestAnnouncer>) {
        self.interest.set(interest).ok();
    }

    /// Whether there are, or may be, peers, so that an attach first passes the barrier.
    pub fn is_clustered(&self) -> bool {
        self.interest.get().is_some()
    }

    /// Registers the target's interest, as an attach does. Returns the channel if all peers forward it; otherwise the result of `waiter`
    /// runs when this has to be called again.
    pub fn join(
        &self,
        key: &ChannelKey,
        target: usize,
        waiter: impl FnOnce() -> AttachWaiter,
    ) -> Option<Arc<Channel>> {
        self.with_channel(key, |channel, state| {
            self.register(state, target);
            self.enter_barrier(channel, state, waiter)
        })
    }

    pub(super) fn enter_barrier(
        &self,
        channel: &Arc<Channel>,
        state: &mut State,
        waiter: impl FnOnce() -> AttachWaiter,
    ) -> Option<Arc<Channel>> {
        if let (BarrierState::NotStarted, Some(interest)) = (&state.attach_barrier, self.interest.get())
            && interest.has_recent_loss()
        {
            state.invalidate_positions();
        }
        match (&mut state.attach_barrier, self.interest.get()) {
            (BarrierState::Passed, _) | (_, None) => return Some(Arc::clone(channel)),
            (BarrierState::Waiting(waiters), _) => {
                waiters.push(waiter());
                return None;
            }
            (BarrierState::NotStarted, Some(interest)) => {
                let AnnounceResult { is_done, unreachable } =
                    interest.announce(channel.key(), channel.number, state.position.own.sequence);
                unreachable.into_iter().for_each(|incarnation| state.mark_in_doubt(incarnation));
                if !is_done {
                    state.attach_barrier = BarrierState::Waiting(vec![waiter()]);
                    return None;
                }
            }
        }
        state.attach_barrier = BarrierState::Passed;
        Some(Arc::clone(channel))
    }

    /// Ends the attach barrier: every peer forwards the channel or is unreachable, in which case `is_whole` is false.
    pub fn pass_barrier(&self, key: &ChannelKey, number: u64, is_complete: bool) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let before = {
            let mut state = channel.state.lock();
            if !is_complete && matches!(state.attach_barrier, BarrierState::Waiting(_)) {
                state.invalidate_positions();
                self.has_unannounced_gap.store(true, Ordering::SeqCst);
            }
            mem::replace(&mut state.attach_barrier, BarrierState::Passed)
        };
        if let BarrierState::Waiting(waiters) = before {
            waiters.into_iter().for_each(|waiter| waiter());
        }
    }

    /// Records the sequence that a peer had reached when it began to forward the channel, or began again. The messages before it cannot be
    /// had here: attached clients are told of a continuity loss, and no client is resumed over it.
    pub fn learn_peer_sequence(&self, key: &ChannelKey, number: u64, stamp: Stamp) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        self.apply_peer_sequence(&channel, &mut channel.state.lock(), stamp);
    }

    fn apply_peer_sequence(&self, channel: &Channel, state: &mut State, stamp: Stamp) {
        state.in_doubt.remove(stamp.incarnation);
        state.contiguous.advance(stamp);
        if stamp.sequence == 0 {
            return;
        }
        if !state.position.includes(stamp) {
            state.position.receive(stamp, 0);
        }
        self.break_continuity(channel, state);
    }

    /// Records sequences of retired incarnations, so that serials which name them are known here.
    pub fn learn_retired_sequences(&self, key: &ChannelKey, number: u64, retired: &[Stamp]) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let mut state = channel.state.lock();
        let news: Vec<Stamp> = retired.iter().filter(|stamp| !state.accounts_for(**stamp)).copied().collect();
        if news.is_empty() {
            return;
        }
        news.into_iter().for_each(|stamp| state.position.receive(stamp, 0));
        self.break_continuity(&channel, &mut state);
    }

    /// Records that messages of a peer were lost, in unknown channels. No client is resumed until the peer has announced its sequence
    /// (`Hub::learn_peer_sequence`).
    pub fn mark_peer_loss(&self, incarnation: u64) {
        for channel in &self.all() {
            let mut state = channel.state.lock();
            if matches!(state.attach_barrier, BarrierState::NotStarted) {
                continue;
            }
            state.contiguous.remove(incarnation);
            state.mark_in_doubt(incarnation);
            self.break_continuity(channel, &mut state);
        }
    }

    /// Reports a continuity loss after another node's failure to the clients of channels that its incarnation forwarded and whose position
    /// names it, and of the channels `unconfirmed`. A position that names it by what other nodes had alone is no loss: its clients
    /// attached after its end.
    pub fn report_node_failure(&self, incarnation: u64, unconfirmed: &HashSet<u64>) {
        let is_meant = |state: &State| {
            let is_tracked = state.contiguous.contains(incarnation) || state.in_doubt.contains(&incarnation);
            is_tracked && state.has_received_from(incarnation)
        };
        self.each_interested(is_meant, unconfirmed, |channel, state| self.report_loss(channel, state));
    }

    /// Marks an incarnation that may have acknowledged messages which have not arrived here as in doubt, in every channel that it forwards
    /// and in `unconfirmed`. No client is resumed there until the node is back (`Hub::confirm_contiguous`) or abandoned.
    pub fn mark_in_doubt(&self, incarnation: u64, unconfirmed: &HashSet<u64>) {
        self.each_forwarded(incarnation, unconfirmed, |_, state| state.mark_in_doubt(incarnation));
    }

    /// Gives up an incarnation that does not come back and whose acknowledged messages no node has. No earlier position can be resumed.
    pub fn abandon_incarnation(&self, incarnation: u64, unconfirmed: &HashSet<u64>) {
        self.each_forwarded(incarnation, unconfirmed, |channel, state| {
            self.invalidate_positions(channel, state, incarnation)
        });
    }

    pub(super) fn invalidate_positions(&self, channel: &Channel, state: &mut State, incarnation: u64) {
        state.in_doubt.remove(incarnation);
        state.invalidate_positions();
        self.has_unannounced_gap.store(true, Ordering::SeqCst);
        self.report_loss(channel, state);
    }

    /// Records that a peer has forwarded every message up to this sequence since this node announced its interest.
    pub fn confirm_contiguous(&self, key: &ChannelKey, number: u64, stamp: Stamp) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let mut state = channel.state.lock();
        if !state.contiguous.contains(stamp.incarnation) {
            // A message was lost meanwhile.
            return self.apply_peer_sequence(&channel, &mut state, stamp);
        }
        state.in_doubt.remove(stamp.incarnation);
        state.contiguous.advance(stamp);
    }

    /// Records a sequence up to which a peer says by itself that it has forwarded every message.
    pub fn extend_contiguous(&self, key: &ChannelKey, stamp: Stamp) {
        let Some(channel) = self.live(key) else { return };
        let mut state = channel.state.lock();
        let Stamp { incarnation, .. } = stamp;
        if state.contiguous.contains(incarnation) && !state.in_doubt.contains(&incarnation) {
            state.contiguous.advance(stamp);
        }
    }

    /// The last sequence given in this channel, with or without a message; 0 if the channel is not live.
    pub fn last_sequence(&self, key: &ChannelKey) -> u64 {
        self.live(key).map_or(0, |channel| channel.position().own.sequence)
    }

    /// Whether sequences without a message were reserved since the last call, and not announced to the peers.
    pub fn take_unannounced_gap(&self) -> bool {
        self.has_unannounced_gap.swap(false, Ordering::SeqCst)
    }

    /// Runs `act` on the channels whose position names the incarnation, those that it forwards, and those of these numbers.
    fn each_forwarded(&self, incarnation: u64, numbers: &HashSet<u64>, act: impl Fn(&Channel, &mut State)) {
        let is_meant =
            |state: &State| state.has_received_from(incarnation) || state.contiguous.contains(incarnation);
        self.each_interested(is_meant, numbers, act);
    }

    fn each_interested(
        &self,
        is_meant: impl Fn(&State) -> bool,
        numbers: &HashSet<u64>,
        act: impl Fn(&Channel, &mut State),
    ) {
        for channel in &self.all() {
            let mut state = channel.state.lock();
            let is_interested = !matches!(state.attach_barrier, BarrierState::NotStarted);
            if is_interested && (is_meant(&state) || numbers.contains(&channel.number)) {
                act(channel, &mut state);
            }
        }
    }

    /// Runs `act` with the position of the channel, under its lock: the last own sequence, and the last known of every other incarnation
    /// that is not in doubt.
    pub fn with_position<R>(&self, key: &ChannelKey, act: impl FnOnce(u64, Serial) -> R) -> R {
        self.with_channel(key, |_, state| {
            let mut known = state.contiguous.join_into(state.position.serial());
            known.retain(|incarnation| {
                incarnation != self.incarnation && !state.in_doubt.contains(&incarnation)
            });
            act(state.position.own.sequence, known)
        })
    }

    /// All deliveries of the channel that a client with this position lacks. None if that cannot be determined, or one is older than
    /// `back_ms`.
    pub fn missed_deliveries(
        &self,
        key: &ChannelKey,
        position: &Serial,
        back_ms: u64,
    ) -> Option<Vec<Arc<MessageDelivery>>> {
        let channel = self.live(key)?;
        let state = channel.state.lock();
        match self.start(&state, position) {
            ResumeStart::Live => Some(Vec::new()),
            ResumeStart::Replay { after, .. } => {
                let replay_buffer = state
                    .replay_buffer
                    .as_ref()
                    .filter(|replay_buffer| replay_buffer.age_ms(after.offset, self.now_ms()) <= back_ms)?;
                let mut missed = replay_buffer.after(after.offset, usize::MAX);
                missed.retain(|delivery| !delivery.is_included_in(position));
                Some(missed)
            }
            ResumeStart::Unknown => None,
        }
    }

    pub(super) fn break_continuity(&self, channel: &Channel, state: &mut State) {
        if let Some(replay_buffer) = &mut state.replay_buffer {
            replay_buffer.restart(&state.position);
        }
        self.report_loss(channel, state);
    }

    /// Reports a continuity loss to all attached clients.
    pub(super) fn report_loss(&self, channel: &Channel, state: &State) {
        if !matches!(state.attach_barrier, BarrierState::Passed) {
            return;
        }
        for (bit, target) in self.targets.iter().enumerate() {
            if state.targets & (1 << bit) != 0 {
                target.lose_continuity(channel.number, &state.position);
            }
        }
    }
}
