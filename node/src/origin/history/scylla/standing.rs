//! Which nodes of the database answer, so that a new session does not wait for those that stand still.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use parking_lot::Mutex;
use scylla::client::session::Session;
use scylla::cluster::metadata::Peer;
use scylla::policies::host_filter::HostFilter;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, lookup_host};
use tokio::time::timeout;

/// Where none is said, as the driver has it.
const PORT: u16 = 9042;
/// A request for the options of a server, by the native protocol: version 4, no flags, stream 0, `OPTIONS`, no body. It is answered
/// to whoever connects.
const OPTIONS: [u8; 9] = [4, 0, 0, 0, 5, 0, 0, 0, 0];
/// The answer begins with as much, and the length of the rest is at its end.
const HEAD_BYTES: usize = 9;
const ANSWER_WAIT: Duration = Duration::from_secs(1);

/// Nodes of the database, by whether they answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) answer: HashSet<SocketAddr>,
    pub(super) silent: HashSet<SocketAddr>,
}

impl Standing {
    pub(super) async fn ask(nodes: HashSet<SocketAddr>) -> Self {
        let asked = nodes.into_iter().map(async |node| (node, answers(node).await));
        let mut standing = Self::default();
        for (node, answers) in join_all(asked).await {
            let nodes = if answers { &mut standing.answer } else { &mut standing.silent };
            nodes.insert(node);
        }
        standing
    }
}

/// All nodes that the session before knew, and the contact points; names are left out that are not told in time.
pub(super) async fn known(points: &[String], before: &Session) -> HashSet<SocketAddr> {
    let state = before.get_cluster_state();
    let nodes = state.get_nodes_info().iter();
    let nodes = nodes.map(|node| SocketAddr::new(node.address.ip(), node.address.port()));
    let told = join_all(points.iter().map(|point| timeout(ANSWER_WAIT, addresses(point)))).await;
    nodes.chain(told.into_iter().flatten().flatten()).collect()
}

async fn addresses(point: &str) -> Vec<SocketAddr> {
    if let Ok(told) = lookup_host(point).await {
        return told.collect();
    }
    let told = lookup_host((point, PORT)).await;
    told.map_or_else(|_| Vec::new(), Iterator::collect)
}

async fn answers(node: SocketAddr) -> bool {
    let asked = async {
        let mut stream = TcpStream::connect(node).await?;
        stream.write_all(&OPTIONS).await?;
        let mut head = [0; HEAD_BYTES];
        stream.read_exact(&mut head).await?;
        let [.., a, b, c, d] = head;
        let rest = u64::from(u32::from_be_bytes([a, b, c, d]));
        tokio::io::copy(&mut stream.take(rest), &mut tokio::io::sink()).await?;
        io::Result::Ok(())
    };
    timeout(ANSWER_WAIT, asked).await.is_ok_and(|answered| answered.is_ok())
}

/// Keeps a session from nodes until it is told that there are none any more to pass by; it sees that when it next reads who there is.
#[derive(Clone)]
pub(super) struct Passed(Arc<Mutex<HashSet<IpAddr>>>);

impl Passed {
    /// By those that are silent, unless one that answers has the same address and another port.
    pub(super) fn by(standing: &Standing) -> Self {
        let [answer, mut silent] = [&standing.answer, &standing.silent]
            .map(|nodes| nodes.iter().map(SocketAddr::ip).collect::<HashSet<_>>());
        silent.retain(|node| !answer.contains(node));
        Self(Arc::new(Mutex::new(silent)))
    }

    /// False where there was none.
    pub(super) fn none_any_more(&self) -> bool {
        !std::mem::take(&mut *self.0.lock()).is_empty()
    }
}

impl HostFilter for Passed {
    fn accept(&self, peer: &Peer) -> bool {
        !self.0.lock().contains(&peer.address.ip())
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;

    use super::*;

    #[tokio::test]
    async fn who_takes_a_connection_and_says_nothing_does_not_answer() {
        let listen = async || TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (one, silent, gone) = (listen().await, listen().await, listen().await);
        let [answers, stands_still, is_gone] =
            [&one, &silent, &gone].map(|listener| listener.local_addr().expect("it listens"));
        drop(gone);
        let answering = async {
            let (mut stream, _) = one.accept().await.expect("it is asked");
            let mut asked = [0; OPTIONS.len()];
            stream.read_exact(&mut asked).await.expect("it is asked");
            assert_eq!(asked, OPTIONS);
            stream.write_all(&[0x84, 0, 0, 0, 6, 0, 0, 0, 2, 0, 0]).await.expect("it answers");
        };
        let asked = Standing::ask([answers, stands_still, is_gone].into());
        let (standing, ()) = tokio::join!(asked, answering);
        let expected = Standing { answer: [answers].into(), silent: [stands_still, is_gone].into() };
        assert_eq!(standing, expected);
    }

    #[test]
    fn who_answers_is_not_passed_by_for_another_port_that_does_not() {
        let node = |last, port| SocketAddr::from(([127, 0, 0, last], port));
        let standing = Standing {
            answer: [node(1, PORT)].into(),
            silent: [node(1, 7), node(2, PORT), node(2, 7)].into(),
        };
        let passed = Passed::by(&standing);
        assert_eq!(*passed.0.lock(), [node(2, PORT).ip()].into());
        assert!(passed.none_any_more() && !passed.none_any_more());
    }

    #[tokio::test]
    async fn a_contact_point_may_be_said_without_its_port() {
        let local = |port| SocketAddr::from(([127, 0, 0, 1], port));
        assert_eq!(addresses("127.0.0.1:7").await, [local(7)]);
        assert_eq!(addresses("127.0.0.1").await, [local(PORT)]);
        assert_eq!(addresses("not a name").await, []);
    }
}
