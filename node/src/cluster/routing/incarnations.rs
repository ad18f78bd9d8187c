//! Incarnations of other nodes, and the sessions that move between them.

use std::collections::hash_map::Entry;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::Routing;
use crate::cluster::inbound::{EndedIncarnation, InterestMessage, PeerSessionMessage};
use crate::cluster::link::PeerItem;
use crate::model::{
    ClosedSession, ConnectionId, IncarnationStatus, QUOTA_SLOTS_SETTLE, SessionOwnership, SessionTakeover,
    SocketlessTakeover,
};
use crate::tasks::OnStop;

/// Most ended incarnations that are kept. A further one evicts the earliest, whose sessions cannot be resumed any more.
const ENDED_MAX: usize = 1024;
/// Age from which on a reported end is ignored: no client resumes a session of that time.
const REPORTED_AGE_MAX: Duration = Duration::from_secs(24 * 60 * 60);

/// Most sessions that wait for a quota check. A further one is checked at once, and its client may be asked to reconnect needlessly.
pub(super) const QUOTA_CHECKS_MAX: usize = 16_384;

/// Handler of the session messages of peers: takeovers of sessions, and sessions that are closed for good.
pub trait PeerSessionHandler: Send + Sync + 'static {
    /// Takes a takeover by another node. Returns the answer if this node had the session without an open socket.
    fn taken_over_remotely(&self, taken: &SessionTakeover) -> Option<SocketlessTakeover>;

    /// Takes the news that another node has closed a session for good.
    fn closed_remotely(&self, over: &ClosedSession);

    /// Takes the answer to a takeover by this node that replaced no open socket: the session stays only if the tenant has a free quota
    /// slot. Returns the incarnation that owns the session now, if it is another one, and the answer to send to it.
    fn not_open(&self, not_open: SocketlessTakeover) -> Option<(u64, SocketlessTakeover)>;
}

/// Incarnations that are alive, and the ends of the others.
#[derive(Debug, Default)]
pub(super) struct KnownIncarnations {
    alive: Vec<u64>,
    seen: HashMap<u64, SeenIncarnation>,
    /// Ended incarnations that this node never saw alive, and when they ended, by the reports of peers.
    reported: HashMap<u64, Instant>,
    /// Incarnations of `reported` whose end this node noticed before any report, maybe when it began.
    noticed: HashSet<u64>,
    /// Incarnations of `seen` and `reported` that have said goodbye.
    left: HashSet<u64>,
}

#[derive(Debug)]
struct SeenIncarnation {
    /// Time at which the incarnation was first seen alive.
    begun: Instant,
    ended: Option<Instant>,
}

