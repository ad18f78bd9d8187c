//! What is owed where a node has died: whoever may have missed something of it is told.
//!
//! An ack waits for the receipt of every node that wants the channel and can be reached. So what a run has acknowledged is here, if
//! all its lanes to this node ended at once, nothing had waited in them for long, and none of them had gone silent. Of any other
//! run there may be messages that its publishers count on and that died with it.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;

/// Lanes of a process that died end within this.
const AT_ONCE: Duration = Duration::from_millis(300);
/// Whose lanes ended longer ago than a death takes to be noticed has lived on without them.
const NOTICED_WITHIN: Duration = Duration::from_secs(3);
/// Runs whose lanes are known, members or not.
const RUNS_MAX: usize = 1024;

/// Another node as gossip has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    pub incarnation: u64,
    pub is_dead: bool,
    pub is_draining: bool,
}

/// The runs of other nodes, by incarnation.
#[derive(Debug, Default)]
pub(super) struct Deaths(HashMap<u64, Run>);

#[derive(Debug, Default)]
struct Run {
    is_member: bool,
    is_dead: bool,
    is_draining: bool,
    /// It has said goodbye: all that it had for this node is here.
    has_left: bool,
    /// It has had a lane to this node.
    is_met: bool,
    /// Its lanes that are open.
    lanes: HashSet<u32>,
    /// When the first of them ended, since the last one was opened.
    ended: Option<Instant>,
    /// Nothing is known to be missing of what came over them.
    is_whole: bool,
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

impl Run {
    fn is_doubtful(&self) -> bool {
        self.is_met && !self.is_whole && !self.has_left
    }
}

impl Deaths {
    fn opened(&mut self, incarnation: u64, lane: u32) {
        if self.0.len() >= RUNS_MAX && !self.0.contains_key(&incarnation) {
            return;
        }
        let run = self.0.entry(incarnation).or_default();
        run.lanes.insert(lane);
        (run.is_met, run.ended, run.is_whole) = (true, None, true);
    }

    fn left(&mut self, incarnation: u64) {
        if let Some(run) = self.0.get_mut(&incarnation) {
            run.has_left = true;
        }
    }

    /// Whether the run is dead, and may have acknowledged what is not here.
    fn ended(&mut self, incarnation: u64, lane: u32, whole: bool, now: Instant) -> bool {
        let Some(run) = self.0.get_mut(&incarnation) else { return false };
        run.lanes.remove(&lane);
        let first = *run.ended.get_or_insert(now);
        run.is_whole &= whole && now.saturating_duration_since(first) <= AT_ONCE;
        if !run.is_member && run.lanes.is_empty() {
            self.0.remove(&incarnation);
            return false;
        }
        run.is_dead && run.lanes.is_empty() && run.is_doubtful()
    }

