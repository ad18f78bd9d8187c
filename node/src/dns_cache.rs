//! Cached addresses of host names, for peers and the database. Look-ups run in the background.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

pub(crate) type DnsLookup = Pin<Box<dyn Future<Output = (String, io::Result<Vec<SocketAddr>>)> + Send>>;

/// Cache from `host:port` names to addresses. A look-up that hangs cannot be cancelled and holds a thread, so at most one runs for each
/// name. Callers need not wait for a look-up: the last known addresses stay available.
pub struct DnsCache {
    look_up: fn(String) -> DnsLookup,
    known: HashMap<String, Vec<SocketAddr>>,
    /// Names with a look-up under way.
    pending: HashSet<String>,
    under_way: FuturesUnordered<DnsLookup>,
}

impl DnsCache {
    /// Cache that asks the system's resolver.
    pub fn new() -> Self {
        Self::with_resolver(system_lookup)
    }

    /// Cache that asks the given resolver.
    pub(crate) fn with_resolver(look_up: fn(String) -> DnsLookup) -> Self {
        let (known, pending, under_way) = (HashMap::new(), HashSet::new(), FuturesUnordered::new());
        Self { look_up, known, pending, under_way }
    }

    /// The addresses that the last look-up found. A literal address is returned as it is.
    pub fn addresses(&self, name: &str) -> Vec<SocketAddr> {
        match name.parse() {
            Ok(address) => vec![address],
            Err(_) => self.known.get(name).cloned().unwrap_or_default(),
        }
    }

    /// Starts a look-up of the name, unless one is under way. [`DnsCache::next_answer`] drives it.
    pub fn look_up(&mut self, name: &str) {
        if name.parse::<SocketAddr>().is_err() && self.pending.insert(name.to_owned()) {
            self.under_way.push((self.look_up)(name.to_owned()));
        }
    }

    /// Waits until a look-up ends. Returns its name, and the error if the look-up failed. The future may be dropped and called again.
    pub async fn next_answer(&mut self) -> (String, io::Result<()>) {
        let Some((name, found)) = self.under_way.next().await else { return std::future::pending().await };
        self.pending.remove(&name);
        let found = found.and_then(|found| match found.is_empty() {
            true => Err(io::Error::new(io::ErrorKind::NotFound, "it has no address")),
            false => Ok(found),
        });
        let taken = found.map(|found| drop(self.known.insert(name.clone(), found)));
        (name, taken)
    }

    /// Drops all names for which `is_used` is false.
    pub fn retain(&mut self, is_used: impl Fn(&str) -> bool) {
        self.known.retain(|name, _| is_used(name));
    }
}

pub(crate) fn system_lookup(name: String) -> DnsLookup {
    Box::pin(async {
        let found = tokio::net::lookup_host(&name).await.map(Iterator::collect);
        (name, found)
    })
}

impl Default for DnsCache {
    fn default() -> Self {
        Self::new()
    }
}
