//! Claims of several nodes for the same ids, whose messages arrive in any order.

use std::collections::{HashMap, VecDeque};

use super::*;
use crate::model::{AccountId, ChannelKey, ChannelName, ClientId};

type TestIdClaimQueue = super::IdClaimQueue<u32>;

fn scope(channel: &str) -> IdScope {
    let key = ChannelKey::new(AccountId::new("acme"), ChannelName::of(channel));
    IdScope { key, key_name: "k1".into(), client_id: None }
}

fn given(channel: &str, id: &str) -> Arc<ScopedMessageId> {
    Arc::new(ScopedMessageId { scope: Arc::new(scope(channel)), id: id.into() })
}

fn stamp(incarnation: u64, sequence: u64) -> Stamp {
    Stamp { incarnation, sequence }
}

fn push(claims: &mut TestIdClaimQueue, ids: &[&str], then: u32, until: Instant) -> bool {
    let ids = ids.iter().map(|id| given("room", id)).collect();
    claims.push(ClaimQueueKey::of(&scope("room")), ClusterIdClaim { ids, until, then }).is_ok()
}

fn round(claims: &mut TestIdClaimQueue, now: Instant) -> ClaimRound<u32> {
    match claims.next(now) {
        ClaimRoundStep::Ask(round) => round,
        ClaimRoundStep::Wait(_) | ClaimRoundStep::Nothing => panic!("nothing is to be asked for"),
    }
}

fn requested(round: &ClaimRound<u32>) -> Vec<String> {
    let ids = round.requested.request().into_iter().flatten().flat_map(|given| given.ids);
    ids.map(String::from).collect()
}

/// Ends a round with these answers of the peers, and returns the outcomes of its claims.
fn end(
    claims: &mut TestIdClaimQueue,
    round: ClaimRound<u32>,
    taken: IdConflicts,
    now: Instant,
) -> Vec<(u32, IdClaimOutcome)> {
    let mut peer_answers = ClaimAnswers::default();
    peer_answers.take(&round.requested, taken);
    let (outcomes, queues) = claims.settle(round, &peer_answers, now);
    claims.go_on(queues);
    outcomes
}

/// Returns the claims that hold ids and may publish.
fn claimed(outcomes: &[(u32, IdClaimOutcome)]) -> Vec<u32> {
    let held = |outcome: &IdClaimOutcome| matches!(outcome, IdClaimOutcome::Claimed { held, .. } if !held.is_empty());
    outcomes.iter().filter(|(_, outcome)| held(outcome)).map(|(then, _)| *then).collect()
}

fn late(now: Instant) -> Instant {
    now + Duration::from_secs(2)
}

#[test]
fn all_that_waits_is_asked_for_at_once_and_each_id_once() {
    let (mut claims, now) = (TestIdClaimQueue::default(), Instant::now());
    assert!(claims.is_free(&ClaimQueueKey::of(&scope("room"))));
    push(&mut claims, &["a", "b"], 1, late(now));
    push(&mut claims, &[], 2, late(now));
    push(&mut claims, &["b", "c"], 3, late(now));
    let first = round(&mut claims, now);
    assert_eq!(requested(&first), ["a", "b", "c"]);
    push(&mut claims, &["d"], 4, late(now));
    assert!(matches!(claims.next(now), ClaimRoundStep::Nothing), "its lane is asked for");
    let outcomes = end(&mut claims, first, vec![(0, IdConflict::Known(stamp(7, 5)))], now);
    let known = |at: usize| match &outcomes[at].1 {
        IdClaimOutcome::Claimed { known, .. } => known.clone(),
        IdClaimOutcome::Late => panic!("nobody is late"),
    };
    assert_eq!((known(0), known(1), known(2)), (vec![Some(stamp(7, 5)), None], vec![], vec![None, None]));
    let second = round(&mut claims, now);
    assert_eq!(requested(&second), ["d"]);
    end(&mut claims, second, Vec::new(), now);
    assert!(claims.is_free(&ClaimQueueKey::of(&scope("room"))));
}

