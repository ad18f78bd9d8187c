//! Message ids that this node claims, in the order of their publishers. No I/O; the time is passed in.
//!
//! A node claims an id by asking all other nodes. If a node with a lower incarnation claims the id meanwhile, that node has precedence,
//! and this one asks again a little later. Once all have answered, the id is held by this node until the publish under it has ended.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cluster::inbound::{IdConflict, IdConflicts};
use crate::model::{ChannelKey, ClientId, ClientMessageIds, IdScope, Stamp};

/// Most waiting claims in all queues, and most ids that this node holds; beyond either, a further claim is refused.
const CLAIMS_MAX: usize = 65_536;
const IDS_MAX: usize = 262_144;
/// Most waiting claims in one queue.
const QUEUE_MAX: usize = 4_096;
/// Most ids of one round, and most bytes of them. A single claim may exceed both.
const ASKED_MAX: usize = 4_096;
const ASKED_BYTES_MAX: usize = 256 * 1024;
/// Time after which an id that is in progress at another node is asked for again.
const AGAIN: Duration = Duration::from_millis(20);

/// Stamps of the messages that were published under the ids of a claim, in the order of the ids.
pub(super) type KnownStamps = Vec<Option<Stamp>>;

#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct ScopedMessageId {
    pub(super) scope: Arc<IdScope>,
    pub(super) id: Box<str>,
}

/// Key of a queue, in which claims are settled in order. It is wider than a scope, since a connection may change its API key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct ClaimQueueKey {
    key: ChannelKey,
    client_id: Option<ClientId>,
}

impl ClaimQueueKey {
    pub(super) fn of(scope: &IdScope) -> Self {
        Self { key: scope.key.clone(), client_id: scope.client_id.clone() }
    }
}

/// Ids of one publish; none for a publish that only keeps its order.
pub(super) struct ClusterIdClaim<T> {
    pub(super) ids: Vec<Arc<ScopedMessageId>>,
    pub(super) until: Instant,
    pub(super) then: T,
}

/// Claims that are asked for together.
pub(super) struct ClaimRound<T> {
    /// Claims of each queue, in its order.
    queues: Vec<(ClaimQueueKey, Vec<ClusterIdClaim<T>>)>,
    pub(super) requested: RequestedIds,
}

/// Ids that are asked for, each once.
#[derive(Default)]
pub(super) struct RequestedIds(Vec<Arc<ScopedMessageId>>);

impl RequestedIds {
    /// Builds the request for the ids. None if there are no ids.
    pub(super) fn request(&self) -> Option<Vec<ClientMessageIds>> {
        let mut request: Vec<ClientMessageIds> = Vec::new();
        for given in &self.0 {
            match request.last_mut().filter(|last| last.scope == *given.scope) {
                Some(last) => last.ids.push(given.id.clone()),
                None => {
                    let scope = IdScope::clone(&given.scope);
                    request.push(ClientMessageIds { scope, ids: vec![given.id.clone()] });
                }
            }
        }
        (!request.is_empty()).then_some(request)
    }
}

/// Answers of the peers about the ids of a round.
#[derive(Default)]
pub(super) struct ClaimAnswers(HashMap<Arc<ScopedMessageId>, IdConflict>);

impl ClaimAnswers {
    pub(super) fn take(&mut self, requested: &RequestedIds, taken: IdConflicts) {
        for (index, taken) in taken {
            let Some(given) = requested.0.get(index as usize) else { continue };
            // An id that one node knows as published is no longer in progress at another.
            if !matches!(self.0.get(given), Some(IdConflict::Known(_))) {
                self.0.insert(Arc::clone(given), taken);
            }
        }
    }
}

/// Outcome of a claim. This node holds the free ids until they are released.
#[derive(Debug)]
pub(super) enum IdClaimOutcome {
    Claimed { held: Vec<Arc<ScopedMessageId>>, known: KnownStamps },
    Late,
}

