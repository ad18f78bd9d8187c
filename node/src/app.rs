//! A complete node: its parts in the order of construction, and the reverse order of the stop.

mod backup;
mod clock;
mod cluster;
mod copy;
mod drain;
mod files;
mod incarnations;
mod members;
mod operators;
mod outbox;
mod peers;
mod queues;
mod rebalance;
mod seen_peers;
mod session_registry;
mod stopped;
mod store;
mod store_backfill;
mod tokens;
mod traces;
mod upkeep;

use std::error::Error;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::sync::mpsc;

use crate::accounts::{Accounts, Directory, TenantConnections, development};
use crate::cluster::membership::Membership;
use crate::config::Config;
pub use crate::edge::admin::AdminToken;
use crate::edge::admin::{self, AdminState};
use crate::edge::files::ClientFiles;
pub use crate::edge::files::lowered_connections;
use crate::edge::http;
pub use crate::edge::listener::short_backlog;
use crate::edge::listener::{self, Acceptor, BoundAddress, HttpServices};
use crate::edge::proxies::Proxies;
use crate::edge::socket::{self, Shard, Shards};
use crate::hub::Hub;
use crate::model::{Clock, Limits};
pub use crate::origin::backup::{BackupError, BackupSummary, check as check_backup};
pub use crate::origin::history::CopyProgress;
use crate::origin::history::HistoryStore;
use crate::origin::metering::Meter;
use crate::origin::queues::Queues;
use crate::publish::Publisher;
use crate::tasks::{OnStop, Tasks};
use crate::tls::Certificates;
use crate::{edge, telemetry};
pub use backup::{StoppedNode, restore};
use cluster::{BoundGossip, HasMetPeers, NodeServices};
pub use copy::copy_history;
use operators::Operators;
use outbox::NodeOutbox;
pub use stopped::StoppedOutbox;
pub use store::{apply_schema, read_password};

/// Connections on their way to the HTTP side.
const HTTP_QUEUE: usize = 4096;

/// Error of a node's start: the failed action, with the cause as its source.
#[derive(Debug)]
pub struct StartError {
    doing: String,
    source: Box<dyn Error + Send + Sync>,
}

impl StartError {
    fn at<E: Into<Box<dyn Error + Send + Sync>>>(doing: impl Into<String>) -> impl FnOnce(E) -> Self {
        let doing = doing.into();
        move |source| Self { doing, source: source.into() }
    }

    /// An error of the data folder or a file in it: names the path, and the setting that it comes from.
    fn in_data<E: Into<Box<dyn Error + Send + Sync>>>(path: &Path) -> impl FnOnce(E) -> Self + use<E> {
        Self::at(format!("cannot use {} (--data-dir)", path.display()))
    }
}

impl fmt::Display for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.doing)
    }
}

impl Error for StartError {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        Some(&*self.source)
    }
}

/// The addresses that are bound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    pub listen: SocketAddr,
    pub admin: SocketAddr,
    /// Gossip address of a node of a cluster.
    pub gossip: Option<SocketAddr>,
    pub peer: Option<SocketAddr>,
}

/// A running node.
pub struct App {
    tasks: Arc<Tasks>,
    /// Tasks that end last, because operators and peers watch the stop through them.
    last_tasks: Arc<Tasks>,
    shards: Arc<Shards>,
    acceptor: Acceptor,
    store: Arc<dyn HistoryStore>,
    publisher: Publisher,
    meter: Arc<Meter>,
    membership: Option<Membership>,
    addresses: Addresses,
    node_id: Arc<str>,
    node_file: PathBuf,
    development_key: Option<String>,
    operators: Arc<Operators>,
    outbox: Arc<NodeOutbox>,
    drain_timeout: Duration,
}

impl App {
    /// Builds and starts every part; when it returns, the node serves. Must run within a tokio runtime.
    pub async fn start(config: Config) -> Result<Self, StartError> {
        Self::start_over(config, None).await
    }

