//! Which channels this node wants from other nodes, and from when on it can count on getting what they take.

use std::collections::HashSet;
use std::mem;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use fanfare_proto::serial::Serial;

use super::channels::{Channel, Hub, State};
use super::delivery::Delivery;
use super::resume::Start;
use crate::model::{ChannelKey, Stamp};

/// Tells other nodes what is wanted here. Called under the lock of the channel, so what is told stands in order.
pub trait Interest: Send + Sync {
    /// `sequence` is the last number that was given here, whether or not it has a message.
    fn join(&self, key: &ChannelKey, number: u64, sequence: u64) -> Joins;
    fn leave(&self, key: &ChannelKey, number: u64);

    /// A node has died so lately that somebody may come back who was on it, and has missed what it published last.
    fn has_lost(&self) -> bool {
        false
    }
}

/// Whom the other nodes are that do not forward a channel yet.
#[derive(Debug)]
pub struct Joins {
    /// There is nobody to wait for; else [`Hub::joined`] follows.
    pub is_done: bool,
    /// Runs that live and could not be told: nobody is resumed until they say how far they are, or [`Hub::give_up`].
    pub unreached: Vec<u64>,
}

/// Runs once the channel can be attached to, on any thread.
pub type Waiter = Box<dyn FnOnce() + Send>;

/// What other nodes know of this node's interest in a channel.
#[derive(Default)]
pub(super) enum Joining {
    /// Nothing.
    #[default]
    Not,
    /// They are told, and have not all answered.
    Begun(Vec<Waiter>),
    /// They forward it.
    Done,
}

impl Hub {
    /// To be called before anybody is attached. Without it the node is alone.
    pub fn set_interest(&self, interest: Arc<dyn Interest>) {
        self.interest.set(interest).ok();
    }

    /// There are, or may be, other nodes, so [`Hub::join`] comes before an attach.
    pub fn is_clustered(&self) -> bool {
        self.interest.get().is_some()
    }

    /// Registers the target's interest, as an attach does. The channel, if all other nodes forward it by now; otherwise
    /// what `waiter` makes runs when this is to be called again.
    pub fn join(
        &self,
        key: &ChannelKey,
        target: usize,
        waiter: impl FnOnce() -> Waiter,
    ) -> Option<Arc<Channel>> {
        self.with_channel(key, |channel, state| {
            self.register(state, target);
            self.join_others(channel, state, waiter)
        })
    }

    pub(super) fn join_others(
        &self,
        channel: &Arc<Channel>,
        state: &mut State,
        waiter: impl FnOnce() -> Waiter,
    ) -> Option<Arc<Channel>> {
        if let (Joining::Not, Some(interest)) = (&state.joining, self.interest.get())
            && interest.has_lost()
        {
            state.end_positions();
        }
        match (&mut state.joining, self.interest.get()) {
            (Joining::Done, _) | (_, None) => return Some(Arc::clone(channel)),
            (Joining::Begun(waiters), _) => {
                waiters.push(waiter());
                return None;
            }
            (Joining::Not, Some(interest)) => {
                let Joins { is_done, unreached } =
                    interest.join(channel.key(), channel.number, state.mark.own.sequence);
                unreached.into_iter().for_each(|run| state.doubt(run));
                if !is_done {
                    state.joining = Joining::Begun(vec![waiter()]);
                    return None;
                }
            }
        }
        state.joining = Joining::Done;
        Some(Arc::clone(channel))
    }

