//! Nodes find each other by one seed, and notice failed and stalled nodes.
//!
//! The time until they notice is a test of `alone`.

use std::net::UdpSocket;
use std::time::Duration;

use fanfare_cluster_tests::cluster::{Cluster, PEER_ALIVE, PEER_DOWN, peer_log_events, write_key};
use fanfare_cluster_tests::waits::{pace, throughout};
use fanfare_cluster_tests::{Node, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

const LEFT: &str = "peer left";
const ALONE: &str =
    "no seed answered, serving as a single node: check --seed (gossip addresses) and --cluster-key-file";
const READABLE: &str = "cluster key file is readable by all users";

fn times(node: &Node, other: &str, message: &str) -> usize {
    peer_log_events(node).iter().filter(|(of, logged)| of == other && logged == message).count()
}

async fn until_logged(nodes: &[&Node], other: &str, message: &str, count: usize) {
    let what = format!("{count} times `{message}` of {other}");
    wait_until(SOON, &what, async || nodes.iter().all(|node| times(node, other, message) >= count)).await;
}

async fn three() -> Cluster {
    let mut cluster = Cluster::start(3).await;
    let nodes = cluster.nodes();
    let (n0, n1, n2) = (&nodes[0], &nodes[1], &nodes[2]);
    until_logged(&[n1, n2], "n0", PEER_ALIVE, 1).await;
    until_logged(&[n0, n2], "n1", PEER_ALIVE, 1).await;
    until_logged(&[n0, n1], "n2", PEER_ALIVE, 1).await;
    cluster
}

/// Each node announces its addresses, versions and state, and all others report the same about it.
#[tokio::test(flavor = "multi_thread")]
async fn node_facts_are_the_same_on_all_members() {
    let mut cluster = Cluster::linked(3).await;
    let nodes = cluster.nodes();
    let facts = |reported: &Value| {
        let names =
            ["incarnation", "listen", "gossip", "peer", "version", "protocolMinor", "ready", "draining"];
        names.map(|name| reported[name].clone())
    };
    for (at, node) in nodes.iter().enumerate() {
        let own = node.operate("GET", "/debug/members").await.json()["node"].clone();
        assert_eq!(own["listen"], node.addr().to_string());
        assert_eq!(own["gossip"], node.gossip().expect("a node of a cluster").to_string());
        assert_eq!((&own["ready"], &own["draining"]), (&json!(true), &json!(false)), "{own}");
        assert!(facts(&own).iter().all(|fact| !fact.is_null()), "{own}");
        for other in nodes.iter().enumerate().filter(|(other, _)| *other != at).map(|(_, other)| other) {
            let is_reported = async || {
                let reported = other.operate("GET", "/debug/members").await.json()["members"].clone();
                let reported =
                    reported.as_array().expect("members").iter().find(|one| one["nodeId"] == own["nodeId"]);
                reported
                    .is_some_and(|reported| facts(reported) == facts(&own) && reported["state"] == "alive")
            };
            wait_until(SOON, "the same to be told of it", is_reported).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn node_with_a_silent_seed_serves_alone_and_logs_it() {
    let cluster = Cluster::start(1).await;
    let silent = UdpSocket::bind("127.0.0.1:0").expect("a port");
    let seed = silent.local_addr().expect("it is bound").to_string();
    let alone = Node::start(cluster.one_more("alone").environment("FANFARE_SEED", &seed)).await;
    until_logged(&[&alone], "", ALONE, 1).await;
    assert_eq!(times(&alone, "", READABLE), 0);
    alone.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_key_that_everybody_can_read_is_warned_of() {
    let cluster = Cluster::start(1).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let file = folder.path().join("cluster.key");
    write_key(&file, [7; 32], 0o644);
    let file = file.to_str().expect("a path in UTF-8");
    let node = Node::start(cluster.one_more("open").environment("FANFARE_CLUSTER_KEY_FILE", file)).await;
    until_logged(&[&node], "", READABLE, 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn named_seed_is_found_beside_an_unresolvable_one() {
    let mut cluster = Cluster::start(1).await;
    let port = cluster.nodes()[0].gossip().expect("a node of a cluster").port();
    let seeds = format!("nowhere.invalid:{port},localhost:{port}");
    let named = Node::start(cluster.one_more("named").environment("FANFARE_SEED", &seeds)).await;
    until_logged(&[&named], "n0", PEER_ALIVE, 1).await;
    until_logged(&[&cluster.nodes()[0]], "named", PEER_ALIVE, 1).await;
    until_logged(&[&named], "", "seed name lookup failed", 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_node_is_down_for_its_peers_and_rejoins() {
    let mut cluster = three().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    n2.kill();
    until_logged(&[n0, n1], "n2", PEER_DOWN, 1).await;
    let answer = n0.operate("GET", "/debug/members").await.json();
    let members = answer["members"].as_array().expect("a list").clone();
    let down = members.iter().find(|member| member["nodeId"] == "n2").expect("it is known");
    assert_eq!((&down["state"], &down["ready"]), (&json!("dead"), &json!(false)), "{down}");
    n2.restart().await;
    until_logged(&[n0, n1], "n2", PEER_ALIVE, 2).await;
    until_logged(&[n2], "n0", PEER_ALIVE, 2).await;
    assert_eq!(times(n0, "n1", PEER_DOWN) + times(n1, "n0", PEER_DOWN), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn duplicate_node_id_stops_the_new_node_and_the_first_serves_on() {
    let mut cluster = Cluster::linked(3).await;
    let mut listening = Socket::open(&cluster.nodes()[1], "").await;
    listening.attach("room").await;
    let other = Node::start_in_vain(cluster.one_more("n1"));
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let mut publishing = Socket::open(n0, "").await;
    let publish = async |publishing: &mut Socket, listening: &mut Socket, number: u32| {
        publishing.publish("room", json!({ "data": number })).await;
        assert_eq!(listening.message("room").await["messages"][0]["data"], number);
    };
    let mut published = 0;
    tokio::pin!(other);
    let (ended, log) = loop {
        publish(&mut publishing, &mut listening, published).await;
        published += 1;
        tokio::select! {
            biased;
            ended = &mut other => break ended,
            () = pace(Duration::from_millis(5)) => {}
        }
    };
    assert_eq!(ended.code(), Some(1), "{log}");
    assert!(log.contains("duplicate node id, this node stops"), "{log}");
    assert!(!log.contains("thread"), "{log}");
    let reported = "duplicate node id, this node goes on: give each node its own --node-id";
    until_logged(&[n1], "n1", reported, 1).await;
    let ready = http::request(n1.admin(), "GET", "/ready", &[], "").await;
    assert_eq!(ready.status, 200);
    publish(&mut publishing, &mut listening, published).await;
    for node in [n0, n2] {
        assert_eq!(times(node, "n1", PEER_DOWN), 0);
        assert_eq!(node.metric("fanfare_peers_known").await, 2.0);
    }
    // The second process, which never served, must not have announced that `n1` has left.
    n1.kill();
    let later = cluster.add(|options| options).await;
    let state = async || {
        let members = later.operate("GET", "/debug/members").await.json()["members"].clone();
        let members = members.as_array().expect("members").iter();
        members.filter(|member| member["nodeId"] == "n1").map(|member| member["state"].clone()).next()
    };
    wait_until(SOON, "it to be dead", async || state().await == Some(json!("dead"))).await;
}

/// Also if a third node was linked to one of the two before they find each other.
#[tokio::test(flavor = "multi_thread")]
async fn two_nodes_with_one_id_started_at_once_leave_one() {
    let mut cluster = Cluster::linked(1).await;
    for _ in 0..3 {
        let options = [cluster.one_more("twin"), cluster.one_more("twin")];
        let (stays, ended, log) = Node::start_one_of(options).await;
        assert_eq!(ended.code(), Some(1), "{log}");
        assert!(log.contains("duplicate node id, this node stops"), "{log}");
        // The remaining process still hears of the stopped one for about this long.
        throughout(Duration::from_secs(2), async || {
            let ready = http::request(stays.admin(), "GET", "/ready", &[], "").await;
            assert_eq!(ready.status, 200, "{}", stays.log());
        })
        .await;
        let n0 = &cluster.nodes()[0];
        wait_until(SOON, "the link to it", async || n0.metric("fanfare_peers_known").await == 1.0).await;
    }
}

/// A clean stop causes no warning on any node, and is logged before the peer streams are closed.
#[tokio::test(flavor = "multi_thread")]
async fn stopped_node_has_left_and_no_node_logs_a_warning() {
    let mut cluster = Cluster::linked(3).await;
    for stops in 1..=3 {
        for index in 0..3 {
            assert_eq!(cluster.nodes()[index].stop().await.code(), Some(0));
            until_logged(&[&cluster.nodes()[index]], "", "stopped", stops).await;
            cluster.restart(index).await;
            cluster.until_linked().await;
        }
    }
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    assert_eq!(n2.stop().await.code(), Some(0));
    until_logged(&[n2], "", "stopped", 4).await;
    let warnings = |node: &Node| {
        let log = node.log();
        let is_warning = |line: &&str| line.contains("WARN") || line.contains("ERROR");
        log.lines().filter(is_warning).map(str::to_owned).collect::<Vec<_>>()
    };
    for node in [&*n0, n1, n2] {
        assert_eq!(warnings(node), [""; 0]);
    }
    n1.kill();
    // By that time the silence of the left node would have been noticed as well.
    until_logged(&[n0], "n1", PEER_DOWN, 1).await;
    assert_eq!(warnings(n0).iter().find(|line| line.contains("\"n2\"")), None);
    assert_eq!(times(n0, "n2", LEFT), 4);
    // Two threads write these lines.
    let last = |text: &str| {
        let log = n0.log();
        let line = log.lines().rfind(|line| line.contains(text)).expect("it was told");
        serde_json::from_str::<Value>(line).expect("JSON")["timestamp"].as_str().map(str::to_owned)
    };
    assert!(last(LEFT) <= last("peer stream closed"), "{}", n0.log());
}

/// A node that starts later learns of the clean end from others alone.
#[tokio::test(flavor = "multi_thread")]
async fn left_node_is_also_left_for_nodes_that_join_later() {
    let mut cluster = Cluster::linked(2).await;
    assert_eq!(cluster.nodes()[1].stop().await.code(), Some(0));
    let later = cluster.add(|options| options).await;
    let states = async || {
        let members = later.operate("GET", "/debug/members").await.json()["members"].clone();
        let members = members.as_array().expect("members").iter();
        let states = |member: &Value| (member["nodeId"].clone(), member["state"].clone());
        members.map(states).collect::<Vec<_>>()
    };
    let expected = [(json!("n0"), json!("alive")), (json!("n1"), json!("left"))];
    wait_until(SOON, "both to stand as they are", async || states().await == expected).await;
    // The node probes the one that left, which does not answer.
    throughout(Duration::from_secs(3), async || assert_eq!(states().await, expected)).await;
    let warnings =
        later.log().lines().filter(|line| line.contains("WARN")).map(str::to_owned).collect::<Vec<_>>();
    assert_eq!(warnings, [""; 0]);
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_fails_while_leaving_is_logged() {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes() else { panic!("two nodes were started") };
    // Enough clients for the drain to take a while.
    let _clients = futures_util::future::join_all((0..300).map(|_| Socket::open(n1, ""))).await;
    n1.terminate();
    wait_until(SOON, "the other one to leave", async || {
        n0.operate("GET", "/debug/members").await.json()["members"][0]["draining"] == true
    })
    .await;
    n1.kill();
    until_logged(&[n0], "n1", "peer went down while it drained", 1).await;
    assert_eq!(times(n0, "n1", LEFT) + times(n0, "n1", PEER_DOWN), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_is_down_until_it_returns_as_new_incarnation() {
    let mut cluster = three().await;
    let [n0, n1, n2] = cluster.nodes() else { panic!("three nodes were started") };
    let incarnation = async |of: &Node| {
        let seen = of.operate("GET", "/debug/members").await.json();
        let members = seen["members"].as_array().expect("members").clone();
        let n2 = members.into_iter().find(|member| member["nodeId"] == "n2").expect("it is a member");
        (n2["incarnation"].clone(), n2["state"] == "alive")
    };
    let previous = incarnation(n0).await.0;
    n2.pause();
    until_logged(&[n0, n1], "n2", PEER_DOWN, 1).await;
    n2.resume_until_restarted(1).await;
    for node in [&*n0, &*n1] {
        wait_until(SOON, "the new incarnation to be alive", async || {
            let (incarnation, is_alive) = incarnation(node).await;
            incarnation != previous && is_alive
        })
        .await;
    }
    assert_eq!(
        times(n2, "n0", PEER_DOWN) + times(n2, "n1", PEER_DOWN),
        0,
        "its own pause is no silence of others"
    );
}
