//! One node is cut off from two others: both sides go on serving, and when the cut is healed nobody has missed anything without
//! being told.

use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, told};
use fanfare_cluster_tests::network::{Cut, Network, isolated};
use fanfare_cluster_tests::traffic::{Publishers, Subscriber, end_well};
use fanfare_cluster_tests::{Node, SOON, wait_until};
use tokio::time::sleep;

const A_WHILE: Duration = Duration::from_secs(2);

fn cut_off(network: &Network, nodes: &[Node]) -> Vec<Cut> {
    let others: Vec<_> = nodes[1..].iter().map(Node::host).collect();
    network.split(&[nodes[0].host()], &others)
}

/// Until each side holds the other for dead.
async fn until_dead(nodes: &[Node]) {
    let deaths = |node: &Node| told(node).iter().filter(|(_, said)| said == "a node is dead").count();
    let is_dead = async || deaths(&nodes[0]) >= 2 && nodes[1..].iter().all(|node| deaths(node) >= 1);
    wait_until(SOON, "the other side to be dead", is_dead).await;
}

#[test]
fn both_sides_serve_and_nothing_is_missed_silently() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let moving = Subscriber::on_each(nodes, "moves").await;
        let publishers = Publishers::on(nodes).await;
        sleep(A_WHILE / 2).await;
        let cuts = cut_off(&network, nodes);
        until_dead(nodes).await;
        // To the other side, to their own, and back when it is over.
        for (at, subscriber) in moving.into_iter().enumerate() {
            let heard = subscriber.leave().await;
            subscribers.push(Subscriber::after(&nodes[(at + 1) % 3], "moved", heard).await);
        }
        let away = Subscriber::on(&nodes[0], "away while it is healed").await;
        let stays = Subscriber::on(&nodes[1], "the same, on the other side").await;
        sleep(A_WHILE).await;
        let (away, stays) = (away.leave().await, stays.leave().await);
        drop(cuts);
        cluster.until_linked().await;
        let nodes = cluster.nodes();
        subscribers.push(Subscriber::after(&nodes[2], "away while it was healed", away).await);
        subscribers.push(Subscriber::after(&nodes[0], "the same, on the other side", stays).await);
        subscribers.push(Subscriber::on(&nodes[0], "came when it was over").await);
        sleep(A_WHILE).await;
        end_well(&mut cluster, publishers, subscribers).await;
    });
}

#[test]
fn again_and_again() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let publishers = Publishers::on(nodes).await;
        for seconds in [1, 2, 0, 3] {
            let cuts = cut_off(&network, cluster.nodes());
            sleep(Duration::from_millis(1_000 * seconds + 200)).await;
            drop(cuts);
            // What comes in the midst of the healing, too.
            sleep(Duration::from_millis(300 * seconds)).await;
            let fresh = Subscriber::on(&cluster.nodes()[seconds as usize % 3], "came as it was healed").await;
            subscribers.push(fresh);
        }
        cluster.until_linked().await;
        sleep(A_WHILE / 2).await;
        end_well(&mut cluster, publishers, subscribers).await;
    });
}
