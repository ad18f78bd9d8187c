//! Whoever has not the cluster's key is no peer: it gets nothing, changes nothing, and is counted.

use std::net::SocketAddr;
use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::{Node, SOON, Socket, wait_until};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};
use tokio::time::timeout;

/// So long nothing comes, where nothing should.
const QUIET: Duration = Duration::from_millis(300);
const REFUSED: &str = "fanfare_peer_handshakes_refused_total";

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
        // A reset is an end as well.
        timeout(SOON, stranger.read_to_end(&mut answer)).await.expect("the node ends it").ok();
        assert!(answer.len() < 10, "at most an alert of TLS: {answer:?}");
        at_least(n0, REFUSED, before + 1.0).await;
    }
    let mut subscriber = Socket::open(n1, "").await;
    subscriber.attach("room").await;
    Socket::open(n0, "").await.publish("room", json!({"data": 1})).await;
    assert_eq!(subscriber.message("room").await["messages"][0]["data"], 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forged_datagram_is_dropped_and_gets_no_reply() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, _] = cluster.nodes() else { panic!("two nodes were started") };
    let gossip = n0.gossip().expect("a node of a cluster");
    let socket = UdpSocket::bind("127.0.0.1:0").await.expect("a port");
    let dropped = async || {
        let reasons = ["forged", "malformed", "version", "oversize", "misaddressed"];
        let mut count = 0.0;
        for reason in reasons {
            count += n0.metric(&format!("fanfare_gossip_dropped_total{{reason=\"{reason}\"}}")).await;
        }
        count
    };
    let before = dropped().await;
    for datagram in [vec![0; 200], vec![255; 1200], b"hello".to_vec(), vec![1; 64]] {
        socket.send_to(&datagram, gossip).await.expect("it is sent");
    }
    wait_until(SOON, "the datagrams to be dropped", async || dropped().await >= before + 4.0).await;
    let mut reply = [0; 2048];
    assert!(timeout(QUIET, socket.recv_from(&mut reply)).await.is_err(), "nobody answers");
    assert_eq!(n0.metric("fanfare_peers_known").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_with_another_key_is_told_of_once() {
    let mut cluster = Cluster::linked(1).await;
    let key = tempfile::NamedTempFile::new().expect("a temporary file");
    std::fs::write(key.path(), "A".repeat(43) + "=").expect("it is writable");
    let key = key.path().display().to_string();
    cluster.add(|options| options.environment("FANFARE_CLUSTER_KEY_FILE", &key)).await;
    let [n0, _] = cluster.nodes() else { panic!("two nodes were started") };
    let forged = "fanfare_gossip_dropped_total{reason=\"forged\"}";
    at_least(n0, forged, 3.0).await;
    let log = n0.log();
    let told = log.lines().filter(|line| line.contains("another key (--cluster-key-file)")).count();
    assert_eq!(told, 1, "{log}");
}
