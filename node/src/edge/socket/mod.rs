//! The realtime socket: shards that own their connections, one thread each.

mod backlog;
mod connection;
mod handshake;
mod identities;
mod occupancy;
mod occupation;
mod reader;
mod ring;
mod shard;
mod survey;
#[cfg(test)]
mod tests;
mod timers;

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fanfare_proto::frame::Format;
use tokio::sync::{mpsc, oneshot};

use crate::accounts::TenantConnections;
use crate::auth::Authenticator;
use crate::edge::files::ClientFiles;
use crate::edge::link::Link;
use crate::edge::proxies::Proxies;
use crate::hub::{Delivery, DeliveryTarget, Hub, Inbox, Mark, PresenceDelivery};
use crate::model::{AccountId, AttachedCount, ChannelKey, ClientId, Clock, Limits};
use crate::publish::Publisher;
use crate::session::PublishResult;
use crate::tasks::{OnStop, Tasks};

pub use backlog::{Backlog, BacklogReader, Found};
pub use connection::Permit;
pub use handshake::{Decision, Gate, Head, Opening, PATH, Refused, Transport, date, refusal_bytes};
pub use identities::{Former, Identities, Runs};
pub use occupancy::{Occupied, occupancy};
use occupancy::{Told, Watches};
pub use occupation::Occupations;
use shard::Attaching;
pub use shard::Shard;
use survey::Question;
pub use survey::{ChannelOrder, ChannelPlace, ChannelsPage, ConnectionPlace, ConnectionsPage, Survey};

/// What waits for a shard before publishers are held back, in bytes.
const INBOX_BYTES_MAX: usize = 32 * 1024 * 1024;

/// What other threads have for a shard.
pub enum Input {
    /// A fresh connection; nothing of it has been read.
    Accept(Link<std::net::TcpStream>, Permit),
    /// An upgrade that came through the HTTP side, answered with 101; `read` came after the head.
    Adopt {
        link: Link<std::net::TcpStream>,
        permit: Permit,
        read: Vec<u8>,
        opening: Box<Opening>,
    },
    /// The same for one that is to be refused within the socket.
    AdoptRefused {
        link: Link<std::net::TcpStream>,
        permit: Permit,
        format: Format,
        refused: Refused,
    },
    Deliver(Arc<Delivery>),
    DeliverPresence(Arc<PresenceDelivery>),
    /// Messages of the channel of this number are missing before the mark: its subscribers are told.
    Lose(u64, Box<Mark>),
    /// Other nodes forward the channel, or have had their time.
    Joined {
        slot: u32,
        generation: u32,
        key: ChannelKey,
        attaching: Box<Attaching>,
    },
    Answered {
        slot: u32,
        generation: u32,
        ticket: u64,
        result: PublishResult,
    },
    /// What a connection has asked of the store.
    Found {
        slot: u32,
        generation: u32,
        ticket: u64,
        found: Box<Found>,
    },
    /// Another socket has taken up the connection of this one, which ends.
    TakenUp {
        slot: u32,
        generation: u32,
    },
    /// What this one has taken up had no socket on the node that it was on before.
    NotOpen {
        slot: u32,
        generation: u32,
    },
    /// Answered once every connection of the shard was seen, a few in each turn.
    Survey(Box<Survey>),
    /// How many are at a channel, for the clients that watch it.
    TellOccupancy(Arc<Told>),
    /// How many connections are attached to each of these channels.
    CountAttached {
        keys: Arc<[ChannelKey]>,
        reply: oneshot::Sender<Vec<AttachedCount>>,
    },
    /// Ask so many connections to come back elsewhere, evenly over a time; none: all, and at once whoever comes from now on.
    AskToLeave {
        count: Option<usize>,
        within: Duration,
    },
    /// The end of the thread. Clients get `within` at most to go.
    Stop {
        within: Duration,
    },
}

/// A connection that is not a socket upgrade, with what was read of it.
pub struct HttpConnection {
    pub link: Link<std::net::TcpStream>,
    pub permit: Permit,
    pub read: Vec<u8>,
}

/// What every shard of a node works with.
#[derive(Clone)]
pub struct Services {
    pub hub: Arc<Hub>,
    pub publisher: Publisher,
    pub auth: Arc<Authenticator>,
    pub connections: Arc<TenantConnections>,
    pub identities: Arc<Identities>,
    pub backlog: Backlog,
    pub limits: Limits,
    pub files: Arc<ClientFiles>,
    pub proxies: Arc<Proxies>,
    pub clock: Clock,
    pub node_id: Arc<str>,
    /// Connections for the HTTP side. Bounded: when it is full the connection is closed.
    pub http: mpsc::Sender<HttpConnection>,
}

