//! Whose the nonces are that were claimed lately. No I/O; the time is handed in.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::ClaimId;
use crate::model::Nonce;

/// A claim has been given up by then.
const UNDER_WAY: Duration = Duration::from_secs(5);
/// Claims that are held; for a further one the earliest is forgotten, and with it whose its nonce is.
const CLAIMS_MAX: usize = 16_384;

/// Of each nonce that was new here and of which one claim alone was heard since, that claim. One without is used.
#[derive(Default)]
pub(in crate::cluster::routing) struct Noted {
    claims: HashMap<Nonce, ClaimId>,
    order: VecDeque<(Instant, Nonce)>,
}

impl Noted {
    /// A nonce is claimed here: whether it is for the first time. `is_new`: it was not remembered.
    pub(super) fn claimed(
        &mut self,
        nonce: &Nonce,
        claim: Option<ClaimId>,
        is_new: bool,
        now: Instant,
    ) -> bool {
        let Some(claim) = claim else { return is_new };
        if is_new {
            self.note(nonce, claim, now);
        }
        // Else the claim may have been heard of before it came.
        self.of(nonce) == Some(claim)
    }

    /// Another node has told that the nonce was claimed.
    pub(super) fn heard(&mut self, nonce: &Nonce, claim: Option<ClaimId>, is_new: bool, now: Instant) {
        match claim {
            Some(claim) if is_new => self.note(nonce, claim, now),
            Some(claim) if self.of(nonce) == Some(claim) => {}
            _ => {
                self.claims.remove(nonce);
            }
        }
    }

    pub(super) fn of(&self, nonce: &Nonce) -> Option<ClaimId> {
        self.claims.get(nonce).copied()
    }

    /// Of claims that are over nobody needs to know whose they were.
    pub(super) fn forget(&mut self, now: Instant) {
        let is_over = |at: Instant| now.saturating_duration_since(at) >= UNDER_WAY;
        while self.order.len() >= CLAIMS_MAX || self.order.front().is_some_and(|(at, _)| is_over(*at)) {
            let Some((_, earliest)) = self.order.pop_front() else { break };
            self.claims.remove(&earliest);
        }
    }

    fn note(&mut self, nonce: &Nonce, claim: ClaimId, now: Instant) {
        self.forget(now);
        self.claims.insert(nonce.clone(), claim);
        self.order.push_back((now, nonce.clone()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nonce(n: usize) -> Nonce {
        Nonce { key_name: "k1".into(), timestamp_ms: 5, nonce: n.to_string().into() }
    }

    fn claim(n: u64) -> Option<ClaimId> {
        ClaimId::new(n)
    }

    #[test]
    fn a_nonce_is_of_the_one_claim_that_was_heard_of() {
        let now = Instant::now();
        for (heard, is_first) in [
            (&[(claim(1), true)][..], true),
            (&[(claim(1), true), (claim(1), false)], true),
            (&[(claim(2), true)], false),
            (&[(claim(1), true), (claim(2), false)], false),
            (&[(claim(2), true), (claim(1), false)], false),
            (&[(claim(1), true), (None, false)], false),
            (&[(None, true), (claim(1), false)], false),
            // Remembered from long ago.
            (&[(claim(1), false)], false),
        ] {
            let mut noted = Noted::default();
            for (claim, is_new) in heard {
                noted.heard(&nonce(0), *claim, *is_new, now);
            }
            assert_eq!(noted.claimed(&nonce(0), claim(1), false, now), is_first, "{heard:?}");
            assert!(!noted.claimed(&nonce(0), claim(3), false, now), "{heard:?}");
            assert!(!noted.claimed(&nonce(0), None, false, now), "{heard:?}");
        }
    }

    #[test]
    fn nonce_claims_expire_by_age_and_are_bounded_in_count() {
        let (mut noted, now) = (Noted::default(), Instant::now());
        for n in 0..=CLAIMS_MAX {
            assert!(noted.claimed(&nonce(n), claim(1), true, now));
        }
        assert_eq!((noted.of(&nonce(0)), noted.of(&nonce(1))), (None, claim(1)));
        assert_eq!((noted.claims.len(), noted.order.len()), (CLAIMS_MAX, CLAIMS_MAX));
        assert!(noted.claimed(&nonce(0), claim(2), true, now + UNDER_WAY));
        assert_eq!((noted.claims.len(), noted.order.len()), (1, 1));
    }
}
