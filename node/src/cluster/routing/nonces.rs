//! Nonces of token requests, used once in the whole cluster: every reachable node remembers a claim, and so must a majority of the nodes
//! that were seen recently.

mod claims;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub(super) use claims::NonceClaims;

use tokio::time::Instant;

use super::super::inbound::{ClaimId, NonceClaimAnswer, PeerAnswer, PeerNonce, PeerNoncePage, PeerRequest};
use super::Routing;
use super::quorum::{self, KeptNodes};
use super::requests::{LocalNode, NodeFuture};
use crate::model::{ClaimedNonce, Nonce, NoncePage, random_bytes};
use crate::tasks::OnStop;
use crate::telemetry::RATE_LIMITED;

/// Time after which a claim goes on without the answer of a node.
const CLAIM_WAIT: Duration = Duration::from_millis(800);
/// Time for one page of a longer exchange with a node.
pub(super) const PART_WAIT: Duration = Duration::from_secs(2);
/// Most pages that are taken from one node.
const PARTS_MAX: usize = 1_000_000;
/// Interval of the check for nodes that were not asked for their nonces yet.
const LOOK: Duration = Duration::from_millis(100);
/// Time within which every live node is reached; this node does not wait for others.
const REACH_WAIT: Duration = Duration::from_secs(3);
/// Interval at which the seen nodes are stored while they stay the same.
const KEEP_EVERY: Duration = Duration::from_secs(60);
/// Time for which the clocks that peers reported with the last claim are used to check this node's clock before the next one.
const CLOCKS_LAST: Duration = Duration::from_secs(60);

/// Clocks of peers in milliseconds, and the time at which they were read.
#[derive(Default)]
pub(super) struct PeerClocks {
    clocks_ms: Vec<u64>,
    at: Option<Instant>,
}

impl PeerClocks {
    fn is_near(&self, now_ms: u64) -> bool {
        let Some(passed) = self.at.map(|at| at.elapsed()).filter(|passed| *passed < CLOCKS_LAST) else {
            return true;
        };
        let passed_ms = passed.as_millis() as u64;
        let by_now: Vec<u64> =
            self.clocks_ms.iter().map(|clock_ms| clock_ms.saturating_add(passed_ms)).collect();
        quorum::is_near(now_ms, &by_now)
    }
}

impl Routing {
    /// Starts to learn the nonces of peers; this node counts for the quorum from then on. For a store that is not shared. `waits` is true
    /// if peers are looked for at seeds.
    pub fn begin_nonces(self: &Arc<Self>, waits: bool) {
        self.quorum.lock().begin();
        let (routing, begun) = (Arc::clone(self), Instant::now());
        self.tasks.spawn("nonces", OnStop::Cancel, async move {
            let mut kept = (KeptNodes::default(), Instant::now());
            loop {
                routing.take_nonces_over(begun, waits).await;
                let is_old = kept.1.elapsed() >= KEEP_EVERY;
                let keeping = {
                    // Read under the lock, so that no state from before this node has left is stored after that.
                    let quorum = routing.quorum.lock();
                    let now = quorum.kept(Instant::now());
                    let names =
                        |kept: &KeptNodes| kept.seen.iter().map(|(id, _)| id.clone()).collect::<Vec<_>>();
                    let is_changed = now.counts != kept.0.counts || names(&now) != names(&kept.0);
                    routing.local.get().filter(|_| is_changed || is_old).map(|local| {
                        kept = (now.clone(), Instant::now());
                        local.keep_nodes(now)
                    })
                };
                if let Some(keeping) = keeping {
                    keeping.await;
                }
                tokio::time::sleep(LOOK).await;
            }
        });
    }

    /// True once every live node was asked for its nonces, and this node counts for the quorum or has had enough time to.
    pub fn has_nonces(&self) -> bool {
        self.quorum.lock().is_settled()
    }