#[derive(Default)]
struct HeldIdState {
    count: usize,
    /// True once all reachable peers have been asked.
    is_ours: bool,
    /// True if a node with a lower incarnation claims the id, too.
    gives_way: bool,
}

/// Next step of the task that runs the rounds.
pub(super) enum ClaimRoundStep<T> {
    Ask(ClaimRound<T>),
    /// No round may begin before this time.
    Wait(Instant),
    Nothing,
}

pub(super) struct IdClaimQueue<T> {
    /// Waiting claims, also of queues that take part in the current round.
    queues: HashMap<ClaimQueueKey, VecDeque<ClusterIdClaim<T>>>,
    /// Queues whose claims may take part in the next round.
    ready: VecDeque<ClaimQueueKey>,
    later: VecDeque<(Instant, ClaimQueueKey)>,
    ids: HashMap<Arc<ScopedMessageId>, HeldIdState>,
    count: usize,
    /// True while a task runs the rounds.
    has_task: bool,
}

impl<T> Default for IdClaimQueue<T> {
    fn default() -> Self {
        Self {
            queues: HashMap::new(),
            ready: VecDeque::new(),
            later: VecDeque::new(),
            ids: HashMap::new(),
            count: 0,
            has_task: false,
        }
    }
}

impl<T> IdClaimQueue<T> {
    /// True if no claim of the queue waits or takes part in a round.
    pub(super) fn is_free(&self, queue: &ClaimQueueKey) -> bool {
        !self.queues.contains_key(queue)
    }

    /// Adds a claim. True if the caller must start the task that runs the rounds. Gives the claim back if a bound is reached.
    pub(super) fn push(
        &mut self,
        queue: ClaimQueueKey,
        claim: ClusterIdClaim<T>,
    ) -> Result<bool, ClusterIdClaim<T>> {
        let in_queue = self.queues.get(&queue).map_or(0, VecDeque::len);
        if in_queue >= QUEUE_MAX || self.count >= CLAIMS_MAX || self.ids.len() >= IDS_MAX {
            return Err(claim);
        }
        self.count += 1;
        match self.queues.entry(queue) {
            Entry::Occupied(mut waiting) => waiting.get_mut().push_back(claim),
            Entry::Vacant(vacant) => {
                self.ready.push_back(vacant.key().clone());
                vacant.insert(VecDeque::from([claim]));
            }
        }
        Ok(!std::mem::replace(&mut self.has_task, true))
    }

    /// Returns the next step. The task that runs the rounds ends with `Nothing`.
    pub(super) fn next(&mut self, now: Instant) -> ClaimRoundStep<T> {
        while self.later.front().is_some_and(|(at, _)| *at <= now) {
            self.ready.extend(self.later.pop_front().map(|(_, queue)| queue));
        }
        if self.ready.is_empty() {
            self.has_task = !self.later.is_empty();
            return self.later.front().map_or(ClaimRoundStep::Nothing, |(at, _)| ClaimRoundStep::Wait(*at));
        }
        let mut round = ClaimRound { queues: Vec::new(), requested: RequestedIds::default() };
        let mut bytes = 0;
        while round.requested.0.len() < ASKED_MAX && bytes < ASKED_BYTES_MAX {
            let Some(queue) = self.ready.pop_front() else { break };
            let Some(waiting) = self.queues.get_mut(&queue) else { continue };
            let mut claims = Vec::new();
            while round.requested.0.len() < ASKED_MAX && bytes < ASKED_BYTES_MAX {
                let Some(claim) = waiting.pop_front() else { break };
                for given in &claim.ids {
                    let held = self.ids.entry(Arc::clone(given)).or_default();
                    held.count += 1;
                    if held.count == 1 {
                        bytes += given.id.len();
                        round.requested.0.push(Arc::clone(given));
                    }
                }
                claims.push(claim);
            }
            round.queues.push((queue, claims));
        }
        ClaimRoundStep::Ask(round)
    }

