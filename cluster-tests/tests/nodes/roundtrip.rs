//! `fanfare roundtrip` tells whether messages pass between nodes.

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::command::RunningCommand;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions};

#[tokio::test(flavor = "multi_thread")]
async fn roundtrip_is_printed_for_each_pair_of_linked_nodes() {
    let mut cluster = Cluster::linked(2).await;
    let nodes = cluster.nodes();
    let [first, second] = [&nodes[0], &nodes[1]].map(|node| node.addr().to_string());
    let (url, key) = (nodes[0].url(), nodes[0].key());
    let mut asking = RunningCommand::start(&[
        "roundtrip",
        "demo",
        "--url",
        &url,
        "--key",
        &key,
        "--through",
        &first,
        "--through",
        &second,
    ]);
    let lines = asking.wait_for_stdout(6).await;
    assert_eq!(asking.ended().await.code(), Some(0));
    for (block, from) in lines.chunks(3).zip([&first, &second]) {
        assert!(block[0].starts_with(&format!("published through {from}: acknowledged after ")), "{lines:?}");
        for (line, to) in block[1..].iter().zip([&first, &second]) {
            assert!(line.starts_with(&format!("  received through {to} after ")), "{lines:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nodes_that_are_apart_are_a_failure() {
    let directory = || Directory::default().account("acme").key("k1", "secret", ALL);
    let node = async || Node::start(NodeOptions::default().directory(directory(), "secret.k1")).await;
    let (first, second) = (node().await, node().await);
    let [one, other] = [&first, &second].map(|node| node.addr().to_string());
    let url = first.url();
    let key = ["roundtrip", "demo", "--url", &url, "--key", "secret.k1"];
    let mut refused = RunningCommand::start(&[&key[..], &["--through", &one, "--through", &other]].concat());
    refused
        .wait_for_stderr(&format!("published through {one}: not received through {other} within"), 0)
        .await;
    assert_eq!(refused.ended().await.code(), Some(1));
}
