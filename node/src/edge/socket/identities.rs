//! Connections over their sockets: which are lost, which are open, and who may take up which.
//!
//! An idle connection has no entry here: where it is served stands in the key that its client holds.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use dashmap::DashMap;
use dashmap::mapref::entry::Entry;
use parking_lot::Mutex;

use super::{Input, ShardHandle};
use crate::auth::{ConnectionKeys, Principal};
use crate::model::{
    ClientId, Clock, ConnectionId, Limits, NotOpen, Over, Owner, Place, Run, TakenUp, Tenure,
};

/// Channels of lost connections that are kept, for each connection that may be kept.
const HELD_FOR_EACH: usize = 10;

/// What is known of the runs of other nodes by their incarnations; none: nobody's connection comes from there.
pub type Runs = Box<dyn Fn(u64) -> Option<Run> + Send + Sync>;

/// Times are milliseconds since this was made, which is when the node became ready to take connections up.
pub struct Identities {
    keys: ConnectionKeys,
    incarnation: u64,
    clock: Clock,
    started: Instant,
    window_ms: u64,
    /// By shard and slot the generation that is open there, 0 where none is.
    open: Vec<Mutex<Vec<u32>>>,
    handles: Vec<Arc<ShardHandle>>,
    /// What was lost, taken up, or ended for good within the window.
    records: DashMap<ConnectionId, Record>,
    /// The same by age. Bounded by `lost_max`: beyond it the oldest is forgotten, and with it the way back.
    by_age: Ages,
    /// Those that ended for good, bounded in the same way: the others do not give way to them.
    over_by_age: Ages,
    lost_max: usize,
    /// What the records hold of channels, all together.
    held: Arc<AtomicUsize>,
    /// Former runs of this node, with what has passed since each of the time in which its connections can be taken up.
    former: Vec<(u64, u64)>,
    elsewhere: Runs,
}

type Ages = Mutex<VecDeque<(u64, ConnectionId)>>;

#[derive(Debug)]
struct Record {
    epoch: u64,
    since_ms: u64,
    stands: Stands,
    /// The last place here whose socket was told to end for another: its seat went along.
    left: Option<Place>,
    held: Held,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stands {
    /// It is served, here or on another node.
    At(Place),
    /// It is lost, which it is here.
    Lost,
    /// It ended for good, on that run.
    Over(u64),
}

impl Stands {
    fn place(self) -> Option<Place> {
        match self {
            Self::At(place) => Some(place),
            Self::Lost | Self::Over(_) => None,
        }
    }
}

/// The channels of a connection before it was lost: what it was given of them then it may have later too.
#[derive(Debug)]
struct Held {
    channels: Vec<HeldChannel>,
    /// Of all records.
    total: Arc<AtomicUsize>,
}

#[derive(Debug, Clone, Copy)]
struct HeldChannel {
    /// In the hub.
    number: u64,
    /// All after this sequence was the connection's to have.
    since: u64,
    lost_ms: u64,
}

impl Held {
    /// Adds channels that another socket of the connection had; what is not known yet wins, unless it is `newer`. Without
    /// room nothing is kept, and then the age of the messages decides what may be given.
    fn add(&mut self, channels: &[(u64, u64)], lost_ms: u64, is_newer: bool, total_max: usize) {
        for (number, since) in channels.iter().copied() {
            let known = self.channels.iter_mut().find(|held| held.number == number);
            match known {
                Some(held) if is_newer => (held.since, held.lost_ms) = (since, lost_ms),
                Some(_) => {}
                None if self.total.fetch_add(1, Ordering::Relaxed) < total_max => {
                    self.channels.reserve_exact(channels.len().saturating_sub(self.channels.len()));
                    self.channels.push(HeldChannel { number, since, lost_ms });
                }
                None => drop(self.total.fetch_sub(1, Ordering::Relaxed)),
            }
        }
    }

