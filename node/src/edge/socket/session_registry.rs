//! Sessions across sockets: which are lost, which are open, and which may be resumed by which caller.
//!
//! An idle session has no entry here: the key that its client holds names the node and slot.

mod retained;
#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::Mutex;

use super::{Input, ShardHandle};
use crate::auth::{ConnectionKeys, Principal};
use crate::model::{
    ClientId, Clock, ClosedSession, ConnectionId, IncarnationStatus, Limits, SessionLocation, SessionOwner,
    SessionOwnership, SessionTakeover, SocketlessTakeover,
};
use retained::RetainedChannels;

/// Average number of channels that are retained for each lost session.
const RETAINED_PER_SESSION: usize = 10;

/// Look-up of peers' incarnations. None: sessions of that incarnation cannot be resumed.
pub type IncarnationLookup = Box<dyn Fn(u64) -> Option<IncarnationStatus> + Send + Sync>;

/// Sessions of this node. Times are milliseconds since the registry was created, when the node became ready to resume sessions.
pub struct SessionRegistry {
    keys: ConnectionKeys,
    incarnation: u64,
    clock: Clock,
    started: Instant,
    window_ms: u64,
    /// Generation of the open connection by shard and slot, 0 if there is none.
    open: Vec<Mutex<Vec<u32>>>,
    handles: Vec<Arc<ShardHandle>>,
    /// Sessions that were lost, taken over, or closed for good within the resume window.
    records: DashMap<ConnectionId, SessionRecord>,
    /// The same by age. Bounded by `lost_max`: above it the oldest is dropped, and can then no longer be resumed.
    by_age: SessionAges,
    /// Sessions closed for good, by age. Bounded separately, so that they do not displace the others.
    closed_by_age: SessionAges,
    lost_max: usize,
    /// Number of retained channels in all records.
    retained_total: Arc<AtomicUsize>,
    /// Earlier incarnations of this node, and for each the part of the resume window that had passed at the start.
    earlier_incarnations: Vec<(u64, u64)>,
    peer_incarnations: IncarnationLookup,
}

type SessionAges = Mutex<VecDeque<(u64, ConnectionId)>>;

#[derive(Debug)]
struct SessionRecord {
    epoch: u64,
    since_ms: u64,
    state: SessionState,
    /// The last connection here that was told to end for a takeover: its quota slot passed to the new one.
    replaced_at: Option<SessionLocation>,
    retained: RetainedChannels,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SessionState {
    /// Served at this location, here or on another node.
    Served(SessionLocation),
    /// Lost on this node.
    Lost,
    /// Closed for good on this incarnation.
    Closed(u64),
}

impl SessionState {
    fn slot(self) -> Option<SessionLocation> {
        match self {
            Self::Served(location) => Some(location),
            Self::Lost | Self::Closed(_) => None,
        }
    }
}

/// A session that a caller may resume.
#[derive(Debug)]
pub struct ResumableSession {
    ownership: SessionOwnership,
    /// True if a socket of the session is open, which will be closed.
    pub is_open: bool,
}

/// A session that was opened on this node.
#[derive(Debug)]
pub(super) struct OpenedSession {
    pub ownership: SessionOwnership,
    /// Previous location, as far as known. None: a fresh session.
    pub previous: Option<SessionLocation>,
    /// False if the caller was admitted in place of an open socket that has ended meanwhile: the socket's quota slot may be taken by
    /// another connection.
    pub has_quota_slot: bool,
}

/// Result of a takeover by this node.
struct LocalTakeover {
    ownership: SessionOwnership,
    previous: SessionLocation,
    /// True if a socket ends for the takeover, here or on another node. That node reports if it had none.
    has_replaced_socket: bool,
}

impl SessionRegistry {
    pub fn new(
        keys: ConnectionKeys,
        incarnation: u64,
        earlier_incarnations: Vec<(u64, u64)>,
        handles: Vec<Arc<ShardHandle>>,
        clock: Clock,
        limits: &Limits,
    ) -> Self {
        Self {
            keys,
            incarnation,
            clock,
            started: Instant::now(),
            window_ms: limits.resume_window_ms,
            open: handles.iter().map(|_| Mutex::default()).collect(),
            handles,
            records: DashMap::new(),
            by_age: Mutex::default(),
            closed_by_age: Mutex::default(),
            lost_max: limits.lost_connections,
            retained_total: Arc::default(),
            earlier_incarnations,
            peer_incarnations: Box::new(|_| None),
        }
    }

    /// Enables takeovers from peers.
    pub fn with_peer_incarnations(mut self, lookup: IncarnationLookup) -> Self {
        self.peer_incarnations = lookup;
        self
    }

