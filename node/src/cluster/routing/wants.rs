//! What is known of a peer: whether it can be reached, and what it wants.

use super::Routing;

/// What there is to say of a run of another node.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Known {
    pub is_up: bool,
    pub is_interest_known: bool,
    /// It has said goodbye.
    pub has_left: bool,
}

/// How much is known of what a peer wants; until it is all, it counts as wanting everything.
#[derive(Debug, Default)]
pub(super) struct Wants {
    epoch: u64,
    lanes: u32,
    pub(super) is_known: bool,
}

impl Wants {
    /// What was said before may still come on other lanes.
    pub(super) fn said(&mut self, epoch: u64, lanes: u32) {
        if epoch > self.epoch {
            (self.epoch, self.lanes) = (epoch, 0);
        }
        self.lanes += u32::from(epoch == self.epoch);
        self.is_known |= self.lanes >= lanes;
    }
}

impl Routing {
    pub fn known_of(&self, peer: u64) -> Known {
        let is_interest_known = self.peers.read().get(&peer).is_some_and(|wants| wants.is_known);
        Known { is_up: self.is_up(peer), is_interest_known, has_left: self.leaving.has_left(peer) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_is_known_when_every_lane_has_said_the_same() {
        let mut wants = Wants::default();
        for (epoch, is_known) in [(1, false), (2, false), (1, false), (2, true), (3, true)] {
            wants.said(epoch, 2);
            assert_eq!(wants.is_known, is_known, "{epoch}");
        }
    }
}
