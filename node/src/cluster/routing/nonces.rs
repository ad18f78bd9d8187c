//! Nonces of token requests are used once in the whole cluster: a claim is remembered by every node that can be reached, and by a
//! majority of those that were seen of late.

mod noted;
#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::time::Duration;

pub(super) use noted::Noted;

use tokio::time::Instant;

use super::super::inbound::{Answer, ClaimId, Claimed, NoncesKnown, Request, ToldNonce};
use super::Routing;
use super::ask::{Later, Local};
use super::quorum::{self, KeptNodes};
use crate::model::{KeptNonce, Nonce, NoncePage, random_bytes};
use crate::tasks::OnStop;
use crate::telemetry::OFTEN;

/// A node that does not say what it remembers of a nonce by then is passed over.
const CLAIM_WAIT: Duration = Duration::from_millis(800);
/// What a node gets for one part of many that it says or is told.
pub(super) const PART_WAIT: Duration = Duration::from_secs(2);
/// Parts that are taken of a node at most; the rest of a longer list is not asked for.
const PARTS_MAX: usize = 1_000_000;
/// How often it is looked for nodes that were not asked yet.
const LOOK: Duration = Duration::from_millis(100);
/// Whoever lives is reached by then, or not waited for.
const REACH_WAIT: Duration = Duration::from_secs(3);
/// How often it is kept who was seen, where nobody comes or goes.
const KEEP_EVERY: Duration = Duration::from_secs(60);
/// What was learnt of others' clocks is good for so long before a claim, and is looked at anew with each.
const CLOCKS_LAST: Duration = Duration::from_secs(60);

/// What others' clocks said, and when that was.
#[derive(Default)]
pub(super) struct Clocks {
    said_ms: Vec<u64>,
    at: Option<Instant>,
}

impl Clocks {
    fn is_near(&self, now_ms: u64) -> bool {
        let Some(passed) = self.at.map(|at| at.elapsed()).filter(|passed| *passed < CLOCKS_LAST) else {
            return true;
        };
        let passed_ms = passed.as_millis() as u64;
        let by_now: Vec<u64> = self.said_ms.iter().map(|said_ms| said_ms.saturating_add(passed_ms)).collect();
        quorum::is_near(now_ms, &by_now)
    }
}

