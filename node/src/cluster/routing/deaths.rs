//! What is owed where a node has died: whoever may have missed something of it is told.
//!
//! An ack waits for the receipt of every node that wants the channel and can be reached. So what a run has acknowledged is here, if
//! all its lanes to this node ended at once, nothing had waited in them for long, and none of them had gone silent or lost what it
//! held. Of any other run there may be messages that its publishers count on and that died with it.

#[cfg(test)]
mod tests;

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::stored::Leaves;
use super::{Own, Routing};
use crate::model;

/// Lanes of a process that died end within this.
const AT_ONCE: Duration = Duration::from_millis(300);
/// Whose lanes ended longer ago than a death takes to be noticed has lived on without them.
const NOTICED_WITHIN: Duration = Duration::from_secs(3);
/// Runs whose lanes are known, members or not.
const RUNS_MAX: usize = 1024;

/// Another node as gossip has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Standing {
    pub incarnation: u64,
    pub is_dead: bool,
    pub is_draining: bool,
    /// Others hear it, and this node does not.
    pub is_elsewhere: bool,
    /// It has met others, or nobody who answers.
    pub has_clients: bool,
}

/// Without a look for so long this node itself stood still, and nothing was heard of anybody.
const STOOD_STILL: Duration = Duration::from_secs(1);
/// Who was not heard for that reason is noticed by then.
const SETTLED_WITHIN: Duration = Duration::from_secs(60);

/// The runs of other nodes, by incarnation.
#[derive(Debug, Default)]
pub(super) struct Deaths {
    runs: HashMap<u64, Run>,
    /// When the last of them died.
    last: Option<Instant>,
    looked: Option<Instant>,
    /// Since when this node stood still when it last did, and until when.
    stood_still: Option<(Instant, Instant)>,
}

#[derive(Debug, Default)]
struct Run {
    is_member: bool,
    is_dead: bool,
    /// Others hear it.
    is_elsewhere: bool,
    is_draining: bool,
    /// Clients may have come to it.
    has_clients: bool,
    /// It has said goodbye: all that it had for this node is here.
    has_left: bool,
    /// It has had a lane to this node.
    is_met: bool,
    /// Its lanes that are open.
    lanes: HashSet<u32>,
    link: Link,
    /// When the first of them ended, since the last one was opened.
    ended: Option<Instant>,
    /// Nothing is known to be missing of what came over them.
    is_whole: bool,
    /// The channels in which all that it had stored is here since it died, by number.
    complete: HashSet<u64>,
}

/// The way to a run.
#[derive(Debug, Clone, Copy, Default)]
enum Link {
    #[default]
    Never,
    Up,
    Down(Instant),
}

/// What has become of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    /// Those who are attached are to be told.
    Died {
        is_doubtful: bool,
        is_met: bool,
    },
    Back,
    /// It is no member any more, and will not be one again.
    Gone {
        is_told: bool,
        is_doubtful: bool,
        is_met: bool,
    },
}

impl Fate {
    /// It ended, and had a lane to this node.
    fn is_met(self) -> bool {
        matches!(self, Self::Died { is_met: true, .. } | Self::Gone { is_met: true, .. })
    }

    /// What there was to be said of it was said.
    fn is_over(self) -> bool {
        matches!(self, Self::Gone { is_told: true, is_doubtful: false, .. })
    }
}

impl Run {
    fn troubled_for(&self) -> Duration {
        NOTICED_WITHIN + self.ended.map_or(Duration::ZERO, |ended| ended.elapsed())
    }

    /// From then on it has published nothing, if it has died.
    fn silent_since(&self) -> Option<Instant> {
        self.ended.filter(|_| self.is_whole && self.lanes.is_empty())
    }

    fn is_doubtful(&self) -> bool {
        self.is_met && !self.is_whole && !self.has_left
    }
}

impl Deaths {
    fn opened(&mut self, incarnation: u64, lane: u32) {
        if self.runs.len() >= RUNS_MAX && !self.runs.contains_key(&incarnation) {
            return;
        }
        let run = self.runs.entry(incarnation).or_default();
        run.lanes.insert(lane);
        run.complete.clear();
        (run.is_met, run.ended, run.is_whole) = (true, None, true);
    }

    /// What the member is, whoever has heard it.
    pub(super) fn run(&self, incarnation: u64) -> Option<model::Run> {
        let run = self.runs.get(&incarnation).filter(|run| run.is_member)?;
        Some(if run.is_dead { model::Run::Ended } else { model::Run::Alive })
    }

