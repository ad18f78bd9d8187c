//! File, environment and flags → one checked [`Config`], with every mistake reported at once.
//!
//! `settings` is the one table behind the flags, the variables, the keys of the file and the reference.

mod error;
mod field;
mod file;
pub mod flags;
mod limits;
mod load;
mod log_filter;
mod nearest;
mod quantity;
mod reference;
mod rules;
mod settings;
#[cfg(test)]
mod tests;

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub use error::{ConfigError, Mistake};
pub use load::Loaded;
pub use quantity::parse_duration;
pub use reference::reference;
#[cfg(test)]
pub(crate) use settings::names;

use crate::model::{AllowRule, AmqpUrl, Limits, ManagementUrl, Network};
use crate::telemetry::LogFormat;
use crate::telemetry::traces::{CollectorUrl, SampleRatio};

/// What `fanfare serve` runs with; `fanfare config-reference` says what each field means.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub config_file: Option<PathBuf>,
    pub data_dir: PathBuf,
    /// As it was given; [`Config::directory_file`] is where it is looked for.
    pub directory: Option<PathBuf>,
    pub listen: SocketAddr,
    /// With `tls_key`: the client listener speaks TLS.
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    pub trusted_proxies: Vec<Network>,
    pub proxy_protocol: bool,
    pub admin_listen: SocketAddr,
    pub admin_token_file: Option<PathBuf>,
    pub node_id: Option<String>,
    /// None: the node is alone.
    pub gossip_listen: Option<SocketAddr>,
    pub peer_listen: Option<SocketAddr>,
    /// A name or an address; none: the listeners say it.
    pub advertise: Option<String>,
    /// Each a host and a port.
    pub seeds: Vec<String>,
    pub cluster_key_file: Option<PathBuf>,
    /// All three or none: the links to other nodes have certificates that follow from the cluster key.
    pub peer_cert: Option<PathBuf>,
    pub peer_key: Option<PathBuf>,
    pub peer_ca: Option<PathBuf>,
    pub store: StoreKind,
    /// Each a host and a port; for [`StoreKind::Scylla`], as all that begins with `scylla`.
    pub scylla_nodes: Vec<String>,
    pub scylla_keyspace: String,
    pub scylla_schema: SchemaMode,
    /// Copies of each row in a keyspace that is made; none: as many as there are nodes, at most 3.
    pub scylla_replication: Option<usize>,
    /// Needed where the database has several.
    pub scylla_datacenter: Option<String>,
    pub scylla_user: Option<String>,
    pub scylla_password_file: Option<PathBuf>,
    /// Addresses that a webhook may reach beside public ones.
    pub webhook_allow: Vec<AllowRule>,
    /// With `amqp_management_url`: the broker of the queues.
    pub amqp_url: Option<AmqpUrl>,
    pub amqp_management_url: Option<ManagementUrl>,
    pub drain_timeout: Duration,
    pub auth: bool,
    /// The name of this service in `aud` of tokens.
    pub audience: Option<String>,
    pub insecure: bool,
    /// Shards and runtime workers, each; 0: one per core.
    pub threads: usize,
    /// Where the system has it.
    pub io_uring: bool,
    /// A filter of `tracing_subscriber::EnvFilter`.
    pub log: String,
    pub log_format: LogFormat,
    /// None: nothing is traced.
    pub otlp_endpoint: Option<CollectorUrl>,
    pub trace_sample_ratio: SampleRatio,
    pub limits: Limits,
}

/// Where messages are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    None,
    Embedded,
    /// ScyllaDB or Apache Cassandra.
    Scylla,
}

/// Whether a node makes what it needs in the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SchemaMode {
    Auto,
    Check,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            config_file: None,
            data_dir: PathBuf::from("./data"),
            directory: None,
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8080)),
            tls_cert: None,
            tls_key: None,
            trusted_proxies: Vec::new(),
            proxy_protocol: false,
            admin_listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 8081)),
            admin_token_file: None,
            node_id: None,
            gossip_listen: None,
            peer_listen: None,
            advertise: None,
            seeds: Vec::new(),
            cluster_key_file: None,
            peer_cert: None,
            peer_key: None,
            peer_ca: None,
            store: StoreKind::Embedded,
            scylla_nodes: Vec::new(),
            scylla_keyspace: "fanfare".to_owned(),
            scylla_schema: SchemaMode::Auto,
            scylla_replication: None,
            scylla_datacenter: None,
            scylla_user: None,
            scylla_password_file: None,
            webhook_allow: Vec::new(),
            amqp_url: None,
            amqp_management_url: None,
            drain_timeout: Duration::from_secs(25),
            auth: true,
            audience: None,
            insecure: false,
            threads: 0,
            io_uring: true,
            log: "info".to_owned(),
            log_format: LogFormat::Auto,
            otlp_endpoint: None,
            trace_sample_ratio: SampleRatio::default(),
            limits: Limits::default(),
        }
    }
}

impl Config {
    pub fn directory_file(&self) -> PathBuf {
        self.directory.clone().unwrap_or_else(|| self.data_dir.join("directory.toml"))
    }

    /// Where a development node keeps its only key, mode 0600.
    pub fn development_key_file(&self) -> PathBuf {
        development_key_file(&self.data_dir)
    }

    /// Certificate and key of the client listener; none: it is plain.
    pub fn tls_files(&self) -> Option<(&Path, &Path)> {
        self.tls_cert.as_deref().zip(self.tls_key.as_deref())
    }

    /// Certificate, key and CAs of the links to other nodes; none: they follow from the cluster key.
    pub fn peer_files(&self) -> Option<[&Path; 3]> {
        Some([self.peer_cert.as_deref()?, self.peer_key.as_deref()?, self.peer_ca.as_deref()?])
    }

    /// No directory was given, every listener is on loopback, there is no gossip, and the data folder holds no directory or one
    /// that an earlier development start made.
    pub fn development(&self) -> bool {
        let own = self.development_key_file().exists() || !self.directory_file().exists();
        self.directory.is_none() && self.gossip_listen.is_none() && self.loopback_only() && own
    }

    fn loopback_only(&self) -> bool {
        [self.listen, self.admin_listen].into_iter().all(is_loopback)
    }
}

/// `<data-dir>/dev-key`.
pub fn development_key_file(data_dir: &Path) -> PathBuf {
    data_dir.join("dev-key")
}

/// `<data-dir>/node.json`: where a running node says which addresses it has bound.
pub fn node_file(data_dir: &Path) -> PathBuf {
    data_dir.join("node.json")
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}
