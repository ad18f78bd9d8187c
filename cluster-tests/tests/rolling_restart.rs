//! Three nodes behind a balancer are restarted one after the other, and clients under load miss nothing.

use std::time::Duration;

use fanfare_cluster_tests::Balancer;
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::roaming::{Door, Load};

#[tokio::test(flavor = "multi_thread")]
async fn nobody_misses_anything_while_every_node_is_restarted() {
    let mut cluster = Cluster::linked(3).await;
    let Some(balancer) = Balancer::start(cluster.nodes()).await else { return };
    let door = Door::to(&[balancer.addr()], &cluster.nodes()[0].key());
    let load = Load::begin(&door, 3, 6, Duration::from_millis(2)).await;
    for index in 0..3 {
        assert_eq!(cluster.nodes()[index].stop().await.code(), Some(0));
        cluster.restart(index).await;
        cluster.until_linked().await;
        balancer.follow(index, &cluster.nodes()[index]).await;
    }
    for subscriber in load.end().await {
        assert!(subscriber.moves > 0, "every node was restarted");
        assert_eq!(subscriber.losses, 0);
    }
}