#[test]
fn lower_of_two_claims_goes_on_and_the_higher_asks_again() {
    let (mut low, mut high, now) = (TestIdClaimQueue::default(), TestIdClaimQueue::default(), Instant::now());
    push(&mut low, &["x"], 1, late(now));
    push(&mut high, &["x"], 1, late(now));
    push(&mut high, &["y"], 2, late(now));
    let (of_low, of_high) = (round(&mut low, now), round(&mut high, now));
    assert!(low.is_under_way(&given("room", "x"), 2, 1), "the lower one says so");
    assert!(!high.is_under_way(&given("room", "x"), 1, 2), "the higher one gives way");
    assert_eq!(claimed(&end(&mut low, of_low, Vec::new(), now)), [1]);
    // The claim gives way even if no answer reports the other one.
    assert_eq!(claimed(&end(&mut high, of_high, Vec::new(), now)), [0; 0], "nor what comes after it");
    assert!(!high.is_under_way(&given("room", "x"), 3, 2), "who waits holds up nobody");
    assert!(matches!(high.next(now), ClaimRoundStep::Wait(at) if at > now));
    let again = round(&mut high, late(now));
    assert_eq!(requested(&again), ["x", "y"]);
    let outcomes = end(&mut high, again, vec![(0, IdConflict::Known(stamp(1, 9)))], now);
    assert_eq!((outcomes.len(), claimed(&outcomes)), (2, vec![2]));
}

#[test]
fn claim_answered_by_all_peers_is_kept_until_it_is_released() {
    let (mut claims, now) = (TestIdClaimQueue::default(), Instant::now());
    push(&mut claims, &["x"], 1, late(now));
    let first = round(&mut claims, now);
    let outcomes = end(&mut claims, first, Vec::new(), now);
    assert!(claims.is_under_way(&given("room", "x"), 1, 2));
    push(&mut claims, &["x"], 2, late(now));
    let second = round(&mut claims, now);
    assert_eq!(requested(&second), [""; 0], "it is this node's already");
    assert_eq!(claimed(&end(&mut claims, second, Vec::new(), now)), [2]);
    claims.release(&[given("room", "x")]);
    assert!(claims.is_under_way(&given("room", "x"), 1, 2), "the other has not ended");
    claims.release(&[given("room", "x")]);
    assert!(!claims.is_under_way(&given("room", "x"), 1, 2));
    assert_eq!(outcomes.len(), 1);
}

#[test]
fn claim_that_waits_too_long_for_another_ends_as_late() {
    let (mut claims, now) = (TestIdClaimQueue::default(), Instant::now());
    push(&mut claims, &["x"], 1, now);
    push(&mut claims, &["y"], 2, late(now));
    let first = round(&mut claims, now);
    let outcomes = end(&mut claims, first, vec![(0, IdConflict::UnderWay)], now);
    assert!(matches!(outcomes[0], (1, IdClaimOutcome::Late)), "{outcomes:?}");
    assert_eq!(claimed(&outcomes), [2], "what follows does not wait for it");
    assert!(!claims.is_under_way(&given("room", "x"), 1, 2));
}

#[test]
fn waiting_claims_are_bounded_per_client_and_in_total() {
    let (mut claims, now) = (TestIdClaimQueue::default(), Instant::now());
    let taken = (0..10_000).filter(|then| push(&mut claims, &[], *then, late(now))).count();
    assert_eq!(taken, 4_096, "of one lane");
    let queue_of = |client: u32| {
        let client_id = Some(ClientId::of(&format!("c{client}")));
        ClaimQueueKey::of(&IdScope { client_id, ..scope("room") })
    };
    let of_client =
        |client| claims.push(queue_of(client), ClusterIdClaim { ids: Vec::new(), until: now, then: 0 });
    let taken = (0..100_000).map(of_client).filter(Result::is_ok).count();
    assert_eq!(taken, 65_536 - 4_096, "of all");
}

