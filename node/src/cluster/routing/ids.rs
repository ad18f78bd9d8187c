//! Message ids that clients give are claimed on every node that can be reached, where the store is that of one node. Who publishes
//! does not wait for a node that does not answer: then a message may be published twice.

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

use super::super::inbound::{Answer, Request, Taken, TakenIds};
use super::Routing;
use super::ask::{Later, Local};
use crate::model::{GivenIds, IdScope, Stamp, StampedIds};
use crate::tasks::OnStop;
use crate::telemetry::OFTEN;
use claims::{Asked, Claim, Claims, GivenId, Lane, Next, Outcome, Round, Said};

/// A node that has not answered by then is left out, and not waited for again before it has answered something.
const CLAIM_WAIT: Duration = Duration::from_millis(700);
/// What a node gets for an answer that nobody waits for.
const PROBE_WAIT: Duration = Duration::from_secs(5);

/// Called once, in the order of the claims of one channel and clientId.
pub type OnClaimed = Box<dyn FnOnce(Result<ClaimedIds, NotClaimed>) + Send>;

/// The ids that are not known stay claimed until this is dropped.
#[derive(Default)]
pub struct ClaimedIds {
    /// What each was published as, where it was. Empty when nobody was asked.
    pub known: Vec<Option<Stamp>>,
    _held: Option<Held>,
}

struct Held {
    routing: Arc<Routing>,
    ids: Vec<Arc<GivenId>>,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.routing.ids.claims.lock().release(&self.ids);
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotClaimed {
    /// Too many claims wait.
    Busy,
    /// Another node publishes under one of the ids, and has not ended in time.
    Late,
}

pub(super) struct Ids {
    claims: Mutex<Claims<OnClaimed>>,
    changed: Notify,
    silent: Mutex<HashSet<u64>>,
    asked: metrics::Counter,
    left_out: metrics::Counter,
}

impl Default for Ids {
    fn default() -> Self {
        Self {
            claims: Mutex::default(),
            changed: Notify::new(),
            silent: Mutex::default(),
            asked: metrics::counter!("fanfare_id_claims_sent_total"),
            left_out: metrics::counter!("fanfare_id_claims_unanswered_total"),
        }
    }
}

impl Routing {
    /// Claims ids for one publish, none for one that only keeps its place. At once, on this thread, where there is nobody to ask
    /// and nothing before it.
    pub fn claim_ids(&self, scope: IdScope, ids: &[Box<str>], until: Instant, then: OnClaimed) {
        let lane = Lane::of(&scope);
        let is_asked = !ids.is_empty() && !self.linked().is_empty();
        let mut claims = self.ids.claims.lock();
        if !is_asked && claims.is_free(&lane) {
            drop(claims);
            return then(Ok(ClaimedIds::default()));
        }
        let scope = Arc::new(scope);
        let given = ids.iter().map(|id| Arc::new(GivenId { scope: Arc::clone(&scope), id: id.clone() }));
        let claim = Claim { ids: given.collect(), until, then };
        let pushed = claims.push(lane, claim);
        drop(claims);
        match (pushed, self.this.upgrade()) {
            (Ok(true), Some(routing)) => self.tasks.spawn("ids", OnStop::Cancel, routing.ask_for_ids()),
            (Ok(_), _) => self.ids.changed.notify_one(),
            (Err(claim), _) => (claim.then)(Err(NotClaimed::Busy)),
        }
    }

    /// Round after round, each for all that has come meanwhile, until nothing waits.
    async fn ask_for_ids(self: Arc<Self>) {
        loop {
            let next = self.ids.claims.lock().next(Instant::now());
            match next {
                Next::Ask(round) => self.ask_round(round).await,
                Next::Wait(until) => {
                    tokio::time::timeout_at(until, self.ids.changed.notified()).await.ok();
                }
                Next::Nothing => return,
            }
        }
    }

    async fn ask_round(self: &Arc<Self>, round: Round<OnClaimed>) {
        let said = self.ask_all(&round.asked).await;
        let (outcomes, lanes) = self.ids.claims.lock().settle(round, &said, Instant::now());
        for (then, outcome) in outcomes {
            let claimed = match outcome {
                Outcome::Claimed { held, known } => {
                    let held = (!held.is_empty()).then(|| Held { routing: Arc::clone(self), ids: held });
                    Ok(ClaimedIds { known, _held: held })
                }
                Outcome::Late => Err(NotClaimed::Late),
            };
            if catch_unwind(AssertUnwindSafe(|| then(claimed))).is_err() {
                tracing::error!("what follows a claim of ids panicked");
            }
        }
        self.ids.claims.lock().go_on(lanes);
    }

