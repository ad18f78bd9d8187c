//! Client side of the node: listeners, HTTP, the realtime socket, and the table of status and error codes.

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

/// Services with which requests and connections are served.
pub struct ApiServices {
    pub accounts: Arc<Accounts>,
    pub auth: Arc<Authenticator>,
    pub publisher: Arc<Publisher>,
    pub hub: Arc<Hub>,
    /// Earlier incarnations of the node, the latest first.
    pub earlier_incarnations: Vec<u64>,
    pub store: Arc<dyn HistoryStore>,
    pub connections: Arc<TenantConnections>,
    pub shards: Arc<Shards>,
    pub meter: Arc<Meter>,
    /// None: the node has no queue broker.
    pub queues: Option<Queues>,
    pub limits: Arc<Limits>,
    pub files: Arc<ClientFiles>,
    pub clock: Clock,
    pub node_id: Arc<str>,
}

/// Source address of a request; the listener puts it into the request's extensions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct PeerAddress(pub IpAddr);

/// Socket of a request, for answers without an end; the listener puts it into the request's extensions.
#[derive(Debug, Clone)]
pub struct ClientSocket(Weak<TcpStream>);

impl ClientSocket {
    /// Resolves when the client has closed its side, even while hyper does not read. Further bytes of the client may stay unread: no
    /// further request can follow on this connection.
    pub async fn closed(self) {
        let Some(socket) = self.0.upgrade() else { return };
        while let Ok(ready) = socket.ready(Interest::READABLE).await {
            if ready.is_read_closed() {
                return;
            }
            // Clears the readiness, so that only a new event wakes this task.
            socket.try_io(Interest::READABLE, || Err::<(), _>(ErrorKind::WouldBlock.into())).ok();
        }
    }
}
