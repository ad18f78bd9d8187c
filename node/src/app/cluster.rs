//! The cluster part of a node.

use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs as _, UdpSocket};
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tokio::runtime::{Builder, Handle, Runtime};

use super::peers::follow;
use super::seen_peers::SeenPeersWriter;
use super::tokens::RoutingCell;
use super::{Addresses, StartError, seen_peers, store_backfill, thread_count};
use crate::accounts::{Accounts, TenantConnections};
use crate::auth::{Authenticator, ConnectionKeys};
use crate::cluster::ClusterKey;
use crate::cluster::inbound::{Inbound, Peer};
use crate::cluster::link::{self, GrpcPeerLinks, LinkSettings, PeerFiles, PeerTls};
use crate::cluster::membership::{Facts, Membership, Options};
use crate::cluster::routing::{
    KeptNodes, LocalNode, LocalTenantCounts, NodeFuture, Routing, StoreBackfillQuery,
};
use crate::config::Config;
use crate::dns_cache::DnsCache;
use crate::edge::files::ClientFiles;
use crate::edge::socket::Shards;
use crate::hub::Hub;
use crate::model::{
    AccountId, AttachedCount, ChannelKey, ClaimedNonce, ClientId, Clock, ForwardedParts, IdScope, Nonce,
    NoncePage, Revocation, Stamp, StampedIds,
};
use crate::origin::history::{BoxFuture, HistoryStore, StoreError};
use crate::origin::queues::Queues;
use crate::stall_detector;
use crate::tasks::{OnStop, Tasks};

/// Time after which a node whose seeds do not answer serves alone.
const SEEDS_WAIT: Duration = Duration::from_secs(3);
/// Time by which gossip has reached the other nodes, when it is sent at once and asked for again.
const GOSSIPED_WITHIN: Duration = Duration::from_millis(250);

/// The bound sockets and keys of a cluster node before it gossips.
pub(super) struct BoundGossip {
    key: ClusterKey,
    socket: UdpSocket,
    address: SocketAddr,
    peers: TcpListener,
    peer_address: SocketAddr,
}

/// Binds the cluster sockets; none for a single node.
pub(super) fn bind(config: &Config) -> Result<Option<BoundGossip>, StartError> {
    let (Some(address), Some(peer_address), Some(key)) =
        (config.gossip_listen, config.peer_listen, &config.cluster_key_file)
    else {
        return Ok(None);
    };
    if is_open_to_all(key) {
        tracing::warn!(file = %key.display(), "cluster key file is readable by all users");
    }
    let key =
        ClusterKey::open(key).map_err(StartError::at("cannot use the cluster key (--cluster-key-file)"))?;
    let at = || format!("cannot listen on {address} (--gossip-listen)");
    let socket = UdpSocket::bind(address).map_err(StartError::at(at()))?;
    let address = socket.local_addr().map_err(StartError::at(at()))?;
    let at = || format!("cannot listen on {peer_address} (--peer-listen)");
    let peers = TcpListener::bind(peer_address).map_err(StartError::at(at()))?;
    peers.set_nonblocking(true).map_err(StartError::at(at()))?;
    let peer_address = peers.local_addr().map_err(StartError::at(at()))?;
    Ok(Some(BoundGossip { key, socket, address, peers, peer_address }))
}

fn is_open_to_all(file: &Path) -> bool {
    std::fs::metadata(file).is_ok_and(|file| file.permissions().mode() & 0o004 != 0)
}

impl BoundGossip {
    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(super) fn peer_address(&self) -> SocketAddr {
        self.peer_address
    }

    /// Connection keys derived from the cluster key: any node opens those of all.
    pub(super) fn connection_keys(&self) -> ConnectionKeys {
        let mut secrets = self.key.derive("connection keys", b"");
        let first = secrets.next().expect("a cluster key has a line");
        secrets.fold(ConnectionKeys::new(&first), |keys, secret| keys.opening(&secret))
    }

    fn tls(&self, config: &Config, now_ms: u64) -> Result<PeerTls, StartError> {
        let Some([certificate, key, ca]) = config.peer_files() else {
            let at = StartError::at("cannot make the certificates of the peer links");
            return PeerTls::from_key(&self.key).map_err(at);
        };
        PeerTls::open(PeerFiles { certificate, key, ca }, now_ms).map_err(StartError::at(
            "cannot use the certificates of the peer links (--peer-cert, --peer-key, --peer-ca)",
        ))
    }

