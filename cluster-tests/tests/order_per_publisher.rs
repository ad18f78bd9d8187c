//! What one publisher says comes in its order on every node, also when it goes on at another node.

use fanfare_cluster_tests::Socket;
use fanfare_cluster_tests::cluster::Cluster;
use serde_json::json;

async fn heard(socket: &mut Socket) -> u64 {
    let frame = socket.message("room").await;
    frame["messages"][0]["data"].as_u64().expect("a number")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_was_acknowledged_comes_before_what_is_published_elsewhere() {
    let mut cluster = Cluster::linked(3).await;
    let (mut publishers, mut subscribers) = (Vec::new(), Vec::new());
    for node in &*cluster.nodes() {
        publishers.push(Socket::open(node, "").await);
        let mut subscriber = Socket::open(node, "").await;
        subscriber.attach("room").await;
        subscribers.push(subscriber);
    }
    const MESSAGES: u64 = 300;
    for number in 0..MESSAGES {
        publishers[number as usize % 3].publish("room", json!({"data": number})).await;
    }
    for subscriber in &mut subscribers {
        for number in 0..MESSAGES {
            assert_eq!(heard(subscriber).await, number);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_acknowledged_yet_stays_in_order_too() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let mut subscriber = Socket::open(n1, "").await;
    subscriber.attach("room").await;
    let mut publisher = Socket::open(n0, "").await;
    const MESSAGES: u64 = 380;
    for number in 0..MESSAGES {
        publisher.start(json!({"op": 13, "channel": "room", "data": number})).await;
    }
    for number in 0..MESSAGES {
        assert_eq!(heard(&mut subscriber).await, number);
    }
}