impl KnownIncarnations {
    /// Sets the alive incarnations, and returns those that were alive until now.
    pub(super) fn set_alive(&mut self, alive: &[u64], now: Instant) -> Vec<u64> {
        let mut ended = std::mem::replace(&mut self.alive, alive.to_vec());
        ended.retain(|run| !alive.contains(run));
        for run in &ended {
            if let Some(seen) = self.seen.get_mut(run) {
                seen.ended = Some(now);
            }
        }
        for run in alive {
            self.reported.remove(run);
            self.noticed.remove(run);
            self.seen.entry(*run).or_insert(SeenIncarnation { begun: now, ended: None }).ended = None;
        }
        let since = |(run, seen): (&u64, &SeenIncarnation)| Some((seen.ended?, *run));
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

    /// True if this node saw the incarnation alive and it is no longer, or if its end was reported.
    pub(super) fn has_ended(&self, run: u64) -> bool {
        self.ended(run).is_some() || self.reported.contains_key(&run)
    }

    /// All ended incarnations, including those that were only reported.
    fn all_ended(&self, now: Instant) -> Vec<EndedIncarnation> {
        let seen = self.seen.iter().filter_map(|(run, seen)| Some((*run, seen.ended?)));
        let reported = self.reported.iter().map(|(run, since)| (*run, *since));
        let ago = |since| now.saturating_duration_since(since).as_millis();
        let ended = |(incarnation, since)| EndedIncarnation {
            incarnation,
            ago_ms: u64::try_from(ago(since)).unwrap_or(u64::MAX),
            has_left: self.left.contains(&incarnation),
        };
        seen.chain(reported).map(ended).collect()
    }

    fn record_reported(&mut self, ended: &[EndedIncarnation], now: Instant) {
        for EndedIncarnation { incarnation, ago_ms, has_left } in ended {
            let ago = Duration::from_millis(*ago_ms);
            if let Some(since) = now.checked_sub(ago).filter(|_| ago <= REPORTED_AGE_MAX)
                && !self.seen.contains_key(incarnation)
            {
                let reported = self.reported.entry(*incarnation).or_insert(since);
                // A peer may have lost sight of the incarnation before it ended, so of the reports the latest counts.
                *reported = if self.noticed.remove(incarnation) {
                    since.min(*reported)
                } else {
                    since.max(*reported)
                };
            }
            if *has_left {
                self.left(*incarnation);
            }
        }
        self.trim_reported();
    }

    pub(super) fn left(&mut self, run: u64) {
        if self.seen.contains_key(&run) || self.reported.contains_key(&run) {
            self.left.insert(run);
        }
    }

    /// True if an incarnation ended within this time without a goodbye.
    pub(super) fn has_lost(&self, within: Duration, now: Instant) -> bool {
        let is_lost = |run: &u64, since: Instant| {
            !self.left.contains(run) && now.saturating_duration_since(since) <= within
        };
        self.reported.iter().any(|(run, since)| is_lost(run, *since))
            || self.seen.iter().any(|(run, seen)| seen.ended.is_some_and(|since| is_lost(run, since)))
    }

    /// Records that an incarnation is down that this node never saw alive.
    pub(super) fn record_down(&mut self, run: u64, now: Instant) {
        if !self.seen.contains_key(&run) {
            if let Entry::Vacant(place) = self.reported.entry(run) {
                place.insert(now);
                self.noticed.insert(run);
            }
            self.trim_reported();
        }
    }

    /// Drops the reported end of an incarnation that is alive after all.
    pub(super) fn is_back(&mut self, run: u64) {
        self.reported.remove(&run);
        self.noticed.remove(&run);
    }

    fn trim_reported(&mut self) {
        let above = self.reported.len().saturating_sub(ENDED_MAX);
        if above == 0 {
            return;
        }
        let mut reported: Vec<_> = self.reported.iter().map(|(run, since)| (*since, *run)).collect();
        reported.sort_unstable();
        for (_, run) in &reported[..above] {
            self.reported.remove(run);
            self.left.remove(run);
            self.noticed.remove(run);
        }
    }

    /// Alive incarnations that were alive before this one ended, as far as this node knows.
    pub(super) fn survivors_of(&self, run: u64) -> impl Iterator<Item = u64> {
        let ended = self.ended(run);
        let begun = |alive: &u64| self.seen.get(alive).map(|seen| seen.begun);
        self.alive().filter(move |alive| ended.is_none() || begun(alive) < ended)
    }
}

impl Routing {
    /// Status of an incarnation. None if it is not known, or is known to have ended longer than `window` ago. An incarnation that gossip
    /// does not see but that is not down yet is alive: its connections still count.
    pub fn incarnation_status(&self, incarnation: u64, window: Duration) -> Option<IncarnationStatus> {
        if self.node_failures.lock().is_failure_noticed(incarnation) {
            return Some(IncarnationStatus::Alive);
        }
        let ended = {
            let runs = self.incarnations.lock();
            runs.ended(incarnation).or_else(|| runs.reported.get(&incarnation).copied())
        };
        if let Some(since) = ended {
            return (since.elapsed() <= window).then_some(IncarnationStatus::Ended);
        }
        let is_linked_to = self.peers.read().contains_key(&incarnation);
        // Peers may know it, and notice its failure later than this node, which never saw it.
        if is_linked_to {
            Some(IncarnationStatus::Alive)
        } else {
            self.node_failures.lock().incarnation_status(incarnation)
        }
    }

    /// Records the ends of incarnations, and reports them to the peers: one that began later may learn of them from no other node.
    pub(super) fn record_ended(&self, ended: &[u64]) {
        if ended.is_empty() {
            return;
        }
        let mut runs = self.incarnations.lock();
        ended.iter().for_each(|run| runs.record_down(*run, Instant::now()));
        drop(runs);
        self.linked().into_iter().for_each(|peer| self.announce_ended(peer));
    }

