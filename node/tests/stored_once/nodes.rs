//! Three nodes in this process, over one store.

use std::collections::HashSet;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare::app::App;
use fanfare::config::{Config, StoreKind};
use fanfare::model::{Clock, Limits};
use fanfare::origin::history::{EmbeddedOptions, EmbeddedStore};
use fanfare::telemetry;
use futures_util::future::join_all;
use parking_lot::Mutex;
use serde_json::json;
use tempfile::TempDir;
use tokio::time::Instant;

use crate::SOON;
use crate::recording::{Log, RecordingStore};
use crate::socket::Socket;

pub(crate) const NODES: usize = 3;
pub(crate) const KEY: &str = "secret.k1";

const DIRECTORY: &str = r#"
[[tenants]]
id = "acme"

[[tenants.accounts]]
id = "acme"

[[tenants.accounts.channels]]
pattern = "passing:*"
history = false

[[tenants.accounts.keys]]
name = "k1"
secret = "secret"
status = "active"
capability = { "*" = ["subscribe", "publish", "presence", "history"] }
"#;
const PROBE: &str = "passing:probe";
const PROBE_LOOK: Duration = Duration::from_millis(20);

/// Lock that each test holds: metrics are those of the process, so one test's nodes run at a time.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

pub(crate) struct Nodes {
    apps: Vec<App>,
    log: Arc<Mutex<Log>>,
    _folder: TempDir,
    _alone: tokio::sync::MutexGuard<'static, ()>,
}

impl Nodes {
    /// Starts the nodes and links each with all others. The log then has their incarnations and history policies alone.
    pub(crate) async fn start() -> Self {
        let alone = ALONE.lock().await;
        let folder = tempfile::tempdir().expect("a temporary folder");
        let file = |name: &str| folder.path().join(name);
        std::fs::write(file("directory.toml"), DIRECTORY).expect("the folder is writable");
        std::fs::write(file("cluster.key"), STANDARD.encode([7; 32])).expect("the folder is writable");
        std::fs::create_dir(file("store")).expect("the folder is writable");
        let options = EmbeddedOptions::new(true, &limits());
        let store = EmbeddedStore::open(&file("store"), &options, Clock::system()).expect("a store");
        let (store, log) = (Arc::new(store), Arc::new(Mutex::new(Log::default())));
        let mut apps: Vec<App> = Vec::new();
        for node in 0..NODES {
            let seed = apps.first().and_then(|first| first.addresses().gossip);
            let own = RecordingStore { node, log: Arc::clone(&log), store: Arc::clone(&store) };
            let started = App::start_over(config(node, folder.path(), seed), Some(Arc::new(own))).await;
            apps.push(started.expect("a node starts"));
        }
        let nodes = Self { apps, log, _folder: folder, _alone: alone };
        nodes.until_linked().await;
        let mut log = nodes.log.lock();
        let (incarnations, policies) =
            (std::mem::take(&mut log.incarnations), std::mem::take(&mut log.policies));
        *log = Log { incarnations, policies, ..Log::default() };
        drop(log);
        nodes
    }

    pub(crate) fn addr(&self, node: usize) -> SocketAddr {
        self.apps[node].addresses().listen
    }

    /// Opens a socket on each node.
    pub(crate) async fn sockets(&self) -> Vec<Socket> {
        join_all((0..NODES).map(|node| Socket::open(self.addr(node), ""))).await
    }

    pub(crate) fn node_of(&self, incarnation: u64) -> usize {
        self.log.lock().incarnations[&incarnation]
    }

    pub(crate) fn reads(&self) -> u64 {
        self.log.lock().reads
    }

    /// Stops the nodes, and gives all that they were to store until their end.
    pub(crate) async fn stop(mut self) -> Log {
        join_all(self.apps.drain(..).map(App::stop)).await;
        std::mem::take(&mut *self.log.lock())
    }

    /// Waits until each node receives the messages of every node.
    async fn until_linked(&self) {
        let mut sockets = self.sockets().await;
        for socket in &mut sockets {
            socket.attach(PROBE, &json!({})).await;
        }
        let mut received = vec![HashSet::new(); NODES];
        let end = Instant::now() + SOON;
        while received.iter().any(|from| from.len() < NODES) {
            assert!(Instant::now() < end, "waited in vain for the links: {received:?}");
            for (node, socket) in sockets.iter_mut().enumerate() {
                socket.publish(PROBE, &[json!({"data": node})]).await;
            }
            for (socket, received) in sockets.iter_mut().zip(&mut received) {
                while let Some(frame) = socket.next_within(PROBE_LOOK).await {
                    received.extend(frame["messages"][0]["data"].as_u64());
                }
            }
        }
    }
}

/// Gives the numbers of forwards that nodes sent, and that nodes received.
pub(crate) fn forwards() -> [u64; 2] {
    let text = telemetry::metrics().render();
    ["fanfare_forwards_sent_total", "fanfare_forwards_taken_total"].map(|name| {
        let count = text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
        count.expect("the nodes count it")
    })
}

pub(crate) fn forwards_since(before: [u64; 2]) -> [u64; 2] {
    let now = forwards();
    [now[0] - before[0], now[1] - before[1]]
}

fn config(node: usize, folder: &Path, seed: Option<SocketAddr>) -> Config {
    let any = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    Config {
        data_dir: folder.join(format!("n{node}")),
        directory: Some(folder.join("directory.toml")),
        listen: any,
        admin_listen: any,
        node_id: Some(format!("n{node}")),
        gossip_listen: Some(any),
        peer_listen: Some(any),
        seeds: seed.iter().map(SocketAddr::to_string).collect(),
        cluster_key_file: Some(folder.join("cluster.key")),
        store: StoreKind::Scylla,
        drain_timeout: Duration::from_secs(5),
        threads: 1,
        limits: limits(),
        ..Config::default()
    }
}

/// Limits with small replay buffers and a short presence timeout, under which no client is closed for its rate or its
/// silence.
fn limits() -> Limits {
    Limits {
        ring_bytes: 16 * 1024,
        presence_grace_ms: 500,
        publishes_per_second: 0,
        controls_per_second: 0,
        heartbeat_ms: 600_000,
        store_wait_ms: 10_000,
        ..Limits::default()
    }
}
