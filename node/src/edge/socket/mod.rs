//! The realtime socket: shards that own their connections, one thread each.

mod account_query;
mod backlog;
mod connection;
mod handshake;
mod occupancy;
mod occupancy_events;
mod reader;
mod ring;
mod session_registry;
mod shard;
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
use crate::edge::link::ClientLink;
use crate::edge::proxies::Proxies;
use crate::hub::{ChannelPosition, DeliveryTarget, Hub, Inbox, MessageDelivery, PresenceDelivery};
use crate::model::{AccountId, AttachedCount, ChannelKey, ClientId, Clock, Limits};
use crate::publish::Publisher;
use crate::session::PublishResult;
use crate::tasks::{OnStop, Tasks};

use account_query::AccountQuestion;
pub use account_query::{
    AccountQuery, ChannelOrder, ChannelSortKey, ChannelsPage, ConnectionSortKey, ConnectionsPage,
};
pub use backlog::{Backlog, BacklogReader, BacklogResponse};
pub use connection::ConnectionPermit;
pub use handshake::{
    AdmissionContext, AdmissionDecision, AdmittedConnection, ClientTransport, PATH, RequestHead,
    SocketRefusal, date, refusal_bytes,
};
pub use occupancy::{CountedOccupancy, occupancy};
use occupancy::{OccupancyNotice, WatchedChannels};
pub use occupancy_events::OccupancyNotifier;
pub use session_registry::{IncarnationLookup, ResumableSession, SessionRegistry};
use shard::PendingAttach;
pub use shard::Shard;

/// Bytes in a shard's inbox above which publishers wait.
const INBOX_BYTES_MAX: usize = 32 * 1024 * 1024;

/// Input of a shard from other threads.
pub enum Input {
    /// Fresh connection, of which nothing has been read.
    Accept(ClientLink<std::net::TcpStream>, ConnectionPermit),
    /// Upgrade that came through the HTTP side, already answered with 101; `read` are the bytes after the head.
    Adopt {
        link: ClientLink<std::net::TcpStream>,
        permit: ConnectionPermit,
        read: Vec<u8>,
        opening: Box<AdmittedConnection>,
    },
    /// Upgrade that came through the HTTP side and is refused within the socket.
    AdoptRefused {
        link: ClientLink<std::net::TcpStream>,
        permit: ConnectionPermit,
        format: Format,
        refused: SocketRefusal,
    },
    Deliver(Arc<MessageDelivery>),
    DeliverPresence(Arc<PresenceDelivery>),
    /// Continuity loss: messages of the channel with this number are missing before this position. The shard tells the channel's
    /// subscribers.
    ContinuityLost(u64, Box<ChannelPosition>),
    /// End of an attach barrier: the peers forward the channel, or their time is over.
    AttachReady {
        slot: u32,
        generation: u32,
        key: ChannelKey,
        attaching: Box<PendingAttach>,
    },
    Answered {
        slot: u32,
        generation: u32,
        ticket: u64,
        result: PublishResult,
    },
    /// Answer to a backlog query of a connection.
    BacklogResponse {
        slot: u32,
        generation: u32,
        ticket: u64,
        response: Box<BacklogResponse>,
    },
    /// Session takeover: another socket has taken the session of this connection, which ends.
    TakenOver {
        slot: u32,
        generation: u32,
    },
    /// Report about a session that this connection has taken over: its previous location had no open socket.
    TakeoverMiss {
        slot: u32,
        generation: u32,
    },
    /// Query over all connections of the shard, a slice in each turn; answered at the end.
    AccountQuery(Box<AccountQuery>),
    /// Occupancy of a channel, for the clients that watch it.
    SendOccupancy(Arc<OccupancyNotice>),
    /// Request for the number of connections attached to each of these channels.
    CountAttached {
        keys: Arc<[ChannelKey]>,
        reply: oneshot::Sender<Vec<AttachedCount>>,
    },
    /// Rebalancing: ask `count` connections to reconnect elsewhere, spread evenly over `within`. None: all of them, and each new connection
    /// at once.
    AskToReconnect {
        count: Option<usize>,
        within: Duration,
    },
    /// End of the shard: clients are asked to reconnect elsewhere, and the thread ends when they have gone, at the latest after `within`.
    Stop {
        within: Duration,
    },
}

/// A connection that is no socket upgrade, with the bytes that were read from it.
pub struct HttpConnection {
    pub link: ClientLink<std::net::TcpStream>,
    pub permit: ConnectionPermit,
    pub read: Vec<u8>,
}