    /// Starts a node over the caller's store instead of the configured one; for tests.
    pub async fn start_over(config: Config, own: Option<Arc<dyn HistoryStore>>) -> Result<Self, StartError> {
        let metrics = telemetry::metrics();
        let ExternalResources { clients, admin, admin_token, gossip } = ExternalResources::open(&config)?;
        let Foundation { tasks, last_tasks, clock, files, limits, node_id } = Foundation::open(&config)?;
        let (accounts, development_key) = open_accounts(&config)?;
        let store = store::open(&config, own, &node_id, &clock).await?;
        clock::begin(&clock, &config.data_dir, limits.clock_hold_ms, &tasks);
        let (auth, others) = tokens::open_auth(&config, &accounts, &store, &clock).await?;
        let connections = Arc::new(TenantConnections::default());
        let meter = meter(&accounts, &store, &clock, &node_id, limits.metric_minutes);
        let (shards, polls) = prepare_shards(&config)?;
        let hub = Arc::new(Hub::new(shards.targets(), clock.clone(), &limits));
        let (past, recorded) =
            incarnations::begin_incarnation(&*store, &hub, &accounts, config.store).await?;
        let queues = queues::open(&config, &node_id, &store, &accounts, &last_tasks).await?;
        let handles = (others, &queues);
        let local =
            NodeServices::new(&config, (&shards, &files), &store, (&auth, &accounts), &clock, handles);
        let route =
            |gossip: &BoundGossip| gossip.route(&config, &hub, &node_id, local, &connections, &last_tasks);
        let routing = gossip.as_ref().map(route).transpose()?;
        let peers = gossip.as_ref().zip(routing.as_ref());
        let session_registry = session_registry::open(&config, &hub, &past, &shards, &clock, peers)?;
        let publisher = Publisher::new(&hub, &store, &config.limits, routing.as_ref());
        let of = (&accounts, queues.as_ref());
        let outbox = NodeOutbox::open(&config, &clock, &node_id, of, &publisher, &last_tasks).await?;
        let stored_members = members::restore(&store, &hub).await?;
        let (backlog, backlog_reader) = socket::Backlog::new(&publisher, &accounts, &clock, &past, &limits);
        let (http_sender, http_connections) = mpsc::channel(HTTP_QUEUE);
        let services = socket::ShardServices {
            hub: Arc::clone(&hub),
            publisher: publisher.clone(),
            auth: Arc::clone(&auth),
            connections: Arc::clone(&connections),
            session_registry,
            backlog,
            limits: config.limits.clone(),
            files: Arc::clone(&files),
            proxies: Arc::new(Proxies::new(&config.trusted_proxies, config.proxy_protocol)),
            clock: clock.clone(),
            node_id: Arc::clone(&node_id),
            http: http_sender,
        };
        start_shards(&config, &shards, polls, &services, &tasks)?;
        incarnations::record_policies(&tasks, &store, &services, &accounts, recorded);
        tasks.spawn("backlog", OnStop::Cancel, backlog_reader.run());

        let router = http::router(Arc::new(edge::ApiServices {
            accounts: Arc::clone(&accounts),
            auth: Arc::clone(&auth),
            publisher: Arc::new(publisher.clone()),
            hub: Arc::clone(&hub),
            earlier_incarnations: past.iter().map(|previous| previous.incarnation).collect(),
            store: Arc::clone(&store),
            connections,
            shards: Arc::clone(&shards),
            meter: Arc::clone(&meter),
            queues: queues.clone().filter(Queues::has_broker),
            limits: Arc::clone(&limits),
            files: Arc::clone(&files),
            clock: clock.clone(),
            node_id: Arc::clone(&node_id),
        }));
        let http = HttpServices::new(&services, router, &shards, &tasks);
        tasks.spawn("http", OnStop::Cancel, listener::serve_http(http, http_connections));
        rebalance::begin(limits.rebalance_ms, routing.as_ref(), &shards, &tasks);
        let operators = Operators::new(&config, &store, &clock, (&files, &outbox), routing.as_ref(), &shards);
        let state = operators.admin_state(admin_token, queues, metrics.clone());
        let admin = serve_admin(&config, admin, state, &last_tasks)?;
        upkeep::begin(&tasks, accounts, &meter, metrics, &operators);
        upkeep::sweep(&tasks, &store, &auth, clock, Arc::clone(&hub), limits.resume_window_ms);

        let (acceptor, listen) = accept(&config, clients, &services, &shards, operators.met(), &tasks)?;
        members::begin(stored_members, &publisher, &auth, &tasks);
        let addresses = cluster::addresses(listen, admin, gossip.as_ref());
        let membership = cluster::join(gossip, &config, &node_id, &hub, listen, routing, &last_tasks)?;
        operators.begin(&config, (&node_id, hub.incarnation()), addresses, membership.as_ref(), &tasks);
        Ok(Self {
            tasks,
            last_tasks,
            shards,
            acceptor,
            store,
            publisher,
            meter,
            membership,
            addresses,
            node_file: announce(&config, &node_id, addresses)?,
            node_id,
            development_key,
            operators,
            outbox,
            drain_timeout: config.drain_timeout,
        })
    }

