//! The channels with events for each target, as far as they are in memory. The rest is found in the tables.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::TargetId;

/// Channels of one target in memory.
const CHANNELS_MAX: usize = 1_024;

/// All targets.
#[derive(Default)]
pub(super) struct Board {
    targets: Mutex<HashMap<TargetId, Arc<Lineup>>>,
    /// A target is new.
    pub(super) has_new: Notify,
}

/// The channels of one target.
pub(super) struct Lineup {
    pub(super) target: TargetId,
    state: Mutex<State>,
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
    /// Channels that are not in memory may have events, and the tables are to be read for them.
    overflowed: bool,
    /// The same, until they were read to their end.
    is_unread: bool,
    /// The last channel that was read from the tables.
    read_until: Option<Box<str>>,
    /// The settings under which the target has answered that it is gone.
    disabled: Option<u64>,
}

#[derive(Default)]
struct Channel {
    /// An event has come since the last look at the tables.
    has_new: bool,
    /// No event with a lower sequence waits. A look that began before it would pass over the rows that were removed there.
    from: u64,
    not_before: Option<Instant>,
    /// So many further events end the wait.
    lacking: Option<usize>,
    failures: u32,
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
    /// `has_more`: further events of the channel wait. None waits below `from`.
    Settled { has_more: bool, from: u64 },
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
        let lineup = Arc::new(Lineup::new(target));
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
    pub(super) fn arrived(&self, target: &TargetId, channel: Box<str>, sequence: u64) {
        let mut lineup = self.lineup(target);
        lineup.arrived(channel.clone(), sequence);
        // One that was forgotten meanwhile has no task.
        while !self.targets.lock().get(target).is_some_and(|known| Arc::ptr_eq(known, &lineup)) {
            lineup = self.lineup(target);
            lineup.arrived(channel.clone(), sequence);
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

    /// The settings under which the target is disabled.
    pub(super) fn disabled(&self, target: &TargetId) -> Option<u64> {
        self.targets.lock().get(target).and_then(|lineup| lineup.disabled())
    }
}

impl Lineup {
    fn new(target: &TargetId) -> Self {
        let (state, changed, begun) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
        Self { target: target.clone(), state, changed, begun }
    }

    fn arrived(&self, name: Box<str>, sequence: u64) {
        let mut state = self.state.lock();
        if let Some(channel) = state.channels.get_mut(&name) {
            channel.has_new = true;
            channel.lacking = channel.lacking.map(|lacking| lacking.saturating_sub(1));
            if channel.lacking == Some(0) {
                (channel.lacking, channel.not_before) = (None, None);
                drop(state);
                self.changed.notify_one();
            }
            return;
        }
        if state.channels.len() >= CHANNELS_MAX {
            (state.overflowed, state.is_unread) = (true, true);
            return;
        }
        // Earlier ones may wait for a channel that was not read yet.
        let from = if state.is_unread { 0 } else { sequence };
        state.channels.insert(name.clone(), Channel { has_new: true, from, ..Channel::default() });
        state.turns.push_back(name);
        drop(state);
        self.changed.notify_one();
    }

    /// The next channel whose time has come. Else when the time of the first one comes.
    pub(super) fn next(&self, now: Instant) -> Result<Next, Option<Instant>> {
        let mut state = self.state.lock();
        let mut first: Option<Instant> = None;
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

    /// Gives back a channel that [`Lineup::next`] gave.
    pub(super) fn ended(&self, name: Box<str>, turn: Turn) {
        let mut state = self.state.lock();
        let Some(channel) = state.channels.get_mut(&name) else { return };
        match turn {
            Turn::Settled { has_more, from } => {
                (channel.failures, channel.not_before) = (0, None);
                channel.from = from;
                if !has_more && !channel.has_new {
                    state.channels.remove(&name);
                    return;
                }
            }
            Turn::Failed { not_before } => {
                channel.failures = channel.failures.saturating_add(1);
                channel.not_before = Some(not_before);
            }
            Turn::Waits { not_before } => channel.not_before = Some(not_before),
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
        if !state.overflowed || state.channels.len() > CHANNELS_MAX / 2 {
            return None;
        }
        // An event that comes from here on says so again.
        state.overflowed = false;
        Some((state.read_until.clone(), CHANNELS_MAX - state.channels.len()))
    }

    /// Takes channels from the tables; `is_end`: there is none behind them.
    pub(super) fn add(&self, names: Vec<Box<str>>, is_end: bool) {
        let mut state = self.state.lock();
        let began_at_the_first = state.read_until.is_none();
        state.read_until = if is_end { None } else { names.last().cloned() };
        // A look that began in the midst has not seen the channels before.
        state.overflowed |= !is_end || !began_at_the_first;
        state.is_unread = state.overflowed;
        for name in names {
            if !state.channels.contains_key(&name) {
                state.channels.insert(name.clone(), Channel { has_new: true, ..Channel::default() });
                state.turns.push_back(name);
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Channels may wait in the tables.
    pub(super) fn set_overflowed(&self) {
        let mut state = self.state.lock();
        (state.overflowed, state.is_unread) = (true, true);
        drop(state);
        self.changed.notify_one();
    }

    pub(super) fn disabled(&self) -> Option<u64> {
        self.state.lock().disabled
    }

    pub(super) fn set_disabled(&self, settings: Option<u64>) {
        self.state.lock().disabled = settings;
        self.changed.notify_one();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::model::AccountId;

    fn lineup() -> Arc<Lineup> {
        Board::default().lineup(&TargetId::new(&AccountId::new("acme"), "orders"))
    }

    fn names(lineup: &Lineup) -> Vec<Box<str>> {
        std::iter::from_fn(|| lineup.next(Instant::now()).ok().map(|next| next.channel)).collect()
    }

    #[test]
    fn channels_take_turns_and_leave_when_they_have_nothing() {
        let lineup = lineup();
        ["a", "b", "a"].into_iter().for_each(|name| lineup.arrived(name.into(), 0));
        assert_eq!(names(&lineup), [Box::from("a"), Box::from("b")]);
        lineup.arrived("a".into(), 3);
        assert!(names(&lineup).is_empty(), "it is being sent");
        lineup.ended("b".into(), Turn::Settled { has_more: false, from: 0 });
        lineup.ended("a".into(), Turn::Settled { has_more: false, from: 0 });
        assert_eq!(names(&lineup), [Box::from("a")], "an event came meanwhile");
        lineup.ended("a".into(), Turn::Settled { has_more: false, from: 0 });
        assert!(names(&lineup).is_empty());
    }

    #[test]
    fn failed_channel_lets_others_go_first() {
        let lineup = lineup();
        ["a", "b"].into_iter().for_each(|name| lineup.arrived(name.into(), 7));
        let Next { channel: name, failures, from } = lineup.next(Instant::now()).expect("a channel");
        assert_eq!((&*name, failures, from), ("a", 0, 7));
        let not_before = Instant::now() + Duration::from_secs(60);
        lineup.ended(name, Turn::Failed { not_before });
        assert_eq!(names(&lineup), [Box::from("b")]);
        assert_eq!(lineup.next(Instant::now()), Err(Some(not_before)));
        assert_eq!(lineup.next(not_before), Ok(Next { channel: Box::from("a"), failures: 1, from: 7 }));
    }

    #[test]
    fn channels_beyond_the_bound_are_read_from_the_tables() {
        let lineup = lineup();
        (0..CHANNELS_MAX + 1).for_each(|number| lineup.arrived(format!("{number}").into(), 5));
        assert_eq!(lineup.wants_more(), None, "there is no room");
        for name in names(&lineup) {
            lineup.ended(name, Turn::Settled { has_more: false, from: 0 });
        }
        assert_eq!(lineup.wants_more(), Some((None, CHANNELS_MAX)));
        lineup.arrived("while reading".into(), 6);
        lineup.add(vec!["1024".into()], true);
        for name in ["while reading", "1024"] {
            let next = lineup.next(Instant::now()).expect("a channel");
            assert_eq!((&*next.channel, next.from), (name, 0), "earlier events may wait");
        }
        lineup.arrived("afterwards".into(), 8);
        assert_eq!(lineup.next(Instant::now()).map(|next| next.from), Ok(8));
        assert_eq!(lineup.wants_more(), None);
    }
}
