//! Names of other nodes, and of those of the database, and where they are, looked up beside all else.

use std::collections::{HashMap, HashSet};
use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;

pub(crate) type Found = Pin<Box<dyn Future<Output = (String, io::Result<Vec<SocketAddr>>)> + Send>>;

/// Each a host and a port. A look-up that hangs cannot be ended and holds a thread, so there is one of each name at a time,
/// and nobody need wait for it: what was found last is at hand.
pub struct Names {
    look_up: fn(String) -> Found,
    known: HashMap<String, Vec<SocketAddr>>,
    /// Of which there is a look-up under way.
    asked: HashSet<String>,
    under_way: FuturesUnordered<Found>,
}

impl Names {
    /// As the system knows them.
    pub fn new() -> Self {
        Self::by(of_system)
    }

    /// As somebody else knows them.
    pub(crate) fn by(look_up: fn(String) -> Found) -> Self {
        let (known, asked, under_way) = (HashMap::new(), HashSet::new(), FuturesUnordered::new());
        Self { look_up, known, asked, under_way }
    }

    /// All addresses that were found last; a literal address is its own.
    pub fn known(&self, name: &str) -> Vec<SocketAddr> {
        match name.parse() {
            Ok(address) => vec![address],
            Err(_) => self.known.get(name).cloned().unwrap_or_default(),
        }
    }

    /// Begins to look a name up, unless that is under way. [`Names::answered`] goes on with it.
    pub fn look_up(&mut self, name: &str) {
        if name.parse::<SocketAddr>().is_err() && self.asked.insert(name.to_owned()) {
            self.under_way.push((self.look_up)(name.to_owned()));
        }
    }

    /// Waits until a look-up is over: of which name, or why nothing new is known of it. It may be dropped and called again.
    pub async fn answered(&mut self) -> (String, io::Result<()>) {
        let Some((name, found)) = self.under_way.next().await else { return std::future::pending().await };
        self.asked.remove(&name);
        let found = found.and_then(|found| match found.is_empty() {
            true => Err(io::Error::new(io::ErrorKind::NotFound, "it has no address")),
            false => Ok(found),
        });
        let taken = found.map(|found| drop(self.known.insert(name.clone(), found)));
        (name, taken)
    }

    /// Forgets all other names.
    pub fn retain(&mut self, is_used: impl Fn(&str) -> bool) {
        self.known.retain(|name, _| is_used(name));
    }
}

pub(crate) fn of_system(name: String) -> Found {
    Box::pin(async {
        let found = tokio::net::lookup_host(&name).await.map(Iterator::collect);
        (name, found)
    })
}

impl Default for Names {
    fn default() -> Self {
        Self::new()
    }
}