    pub fn addresses(&self) -> Addresses {
        self.addresses
    }

    pub fn node_id(&self) -> &str {
        &self.node_id
    }

    /// The key of a development directory.
    pub fn development_key(&self) -> Option<String> {
        self.development_key.clone()
    }

    /// Resolves when the node cannot go on, as its log says: a thread ended by itself, or another node has the same id.
    pub async fn failed(&self) {
        tokio::select! {
            () = self.tasks.failed().cancelled_owned() => {}
            () = self.last_tasks.failed().cancelled_owned() => {}
        }
    }

    /// Resolves when an operator has asked the node to stop.
    pub async fn drain_requested(&self) {
        self.operators.drain_requested().await;
    }

    /// Gossip addresses of the other members, except those that are down.
    pub fn members(&self) -> Vec<SocketAddr> {
        self.membership.as_ref().map(Membership::addresses).unwrap_or_default()
    }

    /// Stops the node: not ready, no new connections, clients sent to other nodes or told to reconnect, requests finished, leaves and
    /// counts stored, the store flushed. Members whose connections are lost by the stop stay in the store, for the next incarnation.
    pub async fn stop(self) {
        self.operators.set_draining();
        if let Some(membership) = &self.membership {
            membership.update(|facts| (facts.ready, facts.draining) = (false, true));
        }
        self.acceptor.stop();
        let mut time = drain::StopTime::begin(self.drain_timeout);
        if let Some(routing) = self.publisher.routing() {
            drain::move_clients(routing, &self.shards, &time).await;
        }
        let left = time.for_clients();
        // The shards close the remaining clients when this time is over, so that all has ended in time.
        self.shards.stop(left - left / 10);
        self.tasks.stop(left).await;
        cluster::hand_off(self.publisher.routing(), time.for_step()).await;
        let left = async {
            tokio::join!(
                self.publisher.finish_due_leaves(),
                self.shards.occupancy_notifier().finish(&self.publisher)
            )
        };
        if tokio::time::timeout(time.for_step(), left).await.is_err() {
            tracing::warn!("presence leaves incomplete at stop");
        }
        self.outbox.stop(time.for_step()).await;
        self.meter.finish(time.for_step()).await;
        let store = self.store;
        // Acknowledged messages are on the disk already, so a disk that hangs is not waited for.
        let shutdown = tokio::task::spawn_blocking(move || store.shutdown());
        if !matches!(tokio::time::timeout(time.for_step(), shutdown).await, Ok(Ok(()))) {
            tracing::error!("store shutdown incomplete");
        }
        cluster::say_goodbye(self.publisher.routing(), self.membership.as_ref(), time.for_step()).await;
        self.last_tasks.stop(time.for_step()).await;
        std::fs::remove_file(&self.node_file).ok();
        tracing::info!("stopped");
    }
}