    /// Every node that was to be waited for forwards the channel by now, or is out of reach: then it `is_whole` no more.
    pub fn joined(&self, key: &ChannelKey, number: u64, is_whole: bool) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let before = {
            let mut state = channel.state.lock();
            if !is_whole && matches!(state.joining, Joining::Begun(_)) {
                state.end_positions();
                self.skipped.store(true, Ordering::SeqCst);
            }
            mem::replace(&mut state.joining, Joining::Done)
        };
        if let Joining::Begun(waiters) = before {
            waiters.into_iter().for_each(|waiter| waiter());
        }
    }

    /// What another node had numbered in the channel before it began to forward it, or to do so again. Nobody here can be given
    /// that, so who is attached already is told, and nobody is resumed over it.
    pub fn heard(&self, key: &ChannelKey, number: u64, stamp: Stamp) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        self.hear(&channel, &mut channel.state.lock(), stamp);
    }

    fn hear(&self, channel: &Channel, state: &mut State, stamp: Stamp) {
        state.unsure.remove(stamp.incarnation);
        state.whole.reach(stamp);
        if stamp.sequence == 0 {
            return;
        }
        if !state.mark.covers(stamp) {
            state.mark.hear(stamp, 0);
        }
        self.break_off(channel, state);
    }

    /// The same of runs that are gone, so that whoever has something of them in its position is known here.
    pub fn heard_of(&self, key: &ChannelKey, number: u64, gone: &[Stamp]) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let mut state = channel.state.lock();
        let news: Vec<Stamp> = gone.iter().filter(|stamp| !state.knows(**stamp)).copied().collect();
        if news.is_empty() {
            return;
        }
        news.into_iter().for_each(|stamp| state.mark.hear(stamp, 0));
        self.break_off(&channel, &mut state);
    }

    /// Something that another node had for this one is lost, of whatever channel. Until it has told how far it is, by
    /// [`Hub::heard`], nobody is resumed.
    pub fn lost(&self, incarnation: u64) {
        for channel in &self.all() {
            let mut state = channel.state.lock();
            if matches!(state.joining, Joining::Not) {
                continue;
            }
            state.whole.remove(incarnation);
            state.doubt(incarnation);
            self.break_off(channel, &mut state);
        }
    }

    /// A run of another node is dead. Whoever is attached where it stands, or in one of these channels, is told; but not where it stands
    /// by what others had of it alone, since whoever is attached there came when it had ended.
    pub fn died(&self, incarnation: u64, unheard: &HashSet<u64>) {
        let is_meant = |state: &State| {
            let was_heard = state.whole.contains(incarnation) || state.unsure.contains(&incarnation);
            was_heard && state.stands(incarnation)
        };
        self.each_wanted(is_meant, unheard, |channel, state| self.tell_lost(channel, state));
    }

    /// It may have acknowledged what has not come here, in any channel that it forwards, or in one of these. Nobody is resumed
    /// there, until it is back ([`Hub::caught_up`]) or gone.
    pub fn doubt(&self, incarnation: u64, unheard: &HashSet<u64>) {
        self.each_forwarded(incarnation, unheard, |_, state| state.doubt(incarnation));
    }

    /// It does not come back, and nobody has what it may have acknowledged. No position of before is one to resume from.
    pub fn gone(&self, incarnation: u64, unheard: &HashSet<u64>) {
        self.each_forwarded(incarnation, unheard, |channel, state| {
            self.end_positions(channel, state, incarnation)
        });
    }

    pub(super) fn end_positions(&self, channel: &Channel, state: &mut State, incarnation: u64) {
        state.unsure.remove(incarnation);
        state.end_positions();
        self.skipped.store(true, Ordering::SeqCst);
        self.tell_lost(channel, state);
    }

    /// Another node has forwarded all that it had numbered in the channel up to this, since this one asked for it.
    pub fn caught_up(&self, key: &ChannelKey, number: u64, stamp: Stamp) {
        let Some(channel) = self.live(key).filter(|channel| channel.number == number) else { return };
        let mut state = channel.state.lock();
        if !state.whole.contains(stamp.incarnation) {
            // Something was lost meanwhile.
            return self.hear(&channel, &mut state, stamp);
        }
        state.unsure.remove(stamp.incarnation);
        state.whole.reach(stamp);
    }

    /// Another node has said by itself up to which number it has forwarded all.
    pub fn has_numbered(&self, key: &ChannelKey, stamp: Stamp) {
        let Some(channel) = self.live(key) else { return };
        let mut state = channel.state.lock();
        let Stamp { incarnation, .. } = stamp;
        if state.whole.contains(incarnation) && !state.unsure.contains(&incarnation) {
            state.whole.reach(stamp);
        }
    }

    /// Where this channel stands by the numbers that were given here, whether or not each has a message; 0 where it does not live.
    pub fn numbered(&self, key: &ChannelKey) -> u64 {
        self.live(key).map_or(0, |channel| channel.mark().own.sequence)
    }

    /// Numbers without a message were given since this was last asked, and nobody was told.
    pub fn has_skipped(&self) -> bool {
        self.skipped.swap(false, Ordering::SeqCst)
    }

    /// The channels in whose position a run stands, those that it forwards, whether or not it has published anything there, and those of
    /// these numbers.
    fn each_forwarded(&self, incarnation: u64, numbers: &HashSet<u64>, act: impl Fn(&Channel, &mut State)) {
        let is_meant = |state: &State| state.stands(incarnation) || state.whole.contains(incarnation);
        self.each_wanted(is_meant, numbers, act);
    }

    fn each_wanted(
        &self,
        is_meant: impl Fn(&State) -> bool,
        numbers: &HashSet<u64>,
        act: impl Fn(&Channel, &mut State),
    ) {
        for channel in &self.all() {
            let mut state = channel.state.lock();
            let is_wanted = !matches!(state.joining, Joining::Not);
            if is_wanted && (is_meant(&state) || numbers.contains(&channel.number)) {
                act(channel, &mut state);
            }
        }
    }

    /// Runs `act` with where the channel stands, while nothing is numbered in it: its own number, and how far each other run is known,
    /// but for those of which something may be missing.
    pub fn standing<R>(&self, key: &ChannelKey, act: impl FnOnce(u64, Serial) -> R) -> R {
        self.with_channel(key, |_, state| {
            let mut known = state.whole.and(state.mark.serial());
            known.retain(|run| run != self.incarnation && !state.unsure.contains(&run));
            act(state.mark.own.sequence, known)
        })
    }

    /// All deliveries of the channel that whoever has this position has not, none older than `back_ms`. None where that cannot
    /// be told.
    pub fn missed(&self, key: &ChannelKey, position: &Serial, back_ms: u64) -> Option<Vec<Arc<Delivery>>> {
        let channel = self.live(key)?;
        let state = channel.state.lock();
        match self.start(&state, position) {
            Start::Live => Some(Vec::new()),
            Start::Replay { after, .. } => {
                let ring =
                    state.ring.as_ref().filter(|ring| ring.age_ms(after.place, self.now_ms()) <= back_ms)?;
                let mut missed = ring.after(after.place, usize::MAX);
                missed.retain(|delivery| !delivery.is_covered(position));
                Some(missed)
            }
            Start::Unknown => None,
        }
    }

    pub(super) fn break_off(&self, channel: &Channel, state: &mut State) {
        if let Some(ring) = &mut state.ring {
            ring.restart(&state.mark);
        }
        self.tell_lost(channel, state);
    }

    /// Tells whoever is attached that something is missing of what they were to have.
    pub(super) fn tell_lost(&self, channel: &Channel, state: &State) {
        if !matches!(state.joining, Joining::Done) {
            return;
        }
        for (bit, target) in self.targets.iter().enumerate() {
            if state.targets & (1 << bit) != 0 {
                target.lose(channel.number, &state.mark);
            }
        }
    }
}
