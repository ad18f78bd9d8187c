//! Streams between simulated nodes: the production queues and bookkeeping, and pipes that the simulation moves on.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use fanfare_proto::peer::{MAJOR, MINOR, v1};
use parking_lot::Mutex;

use crate::cluster::inbound::{Inbound, Peer};
use crate::cluster::link::{
    BatchPull, InboundStreams, OpenInboundStream, PeerAck, PeerAddr, PeerItem, PeerLinks, PeerQueue,
    QueueBounds, StreamEnd,
};

/// The links of one node to its peers.
pub(super) struct SimLinks {
    stream_count: usize,
    bounds: QueueBounds,
    links: Mutex<BTreeMap<u64, Arc<SimLink>>>,
}

pub(super) struct SimLink {
    peer: Peer,
    streams: Vec<SimPeerStream>,
}

struct SimPeerStream {
    queue: PeerQueue,
    stream: Mutex<Option<SimOpenStream>>,
}

/// An open stream, with the frames on their way over it.
struct SimOpenStream {
    number: u64,
    accepted: OpenInboundStream,
    batches: VecDeque<v1::Batch>,
    confirmed: VecDeque<u64>,
}

/// Batches that were on their way when a stream was cut, and may still arrive.
pub(super) struct LateBatches {
    from: Peer,
    to: u64,
    stream: usize,
    ending: StreamEnd,
    accepted: OpenInboundStream,
    batches: VecDeque<v1::Batch>,
}

impl SimLinks {
    pub(super) fn new(stream_count: usize, bounds: QueueBounds) -> Arc<Self> {
        Arc::new(Self { stream_count, bounds, links: Mutex::default() })
    }

    pub(super) fn link(&self, to: u64) -> Option<Arc<SimLink>> {
        self.links.lock().get(&to).map(Arc::clone)
    }
}

impl PeerLinks for Arc<SimLinks> {
    fn set_peers(&self, peers: Vec<PeerAddr>) {
        let mut links = self.links.lock();
        links.retain(|incarnation, _| peers.iter().any(|peer| peer.peer.incarnation == *incarnation));
        for PeerAddr { peer, .. } in peers {
            links.entry(peer.incarnation).or_insert_with(|| {
                let stream =
                    || SimPeerStream { queue: PeerQueue::new(self.bounds), stream: Mutex::default() };
                Arc::new(SimLink { peer, streams: (0..self.stream_count).map(|_| stream()).collect() })
            });
        }
    }

    fn stream_count(&self) -> usize {
        self.stream_count
    }

    fn send(&self, to: u64, channel_hash: u64, item: &PeerItem) -> PeerAck {
        let Some(link) = self.link(to) else { return PeerAck::lost() };
        link.streams[(channel_hash % self.stream_count as u64) as usize].queue.push(item.encoded(), None)
    }

    fn is_up(&self, incarnation: u64) -> bool {
        self.link(incarnation).is_some_and(|link| link.is_up())
    }
}

impl SimLink {
    pub(super) fn is_up(&self) -> bool {
        self.streams.iter().all(|one| one.stream.lock().is_some())
    }

    pub(super) fn is_open(&self, index: usize) -> bool {
        self.streams[index].stream.lock().is_some()
    }

    /// Opens the stream: the handshake succeeds.
    pub(super) fn open(&self, index: usize, from: &SimEndpoint<'_>, to: &SimEndpoint<'_>) {
        let SimPeerStream { queue, stream } = &self.streams[index];
        let hello = v1::Hello {
            major: MAJOR,
            minor: MINOR,
            node_id: from.peer.node_id.to_string(),
            incarnation: from.peer.incarnation,
            peer_stream: index as u32,
            next: queue.next(),
            taken: 0,
            to: to.peer.incarnation,
        };
        let Ok((accepted, answer)) = to.inbound_streams.open(hello, to.peer, to.inbound) else { return };
        to.inbound.stream_opened(from.peer, index as u32);
        let number = queue.open(answer.taken);
        *stream.lock() =
            Some(SimOpenStream { number, accepted, batches: VecDeque::new(), confirmed: VecDeque::new() });
        if self.is_up() {
            from.inbound.link(&self.peer, true);
        }
    }

    /// Sends queued batches. False if the queue had overflowed, which ends the stream.
    pub(super) fn send(&self, index: usize) -> bool {
        let SimPeerStream { queue, stream } = &self.streams[index];
        let mut stream = stream.lock();
        let Some(stream) = &mut *stream else { return true };
        match queue.pull(stream.number) {
            BatchPull::Batch(batch) => stream.batches.push_back(batch),
            BatchPull::Nothing => {}
            BatchPull::Over => return false,
        }
        true
    }

    /// Delivers one batch. False if the other end has closed the stream.
    pub(super) fn arrive(&self, index: usize, to: &dyn Inbound) -> bool {
        let mut stream = self.streams[index].stream.lock();
        let Some(stream) = &mut *stream else { return true };
        let Some(batch) = stream.batches.pop_front() else { return true };
        match stream.accepted.take(batch, to) {
            Ok(sequence) => stream.confirmed.push_back(sequence),
            Err(_) => return false,
        }
        true
    }

    /// Delivers one ack.
    pub(super) fn confirm(&self, index: usize) {
        let confirmed =
            self.streams[index].stream.lock().as_mut().and_then(|stream| stream.confirmed.pop_front());
        if let Some(sequence) = confirmed {
            self.streams[index].queue.confirm(sequence);
        }
    }

    /// Cuts the stream. Returns the batches on their way, which may still arrive.
    pub(super) fn cut(&self, index: usize, from: &SimEndpoint<'_>, ending: StreamEnd) -> Option<LateBatches> {
        let was_up = self.is_up();
        let SimOpenStream { accepted, batches, .. } = self.streams[index].stream.lock().take()?;
        if was_up {
            from.inbound.link(&self.peer, false);
        }
        let (from, to) = (from.peer.clone(), self.peer.incarnation);
        Some(LateBatches { from, to, stream: index, ending, accepted, batches })
    }

    pub(super) fn is_idle(&self, index: usize) -> bool {
        self.streams[index].stream.lock().as_ref().is_some_and(|stream| {
            stream.batches.is_empty()
                && stream.confirmed.is_empty()
                && self.streams[index].queue.held_bytes() == 0
        })
    }
}

impl LateBatches {
    pub(super) fn to(&self) -> u64 {
        self.to
    }

    /// Delivers one batch. False if no further batch can arrive.
    pub(super) fn arrive(&mut self, to: &dyn Inbound) -> bool {
        if let Some(batch) = self.batches.pop_front()
            && self.accepted.take(batch, to).is_ok()
        {
            return true;
        }
        if self.accepted.is_current() {
            to.stream_ended(&self.from, self.stream as u32, self.ending.may_be_contiguous());
        }
        false
    }

    /// Drops all batches.
    pub(super) fn drop_all(&mut self) {
        self.batches.clear();
    }
}

/// One end of a stream.
pub(super) struct SimEndpoint<'a> {
    pub(super) peer: &'a Peer,
    pub(super) inbound_streams: &'a InboundStreams,
    pub(super) inbound: &'a dyn Inbound,
}
