//! A simulated node: its channels and its routing, with mailboxes in the place of shards.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::runtime::Handle;

use super::client::Mailbox;
use super::net::{Side, SimLinks};
use super::{CLIENTS, TICK};
use crate::cluster::inbound::{Inbound, Peer};
use crate::cluster::link::{Lanes, QueueBounds};
use crate::cluster::membership::{Liveness, State};
use crate::cluster::routing::{KeptNodes, Routing};
use crate::hub::{DeliveryTarget, Hub};
use crate::model::{Clock, Limits, PresenceEvent, Published};
use crate::origin::history::{Done, HistoryStore};
use crate::publish::Publisher;
use crate::tasks::Tasks;
use crate::testing::FakeStore;

/// Keeps presence events alone, and says at once that it keeps all.
#[derive(Default)]
pub(super) struct Store(Mutex<Vec<Arc<PresenceEvent>>>);

impl FakeStore for Store {
    fn append(&self, _: Arc<Published>, _: Option<u32>, done: Done) {
        done(Ok(()));
    }

    fn append_presence(&self, event: Arc<PresenceEvent>, _: Option<u32>, done: Done) {
        self.0.lock().push(event);
        done(Ok(()));
    }
}

impl Store {
    /// What was stored since this was asked last.
    pub(super) fn take(&self) -> Vec<Arc<PresenceEvent>> {
        std::mem::take(&mut self.0.lock())
    }
}

pub(super) struct Node {
    pub(super) peer: Peer,
    pub(super) is_alive: bool,
    pub(super) hub: Arc<Hub>,
    pub(super) routing: Arc<Routing>,
    pub(super) publisher: Publisher,
    pub(super) tasks: Arc<Tasks>,
    pub(super) mailboxes: Vec<Arc<Mailbox>>,
    pub(super) links: Arc<SimLinks>,
    pub(super) accepted: Lanes,
    pub(super) store: Arc<Store>,
    pub(super) clock: Clock,
    pub(super) liveness: Liveness,
    /// Those that it has heard of.
    pub(super) known: BTreeSet<usize>,
    /// Those that have answered it, and when they were heard last.
    pub(super) met: BTreeMap<usize, Instant>,
    pub(super) view: Vec<(usize, State, bool)>,
    /// When it gossips, looks for members of others that are to leave, and says what its own come to.
    pub(super) due: [Duration; 3],
}

/// What is different from node to node, or from seed to seed.
pub(super) struct Settings {
    pub(super) run: u64,
    /// Of each of its links.
    pub(super) lanes: usize,
    /// That a lane of its links holds.
    pub(super) items: usize,
    pub(super) grace: Duration,
    pub(super) clock_ms: u64,
    /// Since the world began.
    pub(super) due: [Duration; 3],
}

impl Node {
    pub(super) fn start(index: usize, settings: &Settings, now: Instant) -> Self {
        let Settings { run, lanes, items, grace, clock_ms, due } = *settings;
        let presence_grace_ms = u64::try_from(grace.as_millis()).expect("a short time");
        let limits = Limits { presence_grace_ms, ..Limits::default() };
        let clock = Clock::manual(clock_ms);
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let mailboxes: Vec<Arc<Mailbox>> = (0..CLIENTS).map(|_| Arc::default()).collect();
        let targets =
            mailboxes.iter().map(|mailbox| Arc::clone(mailbox) as Arc<dyn DeliveryTarget>).collect();
        let hub = Arc::new(Hub::new(targets, clock.clone(), &limits).of_run(run));
        let peer = Peer { node_id: format!("n{index}").into(), incarnation: run };
        let routing = Routing::new(&hub, &peer.node_id, KeptNodes::default(), &tasks);
        let store = Arc::new(Store::default());
        let history = Arc::clone(&store) as Arc<dyn HistoryStore>;
        let publisher = Publisher::new(&hub, &history, &limits, Some(&routing));
        let links = SimLinks::new(lanes, QueueBounds { items, ..QueueBounds::default() });
        routing.link_by(Arc::clone(&links));
        Self {
            peer,
            is_alive: true,
            hub,
            routing,
            publisher,
            tasks,
            mailboxes,
            links,
            accepted: Lanes::default(),
            store,
            clock,
            liveness: Liveness::new(TICK, now),
            known: BTreeSet::new(),
            met: BTreeMap::new(),
            view: Vec::new(),
            due,
        }
    }

    pub(super) fn side(&self) -> Side<'_> {
        Side { peer: &self.peer, lanes: &self.accepted, inbound: &*self.routing as &dyn Inbound }
    }
}