    /// It is dead for this node, and others hear it.
    pub(super) fn is_elsewhere(&self, incarnation: u64) -> bool {
        self.runs.get(&incarnation).is_some_and(|run| run.is_elsewhere)
    }

    /// Gossip says that it leaves.
    pub(super) fn is_draining(&self, incarnation: u64) -> bool {
        self.runs.get(&incarnation).is_some_and(|run| run.is_draining)
    }

    /// It is a member, not held for dead, and nothing says that it leaves: should it die, that is noticed.
    pub(super) fn would_be_missed(&self, incarnation: u64) -> bool {
        let is_missed = |run: &Run| run.is_member && !run.is_dead && !run.has_left && !run.is_draining;
        self.runs.get(&incarnation).is_some_and(is_missed)
    }

    /// The link to it is there, or has ended.
    pub(super) fn linked(&mut self, incarnation: u64, up: bool) {
        if let Some(run) = self.runs.get_mut(&incarnation) {
            run.link = if up { Link::Up } else { Link::Down(Instant::now()) };
        }
    }

    /// Of one that cannot be sent to: its link ended just now, and not all of its lanes. Where it has died they follow at once.
    pub(super) fn is_ending(&self, incarnation: u64) -> bool {
        let is_ending = |run: &Run| {
            let ends = match run.link {
                Link::Never => false,
                // That it has ended is about to be told.
                Link::Up => true,
                Link::Down(since) => since.elapsed() <= AT_ONCE,
            };
            ends && !run.lanes.is_empty() && !run.has_left
        };
        self.runs.get(&incarnation).is_some_and(is_ending)
    }

    /// Something may come from it yet.
    pub(super) fn has_lanes(&self, incarnation: u64) -> bool {
        self.runs.get(&incarnation).is_some_and(|run| !run.lanes.is_empty())
    }

    /// All its lanes have ended.
    pub(super) fn has_ended(&self, incarnation: u64) -> bool {
        self.runs.get(&incarnation).is_some_and(|run| run.is_met && run.lanes.is_empty())
    }

    fn left(&mut self, incarnation: u64) {
        if let Some(run) = self.runs.get_mut(&incarnation) {
            run.has_left = true;
        }
    }

    /// One has left, and not all that its clients may come back to was taken over.
    pub(super) fn left_something(&mut self) {
        self.last = Some(Instant::now());
    }

    /// Since its lanes began to end, or a death is not noticed for longer.
    pub(super) fn troubled_for(&self, incarnation: u64) -> Duration {
        self.with_own(self.runs.get(&incarnation).map_or(NOTICED_WITHIN, Run::troubled_for))
    }

    fn with_own(&self, troubled_for: Duration) -> Duration {
        let lately = self.stood_still.filter(|(_, until)| until.elapsed() <= SETTLED_WITHIN);
        troubled_for + lately.map_or(Duration::ZERO, |(since, _)| since.elapsed())
    }

    /// To be called several times a second.
    pub(super) fn looked(&mut self, now: Instant) {
        if let Some(before) = self.looked.replace(now)
            && now.saturating_duration_since(before) >= STOOD_STILL
        {
            self.stood_still = Some((before, now));
        }
    }

    pub(super) fn is_complete(&self, incarnation: u64, channel: u64) -> bool {
        self.runs.get(&incarnation).is_some_and(|run| run.complete.contains(&channel) && !run.is_doubtful())
    }

    /// It is held for dead, and may be taking publishes.
    pub(super) fn may_go_on(&self, incarnation: u64) -> bool {
        self.runs.get(&incarnation).is_some_and(Run::is_doubtful)
    }

    /// One has died within that time, or may have.
    pub(super) fn has_lost(&self, within: Duration) -> bool {
        let is_lately = |ended: Instant| ended.elapsed() <= within;
        let may_be_dead = |run: &Run| {
            // Of a doubtful one something may come as long as it is a member.
            let is_owed = |ended| run.is_doubtful() || is_lately(ended);
            run.is_met && !run.has_left && run.ended.is_some_and(is_owed)
        };
        self.last.is_some_and(|died| died.elapsed() <= within) || self.runs.values().any(may_be_dead)
    }