impl Services {
    fn gate(&self, address: Option<IpAddr>) -> Gate<'_> {
        let Self { auth, connections, identities, limits, files, .. } = self;
        Gate { auth, connections, identities: Some(identities), limits, files, address }
    }
}

/// The way to a shard from other threads.
pub struct ShardHandle {
    inbox: Inbox<Input>,
    /// Those that are open.
    connections: AtomicUsize,
    /// Those whose socket is full, and what waits for them, as they were when the shard last looked.
    blocked: AtomicUsize,
    outbox_bytes: AtomicUsize,
    /// Of all shards.
    watches: Arc<Watches>,
    occupations: Arc<Occupations>,
}

impl ShardHandle {
    pub fn push(&self, input: Input) {
        let bytes = match &input {
            Input::Deliver(delivery) => delivery.bytes(),
            Input::DeliverPresence(delivery) => delivery.bytes(),
            Input::Adopt { read, .. } => read.len() + 64,
            Input::Found { found, .. } => found.bytes() + 64,
            Input::TellOccupancy(told) => told.bytes() + 64,
            _ => 64,
        };
        self.inbox.push(input, bytes);
    }

    /// What waits came from peers, all of it.
    fn holds_forwarded_only(&self) -> bool {
        self.inbox.holds_only(|input| matches!(input, Input::Deliver(delivery) if delivery.is_forwarded()))
    }
}

impl DeliveryTarget for ShardHandle {
    fn deliver(&self, delivery: Arc<Delivery>) {
        self.push(Input::Deliver(delivery));
    }

    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>) {
        self.push(Input::DeliverPresence(delivery));
    }

    fn lose(&self, channel: u64, mark: &Mark) {
        self.push(Input::Lose(channel, Box::new(mark.clone())));
    }

    fn congested(&self) -> bool {
        self.inbox.congested()
    }
}

/// All shards; new connections go to each in turn.
pub struct Shards {
    handles: Vec<Arc<ShardHandle>>,
    next: AtomicUsize,
    watches: Arc<Watches>,
    occupations: Arc<Occupations>,
}

impl Shards {
    /// Shards that are not running yet, with the polls that their threads will wait in.
    pub fn prepare(count: usize) -> std::io::Result<(Self, Vec<mio::Poll>)> {
        let mut handles = Vec::new();
        let mut polls = Vec::new();
        let (watches, occupations) = (Arc::<Watches>::default(), Arc::<Occupations>::default());
        for _ in 0..count {
            let poll = mio::Poll::new()?;
            let waker = Arc::new(mio::Waker::new(poll.registry(), shard::WAKE)?);
            handles.push(Arc::new(ShardHandle {
                inbox: Inbox::new(waker, INBOX_BYTES_MAX),
                connections: AtomicUsize::new(0),
                blocked: AtomicUsize::new(0),
                outbox_bytes: AtomicUsize::new(0),
                watches: Arc::clone(&watches),
                occupations: Arc::clone(&occupations),
            }));
            polls.push(poll);
        }
        Ok((Self { handles, next: AtomicUsize::new(0), watches, occupations }, polls))
    }

    pub fn targets(&self) -> Vec<Arc<dyn DeliveryTarget>> {
        self.handles.iter().map(|handle| Arc::clone(handle) as Arc<dyn DeliveryTarget>).collect()
    }

    pub fn handles(&self) -> Vec<Arc<ShardHandle>> {
        self.handles.clone()
    }

    /// The channels that integrations are told of.
    pub fn occupations(&self) -> &Arc<Occupations> {
        &self.occupations
    }

    pub fn handle(&self, index: usize) -> Arc<ShardHandle> {
        Arc::clone(&self.handles[index])
    }

    /// Gives the input to the shard whose turn it is.
    pub fn push_next(&self, input: Input) {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        self.handles[turn % self.handles.len()].push(input);
    }

    /// The first connections of the account after a place; `None` when a shard is stopping.
    pub async fn connections(&self, account: &AccountId, page: ConnectionsPage) -> Option<ConnectionsPage> {
        let asked = self.ask(account, |reply| Question::Connections { page: page.clone(), reply });
        let mut merged = page;
        for answer in asked {
            merged.merge(answer.await.ok()?);
        }
        Some(merged)
    }

