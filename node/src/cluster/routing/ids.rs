//! Message ids that clients give: they are claimed on every reachable node if the store is not shared. A publish does not wait for a node
//! that does not answer, so its message may be published twice.

mod claims;
#[cfg(test)]
mod tests;

use std::collections::HashSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Notify;
use tokio::time::Instant;

use super::super::inbound::{IdConflict, IdConflicts, PeerAnswer, PeerRequest};
use super::Routing;
use super::requests::{LocalNode, NodeFuture};
use crate::model::{ClientMessageIds, IdScope, Stamp, StampedIds};
use crate::tasks::OnStop;
use crate::telemetry::RATE_LIMITED;
use claims::{
    ClaimAnswers, ClaimQueueKey, ClaimRound, ClaimRoundStep, ClusterIdClaim, IdClaimOutcome, IdClaimQueue,
    RequestedIds, ScopedMessageId,
};

/// Time after which a peer without an answer is left out of claims, until it answers something.
const CLAIM_WAIT: Duration = Duration::from_millis(700);
/// Time for the answer to a probe, for which no claim waits.
const PROBE_WAIT: Duration = Duration::from_secs(5);

/// Callback of a claim. It is called once, in the order of the claims of one channel and client id.
pub type IdClaimCallback = Box<dyn FnOnce(Result<ClaimedIds, IdClaimError>) + Send>;

/// Outcome of a claim. The ids that are not known stay claimed until this is dropped.
#[derive(Default)]
pub struct ClaimedIds {
    /// Stamp of each id's message, if one was published. Empty if no peer was asked.
    pub known: Vec<Option<Stamp>>,
    _held: Option<ClaimedIdsGuard>,
}

struct ClaimedIdsGuard {
    routing: Arc<Routing>,
    ids: Vec<Arc<ScopedMessageId>>,
}