    /// Returns the outcomes of a round's claims, in order, and the queues that are done. If a claim must be asked for again, it and the
    /// later claims of its queue wait, and the queue is not returned.
    pub(super) fn settle(
        &mut self,
        round: ClaimRound<T>,
        answers: &ClaimAnswers,
        now: Instant,
    ) -> (Vec<(T, IdClaimOutcome)>, Vec<ClaimQueueKey>) {
        let (mut outcomes, mut queues) = (Vec::new(), Vec::with_capacity(round.queues.len()));
        for (queue, claims) in round.queues {
            let mut claims = VecDeque::from(claims);
            while let Some(claim) = claims.pop_front() {
                let is_taken = claim.ids.iter().any(|given| self.is_taken(given, answers));
                if is_taken && now + AGAIN < claim.until {
                    claims.push_front(claim);
                    break;
                }
                self.count -= 1;
                let outcome = if is_taken {
                    self.release(&claim.ids);
                    IdClaimOutcome::Late
                } else {
                    self.claimed(claim.ids, answers)
                };
                outcomes.push((claim.then, outcome));
            }
            match claims.is_empty() {
                true => queues.push(queue),
                false => self.put_back(queue, claims, now + AGAIN),
            }
        }
        (outcomes, queues)
    }

    fn is_taken(&self, given: &ScopedMessageId, answers: &ClaimAnswers) -> bool {
        let is_ours = |held: &HeldIdState| held.is_ours;
        match answers.0.get(given) {
            Some(IdConflict::Known(_)) => false,
            _ if self.ids.get(given).is_some_and(is_ours) => false,
            Some(IdConflict::UnderWay) => true,
            None => self.ids.get(given).is_some_and(|held| held.gives_way),
        }
    }

    fn claimed(&mut self, ids: Vec<Arc<ScopedMessageId>>, answers: &ClaimAnswers) -> IdClaimOutcome {
        let mut known = Vec::with_capacity(ids.len());
        let mut held = Vec::with_capacity(ids.len());
        for given in ids {
            match answers.0.get(&given) {
                Some(IdConflict::Known(stamp)) => {
                    known.push(Some(*stamp));
                    self.release(&[given]);
                }
                _ => {
                    known.push(None);
                    self.ids.entry(Arc::clone(&given)).or_default().is_ours = true;
                    held.push(given);
                }
            }
        }
        IdClaimOutcome::Claimed { held, known }
    }

    fn put_back(&mut self, queue: ClaimQueueKey, claims: VecDeque<ClusterIdClaim<T>>, at: Instant) {
        claims.iter().for_each(|claim| self.release(&claim.ids));
        let Some(waiting) = self.queues.get_mut(&queue) else { return };
        for claim in claims.into_iter().rev() {
            waiting.push_front(claim);
        }
        self.later.push_back((at, queue));
    }

    /// Lets the next claims of these queues take part in rounds. Called once the outcomes are delivered.
    pub(super) fn go_on(&mut self, queues: Vec<ClaimQueueKey>) {
        for queue in queues {
            if self.queues.get(&queue).is_some_and(VecDeque::is_empty) {
                self.queues.remove(&queue);
            } else {
                self.ready.push_back(queue);
            }
        }
    }

    /// Releases ids whose publish has ended or was not made.
    pub(super) fn release(&mut self, ids: &[Arc<ScopedMessageId>]) {
        for given in ids {
            if let Entry::Occupied(mut held) = self.ids.entry(Arc::clone(given)) {
                held.get_mut().count -= 1;
                if held.get().count == 0 {
                    held.remove();
                }
            }
        }
    }

    /// Takes the claim of an id by another node. True if the id is in progress here and this node keeps it.
    pub(super) fn is_under_way(&mut self, given: &ScopedMessageId, by: u64, own: u64) -> bool {
        let Some(held) = self.ids.get_mut(given) else { return false };
        held.gives_way |= by < own;
        held.is_ours || by > own
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.queues.is_empty() && self.ids.is_empty() && self.count == 0
    }
}
