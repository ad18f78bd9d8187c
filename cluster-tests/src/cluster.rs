//! Several nodes of one cluster.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::Value;
use tempfile::TempDir;

use crate::directory::ALL;
use crate::network::{Cut, PacketLoss};
use crate::{Directory, Network, Node, NodeOptions, SOON, wait_until};

/// Key of the nodes of a cluster, for clients.
const KEY: &str = "secret.k1";

/// Nodes of one cluster; `n0` is the seed of the others.
pub struct Cluster {
    nodes: Vec<Node>,
    key: TempDir,
}

impl Cluster {
    /// Starts `count` nodes, each with the first one as its seed.
    pub async fn start(count: usize) -> Self {
        Self::with(count, |options| options).await
    }

    /// Starts `count` nodes, each on a host of its own, and waits until they are linked.
    pub async fn apart(network: &Network, count: usize) -> Self {
        Self::apart_with(network, count, |options| options).await
    }

    /// Starts nodes as [`Cluster::apart`] does, with the options that `change` makes.
    pub async fn apart_with(
        network: &Network,
        count: usize,
        change: impl Fn(NodeOptions) -> NodeOptions,
    ) -> Self {
        let on_host = |options: NodeOptions| {
            let host = network.host();
            // The node is alone on its host, so its ports stay the same over restarts.
            let at = |port: u16| format!("{}:{port}", host.address());
            let options = change(options).on(&host).environment("FANFARE_GOSSIP_LISTEN", &at(7946));
            options.environment("FANFARE_PEER_LISTEN", &at(7947))
        };
        let cluster = Self::with(count, on_host).await;
        cluster.until_linked().await;
        cluster
    }

    async fn with(count: usize, change: impl Fn(NodeOptions) -> NodeOptions) -> Self {
        let key = tempfile::tempdir().expect("a temporary folder");
        let file = key.path().join("cluster.key");
        let mut secret = [0; 32];
        getrandom::fill(&mut secret).expect("the operating system gives random bytes");
        write_key(&file, secret, 0o600);
        let mut cluster = Self { nodes: Vec::new(), key };
        for _ in 0..count {
            cluster.add(&change).await;
        }
        cluster
    }

    /// Starts one more node.
    pub async fn add(&mut self, change: impl FnOnce(NodeOptions) -> NodeOptions) -> &mut Node {
        let mut options = change(options(self.nodes.len(), &self.key_file()));
        if let Some(seed) = self.nodes.first().and_then(Node::gossip) {
            options = options.environment("FANFARE_SEED", &seed.to_string());
        }
        let node = Node::start(options).await;
        self.nodes.push_mut(node)
    }

    /// Starts `count` nodes, and waits until each knows the interest of all others.
    pub async fn linked(count: usize) -> Self {
        Self::linked_with(count, |options| options).await
    }

    /// Starts nodes as [`Cluster::linked`] does, with the options that `change` makes.
    pub async fn linked_with(count: usize, change: impl Fn(NodeOptions) -> NodeOptions) -> Self {
        let cluster = Self::with(count, change).await;
        cluster.until_linked().await;
        cluster
    }

    /// Waits until each node knows the interest of all others.
    pub async fn until_linked(&self) {
        for node in &self.nodes {
            wait_until(SOON, "the links to the others", async || {
                node.metric("fanfare_peers_known").await == (self.nodes.len() - 1) as f64
            })
            .await;
        }
    }

    /// Starts one more node, and waits until all nodes are linked with it.
    pub async fn grow(&mut self) {
        let seed = self.nodes[0].gossip().expect("a node of a cluster");
        let options = options(self.nodes.len(), &self.key_file());
        self.nodes.push(Node::start(options.environment("FANFARE_SEED", &seed.to_string())).await);
        self.until_linked().await;
    }

    /// Gives the options of one more node.
    pub fn one_more(&self, node_id: &str) -> NodeOptions {
        let seed = self.nodes[0].gossip().expect("a node of a cluster");
        let options = options(self.nodes.len(), &self.key_file());
        options.environment("FANFARE_NODE_ID", node_id).environment("FANFARE_SEED", &seed.to_string())
    }

