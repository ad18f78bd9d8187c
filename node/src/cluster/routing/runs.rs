//! Runs of other nodes, and the connections that go from one to another.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;
use crate::cluster::link::Item;
use crate::model::{Run, TakenUp};

/// Runs that ended; beyond it the earliest is forgotten, and with it the way back of its connections.
const ENDED_MAX: usize = 1024;

/// Called when another node has taken a connection up.
pub(super) type OnTakenUp = Box<dyn Fn(&TakenUp) + Send + Sync>;

/// Which runs are alive, and since when those are not that were.
#[derive(Debug, Default)]
pub(super) struct Runs {
    alive: Vec<u64>,
    ended: HashMap<u64, Instant>,
}

impl Runs {
    pub(super) fn are_alive(&mut self, alive: &[u64], now: Instant) {
        for run in std::mem::replace(&mut self.alive, alive.to_vec()) {
            self.ended.insert(run, now);
        }
        self.ended.retain(|run, _| !alive.contains(run));
        while self.ended.len() > ENDED_MAX
            && let Some((first, _)) = self.ended.iter().min_by_key(|(_, since)| **since)
        {
            let first = *first;
            self.ended.remove(&first);
        }
    }
}

impl Routing {
    /// None for a run that this node does not know, or of which it has known for longer than `window` that it ended.
    pub fn run(&self, incarnation: u64, window: Duration) -> Option<Run> {
        if let Some(since) = self.runs.lock().ended.get(&incarnation) {
            return (since.elapsed() <= window).then_some(Run::Ended);
        }
        self.peers.read().contains_key(&incarnation).then_some(Run::Alive)
    }

    /// To be called once, before there are peers.
    pub fn on_taken_up(&self, told: impl Fn(&TakenUp) + Send + Sync + 'static) {
        self.on_taken_up.set(Box::new(told)).ok();
    }

    /// Tells every node that a connection is served here from now on.
    pub fn tell_taken_up(&self, taken: &TakenUp) {
        let Some(links) = self.links.get() else { return };
        let item = Item::taken_up(taken);
        let [.., lane] = *taken.tenure.connection_id.as_bytes();
        for peer in self.peers.read().keys() {
            // Whoever cannot be told now is told when the link is back.
            drop(links.send(*peer, lane.into(), &item));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_ends_when_it_is_missed_and_not_again_until_it_was_back() {
        let (mut runs, begun) = (Runs::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        runs.are_alive(&[1, 2], at(0));
        assert!(runs.ended.is_empty());
        runs.are_alive(&[2], at(1));
        runs.are_alive(&[2], at(2));
        assert_eq!(runs.ended, HashMap::from([(1, at(1))]));
        runs.are_alive(&[1], at(3));
        assert_eq!(runs.ended, HashMap::from([(2, at(3))]));
        for run in 0..=ENDED_MAX as u64 {
            runs.are_alive(&[run + 10], at(run + 4));
        }
        assert!(runs.ended.len() == ENDED_MAX && !runs.ended.contains_key(&2), "the earliest goes");
    }
}
