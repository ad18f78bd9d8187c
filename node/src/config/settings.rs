//! The table of settings.

use super::Config;
use super::field::{
    Field, Form, read_audience, read_drain_timeout, read_keyspace, read_name, read_node_id,
    read_reachable_host, read_replication, read_switch, read_threads,
};
use super::limits::LIMITS;
use super::log_filter::read_log_filter;

/// One setting, with the same name in the file, as a flag and as a variable.
#[derive(Debug)]
pub(super) struct Setting {
    /// Table of the file; none for the top level.
    pub(super) table: Option<&'static str>,
    pub(super) name: &'static str,
    pub(super) form: Form,
    /// Shape of the value, for the help and the reference.
    pub(super) value: &'static str,
    /// One sentence about the effect, without a full stop.
    pub(super) doc: &'static str,
    pub(super) read: fn(&mut Config, &str) -> Result<(), String>,
    /// The default as text; none if there is no default.
    pub(super) show: fn(&Config) -> Option<String>,
}

impl Setting {
    pub(super) fn flag(&self) -> String {
        self.name.replace('_', "-")
    }

    pub(super) fn variable(&self) -> String {
        format!("FANFARE_{}", self.key().replace('.', "_")).to_ascii_uppercase()
    }

    /// The name in mistakes: `listen`, `limits.nesting`.
    pub(super) fn key(&self) -> String {
        match self.table {
            Some(table) => format!("{table}.{}", self.name),
            None => self.name.to_owned(),
        }
    }

    /// Whether the file may contain it: every setting except the name of the file itself.
    pub(super) fn in_file(&self) -> bool {
        self.name != "config"
    }
}

/// All settings, in the order of the reference.
pub(super) fn settings() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter().chain(LIMITS)
}

/// The names of each setting in the file, the environment and the flags; limits have no flag.
#[cfg(test)]
pub(crate) fn names() -> impl Iterator<Item = (String, String, Option<String>)> {
    settings().map(|setting| {
        let flag = setting.table.is_none().then(|| format!("--{}", setting.flag()));
        (setting.key(), setting.variable(), flag)
    })
}

/// The settings that have a flag.
pub(super) fn flag_settings() -> impl Iterator<Item = &'static Setting> {
    SETTINGS.iter()
}

macro_rules! setting {
    ($name:literal, $field:ident : $type:ty, $value:literal, $doc:literal) => {
        setting!($name, $field: $type, $value, $doc, <$type>::read, <$type>::show)
    };
    ($name:literal, $field:ident : $type:ty, $value:literal, $doc:literal, $read:expr, $show:expr) => {
        Setting {
            table: None,
            name: $name,
            form: <$type>::FORM,
            value: $value,
            doc: $doc,
            read: |config, text| {
                config.$field = $read(text)?;
                Ok(())
            },
            show: |config| $show(&config.$field),
        }
    };
}

type OptionalPath = Option<std::path::PathBuf>;