    fn forget_before(&mut self, lost_ms: u64) {
        let before = self.channels.len();
        self.channels.retain(|held| held.lost_ms >= lost_ms);
        self.total.fetch_sub(before - self.channels.len(), Ordering::Relaxed);
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.total.fetch_sub(self.channels.len(), Ordering::Relaxed);
    }
}

/// A connection that somebody may take up.
#[derive(Debug)]
pub struct Former {
    tenure: Tenure,
    /// A socket is open under it, which will be closed.
    pub is_open: bool,
}

/// A connection that has begun.
#[derive(Debug)]
pub(super) struct Begun {
    pub tenure: Tenure,
    /// Where it was before, as far as is known. None: it is a fresh one.
    pub former: Option<Place>,
    /// False when it was let in for a socket that was open and is not any more: its seat may have been given to another since.
    pub is_seated: bool,
}

/// What was taken up.
struct Taken {
    tenure: Tenure,
    former: Place,
    /// A socket ends for it, here or on another node, which says if it does not.
    has_replaced: bool,
}

impl Identities {
    pub fn new(
        keys: ConnectionKeys,
        incarnation: u64,
        former: Vec<(u64, u64)>,
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
            over_by_age: Mutex::default(),
            lost_max: limits.lost_connections,
            held: Arc::default(),
            former,
            elsewhere: Box::new(|_| None),
        }
    }

    /// Takes up what was served on other nodes too.
    pub fn with_runs(mut self, elsewhere: Runs) -> Self {
        self.elsewhere = elsewhere;
        self
    }

    pub fn keys(&self) -> &ConnectionKeys {
        &self.keys
    }

    /// The connection that the key names, if this caller may take it up now.
    pub fn look(&self, text: &str, principal: &Principal, client_id: Option<&ClientId>) -> Option<Former> {
        let tenure = self.keys.open(text, principal, client_id)?;
        let record = self.records.get(&tenure.connection_id);
        let place = self.usable(&tenure, record.as_deref())?;
        let is_open_here =
            |record: &Record| record.stands.place().is_some_and(|here| self.is_open_here(here));
        Some(Former { tenure, is_open: place.is_some() || record.as_deref().is_some_and(is_open_here) })
    }

    /// Begins a connection at `place`: the former one if it can still be taken up, whose open socket is told to end,
    /// else a fresh one.
    pub(super) fn begin(&self, former: Option<Former>, place: Place) -> Begun {
        self.note_open(place, place.generation);
        let taken = former.as_ref().and_then(|former| self.take_up(&former.tenure, place));
        let was_open = former.is_some_and(|former| former.is_open);
        match taken {
            Some(Taken { tenure, former, has_replaced }) => {
                Begun { tenure, former: Some(former), is_seated: has_replaced || !was_open }
            }
            None => {
                let tenure = Tenure { connection_id: ConnectionId::random(), epoch: 0, place };
                Begun { tenure, former: None, is_seated: !was_open }
            }
        }
    }

    /// None: it cannot be taken up any more.
    fn take_up(&self, tenure: &Tenure, place: Place) -> Option<Taken> {
        let connection_id = tenure.connection_id;
        let entry = self.records.entry(connection_id);
        let record = match &entry {
            Entry::Occupied(occupied) => Some(occupied.get()),
            Entry::Vacant(_) => None,
        };
        let holder = self.usable(tenure, record)?;
        let last = record.map_or(tenure.epoch, |record| record.epoch.max(tenure.epoch));
        // Above all epochs of former runs too.
        let epoch = last.saturating_add(1).max(self.clock.highest_ms());
        let since_ms = self.now_ms();
        let mut record = entry.or_insert_with(|| {
            let held = self.nothing_held();
            Record { epoch, since_ms, stands: Stands::Lost, left: None, held }
        });
        let known = std::mem::replace(&mut record.stands, Stands::At(place)).place();
        (record.epoch, record.since_ms) = (epoch, since_ms);
        // Also what the key's node has not said yet that it took up from here, or cannot say any more.
        let mut has_replaced = holder.is_some_and(|holder| !self.is_own(&holder));
        for former in [known, holder].into_iter().flatten() {
            has_replaced |= self.leave(&mut record, former);
        }
        drop(record);
        self.remember(&self.by_age, since_ms, connection_id);
        let former = holder.unwrap_or(tenure.place);
        Some(Taken { tenure: Tenure { connection_id, epoch, place }, former, has_replaced })
    }