impl Drop for ClaimedIdsGuard {
    fn drop(&mut self) {
        self.routing.ids.claims.lock().release(&self.ids);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum IdClaimError {
    /// Too many claims wait.
    Busy,
    /// A publish of another node under one of the ids did not end in time.
    Late,
}

pub(super) struct ClusterIdClaims {
    claims: Mutex<IdClaimQueue<IdClaimCallback>>,
    changed: Notify,
    silent: Mutex<HashSet<u64>>,
    requested: metrics::Counter,
    left_out: metrics::Counter,
}

impl Default for ClusterIdClaims {
    fn default() -> Self {
        Self {
            claims: Mutex::default(),
            changed: Notify::new(),
            silent: Mutex::default(),
            requested: metrics::counter!("fanfare_id_claims_sent_total"),
            left_out: metrics::counter!("fanfare_id_claims_unanswered_total"),
        }
    }
}

impl Routing {
    /// Claims ids for one publish; no ids for a publish that only keeps its order. Calls `then` at once on this thread if there is no
    /// peer to ask and no earlier claim.
    pub fn claim_ids(&self, scope: IdScope, ids: &[Box<str>], until: Instant, then: IdClaimCallback) {
        let queue = ClaimQueueKey::of(&scope);
        let is_asked = !ids.is_empty() && !self.linked().is_empty();
        let mut claims = self.ids.claims.lock();
        if !is_asked && claims.is_free(&queue) {
            drop(claims);
            return then(Ok(ClaimedIds::default()));
        }
        let scope = Arc::new(scope);
        let given =
            ids.iter().map(|id| Arc::new(ScopedMessageId { scope: Arc::clone(&scope), id: id.clone() }));
        let claim = ClusterIdClaim { ids: given.collect(), until, then };
        let pushed = claims.push(queue, claim);
        drop(claims);
        match (pushed, self.this.upgrade()) {
            (Ok(true), Some(routing)) => self.tasks.spawn("ids", OnStop::Cancel, routing.ask_for_ids()),
            (Ok(_), _) => self.ids.changed.notify_one(),
            (Err(claim), _) => (claim.then)(Err(IdClaimError::Busy)),
        }
    }

    /// Runs claim rounds, each for all claims that have come meanwhile, until none waits.
    async fn ask_for_ids(self: Arc<Self>) {
        loop {
            let next = self.ids.claims.lock().next(Instant::now());
            match next {
                ClaimRoundStep::Ask(round) => self.ask_round(round).await,
                ClaimRoundStep::Wait(until) => {
                    tokio::time::timeout_at(until, self.ids.changed.notified()).await.ok();
                }
                ClaimRoundStep::Nothing => return,
            }
        }
    }

    async fn ask_round(self: &Arc<Self>, round: ClaimRound<IdClaimCallback>) {
        let claim_answers = self.ask_all(&round.requested).await;
        let (outcomes, queues) = self.ids.claims.lock().settle(round, &claim_answers, Instant::now());
        for (then, outcome) in outcomes {
            let claimed = match outcome {
                IdClaimOutcome::Claimed { held, known } => {
                    let held =
                        (!held.is_empty()).then(|| ClaimedIdsGuard { routing: Arc::clone(self), ids: held });
                    Ok(ClaimedIds { known, _held: held })
                }
                IdClaimOutcome::Late => Err(IdClaimError::Late),
            };
            if catch_unwind(AssertUnwindSafe(|| then(claimed))).is_err() {
                tracing::error!("message id claim callback panicked");
            }
        }
        self.ids.claims.lock().go_on(queues);
    }

    async fn ask_all(&self, requested: &RequestedIds) -> ClaimAnswers {
        let mut claim_answers = ClaimAnswers::default();
        let Some(request) = requested.request() else { return claim_answers };
        let mut waiting = self.answering();
        self.ids.requested.increment(waiting.len() as u64);
        let mut answers = self.ask(waiting.clone(), 0, &PeerRequest::ClaimIds(request));
        let all = async {
            while let Some((from, answer)) = answers.next_with_peer().await {
                waiting.retain(|peer| *peer != from);
                match answer {
                    PeerAnswer::ClaimedIds(taken) => claim_answers.take(requested, taken),
                    // The peer is overloaded, and the claim does not wait for it.
                    _ => self.ids.left_out.increment(1),
                }
            }
            waiting.clear();
        };
        if tokio::time::timeout(CLAIM_WAIT, all).await.is_err() {
            drop(answers);
            waiting.into_iter().filter(|peer| self.is_up(*peer)).for_each(|peer| self.leave_out(peer));
        }
        claim_answers
    }

    /// Leaves the peer out of claims until it answers a probe.
    fn leave_out(&self, peer: u64) {
        self.ids.left_out.increment(1);
        let node = self.leaving.name_of(peer);
        tracing::warn!(target: RATE_LIMITED,
            node = node.as_deref(),
            "message id claim timed out: peer skipped until it answers"
        );
        let Some(routing) = self.this.upgrade().filter(|_| self.ids.silent.lock().insert(peer)) else {
            return;
        };
        self.tasks.spawn("ids", OnStop::Cancel, async move {
            let nothing = PeerRequest::ClaimIds(Vec::new());
            // Its answer may be lost with the link.
            while routing.is_up(peer) && routing.ask_one(peer, 0, &nothing, PROBE_WAIT).await.is_none() {}
            routing.ids.silent.lock().remove(&peer);
        });
    }

    /// Incarnations of the peers with a link.
    pub(super) fn linked(&self) -> Vec<u64> {
        self.peers.read().keys().copied().filter(|peer| self.is_up(*peer)).collect()
    }

    /// Incarnations of the peers with a link that are not left out of claims.
    pub(super) fn answering(&self) -> Vec<u64> {
        let mut linked = self.linked();
        let silent = self.ids.silent.lock();
        linked.retain(|peer| !silent.contains(peer));
        linked
    }

    /// Answers a peer's claim of ids: checks the publishes in progress here at once, and then looks up known ids.
    pub(super) fn ids_for_peer(
        &self,
        local: &Arc<dyn LocalNode>,
        from: u64,
        ids: Vec<ClientMessageIds>,
    ) -> NodeFuture<Option<PeerAnswer>> {
        let own = self.hub.incarnation();
        let (mut taken, mut looked_up, mut index) = (IdConflicts::new(), Vec::new(), 0);
        for ClientMessageIds { scope, ids } in ids {
            let shared = Arc::new(scope.clone());
            let (mut indices, mut unknown) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
            let mut claims = self.ids.claims.lock();
            for id in ids {
                let given = ScopedMessageId { scope: Arc::clone(&shared), id };
                if claims.is_under_way(&given, from, own) {
                    taken.push((index, IdConflict::UnderWay));
                } else {
                    indices.push(index);
                    unknown.push(given.id);
                }
                index += 1;
            }
            drop(claims);
            if !unknown.is_empty() {
                looked_up.push((indices, local.find_ids(scope, unknown)));
            }
        }
        Box::pin(async move {
            for (indices, found) in looked_up {
                // The peer goes on without this node.
                let Some(found) = found.await else { return Some(PeerAnswer::Unknown) };
                let known = indices.into_iter().zip(found);
                taken.extend(known.filter_map(|(index, stamp)| Some((index, IdConflict::Known(stamp?)))));
            }
            Some(PeerAnswer::ClaimedIds(taken))
        })
    }

    /// Remembers the ids under which a peer has published.
    pub(super) fn take_settled(&self, scope: IdScope, ids: StampedIds) {
        if let Some(local) = self.local.get() {
            local.keep_ids(scope, ids);
        }
    }
}
