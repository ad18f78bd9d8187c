//! Everything that faces clients: listeners, HTTP, the socket, and the one table of status and error codes.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::sync::{Arc, Weak};

use tokio::io::Interest;
use tokio::net::TcpStream;

use crate::accounts::{Accounts, TenantConnections};
use crate::auth::Authenticator;
use crate::hub::Hub;
use crate::model::{Clock, Limits};
use crate::origin::history::HistoryStore;
use crate::origin::metering::Meter;
use crate::origin::queues::Queues;
use crate::publish::Publisher;
use files::ClientFiles;
use socket::Shards;

pub mod admin;
pub mod errors;
pub mod files;
pub mod host;
pub mod http;
pub mod link;
pub mod listener;
pub mod memory;
pub mod proxies;
pub mod socket;

/// The parts that a request or a connection is served with.
pub struct Services {
    pub accounts: Arc<Accounts>,
    pub auth: Arc<Authenticator>,
    pub publisher: Arc<Publisher>,
    pub hub: Arc<Hub>,
    /// The incarnations of the runs of the node before this one, the latest first.
    pub former_runs: Vec<u64>,
    pub store: Arc<dyn HistoryStore>,
    pub connections: Arc<TenantConnections>,
    pub shards: Arc<Shards>,
    pub meter: Arc<Meter>,
    /// None: the node has no broker of queues.
    pub queues: Option<Queues>,
    pub limits: Arc<Limits>,
    pub files: Arc<ClientFiles>,
    pub clock: Clock,
    pub node_id: Arc<str>,
}

/// Where a request came from; the listener puts it into the request's extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerAddress(pub IpAddr);

/// The socket that a request came over, for an answer without end; the listener puts it into the request's extensions.
#[derive(Debug, Clone)]
pub struct ClientSocket(Weak<TcpStream>);

impl ClientSocket {
    /// Ends when the client has closed its side, also while hyper reads nothing. What it sends may be left unread: no
    /// further request can follow on this connection.
    pub async fn closed(self) {
        let Some(socket) = self.0.upgrade() else { return };
        while let Ok(ready) = socket.ready(Interest::READABLE).await {
            if ready.is_read_closed() {
                return;
            }
            // The next thing that comes wakes us, not what stands there.
            socket.try_io(Interest::READABLE, || Err::<(), _>(ErrorKind::WouldBlock.into())).ok();
        }
    }
}
