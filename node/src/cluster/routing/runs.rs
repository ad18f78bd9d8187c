//! Runs of other nodes, and the connections that go from one to another.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;
use crate::cluster::inbound::{ConnectionSaid, EndedRun, Interest};
use crate::cluster::link::Item;
use crate::model::{ConnectionId, NotOpen, Over, Run, SEATS_SETTLE, TakenUp, Tenure};
use crate::tasks::OnStop;

/// Runs that ended; beyond it the earliest is forgotten, and with it the way back of its connections.
const ENDED_MAX: usize = 1024;
/// Nobody comes back to what ended longer ago.
const TOLD_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Connections that wait for this; a further one is looked at when it comes, and may be asked to come back once too often.
pub(super) const SEATS_MAX: usize = 16_384;

/// The connections of this node, as far as other nodes take them up or have had them.
pub trait Connections: Send + Sync + 'static {
    /// Another node has taken a connection up. What there is to say to that, if it was here.
    fn taken_elsewhere(&self, taken: &TakenUp) -> Option<NotOpen>;

    /// A connection has ended for good on another node.
    fn over_elsewhere(&self, over: &Over);

    /// What was taken up here took nobody's place: it stays if there is a seat for it. The run that has it now is to be told, if
    /// it is another one.
    fn not_open(&self, not_open: NotOpen) -> Option<(u64, NotOpen)>;
}

/// Which runs are alive, and since when those are not that were.
#[derive(Debug, Default)]
pub(super) struct Runs {
    alive: Vec<u64>,
    seen: HashMap<u64, Seen>,
    /// Those that had ended before this one began or were never heard here, as others say, and when.
    told: HashMap<u64, Instant>,
    /// Those of the latter that this one noticed before any other has told of them, maybe when it began.
    noticed: HashSet<u64>,
    /// Those of both that have said goodbye.
    left: HashSet<u64>,
}

#[derive(Debug)]
struct Seen {
    /// When it was alive for the first time.
    begun: Instant,
    ended: Option<Instant>,
}

impl Runs {
    /// Gives those that were until now.
    pub(super) fn are_alive(&mut self, alive: &[u64], now: Instant) -> Vec<u64> {
        let mut ended = std::mem::replace(&mut self.alive, alive.to_vec());
        ended.retain(|run| !alive.contains(run));
        for run in &ended {
            if let Some(seen) = self.seen.get_mut(run) {
                seen.ended = Some(now);
            }
        }
        for run in alive {
            self.told.remove(run);
            self.noticed.remove(run);
            self.seen.entry(*run).or_insert(Seen { begun: now, ended: None }).ended = None;
        }
        let since = |(run, seen): (&u64, &Seen)| Some((seen.ended?, *run));
        while self.seen.len() > self.alive.len() + ENDED_MAX
            && let Some((_, first)) = self.seen.iter().filter_map(since).min()
        {
            self.seen.remove(&first);
            self.left.remove(&first);
        }
        ended
    }

    pub(super) fn alive(&self) -> impl Iterator<Item = u64> {
        self.alive.iter().copied()
    }

    fn ended(&self, run: u64) -> Option<Instant> {
        self.seen.get(&run)?.ended
    }

    /// It was alive and is not, or others say so.
    pub(super) fn has_ended(&self, run: u64) -> bool {
        self.ended(run).is_some() || self.told.contains_key(&run)
    }

    /// All that have ended, also those that were only told of.
    fn all_ended(&self, now: Instant) -> Vec<EndedRun> {
        let seen = self.seen.iter().filter_map(|(run, seen)| Some((*run, seen.ended?)));
        let told = self.told.iter().map(|(run, since)| (*run, *since));
        let ago = |since| now.saturating_duration_since(since).as_millis();
        let ended = |(incarnation, since)| EndedRun {
            incarnation,
            ago_ms: u64::try_from(ago(since)).unwrap_or(u64::MAX),
            has_left: self.left.contains(&incarnation),
        };
        seen.chain(told).map(ended).collect()
    }