    /// Starts to receive from peers, and prepares to send to them. To be called before clients are served.
    pub(super) fn route(
        &self,
        config: &Config,
        hub: &Arc<Hub>,
        node_id: &Arc<str>,
        local: NodeServices,
        connections: &Arc<TenantConnections>,
        tasks: &Arc<Tasks>,
    ) -> Result<Arc<Routing>, StartError> {
        let tls = self.tls(config, local.clock.now_ms())?;
        let own = Peer { node_id: Arc::clone(node_id), incarnation: hub.incarnation() };
        let kept = seen_peers::read(&config.data_dir, local.clock.line_ms())
            .map_err(StartError::in_data(&config.data_dir.join(seen_peers::FILE)))?;
        let routing = Routing::new(hub, node_id, kept, tasks);
        local.others.know(&routing);
        let is_shared = local.store.is_shared();
        routing.set_local(Arc::new(local));
        routing.count_tenants(Arc::clone(connections) as Arc<dyn LocalTenantCounts>);
        let inbound = Arc::clone(&routing) as Arc<dyn Inbound>;
        let of_links = link_runtime(tasks, thread_count(config))
            .map_err(StartError::at("cannot start threads for peers"))?;
        let (of_links, runtime) = of_links;
        for threads in [&**tasks, &of_links] {
            threads.spawn("stall detector", OnStop::Cancel, stall_detector::keep_beating());
        }
        let links = GrpcPeerLinks::new(own, tls, inbound, Arc::new(of_links), LinkSettings::default());
        let at = || StartError::at(format!("cannot listen on {} (--peer-listen)", self.peer_address));
        let listener = self.peers.try_clone().map_err(at())?;
        let listener = {
            let _in_runtime = runtime.enter();
            tokio::net::TcpListener::from_std(listener).map_err(at())?
        };
        links.listen(listener);
        routing.begin(links);
        if !is_shared {
            routing.begin_nonces(!config.seeds.is_empty());
        }
        Ok(routing)
    }
}

/// The runtime of peer streams: one thread, and one more for every four client threads beyond the first four. Separate, because passing
/// data between threads wakes both.
fn link_runtime(tasks: &Tasks, threads: usize) -> io::Result<(Tasks, Handle)> {
    let mut builder = Builder::new_multi_thread();
    let runtime = builder
        .worker_threads(threads.div_ceil(4))
        .thread_name("links")
        .on_thread_unpark(stall_detector::halt_if_stalled)
        .enable_all()
        .build()?;
    let (handle, stopping) = (runtime.handle().clone(), tasks.stopping());
    let runtime = BackgroundRuntime(Some(runtime));
    tasks.spawn_thread("links", move || {
        runtime.0.iter().for_each(|runtime| runtime.block_on(stopping.cancelled()));
    })?;
    Ok((tasks.on(handle.clone()), handle))
}

/// A runtime that ends without waiting, which is allowed in any thread.
struct BackgroundRuntime(Option<Runtime>);

impl Drop for BackgroundRuntime {
    fn drop(&mut self) {
        self.0.take().into_iter().for_each(Runtime::shutdown_background);
    }
}

/// Services of this node for its peers.
pub(super) struct NodeServices {
    shards: Arc<Shards>,
    files: Arc<ClientFiles>,
    store: Arc<dyn HistoryStore>,
    auth: Arc<Authenticator>,
    accounts: Arc<Accounts>,
    clock: Clock,
    nodes: Arc<SeenPeersWriter>,
    /// Routing of this node, once it is known.
    others: RoutingCell,
    queues: Option<Queues>,
    /// Counter of forgotten ids of messages that peers published.
    ids_forgotten: metrics::Counter,
}

impl NodeServices {
    pub(super) fn new(
        config: &Config,
        (shards, files): (&Arc<Shards>, &Arc<ClientFiles>),
        store: &Arc<dyn HistoryStore>,
        (auth, accounts): (&Arc<Authenticator>, &Arc<Accounts>),
        clock: &Clock,
        (others, queues): (RoutingCell, &Option<Queues>),
    ) -> Self {
        let (queues, files) = (queues.clone(), Arc::clone(files));
        let (shards, store, auth) = (Arc::clone(shards), Arc::clone(store), Arc::clone(auth));
        let (accounts, clock) = (Arc::clone(accounts), clock.clone());
        let nodes = Arc::new(SeenPeersWriter::new(&config.data_dir));
        let ids_forgotten = metrics::counter!("fanfare_ids_forgotten_total");
        Self { shards, files, store, auth, accounts, clock, nodes, others, queues, ids_forgotten }
    }
}

impl LocalNode for NodeServices {
    fn close_client(&self, account: AccountId, client_id: ClientId) -> NodeFuture<Option<u64>> {
        let shards = Arc::clone(&self.shards);
        Box::pin(async move { shards.close_client(&account, &client_id).await })
    }

    fn connections(&self) -> Option<u64> {
        let takes_more = !self.files.is_full() && !self.files.memory().is_full();
        takes_more.then(|| self.shards.connection_count() as u64)
    }