    /// The first channels of the account after a place; `None` when a shard is stopping.
    pub async fn channels(&self, account: &AccountId, page: ChannelsPage) -> Option<ChannelsPage> {
        let asked = self.ask(account, |reply| Question::Channels { page: page.clone(), reply });
        let mut merged = page;
        for answer in asked {
            merged.merge(answer.await.ok()?);
        }
        Some(merged)
    }

    /// Begins to count channels for the clients that watch them, and for integrations. To be called when the shards run.
    pub fn begin_to_count(self: &Arc<Self>, services: &Services, tasks: &Tasks) {
        let (hub, publisher) = (Arc::clone(&services.hub), services.publisher.clone());
        let telling = Arc::clone(&self.occupations).run(Arc::clone(self), publisher.clone());
        tasks.spawn("occupations", OnStop::Cancel, telling);
        let watching = Arc::clone(&self.watches).run(Arc::clone(self), hub, publisher);
        tasks.spawn("occupancy", OnStop::Cancel, watching);
    }

    /// How many connections are attached to each of these channels; `None` when a shard is stopping.
    pub async fn attached(&self, keys: Arc<[ChannelKey]>) -> Option<Vec<AttachedCount>> {
        let ask_one = |handle: &Arc<ShardHandle>| {
            let (reply, answer) = oneshot::channel();
            handle.push(Input::CountAttached { keys: Arc::clone(&keys), reply });
            answer
        };
        let asked: Vec<_> = self.handles.iter().map(ask_one).collect();
        let mut all = vec![AttachedCount::default(); keys.len()];
        for answer in asked {
            all.iter_mut().zip(answer.await.ok()?).for_each(|(sum, count)| *sum += count);
        }
        self.occupations.mark(&keys, &mut all);
        Some(all)
    }

    /// Ends every connection of the account under this client id; how many, or `None` when a shard is stopping.
    pub async fn close_client(&self, account: &AccountId, client_id: &ClientId) -> Option<u64> {
        let close = |reply| Question::CloseClient { client_id: client_id.clone(), closed: 0, reply };
        let mut closed = 0;
        for answer in self.ask(account, close) {
            closed += answer.await.ok()?;
        }
        Some(closed)
    }

    fn ask<A>(
        &self,
        account: &AccountId,
        question: impl Fn(oneshot::Sender<A>) -> Question,
    ) -> Vec<oneshot::Receiver<A>> {
        let ask_one = |handle: &Arc<ShardHandle>| {
            let (reply, answer) = oneshot::channel();
            let survey = Survey { account: account.clone(), question: question(reply) };
            handle.push(Input::Survey(Box::new(survey)));
            answer
        };
        self.handles.iter().map(ask_one).collect()
    }

    /// How many connections are open.
    pub fn connection_count(&self) -> usize {
        self.handles.iter().map(|handle| handle.connections.load(Ordering::Relaxed)).sum()
    }

    /// Sets the gauges of what waits for shards, and in them.
    pub fn tell_waiting(&self) {
        let mut blocked = 0;
        for (index, handle) in self.handles.iter().enumerate() {
            let outbox_bytes = handle.outbox_bytes.load(Ordering::Relaxed);
            let shard = index.to_string();
            metrics::gauge!("fanfare_shard_inbox_bytes", "shard" => shard.clone())
                .set(handle.inbox.bytes() as f64);
            metrics::gauge!("fanfare_shard_outbox_bytes", "shard" => shard).set(outbox_bytes as f64);
            blocked += handle.blocked.load(Ordering::Relaxed);
        }
        metrics::gauge!("fanfare_blocked_connections").set(blocked as f64);
    }

    /// Asks all connections to come back elsewhere, over at most `within`, and at once whoever comes from now on.
    pub fn ask_all_to_leave(&self, within: Duration) {
        for handle in &self.handles {
            handle.push(Input::AskToLeave { count: None, within });
        }
    }

    /// Asks so many connections to come back elsewhere, over at most `within`. A further call takes the place of this one.
    pub fn ask_to_leave(&self, count: usize, within: Duration) {
        let mut left = count;
        let mut open = self.connection_count();
        for handle in &self.handles {
            let own = handle.connections.load(Ordering::Relaxed);
            // Of each shard the same part; what is left over is of the last ones.
            let count = if left >= open { left } else { (left * own).div_ceil(open.max(1)).min(left) };
            handle.push(Input::AskToLeave { count: Some(count), within });
            left = left.saturating_sub(count.min(own));
            open = open.saturating_sub(own);
        }
    }

    /// Tells clients to leave, and ends the shards when they have, or at the latest after `within`.
    pub fn stop(&self, within: Duration) {
        for handle in &self.handles {
            handle.push(Input::Stop { within });
        }
    }
}
