//! History up to an attach and the deliveries after it have every message once.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fanfare_cluster_tests::socket::Socket;
use fanfare_cluster_tests::waits::pace;
use fanfare_cluster_tests::{Node, NodeOptions, history, http};
use fanfare_proto::path::encode_channel;
use serde_json::{Value, json};
use tokio::task::JoinSet;

/// Publishes 0, 1, 2 …, several under way at a time, until it is stopped; gives their count. At most 640 a second, so
/// that the history, which is read again and again, stays small enough for a slow machine.
async fn publish_on(mut publisher: Socket, channel: &str, stop: Arc<AtomicBool>) -> u64 {
    const UNDER_WAY: u64 = 32;
    let (mut sent, mut acked) = (0, 0);
    while !stop.load(Ordering::Relaxed) || acked < sent {
        if sent < acked + UNDER_WAY && !stop.load(Ordering::Relaxed) {
            publisher.start(json!({"op": 13, "channel": channel, "data": sent})).await;
            sent += 1;
            if sent.is_multiple_of(UNDER_WAY) {
                pace(Duration::from_millis(50)).await;
            }
            continue;
        }
        let ack = publisher.next().await;
        assert_eq!(ack["op"], 1, "{ack}");
        acked += 1;
    }
    sent
}

fn numbers<'a>(messages: impl IntoIterator<Item = &'a Value>) -> Vec<u64> {
    messages.into_iter().map(|message| message["data"].as_u64().expect("a number")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn list_and_live_join_while_a_publisher_runs() {
    let options = NodeOptions::default().limit("publishes_per_second", 0);
    let mut node = Node::start(options).await;
    let channel = "list and:live";
    // Messages of an earlier incarnation, which the serial of the attach does not name.
    let mut before = Socket::open(&node, "").await;
    for number in 1_000_000..1_000_010 {
        before.publish(channel, json!({"data": number})).await;
    }
    assert_eq!(node.stop().await.code(), Some(0));
    node.restart().await;

    let stop = Arc::new(AtomicBool::new(false));
    let mut publishers = JoinSet::new();
    publishers.spawn(publish_on(Socket::open(&node, "").await, channel, Arc::clone(&stop)));
    let mut watcher = Socket::open(&node, "").await;
    watcher.attach(channel).await;
    watcher.message(channel).await;
    for round in 0..30 {
        let mut reader = Socket::open(&node, "").await;
        let serial = reader.attach(channel).await["serial"].as_str().expect("a serial").to_owned();
        // Small pages too, so that publishes between two pages would shift them.
        let (direction, limit) = [("backwards", 1000), ("forwards", 1000), ("backwards", 97)][round % 3];
        let query = format!("direction={direction}&limit={limit}&until={}", encode_channel(&serial));
        let mut listed = history::read_all(node.addr(), &node.key(), channel, &query).await;
        if direction == "backwards" {
            listed.reverse();
        }
        let mut all = numbers(&listed);
        let of_before: Vec<u64> = (1_000_000..1_000_010).collect();
        assert_eq!(all[..10], of_before, "round {round}");
        all.drain(..10);
        for _ in 0..5 {
            all.extend(numbers(reader.message(channel).await["messages"].as_array().expect("messages")));
        }
        let expected: Vec<u64> = (0..all.len() as u64).collect();
        assert_eq!(all, expected, "round {round}: {} listed", listed.len());
    }
    stop.store(true, Ordering::Relaxed);
    let sent = publishers.join_next().await.expect("a publisher").expect("no panic");
    let mut late = Socket::open(&node, "").await;
    let serial = late.attach(channel).await["serial"].as_str().expect("a serial").to_owned();
    let listed =
        history::read_all(node.addr(), &node.key(), channel, &format!("until={}", encode_channel(&serial)))
            .await;
    assert_eq!(listed.len() as u64, sent + 10, "with nothing under way it is all of it");
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_serial_that_cannot_be_read_is_400() {
    let node = Node::start(NodeOptions::default()).await;
    let authorization = http::basic(&node.key());
    for until in ["", "x", "%00", "1795235000000", &"A".repeat(600)] {
        for path in ["history", "presence/history"] {
            let path = format!("/api/channels/a/{path}?until={until}");
            let answer =
                http::request(node.addr(), "GET", &path, &[("authorization", &authorization)], "").await;
            assert_eq!(answer.status, 400, "{path}: {:?}", answer.body);
            assert!(answer.error().contains("until"), "{:?}", answer.body);
        }
    }
    node.assert_well().await;
}