    fn attached(&self, keys: Vec<ChannelKey>) -> NodeFuture<Option<Vec<AttachedCount>>> {
        let shards = Arc::clone(&self.shards);
        Box::pin(async move { shards.attached(keys.into()).await })
    }

    fn now_ms(&self) -> u64 {
        self.clock.now_ms()
    }

    fn claim_nonce(&self, nonce: Nonce) -> NodeFuture<Option<bool>> {
        of_store("nonce claim of a peer not stored", self.store.claim_nonce(nonce))
    }

    fn nonces(&self, after: Option<Box<[u8]>>) -> NodeFuture<Option<NoncePage>> {
        of_store("nonces not read from the store", self.store.nonces(after))
    }

    fn keep_nonces(&self, nonces: Vec<ClaimedNonce>) -> NodeFuture<Option<()>> {
        of_store("nonces of a peer not stored", self.store.keep_nonces(nonces))
    }

    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>) -> NodeFuture<Option<Vec<Option<Stamp>>>> {
        let (answer, found) = tokio::sync::oneshot::channel();
        self.store.find_ids(scope, ids, Box::new(move |found| drop(answer.send(found.ok()))));
        Box::pin(async move { found.await.ok().flatten() })
    }

    fn keep_ids(&self, scope: IdScope, ids: StampedIds) {
        let (count, forgotten) = (ids.len() as u64, self.ids_forgotten.clone());
        let kept = move |result: Result<(), StoreError>| forgotten.increment(result.map_or(count, |()| 0));
        self.store.keep_ids(scope, ids, Box::new(kept));
    }

    fn revoke(&self, revocations: Vec<Revocation>) -> NodeFuture<Option<()>> {
        let new = match self.auth.take_revocations(revocations) {
            Ok(new) => new,
            Err(error) => {
                tracing::error!(%error, "revocation from a peer not applied");
                return Box::pin(std::future::ready(None));
            }
        };
        // In a shared store, the revoking node has stored it for all.
        let store = (!self.store.is_shared()).then_some(&self.store);
        let stored: Vec<_> = store
            .into_iter()
            .flat_map(|store| new.iter().map(|one| store.revoke_tokens(one.clone())))
            .collect();
        let kept = async move {
            let failed = futures_util::future::join_all(stored).await.into_iter().find_map(Result::err);
            failed.map_or(Ok(()), Err)
        };
        of_store("revocation from a peer not stored", Box::pin(kept))
    }

    fn revocations(&self) -> Vec<Revocation> {
        self.auth.revocations()
    }

    fn queues_changed(&self) -> NodeFuture<Option<()>> {
        let Some(queues) = self.queues.clone() else { return Box::pin(std::future::ready(Some(()))) };
        of_store("queue definitions not read from the store", Box::pin(async move { queues.refresh().await }))
    }

    fn is_store_shared(&self) -> bool {
        self.store.is_shared()
    }

    fn settled(&self) -> NodeFuture<Option<()>> {
        // The asking node must find in the store which channels keep history here.
        let is_announced =
            self.store.announced_policies() == Some(self.accounts.current().history_policies());
        match self.store.is_shared() && is_announced {
            true => of_store("store flush barrier failed", self.store.flush()),
            false => Box::pin(std::future::ready(None)),
        }
    }

    fn stored(&self, behind: StoreBackfillQuery) -> NodeFuture<Option<Vec<ForwardedParts>>> {
        let (store, accounts) = (Arc::clone(&self.store), Arc::clone(&self.accounts));
        Box::pin(store_backfill::read_backfill(store, accounts, self.clock.clone(), behind))
    }

    fn keep_nodes(&self, nodes: KeptNodes) -> NodeFuture<()> {
        let (keeper, turn, now_ms) = (Arc::clone(&self.nodes), self.nodes.turn(), self.clock.line_ms());
        Box::pin(async move {
            let written = tokio::task::spawn_blocking(move || keeper.write(turn, &nodes, now_ms)).await;
            if let Ok(Err(error)) = written {
                tracing::warn!(%error, "peer list not written");
            }
        })
    }
}

fn of_store<T: Send + 'static>(
    failing: &'static str,
    answer: BoxFuture<'static, Result<T, StoreError>>,
) -> NodeFuture<Option<T>> {
    let log_error = move |error: &StoreError| match error {
        // Peers may not have heard yet that this node stops.
        StoreError::ShutDown => tracing::debug!(%error, "{failing}"),
        error => tracing::warn!(%error, "{failing}"),
    };
    Box::pin(async move { answer.await.inspect_err(log_error).ok() })
}