    /// Rechecks the quota slots of sessions that were taken over from a failed incarnation, which cannot answer for them.
    pub(super) fn recheck_quota_slots(&self, run: u64) {
        let successors = self.recent_takeovers.lock().take(run, Instant::now());
        successors.into_iter().for_each(|not_open| self.was_not_open(not_open));
    }

    /// Reports all ended incarnations to a peer whose link is up. The peer may have begun after they ended, and their clients may come to
    /// it.
    pub(super) fn announce_ended(&self, to: u64) {
        let runs = self.incarnations.lock().all_ended(Instant::now());
        if !runs.is_empty() {
            self.send(to, 0, &InterestMessage::IncarnationsEnded { incarnations: runs });
        }
    }

    pub(super) fn take_ended(&self, runs: &[EndedIncarnation]) {
        self.incarnations.lock().record_reported(runs, Instant::now());
    }

    /// Sets the handler of session messages. Called once, before there are peers.
    pub fn set_connections(&self, connections: Arc<dyn PeerSessionHandler>) {
        self.session_handler.set(connections).ok();
    }

    /// Announces to all peers that a session is served here from now on.
    pub fn announce_takeover(&self, taken: &SessionTakeover) {
        let (SessionOwnership { connection_id, epoch, .. }, run) =
            (taken.ownership, taken.previous.incarnation);
        if run != self.hub.incarnation() {
            self.recent_takeovers.lock().add(
                run,
                SocketlessTakeover { connection_id, epoch },
                Instant::now(),
            );
        }
        self.announce_session(taken.ownership.connection_id, &PeerItem::takeover(taken));
    }

    /// Announces to all peers that a session of this node is closed for good.
    pub fn announce_closed(&self, over: &ClosedSession) {
        self.announce_session(over.connection_id, &PeerItem::session_closed(over));
    }

    fn announce_session(&self, connection_id: ConnectionId, item: &PeerItem) {
        let Some(links) = self.links.get() else { return };
        for peer in self.peers.read().keys() {
            // An unreachable peer gets the item when its link is back, unless its queue or the link has been given up meanwhile.
            drop(links.send(*peer, stream_hash(connection_id), item));
        }
    }

    pub(super) fn take_session_message(&self, from: u64, said: PeerSessionMessage) {
        match said {
            PeerSessionMessage::Takeover(taken) => {
                self.hub.take_over_presence(taken.ownership.connection_id, taken.ownership.owner());
                self.take_remote_takeover(from, &taken);
            }
            PeerSessionMessage::Socketless(not_open) => self.was_not_open(not_open),
            PeerSessionMessage::Closed(over) => {
                if let Some(connections) = self.session_handler.get() {
                    connections.closed_remotely(&over);
                }
            }
        }
    }

    fn take_remote_takeover(&self, from: u64, taken: &SessionTakeover) {
        let not_open =
            self.session_handler.get().and_then(|connections| connections.taken_over_remotely(taken));
        self.send_socketless_takeover(not_open.map(|not_open| (from, not_open)));
    }

    /// Sends an answer to the incarnation that it is for, if there is one.
    pub fn send_socketless_takeover(&self, answer: Option<(u64, SocketlessTakeover)>) {
        if let Some((links, (to, not_open))) = self.links.get().zip(answer) {
            drop(links.send(
                to,
                stream_hash(not_open.connection_id),
                &PeerItem::socketless_takeover(&not_open),
            ));
        }
    }

    fn was_not_open(&self, not_open: SocketlessTakeover) {
        let (Some(connections), Some(routing)) =
            (self.session_handler.get().map(Arc::clone), self.this.upgrade())
        else {
            return;
        };
        let Ok(permit) = Arc::clone(&self.quota_checks).try_acquire_owned() else {
            return self.send_socketless_takeover(connections.not_open(not_open));
        };
        self.tasks.spawn("seat", OnStop::Cancel, async move {
            tokio::time::sleep(QUOTA_SLOTS_SETTLE).await;
            routing.send_socketless_takeover(connections.not_open(not_open));
            drop(permit);
        });
    }
}

/// Hash that selects one peer stream for all messages of a session.
fn stream_hash(connection_id: ConnectionId) -> u64 {
    let [.., lane] = *connection_id.as_bytes();
    lane.into()
}

#[cfg(test)]
mod tests {
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::super::{GossipStatus, PeerAddr};
    use super::*;

