//! The key of a cluster is changed on one node after the other, and the cluster never splits.

use std::fs;
use std::path::Path;

use fanfare_cluster_tests::cluster::{Cluster, write_key};
use fanfare_cluster_tests::{Node, SOON, Socket, wait_until};
use serde_json::json;

const FORGED: &str = "fanfare_gossip_dropped_total{reason=\"forged\"}";

/// Restarts each node with these keys, the first of which seals.
async fn restart_all(cluster: &mut Cluster, keys: &[&str]) {
    fs::write(cluster.key_file(), keys.join("\n")).expect("the folder is writable");
    for index in 0..cluster.nodes().len() {
        cluster.restart(index).await;
        cluster.until_linked().await;
        assert_one(cluster.nodes()).await;
    }
}

/// Asserts that a message of each node reaches all nodes.
async fn assert_one(nodes: &[Node]) {
    let mut sockets = Vec::new();
    for node in nodes {
        let mut socket = Socket::open(node, "").await;
        socket.attach("room").await;
        sockets.push(socket);
    }
    for from in 0..nodes.len() {
        sockets[from].publish("room", json!({"data": from})).await;
        for socket in &mut sockets {
            assert_eq!(socket.message("room").await["messages"][0]["data"], from);
        }
    }
}

fn other_key(folder: &Path) -> String {
    let file = folder.join("other.key");
    let mut secret = [0; 32];
    getrandom::fill(&mut secret).expect("the operating system gives random bytes");
    write_key(&file, secret, 0o600);
    fs::read_to_string(file).expect("it was written")
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cluster_stays_one_while_its_key_is_changed() {
    let mut cluster = Cluster::linked(2).await;
    let folder = tempfile::tempdir().expect("a temporary folder");
    let old = fs::read_to_string(cluster.key_file()).expect("the key of the cluster");
    let new = other_key(folder.path());
    restart_all(&mut cluster, &[&old, &new]).await;
    restart_all(&mut cluster, &[&new, &old]).await;
    restart_all(&mut cluster, &[&new]).await;
    // A node with the old key alone is no peer any more.
    let file = folder.path().join("old.key");
    fs::write(&file, old).expect("the folder is writable");
    let late = cluster.one_more("late").environment("FANFARE_CLUSTER_KEY_FILE", &file.to_string_lossy());
    let late = Node::start(late).await;
    let seed = &cluster.nodes()[0];
    wait_until(SOON, "what it says to be dropped", async || seed.metric(FORGED).await > 0.0).await;
    assert_eq!(late.metric("fanfare_peers_known").await, 0.0);
    assert_one(cluster.nodes()).await;
}
