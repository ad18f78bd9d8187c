//! What several settings must satisfy together.

use std::net::SocketAddr;

use super::error::Mistake;
use super::{Config, is_loopback};
use crate::model::Limits;

pub(super) fn check(config: &Config, mistakes: &mut Vec<Mistake>) {
    if !config.auth && !config.insecure && !is_loopback(config.listen) {
        let problem = format!(
            "auth = off would open {} to everybody; listen on loopback, or say --insecure as well",
            config.listen
        );
        mistakes.push(Mistake::new("--auth", problem));
    }
    for (given, flag, other, missing) in [
        (&config.tls_cert, "--tls-cert", &config.tls_key, "--tls-key"),
        (&config.tls_key, "--tls-key", &config.tls_cert, "--tls-cert"),
    ] {
        if given.is_some() && other.is_none() {
            mistakes.push(Mistake::new(flag, format!("needs {missing} as well")));
        }
    }
    if !is_loopback(config.admin_listen) && config.admin_token_file.is_none() {
        let problem = format!("{} is beyond loopback and needs --admin-token-file", config.admin_listen);
        mistakes.push(Mistake::new("--admin-listen", problem));
    }
    let listeners = [("--listen", config.listen), ("--admin-listen", config.admin_listen)];
    for (at, (later, address)) in listeners.iter().enumerate() {
        let taken = listeners[..at].iter().find(|(_, earlier)| collide(*earlier, *address));
        if let Some((earlier, other)) = taken {
            mistakes.push(Mistake::new(*later, format!("{address} is taken by {earlier}, {other}")));
        }
    }
    limits(&config.limits, mistakes);
    if config.auth && !config.development() && !config.directory_file().exists() {
        mistakes.push(Mistake::new("--directory", missing_directory(config)));
    }
}

/// Limits that say something of one another.
fn limits(limits: &Limits, mistakes: &mut Vec<Mistake>) {
    let Limits { page_limit, page_limit_max, token_ttl_default_ms, token_ttl_max_ms, .. } = *limits;
    let Limits { nonce_memory_ms, token_request_window_ms, jwt_lifetime_ms, .. } = *limits;
    for (name, holds, problem) in [
        (
            "page_limit",
            page_limit <= page_limit_max,
            format!("{page_limit} is more than limits.page_limit_max, {page_limit_max}"),
        ),
        (
            "token_ttl_default_ms",
            token_ttl_default_ms <= token_ttl_max_ms,
            format!("{token_ttl_default_ms} is more than limits.token_ttl_max_ms, {token_ttl_max_ms}"),
        ),
        (
            "token_ttl_max_ms",
            token_ttl_max_ms.div_ceil(1000) <= jwt_lifetime_ms / 1000,
            format!(
                "{token_ttl_max_ms} is more than limits.jwt_lifetime_ms, {jwt_lifetime_ms}, which its tokens are held against"
            ),
        ),
        (
            "nonce_memory_ms",
            nonce_memory_ms >= 2 * token_request_window_ms,
            format!(
                "{nonce_memory_ms} is less than twice limits.token_request_window_ms: a request could be used again"
            ),
        ),
    ] {
        if !holds {
            mistakes.push(Mistake::new(format!("limits.{name}"), problem));
        }
    }
}

/// Whether one of them is all that can be bound. With port 0 the system chooses.
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
             (one is made only when every listener is on loopback)"
        )
    }
}