/// Services that all shards of a node share.
#[derive(Clone)]
pub struct ShardServices {
    pub hub: Arc<Hub>,
    pub publisher: Publisher,
    pub auth: Arc<Authenticator>,
    pub connections: Arc<TenantConnections>,
    pub session_registry: Arc<SessionRegistry>,
    pub backlog: Backlog,
    pub limits: Limits,
    pub files: Arc<ClientFiles>,
    pub proxies: Arc<Proxies>,
    pub clock: Clock,
    pub node_id: Arc<str>,
    /// Queue of connections for the HTTP side. If it is full the connection is closed.
    pub http: mpsc::Sender<HttpConnection>,
}

impl ShardServices {
    fn gate(&self, address: Option<IpAddr>) -> AdmissionContext<'_> {
        let Self { auth, connections, session_registry, limits, files, .. } = self;
        AdmissionContext {
            auth,
            connections,
            session_registry: Some(session_registry),
            limits,
            files,
            address,
        }
    }
}

/// Handle of a shard for other threads.
pub struct ShardHandle {
    inbox: Inbox<Input>,
    /// Number of open connections.
    connections: AtomicUsize,
    /// Number of connections with a full socket, and the bytes in their outboxes, at the shard's last scan.
    blocked: AtomicUsize,
    outbox_bytes: AtomicUsize,
    /// Watched channels of all shards.
    watches: Arc<WatchedChannels>,
    occupancy_notifier: Arc<OccupancyNotifier>,
}

impl ShardHandle {
    pub fn push(&self, input: Input) {
        let bytes = match &input {
            Input::Deliver(delivery) => delivery.bytes(),
            Input::DeliverPresence(delivery) => delivery.bytes(),
            Input::Adopt { read, .. } => read.len() + 64,
            Input::BacklogResponse { response: found, .. } => found.bytes() + 64,
            Input::SendOccupancy(notice) => notice.bytes() + 64,
            _ => 64,
        };
        self.inbox.push(input, bytes);
    }

    /// True if the whole inbox came from peers.
    fn holds_forwarded_only(&self) -> bool {
        self.inbox.holds_only(|input| matches!(input, Input::Deliver(delivery) if delivery.is_forwarded()))
    }
}

impl DeliveryTarget for ShardHandle {
    fn deliver(&self, delivery: Arc<MessageDelivery>) {
        self.push(Input::Deliver(delivery));
    }

    fn deliver_presence(&self, delivery: Arc<PresenceDelivery>) {
        self.push(Input::DeliverPresence(delivery));
    }

    fn lose_continuity(&self, channel: u64, mark: &ChannelPosition) {
        self.push(Input::ContinuityLost(channel, Box::new(mark.clone())));
    }

    fn congested(&self) -> bool {
        self.inbox.congested()
    }
}

/// All shards; new connections are spread round robin.
pub struct Shards {
    handles: Vec<Arc<ShardHandle>>,
    next: AtomicUsize,
    watches: Arc<WatchedChannels>,
    occupancy_notifier: Arc<OccupancyNotifier>,
}

impl Shards {
    /// Creates shards that do not run yet, and the polls for their threads.
    pub fn prepare(count: usize) -> std::io::Result<(Self, Vec<mio::Poll>)> {
        let mut handles = Vec::new();
        let mut polls = Vec::new();
        let (watches, occupations) = (Arc::<WatchedChannels>::default(), Arc::<OccupancyNotifier>::default());
        for _ in 0..count {
            let poll = mio::Poll::new()?;
            let waker = Arc::new(mio::Waker::new(poll.registry(), shard::WAKE)?);
            handles.push(Arc::new(ShardHandle {
                inbox: Inbox::new(waker, INBOX_BYTES_MAX),
                connections: AtomicUsize::new(0),
                blocked: AtomicUsize::new(0),
                outbox_bytes: AtomicUsize::new(0),
                watches: Arc::clone(&watches),
                occupancy_notifier: Arc::clone(&occupations),
            }));
            polls.push(poll);
        }
        Ok((Self { handles, next: AtomicUsize::new(0), watches, occupancy_notifier: occupations }, polls))
    }

    pub fn targets(&self) -> Vec<Arc<dyn DeliveryTarget>> {
        self.handles.iter().map(|handle| Arc::clone(handle) as Arc<dyn DeliveryTarget>).collect()
    }

    pub fn handles(&self) -> Vec<Arc<ShardHandle>> {
        self.handles.clone()
    }

    /// Notifier of integrations about occupancy.
    pub fn occupancy_notifier(&self) -> &Arc<OccupancyNotifier> {
        &self.occupancy_notifier
    }

    pub fn handle(&self, index: usize) -> Arc<ShardHandle> {
        Arc::clone(&self.handles[index])
    }

    /// Sends the input to the next shard, round robin.
    pub fn push_next(&self, input: Input) {
        let turn = self.next.fetch_add(1, Ordering::Relaxed);
        self.handles[turn % self.handles.len()].push(input);
    }

