//! One node is cut off from two others: both sides go on serving. After the partition no message was missed without a
//! reported loss, and all nodes soon have the same members.

use std::collections::BTreeMap;
use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, cut_off, peer_log_events, until_peers_down};
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::presence::{Watcher, members, names, present, until_members_on_all};
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::traffic::{LOAD, Publishers, Subscriber, assert_converged};
use fanfare_cluster_tests::waits::{fault_lasts, pace};
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket, wait_until};
use serde_json::{Value, json};
use tokio::time::Instant;

const A_WHILE: Duration = Duration::from_secs(2);
/// Greatest time from the end of the partition until all nodes have the same members.
const CONVERGED_WITHIN: Duration = Duration::from_secs(5);
/// Time after that in which no further event must come.
const QUIET: Duration = Duration::from_secs(3);
const ROOM: &str = "room";

#[test]
fn partition_sides_serve_and_lose_nothing_silently() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let moving = Subscriber::on_each(nodes, "moves").await;
        let publishers = Publishers::on(nodes).await;
        publishers.until_acked(LOAD).await;
        let cuts = cut_off(&network, nodes);
        until_peers_down(nodes).await;
        // Subscribers move to the other side of the partition, to their own side, and back afterwards.
        for (at, subscriber) in moving.into_iter().enumerate() {
            let received = subscriber.leave().await;
            subscribers.push(Subscriber::after(&nodes[(at + 1) % 3], "moved", received).await);
        }
        let away = Subscriber::on(&nodes[0], "away while it is healed").await;
        let stays = Subscriber::on(&nodes[1], "the same, on the other side").await;
        fault_lasts(A_WHILE).await;
        let (away, stays) = (away.leave().await, stays.leave().await);
        drop(cuts);
        cluster.until_linked().await;
        let nodes = cluster.nodes();
        subscribers.push(Subscriber::after(&nodes[2], "away while it was healed", away).await);
        subscribers.push(Subscriber::after(&nodes[0], "the same, on the other side", stays).await);
        subscribers.push(Subscriber::on(&nodes[0], "came when it was over").await);
        publishers.until_acked(LOAD).await;
        assert_converged(&mut cluster, &publishers.end().await, subscribers).await;
    });
}

#[test]
fn repeated_partitions_lose_nothing_silently() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let nodes = cluster.nodes();
        let mut subscribers = Subscriber::on_each(nodes, "there from the beginning").await;
        let publishers = Publishers::on(nodes).await;
        for seconds in [1, 2, 0, 3] {
            let cuts = cut_off(&network, cluster.nodes());
            fault_lasts(Duration::from_millis(1_000 * seconds + 200)).await;
            drop(cuts);
            // Faults and clients during the recovery, too.
            pace(Duration::from_millis(300 * seconds)).await;
            let fresh = Subscriber::on(&cluster.nodes()[seconds as usize % 3], "came as it was healed").await;
            subscribers.push(fresh);
        }
        cluster.until_linked().await;
        publishers.until_acked(LOAD).await;
        assert_converged(&mut cluster, &publishers.end().await, subscribers).await;
    });
}

async fn is_listed(node: &Node, expected: &BTreeMap<String, Value>) -> bool {
    let listed = members(node, ROOM).await;
    let listed = listed["members"].as_array().expect("members");
    let name = |member: &Value| member["clientId"].as_str().expect("a clientId").to_owned();
    listed.iter().map(|member| (name(member), member["data"].clone())).collect::<BTreeMap<_, _>>()
        == *expected
}