    fn tell(&mut self, ended: &[EndedRun], now: Instant) {
        for EndedRun { incarnation, ago_ms, has_left } in ended {
            let ago = Duration::from_millis(*ago_ms);
            if let Some(since) = now.checked_sub(ago).filter(|_| ago <= TOLD_MAX)
                && !self.seen.contains_key(incarnation)
            {
                let told = self.told.entry(*incarnation).or_insert(since);
                // Others may have lost sight of it before it ended.
                *told = if self.noticed.remove(incarnation) { since.min(*told) } else { since.max(*told) };
            }
            if *has_left {
                self.left(*incarnation);
            }
        }
        self.bound_told();
    }

    pub(super) fn left(&mut self, run: u64) {
        if self.seen.contains_key(&run) || self.told.contains_key(&run) {
            self.left.insert(run);
        }
    }

    /// One has ended within that time, and did not say goodbye.
    pub(super) fn has_lost(&self, within: Duration, now: Instant) -> bool {
        let is_lost = |run: &u64, since: Instant| {
            !self.left.contains(run) && now.saturating_duration_since(since) <= within
        };
        self.told.iter().any(|(run, since)| is_lost(run, *since))
            || self.seen.iter().any(|(run, seen)| seen.ended.is_some_and(|since| is_lost(run, since)))
    }

    /// Also one that only others have heard.
    pub(super) fn died(&mut self, run: u64, now: Instant) {
        if !self.seen.contains_key(&run) {
            if let Entry::Vacant(place) = self.told.entry(run) {
                place.insert(now);
                self.noticed.insert(run);
            }
            self.bound_told();
        }
    }

    /// One that was held for dead is not.
    pub(super) fn is_back(&mut self, run: u64) {
        self.told.remove(&run);
        self.noticed.remove(&run);
    }

    fn bound_told(&mut self) {
        let above = self.told.len().saturating_sub(ENDED_MAX);
        if above == 0 {
            return;
        }
        let mut told: Vec<_> = self.told.iter().map(|(run, since)| (*since, *run)).collect();
        told.sort_unstable();
        for (_, run) in &told[..above] {
            self.told.remove(run);
            self.left.remove(run);
            self.noticed.remove(run);
        }
    }

    /// Those that are alive and were before this one ended, as far as that is known.
    pub(super) fn survivors_of(&self, run: u64) -> impl Iterator<Item = u64> {
        let ended = self.ended(run);
        let begun = |alive: &u64| self.seen.get(alive).map(|seen| seen.begun);
        self.alive().filter(move |alive| ended.is_none() || begun(alive) < ended)
    }
}

impl Routing {
    /// None for a run that this node does not know, or of which it has known for longer than `window` that it ended. One that gossip
    /// does not hear, and does not hold for dead yet, is alive: its connections still count.
    pub fn run(&self, incarnation: u64, window: Duration) -> Option<Run> {
        if self.deaths.lock().would_be_missed(incarnation) {
            return Some(Run::Alive);
        }
        let ended = {
            let runs = self.runs.lock();
            runs.ended(incarnation).or_else(|| runs.told.get(&incarnation).copied())
        };
        if let Some(since) = ended {
            return (since.elapsed() <= window).then_some(Run::Ended);
        }
        let is_linked_to = self.peers.read().contains_key(&incarnation);
        // Others may know it, and notice its death later than this node, which never heard it.
        if is_linked_to { Some(Run::Alive) } else { self.deaths.lock().run(incarnation) }
    }

    /// These are dead, or no members any more. Peers that began since they were dead may not have that from anybody else.
    pub(super) fn end(&self, ended: &[u64]) {
        if ended.is_empty() {
            return;
        }
        let mut runs = self.runs.lock();
        ended.iter().for_each(|run| runs.died(*run, Instant::now()));
        drop(runs);
        self.linked().into_iter().for_each(|peer| self.say_ended(peer));
    }