    /// Restarts a node, which gets new addresses. Its seed is a node that runs.
    pub async fn restart(&mut self, index: usize) {
        let other = (index + 1) % self.nodes.len();
        let seed = self.nodes[other].gossip().expect("a node of a cluster");
        self.nodes[index].set_environment("FANFARE_SEED", &seed.to_string());
        self.nodes[index].restart().await;
    }

    pub fn nodes(&mut self) -> &mut [Node] {
        &mut self.nodes
    }

    /// Gives the file with the cluster key.
    pub fn key_file(&self) -> PathBuf {
        self.key.path().join("cluster.key")
    }
}

/// Writes a cluster key with the file permissions `mode`.
pub fn write_key(file: &Path, secret: [u8; 32], mode: u32) {
    let mut options = OpenOptions::new();
    let opened = options.write(true).create_new(true).mode(mode).open(file);
    let written = opened.and_then(|mut file| file.write_all(STANDARD.encode(secret).as_bytes()));
    written.expect("the folder is writable");
}

fn options(index: usize, key_file: &Path) -> NodeOptions {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    NodeOptions::default()
        .directory(directory, KEY)
        .environment("FANFARE_NODE_ID", &format!("n{index}"))
        .environment("FANFARE_STORE", "none")
        .environment("FANFARE_LIMITS_PUBLISHES_PER_SECOND", "0")
        // A publish waits for a cut link. A stall of a second on a busy machine comes on top and must not be a refusal.
        .limit("store_wait_ms", 6_000)
        .environment("FANFARE_GOSSIP_LISTEN", "127.0.0.1:0")
        .environment("FANFARE_PEER_LISTEN", "127.0.0.1:0")
        .environment("FANFARE_CLUSTER_KEY_FILE", &key_file.to_string_lossy())
}

/// Log lines about a peer, as `node/src` writes them.
pub const PEER_ALIVE: &str = "peer is alive";
pub const PEER_DOWN: &str = "peer is down";
pub const PEER_STREAM_LOST: &str = "peer stream lost";

/// Gives the log lines of `node` about its peers: the node that a line is about, and its message.
pub fn peer_log_events(node: &Node) -> Vec<(String, String)> {
    let log = node.log();
    let lines = log.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let text = |line: &Value, key: &str| line[key].as_str().unwrap_or_default().to_owned();
    lines.map(|line| (text(&line, "node"), text(&line, "message"))).collect()
}

/// Cuts the first node off from the others; all are on hosts of their own.
pub fn cut_off(network: &Network, nodes: &[Node]) -> Vec<Cut> {
    let others: Vec<_> = nodes[1..].iter().map(Node::host).collect();
    network.split(&[nodes[0].host()], &others)
}

/// Cuts the peer streams from `from` to `to`, on hosts of their own. The streams from `to` and gossip still pass.
pub fn cut_peer_streams(network: &Network, from: &Node, to: &Node) -> Vec<Cut> {
    let port = to.peer().expect("a node of a cluster").port();
    let there = network.cut(from.host(), to.host(), PacketLoss::To(port));
    let back = network.cut(to.host(), from.host(), PacketLoss::From(port));
    vec![there, back]
}

/// Waits until each of these nodes has declared the other one down.
pub async fn until_down(nodes: &[Node], other: &str) {
    let down_event = (other.to_owned(), PEER_DOWN.to_owned());
    let is_known = || nodes.iter().all(|node| peer_log_events(node).contains(&down_event));
    wait_until(SOON, "its death to be known", async || is_known()).await;
}

/// Waits until the first node has declared all others down, and each of them the first one.
pub async fn until_peers_down(nodes: &[Node]) {
    let down_count =
        |node: &Node| peer_log_events(node).iter().filter(|(_, message)| message == PEER_DOWN).count();
    let is_down = async || {
        down_count(&nodes[0]) >= nodes.len() - 1 && nodes[1..].iter().all(|node| down_count(node) >= 1)
    };
    wait_until(SOON, "the other side to be dead", is_down).await;
}

#[test]
fn log_lines_of_peers_are_those_of_the_node() {
    let node = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../node/src/cluster");
    let text = ["membership/worker.rs", "link/dial.rs"]
        .map(|file| std::fs::read_to_string(node.join(file)).expect("a file of the node"))
        .concat();
    for line in [PEER_ALIVE, PEER_DOWN, PEER_STREAM_LOST] {
        assert!(text.contains(&format!("\"{line}\"")), "no log line is {line:?}");
    }
}
