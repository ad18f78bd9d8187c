//! The ids that this node claims, in the order of their publishers. No I/O; the time is handed in.
//!
//! An id is claimed by asking all other nodes. While that is so, a node with a lower incarnation that claims it too has it, and
//! this one asks again a little later. Once all have answered it is this node's until what is published under it has ended.

use std::collections::VecDeque;
use std::collections::hash_map::{Entry, HashMap};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use crate::cluster::inbound::{Taken, TakenIds};
use crate::model::{ChannelKey, ClientId, GivenIds, IdScope, Stamp};

/// Claims that wait, over all lanes, and ids that are this node's; beyond either a further claim is refused.
const CLAIMS_MAX: usize = 65_536;
const IDS_MAX: usize = 262_144;
/// Claims that wait in one lane.
const LANE_MAX: usize = 4_096;
/// Ids that are asked for at once, and their bytes; more only of one claim.
const ASKED_MAX: usize = 4_096;
const ASKED_BYTES_MAX: usize = 256 * 1024;
/// An id that is under way at another node is asked for again after this.
const AGAIN: Duration = Duration::from_millis(20);

/// What the ids of a claim were published as, in their order, where they were.
pub(super) type Known = Vec<Option<Stamp>>;

#[derive(Debug, PartialEq, Eq, Hash)]
pub(super) struct GivenId {
    pub(super) scope: Arc<IdScope>,
    pub(super) id: Box<str>,
}

/// Within which claims are settled in order: wider than a scope, since a connection may change its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(super) struct Lane {
    key: ChannelKey,
    client_id: Option<ClientId>,
}

impl Lane {
    pub(super) fn of(scope: &IdScope) -> Self {
        Self { key: scope.key.clone(), client_id: scope.client_id.clone() }
    }
}

/// The ids of one publish, none where it only keeps its place.
pub(super) struct Claim<T> {
    pub(super) ids: Vec<Arc<GivenId>>,
    pub(super) until: Instant,
    pub(super) then: T,
}

/// Claims that are asked for together.
pub(super) struct Round<T> {
    /// In the order of each lane.
    lanes: Vec<(Lane, Vec<Claim<T>>)>,
    pub(super) asked: Asked,
}

/// Ids that are asked for, each once.
#[derive(Default)]
pub(super) struct Asked(Vec<Arc<GivenId>>);

impl Asked {
    /// None when there are none.
    pub(super) fn request(&self) -> Option<Vec<GivenIds>> {
        let mut request: Vec<GivenIds> = Vec::new();
        for given in &self.0 {
            match request.last_mut().filter(|last| last.scope == *given.scope) {
                Some(last) => last.ids.push(given.id.clone()),
                None => {
                    let scope = IdScope::clone(&given.scope);
                    request.push(GivenIds { scope, ids: vec![given.id.clone()] });
                }
            }
        }
        (!request.is_empty()).then_some(request)
    }
}

/// What nodes have said of the ids of a round.
#[derive(Default)]
pub(super) struct Said(HashMap<Arc<GivenId>, Taken>);

impl Said {
    pub(super) fn take(&mut self, asked: &Asked, taken: TakenIds) {
        for (place, taken) in taken {
            let Some(given) = asked.0.get(place as usize) else { continue };
            // Where it was published it is not under way any more.
            if !matches!(self.0.get(given), Some(Taken::Known(_))) {
                self.0.insert(Arc::clone(given), taken);
            }
        }
    }
}

/// What came of a claim. The ids that are free are this node's until they are released.
#[derive(Debug)]
pub(super) enum Outcome {
    Claimed { held: Vec<Arc<GivenId>>, known: Known },
    Late,
}

#[derive(Default)]
struct Held {
    count: usize,
    /// All that could be asked have been.
    is_ours: bool,
    /// A node that goes first claims it, too.
    gives_way: bool,
}

/// What is to be done next.
pub(super) enum Next<T> {
    Ask(Round<T>),
    /// Nothing before then.
    Wait(Instant),
    Nothing,
}

pub(super) struct Claims<T> {
    /// Those that wait, also of lanes that are in the round.
    lanes: HashMap<Lane, VecDeque<Claim<T>>>,
    /// Lanes whose claims may be asked for.
    ready: VecDeque<Lane>,
    later: VecDeque<(Instant, Lane)>,
    ids: HashMap<Arc<GivenId>, Held>,
    count: usize,
    /// Somebody asks for what comes.
    is_asked_for: bool,
}

impl<T> Default for Claims<T> {
    fn default() -> Self {
        Self {
            lanes: HashMap::new(),
            ready: VecDeque::new(),
            later: VecDeque::new(),
            ids: HashMap::new(),
            count: 0,
            is_asked_for: false,
        }
    }
}

impl<T> Claims<T> {
    /// Nothing of the lane is under way.
    pub(super) fn is_free(&self, lane: &Lane) -> bool {
        !self.lanes.contains_key(lane)
    }

    /// True when somebody is to begin to ask. Gives the claim back when there is no room for it.
    pub(super) fn push(&mut self, lane: Lane, claim: Claim<T>) -> Result<bool, Claim<T>> {
        let in_lane = self.lanes.get(&lane).map_or(0, VecDeque::len);
        if in_lane >= LANE_MAX || self.count >= CLAIMS_MAX || self.ids.len() >= IDS_MAX {
            return Err(claim);
        }
        self.count += 1;
        match self.lanes.entry(lane) {
            Entry::Occupied(mut waiting) => waiting.get_mut().push_back(claim),
            Entry::Vacant(vacant) => {
                self.ready.push_back(vacant.key().clone());
                vacant.insert(VecDeque::from([claim]));
            }
        }
        Ok(!std::mem::replace(&mut self.is_asked_for, true))
    }

