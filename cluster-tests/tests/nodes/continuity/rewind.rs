//! An attach with rewind begins with messages that were published before it.

use std::time::Duration;

use fanfare_cluster_tests::waits::time_passes;
use fanfare_cluster_tests::{Directory, directory, history, http};
use tokio::task::JoinSet;

use super::*;

async fn attach_back(socket: &mut Socket, channel: &str, rewind: &str) -> Value {
    let attached = socket.ask(json!({"op": 8, "channel": channel, "rewind": rewind})).await;
    assert_eq!((&attached["op"], &attached["resumed"]), (&json!(9), &json!(false)), "{attached}");
    attached
}

/// Reads the data of the next `count` messages of the channel.
async fn numbers(socket: &mut Socket, channel: &str, count: usize) -> Vec<u64> {
    let mut numbers = Vec::new();
    while numbers.len() < count {
        let frame = socket.message(channel).await;
        let messages = frame["messages"].as_array().expect("messages");
        numbers.extend(messages.iter().map(|message| message["data"].as_u64().expect("a number")));
    }
    numbers
}

/// A rewind reads the store if no client was attached, and else the replay buffer.
#[tokio::test(flavor = "multi_thread")]
async fn the_last_messages_come_first_and_then_what_follows() {
    let node = node().await;
    let mut publisher = Socket::open(&node, "").await;
    for (channel, is_listened_to) in [("quiet", false), ("busy", true)] {
        if is_listened_to {
            publisher.attach(channel).await;
        }
        publish(&mut publisher, channel, 0..250).await;
        for (rewind, first) in [("1", 249), ("10", 240), ("100", 150), ("5m", 150)] {
            let mut socket = Socket::open(&node, "").await;
            let attached = attach_back(&mut socket, channel, rewind).await;
            assert!(attached.get("warning").is_none(), "{attached}");
            let seen = numbers(&mut socket, channel, 250 - first).await;
            assert_eq!(seen, (first as u64..250).collect::<Vec<_>>(), "{channel} {rewind}");
            publisher.publish("marker", json!({})).await;
            socket.publish(channel, json!({"data": 1_000})).await;
            assert_eq!(numbers(&mut socket, channel, 1).await, [1_000]);
            // Restores the last messages for the next round.
            publish(&mut publisher, channel, 150..250).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rewind_of_an_empty_or_short_channel_gives_what_it_has() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let attached = attach_back(&mut socket, "empty", "10").await;
    assert!(attached.get("warning").is_none());
    socket.publish("empty", json!({"data": 7})).await;
    assert_eq!(numbers(&mut socket, "empty", 1).await, [7]);
    publish(&mut socket, "few", 0..3).await;
    attach_back(&mut socket, "few", "10").await;
    socket.publish("few", json!({"data": 3})).await;
    assert_eq!(numbers(&mut socket, "few", 4).await, [0, 1, 2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn rewind_by_time_reaches_back_exactly_that_far() {
    let node = node().await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 0..5).await;
    time_passes(Duration::from_millis(1_500)).await;
    publish(&mut publisher, "a", 5..8).await;
    let mut socket = Socket::open(&node, "").await;
    attach_back(&mut socket, "a", "1s").await;
    assert_eq!(numbers(&mut socket, "a", 3).await, [5, 6, 7]);
    let mut socket = Socket::open(&node, "").await;
    attach_back(&mut socket, "a", "1m").await;
    assert_eq!(numbers(&mut socket, "a", 8).await, (0..8).collect::<Vec<_>>());
}

/// A client loses its connection in the middle of a rewind, and resumes the rest from its last position.
#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_is_resumed_where_it_was_cut() {
    let mut node = node().await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 0..60).await;
    for is_restarted in [false, true] {
        if is_restarted {
            node.restart().await;
        }
        let mut socket = Socket::open(&node, "").await;
        let mut follower = Follower::begin("a", &attach_back(&mut socket, "a", "50").await);
        follower.read_to(&mut socket, 29).await;
        cut(socket);
        let mut socket = Socket::open(&node, "").await;
        assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], true);
        follower.read_to(&mut socket, 59).await;
        cut(socket);
        // The client has all messages of the earlier incarnation, so its serial names only the present one.
        let mut socket = Socket::open(&node, "").await;
        let attached = attach_after(&mut socket, "a", &follower.serial).await;
        assert_eq!(attached["resumed"], true);
        let own = socket.ask(json!({"op": 8, "channel": "b"})).await["serial"].clone();
        let incarnation_of =
            |serial: &Value| serial.as_str().and_then(|text| text.split('.').next()).map(str::to_owned);
        assert_eq!(incarnation_of(&follower.serial), incarnation_of(&own));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rewind_during_publishes_has_no_gap_and_no_repeat() {
    let node = Node::start(unlimited().limit("ring_bytes", 20_000)).await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 0..500).await;
    let mut publishing = JoinSet::new();
    publishing.spawn(async move { publish(&mut publisher, "a", 500..20_000).await.len() });
    for rewind in ["1", "37", "100", "10s"].into_iter().cycle().take(40) {
        let mut socket = Socket::open(&node, "").await;
        let mut follower = Follower::begin("a", &attach_back(&mut socket, "a", rewind).await);
        let first = socket.message("a").await;
        follower.take(&first);
        let begun = first["messages"][0]["data"].as_u64().expect("a number");
        follower.read_to(&mut socket, ((begun / 100) * 100 + 299).min(19_999)).await;
        if publishing.try_join_next().is_some() {
            break;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rewind_without_history_capability_is_cut_to_window() {
    cut_to_the_window(false).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rewind_is_cut_to_window_with_older_messages_in_memory() {
    cut_to_the_window(true).await;
}

async fn cut_to_the_window(is_recent: bool) {
    let account = Directory::default().account("acme").key("all", "s", directory::ALL);
    let directory = account.key("sub", "s", r#"{ "*" = ["subscribe"] }"#);
    let node = Node::start(unlimited().limit("resume_window_ms", 1_000).directory(directory, "s.all")).await;
    let mut publisher = Socket::open(&node, "").await;
    if is_recent {
        Socket::open(&node, "").await.attach("a").await;
    }
    publish(&mut publisher, "a", 0..5).await;
    time_passes(Duration::from_millis(1_500)).await;
    publish(&mut publisher, "a", 5..8).await;
    for (rewind, is_warned) in [("1s", false), ("1m", true), ("5", true), ("3", false)] {
        let authorization = http::basic("s.sub");
        let mut socket = Socket::open_as(&node, "", &authorization).await;
        let attached = attach_back(&mut socket, "a", rewind).await;
        assert_eq!(attached["warning"].is_string(), is_warned, "{rewind}: {attached}");
        assert_eq!(numbers(&mut socket, "a", 3).await, [5, 6, 7], "{rewind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn rewind_without_history_gives_recent_messages() {
    let account = Directory::default().account("acme").channels("pattern = \"off:*\"\nhistory = false");
    let node = Node::start(unlimited().directory(account.key("k", "s", directory::ALL), "s.k")).await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "off:a", 0..5).await;
    publisher.attach("off:a").await;
    publish(&mut publisher, "off:a", 5..9).await;
    for (rewind, is_warned) in [("2", false), ("9", true)] {
        let mut socket = Socket::open(&node, "").await;
        let attached = attach_back(&mut socket, "off:a", rewind).await;
        assert_eq!(attached["warning"].is_string(), is_warned, "{attached}");
        let count = if is_warned { 4 } else { 2 };
        assert_eq!(numbers(&mut socket, "off:a", count).await, (9 - count as u64..9).collect::<Vec<_>>());
    }
}

/// A rewind delivers messages again without publishing them again.
#[tokio::test(flavor = "multi_thread")]
async fn a_rewind_is_not_stored() {
    let node = node().await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 0..5).await;
    for _ in 0..3 {
        let mut socket = Socket::open(&node, "").await;
        attach_back(&mut socket, "a", "5").await;
        assert_eq!(numbers(&mut socket, "a", 5).await, [0, 1, 2, 3, 4]);
    }
    assert_eq!(history::read_all(node.addr(), &node.key(), "a", "").await.len(), 5);
}