    /// The members as they are now.
    fn look(&mut self, members: &[Standing], now: Instant) -> Vec<(u64, Fate)> {
        let mut fates = Vec::new();
        for Standing { incarnation, is_dead, is_draining } in members {
            let run = self.0.entry(*incarnation).or_default();
            (run.is_member, run.is_draining) = (true, *is_draining);
            match (run.is_dead, *is_dead) {
                // While its lanes carry something it lives, whatever gossip says.
                (false, true) => {
                    run.is_whole &= run.ended.is_none_or(|at| now <= at + NOTICED_WITHIN);
                    let is_doubtful = run.lanes.is_empty() && run.is_doubtful();
                    if is_doubtful || !run.is_draining && !run.has_left {
                        fates.push((*incarnation, Fate::Died { is_doubtful, is_met: run.is_met }));
                    }
                }
                (true, false) => fates.push((*incarnation, Fate::Back)),
                _ => {}
            }
            run.is_dead = *is_dead;
        }
        self.0.retain(|incarnation, run| {
            let is_member = members.iter().any(|member| member.incarnation == *incarnation);
            if run.is_member && !is_member {
                let is_doubtful = run.is_doubtful() || !run.lanes.is_empty() && !run.has_left;
                let is_told = run.is_dead || run.is_draining || run.has_left || !run.is_met;
                fates.push((*incarnation, Fate::Gone { is_told, is_doubtful, is_met: run.is_met }));
            }
            run.is_member = is_member;
            is_member || !run.lanes.is_empty()
        });
        fates
    }
}

impl Routing {
    /// The members as they are now, without this node; to be called after [`Routing::set_peers`].
    pub fn look_for_deaths(&self, members: &[Standing]) {
        let fates = self.deaths.lock().look(members, Instant::now());
        for (incarnation, fate) in fates {
            match fate {
                Fate::Died { is_doubtful, is_met } => {
                    let unheard = self.unheard(incarnation, is_met);
                    if is_doubtful {
                        self.hub.doubt(incarnation, &unheard);
                    }
                    self.hub.died(incarnation, &unheard);
                }
                // What it has for this node comes, and the answer behind it.
                Fate::Back => self.say_all(incarnation),
                Fate::Gone { is_told, is_doubtful, is_met } => {
                    let unheard = self.unheard(incarnation, is_met);
                    if is_doubtful {
                        self.hub.gone(incarnation, &unheard);
                    } else if !is_told {
                        self.hub.died(incarnation, &unheard);
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
        if is_doubtful {
            self.hub.doubt(incarnation, &self.unheard(incarnation, true));
        }
    }

    /// The channels of which a run has never said how far it is: it could not be reached when they were attached to.
    /// Of one that was never met nothing is owed.
    fn unheard(&self, incarnation: u64, is_met: bool) -> HashSet<u64> {
        if !is_met {
            return HashSet::new();
        }
        let own = self.own.lock();
        let unheard = own.iter().filter(|(_, own)| !own.confirmed.contains(&incarnation));
        unheard.map(|(number, _)| *number).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RUN: u64 = 7;

    fn standing(is_dead: bool) -> [Standing; 1] {
        [Standing { incarnation: RUN, is_dead, is_draining: false }]
    }

    /// A member with two lanes.
    fn met() -> (Deaths, Instant) {
        let mut deaths = Deaths::default();
        deaths.opened(RUN, 0);
        deaths.opened(RUN, 1);
        assert_eq!(deaths.look(&standing(false), Instant::now()), []);
        (deaths, Instant::now())
    }

    #[test]
    fn who_has_said_goodbye_owes_nothing() {
        let (mut deaths, now) = met();
        deaths.left(RUN);
        assert!(!deaths.ended(RUN, 0, false, now) && !deaths.ended(RUN, 1, false, now + 9 * AT_ONCE));
        assert_eq!(deaths.look(&standing(true), Instant::now()), []);
        let gone = Fate::Gone { is_told: true, is_doubtful: false, is_met: true };
        assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
    }

    #[test]
    fn whose_lanes_ended_at_once_had_nothing_that_is_not_here() {
        for (whole, apart, is_doubtful) in [
            ([true, true], AT_ONCE, false),
            ([true, true], AT_ONCE + Duration::from_millis(1), true),
            ([true, false], Duration::ZERO, true),
            ([false, true], Duration::ZERO, true),
        ] {
            let (mut deaths, now) = met();
            assert!(!deaths.ended(RUN, 0, whole[0], now), "it may live");
            assert!(!deaths.ended(RUN, 1, whole[1], now + apart), "it may live");
            let died = Fate::Died { is_doubtful, is_met: true };
            assert_eq!(deaths.look(&standing(true), Instant::now()), [(RUN, died)], "{whole:?} {apart:?}");
            assert_eq!(deaths.look(&standing(true), Instant::now()), [], "it was told");
            let gone = Fate::Gone { is_told: true, is_doubtful, is_met: true };
            assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
            assert!(deaths.0.is_empty());
        }
    }

    #[test]
    fn who_lived_on_without_its_lanes_is_doubted() {
        for (later, is_doubtful) in [(NOTICED_WITHIN, false), (NOTICED_WITHIN + AT_ONCE, true)] {
            let (mut deaths, now) = met();
            deaths.ended(RUN, 0, true, now);
            deaths.ended(RUN, 1, true, now);
            let died = Fate::Died { is_doubtful, is_met: true };
            assert_eq!(deaths.look(&standing(true), now + later), [(RUN, died)]);
        }
    }

    #[test]
    fn who_is_dead_by_gossip_alone_is_doubted_when_its_lanes_end() {
        let (mut deaths, now) = met();
        let died = Fate::Died { is_doubtful: false, is_met: true };
        assert_eq!(deaths.look(&standing(true), Instant::now()), [(RUN, died)]);
        assert!(!deaths.ended(RUN, 0, false, now));
        assert!(deaths.ended(RUN, 1, false, now));
        assert_eq!(deaths.look(&standing(false), Instant::now()), [(RUN, Fate::Back)]);
        assert_eq!(deaths.look(&standing(false), Instant::now()), []);
    }

    #[test]
    fn who_starts_anew_before_it_is_missed_is_gone_and_nobody_was_told() {
        let (mut deaths, now) = met();
        deaths.ended(RUN, 0, true, now);
        deaths.ended(RUN, 1, true, now);
        let gone = Fate::Gone { is_told: false, is_doubtful: false, is_met: true };
        assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
    }

    #[test]
    fn who_has_drained_and_left_nothing_behind_is_not_told_of() {
        let (mut deaths, now) = met();
        let draining = |is_dead| [Standing { is_draining: true, ..standing(is_dead)[0] }];
        assert_eq!(deaths.look(&draining(false), Instant::now()), []);
        deaths.ended(RUN, 0, true, now);
        deaths.ended(RUN, 1, true, now);
        assert_eq!(deaths.look(&draining(true), Instant::now()), []);
        let gone = Fate::Gone { is_told: true, is_doubtful: false, is_met: true };
        assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
    }

    #[test]
    fn who_was_never_met_leaves_nothing() {
        let mut deaths = Deaths::default();
        assert_eq!(deaths.look(&standing(false), Instant::now()), []);
        let died = Fate::Died { is_doubtful: false, is_met: false };
        assert_eq!(deaths.look(&standing(true), Instant::now()), [(RUN, died)]);
        let gone = Fate::Gone { is_told: true, is_doubtful: false, is_met: false };
        assert_eq!(deaths.look(&[], Instant::now()), [(RUN, gone)]);
        deaths.opened(9, 0);
        assert_eq!(deaths.look(&[], Instant::now()), [], "no member yet");
        assert!(!deaths.ended(9, 0, false, Instant::now()) && deaths.0.is_empty());
    }
}
