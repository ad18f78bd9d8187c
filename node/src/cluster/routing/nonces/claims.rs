//! Claims of the nonces that were claimed recently. No I/O; the time is passed in.

use std::collections::{HashMap, VecDeque};
use std::time::Duration;

use tokio::time::Instant;

use super::ClaimId;
use crate::model::Nonce;

/// Time after which a claim is over.
const UNDER_WAY: Duration = Duration::from_secs(5);
/// Most claims that are held; a further one evicts the oldest, whose nonce then counts as used.
const CLAIMS_MAX: usize = 16_384;

/// Claim of each nonce that was new here and of which no other claim came since. A remembered nonce without a claim is used.
#[derive(Default)]
pub(in crate::cluster::routing) struct NonceClaims {
    claims: HashMap<Nonce, ClaimId>,
    order: VecDeque<(Instant, Nonce)>,
}

impl NonceClaims {
    /// Takes a claim that is made here; true if it is the first one of its nonce. `is_new` is true if the nonce was not remembered.
    pub(super) fn claimed(
        &mut self,
        nonce: &Nonce,
        claim: Option<ClaimId>,
        is_new: bool,
        now: Instant,
    ) -> bool {
        let Some(claim) = claim else { return is_new };
        if is_new {
            self.record(nonce, claim, now);
        }
        // A peer may have reported this claim before it came here.
        self.of(nonce) == Some(claim)
    }

    /// Takes a claim that another node reports.
    pub(super) fn record_remote(
        &mut self,
        nonce: &Nonce,
        claim: Option<ClaimId>,
        is_new: bool,
        now: Instant,
    ) {
        match claim {
            Some(claim) if is_new => self.record(nonce, claim, now),
            Some(claim) if self.of(nonce) == Some(claim) => {}
            _ => {
                self.claims.remove(nonce);
            }
        }
    }

    pub(super) fn of(&self, nonce: &Nonce) -> Option<ClaimId> {
        self.claims.get(nonce).copied()
    }

    /// Drops claims that are over.
    pub(super) fn forget(&mut self, now: Instant) {
        let is_expired = |at: Instant| now.saturating_duration_since(at) >= UNDER_WAY;
        while self.order.len() >= CLAIMS_MAX || self.order.front().is_some_and(|(at, _)| is_expired(*at)) {
            let Some((_, earliest)) = self.order.pop_front() else { break };
            self.claims.remove(&earliest);
        }
    }

    fn record(&mut self, nonce: &Nonce, claim: ClaimId, now: Instant) {
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
    fn nonce_belongs_to_the_only_claim_received() {
        let now = Instant::now();
        for (received, is_first) in [
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
            let mut nonce_claims = NonceClaims::default();
            for (claim, is_new) in received {
                nonce_claims.record_remote(&nonce(0), *claim, *is_new, now);
            }
            assert_eq!(nonce_claims.claimed(&nonce(0), claim(1), false, now), is_first, "{received:?}");
            assert!(!nonce_claims.claimed(&nonce(0), claim(3), false, now), "{received:?}");
            assert!(!nonce_claims.claimed(&nonce(0), None, false, now), "{received:?}");
        }
    }

    #[test]
    fn nonce_claims_expire_by_age_and_are_bounded_in_count() {
        let (mut nonce_claims, now) = (NonceClaims::default(), Instant::now());
        for n in 0..=CLAIMS_MAX {
            assert!(nonce_claims.claimed(&nonce(n), claim(1), true, now));
        }
        assert_eq!((nonce_claims.of(&nonce(0)), nonce_claims.of(&nonce(1))), (None, claim(1)));
        assert_eq!((nonce_claims.claims.len(), nonce_claims.order.len()), (CLAIMS_MAX, CLAIMS_MAX));
        assert!(nonce_claims.claimed(&nonce(0), claim(2), true, now + UNDER_WAY));
        assert_eq!((nonce_claims.claims.len(), nonce_claims.order.len()), (1, 1));
    }
}