    /// One that had clients was never met and is not heard, and not held for dead yet.
    pub(super) fn has_unheard(&self, alive: &[u64]) -> bool {
        let is_unheard = |run: &Run| {
            let may_have_died = run.is_member && !run.is_dead && !run.is_draining && !run.has_left;
            may_have_died && run.has_clients && !run.is_met
        };
        self.runs.iter().any(|(incarnation, run)| is_unheard(run) && !alive.contains(incarnation))
    }

    /// All that the run had stored of the channel is here.
    pub(super) fn completed(&mut self, incarnation: u64, channel: u64) {
        if let Some(run) = self.runs.get_mut(&incarnation).filter(|run| run.is_dead) {
            run.complete.insert(channel);
        }
    }

    /// Whether the run is dead, and may have acknowledged what is not here.
    fn ended(&mut self, incarnation: u64, lane: u32, whole: bool, now: Instant) -> bool {
        let Some(run) = self.runs.get_mut(&incarnation) else { return false };
        run.lanes.remove(&lane);
        let first = *run.ended.get_or_insert(now);
        run.is_whole &= whole && now.saturating_duration_since(first) <= AT_ONCE;
        if !run.is_member && run.lanes.is_empty() {
            self.runs.remove(&incarnation);
            return false;
        }
        run.is_dead && run.lanes.is_empty() && run.is_doubtful()
    }

    /// Those that have ended since the last look, while they were leaving and before they had said goodbye.
    fn unfinished(&self, members: &[Standing]) -> Vec<u64> {
        let is_unfinished = |run: &Run| run.is_met && !run.is_dead && !run.has_left;
        let ended = members.iter().filter(|member| member.is_dead && member.is_draining);
        let ended = ended.map(|member| member.incarnation);
        ended.filter(|run| self.runs.get(run).is_some_and(is_unfinished)).collect()
    }

    /// The members as they are now.
    fn look(&mut self, members: &[Standing], now: Instant) -> Vec<(u64, Fate)> {
        let mut fates = Vec::new();
        for Standing { incarnation, is_dead, is_draining, is_elsewhere, has_clients } in members {
            let run = self.runs.entry(*incarnation).or_default();
            (run.is_member, run.is_draining, run.has_clients) = (true, *is_draining, *has_clients);
            run.is_elsewhere = *is_elsewhere;
            match (run.is_dead, *is_dead) {
                // While its lanes carry something it lives, whatever gossip says.
                (false, true) => {
                    run.is_whole &= run.ended.is_none_or(|at| now <= at + NOTICED_WITHIN);
                    let is_doubtful = run.lanes.is_empty() && run.is_doubtful();
                    if is_doubtful || !run.is_draining && !run.has_left {
                        fates.push((*incarnation, Fate::Died { is_doubtful, is_met: run.is_met }));
                    }
                }
                (true, false) => {
                    run.complete.clear();
                    fates.push((*incarnation, Fate::Back));
                }
                _ => {}
            }
            run.is_dead = *is_dead;
        }
        self.runs.retain(|incarnation, run| {
            let is_member = members.iter().any(|member| member.incarnation == *incarnation);
            if run.is_member && !is_member {
                let is_doubtful = run.is_doubtful() || !run.lanes.is_empty() && !run.has_left;
                let is_told = run.is_dead || run.is_draining || run.has_left || !run.is_met;
                fates.push((*incarnation, Fate::Gone { is_told, is_doubtful, is_met: run.is_met }));
            }
            (run.is_member, run.is_elsewhere) = (is_member, is_member && run.is_elsewhere);
            is_member || !run.lanes.is_empty()
        });
        fates
    }
}

