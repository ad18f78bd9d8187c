//! Which nodes of the database answer, so that a new session does not wait for those that stand still.

use std::collections::HashSet;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use parking_lot::Mutex;
use scylla::client::session::Session;
use scylla::cluster::Node;
use scylla::cluster::metadata::Peer;
use scylla::policies::host_filter::HostFilter;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep_until};

use crate::names::Names;

/// Where none is said, as the driver has it.
const PORT: u16 = 9042;
/// A request for the options of a server, by the native protocol: version 4, no flags, stream 0, `OPTIONS`, no body. It is answered
/// to whoever connects.
const OPTIONS: [u8; 9] = [4, 0, 0, 0, 5, 0, 0, 0, 0];
/// The answer begins with as much, and the length of the rest is at its end.
const HEAD_BYTES: usize = 9;
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// For the others, once one has answered.
const OTHERS_WAIT: Duration = Duration::from_millis(250);

/// Nodes of the database, by whether they answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Standing {
    pub(super) answer: HashSet<SocketAddr>,
    pub(super) silent: HashSet<SocketAddr>,
}

impl Standing {
    /// Of these nodes, and of those that the contact points stand for, also where that is told meanwhile.
    pub(super) async fn ask(
        mut nodes: HashSet<SocketAddr>,
        mut points: HashSet<String>,
        names: &mut Names,
    ) -> Self {
        let mut standing = Self::default();
        let mut asked = FuturesUnordered::new();
        let mut end = Instant::now() + ANSWER_WAIT;
        points.iter().for_each(|point| names.look_up(point));
        nodes.extend(points.iter().flat_map(|point| names.known(point)));
        points.retain(|point| point.parse::<SocketAddr>().is_err());
        loop {
            for node in nodes.drain().filter(|node| !standing.answer.contains(node)) {
                if standing.silent.insert(node) {
                    asked.push(async move { answers(node).await.is_ok().then_some(node) });
                }
            }
            if points.is_empty() && asked.is_empty() {
                return standing;
            }
            tokio::select! {
                Some(answered) = asked.next() => if let Some(node) = answered {
                    standing.silent.remove(&node);
                    standing.answer.insert(node);
                    end = end.min(Instant::now() + OTHERS_WAIT);
                },
                (name, _) = names.answered() => {
                    points.remove(&name);
                    nodes.extend(names.known(&name));
                }
                () = sleep_until(end) => return standing,
            }
        }
    }
}

/// A contact point may be said without its port.
pub(super) fn with_port(point: &str) -> String {
    if let Ok(address) = point.parse::<IpAddr>() {
        return SocketAddr::new(address, PORT).to_string();
    }
    let port = point.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
    if matches!(port, Some(Ok(_))) { point.to_owned() } else { format!("{point}:{PORT}") }
}

/// All nodes that a session knows.
pub(super) fn known(session: &Session) -> HashSet<SocketAddr> {
    nodes_that(session, |_| true)
}

pub(super) fn connected(session: &Session) -> HashSet<SocketAddr> {
    nodes_that(session, Node::is_connected)
}

fn nodes_that(session: &Session, are: impl Fn(&Node) -> bool) -> HashSet<SocketAddr> {
    let state = session.get_cluster_state();
    let nodes = state.get_nodes_info().iter().filter(|node| are(node));
    nodes.map(|node| SocketAddr::new(node.address.ip(), node.address.port())).collect()
}

async fn answers(node: SocketAddr) -> io::Result<()> {
    let mut stream = TcpStream::connect(node).await?;
    stream.write_all(&OPTIONS).await?;
    let mut head = [0; HEAD_BYTES];
    stream.read_exact(&mut head).await?;
    let [.., a, b, c, d] = head;
    let rest = u64::from(u32::from_be_bytes([a, b, c, d]));
    tokio::io::copy(&mut stream.take(rest), &mut tokio::io::sink()).await?;
    Ok(())
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
    async fn database_node_that_accepts_but_says_nothing_is_silent() {
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
        // What a name stands for is told meanwhile.
        let (mut names, point) = (Names::new(), format!("localhost:{}", answers.port()));
        let asked = Standing::ask([stands_still, is_gone].into(), [point].into(), &mut names);
        let (mut standing, ()) = tokio::join!(asked, answering);
        standing.silent.retain(SocketAddr::is_ipv4);
        let expected = Standing { answer: [answers].into(), silent: [stands_still, is_gone].into() };
        assert_eq!(standing, expected);
    }

    #[test]
    fn a_contact_point_may_be_said_without_its_port() {
        let told = ["127.0.0.1:7", "127.0.0.1", "[::1]:7", "::1", "db", "db:7"].map(with_port);
        assert_eq!(told, ["127.0.0.1:7", "127.0.0.1:9042", "[::1]:7", "[::1]:9042", "db:9042", "db:7"]);
    }

    #[test]
    fn answering_address_is_not_skipped_for_silent_other_port() {
        let node = |last, port| SocketAddr::from(([127, 0, 0, last], port));
        let standing = Standing {
            answer: [node(1, PORT)].into(),
            silent: [node(1, 7), node(2, PORT), node(2, 7)].into(),
        };
        let passed = Passed::by(&standing);
        assert_eq!(*passed.0.lock(), [node(2, PORT).ip()].into());
        assert!(passed.none_any_more() && !passed.none_any_more());
    }
}