/// Hands messages that only this node may have to the peers, as far as the time allows.
pub(super) async fn hand_off(routing: Option<&Arc<Routing>>, wait: Duration) {
    let Some(routing) = routing else { return };
    let until = tokio::time::Instant::now() + wait;
    if tokio::time::timeout_at(until, routing.hand_nonces_over()).await.is_err() {
        tracing::warn!("nonce handoff incomplete");
    }
    // Channels of the clients that stayed to the end. The rest is announced with the goodbye.
    tokio::time::timeout_at(until, routing.hand_off_channels()).await.ok();
}

/// Announces the end: to the peers over their streams, and by gossip to later nodes.
pub(super) async fn say_goodbye(
    routing: Option<&Arc<Routing>>,
    membership: Option<&Membership>,
    wait: Duration,
) {
    let (Some(routing), Some(membership)) = (routing, membership) else { return };
    // Including peers that have just left: they may not have heard yet that their announcements arrived.
    let is_alone = routing.is_alone();
    routing.say_goodbye(wait).await;
    membership.update(|facts| facts.left = true);
    if !is_alone {
        tokio::time::sleep(GOSSIPED_WITHIN).await;
    }
}

impl LocalTenantCounts for TenantConnections {
    fn changed(&self) -> NodeFuture<()> {
        Box::pin(self.changed())
    }

    fn take_changed(&self) -> Vec<(Arc<str>, u64)> {
        self.take_changed()
    }

    fn here(&self) -> Vec<(Arc<str>, u64)> {
        self.here()
    }

    fn set_remote(&self, counts: Vec<(Arc<str>, u64)>) {
        self.set_other_nodes(counts);
    }
}

/// Whether the node has met its peers: it has their interest, or none has answered for a while, or it has no seeds. Once true, it stays
/// true.
pub(super) type HasMetPeers = Arc<dyn Fn() -> bool + Send + Sync>;

pub(super) fn has_met(config: &Config, routing: Option<&Arc<Routing>>) -> HasMetPeers {
    let (routing, has_seeds) = (routing.map(Arc::clone), !config.seeds.is_empty());
    let (begun, met) = (Instant::now(), AtomicBool::new(false));
    Arc::new(move || {
        let Some(routing) = &routing else { return true };
        let waited = !has_seeds || begun.elapsed() > SEEDS_WAIT;
        let is_complete = if routing.expected() == 0 { waited } else { routing.is_complete() };
        let is_met = is_complete && !routing.is_asking() && routing.has_nonces();
        met.fetch_or(is_met, Ordering::Relaxed) || is_met
    })
}

pub(super) fn addresses(listen: SocketAddr, admin: SocketAddr, gossip: Option<&BoundGossip>) -> Addresses {
    let [gossip, peer] = [BoundGossip::address, BoundGossip::peer_address].map(|of| gossip.map(of));
    Addresses { listen, admin, gossip, peer }
}

/// Joins the cluster as a node that is not ready yet.
pub(super) fn join(
    gossip: Option<BoundGossip>,
    config: &Config,
    node_id: &Arc<str>,
    hub: &Hub,
    listen: SocketAddr,
    routing: Option<Arc<Routing>>,
    tasks: &Tasks,
) -> Result<Option<Membership>, StartError> {
    let Some(BoundGossip { key, socket, address, peer_address, .. }) = gossip else { return Ok(None) };
    let options = Options {
        node_id: Arc::clone(node_id),
        incarnation: hub.incarnation(),
        socket,
        advertise: advertised(config, address)?,
        seeds: config.seeds.clone(),
        names: DnsCache::new(),
        key,
        facts: Facts {
            peer: Some(under(config, peer_address)),
            listen: under(config, listen),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            protocol_minor: link::minor(),
            ..Facts::default()
        },
        clock: Clock::system(),
    };
    let membership = Membership::start(options, tasks).map_err(StartError::at("cannot start gossip"))?;
    if let Some(routing) = routing {
        tasks.spawn("peers", OnStop::Cancel, follow(routing, membership.members(), DnsCache::new()));
    }
    Ok(Some(membership))
}

/// The address under which peers reach a listener bound to `address`.
pub(super) fn under(config: &Config, address: SocketAddr) -> String {
    match &config.advertise {
        Some(host) if host.contains(':') => format!("[{host}]:{}", address.port()),
        Some(host) => format!("{host}:{}", address.port()),
        None => address.to_string(),
    }
}

/// The advertised address in the family of the listener, as gossip carries no names.
fn advertised(config: &Config, address: SocketAddr) -> Result<SocketAddr, StartError> {
    if config.advertise.is_none() {
        return Ok(address);
    }
    let name = under(config, address);
    let at = || format!("cannot look up {name} (--advertise)");
    let found: Vec<_> = name.to_socket_addrs().map_err(StartError::at(at()))?.collect();
    let same = found.iter().find(|found| found.is_ipv4() == address.is_ipv4());
    same.or(found.first()).copied().ok_or_else(|| StartError::at(at())("it has no address"))
}