    pub fn keys(&self) -> &ConnectionKeys {
        &self.keys
    }

    /// The session that the key names, if this caller may resume it now.
    pub fn find_resumable(
        &self,
        text: &str,
        principal: &Principal,
        client_id: Option<&ClientId>,
    ) -> Option<ResumableSession> {
        let ownership = self.keys.open(text, principal, client_id)?;
        let record = self.records.get(&ownership.connection_id);
        let location = self.check_resumable(&ownership, record.as_deref())?;
        let is_open_here =
            |record: &SessionRecord| record.state.slot().is_some_and(|here| self.is_open_here(here));
        Some(ResumableSession {
            ownership,
            is_open: location.is_some() || record.as_deref().is_some_and(is_open_here),
        })
    }

    /// Opens a session at this location: the resumed one if that is still possible, whose open socket is told to end, or else a fresh one.
    pub(super) fn open_session(
        &self,
        previous: Option<ResumableSession>,
        location: SessionLocation,
    ) -> OpenedSession {
        self.note_open(location, location.generation);
        let taken = previous.as_ref().and_then(|previous| self.take_over(&previous.ownership, location));
        let was_open = previous.is_some_and(|previous| previous.is_open);
        match taken {
            Some(LocalTakeover { ownership, previous, has_replaced_socket: has_replaced }) => OpenedSession {
                ownership,
                previous: Some(previous),
                has_quota_slot: has_replaced || !was_open,
            },
            None => {
                let ownership =
                    SessionOwnership { connection_id: ConnectionId::random(), epoch: 0, location };
                OpenedSession { ownership, previous: None, has_quota_slot: !was_open }
            }
        }
    }

    /// Takes a session over. None: it cannot be resumed any more.
    fn take_over(&self, ownership: &SessionOwnership, location: SessionLocation) -> Option<LocalTakeover> {
        let connection_id = ownership.connection_id;
        let entry = self.records.entry(connection_id);
        let record = match &entry {
            Entry::Occupied(occupied) => Some(occupied.get()),
            Entry::Vacant(_) => None,
        };
        let holder = self.check_resumable(ownership, record)?;
        let last = record.map_or(ownership.epoch, |record| record.epoch.max(ownership.epoch));
        // Also above all epochs of earlier incarnations.
        let epoch = last.saturating_add(1).max(self.clock.highest_ms());
        let since_ms = self.now_ms();
        let mut record = entry.or_insert_with(|| {
            let held = self.empty_retained();
            SessionRecord { epoch, since_ms, state: SessionState::Lost, replaced_at: None, retained: held }
        });
        let known = std::mem::replace(&mut record.state, SessionState::Served(location)).slot();
        (record.epoch, record.since_ms) = (epoch, since_ms);
        // Also a socket here, if the node in the key took the session over and has not reported that, or no longer can.
        let mut has_replaced = holder.is_some_and(|holder| !self.is_own(&holder));
        for previous in [known, holder].into_iter().flatten() {
            has_replaced |= self.end_replaced_socket(&mut record, previous);
        }
        drop(record);
        self.remember(&self.by_age, since_ms, connection_id);
        let previous = holder.unwrap_or(ownership.location);
        Some(LocalTakeover {
            ownership: SessionOwnership { connection_id, epoch, location },
            previous,
            has_replaced_socket: has_replaced,
        })
    }

    /// Records a takeover by another node; a socket of the session here is told to end. Returns a notice if the session was here and had no
    /// socket.
    pub fn record_peer_takeover(&self, taken: &SessionTakeover) -> Option<SocketlessTakeover> {
        let SessionTakeover { ownership, previous } = taken;
        let not_open = SocketlessTakeover { connection_id: ownership.connection_id, epoch: ownership.epoch };
        let since_ms = self.now_ms();
        let (mut record, here) = match self.records.entry(ownership.connection_id) {
            Entry::Occupied(occupied) => {
                let mut record = occupied.into_ref();
                let owner = self.owner(&record);
                if owner >= ownership.owner() {
                    // The present owner took the session from this taker, without knowledge of the earlier location or its quota slot.
                    let is_before = self.is_own(previous) && record.state != SessionState::Served(*previous);
                    let is_left = record.replaced_at == Some(*previous);
                    let is_not_open =
                        is_before && !is_left && !self.end_replaced_socket(&mut record, *previous);
                    // A takeover that was known already has been reported before.
                    return (is_not_open && owner > ownership.owner()).then_some(not_open);
                }
                (record.epoch, record.since_ms) = (ownership.epoch, since_ms);
                let here =
                    std::mem::replace(&mut record.state, SessionState::Served(ownership.location)).slot();
                (record, here)
            }
            Entry::Vacant(vacant) => {
                let (epoch, state, held) =
                    (ownership.epoch, SessionState::Served(ownership.location), self.empty_retained());
                (
                    vacant.insert(SessionRecord {
                        epoch,
                        since_ms,
                        state,
                        replaced_at: None,
                        retained: held,
                    }),
                    Some(*previous),
                )
            }
        };
        // A socket on a third node is that node's to end.
        let is_not_open =
            here.is_none_or(|here| self.is_own(&here) && !self.end_replaced_socket(&mut record, here));
        drop(record);
        self.remember(&self.by_age, since_ms, ownership.connection_id);
        is_not_open.then_some(not_open)
    }