fn open_accounts(config: &Config) -> Result<(Arc<Accounts>, Option<String>), StartError> {
    if !config.auth {
        return Ok((Accounts::fixed(Directory::default()), None));
    }
    let mut key = None;
    if config.development() {
        let development =
            development::create(&config.data_dir).map_err(StartError::in_data(&config.data_dir))?;
        let text = std::fs::read_to_string(&development.key_file);
        let text = text.map_err(StartError::in_data(&development.key_file))?;
        key = Some(text.trim().to_owned());
    }
    let file = config.directory_file();
    let accounts =
        Accounts::open_guarded(&file, config.limits.history_retention_hours, &config.webhook_allow)
            .map_err(StartError::at("cannot use the directory (--directory)"))?;
    Ok((accounts, key))
}

fn open_certificates(config: &Config) -> Result<Option<Arc<Certificates>>, StartError> {
    let files = config.tls_files();
    let opened = files.map(|(certificate, key)| Certificates::open(certificate, key)).transpose();
    opened.map_err(StartError::at("cannot use the certificate (--tls-cert, --tls-key)"))
}

fn meter(
    accounts: &Arc<Accounts>,
    store: &Arc<dyn HistoryStore>,
    clock: &Clock,
    node_id: &Arc<str>,
    minutes: usize,
) -> Arc<Meter> {
    let (accounts, store, node_id) = (Arc::clone(accounts), Arc::clone(store), Arc::clone(node_id));
    Arc::new(Meter::new(accounts, store, clock.clone(), node_id, minutes))
}

fn thread_count(config: &Config) -> usize {
    let cores = || std::thread::available_parallelism().map_or(1, usize::from);
    (if config.threads > 0 { config.threads } else { cores() }).min(64)
}

fn prepare_shards(config: &Config) -> Result<(Arc<Shards>, Vec<mio::Poll>), StartError> {
    let prepared = Shards::prepare(thread_count(config));
    let (shards, polls) = prepared.map_err(StartError::at("cannot prepare the socket threads"))?;
    Ok((Arc::new(shards), polls))
}

fn start_shards(
    config: &Config,
    shards: &Arc<Shards>,
    polls: Vec<mio::Poll>,
    services: &socket::ShardServices,
    tasks: &Tasks,
) -> Result<(), StartError> {
    let io_uring = config.io_uring;
    for (index, poll) in polls.into_iter().enumerate() {
        let shard = Shard::new(index, shards.handle(index), poll, services.clone());
        tasks
            .spawn_thread("shard", move || shard.run(io_uring))
            .map_err(StartError::at("cannot start a socket thread"))?;
    }
    shards.begin_to_count(services, tasks);
    Ok(())
}

/// Writes the node file, by which commands on this machine find the node.
fn announce(config: &Config, node_id: &str, addresses: Addresses) -> Result<PathBuf, StartError> {
    let node_file = crate::config::node_file(&config.data_dir);
    files::write_node_file(&node_file, node_id, addresses, config.tls_files().is_some())
        .map_err(StartError::in_data(&node_file))?;
    let Addresses { listen, admin, gossip, peer } = addresses;
    let [gossip, peer] = [gossip, peer].map(|address| address.map(tracing::field::display));
    tracing::info!(%listen, %admin, gossip, peer, node = %node_id, "node is up");
    Ok(node_file)
}

/// Parts that need no other part of the node.
struct Foundation {
    tasks: Arc<Tasks>,
    last_tasks: Arc<Tasks>,
    clock: Clock,
    files: Arc<ClientFiles>,
    limits: Arc<Limits>,
    node_id: Arc<str>,
}

