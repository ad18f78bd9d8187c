//! Connections that were taken up from runs of other nodes, of late.
//!
//! Where the run was held for alive, such a one was let in whatever the ceiling of its tenant, as the socket that it had there is closed
//! for it; where it had none, that node says so. One that has died meanwhile cannot, so once that is known it counts as if it had.

use std::collections::VecDeque;
use std::time::Duration;

use tokio::time::Instant;

use super::runs::SEATS_MAX;
use crate::model::NotOpen;

/// A death is noticed by then, and who is alive has said what there was to say.
const NOTICED_WITHIN: Duration = Duration::from_secs(10);

/// By age, each with the run that had it.
#[derive(Debug, Default)]
pub(super) struct Successors(VecDeque<(Instant, u64, NotOpen)>);

impl Successors {
    /// Beyond a bound the earliest is forgotten, and keeps its seat.
    pub(super) fn add(&mut self, of: u64, successor: NotOpen, now: Instant) {
        self.0.push_back((now, of, successor));
        self.forget(now);
    }

    fn forget(&mut self, now: Instant) {
        while self.0.front().is_some_and(|(at, ..)| now.saturating_duration_since(*at) > NOTICED_WITHIN)
            || self.0.len() > SEATS_MAX
        {
            self.0.pop_front();
        }
    }

    /// Those of a run that has died.
    pub(super) fn take(&mut self, of: u64, now: Instant) -> Vec<NotOpen> {
        self.forget(now);
        let (taken, left): (VecDeque<_>, _) =
            std::mem::take(&mut self.0).into_iter().partition(|(_, run, _)| *run == of);
        self.0 = left;
        taken.into_iter().map(|(.., successor)| successor).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::ConnectionId;

    #[test]
    fn successors_are_told_once_and_expire_by_age_and_bound() {
        let (mut successors, begun) = (Successors::default(), Instant::now());
        let of = |epoch| NotOpen { connection_id: ConnectionId::from_bytes([1; 16]), epoch };
        successors.add(8, of(1), begun);
        successors.add(9, of(2), begun);
        successors.add(8, of(3), begun + NOTICED_WITHIN);
        let taken = [8, 8].map(|run| successors.take(run, begun + NOTICED_WITHIN));
        assert_eq!(taken, [vec![of(1), of(3)], vec![]]);
        let late = begun + NOTICED_WITHIN + Duration::from_millis(1);
        assert_eq!(successors.take(9, late), []);
        successors.add(8, of(4), late);
        for epoch in 0..SEATS_MAX as u64 {
            successors.add(9, of(epoch), late);
        }
        assert_eq!((successors.take(8, late), successors.take(9, late).len()), (Vec::new(), SEATS_MAX));
    }
}
