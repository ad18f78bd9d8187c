//! Rules over several settings.

use std::net::SocketAddr;

use super::error::ConfigMistake;
use super::log_filter;
use super::settings::Setting;
use super::{Config, StoreKind, is_loopback};
use crate::model::{FORWARD_BYTES_MAX, Limits};
use crate::telemetry::traces::SampleRatio;

/// Places of the given settings; the strongest source counts.
#[derive(Debug, Default)]
pub(super) struct SettingSources(Vec<(&'static Setting, String)>);

impl SettingSources {
    pub(super) fn note(&mut self, setting: &'static Setting, location: String) {
        self.0.push((setting, location));
    }

    fn given(&self, table: Option<&str>, name: &str) -> Option<String> {
        let own = |(setting, _): &&(&Setting, String)| setting.table == table && setting.name == name;
        self.0.iter().rev().find(own).map(|(_, location)| location.clone())
    }

    /// The place of a setting; its flag if it was not given.
    fn of(&self, name: &str) -> String {
        self.given(None, name).unwrap_or_else(|| format!("--{}", name.replace('_', "-")))
    }

    /// The place of the first of these limits that was given.
    fn of_limits(&self, names: [&str; 2]) -> String {
        let given = names.iter().find_map(|name| self.given(Some("limits"), name));
        given.unwrap_or_else(|| format!("limits.{}", names[0]))
    }
}

pub(super) fn check(config: &Config, sources: &SettingSources, mistakes: &mut Vec<ConfigMistake>) {
    if !config.auth && !config.insecure && !is_loopback(config.listen) {
        let problem = format!(
            "auth = off would open {} to everybody; listen on loopback, or say --insecure as well",
            config.listen
        );
        mistakes.push(ConfigMistake::new(sources.of("auth"), problem));
    }
    for (given, name, other, missing) in [
        (&config.tls_cert, "tls_cert", &config.tls_key, "--tls-key"),
        (&config.tls_key, "tls_key", &config.tls_cert, "--tls-cert"),
    ] {
        if given.is_some() && other.is_none() {
            mistakes.push(ConfigMistake::new(sources.of(name), format!("needs {missing} as well")));
        }
    }
    if config.proxy_protocol && config.trusted_proxies.is_empty() {
        let problem = "needs --trusted-proxy as well: whose connections begin with the header".to_owned();
        mistakes.push(ConfigMistake::new(sources.of("proxy_protocol"), problem));
    }
    let [amqp, management] = [config.amqp_url.is_some(), config.amqp_management_url.is_some()];
    for (given, name, other, missing) in [
        (amqp, "amqp_url", management, "--amqp-management-url"),
        (management, "amqp_management_url", amqp, "--amqp-url"),
    ] {
        if given && !other {
            mistakes.push(ConfigMistake::new(sources.of(name), format!("needs {missing} as well")));
        }
    }
    if amqp && config.store == StoreKind::None {
        let problem = "needs a store, which has the queues of accounts: store = none keeps nothing";
        mistakes.push(ConfigMistake::new(sources.of("amqp_url"), problem));
    }
    if config.otlp_endpoint.is_none() && config.trace_sample_ratio != SampleRatio::default() {
        let problem = "needs --otlp-endpoint as well: where traces are sent".to_owned();
        mistakes.push(ConfigMistake::new(sources.of("trace_sample_ratio"), problem));
    }
    if !is_loopback(config.admin_listen) && config.admin_token_file.is_none() {
        let problem = format!("{} is beyond loopback and needs --admin-token-file", config.admin_listen);
        mistakes.push(ConfigMistake::new(sources.of("admin_listen"), problem));
    }
    if collide(config.listen, config.admin_listen) {
        let (earlier, other) = (sources.of("listen"), config.listen);
        let problem = format!("{} is taken by {earlier}, {other}", config.admin_listen);
        mistakes.push(ConfigMistake::new(sources.of("admin_listen"), problem));
    }
    cluster(config, sources, mistakes);
    scylla(config, sources, mistakes);
    limits(&config.limits, sources, mistakes);
    let is_needed = config.directory.is_some() || (config.auth && !config.development());
    if is_needed && !config.directory_file().exists() {
        mistakes.push(ConfigMistake::new(sources.of("directory"), missing_directory(config)));
    }
}

/// Warns of values that are valid, and mostly unintended.
pub(super) fn warn(config: &Config, sources: &SettingSources, warnings: &mut Vec<ConfigMistake>) {
    let mut odd = |name: &str, problem: String| warnings.push(ConfigMistake::new(sources.of(name), problem));
    for (name, path) in [
        ("config", config.config_file.as_ref()),
        ("data_dir", Some(&config.data_dir)),
        ("directory", config.directory.as_ref()),
        ("tls_cert", config.tls_cert.as_ref()),
        ("tls_key", config.tls_key.as_ref()),
        ("admin_token_file", config.admin_token_file.as_ref()),
        ("cluster_key_file", config.cluster_key_file.as_ref()),
        ("peer_cert", config.peer_cert.as_ref()),
        ("peer_key", config.peer_key.as_ref()),
        ("peer_ca", config.peer_ca.as_ref()),
        ("scylla_password_file", config.scylla_password_file.as_ref()),
    ] {
        let text = path.map(|path| path.to_string_lossy()).unwrap_or_default();
        if text.trim() != text {
            odd(name, format!("`{text}` begins or ends with space, which is part of the name"));
        }
    }
    log_filter::odd(&config.log).into_iter().for_each(|problem| odd("log", problem));
}

fn cluster(config: &Config, sources: &SettingSources, mistakes: &mut Vec<ConfigMistake>) {
    let mut wrong =
        |name: &str, problem: String| mistakes.push(ConfigMistake::new(sources.of(name), problem));
    let Some(gossip) = config.gossip_listen else {
        for (given, name) in [
            (config.peer_listen.is_some(), "peer_listen"),
            (config.advertise.is_some(), "advertise"),
            (!config.seeds.is_empty(), "seed"),
            (config.cluster_key_file.is_some(), "cluster_key_file"),
            (config.peer_cert.is_some(), "peer_cert"),
            (config.peer_key.is_some(), "peer_key"),
            (config.peer_ca.is_some(), "peer_ca"),
        ] {
            if given {
                wrong(name, "is for a node of a cluster and needs --gossip-listen as well".to_owned());
            }
        }
        return;
    };
    if config.cluster_key_file.is_none() {
        let problem = "needs --cluster-key-file, a file that is the same on every node: \
                       make it with `openssl rand -base64 32`";
        wrong("gossip_listen", problem.to_owned());
    }
    let forwarded = config.limits.forward_bytes();
    if forwarded > FORWARD_BYTES_MAX {
        let problem = format!(
            "one publish could be {forwarded} bytes for the other nodes, and they take {FORWARD_BYTES_MAX}: lower \
             limits.http_body_bytes, limits.socket_message_bytes, limits.publish_messages or limits.client_id_bytes"
        );
        wrong("gossip_listen", problem);
    }
    if config.peer_listen.is_none() {
        wrong("gossip_listen", "needs --peer-listen as well, where other nodes connect".to_owned());
    }
    let files = [
        (&config.peer_cert, "peer_cert", "--peer-cert"),
        (&config.peer_key, "peer_key", "--peer-key"),
        (&config.peer_ca, "peer_ca", "--peer-ca"),
    ];
    let (given, missing): (Vec<_>, Vec<_>) = files.iter().partition(|(file, ..)| file.is_some());
    let missing: Vec<_> = missing.iter().map(|(_, _, flag)| *flag).collect();
    if !missing.is_empty() {
        given.iter().for_each(|(_, name, _)| wrong(name, format!("needs {} as well", missing.join(" and "))));
    }
    if config.store == StoreKind::Embedded {
        let location = if sources.given(None, "store").is_some() { "store" } else { "gossip_listen" };
        let problem = "the embedded store is on the disk of one node and cannot be that of a cluster; \
                       say --store scylla, which nodes share, or --store none, or leave --gossip-listen out";
        wrong(location, problem.to_owned());
    }
    for (name, address) in [("gossip_listen", Some(gossip)), ("peer_listen", config.peer_listen)] {
        let unspecified = address.filter(|address| address.ip().to_canonical().is_unspecified());
        if let (Some(address), None) = (unspecified, &config.advertise) {
            let problem =
                format!("nobody can reach this node at {}; name its host with --advertise", address.ip());
            wrong(name, problem);
        }
    }
    let listeners = [("listen", config.listen), ("admin_listen", config.admin_listen)];
    for (name, other) in listeners {
        if let Some(peer) = config.peer_listen.filter(|peer| collide(*peer, other)) {
            wrong("peer_listen", format!("{peer} is taken by {}, {other}", sources.of(name)));
        }
    }
}

/// Rules for the shared store: its required settings, and the settings that it alone has.
fn scylla(config: &Config, sources: &SettingSources, mistakes: &mut Vec<ConfigMistake>) {
    if config.store != StoreKind::Scylla {
        let defaults = Config::default();
        for (given, name) in [
            (!config.scylla_nodes.is_empty(), "scylla_node"),
            (config.scylla_keyspace != defaults.scylla_keyspace, "scylla_keyspace"),
            (config.scylla_schema != defaults.scylla_schema, "scylla_schema"),
            (config.scylla_replication.is_some(), "scylla_replication"),
            (config.scylla_datacenter.is_some(), "scylla_datacenter"),
            (config.scylla_user.is_some(), "scylla_user"),
            (config.scylla_password_file.is_some(), "scylla_password_file"),
        ] {
            if given {
                mistakes.push(ConfigMistake::new(sources.of(name), "is for --store scylla".to_owned()));
            }
        }
        return;
    }
    let mut wrong =
        |name: &str, problem: &str| mistakes.push(ConfigMistake::new(sources.of(name), problem.to_owned()));
    if config.scylla_nodes.is_empty() {
        wrong("store", "needs --scylla-node as well, where a node of the database is");
    }
    match (&config.scylla_user, &config.scylla_password_file) {
        (Some(_), None) => wrong("scylla_user", "needs --scylla-password-file as well"),
        (None, Some(_)) => wrong("scylla_password_file", "needs --scylla-user as well"),
        _ => {}
    }
}

/// Rules over several limits.
fn limits(limits: &Limits, sources: &SettingSources, mistakes: &mut Vec<ConfigMistake>) {
    const ARRIVES: &str = ", in which it arrives";
    let Limits { page_limit, page_limit_max, message_bytes, presence_data_bytes, token_bytes, .. } = *limits;
    let Limits { socket_message_bytes, http_body_bytes, header_bytes, token_ttl_default_ms, .. } = *limits;
    let Limits { token_ttl_max_ms, jwt_lifetime_ms, nonce_memory_ms, token_request_window_ms, .. } = *limits;
    let of = |bytes: usize| bytes as u64;
    for ([name, other], value, than, why) in [
        (["page_limit", "page_limit_max"], of(page_limit), of(page_limit_max), ""),
        (["message_bytes", "socket_message_bytes"], of(message_bytes), of(socket_message_bytes), ARRIVES),
        (["message_bytes", "http_body_bytes"], of(message_bytes), of(http_body_bytes), ARRIVES),
        (
            ["presence_data_bytes", "socket_message_bytes"],
            of(presence_data_bytes),
            of(socket_message_bytes),
            ARRIVES,
        ),
        (["token_bytes", "header_bytes"], of(token_bytes), of(header_bytes), ARRIVES),
        (["token_ttl_default_ms", "token_ttl_max_ms"], token_ttl_default_ms, token_ttl_max_ms, ""),
        (
            ["token_ttl_max_ms", "jwt_lifetime_ms"],
            token_ttl_max_ms,
            jwt_lifetime_ms,
            ", which its tokens are held against",
        ),
    ] {
        if value > than {
            let problem = format!("limits.{name}, {value}, is more than limits.{other}, {than}{why}");
            mistakes.push(ConfigMistake::new(sources.of_limits([name, other]), problem));
        }
    }
    if token_request_window_ms > nonce_memory_ms / 2 {
        let location = sources.of_limits(["nonce_memory_ms", "token_request_window_ms"]);
        let problem = format!(
            "limits.token_request_window_ms, {token_request_window_ms}, is more than half of limits.nonce_memory_ms, \
             {nonce_memory_ms}: a request could be used again"
        );
        mistakes.push(ConfigMistake::new(location, problem));
    }
}

/// Whether two addresses cannot both be bound. With port 0 the system chooses.
fn collide(one: SocketAddr, other: SocketAddr) -> bool {
    let (a, b) = (one.ip().to_canonical(), other.ip().to_canonical());
    // `[::]` takes the port of every IPv4 address as well.
    let covers = |wide: std::net::IpAddr, narrow: std::net::IpAddr| {
        wide.is_unspecified() && (wide.is_ipv6() || narrow.is_ipv4())
    };
    one.port() != 0 && one.port() == other.port() && (a == b || covers(a, b) || covers(b, a))
}

fn missing_directory(config: &Config) -> String {
    let file = config.directory_file().display().to_string();
    if config.directory.is_some() {
        format!("{file} does not exist")
    } else {
        format!(
            "{file} does not exist; name the file with tenants, accounts and keys \
             (one is made only when every listener is on loopback and there is no gossip)"
        )
    }
}