    /// Records that a session was closed for good on another node. A caller that has resumed the session before this was known keeps it.
    pub fn record_peer_close(&self, over: &ClosedSession) {
        let since_ms = self.now_ms();
        let new = || self.closed_record(over.owner, since_ms);
        let mut record = self.records.entry(over.connection_id).or_insert_with(new);
        if self.owner(&record) > over.owner {
            return;
        }
        *record = new();
        drop(record);
        self.remember(&self.closed_by_age, since_ms, over.connection_id);
    }

    fn closed_record(&self, owner: SessionOwner, since_ms: u64) -> SessionRecord {
        let (epoch, state, held) =
            (owner.epoch, SessionState::Closed(owner.incarnation), self.empty_retained());
        SessionRecord { epoch, since_ms, state, replaced_at: None, retained: held }
    }

    /// Handles a takeover whose previous location had no open socket, so that no quota slot was freed. If the session was taken over again
    /// since, the present owner has no slot by it either: returns the peer to inform.
    pub fn handle_takeover_miss(&self, not_open: SocketlessTakeover) -> Option<(u64, SocketlessTakeover)> {
        let record =
            self.records.get(&not_open.connection_id).filter(|record| record.epoch >= not_open.epoch)?;
        let (location, epoch) = (record.state.slot()?, record.epoch);
        drop(record);
        let SessionLocation { incarnation, shard, slot, generation } = location;
        if !self.is_own(&location) {
            // At equal epochs the greater incarnation owns the session. Notices go in this direction only, so that they never loop.
            let is_greater = (epoch, incarnation) > (not_open.epoch, self.incarnation);
            return is_greater.then_some((incarnation, SocketlessTakeover { epoch, ..not_open }));
        }
        self.handles[usize::from(shard)].push(Input::TakeoverMiss { slot, generation });
        None
    }

    /// Ends the session's socket at this location for a takeover. False if none was open there.
    fn end_replaced_socket(&self, record: &mut SessionRecord, location: SessionLocation) -> bool {
        let is_open = self.end_local_socket(location);
        if is_open {
            record.replaced_at = Some(location);
        }
        is_open
    }

    /// Ends the socket at this location. False if none was open on this node.
    fn end_local_socket(&self, location: SessionLocation) -> bool {
        let SessionLocation { shard, slot, generation, .. } = location;
        // At once, since the shard may reuse the slot by the next moment.
        let is_open = self.is_own(&location) && {
            let mut open = self.open.get(usize::from(shard)).map(Mutex::lock);
            let open = open.as_mut().and_then(|open| open.get_mut(slot as usize));
            open.is_some_and(|open| *open == generation && std::mem::take(open) != 0)
        };
        if is_open {
            self.handles[usize::from(shard)].push(Input::TakenOver { slot, generation });
        }
        is_open
    }

    fn is_own(&self, location: &SessionLocation) -> bool {
        location.incarnation == self.incarnation
    }

    fn owner(&self, record: &SessionRecord) -> SessionOwner {
        let incarnation = match record.state {
            SessionState::Served(location) => location.incarnation,
            SessionState::Lost => self.incarnation,
            SessionState::Closed(incarnation) => incarnation,
        };
        SessionOwner { epoch: record.epoch, incarnation }
    }

