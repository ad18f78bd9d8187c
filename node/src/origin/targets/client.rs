//! HTTP clients of all targets: no redirects, no proxy from the environment, and a guard of addresses.

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

use super::resolver::{GuardedResolver, ResolveError, TargetLookups};
use crate::model::{AddressGuard, AllowRule, literal_address};

const USER_AGENT: &str = concat!("fanfare/", env!("CARGO_PKG_VERSION"));
/// Idle time of a connection. The guard checks an address when the connection is opened, so a changed name applies after this time.
const IDLE: Duration = Duration::from_secs(30);
const IDLE_CONNECTIONS: usize = 16;
/// Time limit of a connection attempt, also after its delivery was given up.
const CONNECT: Duration = Duration::from_secs(10);
const REASON_CHARACTERS: usize = 200;
/// Port that only a rule with that port opens, so it has rules of its own.
const SMTP: u16 = 25;

/// HTTP clients, whose connections targets share. The guard checks each address before a connection to it.
pub struct TargetClients {
    /// Clients for the ports that rules name, each with the rules of its port alone.
    of_ports: BTreeMap<u16, GuardedClient>,
    /// Client for every other port.
    other: GuardedClient,
    /// Client without a guard, for addresses that do not come from a directory.
    unguarded: Client,
}

struct GuardedClient {
    client: Client,
    guard: AddressGuard,
}

/// Error: this machine cannot make HTTP clients.
#[derive(Debug)]
pub struct ClientSetupError(String);

impl fmt::Display for ClientSetupError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "cannot make an HTTP client: {}", self.0)
    }
}

impl std::error::Error for ClientSetupError {}

impl TargetClients {
    /// Creates the clients with the CA certificates of the platform (or of `SSL_CERT_FILE`), which blocks on the disk.
    ///
    /// # Errors
    /// The TLS or HTTP client cannot be created.
    pub fn new(allow: &[AllowRule]) -> Result<Self, ClientSetupError> {
        Self::with(allow, native_roots(), TargetLookups::of_system())
    }

    pub(super) fn with(
        allow: &[AllowRule],
        roots: RootCertStore,
        names: TargetLookups,
    ) -> Result<Self, ClientSetupError> {
        let tls = tls(roots)?;
        let client = |guard: &AddressGuard| {
            let resolver = GuardedResolver { names: names.clone(), guard: guard.clone() };
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
            client.map_err(|error| ClientSetupError(cause(&error)))
        };
        let guardian = |port| {
            let guard = AddressGuard::of(allow, port);
            Ok(GuardedClient { client: client(&guard)?, guard })
        };
        let named = allow.iter().filter_map(|rule| rule.port());
        let of_ports =
            named.chain([SMTP]).map(|port| Ok((port, guardian(port)?))).collect::<Result<_, _>>()?;
        // No rule names port 0, so this client has the rules without a port.
        Ok(Self { of_ports, other: guardian(0)?, unguarded: client(&AddressGuard::open())? })
    }

    /// Returns the client for an address from the directory.
    pub(super) fn guarded(&self, url: &Url) -> Result<&Client, ResolveError> {
        let guardian = url.port_or_known_default().and_then(|port| self.of_ports.get(&port));
        let guardian = guardian.unwrap_or(&self.other);
        let is_refused = literal_address(url).is_some_and(|address| !guardian.guard.allows(address));
        if is_refused { Err(ResolveError::NotAllowed) } else { Ok(&guardian.client) }
    }

    /// Returns the client for an address that the node has chosen itself.
    pub(super) fn unguarded(&self) -> &Client {
        &self.unguarded
    }
}

/// Creates a TLS configuration with the CA certificates of the platform (or of `SSL_CERT_FILE`). Blocks on the disk.
///
/// # Errors
/// This machine cannot do TLS.
pub fn client_tls() -> Result<ClientConfig, ClientSetupError> {
    tls(native_roots())
}

fn native_roots() -> RootCertStore {
    let found = rustls_native_certs::load_native_certs();
    let mut roots = RootCertStore::empty();
    roots.add_parsable_certificates(found.certs);
    if roots.is_empty() {
        tracing::warn!("no CA certificates found: https targets are not trusted");
    }
    roots
}

fn tls(roots: RootCertStore) -> Result<ClientConfig, ClientSetupError> {
    let versions = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| ClientSetupError(error.to_string()))?;
    Ok(versions.with_root_certificates(roots).with_no_client_auth())
}

/// Describes the error without the URL, which may hold secrets.
pub(super) fn failure(error: &reqwest::Error) -> String {
    let cause = cause(error);
    if cause == ResolveError::NotAllowed.to_string() {
        cause
    } else if error.is_connect() {
        format!("cannot connect: {cause}")
    } else {
        format!("no answer: {cause}")
    }
}

/// Returns the innermost error, which has no URL in it.
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
