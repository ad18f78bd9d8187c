//! Reachability of the database's nodes, so that a new session does not wait for stalled ones.

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

use crate::dns_cache::DnsCache;

/// Default port of the driver, for contact points without one.
const PORT: u16 = 9042;
/// A request for the options of a server, by the native protocol: version 4, no flags, stream 0, `OPTIONS`, no body. Servers answer it
/// without a login.
const OPTIONS: [u8; 9] = [4, 0, 0, 0, 5, 0, 0, 0, 0];
/// Length of the answer's header, which ends with the length of the rest.
const HEAD_BYTES: usize = 9;
const ANSWER_WAIT: Duration = Duration::from_secs(1);
/// Time limit for the other nodes once one has answered.
const OTHERS_WAIT: Duration = Duration::from_millis(250);

/// Nodes of the database, divided by whether they answer.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct NodeReachability {
    pub(super) answer: HashSet<SocketAddr>,
    pub(super) silent: HashSet<SocketAddr>,
}

impl NodeReachability {
    /// Checks these nodes and those behind the contact points, including names that are resolved meanwhile.
    pub(super) async fn ask(
        mut nodes: HashSet<SocketAddr>,
        mut points: HashSet<String>,
        names: &mut DnsCache,
    ) -> Self {
        let mut reachability = Self::default();
        let mut requests = FuturesUnordered::new();
        let mut end = Instant::now() + ANSWER_WAIT;
        points.iter().for_each(|point| names.look_up(point));
        nodes.extend(points.iter().flat_map(|point| names.addresses(point)));
        points.retain(|point| point.parse::<SocketAddr>().is_err());
        loop {
            for node in nodes.drain().filter(|node| !reachability.answer.contains(node)) {
                if reachability.silent.insert(node) {
                    requests.push(async move { answers(node).await.is_ok().then_some(node) });
                }
            }
            if points.is_empty() && requests.is_empty() {
                return reachability;
            }
            tokio::select! {
                Some(answered) = requests.next() => if let Some(node) = answered {
                    reachability.silent.remove(&node);
                    reachability.answer.insert(node);
                    end = end.min(Instant::now() + OTHERS_WAIT);
                },
                (name, _) = names.next_answer() => {
                    points.remove(&name);
                    nodes.extend(names.addresses(&name));
                }
                () = sleep_until(end) => return reachability,
            }
        }
    }
}

/// Adds the default port to a contact point without one.
pub(super) fn with_port(point: &str) -> String {
    if let Ok(address) = point.parse::<IpAddr>() {
        return SocketAddr::new(address, PORT).to_string();
    }
    let port = point.rsplit_once(':').map(|(_, port)| port.parse::<u16>());
    if matches!(port, Some(Ok(_))) { point.to_owned() } else { format!("{point}:{PORT}") }
}

/// Returns all nodes that a session knows.
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

/// Host filter that keeps a session from silent nodes until it is cleared. The session notices when it next reads the list of nodes.
#[derive(Clone)]
pub(super) struct SilentNodeFilter(Arc<Mutex<HashSet<IpAddr>>>);

impl SilentNodeFilter {
    /// Filters the addresses of silent nodes, except those at which a node answers on another port.
    pub(super) fn of_silent(reachability: &NodeReachability) -> Self {
        let [answer, mut silent] = [&reachability.answer, &reachability.silent]
            .map(|nodes| nodes.iter().map(SocketAddr::ip).collect::<HashSet<_>>());
        silent.retain(|node| !answer.contains(node));
        Self(Arc::new(Mutex::new(silent)))
    }

    /// Clears the filter; returns whether it held any node.
    pub(super) fn clear(&self) -> bool {
        !std::mem::take(&mut *self.0.lock()).is_empty()
    }
}

impl HostFilter for SilentNodeFilter {
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
        let (one, silent, closed) = (listen().await, listen().await, listen().await);
        let [answers, silent_node, closed_node] =
            [&one, &silent, &closed].map(|listener| listener.local_addr().expect("it listens"));
        drop(closed);
        let answering = async {
            let (mut stream, _) = one.accept().await.expect("it is asked");
            let mut request = [0; OPTIONS.len()];
            stream.read_exact(&mut request).await.expect("it is asked");
            assert_eq!(request, OPTIONS);
            stream.write_all(&[0x84, 0, 0, 0, 6, 0, 0, 0, 2, 0, 0]).await.expect("it answers");
        };
        // The name is resolved while the check runs.
        let (mut names, point) = (DnsCache::new(), format!("localhost:{}", answers.port()));
        let probing = NodeReachability::ask([silent_node, closed_node].into(), [point].into(), &mut names);
        let (mut reachability, ()) = tokio::join!(probing, answering);
        reachability.silent.retain(SocketAddr::is_ipv4);
        let expected =
            NodeReachability { answer: [answers].into(), silent: [silent_node, closed_node].into() };
        assert_eq!(reachability, expected);
    }

    #[test]
    fn a_contact_point_may_be_said_without_its_port() {
        let addresses = ["127.0.0.1:7", "127.0.0.1", "[::1]:7", "::1", "db", "db:7"].map(with_port);
        assert_eq!(addresses, ["127.0.0.1:7", "127.0.0.1:9042", "[::1]:7", "[::1]:9042", "db:9042", "db:7"]);
    }

    #[test]
    fn answering_address_is_not_skipped_for_silent_other_port() {
        let node = |last, port| SocketAddr::from(([127, 0, 0, last], port));
        let reachability = NodeReachability {
            answer: [node(1, PORT)].into(),
            silent: [node(1, 7), node(2, PORT), node(2, 7)].into(),
        };
        let passed = SilentNodeFilter::of_silent(&reachability);
        assert_eq!(*passed.0.lock(), [node(2, PORT).ip()].into());
        assert!(passed.clear() && !passed.clear());
    }
}