impl Routing {
    /// Takes over what others remember, and counts with them from then on; for a store that is not shared. `waits`: they are looked for at seeds.
    pub fn begin_nonces(self: &Arc<Self>, waits: bool) {
        self.quorum.lock().begin();
        let (routing, begun) = (Arc::clone(self), Instant::now());
        self.tasks.spawn("nonces", OnStop::Cancel, async move {
            let mut kept = (KeptNodes::default(), Instant::now());
            loop {
                routing.take_nonces_over(begun, waits).await;
                let is_old = kept.1.elapsed() >= KEEP_EVERY;
                let keeping = {
                    // So that nothing of before this node has left is kept after that.
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

    /// Whoever lives has been asked for the nonces that it remembers, and this node counts with them if it can in time.
    pub fn has_nonces(&self) -> bool {
        self.quorum.lock().is_settled()
    }

    /// False: the nonce was claimed before. None: nobody knows, or it cannot be remembered.
    pub async fn claim_nonce(&self, nonce: Nonce) -> Option<bool> {
        let local = self.local.get()?;
        if !self.quorum.lock().counts() || !self.clocks.lock().is_near(local.now_ms()) {
            return None;
        }
        // The first is the same for whoever claims: of two claims at once it lets one go on.
        let mut others = self.reachable();
        let first = others.iter().copied().min().filter(|peer| *peer < self.hub.incarnation());
        others.retain(|peer| Some(*peer) != first);
        let is_used = |said: &[Claimed]| said.iter().any(|claimed| !claimed.first);
        let claim = ClaimId::new(u64::from_ne_bytes(random_bytes()));
        let nonce = ToldNonce { kept: KeptNonce { nonce, age_ms: 0 }, claim };
        let mut elsewhere = self.claim_at(first.into_iter().collect(), &nonce).await;
        if is_used(&elsewhere) {
            return Some(false);
        }
        let here = self.claim_here(&**local, nonce.clone()).await?;
        if !here.first {
            return Some(false);
        }
        elsewhere.extend(self.claim_at(others, &nonce).await);
        if is_used(&elsewhere) {
            return Some(false);
        }
        let clocks_ms = elsewhere.iter().map(|claimed| claimed.now_ms).collect();
        *self.clocks.lock() = Clocks { said_ms: clocks_ms, at: Some(Instant::now()) };
        let is_near = self.clocks.lock().is_near(local.now_ms());
        let remembering = elsewhere.iter().chain([&here]).filter(|claimed| claimed.counts).count();
        let is_majority = self.quorum.lock().is_majority(remembering, Instant::now());
        if !is_near || !is_majority {
            tracing::warn!(target: OFTEN,
                remembering,
                is_near,
                "a nonce is not remembered by a majority of the nodes in time"
            );
        }
        (is_near && is_majority).then_some(true)
    }

    /// Whoever asks may have been heard of before: a node to which it came first has told this one.
    async fn claim_here(&self, local: &dyn Local, told: ToldNonce) -> Option<Claimed> {
        let ToldNonce { kept: KeptNonce { nonce, .. }, claim } = told;
        let noted = self.noted.read().await;
        let is_new = local.claim_nonce(nonce.clone()).await?;
        let first = noted.lock().claimed(&nonce, claim, is_new, Instant::now());
        drop(noted);
        Some(Claimed { first, counts: self.quorum.lock().counts(), now_ms: local.now_ms() })
    }

    async fn claim_at(&self, peers: Vec<u64>, nonce: &ToldNonce) -> Vec<Claimed> {
        let mut said = Vec::with_capacity(peers.len());
        let mut answers = self.ask(peers, 0, &Request::Claim(nonce.clone()));
        let all = async {
            while let Some(answer) = answers.next().await {
                if let Answer::Claimed(claimed) = answer {
                    said.push(claimed);
                }
            }
        };
        // What has come by then counts.
        tokio::time::timeout(CLAIM_WAIT, all).await.ok();
        said
    }

    /// Gives every node that can be reached what this one remembers, which then does not count any more.
    pub async fn hand_nonces_over(&self) {
        let Some(local) = self.local.get().filter(|_| self.quorum.lock().is_needed()) else { return };
        let kept = {
            let mut quorum = self.quorum.lock();
            quorum.leave(Instant::now());
            quorum.kept(Instant::now())
        };
        // Should it be started again, it does not know what others have remembered meanwhile.
        local.keep_nodes(kept).await;
        let (mut to, mut after) = (self.reachable(), None);
        while !to.is_empty() {
            let Some((nonces, next)) = self.remembered(&**local, after.take()).await else { return };
            let last = next.is_none();
            let given = &Request::NoncesGiven { nonces, last };
            let taking = to.into_iter().map(|peer| async move {
                let taken = self.ask_one(peer, 0, given, PART_WAIT).await;
                (taken == Some(Answer::Done)).then_some(peer)
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
        // What it wants comes by its link to this node, as its answer will.
        for peer in reachable.iter().filter(|peer| self.known_of(**peer).is_interest_known) {
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
            tracing::info!("this node remembers nonces together with the others");
        }
        if is_late {
            quorum.wait_no_longer();
        }
    }

    async fn take_nonces_of(&self, peer: u64, local: &dyn Local) {
        let mut after = None;
        for _ in 0..PARTS_MAX {
            let asked = Request::NoncesAsked { after: after.take() };
            let Some(Answer::Nonces(known)) = self.ask_one(peer, 0, &asked, PART_WAIT).await else { return };
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

    /// For another node, with whose they are: that node may be asked by a claim that came here first. And where the next begin.
    async fn remembered(
        &self,
        local: &dyn Local,
        after: Option<Box<[u8]>>,
    ) -> Option<(Vec<ToldNonce>, Option<Box<[u8]>>)> {
        let mut noted = self.noted.write().await;
        let NoncePage { nonces, next } = local.nonces(after).await?;
        let noted = noted.get_mut();
        noted.forget(Instant::now());
        let told = nonces.into_iter().map(|kept| ToldNonce { claim: noted.of(&kept.nonce), kept });
        Some((told.collect(), next))
    }

    /// What another node has said.
    async fn remember(&self, local: &dyn Local, nonces: Vec<ToldNonce>) -> Option<()> {
        let mut noted = self.noted.write().await;
        let (under_way, used): (Vec<_>, Vec<_>) = nonces.into_iter().partition(|told| told.claim.is_some());
        let claimed = under_way.iter().map(|told| local.claim_nonce(told.kept.nonce.clone()));
        let are_new = futures_util::future::join_all(claimed).await;
        let (noted, now) = (noted.get_mut(), Instant::now());
        for (told, is_new) in under_way.into_iter().zip(are_new) {
            noted.heard(&told.kept.nonce, told.claim, is_new?, now);
        }
        used.iter().for_each(|told| noted.heard(&told.kept.nonce, None, false, now));
        local.keep_nonces(used.into_iter().map(|told| told.kept).collect()).await
    }

    /// A peer claims a nonce.
    pub(super) fn claimed_by_peer(
        self: Arc<Self>,
        local: &Arc<dyn Local>,
        nonce: ToldNonce,
    ) -> Later<Option<Answer>> {
        let local = Arc::clone(local);
        Box::pin(async move { self.claim_here(&*local, nonce).await.map(Answer::Claimed) })
    }

    pub(super) fn nonces_for_peer(
        self: Arc<Self>,
        local: &Arc<dyn Local>,
        after: Option<Box<[u8]>>,
    ) -> Later<Option<Answer>> {
        let local = Arc::clone(local);
        Box::pin(async move {
            let (nonces, next) = self.remembered(&*local, after).await?;
            let (counts, seen) = {
                let quorum = self.quorum.lock();
                (quorum.counts(), quorum.kept(Instant::now()).seen)
            };
            Some(Answer::Nonces(NoncesKnown { nonces, next, counts, now_ms: local.now_ms(), seen }))
        })
    }

    pub(super) fn nonces_from_peer(
        self: Arc<Self>,
        local: &Arc<dyn Local>,
        from: u64,
        nonces: Vec<ToldNonce>,
        last: bool,
    ) -> Later<Option<Answer>> {
        let local = Arc::clone(local);
        Box::pin(async move {
            self.remember(&*local, nonces).await?;
            if last {
                self.quorum.lock().leaves(from);
            }
            Some(Answer::Done)
        })
    }
}
