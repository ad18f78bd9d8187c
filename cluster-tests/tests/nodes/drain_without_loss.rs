//! A node that drains sends its clients to other nodes, and none of them misses a message or gets one twice.

use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, cut_peer_streams};
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::roaming::{Load, NodeSelector, Publisher, Subscriber};
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket};
use serde_json::json;
use tokio::time::Instant;

/// Greatest time of a stop, far above that on a busy machine, and below the time for a drain.
const STOP_MAX: Duration = Duration::from_secs(20);
/// Time that a busy machine adds to a stop.
const A_WHILE: Duration = Duration::from_secs(2);
/// Acks of each publisher before a node is told to stop.
const FURTHER: u64 = 100;

fn door(nodes: &[Node]) -> NodeSelector {
    NodeSelector::to(&nodes.iter().map(Node::addr).collect::<Vec<_>>(), &nodes[0].key())
}

async fn publish(publishers: &mut [Publisher], count: u64) -> Vec<(u64, u64)> {
    for _ in 0..count {
        for publisher in &mut *publishers {
            publisher.publish(1).await;
        }
    }
    publishers.iter().map(Publisher::published).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn drained_node_with_last_subscribers_hands_off_missed_messages() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let (first, others) = (door(&nodes[..1]), door(&nodes[1..]));
    let mut publishers = [Publisher::new(&first, 0).await, Publisher::new(&others, 1).await];
    let mut subscribers = Vec::new();
    for _ in 0..3 {
        subscribers.push(Subscriber::new(&first).await);
    }
    let published = publish(&mut publishers, 5).await;
    for subscriber in &mut subscribers {
        subscriber.read_to(&published).await;
    }
    // One subscriber is away before the stop, one reconnects during it, and one has received everything.
    subscribers[0].leave();
    let published = publish(&mut publishers, 50).await;
    subscribers[2].read_to(&published).await;
    let begun = Instant::now();
    nodes[0].terminate();
    first.turn_to(&[nodes[1].addr(), nodes[2].addr()]);
    publish(&mut publishers[1..], 20).await;
    while subscribers[1].read(Duration::from_millis(100)).await && subscribers[1].moves == 0 {}
    assert_eq!(nodes[0].ended().await.code(), Some(0));
    assert!(begun.elapsed() < STOP_MAX, "{:?}", begun.elapsed());
    let published = publish(&mut publishers, 20).await;
    for subscriber in &mut subscribers {
        subscriber.read_to(&published).await;
        assert_ne!(subscriber.node(), "n0");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_miss_nothing_while_two_of_three_nodes_drain() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let door = door(nodes);
    let load = Load::begin(&door, 3, 6, Duration::ZERO).await;
    load.until_acked(FURTHER).await;
    let addresses: Vec<_> = nodes.iter().map(Node::addr).collect();
    door.turn_to(&addresses[1..]);
    nodes[0].terminate();
    assert_eq!(nodes[0].ended().await.code(), Some(0));
    load.until_acked(FURTHER).await;
    door.turn_to(&addresses[2..]);
    assert_eq!(nodes[1].operate("POST", "/drain").await.status, 202);
    assert_eq!(nodes[1].ended().await.code(), Some(0));
    for subscriber in load.end().await {
        assert_eq!(*subscriber.node(), "n2");
    }
}

/// The node spreads the delays of its clients, so that they do not reconnect all at once.
#[tokio::test(flavor = "multi_thread")]
async fn draining_node_closes_each_client_a_second_after_its_delay() {
    let mut cluster = Cluster::linked(2).await;
    let nodes = cluster.nodes();
    let mut clients = Vec::new();
    for _ in 0..40 {
        clients.push(Socket::open(&nodes[0], "").await);
    }
    let begun = Instant::now();
    nodes[0].terminate();
    let staying = clients.into_iter().map(async |mut client| {
        let asked = client.find("to be asked to go", |frame| frame["op"] == 4).await;
        let after_ms = asked["reconnectAfterMs"].as_u64().expect("a time");
        assert_eq!(client.next_within(SOON).await, Err(SocketEnd::Closed(1012)), "{asked}");
        assert!(begun.elapsed() >= Duration::from_millis(after_ms + 1_000), "{asked}");
        after_ms
    });
    let delays_ms = futures_util::future::join_all(staying).await;
    assert!(delays_ms.iter().all(|delay_ms| *delay_ms <= 5_000), "{delays_ms:?}");
    // The 40 delays are random within 500 ms, so it is practically impossible that all of them lie within a tenth of
    // that.
    let (first, last) = (delays_ms.iter().min(), delays_ms.iter().max());
    assert!(last >= first.map(|first_ms| first_ms + 50).as_ref(), "{delays_ms:?}");
    assert_eq!(nodes[0].ended().await.code(), Some(0));
}

/// The stalled peer is alive, so without a limit the node would wait for it for ever.
#[test]
fn a_peer_that_takes_nothing_keeps_no_node_from_leaving_in_time() {
    const DRAIN: Duration = Duration::from_secs(6);
    isolated(async |network| {
        let timeout = format!("{}s", DRAIN.as_secs());
        let with_drain = |options: NodeOptions| options.environment("FANFARE_DRAIN_TIMEOUT", &timeout);
        let mut cluster = Cluster::apart_with(&network, 3, with_drain).await;
        let nodes = cluster.nodes();
        let leaving = door(&nodes[..1]);
        let mut publishers = [Publisher::new(&leaving, 0).await];
        let mut subscribers = [Subscriber::new(&leaving).await, Subscriber::new(&door(&nodes[1..2])).await];
        let mut stays = Socket::open(&nodes[0], "").await;
        let _cuts = [
            cut_peer_streams(&network, &nodes[0], &nodes[2]),
            cut_peer_streams(&network, &nodes[2], &nodes[0]),
        ];
        publish(&mut publishers, 20).await;
        leaving.turn_to(&[nodes[1].addr()]);
        let begun = Instant::now();
        nodes[0].terminate();
        let (frames, ended) = stays.to_end(SOON).await;
        assert_eq!((&frames[0]["op"], ended), (&json!(4), SocketEnd::Closed(1012)), "{frames:?}");
        assert_eq!(nodes[0].ended().await.code(), Some(0));
        assert!(begun.elapsed() < DRAIN + A_WHILE, "{:?}", begun.elapsed());
        let published = publish(&mut publishers, 20).await;
        for subscriber in &mut subscribers {
            subscriber.read_to(&published).await;
            assert_eq!(*subscriber.node(), "n1");
        }
    });
}
