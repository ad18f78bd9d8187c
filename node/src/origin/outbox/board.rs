//! The channels with events for each target, as far as they are in memory. The rest is found in the tables.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::TargetId;
use super::event::Event;
use super::recent::{Recent, Room};
use super::store::{Ahead, Batch, BatchBounds};

/// Channels of one target in memory.
const CHANNELS_MAX: usize = 1_024;
/// So many further ones may wait after a failure, so that they leave room for others.
const FAILING_MAX: usize = 16 * CHANNELS_MAX;
/// Channels that rest.
const RESTING_MAX: usize = CHANNELS_MAX / 2;
/// A channel is not sent again before this, unless a whole batch waits: its events share requests, and the first one does not wait.
const REST: Duration = Duration::from_millis(10);

/// All targets.
#[derive(Default)]
pub(super) struct Board {
    targets: Mutex<HashMap<TargetId, Arc<Lineup>>>,
    room: Arc<Room>,
    /// A target is new.
    pub(super) has_new: Notify,
}

/// The channels of one target.
pub(super) struct Lineup {
    pub(super) target: TargetId,
    state: Mutex<State>,
    room: Arc<Room>,
    /// A channel is ready that was not before.
    pub(super) changed: Notify,
    /// A task sends what it has.
    begun: AtomicBool,
}

#[derive(Default)]
struct State {
    channels: HashMap<Box<str>, Channel>,
    /// Channels that are not being sent, in their turn.
    turns: VecDeque<Box<str>>,
    /// Channels that were sent a moment ago, and until when they rest, in this order; those that a whole batch woke stand here too.
    resting: VecDeque<(Instant, Box<str>)>,
    /// Those of them whose last attempt failed.
    failing: usize,
    /// Channels that are not in memory may have events, and the tables are to be read for them from the first one on.
    overflowed: bool,
    /// The tables are being read.
    pass: Option<Pass>,
    /// The settings under which the target has answered that it is gone.
    disabled: Option<u64>,
    /// Why the last attempt failed; none: it did not.
    failure: Option<Box<str>>,
}

/// The reading of all channels in the tables, part by part.
#[derive(Default)]
struct Pass {
    /// The last channel that was read.
    until: Option<Box<str>>,
}

struct Channel {
    /// An event has come since the last look at the tables.
    has_new: bool,
    /// No event with a lower sequence waits. A look that began before it would pass over the rows that were removed there.
    from: u64,
    /// None: its events are read from the tables.
    recent: Option<Recent>,
    not_before: Option<Instant>,
    /// Until then, it is in none of the turns.
    rests_until: Option<Instant>,
    /// So many further events end the wait, or the rest.
    lacking: Option<usize>,
    failures: u32,
}

impl Channel {
    fn new(from: u64, recent: Option<Recent>) -> Self {
        Self { has_new: true, from, recent, not_before: None, rests_until: None, lacking: None, failures: 0 }
    }

    fn add(&mut self, sequence: u64, event: &Arc<Event>) {
        // It was on the disk a moment before it came here, and may have been sent from there.
        if sequence < self.from {
            return;
        }
        self.has_new = true;
        if let Some(recent) = &mut self.recent {
            recent.push(sequence, event);
        }
    }
}

/// A channel whose turn it is.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Next {
    pub(super) channel: Box<str>,
    /// Attempts that have failed since one succeeded.
    pub(super) failures: u32,
    /// No event with a lower sequence waits.
    pub(super) from: u64,
}

/// The end of a turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Turn {
    /// `has_more`: further events of the channel wait, as far as the turn has seen. None waits below `from`. So many make a `full` batch.
    Settled { has_more: bool, from: u64, full: usize },
    /// The attempt failed; the next one comes not before.
    Failed { not_before: Instant },
    /// Nothing was sent yet.
    Waits { not_before: Instant },
    /// Nothing was sent yet; `lacking` further events make a whole batch.
    Lingers { not_before: Instant, lacking: usize },
}

impl Board {
    pub(super) fn lineup(&self, target: &TargetId) -> Arc<Lineup> {
        let mut targets = self.targets.lock();
        if let Some(lineup) = targets.get(target) {
            return Arc::clone(lineup);
        }
        let lineup = Arc::new(Lineup::new(target, &self.room));
        targets.insert(target.clone(), Arc::clone(&lineup));
        self.has_new.notify_one();
        lineup
    }

    /// Targets that no task sends to yet; the caller begins one for each.
    pub(super) fn not_begun(&self) -> Vec<Arc<Lineup>> {
        let targets = self.targets.lock();
        targets
            .values()
            .filter(|lineup| !lineup.begun.swap(true, Ordering::Relaxed))
            .map(Arc::clone)
            .collect()
    }