    #[tokio::test]
    async fn incarnation_without_peer_stream_is_known_alive_or_ended() {
        let node = RoutingTestNode::new();
        let run = || node.routing.incarnation_status(PEER, Duration::from_secs(60));
        assert_eq!(run(), None);
        for (is_dead, expected) in [(false, IncarnationStatus::Alive), (true, IncarnationStatus::Ended)] {
            let status = GossipStatus { incarnation: PEER, is_down: is_dead, ..GossipStatus::default() };
            node.routing.update_node_failures(&[status]);
            assert_eq!(run(), Some(expected));
        }
        node.routing.update_node_failures(&[]);
        assert_eq!(run(), Some(IncarnationStatus::Ended), "also when it runs again under another one");
        assert_eq!(node.routing.incarnation_status(PEER, Duration::ZERO), None);
        let back = GossipStatus { incarnation: PEER, ..GossipStatus::default() };
        node.routing.update_node_failures(&[GossipStatus { is_down: true, ..back }]);
        node.routing.update_node_failures(&[back]);
        assert_eq!(run(), Some(IncarnationStatus::Alive));
    }

    #[tokio::test]
    async fn a_run_that_is_silent_is_alive_until_it_is_held_for_dead() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        let run = || node.routing.incarnation_status(PEER, Duration::from_secs(60));
        let addr = ([127, 0, 0, 1], 1).into();
        node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
        let silent = GossipStatus { incarnation: PEER, ..GossipStatus::default() };
        for (status, expected) in [
            (silent, IncarnationStatus::Alive),
            (GossipStatus { is_draining: true, ..silent }, IncarnationStatus::Ended),
            (GossipStatus { is_down: true, ..silent }, IncarnationStatus::Ended),
        ] {
            node.routing.update_node_failures(&[status]);
            assert_eq!(run(), Some(expected), "nobody misses one that leaves");
        }
    }

