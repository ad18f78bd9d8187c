//! Partitioned nodes over a database that all of them reach: both sides acknowledge, and history has each message once.
//! After the partition no client has missed a message without a reported loss.

use std::collections::HashSet;
use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, cut_off, until_peers_down};
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::traffic::{LOAD, Publishers, Subscriber, assert_converged, channels};
use fanfare_cluster_tests::waits::fault_lasts;
use fanfare_cluster_tests::{Cassandra, Node, Socket, history};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const A_WHILE: Duration = Duration::from_secs(1);

async fn publish_with_id(node: &Node) -> Value {
    let mut socket = Socket::open(node, "").await;
    let ack = socket.ask(json!({"op": 13, "channel": "ids", "messages": [{"id": "own", "data": 1}]})).await;
    assert_eq!(ack["op"], 1, "{ack}");
    ack["serials"].clone()
}

#[test]
fn history_has_once_what_either_side_acknowledged() {
    Cassandra::fetch();
    isolated(async |network| {
        let Some(cassandra) = Cassandra::start_on(&network.host()) else { return };
        let keyspace = cassandra.keyspace();
        let mut cluster =
            Cluster::apart_with(&network, 3, |options| cassandra.store(options, &keyspace)).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let moving = Subscriber::on_each(nodes, "moves").await;
        let publishers = Publishers::on(nodes).await;
        publishers.until_acked(LOAD).await;
        let cuts = cut_off(&network, nodes);
        until_peers_down(nodes).await;
        for (at, subscriber) in moving.into_iter().enumerate() {
            let received = subscriber.leave().await;
            subscribers.push(Subscriber::after(&nodes[(at + 1) % 3], "moved", received).await);
        }
        let first = publish_with_id(&nodes[0]).await;
        assert_eq!(publish_with_id(&nodes[1]).await, first, "the database knows that it was published");
        let away = Subscriber::on_each(nodes, "away while it is healed").await;
        fault_lasts(A_WHILE).await;
        let mut received = Vec::new();
        for subscriber in away {
            received.push(subscriber.leave().await);
        }
        drop(cuts);
        // At once, while the peer streams come back, and afterwards.
        let back = Subscriber::after(&nodes[1], "back at once", received[0].clone()).await;
        subscribers.push(back);
        cluster.until_linked().await;
        let nodes = cluster.nodes();
        for (at, received) in received.into_iter().enumerate() {
            subscribers
                .push(Subscriber::after(&nodes[(at + 1) % 3], "back when it is healed", received).await);
        }
        publishers.until_acked(LOAD).await;
        let acknowledged = publishers.end().await;
        assert_converged(&mut cluster, &acknowledged, subscribers).await;
        for node in &*cluster.nodes() {
            for channel in channels() {
                let records = history::read_all(node.addr(), KEY, &channel, "limit=1000").await;
                let part = |record: &Value, at: usize| record["data"][at].as_u64().expect("a number");
                let of = |record: &Value| (part(record, 0), part(record, 1));
                let stored: HashSet<(u64, u64)> = records.iter().map(of).collect();
                assert_eq!(stored.len(), records.len(), "nothing is there twice in {channel}");
                for ((from, _), count) in acknowledged.iter().filter(|((_, of), _)| *of == channel) {
                    let missing = (0..*count).find(|number| !stored.contains(&(*from, *number)));
                    assert_eq!(missing, None, "of {from} in {channel}, of {count}");
                }
            }
            assert_eq!(history::read_all(node.addr(), KEY, "ids", "limit=10").await.len(), 1);
        }
    });
}