    /// One page of the account's connections; `None` when a shard is stopping.
    pub async fn connections(&self, account: &AccountId, page: ConnectionsPage) -> Option<ConnectionsPage> {
        let answers = self.ask(account, |reply| AccountQuestion::Connections { page: page.clone(), reply });
        let mut combined = page;
        for answer in answers {
            combined.merge(answer.await.ok()?);
        }
        Some(combined)
    }

    /// One page of the account's channels; `None` when a shard is stopping.
    pub async fn channels(&self, account: &AccountId, page: ChannelsPage) -> Option<ChannelsPage> {
        let answers = self.ask(account, |reply| AccountQuestion::Channels { page: page.clone(), reply });
        let mut combined = page;
        for answer in answers {
            combined.merge(answer.await.ok()?);
        }
        Some(combined)
    }

    /// Starts to count channels, for clients that watch them and for integrations. Must be called when the shards run.
    pub fn begin_to_count(self: &Arc<Self>, services: &ShardServices, tasks: &Tasks) {
        let (hub, publisher) = (Arc::clone(&services.hub), services.publisher.clone());
        let notifying = Arc::clone(&self.occupancy_notifier).run(Arc::clone(self), publisher.clone());
        tasks.spawn("occupancy events", OnStop::Cancel, notifying);
        let watching = Arc::clone(&self.watches).run(Arc::clone(self), hub, publisher);
        tasks.spawn("occupancy", OnStop::Cancel, watching);
    }

    /// Number of connections attached to each of these channels; `None` when a shard is stopping.
    pub async fn attached(&self, keys: Arc<[ChannelKey]>) -> Option<Vec<AttachedCount>> {
        let ask_one = |handle: &Arc<ShardHandle>| {
            let (reply, answer) = oneshot::channel();
            handle.push(Input::CountAttached { keys: Arc::clone(&keys), reply });
            answer
        };
        let answers: Vec<_> = self.handles.iter().map(ask_one).collect();
        let mut all = vec![AttachedCount::default(); keys.len()];
        for answer in answers {
            all.iter_mut().zip(answer.await.ok()?).for_each(|(sum, count)| *sum += count);
        }
        self.occupancy_notifier.annotate_reported(&keys, &mut all);
        Some(all)
    }

    /// Closes every connection of the account with this client id. Returns their number, or `None` when a shard is stopping.
    pub async fn close_client(&self, account: &AccountId, client_id: &ClientId) -> Option<u64> {
        let close = |reply| AccountQuestion::CloseClient { client_id: client_id.clone(), closed: 0, reply };
        let mut closed = 0;
        for answer in self.ask(account, close) {
            closed += answer.await.ok()?;
        }
        Some(closed)
    }

    fn ask<A>(
        &self,
        account: &AccountId,
        question: impl Fn(oneshot::Sender<A>) -> AccountQuestion,
    ) -> Vec<oneshot::Receiver<A>> {
        let ask_one = |handle: &Arc<ShardHandle>| {
            let (reply, answer) = oneshot::channel();
            let query = AccountQuery { account: account.clone(), question: question(reply) };
            handle.push(Input::AccountQuery(Box::new(query)));
            answer
        };
        self.handles.iter().map(ask_one).collect()
    }

    /// Number of open connections.
    pub fn connection_count(&self) -> usize {
        self.handles.iter().map(|handle| handle.connections.load(Ordering::Relaxed)).sum()
    }

    /// Sets the gauges of inboxes and outboxes.
    pub fn set_gauges(&self) {
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

    /// Asks all connections to reconnect elsewhere, spread over at most `within`, and each new connection at once.
    pub fn ask_all_to_reconnect(&self, within: Duration) {
        for handle in &self.handles {
            handle.push(Input::AskToReconnect { count: None, within });
        }
    }

    /// Asks `count` connections to reconnect elsewhere, spread over at most `within`. A further call replaces this one.
    pub fn ask_to_reconnect(&self, count: usize, within: Duration) {
        let mut left = count;
        let mut open = self.connection_count();
        for handle in &self.handles {
            let own = handle.connections.load(Ordering::Relaxed);
            // The same proportion of each shard; the last shards take the remainder.
            let count = if left >= open { left } else { (left * own).div_ceil(open.max(1)).min(left) };
            handle.push(Input::AskToReconnect { count: Some(count), within });
            left = left.saturating_sub(count.min(own));
            open = open.saturating_sub(own);
        }
    }

    /// Asks clients to leave, and ends the shards when they have left, at the latest after `within`.
    pub fn stop(&self, within: Duration) {
        for handle in &self.handles {
            handle.push(Input::Stop { within });
        }
    }
}