/// One of several nodes that publish the same ids, each once for each of its publishers.
#[derive(Default)]
struct ClaimTestNode {
    claims: TestIdClaimQueue,
    round: Option<(ClaimRound<u32>, ClaimAnswers, usize)>,
    known: HashMap<String, Stamp>,
    outcomes: Vec<u32>,
}

#[derive(Debug)]
enum ClaimRaceEvent {
    Asked {
        by: usize,
        of: usize,
        ids: Vec<String>,
    },
    /// The node has checked its publishes in progress, and now looks up known ids.
    LookedUp {
        by: usize,
        of: usize,
        taken: IdConflicts,
        ids: Vec<(u32, String)>,
    },
    Answered {
        by: usize,
        taken: IdConflicts,
    },
    Ends {
        node: usize,
        id: String,
    },
    Settled {
        by: usize,
        of: usize,
        id: String,
        stamp: Stamp,
    },
}

struct ClaimRace {
    nodes: Vec<ClaimTestNode>,
    events: VecDeque<ClaimRaceEvent>,
    random: fastrand::Rng,
    now: Instant,
    published: HashMap<String, Vec<usize>>,
    failures: usize,
    /// Number of nodes to which a published id was not announced yet, by publisher and id.
    unsettled: HashMap<(usize, String), usize>,
}

impl ClaimRace {
    fn new(seed: u64) -> Self {
        Self {
            nodes: (0..3).map(|_| ClaimTestNode::default()).collect(),
            events: VecDeque::new(),
            random: fastrand::Rng::with_seed(seed),
            now: Instant::now(),
            published: HashMap::new(),
            failures: 3,
            unsettled: HashMap::new(),
        }
    }

    fn run(&mut self) {
        for _ in 0..100_000 {
            self.now += Duration::from_millis(self.random.u64(..4));
            let node = self.random.usize(..self.nodes.len());
            if self.random.bool() {
                self.ask(node);
            } else if let Some(event) = self.random_event() {
                self.happen(event);
            }
            let is_idle = |node: &ClaimTestNode| {
                node.round.is_none() && node.claims.is_free(&ClaimQueueKey::of(&scope("room")))
            };
            if self.events.is_empty() && self.nodes.iter().all(is_idle) {
                return;
            }
        }
        panic!("it does not end");
    }

    fn random_event(&mut self) -> Option<ClaimRaceEvent> {
        let at = self.random.usize(..self.events.len().max(1));
        self.events.swap_remove_back(at)
    }

    fn ask(&mut self, node: usize) {
        let others = (0..self.nodes.len()).filter(|other| *other != node);
        let ClaimTestNode { claims, round, .. } = &mut self.nodes[node];
        if round.is_some() {
            return;
        }
        if let ClaimRoundStep::Ask(next) = claims.next(self.now) {
            let ids = requested(&next);
            let answers = if ids.is_empty() { 0 } else { others.clone().count() };
            for other in others.take(answers) {
                self.events.push_back(ClaimRaceEvent::Asked { by: node, of: other, ids: ids.clone() });
            }
            *round = Some((next, ClaimAnswers::default(), answers));
            self.settle_if_answered(node);
        }
    }

    fn settle_if_answered(&mut self, node: usize) {
        let Some((round, peer_answers, 0)) = self.nodes[node].round.take_if(|round| round.2 == 0) else {
            return;
        };
        let (outcomes, queues) = self.nodes[node].claims.settle(round, &peer_answers, self.now);
        for (then, outcome) in outcomes {
            self.nodes[node].outcomes.push(then);
            let IdClaimOutcome::Claimed { held, .. } = outcome else { panic!("nobody is late") };
            for given in held {
                self.publish(node, given.id.to_string());
            }
        }
        self.nodes[node].claims.go_on(queues);
    }

