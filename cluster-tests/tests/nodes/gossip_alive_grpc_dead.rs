//! Two nodes are alive for gossip, without peer streams: acks do not hang, and no message is missed without a reported
//! loss.

use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, PEER_DOWN, cut_peer_streams, peer_log_events};
use fanfare_cluster_tests::network::{Cut, Network, isolated};
use fanfare_cluster_tests::traffic::{LOAD, Publishers, Subscriber, assert_converged};
use fanfare_cluster_tests::waits::fault_lasts;
use fanfare_cluster_tests::{Node, SOON, Socket, wait_until};
use serde_json::{Value, json};

const CUT_FOR: Duration = Duration::from_secs(4);

async fn until_known(node: &Node, count: f64) {
    let known = async || node.metric("fanfare_peers_known").await == count;
    wait_until(SOON, &format!("{count} peers to be known"), known).await;
}

fn has_logged_down(node: &Node) -> bool {
    peer_log_events(node).iter().any(|(_, message)| message == PEER_DOWN)
}

#[test]
fn nodes_with_cut_links_to_each_other_lose_nothing_silently() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let publishers = Publishers::on(nodes).await;
        let (n0, n1) = (&nodes[0], &nodes[1]);
        let cuts = [cut_peer_streams(&network, n0, n1), cut_peer_streams(&network, n1, n0)];
        until_known(n0, 1.0).await;
        until_known(n1, 1.0).await;
        fault_lasts(CUT_FOR / 2).await;
        let moving = Subscriber::on(n0, "from one side to the other").await;
        fault_lasts(CUT_FOR / 2).await;
        let received = moving.leave().await;
        subscribers.push(Subscriber::after(n1, "moved", received).await);
        assert!(!has_logged_down(n0) && !has_logged_down(n1), "gossip says that they live");
        drop(cuts);
        cluster.until_linked().await;
        publishers.until_acked(LOAD).await;
        assert_converged(&mut cluster, &publishers.end().await, subscribers).await;
    });
}

/// Neither an ack nor an attach waits for a node whose peer streams have failed, although the node is alive.
#[test]
fn node_does_not_wait_for_a_peer_without_a_link() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 2).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let publishers = Publishers::on(nodes).await;
        let [n0, n1] = nodes else { panic!("two nodes were started") };
        let cuts = cut_peer_streams(&network, n1, n0);
        until_known(n1, 0.0).await;
        fault_lasts(CUT_FOR).await;
        assert_eq!(n0.metric("fanfare_peers_known").await, 1.0, "its own lanes carry");
        let moving = Subscriber::on(n0, "from one side to the other").await;
        fault_lasts(CUT_FOR / 4).await;
        subscribers.push(Subscriber::after(n1, "moved", moving.leave().await).await);
        drop(cuts);
        cluster.until_linked().await;
        publishers.until_acked(LOAD).await;
        assert_converged(&mut cluster, &publishers.end().await, subscribers).await;
    });
}

async fn is_resumed(node: &Node, serial: &Value) -> bool {
    let mut socket = Socket::open(node, "").await;
    let attached = socket.ask(json!({ "op": 8, "channel": "room", "serial": serial })).await;
    assert_eq!(attached["op"], 9, "{attached}");
    attached["resumed"] == true
}

/// An unreachable node could not get the interest in a channel, and keeps its own publishes there.
fn check_no_resume_over_unreachable_peer(cut: impl Fn(&Network, &Node, &Node) -> Vec<Cut> + Send + 'static) {
    isolated(async move |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let (n0, n2) = (&nodes[0], &nodes[2]);
        let cuts = cut(&network, n0, n2);
        until_known(n0, 1.0).await;
        until_known(n2, 1.0).await;
        let mut stays = Socket::open(n0, "").await;
        stays.attach("room").await;
        stays.publish("room", json!({ "data": 1 })).await;
        let serial = stays.message("room").await["serial"].clone();
        Socket::open(n2, "").await.publish("room", json!({ "data": 2 })).await;
        wait_until(SOON, "nobody to be resumed", async || !is_resumed(n0, &serial).await).await;
        drop(cuts);
        wait_until(SOON, "the link to be back", async || n0.metric("fanfare_peers_known").await == 2.0).await;
        let back = async || {
            let serial = Socket::open(n0, "").await.attach("room").await["serial"].clone();
            is_resumed(n0, &serial).await
        };
        wait_until(SOON, "those who come then to be resumed", back).await;
    });
}

#[test]
fn resume_is_false_while_the_publishing_node_is_unreachable() {
    check_no_resume_over_unreachable_peer(|network, n0, n2| {
        cut_peer_streams(network, n0, n2).into_iter().chain(cut_peer_streams(network, n2, n0)).collect()
    });
}

#[test]
fn resume_is_false_while_only_a_third_node_hears_the_publisher() {
    check_no_resume_over_unreachable_peer(|network, n0, n2| network.split(&[n0.host()], &[n2.host()]));
}

/// Messages from a third node do not replace a peer stream from their origin.
#[test]
fn client_moving_to_a_node_that_misses_a_peer_is_not_resumed() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
        let _cuts = [cut_peer_streams(&network, n0, n2), cut_peer_streams(&network, n2, n0)];
        until_known(n0, 1.0).await;
        until_known(n2, 1.0).await;
        let mut stays = Socket::open(n1, "").await;
        stays.attach("room").await;
        stays.publish("room", json!({ "data": 1 })).await;
        let serial = stays.message("room").await["serial"].clone();
        let mut on_n2 = Socket::open(n2, "").await;
        for (socket, data) in [(None, 2), (Some(&mut on_n2), 3), (None, 4)] {
            socket.unwrap_or(&mut stays).publish("room", json!({ "data": data })).await;
        }
        let mut comes = Socket::open(n0, "").await;
        let attached = comes.ask(json!({ "op": 8, "channel": "room", "serial": serial })).await;
        assert_eq!((&attached["op"], &attached["resumed"]), (&json!(9), &json!(false)), "{attached}");
    });
}