static SETTINGS: &[Setting] = &[
    setting!("config", config_file: OptionalPath, "FILE", "The configuration file (TOML)"),
    setting!("data_dir", data_dir: std::path::PathBuf, "DIR",
        "The data folder: embedded store, development directory and key, the addresses of the running node"),
    setting!("directory", directory: OptionalPath, "FILE",
        "Tenants, accounts and keys; when not given, directory.toml in the data folder"),
    setting!("listen", listen: std::net::SocketAddr, "HOST:PORT",
        "Where clients connect with HTTP and the socket; port 0 takes a free one"),
    setting!("tls_cert", tls_cert: OptionalPath, "FILE",
        "Together with tls_key: clients connect with TLS; the certificate chain (PEM), read again when it changes"),
    setting!("tls_key", tls_key: OptionalPath, "FILE",
        "The private key of the certificate (PEM), read again when it changes"),
    setting!("trusted_proxy", trusted_proxies: Vec<crate::model::Network>, "NETWORK",
        "Load balancers and proxies before listen that are believed whose address a client has: by X-Forwarded-For, and with proxy_protocol by its header; networks such as 10.0.0.0/8 or fd00::/8; repeated as seed is"),
    Setting {
        form: Form::Text,
        ..setting!("proxy_protocol", proxy_protocol: bool, "on|off",
            "Whether each connection of a trusted_proxy to listen begins with a header of the PROXY protocol, version 1 or 2", read_switch, show_switch)
    },
    setting!("admin_listen", admin_listen: std::net::SocketAddr, "HOST:PORT",
        "Where operators connect: /metrics, /ready and /live are open, all else needs the admin token"),
    setting!("admin_token_file", admin_token_file: OptionalPath, "FILE",
        "Holds the admin token; required when admin_listen is beyond loopback, else admin-token is made in the data folder"),
    setting!("node_id", node_id: Option<String>, "NAME",
        "The name of this node in rows, listings and logs; when not given, the host name",
        |text| read_node_id(text).map(Some), Field::show),
    setting!("gossip_listen", gossip_listen: Option<std::net::SocketAddr>, "HOST:PORT",
        "Where nodes of the cluster find each other (UDP), with peer_listen and cluster_key_file; without it a node is alone"),
    setting!("peer_listen", peer_listen: Option<std::net::SocketAddr>, "HOST:PORT",
        "Where other nodes connect, with gossip_listen; port 0 takes a free one"),
    setting!("advertise", advertise: Option<String>, "HOST",
        "The host that others reach this node under; when not given, that of each listener",
        |text| read_reachable_host(text).map(Some), Field::show),
    setting!("seed", seeds: Vec<String>, "HOST:PORT",
        "Where gossip of other nodes is; a name may stand for many, --seed may be repeated, a variable parts with commas"),
    setting!("cluster_key_file", cluster_key_file: OptionalPath, "FILE",
        "The secret of the cluster, the same on every node: 32 random bytes in base64; a second line is taken as well, while the secret changes"),
    setting!("peer_cert", peer_cert: OptionalPath, "FILE",
        "Together with peer_key and peer_ca: own certificates between nodes, in place of those that follow from the cluster key; the chain (PEM) of this one, for the name peer.fanfare.internal as server and client"),
    setting!("peer_key", peer_key: OptionalPath, "FILE",
        "The private key of peer_cert (PEM)"),
    setting!("peer_ca", peer_ca: OptionalPath, "FILE",
        "The CAs that vouch for the certificates of nodes (PEM), the same on every node"),
    setting!("store", store: super::StoreKind, "embedded|none|scylla",
        "Where messages are kept: on the disk of this node, nowhere, or in a ScyllaDB or Apache Cassandra that nodes share"),
    setting!("scylla_node", scylla_nodes: Vec<String>, "HOST:PORT",
        "With store = scylla: where nodes of the database are, of which one must answer; repeated as seed is"),
    setting!("scylla_keyspace", scylla_keyspace: String, "NAME",
        "The keyspace in the database; every node of a cluster has the same", read_keyspace, Field::show),
    setting!("scylla_schema", scylla_schema: super::SchemaMode, "auto|check",
        "Whether a node that starts makes the keyspace and the tables that are missing, or only says so"),
    setting!("scylla_replication", scylla_replication: Option<usize>, "COUNT",
        "Copies of each row in a keyspace that is made; when not given, as many as the database has nodes, at most 3",
        |text| read_replication(text).map(Some), Field::show),
    setting!("scylla_datacenter", scylla_datacenter: Option<String>, "NAME",
        "The data centre of the database that is asked and whose copies are waited for; needed where it has several",
        |text| read_name(text).map(Some), Field::show),
    setting!("scylla_user", scylla_user: Option<String>, "NAME",
        "The user in the database, with scylla_password_file",
        |text| read_name(text).map(Some), Field::show),
    setting!("scylla_password_file", scylla_password_file: OptionalPath, "FILE",
        "Holds the password of scylla_user"),
    setting!("webhook_allow", webhook_allow: Vec<crate::model::AllowRule>, "NETWORK",
        "Addresses that webhooks and the endpoints of AWS targets may reach although they are not public, such as 10.1.0.0/16, 127.0.0.1:9000 or [fd00::]/8; repeated as seed is"),
    setting!("amqp_url", amqp_url: Option<crate::model::AmqpUrl>, "URL",
        "The broker of the account queues, amqp:// or amqps:// with user, password and vhost; with amqp_management_url"),
    setting!("amqp_management_url", amqp_management_url: Option<crate::model::ManagementUrl>, "URL",
        "The management API of that broker, http:// or https:// with a user who is an administrator there"),
    setting!("drain_timeout", drain_timeout: std::time::Duration, "DURATION",
        "How long a stop may take: clients are told to leave, work is flushed", read_drain_timeout, Field::show),
    Setting {
        form: Form::Text,
        ..setting!("auth", auth: bool, "on|off",
            "Whether clients need a credential; off is for local experiments only", read_switch, show_switch)
    },
    setting!("audience", audience: Option<String>, "NAME",
        "What the aud of a token must name, where it has one; when not given, a token with aud is refused",
        |text| read_audience(text).map(Some), Field::show),
    setting!("insecure", insecure: bool, "true|false",
        "Allows auth = off when listen is beyond loopback"),
    setting!("threads", threads: usize, "COUNT",
        "Threads that serve sockets, as many that serve HTTP, and in a cluster one for each four that serves peers, at most 64; 0: one per core", read_threads, Field::show),
    Setting {
        form: Form::Text,
        ..setting!("io_uring", io_uring: bool, "on|off",
            "Whether many sockets are written to by one call of the kernel, with io_uring, where the system has it", read_switch, show_switch)
    },
    setting!("log", log: String, "FILTER",
        "What is logged: a level, or a filter such as info,fanfare=debug; at info the driver of the database from warnings on, unless scylla is in it, and that of brokers never, unless lapin is", read_log_filter, Field::show),
    setting!("log_format", log_format: crate::telemetry::LogFormat, "auto|text|json",
        "Logs go to stderr; auto is text on a terminal and JSON elsewhere"),
    setting!("otlp_endpoint", otlp_endpoint: Option<crate::telemetry::traces::CollectorUrl>, "URL",
        "The collector that traces are sent to by OTLP over HTTP, http:// or https://, such as http://collector:4318; when not given, nothing is traced"),
    setting!("trace_sample_ratio", trace_sample_ratio: crate::telemetry::traces::SampleRatio, "NUMBER",
        "With otlp_endpoint: of how many requests and publishes a trace begins, from 0 to 1; one that comes with a traceparent is traced if that says so"),
];

#[expect(clippy::trivially_copy_pass_by_ref, reason = "the table passes each field by reference")]
fn show_switch(on: &bool) -> Option<String> {
    Some(if *on { "on" } else { "off" }.to_owned())
}
