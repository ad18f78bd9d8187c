//! Nodes of two minors of the protocol between nodes are one cluster: what the older one does not know it passes over.

use std::cell::Cell;

use fanfare_cluster_tests::Node;
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::roaming::{Door, Publisher, Subscriber};
use serde_json::json;

/// Every second node speaks the minor that comes after this one.
async fn mixed(count: usize) -> Cluster {
    let index = Cell::new(0);
    Cluster::linked_with(count, |options| {
        let is_next = index.replace(index.get() + 1) % 2 == 1;
        if is_next { options.environment("PEER_PROTOCOL_NEXT_MINOR", "1") } else { options }
    })
    .await
}

fn door(nodes: &[Node]) -> Door {
    Door::to(&nodes.iter().map(Node::addr).collect::<Vec<_>>(), &nodes[0].key())
}

#[tokio::test(flavor = "multi_thread")]
async fn they_route_resume_and_leave_among_each_other() {
    let mut cluster = mixed(3).await;
    let nodes = cluster.nodes();
    let said = nodes[0].operate("GET", "/debug/members").await.json();
    let minors = ["n1", "n2"].map(|node| {
        let members = said["members"].as_array().expect("a list");
        members.iter().find(|member| member["nodeId"] == node).expect("a member")["protocolMinor"].clone()
    });
    let own = said["node"]["protocolMinor"].as_u64().expect("a number");
    assert_eq!(minors, [json!(own + 1), json!(own)]);

    let mut publishers = Vec::new();
    let mut subscribers = Vec::new();
    for (from, node) in (0..).zip(&*nodes) {
        publishers.push(Publisher::new(&door(std::slice::from_ref(node)), from).await);
    }
    let roaming = door(nodes);
    for _ in 0..3 {
        subscribers.push(Subscriber::new(&roaming).await);
    }
    let all = |publishers: &[Publisher]| publishers.iter().map(Publisher::published).collect::<Vec<_>>();
    for _ in 0..4 {
        for publisher in &mut publishers {
            publisher.publish(10).await;
        }
        for subscriber in &mut subscribers {
            subscriber.read_to(&all(&publishers)).await;
            // The next node gives it what it misses.
            subscriber.leave();
        }
    }
    // Of each minor one leaves to the other.
    roaming.turn_to(&[nodes[2].addr()]);
    publishers.drain(..2);
    for index in [1, 0] {
        publishers[0].publish(10).await;
        assert_eq!(nodes[index].stop().await.code(), Some(0));
        publishers[0].publish(10).await;
        for subscriber in &mut subscribers {
            subscriber.read_to(&all(&publishers)).await;
            subscriber.leave();
        }
    }
    for subscriber in &subscribers {
        assert!(subscriber.moves > 4);
    }
    for node in &nodes[2..] {
        node.assert_well().await;
        assert_eq!(node.metric("fanfare_peer_continuity_lost_total").await, 0.0);
    }
}