    /// Publishes under an id that the node holds, after a last look into its own store.
    fn publish(&mut self, node: usize, id: String) {
        let is_known = self.nodes[node].known.contains_key(&id);
        let fails = !is_known && self.failures > 0 && self.random.bool();
        if is_known || fails {
            self.failures -= usize::from(fails);
            self.events.push_back(ClaimRaceEvent::Ends { node, id });
            return;
        }
        let publishers = self.published.entry(id.clone()).or_default();
        publishers.push(node);
        let stamp = stamp(node as u64, publishers.len() as u64);
        self.nodes[node].known.insert(id.clone(), stamp);
        let others: Vec<usize> = (0..self.nodes.len()).filter(|other| *other != node).collect();
        self.unsettled.insert((node, id.clone()), others.len());
        for of in others {
            self.events.push_back(ClaimRaceEvent::Settled { by: node, of, id: id.clone(), stamp });
        }
    }

    fn happen(&mut self, event: ClaimRaceEvent) {
        match event {
            ClaimRaceEvent::Asked { by, of, ids } => {
                let (mut taken, mut rest) = (IdConflicts::new(), Vec::new());
                for (index, id) in (0..).zip(ids) {
                    match self.nodes[of].claims.is_under_way(&given("room", &id), by as u64, of as u64) {
                        true => taken.push((index, IdConflict::UnderWay)),
                        false => rest.push((index, id)),
                    }
                }
                self.events.push_back(ClaimRaceEvent::LookedUp { by, of, taken, ids: rest });
            }
            ClaimRaceEvent::LookedUp { by, of, mut taken, ids } => {
                let known = &self.nodes[of].known;
                let found = |(index, id): (u32, String)| Some((index, IdConflict::Known(*known.get(&id)?)));
                taken.extend(ids.into_iter().filter_map(found));
                self.events.push_back(ClaimRaceEvent::Answered { by, taken });
            }
            ClaimRaceEvent::Answered { by, taken } => {
                if let Some((round, peer_answers, answers)) = &mut self.nodes[by].round {
                    peer_answers.take(&round.requested, taken);
                    *answers -= 1;
                }
                self.settle_if_answered(by);
            }
            ClaimRaceEvent::Settled { by, of, id, stamp } => {
                self.nodes[of].known.insert(id.clone(), stamp);
                let unsettled = self.unsettled.get_mut(&(by, id.clone())).expect("it was published");
                *unsettled -= 1;
                if *unsettled == 0 {
                    self.events.push_back(ClaimRaceEvent::Ends { node: by, id });
                }
            }
            ClaimRaceEvent::Ends { node, id } => self.nodes[node].claims.release(&[given("room", &id)]),
        }
    }
}

#[test]
fn claims_in_any_order_publish_each_id_once_and_keep_order() {
    const CLAIMS: u32 = 12;
    for seed in 0..400 {
        let mut race = ClaimRace::new(seed);
        for node in 0..race.nodes.len() {
            let until = race.now + Duration::from_secs(3_600);
            for then in 0..CLAIMS {
                let ids: Vec<String> =
                    (0..race.random.u32(..3)).map(|more| format!("{}", (then + more) % 5)).collect();
                let mut ids: Vec<&str> = ids.iter().map(String::as_str).collect();
                ids.dedup();
                assert!(push(&mut race.nodes[node].claims, &ids, then, until));
            }
        }
        race.run();
        for (id, publishers) in &race.published {
            assert_eq!(publishers.len(), 1, "seed {seed}: {id} was published by {publishers:?}");
        }
        for node in &race.nodes {
            assert!(node.outcomes.iter().copied().eq(0..CLAIMS), "seed {seed}: {:?}", node.outcomes);
            assert!(node.claims.is_empty(), "seed {seed}: something is claimed for ever");
        }
    }
}
