//! Nodes of two minor versions of the peer protocol are one cluster: the older ones ignore unknown parts.

use std::cell::Cell;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::presence::{present, until_members_on_all};
use fanfare_cluster_tests::roaming::{NodeSelector, Publisher, Subscriber};
use fanfare_cluster_tests::{Node, SOON, Socket, http, wait_until};
use serde_json::json;

/// Starts a cluster in which every second node speaks the next minor version.
async fn mixed(count: usize) -> Cluster {
    let index = Cell::new(0);
    Cluster::linked_with(count, |options| {
        let is_next = index.replace(index.get() + 1) % 2 == 1;
        if is_next { options.environment("PEER_PROTOCOL_NEXT_MINOR", "1") } else { options }
    })
    .await
}

fn door(nodes: &[Node]) -> NodeSelector {
    NodeSelector::to(&nodes.iter().map(Node::addr).collect::<Vec<_>>(), &nodes[0].key())
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_of_mixed_versions_route_resume_and_leave() {
    let mut cluster = mixed(3).await;
    let nodes = cluster.nodes();
    let answer = nodes[0].operate("GET", "/debug/members").await.json();
    let minors = ["n1", "n2"].map(|node| {
        let members = answer["members"].as_array().expect("a list");
        members.iter().find(|member| member["nodeId"] == node).expect("a member")["protocolMinor"].clone()
    });
    let own = answer["node"]["protocolMinor"].as_u64().expect("a number");
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
            // The missed messages come from the next node.
            subscriber.leave();
        }
    }
    // A node of each minor version drains, and its clients move to another node.
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

#[tokio::test(flavor = "multi_thread")]
async fn mixed_versions_share_presence_counts_and_message_ids() {
    let mut cluster = mixed(3).await;
    let nodes = &*cluster.nodes();
    let mut sockets = Vec::new();
    for (at, node) in nodes.iter().enumerate() {
        let mut socket = Socket::open(node, &format!("?clientId=c{at}")).await;
        present(&mut socket, "enter", "room", json!({})).await;
        sockets.push(socket);
    }
    until_members_on_all(nodes, "room", &["c0", "c1", "c2"]).await;
    let ask = async |at: usize, method: &str, path: &str| {
        let authorization = http::basic(&nodes[at].key());
        http::request(nodes[at].addr(), method, path, &[("authorization", &authorization)], "").await.json()
    };
    for at in 0..nodes.len() {
        let is_counted = async || ask(at, "GET", "/api/connections/count").await["connections"] == 3;
        wait_until(SOON, "the connections of all", is_counted).await;
    }
    let mut serials = Vec::new();
    for node in nodes {
        let mut socket = Socket::open(node, "").await;
        let publish = json!({"op": 13, "channel": "room", "messages": [{"id": "once", "data": 1}]});
        serials.push(socket.ask(publish).await["serials"].clone());
    }
    assert!(serials[0].is_array() && serials.iter().all(|serial| *serial == serials[0]), "{serials:?}");
    // Requests of the next minor version and of this one.
    for (asked, closed) in [(1, 0), (0, 1)] {
        let path = format!("/api/clients/c{closed}/connections/close");
        assert_eq!(ask(asked, "POST", &path).await, json!({"closed": 1}));
    }
    until_members_on_all(nodes, "room", &["c2"]).await;
    for node in nodes {
        node.assert_well().await;
    }
}
