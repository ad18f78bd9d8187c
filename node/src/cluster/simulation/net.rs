//! Lanes between simulated nodes: the queues and the bookkeeping of real ones, and pipes that whoever simulates moves on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fanfare_proto::peer::{MAJOR, MINOR, v1};
use parking_lot::Mutex;

use crate::cluster::inbound::{Inbound, Peer};
use crate::cluster::link::{
    Ending, Item, Lanes, OpenLane, PeerAddr, PeerLinks, Pull, Queue, QueueBounds, Receipt,
};

/// The links that one node keeps to others.
pub(super) struct SimLinks {
    lanes: usize,
    bounds: QueueBounds,
    links: Mutex<BTreeMap<u64, Arc<SimLink>>>,
}

pub(super) struct SimLink {
    peer: Peer,
    lanes: Vec<Lane>,
}

struct Lane {
    queue: Queue,
    stream: Mutex<Option<Stream>>,
}

/// An open lane, with what is on its way over it.
struct Stream {
    number: u64,
    accepted: OpenLane,
    batches: VecDeque<v1::Batch>,
    confirmed: VecDeque<u64>,
}

/// What was on its way when a lane was cut, and may still come.
pub(super) struct Late {
    from: Peer,
    to: u64,
    lane: usize,
    ending: Ending,
    accepted: OpenLane,
    batches: VecDeque<v1::Batch>,
}

impl SimLinks {
    pub(super) fn new(lanes: usize, bounds: QueueBounds) -> Arc<Self> {
        Arc::new(Self { lanes, bounds, links: Mutex::default() })
    }

    pub(super) fn link(&self, to: u64) -> Option<Arc<SimLink>> {
        self.links.lock().get(&to).map(Arc::clone)
    }
}

impl PeerLinks for Arc<SimLinks> {
    fn set_peers(&self, peers: Vec<PeerAddr>) {
        let mut links = self.links.lock();
        links.retain(|run, _| peers.iter().any(|peer| peer.peer.incarnation == *run));
        for PeerAddr { peer, .. } in peers {
            links.entry(peer.incarnation).or_insert_with(|| {
                let lane = || Lane { queue: Queue::new(self.bounds), stream: Mutex::default() };
                Arc::new(SimLink { peer, lanes: (0..self.lanes).map(|_| lane()).collect() })
            });
        }
    }

    fn lanes(&self) -> usize {
        self.lanes
    }

    fn send(&self, to: u64, channel_hash: u64, item: &Item) -> Receipt {
        let Some(link) = self.link(to) else { return Receipt::lost() };
        link.lanes[(channel_hash % self.lanes as u64) as usize].queue.push(item.encoded(), None)
    }

    fn is_up(&self, run: u64) -> bool {
        self.link(run).is_some_and(|link| link.is_up())
    }
}

impl SimLink {
    pub(super) fn is_up(&self) -> bool {
        self.lanes.iter().all(|lane| lane.stream.lock().is_some())
    }

    pub(super) fn is_open(&self, lane: usize) -> bool {
        self.lanes[lane].stream.lock().is_some()
    }

    /// A handshake that comes through.
    pub(super) fn open(&self, lane: usize, from: &Side<'_>, to: &Side<'_>) {
        let Lane { queue, stream } = &self.lanes[lane];
        let hello = v1::Hello {
            major: MAJOR,
            minor: MINOR,
            node_id: from.peer.node_id.to_string(),
            incarnation: from.peer.incarnation,
            lane: lane as u32,
            next: queue.next(),
            taken: 0,
            to: to.peer.incarnation,
        };
        let Ok((accepted, answer)) = to.lanes.open(hello, to.peer, to.inbound) else { return };
        to.inbound.lane_opened(from.peer, lane as u32);
        let number = queue.open(answer.taken);
        *stream.lock() =
            Some(Stream { number, accepted, batches: VecDeque::new(), confirmed: VecDeque::new() });
        if self.is_up() {
            from.inbound.link(&self.peer, true);
        }
    }

    /// What waits goes on its way. False when more had come than the lane holds, which ends it.
    pub(super) fn send(&self, lane: usize) -> bool {
        let Lane { queue, stream } = &self.lanes[lane];
        let mut stream = stream.lock();
        let Some(stream) = &mut *stream else { return true };
        match queue.pull(stream.number) {
            Pull::Batch(batch) => stream.batches.push_back(batch),
            Pull::Nothing => {}
            Pull::Over => return false,
        }
        true
    }

    /// One batch arrives. False when the lane is not open any more at the other end.
    pub(super) fn arrive(&self, lane: usize, to: &dyn Inbound) -> bool {
        let mut stream = self.lanes[lane].stream.lock();
        let Some(stream) = &mut *stream else { return true };
        let Some(batch) = stream.batches.pop_front() else { return true };
        match stream.accepted.take(batch, to) {
            Ok(sequence) => stream.confirmed.push_back(sequence),
            Err(_) => return false,
        }
        true
    }

    /// One confirmation arrives.
    pub(super) fn confirm(&self, lane: usize) {
        let confirmed =
            self.lanes[lane].stream.lock().as_mut().and_then(|stream| stream.confirmed.pop_front());
        if let Some(sequence) = confirmed {
            self.lanes[lane].queue.confirm(sequence);
        }
    }

    /// The lane is cut; what was on its way over it, which may still arrive.
    pub(super) fn cut(&self, lane: usize, from: &Side<'_>, ending: Ending) -> Option<Late> {
        let was_up = self.is_up();
        let Stream { accepted, batches, .. } = self.lanes[lane].stream.lock().take()?;
        if was_up {
            from.inbound.link(&self.peer, false);
        }
        let (from, to) = (from.peer.clone(), self.peer.incarnation);
        Some(Late { from, to, lane, ending, accepted, batches })
    }

    pub(super) fn is_idle(&self, lane: usize) -> bool {
        self.lanes[lane].stream.lock().as_ref().is_some_and(|stream| {
            stream.batches.is_empty()
                && stream.confirmed.is_empty()
                && self.lanes[lane].queue.held_bytes() == 0
        })
    }
}

impl Late {
    pub(super) fn to(&self) -> u64 {
        self.to
    }

    /// False when nothing more can come of it.
    pub(super) fn arrive(&mut self, to: &dyn Inbound) -> bool {
        if let Some(batch) = self.batches.pop_front()
            && self.accepted.take(batch, to).is_ok()
        {
            return true;
        }
        if self.accepted.is_current() {
            to.lane_ended(&self.from, self.lane as u32, self.ending.may_be_whole());
        }
        false
    }

    /// Nothing of it arrives.
    pub(super) fn drop_all(&mut self) {
        self.batches.clear();
    }
}

/// One end of a lane.
pub(super) struct Side<'a> {
    pub(super) peer: &'a Peer,
    pub(super) lanes: &'a Lanes,
    pub(super) inbound: &'a dyn Inbound,
}