    /// Whoever asks ends with `Nothing`.
    pub(super) fn next(&mut self, now: Instant) -> Next<T> {
        while self.later.front().is_some_and(|(at, _)| *at <= now) {
            self.ready.extend(self.later.pop_front().map(|(_, lane)| lane));
        }
        if self.ready.is_empty() {
            self.is_asked_for = !self.later.is_empty();
            return self.later.front().map_or(Next::Nothing, |(at, _)| Next::Wait(*at));
        }
        let mut round = Round { lanes: Vec::new(), asked: Asked::default() };
        let mut bytes = 0;
        while round.asked.0.len() < ASKED_MAX && bytes < ASKED_BYTES_MAX {
            let Some(lane) = self.ready.pop_front() else { break };
            let Some(waiting) = self.lanes.get_mut(&lane) else { continue };
            let mut claims = Vec::new();
            while round.asked.0.len() < ASKED_MAX && bytes < ASKED_BYTES_MAX {
                let Some(claim) = waiting.pop_front() else { break };
                for given in &claim.ids {
                    let held = self.ids.entry(Arc::clone(given)).or_default();
                    held.count += 1;
                    if held.count == 1 {
                        bytes += given.id.len();
                        round.asked.0.push(Arc::clone(given));
                    }
                }
                claims.push(claim);
            }
            round.lanes.push((lane, claims));
        }
        Next::Ask(round)
    }

    /// What has come of the claims of a round, in order, and its lanes. From one on that is to be asked for again those of a lane
    /// wait, and the lane is not among them.
    pub(super) fn settle(
        &mut self,
        round: Round<T>,
        said: &Said,
        now: Instant,
    ) -> (Vec<(T, Outcome)>, Vec<Lane>) {
        let (mut outcomes, mut lanes) = (Vec::new(), Vec::with_capacity(round.lanes.len()));
        for (lane, claims) in round.lanes {
            let mut claims = VecDeque::from(claims);
            while let Some(claim) = claims.pop_front() {
                let is_taken = claim.ids.iter().any(|given| self.is_taken(given, said));
                if is_taken && now + AGAIN < claim.until {
                    claims.push_front(claim);
                    break;
                }
                self.count -= 1;
                let outcome = if is_taken {
                    self.release(&claim.ids);
                    Outcome::Late
                } else {
                    self.claimed(claim.ids, said)
                };
                outcomes.push((claim.then, outcome));
            }
            match claims.is_empty() {
                true => lanes.push(lane),
                false => self.put_back(lane, claims, now + AGAIN),
            }
        }
        (outcomes, lanes)
    }

    fn is_taken(&self, given: &GivenId, said: &Said) -> bool {
        let is_ours = |held: &Held| held.is_ours;
        match said.0.get(given) {
            Some(Taken::Known(_)) => false,
            _ if self.ids.get(given).is_some_and(is_ours) => false,
            Some(Taken::UnderWay) => true,
            None => self.ids.get(given).is_some_and(|held| held.gives_way),
        }
    }

    fn claimed(&mut self, ids: Vec<Arc<GivenId>>, said: &Said) -> Outcome {
        let mut known = Vec::with_capacity(ids.len());
        let mut held = Vec::with_capacity(ids.len());
        for given in ids {
            match said.0.get(&given) {
                Some(Taken::Known(stamp)) => {
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
        Outcome::Claimed { held, known }
    }

    fn put_back(&mut self, lane: Lane, claims: VecDeque<Claim<T>>, at: Instant) {
        claims.iter().for_each(|claim| self.release(&claim.ids));
        let Some(waiting) = self.lanes.get_mut(&lane) else { return };
        for claim in claims.into_iter().rev() {
            waiting.push_front(claim);
        }
        self.later.push_back((at, lane));
    }

    /// The outcomes of these lanes have been told: what follows them may go on.
    pub(super) fn go_on(&mut self, lanes: Vec<Lane>) {
        for lane in lanes {
            if self.lanes.get(&lane).is_some_and(VecDeque::is_empty) {
                self.lanes.remove(&lane);
            } else {
                self.ready.push_back(lane);
            }
        }
    }

    /// What was published under them has ended, or nothing was.
    pub(super) fn release(&mut self, ids: &[Arc<GivenId>]) {
        for given in ids {
            if let Entry::Occupied(mut held) = self.ids.entry(Arc::clone(given)) {
                held.get_mut().count -= 1;
                if held.get().count == 0 {
                    held.remove();
                }
            }
        }
    }

    /// Another node claims an id: true when it is under way here and stays so.
    pub(super) fn is_under_way(&mut self, given: &GivenId, by: u64, own: u64) -> bool {
        let Some(held) = self.ids.get_mut(given) else { return false };
        held.gives_way |= by < own;
        held.is_ours || by > own
    }

    #[cfg(test)]
    pub(super) fn is_empty(&self) -> bool {
        self.lanes.is_empty() && self.ids.is_empty() && self.count == 0
    }
}