    async fn ask_all(&self, asked: &Asked) -> Said {
        let mut said = Said::default();
        let Some(request) = asked.request() else { return said };
        let mut waiting = self.answering();
        self.ids.asked.increment(waiting.len() as u64);
        let mut answers = self.ask(waiting.clone(), 0, &Request::ClaimIds(request));
        let all = async {
            while let Some((from, answer)) = answers.next_of().await {
                waiting.retain(|peer| *peer != from);
                match answer {
                    Answer::ClaimedIds(taken) => said.take(asked, taken),
                    // It has too much to do, and is not waited for.
                    _ => self.ids.left_out.increment(1),
                }
            }
            waiting.clear();
        };
        if tokio::time::timeout(CLAIM_WAIT, all).await.is_err() {
            drop(answers);
            waiting.into_iter().filter(|peer| self.is_up(*peer)).for_each(|peer| self.leave_out(peer));
        }
        said
    }

    /// The peer is not waited for until it answers.
    fn leave_out(&self, peer: u64) {
        self.ids.left_out.increment(1);
        let node = self.leaving.name_of(peer);
        tracing::warn!(target: OFTEN,
            node = node.as_deref(),
            "a node did not say in time which message ids it knows, and is left out until it answers"
        );
        let Some(routing) = self.this.upgrade().filter(|_| self.ids.silent.lock().insert(peer)) else {
            return;
        };
        self.tasks.spawn("ids", OnStop::Cancel, async move {
            let nothing = Request::ClaimIds(Vec::new());
            // Its answer may be lost with the link.
            while routing.is_up(peer) && routing.ask_one(peer, 0, &nothing, PROBE_WAIT).await.is_none() {}
            routing.ids.silent.lock().remove(&peer);
        });
    }

    /// Those that can be sent to.
    pub(super) fn linked(&self) -> Vec<u64> {
        self.peers.read().keys().copied().filter(|peer| self.is_up(*peer)).collect()
    }

    /// The same without those that are left out.
    pub(super) fn answering(&self) -> Vec<u64> {
        let mut linked = self.linked();
        let silent = self.ids.silent.lock();
        linked.retain(|peer| !silent.contains(peer));
        linked
    }

    /// A peer claims ids. What is under way here is said at once, then what is known.
    pub(super) fn ids_for_peer(
        &self,
        local: &Arc<dyn Local>,
        from: u64,
        ids: Vec<GivenIds>,
    ) -> Later<Option<Answer>> {
        let own = self.hub.incarnation();
        let (mut taken, mut looked_up, mut place) = (TakenIds::new(), Vec::new(), 0);
        for GivenIds { scope, ids } in ids {
            let shared = Arc::new(scope.clone());
            let (mut places, mut unknown) = (Vec::with_capacity(ids.len()), Vec::with_capacity(ids.len()));
            let mut claims = self.ids.claims.lock();
            for id in ids {
                let given = GivenId { scope: Arc::clone(&shared), id };
                if claims.is_under_way(&given, from, own) {
                    taken.push((place, Taken::UnderWay));
                } else {
                    places.push(place);
                    unknown.push(given.id);
                }
                place += 1;
            }
            drop(claims);
            if !unknown.is_empty() {
                looked_up.push((places, local.find_ids(scope, unknown)));
            }
        }
        Box::pin(async move {
            for (places, found) in looked_up {
                // Whoever asks goes on without this node.
                let Some(found) = found.await else { return Some(Answer::Unknown) };
                let known = places.into_iter().zip(found);
                taken.extend(known.filter_map(|(place, stamp)| Some((place, Taken::Known(stamp?)))));
            }
            Some(Answer::ClaimedIds(taken))
        })
    }

    /// Published by a peer.
    pub(super) fn take_settled(&self, scope: IdScope, ids: StampedIds) {
        if let Some(local) = self.local.get() {
            local.keep_ids(scope, ids);
        }
    }
}
