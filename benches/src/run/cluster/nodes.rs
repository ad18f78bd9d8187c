//! Several nodes of one cluster, each a process of its own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use tempfile::TempDir;

use super::super::admin::Admin;
use super::super::generator::load;
use super::super::server::Server;
use crate::Result;

/// Directory of all nodes.
const DIRECTORY: &str = "[[tenants]]\nid = \"bench\"\n[[tenants.accounts]]\nid = \"bench\"\n[[tenants.accounts.keys]]\n\
     name = \"key\"\nsecret = \"secret\"\nstatus = \"active\"\n\
     capability = { \"*\" = [\"subscribe\", \"publish\", \"presence\", \"history\"] }\n";
const KEY: &str = "secret.key";
const LINK_WITHIN: Duration = Duration::from_secs(60);
const GLANCE: Duration = Duration::from_millis(2);

/// Paths of the binaries, and a folder for what the servers write.
pub(super) struct BinaryPaths {
    pub(super) bench: PathBuf,
    pub(super) bare: PathBuf,
    pub(super) node: PathBuf,
    pub(super) data: PathBuf,
}

/// Nodes of one cluster, with the first node as the seed of the others.
pub(super) struct Cluster {
    // The nodes are declared first, so that they end before their folder is removed.
    pub(super) nodes: Vec<Server>,
    node: PathBuf,
    folder: TempDir,
    log: &'static str,
}

impl Cluster {
    /// Starts `count` nodes, and waits until each knows the interest of all others.
    pub(super) fn start(places: &BinaryPaths, count: usize) -> Result<Self> {
        Self::logging(places, count, "info")
    }

    pub(super) fn logging(places: &BinaryPaths, count: usize, log: &'static str) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("cluster-").tempdir_in(&places.data)?;
        write_key(&folder.path().join("cluster.key"))?;
        fs::write(folder.path().join("directory.toml"), DIRECTORY)?;
        fs::write(folder.path().join("key"), KEY)?;
        let mut cluster = Self { nodes: Vec::new(), node: places.node.clone(), folder, log };
        (0..count).try_for_each(|_| cluster.add())?;
        cluster.until_linked()?;
        Ok(cluster)
    }

    /// Starts one more node, which may not be linked yet when this returns.
    pub(super) fn add(&mut self) -> Result<()> {
        let file = |name: &str| self.folder.path().join(name).display().to_string();
        let local = || "127.0.0.1:0".to_owned();
        let mut environment = vec![
            ("FANFARE_NODE_ID", format!("n{}", self.nodes.len())),
            ("FANFARE_STORE", "none".to_owned()),
            ("FANFARE_DIRECTORY", file("directory.toml")),
            ("FANFARE_CLUSTER_KEY_FILE", file("cluster.key")),
            ("FANFARE_GOSSIP_LISTEN", local()),
            ("FANFARE_PEER_LISTEN", local()),
            ("FANFARE_LOG", self.log.to_owned()),
            // At that time the generator's clients are gone.
            ("FANFARE_DRAIN_TIMEOUT", "2s".to_owned()),
        ];
        if let Some(first) = self.nodes.first() {
            let seed = first.node_file()?.gossip.ok_or("the first node has no gossip")?;
            environment.push(("FANFARE_SEED", seed.to_string()));
        }
        let mut server = Server::node_with(&self.node, self.folder.path(), &environment)?;
        server.key_file = Some(self.folder.path().join("key"));
        self.nodes.push(server);
        Ok(())
    }

    /// Waits until each node knows the interest of all others.
    pub(super) fn until_linked(&self) -> Result<()> {
        let deadline = Instant::now() + LINK_WITHIN;
        for node in &self.nodes {
            let mut admin = Admin::of(node)?;
            while admin.metric("fanfare_peers_known")? < (self.nodes.len() - 1) as f64 {
                if Instant::now() > deadline {
                    return Err(format!("the nodes were not linked within {LINK_WITHIN:?}").into());
                }
                thread::sleep(GLANCE);
            }
        }
        Ok(())
    }

    /// Makes the command of the generator with this workload and its connections on node `at`; all nodes are counted.
    pub(super) fn load(&self, bench: &Path, workload: &str, at: usize) -> Command {
        let mut command = load(bench, workload, &self.nodes[at]);
        for other in self.nodes.iter().enumerate().filter(|(node, _)| *node != at).map(|(_, node)| node) {
            command.args(["--server-pid", &other.pid().to_string()]);
        }
        command
    }

    pub(super) fn metric(&self, node: usize, name: &str) -> Result<f64> {
        Admin::of(&self.nodes[node])?.metric(name)
    }
}

pub(super) fn write_key(file: &Path) -> Result<()> {
    // The key protects nothing: the nodes are on loopback and end with the measurement.
    Ok(fs::write(file, STANDARD.encode([b'b'; 32]))?)
}
