//! The board of all targets: their channels with events, as far as they are in memory. The others are found in the tables.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::TargetId;
use super::event::OutboxEvent;
use super::recent::{CachedEvents, EventCacheBudget};
use super::store::{BatchBounds, EventBatch, PrefetchedEvents};

/// Channels of one target that are kept in memory.
const CHANNELS_MAX: usize = 1_024;
/// Failing channels of one target that do not count against `CHANNELS_MAX`, so that they leave space for others.
const FAILING_MAX: usize = 16 * CHANNELS_MAX;
/// Resting channels of one target.
const RESTING_MAX: usize = CHANNELS_MAX / 2;
/// Rest of a channel after it was sent, unless a full batch waits: its next events share requests, and its first one is sent at once.
const REST: Duration = Duration::from_millis(10);

/// All targets.
#[derive(Default)]
pub(super) struct OutboxBoard {
    targets: Mutex<HashMap<TargetId, Arc<TargetLineup>>>,
    budget: Arc<EventCacheBudget>,
    /// Notified when a target is new.
    pub(super) has_new: Notify,
}

/// Channels of one target, and their turns.
pub(super) struct TargetLineup {
    pub(super) target: TargetId,
    state: Mutex<LineupState>,
    budget: Arc<EventCacheBudget>,
    /// Notified when a channel becomes ready that was not before.
    pub(super) changed: Notify,
    /// A task sends the target's events.
    is_started: AtomicBool,
}

#[derive(Default)]
struct LineupState {
    channels: HashMap<Box<str>, LineupChannel>,
    /// Channels that are not being sent, in the order of their turns.
    turns: VecDeque<Box<str>>,
    /// Channels that were just sent, with the end of their rest, in this order. A channel that a full batch has woken stays in the list.
    resting: VecDeque<(Instant, Box<str>)>,
    /// Number of channels in memory whose last attempt failed.
    failing: usize,
    /// Channels outside memory may have events, and the next scan of the tables starts at the first channel.
    overflowed: bool,
    /// Scan of the tables in progress.
    scan: Option<TableScan>,
    /// Hash of the settings under which the target answered that it is gone.
    disabled: Option<u64>,
    /// Reason of the last failure; `None` if the last attempt succeeded.
    failure: Option<Box<str>>,
}

/// Scan of all channels in the tables, part by part.
#[derive(Default)]
struct TableScan {
    /// The last channel that was read.
    until: Option<Box<str>>,
}

struct LineupChannel {
    /// An event has arrived since the tables were last read.
    has_new: bool,
    /// Lowest sequence that may wait. A read that started at a lower one would step over tombstones.
    from: u64,
    /// First events in memory; `None` if they are read from the tables.
    recent: Option<CachedEvents>,
    not_before: Option<Instant>,
    /// End of the rest; until then the channel is in no turn.
    rests_until: Option<Instant>,
    /// Further events that end the wait or the rest.
    lacking: Option<usize>,
    failures: u32,
}

impl LineupChannel {
    fn new(from: u64, recent: Option<CachedEvents>) -> Self {
        Self { has_new: true, from, recent, not_before: None, rests_until: None, lacking: None, failures: 0 }
    }

    fn add(&mut self, sequence: u64, event: &Arc<OutboxEvent>) {
        // The event was on the disk before this call, so it may have been read and sent already.
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
pub(super) struct ReadyChannel {
    pub(super) channel: Box<str>,
    /// Failed attempts since the last success.
    pub(super) failures: u32,
    /// Lowest sequence that may wait.
    pub(super) from: u64,
}

/// Outcome of a channel's turn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum TurnOutcome {
    /// `has_more`: further events of the channel wait, as far as the turn has seen. No event waits below `from`. `full` is the size of a
    /// full batch.
    Settled { has_more: bool, from: u64, full: usize },
    /// The attempt failed; the next one is not made before this time.
    Failed { not_before: Instant },
    /// The channel is tried again after this time. This does not count as a failure.
    Waits { not_before: Instant },
    /// No attempt was made; `lacking` further events fill the batch.
    Lingers { not_before: Instant, lacking: usize },
}

impl OutboxBoard {
    pub(super) fn lineup(&self, target: &TargetId) -> Arc<TargetLineup> {
        let mut targets = self.targets.lock();
        if let Some(lineup) = targets.get(target) {
            return Arc::clone(lineup);
        }
        let lineup = Arc::new(TargetLineup::new(target, &self.budget));
        targets.insert(target.clone(), Arc::clone(&lineup));
        self.has_new.notify_one();
        lineup
    }

