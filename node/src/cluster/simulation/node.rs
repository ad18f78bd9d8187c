//! A simulated node: its channels and its routing, with mailboxes in place of shards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::client::SimMailbox;
use super::net::{SimEndpoint, SimLinks};
use super::{CLIENTS, TICK};
use crate::cluster::inbound::{Inbound, Peer};
use crate::cluster::link::{InboundStreams, QueueBounds};
use crate::cluster::membership::{Liveness, LivenessState};
use crate::cluster::routing::{KeptNodes, Routing};
use crate::hub::{DeliveryTarget, Hub};
use crate::model::{Clock, Limits, PresenceEvent, PublishedMessages};
use crate::origin::history::{HistoryStore, StoreCallback};
use crate::publish::Publisher;
use crate::tasks::Tasks;
use crate::testing::FakeStore;

/// Store that keeps presence events only, and acknowledges everything at once.
#[derive(Default)]
pub(super) struct SimPresenceStore(Mutex<Vec<Arc<PresenceEvent>>>);

impl FakeStore for SimPresenceStore {
    fn append(&self, _: Arc<PublishedMessages>, _: Option<u32>, done: StoreCallback) {
        done(Ok(()));
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, _: Option<u32>, done: StoreCallback) {
        self.0.lock().push(event);
        done(Ok(()));
    }
}

impl SimPresenceStore {
    /// Events that were stored since the last call.
    pub(super) fn take(&self) -> Vec<Arc<PresenceEvent>> {
        std::mem::take(&mut self.0.lock())
    }
}

pub(super) struct SimNode {
    pub(super) peer: Peer,
    pub(super) is_alive: bool,
    pub(super) hub: Arc<Hub>,
    pub(super) routing: Arc<Routing>,
    pub(super) publisher: Publisher,
    pub(super) tasks: Arc<Tasks>,
    pub(super) mailboxes: Vec<Arc<SimMailbox>>,
    pub(super) links: Arc<SimLinks>,
    pub(super) accepted: InboundStreams,
    pub(super) store: Arc<SimPresenceStore>,
    pub(super) clock: Clock,
    pub(super) liveness: Liveness,
    /// Nodes of which this node has heard.
    pub(super) known: BTreeSet<usize>,
    /// Nodes that have answered, and when each was last seen.
    pub(super) met: BTreeMap<usize, Instant>,
    pub(super) view: Vec<(usize, LivenessState, bool)>,
    /// Next times of gossip, of the check for orphaned members, and of the comparison of presence digests.
    pub(super) due: [Duration; 3],
}

/// Settings that differ from node to node, or from seed to seed.
pub(super) struct SimNodeSettings {
    pub(super) incarnation: u64,
    /// Number of streams of each link.
    pub(super) stream_count: usize,
    /// Number of items that the queue of one stream holds.
    pub(super) items: usize,
    pub(super) presence_timeout: Duration,
    pub(super) clock_ms: u64,
    /// Time since the world began.
    pub(super) due: [Duration; 3],
}

impl SimNode {
    pub(super) fn start(index: usize, settings: &SimNodeSettings, now: Instant) -> Self {
        let SimNodeSettings { incarnation, stream_count, items, presence_timeout, clock_ms, due } = *settings;
        let presence_grace_ms = u64::try_from(presence_timeout.as_millis()).expect("a short time");
        let limits = Limits { presence_grace_ms, ..Limits::default() };
        let clock = Clock::manual(clock_ms);
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let mailboxes: Vec<Arc<SimMailbox>> = (0..CLIENTS).map(|_| Arc::default()).collect();
        let targets =
            mailboxes.iter().map(|mailbox| Arc::clone(mailbox) as Arc<dyn DeliveryTarget>).collect();
        let hub = Arc::new(Hub::new(targets, clock.clone(), &limits).with_incarnation(incarnation));
        let peer = Peer { node_id: format!("n{index}").into(), incarnation };
        let routing = Routing::new(&hub, &peer.node_id, KeptNodes::default(), &tasks);
        let store = Arc::new(SimPresenceStore::default());
        let history = Arc::clone(&store) as Arc<dyn HistoryStore>;
        let publisher = Publisher::new(&hub, &history, &limits, Some(&routing));
        let links = SimLinks::new(stream_count, QueueBounds { items, ..QueueBounds::default() });
        routing.set_links(Arc::clone(&links));
        Self {
            peer,
            is_alive: true,
            hub,
            routing,
            publisher,
            tasks,
            mailboxes,
            links,
            accepted: InboundStreams::default(),
            store,
            clock,
            liveness: Liveness::new(TICK, now),
            known: BTreeSet::new(),
            met: BTreeMap::new(),
            view: Vec::new(),
            due,
        }
    }

    pub(super) fn side(&self) -> SimEndpoint<'_> {
        SimEndpoint {
            peer: &self.peer,
            inbound_streams: &self.accepted,
            inbound: &*self.routing as &dyn Inbound,
        }
    }
}
