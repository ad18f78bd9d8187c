//! Times that a cluster keeps if its nodes get enough CPU.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::cluster::{Cluster, until_down};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, SOON, Socket, http, wait_until};
use serde_json::json;

const KEY: &str = "secret.k1";
/// Greatest time from the last sign of life of a node until its peers declare it down.
const DOWN_WITHIN: Duration = Duration::from_secs(3);
/// Greatest time from a new connection until all nodes count it for its tenant's limit.
const COUNTED_WITHIN: Duration = Duration::from_millis(250);

/// Asserts it of the median of three, since a node that itself got no time waits longer by design.
async fn assert_down_in_time(silence: impl Fn(&mut Node)) {
    let mut times = Vec::new();
    for _ in 0..3 {
        let mut cluster = Cluster::linked(3).await;
        let nodes = cluster.nodes();
        let begun = Instant::now();
        silence(&mut nodes[2]);
        until_down(&nodes[..2], "n2").await;
        times.push(begun.elapsed());
    }
    times.sort();
    assert!(times[1] < DOWN_WITHIN, "{times:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_node_is_down_within_three_seconds() {
    assert_down_in_time(Node::kill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn stalled_node_is_down_within_three_seconds() {
    assert_down_in_time(|node| node.pause()).await;
}

/// A client of a killed node resumes at a peer that had interest in the channel all the time. True if it is resumed.
async fn is_resumed_after_a_kill() -> bool {
    let mut cluster = Cluster::linked(2).await;
    let [n0, n1] = cluster.nodes().first_chunk_mut().expect("two nodes were started");
    let mut peer_subscriber = Socket::open(n1, "").await;
    peer_subscriber.attach("room").await;
    let mut client = Socket::open(n0, "").await;
    let attached = client.attach("room").await;
    client.publish("room", json!({"data": 1})).await;
    peer_subscriber.message("room").await;
    n0.kill();
    let mut back = Socket::open(n1, "").await;
    let answer = back.ask(json!({"op": 8, "channel": "room", "serial": attached["serial"]})).await;
    if answer["resumed"] == true {
        assert_eq!(back.message("room").await["messages"][0]["data"], 1, "{answer}");
    }
    answer["resumed"] == true
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_of_a_killed_node_resume_as_a_rule() {
    const ROUNDS: usize = 5;
    let mut resumed = 0;
    for _ in 0..ROUNDS {
        resumed += usize::from(is_resumed_after_a_kill().await);
    }
    assert!(2 * resumed > ROUNDS, "{resumed} of {ROUNDS} resumed");
}

async fn connections(node: &Node) -> usize {
    let (path, authorization) = ("/api/connections/count", http::basic(KEY));
    let answer = http::request(node.addr(), "GET", path, &[("authorization", &authorization)], "").await;
    let count = answer.json()["connections"].as_u64().expect("a count");
    usize::try_from(count).expect("a few")
}

/// Half of the connections are counted on all nodes in that time, even on a busy machine. So each node admits beyond a
/// limit only the connections that come within it.
#[tokio::test(flavor = "multi_thread")]
async fn connections_count_on_all_nodes_after_a_quarter_second() {
    const ROUNDS: usize = 9;
    let tenant = Directory::default().tenant("acme", Some(1_000)).account_of_tenant("acme-one");
    let directory = tenant.key("k1", "secret", ALL);
    let mut cluster = Cluster::linked_with(3, |options| options.directory(directory.clone(), KEY)).await;
    let nodes = cluster.nodes();
    let (mut open, mut times) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        open.push(Socket::open(&nodes[round % 3], "").await);
        let opened = Instant::now();
        for node in &*nodes {
            let is_counted = async || connections(node).await == open.len();
            wait_until(SOON, "the connection to be counted", is_counted).await;
        }
        times.push(opened.elapsed());
    }
    times.sort();
    assert!(times[ROUNDS / 2] <= COUNTED_WITHIN, "{times:?}");
}
