//! Recent takeovers of sessions from other nodes.
//!
//! A takeover from an incarnation that is held for alive is accepted beyond the limit of the tenant, since the old socket of the session
//! is closed for it. A node without an open socket of the session answers so. A failed node cannot answer, so once its failure is known
//! the takeover counts as if it had.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::incarnations::QUOTA_CHECKS_MAX;
use crate::model::SocketlessTakeover;

/// Time within which a failure is noticed, and a live node has answered.
const NOTICED_WITHIN: Duration = Duration::from_secs(10);

/// Takeovers by age, each with the incarnation that had the session.
#[derive(Debug, Default)]
pub(super) struct RecentTakeovers(VecDeque<(Instant, u64, SocketlessTakeover)>);

impl RecentTakeovers {
    /// Adds a takeover. Beyond a bound the earliest one is forgotten, and its session keeps the quota slot.
    pub(super) fn add(&mut self, of: u64, successor: SocketlessTakeover, now: Instant) {
        self.0.push_back((now, of, successor));
        self.forget(now);
    }

    fn forget(&mut self, now: Instant) {
        while self.0.front().is_some_and(|(at, ..)| now.saturating_duration_since(*at) > NOTICED_WITHIN)
            || self.0.len() > QUOTA_CHECKS_MAX
        {
            self.0.pop_front();
        }
    }

    /// Removes and returns the takeovers from an incarnation that has failed.
    pub(super) fn take(&mut self, of: u64, now: Instant) -> Vec<SocketlessTakeover> {
        self.forget(now);
        let (taken, left): (VecDeque<_>, _) =
            std::mem::take(&mut self.0).into_iter().partition(|(_, incarnation, _)| *incarnation == of);
        self.0 = left;
        taken.into_iter().map(|(.., successor)| successor).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ConnectionId;

    #[test]
    fn takeovers_are_reported_once_and_expire_by_age_and_bound() {
        let (mut successors, begun) = (RecentTakeovers::default(), Instant::now());
        let of = |epoch| SocketlessTakeover { connection_id: ConnectionId::from_bytes([1; 16]), epoch };
        successors.add(8, of(1), begun);
        successors.add(9, of(2), begun);
        successors.add(8, of(3), begun + NOTICED_WITHIN);
        let taken = [8, 8].map(|incarnation| successors.take(incarnation, begun + NOTICED_WITHIN));
        assert_eq!(taken, [vec![of(1), of(3)], vec![]]);
        let late = begun + NOTICED_WITHIN + Duration::from_millis(1);
        assert_eq!(successors.take(9, late), []);
        successors.add(8, of(4), late);
        for epoch in 0..QUOTA_CHECKS_MAX as u64 {
            successors.add(9, of(epoch), late);
        }
        assert_eq!(
            (successors.take(8, late), successors.take(9, late).len()),
            (Vec::new(), QUOTA_CHECKS_MAX)
        );
    }
}
