//! A sender without the cluster key is no peer: it gets nothing, changes nothing, and is counted.

use std::net::SocketAddr;
use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::waits::throughout;
use fanfare_cluster_tests::{Node, SOON, Socket, wait_until};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

/// Time in which no datagram must come.
const QUIET: Duration = Duration::from_millis(300);
const REFUSED: &str = "fanfare_peer_handshakes_refused_total";
/// First bytes of gossip, in version 1.
const GOSSIP: [u8; 2] = [1, 3];

async fn at_least(node: &Node, metric: &str, count: f64) {
    wait_until(SOON, metric, async || node.metric(metric).await >= count).await;
}

fn peer(node: &Node) -> SocketAddr {
    node.peer().expect("a node of a cluster")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stranger_at_the_peer_port_gets_nothing() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    for hello in [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], b"GET / HTTP/1.1\r\n\r\n", &[0; 600]] {
        let before = n0.metric(REFUSED).await;
        let mut stranger = TcpStream::connect(peer(n0)).await.expect("the port is open");
        stranger.write_all(hello).await.expect("the node reads");
        let mut answer = Vec::new();
        // A reset ends the connection, too.
        timeout(SOON, stranger.read_to_end(&mut answer)).await.expect("the node ends it").ok();
        assert!(answer.len() < 10, "at most an alert of TLS: {answer:?}");
        at_least(n0, REFUSED, before + 1.0).await;
    }
    let mut subscriber = Socket::open(n1, "").await;
    subscriber.attach("room").await;
    Socket::open(n0, "").await.publish("room", json!({"data": 1})).await;
    assert_eq!(subscriber.message("room").await["messages"][0]["data"], 1);
}

/// Gives the number of dropped gossip datagrams, by reason.
async fn dropped(node: &Node) -> Vec<(&'static str, f64)> {
    let mut dropped = Vec::new();
    for reason in ["oversize", "malformed", "version", "misaddressed", "forged", "stale", "unproven"] {
        let metric = format!("fanfare_gossip_dropped_total{{reason=\"{reason}\"}}");
        dropped.push((reason, node.metric(&metric).await));
    }
    dropped
}