    /// Returns the targets without a task and marks them as started; the caller starts a task for each.
    pub(super) fn take_unstarted(&self) -> Vec<Arc<TargetLineup>> {
        let targets = self.targets.lock();
        targets
            .values()
            .filter(|lineup| !lineup.is_started.swap(true, Ordering::Relaxed))
            .map(Arc::clone)
            .collect()
    }

    /// Adds an event that waits for the target.
    pub(super) fn add_event(&self, target: &TargetId, sequence: u64, event: &Arc<OutboxEvent>) {
        let mut lineup = self.lineup(target);
        lineup.add_event(sequence, event);
        // A lineup that was removed meanwhile has no task.
        while !self.targets.lock().get(target).is_some_and(|known| Arc::ptr_eq(known, &lineup)) {
            lineup = self.lineup(target);
            lineup.add_event(sequence, event);
        }
    }

    /// Drops the cached events of the channel, since some of them no longer wait although they were not sent.
    pub(super) fn drop_cached(&self, target: &TargetId, channel: &str) {
        let lineup = self.targets.lock().get(target).map(Arc::clone);
        if let Some(lineup) = lineup {
            lineup.drop_cached(channel);
        }
    }

    /// Removes the target if it has no channel; a later event makes a new lineup.
    pub(super) fn remove(&self, lineup: &TargetLineup) -> bool {
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

    /// Reason of the target's last failure.
    pub(super) fn failure(&self, target: &TargetId) -> Option<Box<str>> {
        let lineup = self.targets.lock().get(target).map(Arc::clone)?;
        lineup.failure()
    }

    /// Hash of the settings under which the target is disabled.
    pub(super) fn disabled(&self, target: &TargetId) -> Option<u64> {
        self.targets.lock().get(target).and_then(|lineup| lineup.disabled())
    }
}

impl LineupState {
    /// Returns whether channels outside memory may have events.
    fn is_unread(&self) -> bool {
        self.overflowed || self.scan.is_some()
    }

    /// Number of channels in memory that count against the bound.
    fn counted_channels(&self) -> usize {
        self.channels.len() - self.failing.min(FAILING_MAX)
    }

    /// Ends rests that are over: the channel gets a turn, or is removed if it has no events.
    fn end_rests(&mut self, now: Instant) {
        while let Some((until, name)) = self.resting.pop_front_if(|(until, _)| *until <= now) {
            let Some(channel) = self.channels.get_mut(&name) else { continue };
            // The channel may have begun another rest since.
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

impl TargetLineup {
    fn new(target: &TargetId, budget: &Arc<EventCacheBudget>) -> Self {
        let (state, changed, is_started) = (Mutex::default(), Notify::new(), AtomicBool::new(false));
        Self { target: target.clone(), state, budget: Arc::clone(budget), changed, is_started }
    }

    fn add_event(&self, sequence: u64, event: &Arc<OutboxEvent>) {
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
        // Half of the space is kept for the channels in the tables, whose events are older.
        let max = if state.is_unread() { CHANNELS_MAX / 2 } else { CHANNELS_MAX };
        if state.counted_channels() >= max {
            state.overflowed = true;
            return;
        }
        // Earlier events of the channel may wait in the tables.
        let mut channel = if state.is_unread() {
            LineupChannel::new(0, None)
        } else {
            LineupChannel::new(sequence, Some(CachedEvents::new(&self.budget)))
        };
        channel.add(sequence, event);
        state.channels.insert(event.channel.clone(), channel);
        state.turns.push_back(event.channel.clone());
        self.changed.notify_one();
    }

    /// Takes the next ready channel; else returns the time at which the first one becomes ready.
    pub(super) fn next(&self, now: Instant) -> Result<ReadyChannel, Option<Instant>> {
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
                    return Ok(ReadyChannel { channel: name, failures, from });
                }
                Some(until) => {
                    first = Some(first.map_or(until, |first| first.min(until)));
                    state.turns.push_back(name);
                }
            }
        }
        Err(first)
    }