    #[tokio::test]
    async fn end_of_an_incarnation_is_sent_to_peers_when_noticed() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.has_a_link();
        let is_sent = || {
            let says = node.says();
            let item = |ago_ms| {
                let run = EndedIncarnation { incarnation: 9, ago_ms, has_left: false };
                PeerItem::interest(&InterestMessage::IncarnationsEnded { incarnations: vec![run] })
            };
            (0..1_000).any(|ago_ms| says.contains(&item(ago_ms)))
        };
        assert!(!is_sent());
        node.routing.update_node_failures(&[GossipStatus {
            incarnation: 9,
            is_down: true,
            ..GossipStatus::default()
        }]);
        assert!(is_sent());
    }

    #[tokio::test]
    async fn incarnation_seen_only_by_other_nodes_is_alive() {
        let node = RoutingTestNode::new();
        let addr = ([127, 0, 0, 1], 1).into();
        node.routing.set_peers(vec![PeerAddr { peer: node.peer.clone(), addr }], Vec::new());
        for (is_dead, is_seen_by_others, expected) in [
            (true, true, IncarnationStatus::Alive),
            (false, false, IncarnationStatus::Alive),
            (true, false, IncarnationStatus::Ended),
        ] {
            let status = GossipStatus {
                incarnation: PEER,
                is_down: is_dead,
                is_seen_by_others,
                ..GossipStatus::default()
            };
            node.routing.update_node_failures(&[status]);
            assert_eq!(node.routing.incarnation_status(PEER, Duration::from_secs(60)), Some(expected));
        }
    }

    #[test]
    fn a_run_ends_when_it_is_missed_and_not_again_until_it_was_back() {
        let (mut runs, begun) = (KnownIncarnations::default(), Instant::now());
        let at = |seconds| begun + Duration::from_secs(seconds);
        let ended = |runs: &KnownIncarnations| [1, 2].map(|run| runs.ended(run));
        runs.set_alive(&[1, 2], at(0));
        assert_eq!(ended(&runs), [None, None]);
        assert_eq!(runs.set_alive(&[2], at(1)), [1]);
        assert!(runs.set_alive(&[2], at(2)).is_empty());
        assert_eq!(ended(&runs), [Some(at(1)), None]);
        runs.set_alive(&[1], at(3));
        assert_eq!(ended(&runs), [None, Some(at(3))]);
        for run in 0..=ENDED_MAX as u64 {
            runs.set_alive(&[run + 10], at(run + 4));
        }
        assert_eq!((ended(&runs), runs.ended(10)), ([None; 2], Some(at(5))), "the earliest goes");
        assert_eq!(runs.seen.len(), ENDED_MAX + 1);
    }

    #[test]
    fn reported_end_of_an_incarnation_is_kept_and_passed_on() {
        let (mut runs, begun) = (KnownIncarnations::default(), Instant::now());
        let now = begun + Duration::from_secs(5);
        runs.set_alive(&[1, 2], begun);
        runs.set_alive(&[1], begun + Duration::from_secs(1));
        let of = |incarnation, ago_ms| EndedIncarnation { incarnation, ago_ms, has_left: false };
        runs.record_reported(&[of(1, 3_000), of(2, 3_000), of(3, 3_000), of(4, u64::MAX)], now);
        let mut all = runs.all_ended(now);
        all.sort_unstable();
        let expected = [of(2, 4_000), of(3, 3_000)];
        assert_eq!(all, expected, "what was seen counts, and not what nobody can have seen");
        assert_eq!(runs.survivors_of(3).collect::<Vec<_>>(), [1]);
        runs.record_reported(&[of(3, 1_000)], now);
        assert_eq!(runs.reported[&3], now - Duration::from_secs(1), "who has heard it last");
        runs.record_down(5, now);
        runs.record_reported(&[of(5, 4_000)], now);
        assert_eq!(runs.reported[&5], now - Duration::from_secs(4), "this one may just have begun");
        runs.record_reported(&[of(5, 5_000)], now);
        assert_eq!(runs.reported[&5], now - Duration::from_secs(4));
        runs.set_alive(&[1, 3, 5], now);
        assert!(runs.reported.is_empty());
        let many: Vec<_> = (10..).map(|run| of(run, run)).take(2 * ENDED_MAX).collect();
        runs.record_reported(&many, begun + Duration::from_secs(60));
        assert!(runs.reported.len() == ENDED_MAX && runs.reported.contains_key(&10), "the earliest goes");
    }

    /// Clients of the ended incarnation may have missed messages that it had for them alone.
    #[test]
    fn a_run_that_did_not_say_goodbye_has_lost_something() {
        let (mut runs, now) = (KnownIncarnations::default(), Instant::now() + Duration::from_secs(60));
        let lately = Duration::from_secs(9);
        let of = |incarnation, ago_ms, has_left| EndedIncarnation { incarnation, ago_ms, has_left };
        runs.record_reported(&[of(1, 1_000, true), of(2, 10_000, false)], now);
        assert!(!runs.has_lost(lately, now));
        runs.record_reported(&[of(3, 9_000, false)], now);
        assert!(runs.has_lost(lately, now) && !runs.has_lost(lately, now + Duration::from_millis(1)));
        runs.record_reported(&[of(3, 9_000, true)], now);
        assert!(!runs.has_lost(lately, now), "another one has heard its goodbye");
        runs.set_alive(&[4], now);
        runs.left(4);
        runs.set_alive(&[], now);
        assert!(!runs.has_lost(lately, now));
        let mut ended = runs.all_ended(now);
        ended.sort_unstable();
        assert_eq!(ended, [of(1, 1_000, true), of(2, 10_000, false), of(3, 9_000, true), of(4, 0, true)]);
        runs.set_alive(&[5], now);
        runs.set_alive(&[], now);
        assert!(runs.has_lost(lately, now), "it was heard and is not any more");
    }

    #[test]
    fn node_that_began_after_incarnation_ended_is_no_survivor() {
        let (mut runs, begun) = (KnownIncarnations::default(), Instant::now());
        let alive = [&[1, 2, 3][..], &[1, 2], &[2], &[2, 3, 4], &[3, 4]];
        let mut next = alive.iter().zip(0..);
        let mut survivors = |run: u64, steps: usize| {
            for (alive, seconds) in next.by_ref().take(steps) {
                runs.set_alive(alive, begun + Duration::from_secs(seconds));
            }
            runs.survivors_of(run).collect::<Vec<_>>()
        };
        assert_eq!(survivors(1, 4), [2, 3], "3 was not heard just when 1 ended");
        assert_eq!(survivors(1, 1), [3]);
        assert_eq!(survivors(2, 0), [3, 4]);
        assert_eq!(survivors(9, 0), [3, 4], "it ended before this node began");
    }
}
