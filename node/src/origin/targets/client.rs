//! The HTTP clients of all targets: no redirect, no proxy of the environment, and a guard of addresses.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use reqwest::Client;
use reqwest::redirect::Policy;
use rustls::crypto::aws_lc_rs;
use rustls::{ClientConfig, RootCertStore};
use url::Url;

use super::names::{Failed, Guarded, Names};
use crate::model::{AllowRule, Guard, literal_address};

const USER_AGENT: &str = concat!("fanfare/", env!("CARGO_PKG_VERSION"));
/// A connection in use was checked by the guard when it was opened; a change of its name holds after this.
const IDLE: Duration = Duration::from_secs(30);
const IDLE_CONNECTIONS: usize = 16;
/// An attempt that was given up does not go on to connect for longer.
const CONNECT: Duration = Duration::from_secs(10);
const REASON_CHARACTERS: usize = 200;
/// The port that only a rule with it opens, so it has rules of its own.
const SMTP: u16 = 25;

/// Connections are shared between targets, and the guard looks at each address before it is connected to.
pub struct Clients {
    /// For each port that a rule names, with the rules of that port alone.
    of_ports: BTreeMap<u16, Guardian>,
    /// For every other port.
    other: Guardian,
    /// For addresses that no directory names.
    unguarded: Client,
}

struct Guardian {
    client: Client,
    guard: Guard,
}

/// Targets cannot be sent to on this machine.
#[derive(Debug)]
pub struct Unusable(String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot make an HTTP client: {}", self.0)
    }
}

impl std::error::Error for Unusable {}

impl Clients {
    /// Reads the CA certificates of the platform (or of `SSL_CERT_FILE`), which blocks on the disk.
    ///
    /// # Errors
    /// The TLS or HTTP client cannot be made.
    pub fn new(allow: &[AllowRule]) -> Result<Self, Unusable> {
        Self::with(allow, native_roots(), Names::of_system())
    }

    pub(super) fn with(allow: &[AllowRule], roots: RootCertStore, names: Names) -> Result<Self, Unusable> {
        let tls = tls(roots)?;
        let client = |guard: &Guard| {
            let resolver = Guarded { names: names.clone(), guard: guard.clone() };
            let client = Client::builder()
                .use_preconfigured_tls(tls.clone())
                .dns_resolver(Arc::new(resolver))
                .http1_only()
                .redirect(Policy::none())
                .no_proxy()
                .referer(false)
                .user_agent(USER_AGENT)
                .connect_timeout(CONNECT)
                .pool_idle_timeout(IDLE)
                .pool_max_idle_per_host(IDLE_CONNECTIONS)
                .build();
            client.map_err(|error| Unusable(cause(&error)))
        };
        let guardian = |port| {
            let guard = Guard::of(allow, port);
            Ok(Guardian { client: client(&guard)?, guard })
        };
        let named = allow.iter().filter_map(|rule| rule.port());
        let of_ports =
            named.chain([SMTP]).map(|port| Ok((port, guardian(port)?))).collect::<Result<_, _>>()?;
        // No rule names port 0, so this one has the rules without a port.
        Ok(Self { of_ports, other: guardian(0)?, unguarded: client(&Guard::open())? })
    }

    /// For an address that the directory names.
    pub(super) fn guarded(&self, url: &Url) -> Result<&Client, Failed> {
        let guardian = url.port_or_known_default().and_then(|port| self.of_ports.get(&port));
        let guardian = guardian.unwrap_or(&self.other);
        let is_refused = literal_address(url).is_some_and(|address| !guardian.guard.allows(address));
        if is_refused { Err(Failed::NotAllowed) } else { Ok(&guardian.client) }
    }

    /// For an address of the node's own choice.
    pub(super) fn unguarded(&self) -> &Client {
        &self.unguarded
    }
}

/// TLS to servers that the CA certificates of the platform (or of `SSL_CERT_FILE`) vouch for. Blocks on the disk.
///
/// # Errors
/// This machine cannot do TLS.
pub fn client_tls() -> Result<ClientConfig, Unusable> {
    tls(native_roots())
}

fn native_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        tracing::warn!("no CA certificates on this machine, so no https target is trusted");
    }
    roots
}

fn tls(roots: RootCertStore) -> Result<ClientConfig, Unusable> {
    let versions = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Unusable(error.to_string()))?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

/// Without the URL, which may hold secrets.
pub(super) fn failure(error: &reqwest::Error) -> String {
    let cause = cause(error);
    if cause == Failed::NotAllowed.to_string() {
        cause
    } else if error.is_connect() {
        format!("cannot connect: {cause}")
    } else {
        format!("no answer: {cause}")
    }
}

/// The innermost error, which no layer has put the URL into.
fn cause(error: &reqwest::Error) -> String {
    let mut innermost: &dyn std::error::Error = match error.source() {
        Some(source) => source,
        None => return "the request could not be made".to_owned(),
    };
    while let Some(source) = innermost.source() {
        innermost = source;
    }
    let text = innermost.to_string();
    text.chars().filter(|character| !character.is_control()).take(REASON_CHARACTERS).collect()
}