impl Routing {
    /// The members as they are now, without this node; to be called after [`Routing::set_peers`].
    pub fn look_for_deaths(&self, members: &[Standing]) {
        self.look_for_unreached(members);
        let mut deaths = self.deaths.lock();
        let ends =
            |(incarnation, run): (&u64, &Run)| (*incarnation, (run.troubled_for(), run.silent_since()));
        let ends: HashMap<u64, (Duration, Option<Instant>)> = deaths.runs.iter().map(ends).collect();
        let unfinished = deaths.unfinished(members);
        let fates = deaths.look(members, Instant::now());
        // Of those that ended before this node began the others tell, and when that was.
        if fates.iter().any(|(_, fate)| fate.is_met() && !fate.is_over()) {
            deaths.last = Some(Instant::now());
        }
        drop(deaths);
        for node in unfinished.into_iter().filter_map(|run| self.leaving.name_of(run)) {
            tracing::warn!(%node, "a node has died while it was leaving");
        }
        let is_elsewhere = |run| members.iter().any(|one| one.incarnation == run && one.is_elsewhere);
        // One that others hear lives, or did by what they said last.
        let is_over = |(run, fate): &(u64, Fate)| match fate {
            Fate::Died { .. } => !is_elsewhere(*run),
            Fate::Back => false,
            Fate::Gone { .. } => true,
        };
        let ended: Vec<u64> = fates.iter().filter(|fate| is_over(fate)).map(|(run, _)| *run).collect();
        self.end(&ended);
        for (incarnation, fate) in fates {
            let (since, silent) = ends.get(&incarnation).copied().unwrap_or((NOTICED_WITHIN, None));
            match fate {
                Fate::Died { is_doubtful, is_met } => {
                    self.look_at_seats_from(incarnation);
                    let mut unheard = self.unheard(incarnation, is_met, silent.filter(|_| !is_doubtful));
                    if is_doubtful {
                        self.hub.doubt(incarnation, &unheard);
                    }
                    if !self.recover((incarnation, since), unheard.clone(), is_doubtful, Leaves::Doubt) {
                        if is_doubtful {
                            unheard.extend(self.silent_with(incarnation));
                        }
                        self.hub.died(incarnation, &unheard);
                    }
                }
                // What it has for this node comes, and the answer behind it.
                Fate::Back => {
                    self.runs.lock().is_back(incarnation);
                    self.say_all(incarnation);
                }
                Fate::Gone { is_doubtful, is_met, .. } => {
                    self.look_at_seats_from(incarnation);
                    let unheard = self.unheard(incarnation, is_met, silent.filter(|_| !is_doubtful));
                    let leaves = if is_doubtful { Leaves::Nothing } else { Leaves::Doubt };
                    if fate.is_over() {
                        self.hub.give_up(incarnation);
                    } else if !self.recover((incarnation, since), unheard.clone(), is_doubtful, leaves) {
                        match leaves {
                            Leaves::Nothing => self.hub.gone(incarnation, &unheard),
                            Leaves::Doubt => self.hub.died(incarnation, &unheard),
                        }
                    }
                    for own in self.own.lock().values_mut() {
                        own.confirmed.retain(|peer| *peer != incarnation);
                    }
                }
            }
        }
    }

    pub(super) fn has_left(&self, incarnation: u64) {
        self.deaths.lock().left(incarnation);
    }

    pub(super) fn lane_opened_by(&self, incarnation: u64, lane: u32) {
        self.deaths.lock().opened(incarnation, lane);
    }

    pub(super) fn lane_ended_by(&self, incarnation: u64, lane: u32, whole: bool) {
        let is_doubtful = self.deaths.lock().ended(incarnation, lane, whole, Instant::now());
        if !self.is_up(incarnation) && !self.deaths.lock().has_lanes(incarnation) {
            self.pass_by(incarnation);
            self.end_rounds(incarnation);
        }
        if is_doubtful {
            let unheard = self.unheard(incarnation, true, None);
            self.hub.doubt(incarnation, &unheard);
            let since = self.deaths.lock().troubled_for(incarnation);
            if !self.recover((incarnation, since), unheard, true, Leaves::Doubt) {
                // In the others its death was told.
                self.hub.died_in(&self.silent_with(incarnation));
            }
        }
    }

    /// The channels that the run forwards and in which nothing was heard of it, by number.
    fn silent_with(&self, incarnation: u64) -> HashSet<u64> {
        self.hub.silent_with(incarnation).iter().map(|channel| channel.number()).collect()
    }

    /// The channels of which a run has never said how far it is: it could not be reached when they were attached to.
    /// Of one that was never met nothing is owed, nor to who was let in when it was dead: no older position counts there.
    fn unheard(&self, incarnation: u64, is_met: bool, silent: Option<Instant>) -> HashSet<u64> {
        if !is_met {
            return HashSet::new();
        }
        let own = self.own.lock();
        // Whoever was let in after waiting for it is not taken for having all, whatever it had published.
        let waits = |own: &Own| own.is_passed || own.waits.contains(&incarnation);
        let was_before = |own: &Own, silent| {
            own.let_in.is_some_and(|let_in| let_in < silent) || own.since < silent && !waits(own)
        };
        let is_owed = |own: &Own| silent.is_none_or(|silent| was_before(own, silent));
        let unheard = own.iter().filter(|(_, own)| !own.confirmed.contains(&incarnation) && is_owed(own));
        unheard.map(|(number, _)| *number).collect()
    }
}
