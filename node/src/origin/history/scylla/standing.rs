//! Which nodes of the database answer, so that a new session does not wait for those that stand still.

use std::collections::HashSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use scylla::client::session::Session;
use scylla::cluster::NodeAddr;
use scylla::cluster::metadata::Peer;
use scylla::policies::host_filter::HostFilter;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, lookup_host};

/// A request for the options of a server, by the native protocol: version 4, no flags, stream 0, `OPTIONS`, no body. It is answered
/// to whoever connects.
const OPTIONS: [u8; 9] = [4, 0, 0, 0, 5, 0, 0, 0, 0];
const ANSWER_WAIT: Duration = Duration::from_secs(1);

/// The nodes of the database, by whether they answer.
#[derive(Debug, Default)]
pub(super) struct Standing {
    pub(super) answer: Vec<SocketAddr>,
    pub(super) silent: HashSet<SocketAddr>,
}

impl Standing {
    /// Of the contact points, and of all that the session before knew.
    pub(super) async fn ask(points: &[String], before: &Session) -> Self {
        let mut nodes: HashSet<_> =
            before.get_cluster_state().get_nodes_info().iter().map(|node| socket(node.address)).collect();
        let found = join_all(points.iter().map(lookup_host)).await;
        nodes.extend(found.into_iter().flatten().flatten());
        let asked = join_all(nodes.into_iter().map(async |node| (node, answers(node).await))).await;
        let mut standing = Self::default();
        for (node, answers) in asked {
            if answers {
                standing.answer.push(node);
            } else {
                standing.silent.insert(node);
            }
        }
        standing
    }
}

async fn answers(node: SocketAddr) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(node).await?;
        stream.write_all(&OPTIONS).await?;
        stream.read_u8().await?;
        io::Result::Ok(())
    };
    tokio::time::timeout(ANSWER_WAIT, asked).await.is_ok_and(|answered| answered.is_ok())
}

/// Keeps a session from nodes until it is told that there are none any more to pass by; it sees that when it next reads who there is.
#[derive(Clone, Default)]
pub(super) struct Passed(Arc<Mutex<HashSet<SocketAddr>>>);

impl Passed {
    pub(super) fn by(nodes: HashSet<SocketAddr>) -> Self {
        Self(Arc::new(Mutex::new(nodes)))
    }

    pub(super) fn none_any_more(&self) {
        self.0.lock().clear();
    }
}

impl HostFilter for Passed {
    fn accept(&self, peer: &Peer) -> bool {
        !self.0.lock().contains(&socket(peer.address))
    }
}

fn socket(address: NodeAddr) -> SocketAddr {
    SocketAddr::new(address.ip(), address.port())
}