    /// Who came from a run that has died may have no seat, which that one cannot say.
    pub(super) fn look_at_seats_from(&self, run: u64) {
        let successors = self.successors.lock().take(run, Instant::now());
        successors.into_iter().for_each(|not_open| self.was_not_open(not_open));
    }

    /// The link to the peer is up, which may have begun after those had ended whose connections come to it.
    pub(super) fn say_ended(&self, to: u64) {
        let runs = self.runs.lock().all_ended(Instant::now());
        if !runs.is_empty() {
            self.send(to, 0, &Interest::Ended { runs });
        }
    }

    pub(super) fn take_ended(&self, runs: &[EndedRun]) {
        self.runs.lock().tell(runs, Instant::now());
    }

    /// To be called once, before there are peers.
    pub fn set_connections(&self, connections: Arc<dyn Connections>) {
        self.connections.set(connections).ok();
    }

    /// Tells every node that a connection is served here from now on.
    pub fn tell_taken_up(&self, taken: &TakenUp) {
        let (Tenure { connection_id, epoch, .. }, run) = (taken.tenure, taken.former.incarnation);
        if run != self.hub.incarnation() {
            self.successors.lock().add(run, NotOpen { connection_id, epoch }, Instant::now());
        }
        self.tell_of(taken.tenure.connection_id, &Item::taken_up(taken));
    }

    /// Tells every node that a connection of this one has ended for good.
    pub fn tell_over(&self, over: &Over) {
        self.tell_of(over.connection_id, &Item::over(over));
    }

    fn tell_of(&self, connection_id: ConnectionId, item: &Item) {
        let Some(links) = self.links.get() else { return };
        for peer in self.peers.read().keys() {
            // Whoever cannot be told now is told when the link is back, unless its queue or the link has been given up meanwhile.
            drop(links.send(*peer, lane_of(connection_id), item));
        }
    }

    pub(super) fn take_connection_said(&self, from: u64, said: ConnectionSaid) {
        match said {
            ConnectionSaid::TakenUp(taken) => {
                self.hub.take_over_presence(taken.tenure.connection_id, taken.tenure.owner());
                self.taken_elsewhere(from, &taken);
            }
            ConnectionSaid::NotOpen(not_open) => self.was_not_open(not_open),
            ConnectionSaid::Over(over) => {
                if let Some(connections) = self.connections.get() {
                    connections.over_elsewhere(&over);
                }
            }
        }
    }

    fn taken_elsewhere(&self, from: u64, taken: &TakenUp) {
        let not_open = self.connections.get().and_then(|connections| connections.taken_elsewhere(taken));
        self.tell_not_open(not_open.map(|not_open| (from, not_open)));
    }

    /// Tells that run, if any is to be told.
    pub fn tell_not_open(&self, told: Option<(u64, NotOpen)>) {
        if let Some((links, (to, not_open))) = self.links.get().zip(told) {
            drop(links.send(to, lane_of(not_open.connection_id), &Item::not_open(&not_open)));
        }
    }

    fn was_not_open(&self, not_open: NotOpen) {
        let (Some(connections), Some(routing)) =
            (self.connections.get().map(Arc::clone), self.this.upgrade())
        else {
            return;
        };
        let Ok(permit) = Arc::clone(&self.seats_waiting).try_acquire_owned() else {
            return self.tell_not_open(connections.not_open(not_open));
        };
        self.tasks.spawn("seat", OnStop::Cancel, async move {
            tokio::time::sleep(SEATS_SETTLE).await;
            routing.tell_not_open(connections.not_open(not_open));
            drop(permit);
        });
    }
}

