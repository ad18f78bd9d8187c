//! Resolver of a webhook's host, which returns no address that the guard refuses.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use parking_lot::Mutex;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::watch;

use crate::model::AddressGuard;

/// Concurrent look-ups. A look-up cannot be cancelled, and holds a thread until the system gives up.
const LOOKUPS_MAX: usize = 128;

type ResolvedAddresses = Result<Arc<[IpAddr]>, ResolveError>;
type LookUpFn = dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync;

/// Look-ups of all clients. A host has one at a time, so a name server that hangs holds one thread for each name.
#[derive(Clone)]
pub(super) struct TargetLookups {
    look_up: Arc<LookUpFn>,
    under_way: Arc<Mutex<HashMap<String, watch::Receiver<Option<ResolvedAddresses>>>>>,
}

/// Reason why there is no address to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum ResolveError {
    /// The guard refuses every address of the host.
    NotAllowed,
    TooMany,
    Unknown(String),
}

impl fmt::Display for ResolveError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAllowed => f.write_str("address not allowed"),
            Self::TooMany => f.write_str("too many name look-ups are under way"),
            Self::Unknown(reason) => write!(f, "host not found: {reason}"),
        }
    }
}

impl std::error::Error for ResolveError {}

impl TargetLookups {
    /// Resolves names with the system's resolver.
    pub(super) fn of_system() -> Self {
        Self::by(|host| {
            // A placeholder: the port comes from the connection.
            let found = (host, 0).to_socket_addrs()?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }

    pub(super) fn by(look_up: impl Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync + 'static) -> Self {
        Self { look_up: Arc::new(look_up), under_way: Arc::default() }
    }

    async fn addresses(&self, host: String) -> ResolvedAddresses {
        let mut answer = self.look_up_once(host).ok_or(ResolveError::TooMany)?;
        match answer.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(found)) => found.clone(),
            _ => Err(ResolveError::Unknown("the look-up failed".to_owned())),
        }
    }

    /// Joins the look-up that is under way, or starts a new one.
    fn look_up_once(&self, host: String) -> Option<watch::Receiver<Option<ResolvedAddresses>>> {
        let mut under_way = self.under_way.lock();
        if let Some(answer) = under_way.get(&host) {
            return Some(answer.clone());
        }
        if under_way.len() >= LOOKUPS_MAX {
            return None;
        }
        let (give, answer) = watch::channel(None);
        under_way.insert(host.clone(), answer.clone());
        let end = LookUpEnd { names: self.clone(), host };
        tokio::task::spawn_blocking(move || {
            let found = (end.names.look_up)(&end.host);
            let found = found.map(Arc::from).map_err(|error| ResolveError::Unknown(error.to_string()));
            drop(end);
            give.send_replace(Some(found));
        });
        Some(answer)
    }
}

/// Guard that ends a look-up, also if it panics or the runtime drops it.
struct LookUpEnd {
    names: TargetLookups,
    host: String,
}

impl Drop for LookUpEnd {
    fn drop(&mut self) {
        self.names.under_way.lock().remove(&self.host);
    }
}

/// Resolver of one client. The client connects to the returned addresses without a further look-up.
pub(super) struct GuardedResolver {
    pub(super) names: TargetLookups,
    pub(super) guard: AddressGuard,
}

impl GuardedResolver {
    async fn allowed(
        names: TargetLookups,
        guard: AddressGuard,
        host: String,
    ) -> Result<Vec<SocketAddr>, ResolveError> {
        let found = names.addresses(host).await?;
        if found.is_empty() {
            return Err(ResolveError::Unknown("it has no address".to_owned()));
        }
        let allowed = found.iter().filter(|address| guard.allows(**address));
        let allowed: Vec<_> = allowed.map(|address| SocketAddr::new(*address, 0)).collect();
        if allowed.is_empty() { Err(ResolveError::NotAllowed) } else { Ok(allowed) }
    }
}

impl Resolve for GuardedResolver {
    fn resolve(&self, name: Name) -> Resolving {
        let (names, guard) = (self.names.clone(), self.guard.clone());
        Box::pin(async move {
            let allowed = Self::allowed(names, guard, name.as_str().to_owned()).await?;
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}