impl Foundation {
    /// Opens them after the external resources, and starts to record traces.
    fn open(config: &Config) -> Result<Self, StartError> {
        let [tasks, last_tasks] = [(), ()].map(|()| Arc::new(Tasks::new(Handle::current())));
        let files = Arc::new(ClientFiles::open(&config.limits));
        let limits = Arc::new(files.limits(&config.limits));
        let node_id = files::node_id(config)?;
        traces::begin(config, &node_id, &last_tasks)?;
        Ok(Self { tasks, last_tasks, clock: Clock::system(), files, limits, node_id })
    }
}

/// Resources outside the node at which a start may fail. Acquired first, the data folder last, so that a failed start creates no folder.
struct ExternalResources {
    /// Client listener, with TLS if there is a certificate.
    clients: (BoundAddress, Option<Arc<Certificates>>),
    admin: BoundAddress,
    admin_token: AdminToken,
    gossip: Option<BoundGossip>,
}

impl ExternalResources {
    fn open(config: &Config) -> Result<Self, StartError> {
        backup::unfinished(config)?;
        let bind = |address: SocketAddr, flag: &str| {
            BoundAddress::to(address).map_err(StartError::at(format!("cannot listen on {address} ({flag})")))
        };
        let clients = bind(config.listen, "--listen")?;
        let admin = bind(config.admin_listen, "--admin-listen")?;
        let certificates = open_certificates(config)?;
        let gossip = cluster::bind(config)?;
        let given = config.admin_token_file.as_deref().map(AdminToken::read).transpose();
        let given = given.map_err(StartError::at("cannot use the admin token (--admin-token-file)"))?;
        let data_dir = &config.data_dir;
        development::make_private_folder(data_dir).map_err(StartError::in_data(data_dir))?;
        let own = || AdminToken::made_in(data_dir).map_err(StartError::in_data(data_dir));
        let admin_token = given.map_or_else(own, Ok)?;
        Ok(Self { clients: (clients, certificates), admin, admin_token, gossip })
    }
}

fn serve_admin(
    config: &Config,
    bound: BoundAddress,
    state: AdminState,
    tasks: &Tasks,
) -> Result<SocketAddr, StartError> {
    let address = config.admin_listen;
    let at = || format!("cannot listen on {address} (--admin-listen)");
    let bound = bound.listen().map_err(StartError::at(at()))?;
    bound.set_nonblocking(true).map_err(StartError::at(at()))?;
    let bound = tokio::net::TcpListener::from_std(bound).map_err(StartError::at(at()))?;
    let address = bound.local_addr().map_err(StartError::at(at()))?;
    let router = admin::router(state);
    tasks.spawn(
        "admin",
        OnStop::Cancel,
        admin::serve(bound, router, Duration::from_millis(config.limits.header_ms)),
    );
    Ok(address)
}

fn accept(
    config: &Config,
    (bound, certificates): (BoundAddress, Option<Arc<Certificates>>),
    services: &socket::ShardServices,
    shards: &Arc<Shards>,
    has_met: HasMetPeers,
    tasks: &Tasks,
) -> Result<(Acceptor, SocketAddr), StartError> {
    let at = || format!("cannot listen on {} (--listen)", config.listen);
    let bound = bound.listen().map_err(StartError::at(at()))?;
    let address = bound.local_addr().map_err(StartError::at(at()))?;
    if let Some(certificates) = &certificates {
        tasks.spawn("certificate", OnStop::Cancel, Arc::clone(certificates).watch());
    }
    let with = (certificates, Arc::clone(&services.proxies));
    let acceptor = Acceptor::start(
        bound,
        Arc::clone(shards),
        with,
        &services.limits,
        &services.files,
        move || has_met(),
        tasks,
    )
    .map_err(StartError::at(at()))?;
    Ok((acceptor, address))
}