    /// Another node goes on with a connection; the socket that it may have here is told to end. Something, if it was here and had
    /// none.
    pub fn taken_elsewhere(&self, taken: &TakenUp) -> Option<NotOpen> {
        let TakenUp { tenure, former } = taken;
        let not_open = NotOpen { connection_id: tenure.connection_id, epoch: tenure.epoch };
        let since_ms = self.now_ms();
        let (mut record, here) = match self.records.entry(tenure.connection_id) {
            Entry::Occupied(occupied) => {
                let mut record = occupied.into_ref();
                let owner = self.owner(&record);
                if owner >= tenure.owner() {
                    // Whoever has it now took it from this one, and could not tell where it was before: nor whether it had a seat.
                    let is_before = self.is_own(former) && record.stands != Stands::At(*former);
                    let is_left = record.left == Some(*former);
                    let is_not_open = is_before && !is_left && !self.leave(&mut record, *former);
                    // Of what was heard already that was said.
                    return (is_not_open && owner > tenure.owner()).then_some(not_open);
                }
                (record.epoch, record.since_ms) = (tenure.epoch, since_ms);
                let here = std::mem::replace(&mut record.stands, Stands::At(tenure.place)).place();
                (record, here)
            }
            Entry::Vacant(vacant) => {
                let (epoch, stands, held) = (tenure.epoch, Stands::At(tenure.place), self.nothing_held());
                (vacant.insert(Record { epoch, since_ms, stands, left: None, held }), Some(*former))
            }
        };
        // What is on a third node is that one's to end.
        let is_not_open = here.is_none_or(|here| self.is_own(&here) && !self.leave(&mut record, here));
        drop(record);
        self.remember(&self.by_age, since_ms, tenure.connection_id);
        is_not_open.then_some(not_open)
    }

    /// A connection ended for good on another node. Who has taken it up before this was known goes on with it.
    pub fn over_elsewhere(&self, over: &Over) {
        let since_ms = self.now_ms();
        let new = || self.over(over.owner, since_ms);
        let mut record = self.records.entry(over.connection_id).or_insert_with(new);
        if self.owner(&record) > over.owner {
            return;
        }
        *record = new();
        drop(record);
        self.remember(&self.over_by_age, since_ms, over.connection_id);
    }

    fn over(&self, owner: Owner, since_ms: u64) -> Record {
        let (epoch, stands, held) = (owner.epoch, Stands::Over(owner.incarnation), self.nothing_held());
        Record { epoch, since_ms, stands, left: None, held }
    }

    /// What was taken up here had no socket where it was before. Whoever has taken it up since has come by its seat in the same
    /// way: of what is on another node by now, that run is to be told.
    pub fn not_open(&self, not_open: NotOpen) -> Option<(u64, NotOpen)> {
        let record =
            self.records.get(&not_open.connection_id).filter(|record| record.epoch >= not_open.epoch)?;
        let (place, epoch) = (record.stands.place()?, record.epoch);
        drop(record);
        let Place { incarnation, shard, slot, generation } = place;
        if !self.is_own(&place) {
            // Of two in one epoch the greater incarnation has it. The word goes no other way, so that it never goes round.
            let is_greater = (epoch, incarnation) > (not_open.epoch, self.incarnation);
            return is_greater.then_some((incarnation, NotOpen { epoch, ..not_open }));
        }
        self.handles[usize::from(shard)].push(Input::NotOpen { slot, generation });
        None
    }

    /// The socket that the connection may have at `place` ends for another. False when none was open there.
    fn leave(&self, record: &mut Record, place: Place) -> bool {
        let is_open = self.end_here(place);
        if is_open {
            record.left = Some(place);
        }
        is_open
    }

    /// False when it was not open here.
    fn end_here(&self, place: Place) -> bool {
        let Place { shard, slot, generation, .. } = place;
        // At once, as the shard may have another one in the slot by the next moment.
        let is_open = self.is_own(&place) && {
            let mut open = self.open.get(usize::from(shard)).map(Mutex::lock);
            let open = open.as_mut().and_then(|open| open.get_mut(slot as usize));
            open.is_some_and(|open| *open == generation && std::mem::take(open) != 0)
        };
        if is_open {
            self.handles[usize::from(shard)].push(Input::TakenUp { slot, generation });
        }
        is_open
    }

    fn is_own(&self, place: &Place) -> bool {
        place.incarnation == self.incarnation
    }

    fn owner(&self, record: &Record) -> Owner {
        let incarnation = match record.stands {
            Stands::At(place) => place.incarnation,
            Stands::Lost => self.incarnation,
            Stands::Over(run) => run,
        };
        Owner { epoch: record.epoch, incarnation }
    }

