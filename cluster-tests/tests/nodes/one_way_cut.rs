//! Packets from one node to another are lost, in that direction alone: no message is missed without a reported loss.

use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::network::{PacketLoss, isolated};
use fanfare_cluster_tests::traffic::{LOAD, Publishers, Subscriber, assert_converged};
use fanfare_cluster_tests::waits::fault_lasts;
use fanfare_cluster_tests::{SOON, wait_until};

/// Time of a cut, longer than a node takes to be declared down.
const CUT_FOR: Duration = Duration::from_secs(4);

fn cut_from(from: usize, to: usize) {
    isolated(async move |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let publishers = Publishers::on(nodes).await;
        let cut = network.cut(nodes[from].host(), nodes[to].host(), PacketLoss::All);
        for node in [&nodes[from], &nodes[to]] {
            let is_down = async || node.metric("fanfare_peers_known").await == 1.0;
            wait_until(SOON, "the link to be down", is_down).await;
        }
        // A client that connects during the cut, or moves, has the same promise.
        fault_lasts(CUT_FOR / 2).await;
        let moving = Subscriber::on(&nodes[from], "from one side to the other").await;
        fault_lasts(CUT_FOR / 2).await;
        let received = moving.leave().await;
        subscribers.push(Subscriber::after(&nodes[to], "moved", received).await);
        drop(cut);
        cluster.until_linked().await;
        let fresh = Subscriber::on(&cluster.nodes()[to], "came when it was over").await;
        subscribers.push(fresh);
        publishers.until_acked(LOAD).await;
        assert_converged(&mut cluster, &publishers.end().await, subscribers).await;
    });
}

#[test]
fn nodes_converge_after_one_way_cut_from_the_seed() {
    cut_from(0, 1);
}

#[test]
fn nodes_converge_after_one_way_cut_to_the_seed() {
    cut_from(1, 0);
}