/// Checks that members converge after a partition. When it ends, the members of the other side have left by the
/// presence timeout, or are still there, as `have_left` says. Each node has `crowd` more members throughout.
fn members_converge(presence_timeout: Duration, have_left: bool, crowd: usize) {
    let presence_timeout_ms = u64::try_from(presence_timeout.as_millis()).expect("a short time");
    isolated(async move |network| {
        let with_presence_timeout =
            |options: NodeOptions| options.limit("presence_grace_ms", presence_timeout_ms);
        let mut cluster = Cluster::apart_with(&network, 3, with_presence_timeout).await;
        let nodes = cluster.nodes();
        let (mut sockets, mut expected) = (Vec::new(), BTreeMap::new());
        for (at, node) in nodes.iter().enumerate() {
            let mut socket = Socket::open(node, "").await;
            for what in ["stays", "changes", "leaves"] {
                let enter = json!({"clientId": format!("{what}-{at}"), "data": 0});
                present(&mut socket, "enter", ROOM, enter).await;
            }
            for number in 0..crowd {
                let name = format!("one of many {number}-{at}");
                present(&mut socket, "enter", ROOM, json!({"clientId": name, "data": number})).await;
                expected.insert(name, json!(number));
            }
            sockets.push(socket);
        }
        let mut previous = Socket::open(&nodes[0], "?clientId=moves").await;
        present(&mut previous, "enter", ROOM, json!({"data": 0})).await;
        let mut watchers = Vec::new();
        for node in &*nodes {
            watchers.push(Watcher::on(node, ROOM).await);
            assert_eq!(watchers.last().map(|watcher| watcher.list.len()), Some(10 + 3 * crowd));
        }

        let cuts = cut_off(&network, nodes);
        until_peers_down(nodes).await;
        let key = previous.connected["connectionKey"].as_str().expect("a key");
        let mut moved = Socket::open(&nodes[1], &format!("?clientId=moves&resume={key}")).await;
        assert_eq!(moved.connected["resumed"], true);
        present(&mut moved, "enter", ROOM, json!({"data": 1})).await;
        expected.insert("moves".to_owned(), json!(1));
        for (at, socket) in sockets.iter_mut().enumerate() {
            for (action, what) in [("update", "changes"), ("leave", "leaves"), ("enter", "comes")] {
                let change = json!({"clientId": format!("{what}-{at}"), "data": 1});
                present(socket, action, ROOM, change).await;
            }
            for (what, data) in [("stays", 0), ("changes", 1), ("comes", 1)] {
                expected.insert(format!("{what}-{at}"), json!(data));
            }
        }
        if have_left {
            let is_of = |name: &str, side: &[&str]| side.iter().any(|at| name.ends_with(at));
            wait_until(SOON, "each side to be alone", async || {
                let (here, there) = (names(&nodes[0], ROOM).await, names(&nodes[1], ROOM).await);
                !here.iter().any(|name| is_of(name, &["-1", "-2"]))
                    && !there.iter().any(|name| is_of(name, &["-0"]))
            })
            .await;
        }

        drop(cuts);
        let healed = Instant::now();
        let end = healed + CONVERGED_WITHIN;
        for node in &*nodes {
            let left = end.saturating_duration_since(Instant::now());
            wait_until(left, "the node to have all members", async || is_listed(node, &expected).await).await;
        }
        println!("converged {:?} after the cut was healed", healed.elapsed());
        // A leave between two nodes may still arrive before, and is undone.
        for watcher in &mut watchers {
            while watcher.take_until(end).await {}
            assert_eq!(watcher.list, expected, "after {:?}", watcher.events);
        }
        let (frames, ended) = previous.to_end(SOON).await;
        assert_eq!(
            (&frames.last().expect("it is told")["code"], ended),
            (&json!(40800), SocketEnd::Closed(4001))
        );
        for watcher in &mut watchers {
            watcher.assert_quiet(QUIET).await;
            let stays = watcher.events.iter().filter(|(_, name)| name.starts_with("stays"));
            assert_eq!(stays.count() > 0, have_left, "{:?}", watcher.events);
        }
        sockets.push(moved);
        for socket in &mut sockets {
            socket.send(&json!({"op": 5})).await;
        }
        until_members_on_all(nodes, ROOM, &[]).await;
        for node in nodes {
            node.assert_well().await;
        }
    });
}

#[test]
fn members_converge_after_heal_before_presence_timeout() {
    members_converge(Duration::from_secs(15), false, 0);
}

