//! Members of any node are known on all: events, lists and limits.

use std::collections::BTreeMap;
use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::network::isolated;
use fanfare_cluster_tests::presence::{attach, event, members, names, present, read, until_members_on_all};
use fanfare_cluster_tests::waits::time_passes;
use fanfare_cluster_tests::{Node, NodeOptions, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

/// Time in which no further frame must come.
const QUIET: Duration = Duration::from_millis(500);

async fn open(node: &Node, client_id: &str) -> Socket {
    Socket::open(node, &format!("?clientId={client_id}")).await
}

fn seen(action: &str, name: &str, data: Value) -> (String, String, Value) {
    (action.to_owned(), name.to_owned(), data)
}

async fn assert_quiet(watcher: &mut Socket) {
    while let Ok(frame) = watcher.next_within(QUIET).await {
        assert_ne!(frame["op"], 12, "{:?}", read(&frame));
    }
}

fn resume(socket: &Socket, client_id: &str) -> String {
    let key = socket.connected["connectionKey"].as_str().expect("a key");
    format!("?clientId={client_id}&resume={key}")
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_events_reach_all_nodes_in_order() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut watchers = Vec::new();
    for (node, query) in nodes.iter().zip(["", "?format=msgpack", ""]) {
        let mut watcher = Socket::open(node, query).await;
        assert_eq!(attach(&mut watcher, "room").await, BTreeMap::new());
        watchers.push(watcher);
    }
    let mut ann = open(&nodes[0], "ann").await;
    present(&mut ann, "enter", "room", json!({"data": {"n": 1.0}})).await;
    // An acknowledged enter is known on all nodes.
    for node in &*nodes {
        let listed = members(node, "room").await;
        assert_eq!(listed["source"], "store");
        let member = &listed["members"][0];
        assert_eq!((&member["clientId"], &member["data"]), (&json!("ann"), &json!({"n": 1.0})), "{listed}");
        assert_eq!(member["connectionId"], ann.connected["connectionId"]);
    }
    let mut late = Socket::open(&nodes[2], "").await;
    assert_eq!(attach(&mut late, "room").await, BTreeMap::from([("ann".to_owned(), json!({"n": 1.0}))]));
    watchers.push(late);
    present(&mut ann, "update", "room", json!({"data": 2})).await;
    present(&mut ann, "update", "room", json!({"data": 2})).await;
    present(&mut ann, "leave", "room", json!({"data": "bye"})).await;
    present(&mut ann, "enter", "room", json!({})).await;
    ann.send(&json!({"op": 5})).await;
    for (number, watcher) in watchers.iter_mut().enumerate() {
        if number < 3 {
            assert_eq!(event(watcher).await, seen("enter", "ann", json!({"n": 1.0})));
        }
        for expected in [
            seen("update", "ann", json!(2)),
            seen("update", "ann", json!(2)),
            seen("leave", "ann", json!("bye")),
            seen("enter", "ann", Value::Null),
            seen("leave", "ann", Value::Null),
        ] {
            assert_eq!(event(watcher).await, expected, "{number}");
        }
        assert_quiet(watcher).await;
    }
    until_members_on_all(nodes, "room", &[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn restarted_node_knows_remote_members_when_ready() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let mut socket = Socket::open(&nodes[0], "").await;
    for name in ["ann", "bob"] {
        for channel in ["room", "hall"] {
            present(&mut socket, "enter", channel, json!({"clientId": name})).await;
        }
    }
    nodes[2].kill();
    nodes[2].restart().await;
    // A ready node knows the members of its peers.
    assert_eq!(names(&nodes[2], "room").await, ["ann", "bob"]);
    assert_eq!(names(&nodes[2], "hall").await, ["ann", "bob"]);
    let mut watcher = Socket::open(&nodes[2], "").await;
    assert_eq!(attach(&mut watcher, "room").await.len(), 2);
    present(&mut socket, "leave", "room", json!({"clientId": "ann"})).await;
    assert_eq!(event(&mut watcher).await.1, "ann");
}

#[tokio::test(flavor = "multi_thread")]
async fn member_limit_counts_all_nodes_and_listing_only_its_own() {
    let limit = |options: fanfare_cluster_tests::NodeOptions| options.limit("presence_members", 3);
    let mut cluster = Cluster::linked_with(2, limit).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    let (mut here, mut there) = (Socket::open(n0, "").await, Socket::open(n1, "").await);
    for name in ["ann", "bob"] {
        present(&mut here, "enter", "room", json!({"clientId": name})).await;
    }
    present(&mut there, "enter", "room", json!({"clientId": "cid"})).await;
    let enter = json!({"op": 12, "channel": "room", "action": "enter", "clientId": "dan"});
    for socket in [&mut here, &mut there] {
        let answer = socket.ask(enter.clone()).await;
        assert_eq!((&answer["op"], &answer["code"]), (&json!(2), &json!(42900)), "{answer}");
    }
    for (node, count) in [(&*n0, 2), (&*n1, 1)] {
        let authorization = http::basic(&node.key());
        let headers = [("authorization", authorization.as_str())];
        let listed = http::request(node.addr(), "GET", "/api/presence", &headers, "").await;
        let listed: Value = serde_json::from_slice(&listed.body).expect("JSON");
        assert_eq!(listed["channels"], json!([{"channel": "room", "members": count}]));
    }
    present(&mut here, "leave", "room", json!({"clientId": "ann"})).await;
    assert_eq!(there.ask(enter).await["op"], 1, "there is room again");
}

#[tokio::test(flavor = "multi_thread")]
async fn client_resuming_on_another_node_stays_present() {
    let with_presence_timeout =
        |options: fanfare_cluster_tests::NodeOptions| options.limit("presence_grace_ms", 2_000);
    let mut cluster = Cluster::linked_with(3, with_presence_timeout).await;
    let nodes = cluster.nodes();
    let mut ann = open(&nodes[0], "ann").await;
    present(&mut ann, "enter", "room", json!({"data": 1})).await;
    let mut watchers = Vec::new();
    for node in &*nodes {
        let mut watcher = Socket::open(node, "").await;
        assert_eq!(attach(&mut watcher, "room").await.len(), 1);
        watchers.push(watcher);
    }
    for (node, is_lost_before) in [(1, true), (2, false), (0, false), (2, true)] {
        let query = resume(&ann, "ann");
        if is_lost_before {
            drop(ann);
            ann = Socket::open(&nodes[node], &query).await;
        } else {
            // The takeover ends the former socket.
            ann = Socket::open(&nodes[node], &query).await;
        }
        assert_eq!(ann.connected["resumed"], true);
    }
    // Longer than the presence timeout of the first loss.
    time_passes(Duration::from_millis(2_500)).await;
    for watcher in &mut watchers {
        assert_quiet(watcher).await;
    }
    // Changes of the member now come from its present node.
    present(&mut ann, "update", "room", json!({"data": 2})).await;
    drop(ann);
    for watcher in &mut watchers {
        assert_eq!(event(watcher).await, seen("update", "ann", json!(2)));
        assert_eq!(event(watcher).await, seen("leave", "ann", json!(2)), "after the grace");
        assert_quiet(watcher).await;
    }
}

/// Changes made while a node is unreachable are known on every node after the cut, and subscribers get them as events.
#[test]
fn hundreds_converge_after_a_cut() {
    isolated(async |network| {
        const EACH: usize = 300;
        const CHANNELS: usize = 7;
        let fast = |options: NodeOptions| options.limit("controls_per_second", 0);
        let mut cluster = Cluster::apart_with(&network, 3, fast).await;
        let nodes = cluster.nodes();
        let mut sockets = Vec::new();
        for node in &*nodes {
            sockets.push(Socket::open(node, "").await);
        }
        let channel = |number: usize| format!("room-{}", number % CHANNELS);
        for (at, socket) in sockets.iter_mut().enumerate() {
            for number in 0..EACH {
                let name = format!("n{at}-{number:03}");
                present(socket, "enter", &channel(number), json!({"clientId": name, "data": 0})).await;
            }
        }
        let mut watcher = Socket::open(&nodes[2], "").await;
        let mut known = attach(&mut watcher, "room-0").await;
        let cuts = network.split(&[nodes[2].host()], &[nodes[0].host(), nodes[1].host()]);
        wait_until(SOON, "the others to miss it", async || {
            nodes[0].metric("fanfare_peers_known").await == 1.0
                && nodes[1].metric("fanfare_peers_known").await == 1.0
        })
        .await;
        for (at, socket) in sockets.iter_mut().enumerate().take(2) {
            for number in 0..EACH {
                let name = format!("n{at}-{number:03}");
                let (action, name) = match number % 3 {
                    0 => ("leave", name),
                    1 => ("update", name),
                    _ => ("enter", format!("{name}-too")),
                };
                present(socket, action, &channel(number), json!({"clientId": name, "data": 1})).await;
            }
        }
        drop(cuts);
        for number in 0..CHANNELS {
            let list = async |node: &Node| {
                let listed = members(node, &channel(number)).await;
                listed["members"].as_array().expect("members").clone()
            };
            wait_until(SOON, "all nodes to list the same", async || {
                let lists = [list(&nodes[0]).await, list(&nodes[1]).await, list(&nodes[2]).await];
                lists[0] == lists[1] && lists[1] == lists[2]
            })
            .await;
        }
        let expected = names(&nodes[0], "room-0").await;
        while known.keys().ne(&expected) || known.values().all(|data| *data == 0) {
            let (action, name, data) = event(&mut watcher).await;
            match &*action {
                "leave" => assert!(known.remove(&name).is_some(), "{name} was not there"),
                "enter" => assert!(known.insert(name.clone(), data).is_none(), "{name} was there"),
                _ => assert!(known.insert(name.clone(), data).is_some(), "{name} was not there"),
            }
        }
        assert_quiet(&mut watcher).await;
    });
}
