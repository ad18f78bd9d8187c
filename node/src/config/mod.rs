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

pub use error::{ConfigError, ConfigMistake};
pub use load::LoadedConfig;
pub use quantity::parse_duration;
pub use reference::reference;
#[cfg(test)]
pub(crate) use settings::names;

use crate::model::{AllowRule, AmqpUrl, Limits, ManagementUrl, Network};
use crate::telemetry::LogFormat;
use crate::telemetry::traces::{CollectorUrl, SampleRatio};

/// Configuration of `fanfare serve`; `fanfare config-reference` explains each field.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    pub config_file: Option<PathBuf>,
    pub data_dir: PathBuf,
    /// Directory file as given; [`Config::directory_file`] is the path that is read.
    pub directory: Option<PathBuf>,
    pub listen: SocketAddr,
    /// Certificate; with `tls_key` the client listener uses TLS.
    pub tls_cert: Option<PathBuf>,
    pub tls_key: Option<PathBuf>,
    pub trusted_proxies: Vec<Network>,
    pub proxy_protocol: bool,
    pub admin_listen: SocketAddr,
    pub admin_token_file: Option<PathBuf>,
    pub node_id: Option<String>,
    /// Gossip address; none for a single node.
    pub gossip_listen: Option<SocketAddr>,
    pub peer_listen: Option<SocketAddr>,
    /// Advertised name or address; none: that of the listeners.
    pub advertise: Option<String>,
    /// Seeds, each a host and a port.
    pub seeds: Vec<String>,
    pub cluster_key_file: Option<PathBuf>,
    /// Certificate of the peer streams; all three files or none: without them the certificates are derived from the cluster key.
    pub peer_cert: Option<PathBuf>,
    pub peer_key: Option<PathBuf>,
    pub peer_ca: Option<PathBuf>,
    pub store: StoreKind,
    /// Database nodes, each a host and a port; used by [`StoreKind::Scylla`], like all fields beginning with `scylla`.
    pub scylla_nodes: Vec<String>,
    pub scylla_keyspace: String,
    pub scylla_schema: SchemaMode,
    /// Copies of each row in a keyspace that is created; none: as many as there are nodes, at most 3.
    pub scylla_replication: Option<usize>,
    /// Datacenter, required if the database has several.
    pub scylla_datacenter: Option<String>,
    pub scylla_user: Option<String>,
    pub scylla_password_file: Option<PathBuf>,
    /// Addresses that a webhook may reach in addition to public ones.
    pub webhook_allow: Vec<AllowRule>,
    /// Broker of the queues, with `amqp_management_url`.
    pub amqp_url: Option<AmqpUrl>,
    pub amqp_management_url: Option<ManagementUrl>,
    pub drain_timeout: Duration,
    pub auth: bool,
    /// Name of this service in the `aud` of tokens.
    pub audience: Option<String>,
    pub insecure: bool,
    /// Number of shards, and of runtime workers; 0: one per core.
    pub threads: usize,
    /// Whether io_uring is used, where the system supports it.
    pub io_uring: bool,
    /// A filter of `tracing_subscriber::EnvFilter`.
    pub log: String,
    pub log_format: LogFormat,
    /// Collector of traces; none: no tracing.
    pub otlp_endpoint: Option<CollectorUrl>,
    pub trace_sample_ratio: SampleRatio,
    pub limits: Limits,
}

/// Kinds of the message store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StoreKind {
    None,
    Embedded,
    /// ScyllaDB or Apache Cassandra.
    Scylla,
}

/// Whether a node creates what it needs in the database.
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

    /// The file in which a development node keeps its only key, mode 0600.
    pub fn development_key_file(&self) -> PathBuf {
        development_key_file(&self.data_dir)
    }

    /// Certificate and key of the client listener; none: no TLS.
    pub fn tls_files(&self) -> Option<(&Path, &Path)> {
        self.tls_cert.as_deref().zip(self.tls_key.as_deref())
    }

    /// Certificate, key and CAs of the peer streams; none: derived from the cluster key.
    pub fn peer_files(&self) -> Option<[&Path; 3]> {
        Some([self.peer_cert.as_deref()?, self.peer_key.as_deref()?, self.peer_ca.as_deref()?])
    }

    /// Whether this is a development node: no directory was given, every listener is on loopback, there is no gossip, and the data folder
    /// has no directory file or one that an earlier development start made.
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

/// `<data-dir>/node.json`: the file with the bound addresses of a running node.
pub fn node_file(data_dir: &Path) -> PathBuf {
    data_dir.join("node.json")
}

fn is_loopback(address: SocketAddr) -> bool {
    address.ip().to_canonical().is_loopback()
}
