//! Three nodes behind a balancer are restarted one after the other, and clients under load miss nothing.

use std::time::Duration;

use fanfare_cluster_tests::Balancer;
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::roaming::{Door, Publisher, Subscriber};
use tokio::sync::watch;
use tokio::task::JoinSet;

#[tokio::test(flavor = "multi_thread")]
async fn nobody_misses_anything_while_every_node_is_restarted() {
    let mut cluster = Cluster::linked(3).await;
    let Some(balancer) = Balancer::start(cluster.nodes()).await else { return };
    let door = Door::to(&[balancer.addr()], &cluster.nodes()[0].key());
    let (stop, stopped) = watch::channel(false);
    let (said, all) = watch::channel(None::<Vec<(u64, u64)>>);
    let (mut publishers, mut subscribers) = (JoinSet::new(), JoinSet::new());
    for _ in 0..6 {
        let (mut subscriber, mut all) = (Subscriber::new(&door).await, all.clone());
        subscribers.spawn(async move {
            while all.borrow_and_update().is_none() {
                subscriber.read(Duration::from_millis(100)).await;
            }
            let published = all.borrow().clone().expect("it is there");
            subscriber.read_to(&published).await;
            subscriber
        });
    }
    for from in 0..3 {
        let (mut publisher, stopped) = (Publisher::new(&door, from).await, stopped.clone());
        publishers.spawn(async move {
            while !*stopped.borrow() {
                publisher.publish(1).await;
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
            publisher.published()
        });
    }
    for index in 0..3 {
        assert_eq!(cluster.nodes()[index].stop().await.code(), Some(0));
        cluster.restart(index).await;
        cluster.until_linked().await;
        balancer.follow(index, &cluster.nodes()[index]).await;
    }
    stop.send_replace(true);
    let mut published = Vec::new();
    while let Some(publisher) = publishers.join_next().await {
        published.push(publisher.expect("it publishes to the end"));
    }
    said.send_replace(Some(published.clone()));
    while let Some(subscriber) = subscribers.join_next().await {
        let subscriber = subscriber.expect("it hears everything");
        assert!(subscriber.moves > 0, "every node was restarted");
        assert_eq!(subscriber.losses, 0, "{published:?}");
    }
}
