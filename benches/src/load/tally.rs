use std::collections::HashSet;

use serde::{Deserialize, Serialize};

/// Faults of deliveries, over all subscribers.
#[derive(Serialize, Deserialize, Default, Debug, PartialEq, Eq)]
pub struct Faults {
    pub lost: u64,
    pub duplicated: u64,
    /// Messages that arrived after a later one.
    pub reordered: u64,
    /// Messages that arrived at a subscriber of other channels.
    pub astray: u64,
}

impl Faults {
    pub fn any(&self) -> bool {
        *self != Self::default()
    }
}

/// Received messages of each subscription, by number. Takes four bytes per subscription as long as none is missing.
pub(super) struct Tally {
    next: Vec<u32>,
    /// Messages that were skipped, by subscription and number.
    missing: HashSet<(usize, u32)>,
    received: u64,
    faults: Faults,
}

impl Tally {
    pub(super) fn new(subscriptions: usize) -> Self {
        Self { next: vec![0; subscriptions], missing: HashSet::new(), received: 0, faults: Faults::default() }
    }

    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// Counts a message of a channel that the subscriber is not attached to.
    pub(super) fn record_astray(&mut self) {
        self.faults.astray += 1;
    }

    pub(super) fn record(&mut self, subscription: usize, sequence: u32) {
        let next = &mut self.next[subscription];
        if sequence >= *next {
            self.missing.extend((*next..sequence).map(|passed| (subscription, passed)));
            *next = sequence + 1;
        } else if self.missing.remove(&(subscription, sequence)) {
            self.faults.reordered += 1;
        } else {
            self.faults.duplicated += 1;
            return;
        }
        self.received += 1;
    }

    /// Counts the faults; `published` gives the number of messages for each subscription.
    pub(super) fn finish(mut self, published: impl Fn(usize) -> u32) -> Faults {
        let behind = self.next.iter().enumerate().map(|(at, next)| published(at).saturating_sub(*next));
        let behind: u64 = behind.map(u64::from).sum();
        self.faults.lost = behind + self.missing.len() as u64;
        self.faults
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn faults_of(arrivals: &[u32], published: u32) -> Faults {
        let mut tally = Tally::new(1);
        arrivals.iter().for_each(|sequence| tally.record(0, *sequence));
        tally.finish(|_| published)
    }

    #[test]
    fn each_fault_is_counted_as_itself() {
        assert!(!faults_of(&[0, 1, 2], 3).any());
        assert_eq!(faults_of(&[0, 2], 4), Faults { lost: 2, ..Faults::default() });
        assert_eq!(faults_of(&[0, 0, 1], 2), Faults { duplicated: 1, ..Faults::default() });
        assert_eq!(faults_of(&[1, 0, 2], 3), Faults { reordered: 1, ..Faults::default() });
        assert_eq!(faults_of(&[1, 0, 0], 2), Faults { reordered: 1, duplicated: 1, ..Faults::default() });
    }
}