    /// An event with this sequence waits for the target.
    pub(super) fn arrived(&self, target: &TargetId, sequence: u64, event: &Arc<Event>) {
        let mut lineup = self.lineup(target);
        lineup.arrived(sequence, event);
        // One that was forgotten meanwhile has no task.
        while !self.targets.lock().get(target).is_some_and(|known| Arc::ptr_eq(known, &lineup)) {
            lineup = self.lineup(target);
            lineup.arrived(sequence, event);
        }
    }

    /// Events of the channel wait no more for the target, though they were not sent.
    pub(super) fn lost(&self, target: &TargetId, channel: &str) {
        let lineup = self.targets.lock().get(target).map(Arc::clone);
        if let Some(lineup) = lineup {
            lineup.lost(channel);
        }
    }

    /// Forgets the target if it has no channel; an event that comes later makes another lineup.
    pub(super) fn remove(&self, lineup: &Lineup) -> bool {
        let mut targets = self.targets.lock();
        let is_empty = lineup.state.lock().channels.is_empty();
        if is_empty {
            targets.remove(&lineup.target);
        }
        is_empty
    }

    pub(super) fn all_disabled(&self) -> Vec<TargetId> {
        let targets = self.targets.lock();
        let disabled = targets.values().filter(|lineup| lineup.disabled().is_some());
        disabled.map(|lineup| lineup.target.clone()).collect()
    }

    /// Why the last attempt at the target failed.
    pub(super) fn failure(&self, target: &TargetId) -> Option<Box<str>> {
        let lineup = self.targets.lock().get(target).map(Arc::clone)?;
        lineup.failure()
    }

    /// The settings under which the target is disabled.
    pub(super) fn disabled(&self, target: &TargetId) -> Option<u64> {
        self.targets.lock().get(target).and_then(|lineup| lineup.disabled())
    }
}

impl State {
    /// Channels that are not in memory may have events.
    fn is_unread(&self) -> bool {
        self.overflowed || self.pass.is_some()
    }

    /// Channels in memory that count.
    fn taken(&self) -> usize {
        self.channels.len() - self.failing.min(FAILING_MAX)
    }

    /// Channels whose rest is over have a turn, or leave where nothing waits.
    fn end_rests(&mut self, now: Instant) {
        while let Some((until, name)) = self.resting.pop_front_if(|(until, _)| *until <= now) {
            let Some(channel) = self.channels.get_mut(&name) else { continue };
            // It may have rested again since.
            if channel.rests_until != Some(until) {
                continue;
            }
            (channel.rests_until, channel.lacking) = (None, None);
            if channel.has_new {
                self.turns.push_back(name);
            } else {
                self.channels.remove(&name);
            }
        }
    }
}

impl Lineup {
    fn new(target: &TargetId, room: &Arc<Room>) -> Self {
        let (state, changed, begun) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
        Self { target: target.clone(), state, room: Arc::clone(room), changed, begun }
    }

    fn arrived(&self, sequence: u64, event: &Arc<Event>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        if let Some(channel) = state.channels.get_mut(&event.channel) {
            channel.add(sequence, event);
            channel.lacking = channel.lacking.map(|lacking| lacking.saturating_sub(1));
            if channel.lacking == Some(0) {
                (channel.lacking, channel.not_before) = (None, None);
                if channel.rests_until.take().is_some() {
                    state.turns.push_back(event.channel.clone());
                }
                self.changed.notify_one();
            }
            return;
        }
        // Room is kept for those in the tables, which came before.
        let max = if state.is_unread() { CHANNELS_MAX / 2 } else { CHANNELS_MAX };
        if state.taken() >= max {
            state.overflowed = true;
            return;
        }
        // Earlier ones may wait for a channel that was not read yet.
        let mut channel = if state.is_unread() {
            Channel::new(0, None)
        } else {
            Channel::new(sequence, Some(Recent::new(&self.room)))
        };
        channel.add(sequence, event);
        state.channels.insert(event.channel.clone(), channel);
        state.turns.push_back(event.channel.clone());
        self.changed.notify_one();
    }

    /// The next channel whose time has come. Else when the time of the first one comes.
    pub(super) fn next(&self, now: Instant) -> Result<Next, Option<Instant>> {
        let mut state = self.state.lock();
        state.end_rests(now);
        let mut first = state.resting.front().map(|(until, _)| *until);
        for _ in 0..state.turns.len() {
            let Some(name) = state.turns.pop_front() else { break };
            let Some(channel) = state.channels.get_mut(&name) else { continue };
            match channel.not_before.filter(|until| *until > now) {
                None => {
                    (channel.has_new, channel.lacking) = (false, None);
                    let (failures, from) = (channel.failures, channel.from);
                    return Ok(Next { channel: name, failures, from });
                }
                Some(until) => {
                    first = Some(first.map_or(until, |first| first.min(until)));
                    state.turns.push_back(name);
                }
            }
        }
        Err(first)
    }