    /// Records the end of a session's socket, with its channels by number and the sequence since which each was accessible. False if
    /// another socket has taken the session over.
    pub(super) fn end(&self, ownership: &SessionOwnership, for_good: bool, held: Vec<(u64, u64)>) -> bool {
        // Under one lock, so that concurrent look-ups find the session either open or lost.
        let mut entry = self.records.entry(ownership.connection_id);
        self.note_open(ownership.location, 0);
        let (since_ms, total_max) = (self.now_ms(), RETAINED_PER_SESSION * self.lost_max);
        if let Entry::Occupied(occupied) = &mut entry
            && self.owner(occupied.get()) > ownership.owner()
        {
            occupied.get_mut().retained.add(&held, since_ms, false, total_max);
            return false;
        }
        if for_good {
            // Never resumed: all of its keys name a location here that is not open.
            if ownership.epoch == 0 {
                if let Entry::Occupied(occupied) = entry {
                    occupied.remove();
                }
            } else {
                drop(entry.insert(self.closed_record(ownership.owner(), since_ms)));
                self.remember(&self.closed_by_age, since_ms, ownership.connection_id);
            }
            return true;
        }
        let mut record = entry.or_insert_with(|| {
            let held = self.empty_retained();
            SessionRecord {
                epoch: ownership.epoch,
                since_ms,
                state: SessionState::Lost,
                replaced_at: None,
                retained: held,
            }
        });
        (record.epoch, record.since_ms, record.state) = (ownership.epoch, since_ms, SessionState::Lost);
        record.retained.forget_before(since_ms.saturating_sub(self.window_ms));
        record.retained.add(&held, since_ms, true, total_max);
        drop(record);
        self.remember(&self.by_age, since_ms, ownership.connection_id);
        true
    }

    /// The sequence after which a session had access to all messages of a channel, before it was lost within the resume window. A socket
    /// that was just taken over may not have recorded its channels yet.
    pub(super) fn retained_since(&self, connection_id: ConnectionId, channel: u64) -> Option<u64> {
        let record = self.records.get(&connection_id)?;
        let held = record.retained.channels.iter().find(|held| held.number == channel)?;
        (self.now_ms() <= held.lost_ms + self.window_ms).then_some(held.since)
    }

    fn empty_retained(&self) -> RetainedChannels {
        RetainedChannels { channels: Vec::new(), total: Arc::clone(&self.retained_total) }
    }

    /// Checks a key. None: the session cannot be resumed. Otherwise its location, if it has an open socket.
    #[expect(clippy::option_option, reason = "usable or not, and then open or lost")]
    fn check_resumable(
        &self,
        ownership: &SessionOwnership,
        record: Option<&SessionRecord>,
    ) -> Option<Option<SessionLocation>> {
        let is_served = |location: &SessionLocation| {
            self.is_own(location)
                || (self.peer_incarnations)(location.incarnation) == Some(IncarnationStatus::Alive)
        };
        // The key may be from a node that has taken the session over since.
        let is_newest = |record: &&SessionRecord| self.owner(record) >= ownership.owner();
        let is_in_time = |record: &&SessionRecord| self.now_ms() <= record.since_ms + self.window_ms;
        match record.filter(is_newest).filter(is_in_time) {
            Some(SessionRecord { state: SessionState::Closed(_), .. }) => None,
            Some(record) => Some(record.state.slot().filter(is_served)),
            None if ownership.location.incarnation == self.incarnation => {
                self.is_open(ownership.location).then_some(Some(ownership.location))
            }
            None => {
                let of = |(incarnation, _): &&(u64, u64)| *incarnation == ownership.location.incarnation;
                if let Some((_, passed_ms)) = self.earlier_incarnations.iter().find(of) {
                    return (passed_ms + self.now_ms() <= self.window_ms).then_some(None);
                }
                // The time of the loss on that node is not known here.
                let status = (self.peer_incarnations)(ownership.location.incarnation)?;
                Some((status == IncarnationStatus::Alive).then_some(ownership.location))
            }
        }
    }

    fn remember(&self, ages: &SessionAges, since_ms: u64, connection_id: ConnectionId) {
        let mut by_age = ages.lock();
        by_age.push_back((since_ms, connection_id));
        let mut expired: Vec<(u64, ConnectionId)> = Vec::new();
        while let Some((since_ms, _)) = by_age.front().copied()
            && (since_ms + self.window_ms < self.now_ms() || by_age.len() > self.lost_max)
        {
            expired.extend(by_age.pop_front());
        }
        drop(by_age);
        for (since_ms, id) in expired {
            self.records.remove_if(&id, |_, record| record.since_ms == since_ms);
        }
    }

    fn note_open(&self, location: SessionLocation, generation: u32) {
        let mut open = self.open[usize::from(location.shard)].lock();
        let slot = location.slot as usize;
        if open.len() <= slot {
            open.resize(slot + 1, 0);
        }
        open[slot] = generation;
    }

    fn is_open_here(&self, location: SessionLocation) -> bool {
        self.is_own(&location) && self.is_open(location)
    }

    /// True if the connection at this location of this node is open.
    pub(super) fn is_open(&self, location: SessionLocation) -> bool {
        let Some(open) = self.open.get(usize::from(location.shard)) else { return false };
        open.lock().get(location.slot as usize) == Some(&location.generation)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
