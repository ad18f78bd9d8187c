//! A node whose disk hangs or is full reports it, goes on delivering, and recovers with the disk.

use fanfare_cluster_tests::{
    Directory, Disk, Node, NodeOptions, SOON, Socket, directory, history, http, wait_until,
};
use fanfare_proto::path::encode_channel;
use serde_json::json;
use tokio::task::JoinSet;

async fn publish(node: &Node, data: &str) -> u16 {
    let authorization = http::basic(&node.key());
    let path = "/api/channels/news/publish";
    let body = json!({ "data": data }).to_string();
    http::request(node.addr(), "POST", path, &[("authorization", &authorization)], body).await.status
}

async fn wait_for_status(node: &Node, status: &str) {
    wait_until(SOON, &format!("/ready to say {status}"), async || {
        let ready = http::request(node.admin(), "GET", "/ready", &[], "").await;
        assert_eq!(ready.status, 200, "clients are served all the time");
        let (ready, is_degraded) = (ready.json(), status == "degraded");
        ready["status"] == status && (ready["reasons"] == json!(["store"])) == is_degraded
    })
    .await;
}

async fn stored(node: &Node) -> Vec<String> {
    let records = history::read_all(node.addr(), &node.key(), "news", "direction=forwards").await;
    records.iter().map(|record| record["data"].as_str().expect("a text").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_hangs_degrades_the_node_until_it_goes_on() {
    let disk = Disk::default();
    let node = Node::start(disk.under(NodeOptions::default())).await;
    let mut subscriber = Socket::open(&node, "").await;
    subscriber.attach("news").await;
    assert_eq!(publish(&node, "before").await, 200);
    subscriber.message("news").await;
    wait_for_status(&node, "ready").await;

    disk.hang(true);
    assert_eq!(publish(&node, "meanwhile").await, 503);
    assert_eq!(subscriber.message("news").await["messages"][0]["data"], "meanwhile");
    wait_for_status(&node, "degraded").await;

    disk.hang(false);
    wait_for_status(&node, "ready").await;
    assert_eq!(publish(&node, "after").await, 200);
    assert_eq!(stored(&node).await, ["before", "meanwhile", "after"]);
    node.assert_well().await;
}

/// One publish for each channel. Only few of them fit into the queue for the disk.
const ARRAYS: usize = 8;

#[tokio::test(flavor = "multi_thread")]
async fn accepted_publishes_are_stored_after_disk_hang_refused_not() {
    let disk = Disk::default();
    let node = Node::start(disk.under(NodeOptions::default())).await;
    wait_for_status(&node, "ready").await;
    disk.hang(true);
    // The rows are as large as those of an array can be: each holds the name twice, with every quote escaped.
    let channels: Vec<_> = (0..ARRAYS).map(|number| format!("{number}{}", "\"".repeat(511))).collect();
    let array = json!(vec![json!({}); 10_000]).to_string();
    let mut publishes = JoinSet::new();
    for (number, channel) in channels.iter().enumerate() {
        let path = format!("/api/channels/{}/publish", encode_channel(channel));
        let (addr, array, authorization) = (node.addr(), array.clone(), http::basic(&node.key()));
        publishes.spawn(async move {
            let answer =
                http::request(addr, "POST", &path, &[("authorization", &authorization)], array).await;
            assert_eq!(answer.status, 503, "{:?}", answer.body);
            (number, answer.header("retry-after").is_none())
        });
    }
    let answers = publishes.join_all().await;
    let unknown = answers.iter().filter(|(_, unknown)| *unknown).count();
    assert!((1..ARRAYS).contains(&unknown), "some are taken, and some refused: {answers:?}");

    disk.hang(false);
    let authorization = http::basic(&node.key());
    let is_stored = async |number: usize| {
        let path = history::path(&channels[number], "limit=1");
        let page = http::request(node.addr(), "GET", &path, &[("authorization", &authorization)], "").await;
        page.json()["messages"].as_array().is_some_and(|messages| messages.len() == 1)
    };
    for (number, _) in answers.iter().filter(|(_, unknown)| *unknown) {
        wait_until(SOON, "what was delivered to be stored", async || is_stored(*number).await).await;
    }
    for (number, _) in answers.iter().filter(|(_, unknown)| !unknown) {
        assert!(!is_stored(*number).await, "{number} was refused");
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_stops_in_its_time_while_the_disk_hangs() {
    let disk = Disk::default();
    let options = NodeOptions::default().environment("FANFARE_DRAIN_TIMEOUT", "1s");
    let mut node = Node::start(disk.under(options)).await;
    disk.hang(true);
    assert_eq!(publish(&node, "never answered").await, 503);
    let started = std::time::Instant::now();
    assert_eq!(node.stop().await.code(), Some(0));
    // The time of the drain, and some more on a busy machine.
    assert!(started.elapsed().as_secs() < 3, "{:?}", started.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_degrades_the_node_and_the_log_says_why() {
    let disk = Disk::default();
    let mut node = Node::start(disk.under(NodeOptions::default())).await;
    let mut subscriber = Socket::open(&node, "").await;
    subscriber.attach("news").await;
    assert_eq!(publish(&node, "before").await, 200);
    subscriber.message("news").await;

    disk.fill(true);
    assert_eq!(publish(&node, "refused").await, 503);
    assert_eq!(subscriber.message("news").await["messages"][0]["data"], "refused");
    wait_for_status(&node, "degraded").await;
    let folder = node.data_dir().join("store").display().to_string();
    let log = node.log();
    let line = log.lines().find(|line| line.contains("store write failed")).unwrap_or_default();
    assert!(line.contains("No space left on device") && line.contains(&folder), "{log}");

    disk.fill(false);
    node.restart().await;
    wait_for_status(&node, "ready").await;
    assert_eq!(publish(&node, "after").await, 200);
    assert_eq!(stored(&node).await, ["before", "after"]);
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn history_rule_changes_take_effect_while_disk_hangs() {
    let disk = Disk::default();
    let directory = |sign: &str, history: bool| {
        let rules = format!("pattern = \"*\"\nhistory = {history}");
        Directory::default().account("acme").channels(&rules).key(sign, "s", directory::ALL)
    };
    let node = Node::start(disk.under(NodeOptions::default().directory(directory("k", true), "s.k"))).await;
    disk.hang(true);
    for (sign, history) in [("k0", false), ("k1", true), ("k2", false), ("k3", true)] {
        node.replace_directory(&directory(sign, history));
        wait_until(SOON, sign, async || {
            let authorization = http::basic(&format!("s.{sign}"));
            let headers = [("authorization", &*authorization)];
            http::request(node.addr(), "GET", "/time", &headers, "").await.status == 200
        })
        .await;
    }
    disk.hang(false);
    wait_for_status(&node, "ready").await;
}