    /// Builds the next batch of a channel that [`TargetLineup::next`] returned; `None` if its events must be read from the tables.
    pub(super) fn batch(&self, name: &str, bounds: BatchBounds) -> Option<EventBatch> {
        let state = self.state.lock();
        state.channels.get(name)?.recent.as_ref()?.batch(&self.target, bounds)
    }

    /// Returns whether the cache has space for prefetched events.
    pub(super) fn has_budget(&self) -> bool {
        self.budget.has_half()
    }

    /// Caches the first events of a channel that [`TargetLineup::next`] returned, as read from the tables.
    pub(super) fn load_prefetched(
        &self,
        name: &str,
        PrefetchedEvents { events, is_complete }: PrefetchedEvents,
    ) {
        let mut state = self.state.lock();
        if let Some(channel) = state.channels.get_mut(name) {
            // An event that arrived meanwhile may be missing from the result.
            let is_complete = is_complete && !channel.has_new;
            channel.recent = Some(CachedEvents::of(&self.budget, events, is_complete));
        }
    }

    /// Drops the cached events of the channel; they are read from the tables again.
    fn drop_cached(&self, name: &str) {
        if let Some(channel) = self.state.lock().channels.get_mut(name) {
            (channel.has_new, channel.recent) = (true, None);
        }
    }

    /// Ends the turn of a channel that [`TargetLineup::next`] returned.
    pub(super) fn end_turn(&self, name: Box<str>, turn: TurnOutcome, now: Instant) {
        let mut state = self.state.lock();
        let state = &mut *state;
        let Some(channel) = state.channels.get_mut(&name) else { return };
        match turn {
            TurnOutcome::Settled { has_more, from, full } => {
                state.failing -= usize::from(channel.failures > 0);
                (channel.failures, channel.not_before, channel.from) = (0, None, from);
                if let Some(recent) = &mut channel.recent {
                    recent.drop_below(from);
                } else if !has_more && !channel.has_new {
                    channel.recent = Some(CachedEvents::new(&self.budget));
                }
                let waiting = channel.recent.as_ref().map_or(0, CachedEvents::len);
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
            TurnOutcome::Failed { not_before } => {
                state.failing += usize::from(channel.failures == 0);
                channel.failures = channel.failures.saturating_add(1);
                // The next attempt must have exactly the events of this one, as the tables say.
                (channel.not_before, channel.recent) = (Some(not_before), None);
            }
            TurnOutcome::Waits { not_before } => {
                (channel.not_before, channel.recent) = (Some(not_before), None)
            }
            // An event that arrived meanwhile was not counted.
            TurnOutcome::Lingers { .. } if channel.has_new => channel.not_before = None,
            TurnOutcome::Lingers { not_before, lacking } => {
                (channel.not_before, channel.lacking) = (Some(not_before), Some(lacking));
            }
        }
        state.turns.push_back(name);
    }

    /// Returns the channel after which to scan the tables, and the number of channels to read; `None` if no scan is needed.
    pub(super) fn next_scan(&self) -> Option<(Option<Box<str>>, usize)> {
        let mut state = self.state.lock();
        if !state.is_unread() || state.counted_channels() > CHANNELS_MAX / 2 {
            return None;
        }
        let count = CHANNELS_MAX - state.counted_channels();
        if state.scan.is_none() {
            // Events from here on set it again.
            state.overflowed = false;
        }
        let pass = state.scan.get_or_insert_default();
        Some((pass.until.clone(), count))
    }

    /// Adds channels from the tables; `is_end`: the scan has reached the last channel.
    pub(super) fn add_channels(&self, names: Vec<Box<str>>, is_end: bool) {
        let mut state = self.state.lock();
        state.scan = (!is_end).then(|| TableScan { until: names.last().cloned() });
        for name in names {
            if !state.channels.contains_key(&name) {
                state.channels.insert(name.clone(), LineupChannel::new(0, None));
                state.turns.push_back(name);
            }
        }
        drop(state);
        self.changed.notify_one();
    }

    /// Records that channels may wait in the tables.
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
