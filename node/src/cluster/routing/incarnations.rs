//! Incarnations of other nodes, and the sessions that move between them.

#[cfg(test)]
mod tests;

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
        ended.retain(|incarnation| !alive.contains(incarnation));
        for incarnation in &ended {
            if let Some(seen) = self.seen.get_mut(incarnation) {
                seen.ended = Some(now);
            }
        }
        for incarnation in alive {
            self.reported.remove(incarnation);
            self.noticed.remove(incarnation);
            self.seen.entry(*incarnation).or_insert(SeenIncarnation { begun: now, ended: None }).ended = None;
        }
        let since = |(incarnation, seen): (&u64, &SeenIncarnation)| Some((seen.ended?, *incarnation));
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

    fn ended(&self, incarnation: u64) -> Option<Instant> {
        self.seen.get(&incarnation)?.ended
    }

    /// True if this node saw the incarnation alive and it is no longer, or if its end was reported.
    pub(super) fn has_ended(&self, incarnation: u64) -> bool {
        self.ended(incarnation).is_some() || self.reported.contains_key(&incarnation)
    }

    /// All ended incarnations, including those that were only reported.
    fn all_ended(&self, now: Instant) -> Vec<EndedIncarnation> {
        let seen = self.seen.iter().filter_map(|(incarnation, seen)| Some((*incarnation, seen.ended?)));
        let reported = self.reported.iter().map(|(incarnation, since)| (*incarnation, *since));
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

    pub(super) fn left(&mut self, incarnation: u64) {
        if self.seen.contains_key(&incarnation) || self.reported.contains_key(&incarnation) {
            self.left.insert(incarnation);
        }
    }

    /// True if an incarnation ended within this time without a goodbye.
    pub(super) fn has_lost(&self, within: Duration, now: Instant) -> bool {
        let is_lost = |incarnation: &u64, since: Instant| {
            !self.left.contains(incarnation) && now.saturating_duration_since(since) <= within
        };
        self.reported.iter().any(|(incarnation, since)| is_lost(incarnation, *since))
            || self
                .seen
                .iter()
                .any(|(incarnation, seen)| seen.ended.is_some_and(|since| is_lost(incarnation, since)))
    }

    /// Records that an incarnation is down that this node never saw alive.
    pub(super) fn record_down(&mut self, incarnation: u64, now: Instant) {
        if !self.seen.contains_key(&incarnation) {
            if let Entry::Vacant(vacant) = self.reported.entry(incarnation) {
                vacant.insert(now);
                self.noticed.insert(incarnation);
            }
            self.trim_reported();
        }
    }

    /// Drops the reported end of an incarnation that is alive after all.
    pub(super) fn is_back(&mut self, incarnation: u64) {
        self.reported.remove(&incarnation);
        self.noticed.remove(&incarnation);
    }

    fn trim_reported(&mut self) {
        let above = self.reported.len().saturating_sub(ENDED_MAX);
        if above == 0 {
            return;
        }
        let mut reported: Vec<_> =
            self.reported.iter().map(|(incarnation, since)| (*since, *incarnation)).collect();
        reported.sort_unstable();
        for (_, incarnation) in &reported[..above] {
            self.reported.remove(incarnation);
            self.left.remove(incarnation);
            self.noticed.remove(incarnation);
        }
    }

    /// Alive incarnations that were alive before this one ended, as far as this node knows.
    pub(super) fn survivors_of(&self, incarnation: u64) -> impl Iterator<Item = u64> {
        let ended = self.ended(incarnation);
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
            let known = self.incarnations.lock();
            known.ended(incarnation).or_else(|| known.reported.get(&incarnation).copied())
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
        let mut known = self.incarnations.lock();
        ended.iter().for_each(|incarnation| known.record_down(*incarnation, Instant::now()));
        drop(known);
        self.linked().into_iter().for_each(|peer| self.announce_ended(peer));
    }

    /// Rechecks the quota slots of sessions that were taken over from a failed incarnation, which cannot answer for them.
    pub(super) fn recheck_quota_slots(&self, incarnation: u64) {
        let successors = self.recent_takeovers.lock().take(incarnation, Instant::now());
        successors.into_iter().for_each(|not_open| self.was_not_open(not_open));
    }

    /// Reports all ended incarnations to a peer whose link is up. The peer may have begun after they ended, and their clients may come to
    /// it.
    pub(super) fn announce_ended(&self, to: u64) {
        let ended = self.incarnations.lock().all_ended(Instant::now());
        if !ended.is_empty() {
            self.send(to, 0, &InterestMessage::IncarnationsEnded { incarnations: ended });
        }
    }

    pub(super) fn take_ended(&self, ended: &[EndedIncarnation]) {
        self.incarnations.lock().record_reported(ended, Instant::now());
    }

    /// Sets the handler of session messages. Called once, before there are peers.
    pub fn set_connections(&self, connections: Arc<dyn PeerSessionHandler>) {
        self.session_handler.set(connections).ok();
    }

    /// Announces to all peers that a session is served here from now on.
    pub fn announce_takeover(&self, taken: &SessionTakeover) {
        let (SessionOwnership { connection_id, epoch, .. }, incarnation) =
            (taken.ownership, taken.previous.incarnation);
        if incarnation != self.hub.incarnation() {
            self.recent_takeovers.lock().add(
                incarnation,
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

    pub(super) fn take_session_message(&self, from: u64, message: PeerSessionMessage) {
        match message {
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
        self.tasks.spawn("quota slots", OnStop::Cancel, async move {
            tokio::time::sleep(QUOTA_SLOTS_SETTLE).await;
            routing.send_socketless_takeover(connections.not_open(not_open));
            drop(permit);
        });
    }
}

/// Hash that selects one peer stream for all messages of a session.
fn stream_hash(connection_id: ConnectionId) -> u64 {
    let [.., last_byte] = *connection_id.as_bytes();
    last_byte.into()
}