    /// The next batch of a channel that [`Lineup::next`] gave; none: its events are to be read from the tables.
    pub(super) fn batch(&self, name: &str, bounds: BatchBounds) -> Option<Batch> {
        let state = self.state.lock();
        state.channels.get(name)?.recent.as_ref()?.batch(&self.target, bounds)
    }

    /// Events that are read ahead find room in memory.
    pub(super) fn has_room(&self) -> bool {
        self.room.has_half()
    }

    /// Takes the first events of a channel that [`Lineup::next`] gave, as the tables had them since.
    pub(super) fn refill(&self, name: &str, Ahead { events, is_whole }: Ahead) {
        let mut state = self.state.lock();
        if let Some(channel) = state.channels.get_mut(name) {
            // One that came meanwhile may not be among them.
            let is_whole = is_whole && !channel.has_new;
            channel.recent = Some(Recent::of(&self.room, events, is_whole));
        }
    }

    /// Events of the channel wait no more, though they were not sent: those in memory are read from the tables again.
    fn lost(&self, name: &str) {
        if let Some(channel) = self.state.lock().channels.get_mut(name) {
            (channel.has_new, channel.recent) = (true, None);
        }
    }

    /// Gives back a channel that [`Lineup::next`] gave.
    pub(super) fn ended(&self, name: Box<str>, turn: Turn, now: Instant) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(channel) = state.channels.get_mut(&name) else { return };
        match turn {
            Turn::Settled { has_more, from, full } => {
                state.failing -= usize::from(channel.failures > 0);
                (channel.failures, channel.not_before, channel.from) = (0, None, from);
                if let Some(recent) = &mut channel.recent {
                    recent.pass(from);
                } else if !has_more && !channel.has_new {
                    channel.recent = Some(Recent::new(&self.room));
                }
                let waiting = channel.recent.as_ref().map_or(0, Recent::len);
                let may_rest = !has_more && waiting < full && state.resting.len() < RESTING_MAX;
                if may_rest {
                    let until = now + REST;
                    (channel.rests_until, channel.lacking) = (Some(until), Some(full - waiting));
                    state.resting.push_back((until, name));
                    return;
                }
                if !has_more && !channel.has_new {
                    state.channels.remove(&name);
                    return;
                }
            }
            Turn::Failed { not_before } => {
                state.failing += usize::from(channel.failures == 0);
                channel.failures = channel.failures.saturating_add(1);
                // The next attempt has the events of this one alone, as the tables say.
                (channel.not_before, channel.recent) = (Some(not_before), None);
            }
            Turn::Waits { not_before } => (channel.not_before, channel.recent) = (Some(not_before), None),
            // An event that came meanwhile is not counted in what is lacking.
            Turn::Lingers { .. } if channel.has_new => channel.not_before = None,
            Turn::Lingers { not_before, lacking } => {
                (channel.not_before, channel.lacking) = (Some(not_before), Some(lacking));
            }
        }
        state.turns.push_back(name);
    }

    /// The place in the tables behind which to look for further channels, and the number that there is room for; none while there is no need to.
    pub(super) fn wants_more(&self) -> Option<(Option<Box<str>>, usize)> {
        let mut state = self.state.lock();
        if !state.is_unread() || state.taken() > CHANNELS_MAX / 2 {
            return None;
        }
        let count = CHANNELS_MAX - state.taken();
        if state.pass.is_none() {
            // An event that comes from here on says so again.
            state.overflowed = false;
        }
        let pass = state.pass.get_or_insert_default();
        Some((pass.until.clone(), count))
    }

    /// Takes channels from the tables; `is_end`: there is none behind them.
    pub(super) fn add(&self, names: Vec<Box<str>>, is_end: bool) {
        let mut state = self.state.lock();
        state.pass = (!is_end).then(|| Pass { until: names.last().cloned() });
        for name in names {
            if !state.channels.contains_key(&name) {
                state.channels.insert(name.clone(), Channel::new(0, None));
                state.turns.push_back(name);
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Channels may wait in the tables.
    pub(super) fn set_overflowed(&self) {
        self.state.lock().overflowed = true;
        self.changed.notify_one();
    }

    pub(super) fn disabled(&self) -> Option<u64> {
        self.state.lock().disabled
    }

    pub(super) fn failure(&self) -> Option<Box<str>> {
        self.state.lock().failure.clone()
    }

    pub(super) fn set_failure(&self, reason: Option<&str>) {
        self.state.lock().failure = reason.map(Into::into);
    }

    pub(super) fn set_disabled(&self, settings: Option<u64>) {
        self.state.lock().disabled = settings;
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests;
