//! A node misses a presence event that no peer stream has lost. It finds that by comparing digests of members, and
//! requests the missing changes.

use std::collections::BTreeMap;
use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::presence::{Watcher, names, present, until_members_on_all};
use fanfare_cluster_tests::{Node, SOON, Socket, wait_until};
use serde_json::json;
use tokio::time::Instant;

/// Channel of which `n1` drops incoming presence events.
const LOSSY: &str = "lossy";
const REPAIRS: &str = "fanfare_presence_repairs_total";

async fn lossy() -> Cluster {
    let mut cluster = Cluster::start(1).await;
    cluster.add(|options| options.environment("PEER_PRESENCE_LOST_ON", LOSSY)).await;
    cluster.add(|options| options).await;
    cluster.until_linked().await;
    cluster
}

/// Asserts that `n1` has missed the change and the other node has not.
async fn assert_lost(nodes: &[Node], before: &[&str], now: &[&str]) {
    assert_eq!(names(&nodes[2], LOSSY).await, now);
    assert_eq!(names(&nodes[1], LOSSY).await, before, "it was to be lost");
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_lost_a_presence_change_recovers_it() {
    let mut cluster = lossy().await;
    let nodes = cluster.nodes();
    let mut watchers = [Watcher::on(&nodes[1], LOSSY).await, Watcher::on(&nodes[2], LOSSY).await];
    let mut ann = Socket::open(&nodes[0], "?clientId=ann").await;
    let steps = [
        ("enter", json!({"data": 1}), BTreeMap::from([("ann".to_owned(), json!(1))])),
        ("update", json!({"data": 2}), BTreeMap::from([("ann".to_owned(), json!(2))])),
        ("leave", json!({}), BTreeMap::new()),
    ];
    for (repairs, (action, more, expected)) in (1..).zip(steps) {
        let before = names(&nodes[1], LOSSY).await;
        let before: Vec<&str> = before.iter().map(String::as_str).collect();
        present(&mut ann, action, LOSSY, more).await;
        let lost = Instant::now();
        let now: Vec<&str> = expected.keys().map(String::as_str).collect();
        assert_lost(nodes, &before, &now).await;
        for watcher in &mut watchers {
            assert!(watcher.has_by(&expected, lost + SOON).await, "{action}: {:?}", watcher.events);
        }
        println!("{action}: mended {:?} after it was lost", lost.elapsed());
        until_members_on_all(nodes, LOSSY, &now).await;
        assert_eq!(nodes[1].metric(REPAIRS).await, f64::from(repairs), "asked once for each");
    }
    for watcher in &mut watchers {
        let actions: Vec<&str> = watcher.events.iter().map(|(action, _)| &**action).collect();
        assert_eq!(actions, ["enter", "update", "leave"]);
        watcher.assert_quiet(Duration::from_secs(5)).await;
    }
    assert_eq!((nodes[0].metric(REPAIRS).await, nodes[2].metric(REPAIRS).await), (0.0, 0.0));
}

/// The client of the member has gone, so no later change could repair the loss.
#[tokio::test(flavor = "multi_thread")]
async fn a_leave_that_was_lost_leaves_no_ghost() {
    let mut cluster = lossy().await;
    let nodes = cluster.nodes();
    let mut gone = Socket::open(&nodes[0], "").await;
    let mut stays = Socket::open(&nodes[2], "").await;
    for name in ["ann", "bob"] {
        present(&mut gone, "enter", LOSSY, json!({"clientId": name})).await;
    }
    present(&mut stays, "enter", LOSSY, json!({"clientId": "cid"})).await;
    until_members_on_all(nodes, LOSSY, &["ann", "bob", "cid"]).await;
    gone.send(&json!({"op": 5})).await;
    wait_until(SOON, "them to leave where nothing is lost", async || {
        names(&nodes[2], LOSSY).await == ["cid"]
    })
    .await;
    until_members_on_all(nodes, LOSSY, &["cid"]).await;
}