/// All of a connection over one lane.
fn lane_of(connection_id: ConnectionId) -> u64 {
    let [.., lane] = *connection_id.as_bytes();
    lane.into()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{Node, PEER};
    use super::super::{PeerAddr, Standing};
    use super::*;

    #[tokio::test]
    async fn incarnation_without_peer_stream_is_known_alive_or_ended() {
        let node = Node::new();
        let run = || node.routing.run(PEER, Duration::from_secs(60));
        assert_eq!(run(), None);
        for (is_dead, expected) in [(false, Run::Alive), (true, Run::Ended)] {
            let standing = Standing { incarnation: PEER, is_dead, ..Standing::default() };
            node.routing.look_for_deaths(&[standing]);
            assert_eq!(run(), Some(expected));
        }
        node.routing.look_for_deaths(&[]);
        assert_eq!(run(), Some(Run::Ended), "also when it runs again under another one");
        assert_eq!(node.routing.run(PEER, Duration::ZERO), None);
        let back = Standing { incarnation: PEER, ..Standing::default() };
        node.routing.look_for_deaths(&[Standing { is_dead: true, ..back }]);
        node.routing.look_for_deaths(&[back]);
        assert_eq!(run(), Some(Run::Alive));
    }

    #[tokio::test]
    async fn a_run_that_is_silent_is_alive_until_it_is_held_for_dead() {
        let node = Node::new();
        node.finds_the_peer();
        let run = || node.routing.run(PEER, Duration::from_secs(60));
        let addr = ([127, 0, 0, 1], 1).into();
        node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
        let silent = Standing { incarnation: PEER, ..Standing::default() };
        for (standing, expected) in [
            (silent, Run::Alive),
            (Standing { is_draining: true, ..silent }, Run::Ended),
            (Standing { is_dead: true, ..silent }, Run::Ended),
        ] {
            node.routing.look_for_deaths(&[standing]);
            assert_eq!(run(), Some(expected), "nobody misses one that leaves");
        }
    }

    #[tokio::test]
    async fn an_end_is_told_when_it_is_noticed() {
        let node = Node::new();
        node.finds_the_peer();
        node.has_a_link();
        let is_told = || {
            let says = node.says();
            let told = |ago_ms| {
                let run = EndedRun { incarnation: 9, ago_ms, has_left: false };
                Item::interest(&Interest::Ended { runs: vec![run] })
            };
            (0..1_000).any(|ago_ms| says.contains(&told(ago_ms)))
        };
        assert!(!is_told());
        node.routing.look_for_deaths(&[Standing { incarnation: 9, is_dead: true, ..Standing::default() }]);
        assert!(is_told());
    }

    #[tokio::test]
    async fn a_run_that_was_never_heard_and_that_others_hear_lives() {
        let node = Node::new();
        let addr = ([127, 0, 0, 1], 1).into();
        node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
        for (is_dead, is_elsewhere, expected) in
            [(true, true, Run::Alive), (false, false, Run::Alive), (true, false, Run::Ended)]
        {
            let standing = Standing { incarnation: PEER, is_dead, is_elsewhere, ..Standing::default() };
            node.routing.look_for_deaths(&[standing]);
            assert_eq!(node.routing.run(PEER, Duration::from_secs(60)), Some(expected));
        }
    }

    #[test]
    fn a_run_ends_when_it_is_missed_and_not_again_until_it_was_back() {
        let (mut runs, begun) = (Runs::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let ended = |runs: &Runs| [1, 2].map(|run| runs.ended(run));
        runs.are_alive(&[1, 2], at(0));
        assert_eq!(ended(&runs), [None, None]);
        assert_eq!(runs.are_alive(&[2], at(1)), [1]);
        assert!(runs.are_alive(&[2], at(2)).is_empty());
        assert_eq!(ended(&runs), [Some(at(1)), None]);
        runs.are_alive(&[1], at(3));
        assert_eq!(ended(&runs), [None, Some(at(3))]);
        for run in 0..=ENDED_MAX as u64 {
            runs.are_alive(&[run + 10], at(run + 4));
        }
        assert_eq!((ended(&runs), runs.ended(10)), ([None; 2], Some(at(5))), "the earliest goes");
        assert_eq!(runs.seen.len(), ENDED_MAX + 1);
    }

    #[test]
    fn of_a_run_that_ended_before_one_is_told_and_tells_others() {
        let (mut runs, begun) = (Runs::default(), Instant::now());
        let now = begun + Duration::from_secs(5);
        runs.are_alive(&[1, 2], begun);
        runs.are_alive(&[1], begun + Duration::from_secs(1));
        let of = |incarnation, ago_ms| EndedRun { incarnation, ago_ms, has_left: false };
        runs.tell(&[of(1, 3_000), of(2, 3_000), of(3, 3_000), of(4, u64::MAX)], now);
        let mut all = runs.all_ended(now);
        all.sort_unstable();
        let expected = [of(2, 4_000), of(3, 3_000)];
        assert_eq!(all, expected, "what was seen counts, and not what nobody can have seen");
        assert_eq!(runs.survivors_of(3).collect::<Vec<_>>(), [1]);
        runs.tell(&[of(3, 1_000)], now);
        assert_eq!(runs.told[&3], now - Duration::from_secs(1), "who has heard it last");
        runs.died(5, now);
        runs.tell(&[of(5, 4_000)], now);
        assert_eq!(runs.told[&5], now - Duration::from_secs(4), "this one may just have begun");
        runs.tell(&[of(5, 5_000)], now);
        assert_eq!(runs.told[&5], now - Duration::from_secs(4));
        runs.are_alive(&[1, 3, 5], now);
        assert!(runs.told.is_empty());
        let many: Vec<_> = (10..).map(|run| of(run, run)).take(2 * ENDED_MAX).collect();
        runs.tell(&many, begun + Duration::from_secs(60));
        assert!(runs.told.len() == ENDED_MAX && runs.told.contains_key(&10), "the earliest goes");
    }

    /// Its clients come to a node that began since, and may have missed what it had for them alone.
    #[test]
    fn a_run_that_did_not_say_goodbye_has_lost_something() {
        let (mut runs, now) = (Runs::default(), Instant::now() + Duration::from_secs(60));
        let lately = Duration::from_secs(9);
        let of = |incarnation, ago_ms, has_left| EndedRun { incarnation, ago_ms, has_left };
        runs.tell(&[of(1, 1_000, true), of(2, 10_000, false)], now);
        assert!(!runs.has_lost(lately, now));
        runs.tell(&[of(3, 9_000, false)], now);
        assert!(runs.has_lost(lately, now) && !runs.has_lost(lately, now + Duration::from_millis(1)));
        runs.tell(&[of(3, 9_000, true)], now);
        assert!(!runs.has_lost(lately, now), "another one has heard its goodbye");
        runs.are_alive(&[4], now);
        runs.left(4);
        runs.are_alive(&[], now);
        assert!(!runs.has_lost(lately, now));
        let mut told = runs.all_ended(now);
        told.sort_unstable();
        assert_eq!(told, [of(1, 1_000, true), of(2, 10_000, false), of(3, 9_000, true), of(4, 0, true)]);
        runs.are_alive(&[5], now);
        runs.are_alive(&[], now);
        assert!(runs.has_lost(lately, now), "it was heard and is not any more");
    }

    #[test]
    fn node_that_began_after_incarnation_ended_is_no_survivor() {
        let (mut runs, begun) = (Runs::default(), Instant::now());
        let alive = [&[1, 2, 3][..], &[1, 2], &[2], &[2, 3, 4], &[3, 4]];
        let mut next = alive.iter().zip(0..);
        let mut survivors = |run: u64, steps: usize| {
            for (alive, seconds) in next.by_ref().take(steps) {
                runs.are_alive(alive, begun + Duration::from_secs(seconds));
            }
            runs.survivors_of(run).collect::<Vec<_>>()
        };
        assert_eq!(survivors(1, 4), [2, 3], "3 was not heard just when 1 ended");
        assert_eq!(survivors(1, 1), [3]);
        assert_eq!(survivors(2, 0), [3, 4]);
        assert_eq!(survivors(9, 0), [3, 4], "it ended before this node began");
    }
}