    /// Claims a nonce in the cluster. False if it was claimed before, None if that is not known or a majority cannot remember the nonce.
    pub async fn claim_nonce(&self, nonce: Nonce) -> Option<bool> {
        let local = self.local.get()?;
        if !self.quorum.lock().counts() || !self.clocks.lock().is_near(local.now_ms()) {
            return None;
        }
        // All nodes ask the lowest incarnation first: of two claims at once, that node lets one go on.
        let mut others = self.reachable();
        let first = others.iter().copied().min().filter(|peer| *peer < self.hub.incarnation());
        others.retain(|peer| Some(*peer) != first);
        let is_used = |answers: &[NonceClaimAnswer]| answers.iter().any(|claimed| !claimed.first);
        let claim = ClaimId::new(u64::from_ne_bytes(random_bytes()));
        let nonce = PeerNonce { kept: ClaimedNonce { nonce, age_ms: 0 }, claim };
        let mut answers = self.claim_at(first.into_iter().collect(), &nonce).await;
        if is_used(&answers) {
            return Some(false);
        }
        let here = self.claim_here(&**local, nonce.clone()).await?;
        if !here.first {
            return Some(false);
        }
        answers.extend(self.claim_at(others, &nonce).await);
        if is_used(&answers) {
            return Some(false);
        }
        let clocks_ms = answers.iter().map(|claimed| claimed.now_ms).collect();
        *self.clocks.lock() = PeerClocks { clocks_ms, at: Some(Instant::now()) };
        let is_near = self.clocks.lock().is_near(local.now_ms());
        let remembering = answers.iter().chain([&here]).filter(|claimed| claimed.counts).count();
        let is_majority = self.quorum.lock().is_majority(remembering, Instant::now());
        if !is_near || !is_majority {
            tracing::warn!(target: RATE_LIMITED,
                remembering,
                is_near,
                "nonce claim refused: no majority, or clock too far from the peers"
            );
        }
        (is_near && is_majority).then_some(true)
    }

    /// Claims a nonce at this node. A node that received the same claim first may have reported it here before.
    async fn claim_here(&self, local: &dyn LocalNode, peer_nonce: PeerNonce) -> Option<NonceClaimAnswer> {
        let PeerNonce { kept: ClaimedNonce { nonce, .. }, claim } = peer_nonce;
        let nonce_claims = self.nonce_claims.read().await;
        let is_new = local.claim_nonce(nonce.clone()).await?;
        let first = nonce_claims.lock().claimed(&nonce, claim, is_new, Instant::now());
        drop(nonce_claims);
        Some(NonceClaimAnswer { first, counts: self.quorum.lock().counts(), now_ms: local.now_ms() })
    }

    async fn claim_at(&self, peers: Vec<u64>, nonce: &PeerNonce) -> Vec<NonceClaimAnswer> {
        let mut in_time = Vec::with_capacity(peers.len());
        let mut answers = self.ask(peers, 0, &PeerRequest::Claim(nonce.clone()));
        let all = async {
            while let Some(answer) = answers.next().await {
                if let PeerAnswer::Claimed(claimed) = answer {
                    in_time.push(claimed);
                }
            }
        };
        // The answers that came in time count.
        tokio::time::timeout(CLAIM_WAIT, all).await.ok();
        in_time
    }

    /// Sends the nonces of this node to every reachable node. This node does not count for the quorum any more.
    pub async fn hand_nonces_over(&self) {
        let Some(local) = self.local.get().filter(|_| self.quorum.lock().is_needed()) else { return };
        let kept = {
            let mut quorum = self.quorum.lock();
            quorum.leave(Instant::now());
            quorum.kept(Instant::now())
        };
        // After a restart this node does not know the nonces that peers remembered meanwhile.
        local.keep_nodes(kept).await;
        let (mut to, mut after) = (self.reachable(), None);
        while !to.is_empty() {
            let Some((nonces, next)) = self.remembered(&**local, after.take()).await else { return };
            let last = next.is_none();
            let given = &PeerRequest::NoncesGiven { nonces, last };
            let taking = to.into_iter().map(|peer| async move {
                let taken = self.ask_one(peer, 0, given, PART_WAIT).await;
                (taken == Some(PeerAnswer::Done)).then_some(peer)
            });
            to = futures_util::future::join_all(taking).await.into_iter().flatten().collect();
            if last {
                return;
            }
            after = next;
        }
    }

    async fn take_nonces_over(&self, begun: Instant, waits: bool) {
        let Some(local) = self.local.get() else { return };
        let reachable = self.reachable();
        // The peer's interest comes over its link to this node, as its answer will.
        for peer in reachable.iter().filter(|peer| self.peer_status(**peer).is_interest_known) {
            if !self.quorum.lock().has_asked(*peer) {
                self.take_nonces_of(*peer, &**local).await;
            }
        }
        let mut quorum = self.quorum.lock();
        let nobody = self.expected() == 0;
        let is_late = begun.elapsed() >= REACH_WAIT || (nobody && !waits);
        let is_asked = reachable.iter().all(|peer| quorum.has_asked(*peer));
        let is_asked = (!nobody && quorum.has_asked_all()) || (is_late && is_asked);
        if quorum.decide(is_asked, Instant::now()) {
            tracing::info!("nonces synchronised with the peers");
        }
        if is_late {
            quorum.wait_no_longer();
        }
    }

