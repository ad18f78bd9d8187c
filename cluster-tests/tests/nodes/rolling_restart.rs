//! Nodes of a cluster of three are restarted one by one, and clients under load miss nothing.

use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::roaming::{Load, NodeSelector};
use fanfare_cluster_tests::{Balancer, Node, SOON, wait_until};

#[tokio::test(flavor = "multi_thread")]
async fn rolling_restart_of_every_node_loses_no_message() {
    let mut cluster = Cluster::linked(3).await;
    let Some(balancer) = Balancer::start(cluster.nodes()).await else { return };
    let door = NodeSelector::to(&[balancer.addr()], &cluster.nodes()[0].key());
    let load = Load::begin(&door, 3, 6, Duration::from_millis(2)).await;
    for index in 0..3 {
        assert_eq!(cluster.nodes()[index].stop().await.code(), Some(0));
        cluster.restart(index).await;
        cluster.until_linked().await;
        balancer.follow(index, &cluster.nodes()[index]).await;
    }
    for subscriber in load.end().await {
        assert!(subscriber.moves > 0, "every node was restarted");
    }
}

#[test]
fn subscriber_resuming_at_a_node_not_ready_misses_nothing() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let key = cluster.nodes()[0].key();
        let at = |nodes: &[Node]| NodeSelector::to(&nodes.iter().map(Node::addr).collect::<Vec<_>>(), &key);
        let (first, others) = (at(&cluster.nodes()[..1]), at(&cluster.nodes()[1..]));
        let mut load = Load::begin(&first, 1, 6, Duration::from_millis(2)).await;
        load.publish_at(&others, 1, Duration::from_millis(2)).await;
        for _ in 0..5 {
            let before = load.answers();
            assert_eq!(cluster.nodes()[0].stop().await.code(), Some(0));
            cluster.restart(0).await;
            cluster.until_linked().await;
            // A client whose attach is never answered would in the end lack more messages than nodes keep.
            let are_back = async || load.answers().iter().zip(&before).all(|(after, before)| after > before);
            wait_until(SOON, "all subscribers to be back", are_back).await;
        }
        for subscriber in load.end().await {
            assert!(subscriber.moves >= 5, "the node was restarted five times");
        }
    });
}
