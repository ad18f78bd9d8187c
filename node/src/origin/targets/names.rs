//! The look-up of a webhook's host, which gives no address that the guard refuses.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr, ToSocketAddrs as _};
use std::sync::Arc;

use parking_lot::Mutex;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::watch;

use crate::model::Guard;

/// A look-up cannot be cancelled and holds a thread until the system gives it up.
const LOOKUPS_MAX: usize = 128;

type Answer = Result<Arc<[IpAddr]>, Failed>;
type LookUp = dyn Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync;

/// The look-ups of all clients. A host has one at a time, so a name server that hangs holds one thread for each name.
#[derive(Clone)]
pub(super) struct Names {
    look_up: Arc<LookUp>,
    under_way: Arc<Mutex<HashMap<String, watch::Receiver<Option<Answer>>>>>,
}

/// Why there is no address to connect to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Failed {
    /// Every address of the host is one that the guard refuses.
    NotAllowed,
    TooMany,
    Unknown(String),
}

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotAllowed => f.write_str("address not allowed"),
            Self::TooMany => f.write_str("too many name look-ups are under way"),
            Self::Unknown(reason) => write!(f, "host not found: {reason}"),
        }
    }
}

impl std::error::Error for Failed {}

impl Names {
    /// As the system knows them.
    pub(super) fn of_system() -> Self {
        Self::by(|host| {
            // The port is that of the connection; none is known here.
            let found = (host, 0).to_socket_addrs()?;
            Ok(found.map(|address| address.ip()).collect())
        })
    }

    pub(super) fn by(look_up: impl Fn(&str) -> io::Result<Vec<IpAddr>> + Send + Sync + 'static) -> Self {
        Self { look_up: Arc::new(look_up), under_way: Arc::default() }
    }

    async fn addresses(&self, host: String) -> Answer {
        let mut answer = self.asked(host).ok_or(Failed::TooMany)?;
        match answer.wait_for(Option::is_some).await.as_deref() {
            Ok(Some(found)) => found.clone(),
            _ => Err(Failed::Unknown("the look-up failed".to_owned())),
        }
    }

    /// The look-up that is under way, or a new one.
    fn asked(&self, host: String) -> Option<watch::Receiver<Option<Answer>>> {
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
            let found = found.map(Arc::from).map_err(|error| Failed::Unknown(error.to_string()));
            drop(end);
            give.send_replace(Some(found));
        });
        Some(answer)
    }
}

/// A look-up that panics, or that the runtime drops, is over too.
struct LookUpEnd {
    names: Names,
    host: String,
}

impl Drop for LookUpEnd {
    fn drop(&mut self) {
        self.names.under_way.lock().remove(&self.host);
    }
}

/// The resolver of one client. The client connects to what it gives, without a further look-up.
pub(super) struct Guarded {
    pub(super) names: Names,
    pub(super) guard: Guard,
}

impl Guarded {
    async fn allowed(names: Names, guard: Guard, host: String) -> Result<Vec<SocketAddr>, Failed> {
        let found = names.addresses(host).await?;
        if found.is_empty() {
            return Err(Failed::Unknown("it has no address".to_owned()));
        }
        let allowed = found.iter().filter(|address| guard.allows(**address));
        let allowed: Vec<_> = allowed.map(|address| SocketAddr::new(*address, 0)).collect();
        if allowed.is_empty() { Err(Failed::NotAllowed) } else { Ok(allowed) }
    }
}

impl Resolve for Guarded {
    fn resolve(&self, name: Name) -> Resolving {
        let (names, guard) = (self.names.clone(), self.guard.clone());
        Box::pin(async move {
            let allowed = Self::allowed(names, guard, name.as_str().to_owned()).await?;
            Ok(Box::new(allowed.into_iter()) as Addrs)
        })
    }
}