#[test]
fn members_converge_after_heal_past_presence_timeout() {
    members_converge(Duration::from_secs(1), true, 0);
}

#[test]
fn hundreds_of_members_converge_after_a_partition() {
    members_converge(Duration::from_secs(1), true, 150);
}

#[test]
fn members_of_a_node_killed_in_a_partition_return_then_leave() {
    const PRESENCE_TIMEOUT_MS: u64 = 8_000;
    isolated(async |network| {
        let with_presence_timeout =
            |options: NodeOptions| options.limit("presence_grace_ms", PRESENCE_TIMEOUT_MS);
        let mut cluster = Cluster::apart_with(&network, 3, with_presence_timeout).await;
        let nodes = cluster.nodes();
        let mut socket = Socket::open(&nodes[1], "").await;
        present(&mut socket, "enter", ROOM, json!({"clientId": "a"})).await;
        until_members_on_all(nodes, ROOM, &["a"]).await;
        let cuts = cut_off(&network, nodes);
        wait_until(SOON, "it to have left", async || names(&nodes[0], ROOM).await.is_empty()).await;
        nodes[1].kill();
        drop(cuts);
        let healed = Instant::now();
        until_members_on_all(&nodes[..1], ROOM, &["a"]).await;
        assert!(healed.elapsed() <= CONVERGED_WITHIN, "{:?}", healed.elapsed());
        until_members_on_all(&nodes[2..], ROOM, &["a"]).await;
        for node in [&nodes[0], &nodes[2]] {
            wait_until(SOON, "it to have left", async || names(node, ROOM).await.is_empty()).await;
        }
    });
}

/// Two of three nodes are cut off from each other. One of them must not remove the members of the other.
#[test]
fn members_stay_until_their_node_is_down_for_all_nodes() {
    const PRESENCE_TIMEOUT: Duration = Duration::from_secs(1);
    /// Time after which each node makes the leaves that another node has not made.
    const ALL_LATE: Duration = Duration::from_secs(8);
    isolated(async |network| {
        let presence_timeout_ms = u64::try_from(PRESENCE_TIMEOUT.as_millis()).expect("a short time");
        let with_presence_timeout =
            |options: NodeOptions| options.limit("presence_grace_ms", presence_timeout_ms);
        let mut cluster = Cluster::apart_with(&network, 3, with_presence_timeout).await;
        let nodes = cluster.nodes();
        let mut members = Vec::new();
        // Each of the other nodes would make the leaves of some of these members.
        let expected: Vec<String> = (0..8).map(|number| format!("member-{number}")).collect();
        for name in &expected {
            let mut member = Socket::open(&nodes[2], "").await;
            present(&mut member, "enter", ROOM, json!({ "clientId": name })).await;
            members.push(member);
        }
        let expected: Vec<&str> = expected.iter().map(String::as_str).collect();
        until_members_on_all(nodes, ROOM, &expected).await;
        let mut watchers = [Watcher::on(&nodes[0], ROOM).await, Watcher::on(&nodes[1], ROOM).await];
        let _cuts = network.split(&[nodes[0].host()], &[nodes[2].host()]);
        let message = "peer is down here but alive for others: check the network between the two nodes";
        let is_logged = async || peer_log_events(&nodes[0]).contains(&("n2".to_owned(), message.to_owned()));
        wait_until(SOON, "the cut to be noticed", is_logged).await;
        watchers[0].assert_quiet(PRESENCE_TIMEOUT + ALL_LATE).await;
        for (node, watcher) in nodes.iter().zip(&mut watchers) {
            watcher.assert_quiet(A_WHILE / 10).await;
            assert_eq!(names(node, ROOM).await, expected);
        }
        nodes[2].kill();
        let end = Instant::now() + SOON;
        for watcher in &mut watchers {
            assert!(watcher.has_by(&BTreeMap::new(), end).await, "{:?}", watcher.events);
            assert_eq!(watcher.events.len(), expected.len(), "{:?}", watcher.events);
        }
    });
}