    async fn take_nonces_of(&self, peer: u64, local: &dyn LocalNode) {
        let mut after = None;
        for _ in 0..PARTS_MAX {
            let request = PeerRequest::NoncesAsked { after: after.take() };
            let Some(PeerAnswer::Nonces(known)) = self.ask_one(peer, 0, &request, PART_WAIT).await else {
                return;
            };
            if self.remember(local, known.nonces).await.is_none() {
                return;
            }
            after = known.next;
            if after.is_none() {
                self.quorum.lock().taken(peer, known.counts, &known.seen, Instant::now());
                return;
            }
        }
    }

    /// One page of nonces for another node, with their claims, and the cursor of the next page. A claim that came here first may still
    /// come to that node.
    async fn remembered(
        &self,
        local: &dyn LocalNode,
        after: Option<Box<[u8]>>,
    ) -> Option<(Vec<PeerNonce>, Option<Box<[u8]>>)> {
        let mut nonce_claims = self.nonce_claims.write().await;
        let NoncePage { nonces, next } = local.nonces(after).await?;
        let nonce_claims = nonce_claims.get_mut();
        nonce_claims.forget(Instant::now());
        let peer_nonces =
            nonces.into_iter().map(|kept| PeerNonce { claim: nonce_claims.of(&kept.nonce), kept });
        Some((peer_nonces.collect(), next))
    }

    /// Remembers nonces that another node has sent.
    async fn remember(&self, local: &dyn LocalNode, nonces: Vec<PeerNonce>) -> Option<()> {
        let mut nonce_claims = self.nonce_claims.write().await;
        let (under_way, used): (Vec<_>, Vec<_>) =
            nonces.into_iter().partition(|peer_nonce| peer_nonce.claim.is_some());
        let claimed = under_way.iter().map(|peer_nonce| local.claim_nonce(peer_nonce.kept.nonce.clone()));
        let are_new = futures_util::future::join_all(claimed).await;
        let (nonce_claims, now) = (nonce_claims.get_mut(), Instant::now());
        for (peer_nonce, is_new) in under_way.into_iter().zip(are_new) {
            nonce_claims.record_remote(&peer_nonce.kept.nonce, peer_nonce.claim, is_new?, now);
        }
        used.iter()
            .for_each(|peer_nonce| nonce_claims.record_remote(&peer_nonce.kept.nonce, None, false, now));
        local.keep_nonces(used.into_iter().map(|peer_nonce| peer_nonce.kept).collect()).await
    }

    /// Answers a peer's claim of a nonce.
    pub(super) fn claimed_by_peer(
        self: Arc<Self>,
        local: &Arc<dyn LocalNode>,
        nonce: PeerNonce,
    ) -> NodeFuture<Option<PeerAnswer>> {
        let local = Arc::clone(local);
        Box::pin(async move { self.claim_here(&*local, nonce).await.map(PeerAnswer::Claimed) })
    }

    pub(super) fn nonces_for_peer(
        self: Arc<Self>,
        local: &Arc<dyn LocalNode>,
        after: Option<Box<[u8]>>,
    ) -> NodeFuture<Option<PeerAnswer>> {
        let local = Arc::clone(local);
        Box::pin(async move {
            let (nonces, next) = self.remembered(&*local, after).await?;
            let (counts, seen) = {
                let quorum = self.quorum.lock();
                (quorum.counts(), quorum.kept(Instant::now()).seen)
            };
            Some(PeerAnswer::Nonces(PeerNoncePage { nonces, next, counts, now_ms: local.now_ms(), seen }))
        })
    }

    pub(super) fn nonces_from_peer(
        self: Arc<Self>,
        local: &Arc<dyn LocalNode>,
        from: u64,
        nonces: Vec<PeerNonce>,
        last: bool,
    ) -> NodeFuture<Option<PeerAnswer>> {
        let local = Arc::clone(local);
        Box::pin(async move {
            self.remember(&*local, nonces).await?;
            if last {
                self.quorum.lock().leaves(from);
            }
            Some(PeerAnswer::Done)
        })
    }
}