    /// The socket of the connection is gone, which had these channels, by their numbers, each since a sequence. False when
    /// another one has taken it up.
    pub(super) fn end(&self, tenure: &Tenure, for_good: bool, held: Vec<(u64, u64)>) -> bool {
        // Together, so that who looks meanwhile finds it open or finds it lost.
        let mut entry = self.records.entry(tenure.connection_id);
        self.note_open(tenure.place, 0);
        let (since_ms, total_max) = (self.now_ms(), HELD_FOR_EACH * self.lost_max);
        if let Entry::Occupied(occupied) = &mut entry
            && self.owner(occupied.get()) > tenure.owner()
        {
            occupied.get_mut().held.add(&held, since_ms, false, total_max);
            return false;
        }
        if for_good {
            // Where it was never taken up all its keys name a place here that is not open.
            if tenure.epoch == 0 {
                if let Entry::Occupied(occupied) = entry {
                    occupied.remove();
                }
            } else {
                drop(entry.insert(self.over(tenure.owner(), since_ms)));
                self.remember(&self.over_by_age, since_ms, tenure.connection_id);
            }
            return true;
        }
        let mut record = entry.or_insert_with(|| {
            let held = self.nothing_held();
            Record { epoch: tenure.epoch, since_ms, stands: Stands::Lost, left: None, held }
        });
        (record.epoch, record.since_ms, record.stands) = (tenure.epoch, since_ms, Stands::Lost);
        record.held.forget_before(since_ms.saturating_sub(self.window_ms));
        record.held.add(&held, since_ms, true, total_max);
        drop(record);
        self.remember(&self.by_age, since_ms, tenure.connection_id);
        true
    }

    /// The sequence after which all messages of a channel were a connection's to have, before it was lost within the window.
    /// A socket that was just taken over may not have told yet.
    pub(super) fn since(&self, connection_id: ConnectionId, channel: u64) -> Option<u64> {
        let record = self.records.get(&connection_id)?;
        let held = record.held.channels.iter().find(|held| held.number == channel)?;
        (self.now_ms() <= held.lost_ms + self.window_ms).then_some(held.since)
    }

    fn nothing_held(&self) -> Held {
        Held { channels: Vec::new(), total: Arc::clone(&self.held) }
    }

    /// None: the key is not good any more. Else where the connection is served, if it is.
    #[expect(clippy::option_option, reason = "usable or not, and then open or lost")]
    fn usable(&self, tenure: &Tenure, record: Option<&Record>) -> Option<Option<Place>> {
        let is_served =
            |place: &Place| self.is_own(place) || (self.elsewhere)(place.incarnation) == Some(Run::Alive);
        // The key may be of a node that has taken it up since.
        let is_newest = |record: &&Record| self.owner(record) >= tenure.owner();
        let is_in_time = |record: &&Record| self.now_ms() <= record.since_ms + self.window_ms;
        match record.filter(is_newest).filter(is_in_time) {
            Some(Record { stands: Stands::Over(_), .. }) => None,
            Some(record) => Some(record.stands.place().filter(is_served)),
            None if tenure.place.incarnation == self.incarnation => {
                self.is_open(tenure.place).then_some(Some(tenure.place))
            }
            None => {
                let of = |(run, _): &&(u64, u64)| *run == tenure.place.incarnation;
                if let Some((_, passed_ms)) = self.former.iter().find(of) {
                    return (passed_ms + self.now_ms() <= self.window_ms).then_some(None);
                }
                // How long it is lost there is not known here.
                let run = (self.elsewhere)(tenure.place.incarnation)?;
                Some((run == Run::Alive).then_some(tenure.place))
            }
        }
    }

    fn remember(&self, ages: &Ages, since_ms: u64, connection_id: ConnectionId) {
        let mut by_age = ages.lock();
        by_age.push_back((since_ms, connection_id));
        let mut gone: Vec<(u64, ConnectionId)> = Vec::new();
        while let Some((since_ms, _)) = by_age.front().copied()
            && (since_ms + self.window_ms < self.now_ms() || by_age.len() > self.lost_max)
        {
            gone.extend(by_age.pop_front());
        }
        drop(by_age);
        for (since_ms, id) in gone {
            self.records.remove_if(&id, |_, record| record.since_ms == since_ms);
        }
    }

    fn note_open(&self, place: Place, generation: u32) {
        let mut open = self.open[usize::from(place.shard)].lock();
        let slot = place.slot as usize;
        if open.len() <= slot {
            open.resize(slot + 1, 0);
        }
        open[slot] = generation;
    }

    fn is_open_here(&self, place: Place) -> bool {
        self.is_own(&place) && self.is_open(place)
    }

    /// Of a place here.
    pub(super) fn is_open(&self, place: Place) -> bool {
        let Some(open) = self.open.get(usize::from(place.shard)) else { return false };
        open.lock().get(place.slot as usize) == Some(&place.generation)
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX)
    }
}