/// Waits until exactly these further datagrams are dropped, by reason.
async fn until_dropped(node: &Node, before: &[(&'static str, f64)], more: &[(&str, f64)]) {
    let mut expected = before.to_vec();
    for (reason, count) in &mut expected {
        *count += more.iter().filter(|(of, _)| of == reason).map(|(_, more)| more).sum::<f64>();
    }
    let what = format!("{expected:?} to be dropped");
    wait_until(SOON, &what, async || dropped(node).await == expected).await;
}

async fn assert_no_reply(socket: &UdpSocket) {
    let mut reply = [0; 2048];
    assert!(timeout(QUIET, socket.recv_from(&mut reply)).await.is_err(), "nobody answers");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_datagram_is_dropped_and_gets_no_reply() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, _] = cluster.nodes() else { panic!("two nodes were started") };
    let gossip = n0.gossip().expect("a node of a cluster");
    let socket = bind().await;
    let before = dropped(n0).await;
    // A challenge that is valid except for its seal.
    let mut challenge = vec![0; 50];
    (challenge[0], challenge[1], challenge[2]) = (1, 1, 9);
    for datagram in [vec![0; 200], vec![255; 1200], b"hello".to_vec(), vec![1; 64], challenge] {
        socket.send_to(&datagram, gossip).await.expect("it is sent");
    }
    until_dropped(n0, &before, &[("version", 2.0), ("malformed", 2.0), ("forged", 1.0)]).await;
    assert_no_reply(&socket).await;
    assert_eq!(n0.metric("fanfare_peers_known").await, 1.0);
}

/// Relays gossip between `node` and the node that sends to the first socket. Ends with the first gossip to `node` after
/// gossip in the other direction, by which `node` trusts the sender, and gives that datagram.
async fn record(sockets: [&UdpSocket; 2], node: SocketAddr) -> Vec<u8> {
    let (mut to_node, mut back) = ([0; 65_536], [0; 65_536]);
    let (mut other, mut is_believed) = (None, false);
    loop {
        tokio::select! {
            came = sockets[0].recv_from(&mut to_node) => {
                let (length, from) = came.expect("a datagram");
                other = Some(from);
                sockets[1].send_to(&to_node[..length], node).await.expect("it is sent");
                if is_believed && to_node[..2] == GOSSIP {
                    return to_node[..length].to_vec();
                }
            }
            came = sockets[1].recv_from(&mut back) => {
                let (length, _) = came.expect("a datagram");
                is_believed |= back[..2] == GOSSIP;
                let other = other.expect("it is answered");
                sockets[0].send_to(&back[..length], other).await.expect("it is sent");
            }
        }
    }
}

async fn bind() -> UdpSocket {
    UdpSocket::bind("127.0.0.1:0").await.expect("a port")
}

/// Starts a node that joins through the relay; gives it with a datagram that the cluster's node has accepted.
async fn recorded(cluster: &mut Cluster, [seed, way]: [&UdpSocket; 2]) -> (Node, Vec<u8>) {
    let gossip = cluster.nodes()[0].gossip().expect("a node of a cluster");
    let address = seed.local_addr().expect("it is bound").to_string();
    let options = cluster.one_more("n1").environment("FANFARE_SEED", &address);
    tokio::join!(Node::start(options), record([seed, way], gossip))
}

#[tokio::test(flavor = "multi_thread")]
async fn gossip_that_was_recorded_is_taken_once() {
    let mut cluster = Cluster::linked(1).await;
    let (seed, way, stranger) = (bind().await, bind().await, bind().await);
    let (n1, recorded) = recorded(&mut cluster, [&seed, &way]).await;
    let n0 = &cluster.nodes()[0];
    let gossip = n0.gossip().expect("a node of a cluster");
    let view = async || n0.operate("GET", "/debug/members").await.json();
    wait_until(SOON, "the other one to be ready", async || {
        let of = &view().await["members"][0];
        of["ready"] == true && of["linkUp"] == true && of["interestKnown"] == true
    })
    .await;
    let (before, seen) = (dropped(n0).await, view().await);
    for socket in [&way, &stranger, &way, &stranger] {
        socket.send_to(&recorded, gossip).await.expect("it is sent");
    }
    until_dropped(n0, &before, &[("stale", 4.0)]).await;
    assert_no_reply(&stranger).await;
    assert_eq!(view().await, seen);
    let mut subscriber = Socket::open(&n1, "").await;
    subscriber.attach("room").await;
    Socket::open(n0, "").await.publish("room", json!({"data": 1})).await;
    assert_eq!(subscriber.message("room").await["messages"][0]["data"], 1);
}

/// The recorded datagram was sealed for an incarnation that has ended.
#[tokio::test(flavor = "multi_thread")]
async fn recorded_gossip_is_dropped_by_the_next_incarnation() {
    let mut cluster = Cluster::linked(1).await;
    let (stranger, seed, way) = (bind().await, bind().await, bind().await);
    let (n1, recorded) = recorded(&mut cluster, [&seed, &way]).await;
    drop(n1);
    let n0 = &mut cluster.nodes()[0];
    n0.kill();
    n0.restart().await;
    let before = dropped(n0).await;
    stranger.send_to(&recorded, n0.gossip().expect("a node of a cluster")).await.expect("it is sent");
    until_dropped(n0, &before, &[("misaddressed", 1.0)]).await;
    assert_no_reply(&stranger).await;
}

/// A restarted node learns of its former incarnation from the others.
#[test]
fn restarted_node_sends_no_gossip_to_itself() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 2).await;
        let n1 = &mut cluster.nodes()[1];
        n1.kill();
        n1.restart().await;
        cluster.until_linked().await;
        let n1 = &cluster.nodes()[1];
        let before = dropped(n1).await;
        throughout(Duration::from_secs(3), async || assert_eq!(dropped(n1).await, before)).await;
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_another_cluster_key_is_logged_once() {
    let mut cluster = Cluster::linked(1).await;
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(key.path(), "A".repeat(43) + "=").expect("it is writable");
    let key = key.path().display().to_string();
    cluster.add(|options| options.environment("FANFARE_CLUSTER_KEY_FILE", &key)).await;
    let [n0, _] = cluster.nodes() else { panic!("two nodes were started") };
    let forged = "fanfare_gossip_dropped_total{reason=\"forged\"}";
    at_least(n0, forged, 3.0).await;
    let log = n0.log();
    let logged = log.lines().filter(|line| line.contains("another key (--cluster-key-file)")).count();
    assert_eq!(logged, 1, "{log}");
}
