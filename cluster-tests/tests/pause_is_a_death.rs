//! A node stands still for longer than two seconds: for the others it is dead, and when it runs on nobody has missed anything
//! without being told, on either side.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, told};
use fanfare_cluster_tests::traffic::{Publishers, Subscriber, end_well};
use fanfare_cluster_tests::{Node, SOON, wait_until};
use tokio::time::sleep;

/// Two seconds without a pulse are what it takes to notice it oneself.
const PAUSE: Duration = Duration::from_millis(2_500);

async fn until_said(node: &Node, of: &str, message: &str) {
    let is_said = || told(node).iter().any(|(other, said)| other == of && said == message);
    wait_until(SOON, message, async || is_said()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_missed_silently_and_nothing_comes_twice() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
    let moving = Subscriber::on_each(nodes, "moves").await;
    let mut publishers = Publishers::none().patient();
    for node in &*nodes {
        publishers.add(node).await;
    }
    sleep(Duration::from_secs(1)).await;
    nodes[2].pause();
    let paused = Instant::now();
    // Clients of the others, and those that give up on it.
    for (at, subscriber) in moving.into_iter().enumerate() {
        let heard = subscriber.leave().await;
        subscribers.push(Subscriber::after(&nodes[at % 2], "moved meanwhile", heard).await);
    }
    for node in &nodes[..2] {
        until_said(node, "n2", "a node is dead").await;
    }
    wait_until(SOON, "the pause to be long", async || paused.elapsed() > PAUSE).await;
    nodes[2].resume();
    until_said(&nodes[2], "", "this node stood still, and others may have held it for dead").await;
    cluster.until_linked().await;
    let nodes = cluster.nodes();
    let back = Subscriber::on(&nodes[2], "came when it was over").await;
    sleep(Duration::from_secs(1)).await;
    subscribers.push(Subscriber::after(&nodes[0], "moved when it was over", back.leave().await).await);
    sleep(Duration::from_secs(1)).await;
    end_well(&mut cluster, publishers, subscribers).await;
}
