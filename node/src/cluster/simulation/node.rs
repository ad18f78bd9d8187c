//! A simulated node: its channels and its routing, with mailboxes in the place of shards.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use tokio::runtime::Handle;

use super::client::Mailbox;
use super::net::{Side, SimLinks};
use super::{CLIENTS, TICK};
use crate::cluster::inbound::{Inbound, Peer};
use crate::cluster::link::{Lanes, QueueBounds};
use crate::cluster::membership::{Liveness, State};
use crate::cluster::routing::{KeptNodes, Routing};
use crate::hub::{DeliveryTarget, Hub};
use crate::model::{Clock, Limits, Published};
use crate::origin::history::{Done, HistoryStore};
use crate::publish::Publisher;
use crate::tasks::Tasks;
use crate::testing::FakeStore;

/// Keeps nothing, and says at once that it does.
struct Store;

impl FakeStore for Store {
    fn append(&self, _: Arc<Published>, _: Option<u32>, done: Done) {
        done(Ok(()));
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
    pub(super) liveness: Liveness,
    /// Those that it has heard of.
    pub(super) known: BTreeSet<usize>,
    pub(super) view: Vec<(usize, State)>,
}

impl Node {
    /// A lane of its links holds so many items.
    pub(super) fn start(index: usize, run: u64, items: usize, now: Instant) -> Self {
        let limits = Limits::default();
        let tasks = Arc::new(Tasks::new(Handle::current()));
        let mailboxes: Vec<Arc<Mailbox>> = (0..CLIENTS).map(|_| Arc::default()).collect();
        let targets =
            mailboxes.iter().map(|mailbox| Arc::clone(mailbox) as Arc<dyn DeliveryTarget>).collect();
        let hub = Arc::new(Hub::new(targets, Clock::system(), &limits).of_run(run));
        let peer = Peer { node_id: format!("n{index}").into(), incarnation: run };
        let routing = Routing::new(&hub, &peer.node_id, KeptNodes::default(), &tasks);
        let store = Arc::new(Store) as Arc<dyn HistoryStore>;
        let publisher = Publisher::new(&hub, &store, &limits, Some(&routing));
        let links = SimLinks::new(QueueBounds { items, ..QueueBounds::default() });
        routing.begin(Arc::clone(&links));
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
            liveness: Liveness::new(TICK, now),
            known: BTreeSet::new(),
            view: Vec::new(),
        }
    }

    pub(super) fn side(&self) -> Side<'_> {
        Side { peer: &self.peer, lanes: &self.accepted, inbound: &*self.routing as &dyn Inbound }
    }
}
