//! Several restarts within the resume window, and changes of the directory meanwhile.

use std::time::Duration;

use fanfare_cluster_tests::waits::time_passes;
use fanfare_cluster_tests::{Directory, directory, http, wait_until};

use super::stored::{SOON, begin, resume};
use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn several_restarts_lose_nothing_either() {
    let mut node = node().await;
    let (mut missed, mut idle) = (begin(&node, "a").await, begin(&node, "idle").await);
    let mut published = 10;
    for _ in 0..4 {
        let mut publisher = Socket::open(&node, "").await;
        publish(&mut publisher, "a", published..published + 300).await;
        publish(&mut publisher, "other", 0..5).await;
        published += 300;
        node.restart().await;
    }
    resume(&node, &mut missed, "", published..published + 100).await;
    resume(&node, &mut idle, "", 10..20).await;
    // A position from between two restarts is resumed like any other.
    node.restart().await;
    resume(&node, &mut missed, "", published + 100..published + 110).await;
}

/// Only the missed messages were published after the position, on a channel with messages of an earlier incarnation.
#[tokio::test(flavor = "multi_thread")]
async fn channel_quiet_for_an_incarnation_is_resumed_after_it() {
    let mut node = node().await;
    publish(&mut Socket::open(&node, "").await, "a", 0..5).await;
    node.restart().await;
    let mut socket = Socket::open(&node, "").await;
    let serial = socket.attach("a").await["serial"].clone();
    cut(socket);
    publish(&mut Socket::open(&node, "").await, "a", 5..8).await;
    for round in 0..2 {
        let mut socket = Socket::open(&node, "").await;
        assert_eq!(attach_after(&mut socket, "a", &serial).await["resumed"], true, "{round}");
        let mut seen = Vec::new();
        while seen.len() < 3 {
            let frame = socket.find("what follows", |frame| frame["channel"] == "a").await;
            assert_eq!(frame["op"], 13, "{round}: {frame}");
            let messages = frame["messages"].as_array().expect("messages");
            seen.extend(messages.iter().map(|message| message["data"].clone()));
        }
        assert_eq!(seen, [5, 6, 7], "{round}");
        node.restart().await;
    }
}

/// The connection id over several restarts.
#[tokio::test(flavor = "multi_thread")]
async fn connection_is_resumed_after_several_restarts() {
    let mut node = node().await;
    let socket = Socket::open(&node, "").await;
    let (id, key) = (socket.connected["connectionId"].clone(), socket.connected["connectionKey"].clone());
    for _ in 0..3 {
        node.restart().await;
    }
    let query = format!("?resume={}", key.as_str().expect("a key"));
    let socket = Socket::open(&node, &query).await;
    assert_eq!((&socket.connected["resumed"], &socket.connected["connectionId"]), (&json!(true), &id));
}

/// An incarnation that lives longer than the resume window retires all earlier ones, whatever restarts follow.
#[tokio::test(flavor = "multi_thread")]
async fn long_incarnation_ends_positions_of_earlier_ones() {
    let mut node = Node::start(unlimited().limit("resume_window_ms", 1_000)).await;
    let follower = begin(&node, "a").await;
    node.restart().await;
    // Missed messages are kept for twice the window; the node checks the age every tenth of a second.
    time_passes(Duration::from_secs(3)).await;
    node.restart().await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn directory_change_that_keeps_history_rules_is_no_loss() {
    let before = Directory::default().account("acme").key("k", "s", directory::ALL);
    let mut node = Node::start(unlimited().directory(before.clone(), "s.k")).await;
    let mut follower = begin(&node, "a").await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 10..20).await;
    node.replace_directory(&before.clone().key("k2", "s", directory::ALL));
    wait_until(SOON, "the first change", async || is_known(&node, "s.k2").await).await;
    node.restart().await;
    node.replace_directory(&before.clone().key("k3", "s", directory::ALL).account("new"));
    wait_until(SOON, "the second change", async || is_known(&node, "s.k3").await).await;
    resume(&node, &mut follower, "", 20..30).await;
    node.restart().await;
    resume(&node, &mut follower, "", 30..40).await;
}

async fn is_known(node: &Node, key: &str) -> bool {
    http::request(node.addr(), "GET", "/time", &[("authorization", &http::basic(key))], "").await.status
        == 200
}

/// Resume from before an incarnation without history, and from one.
#[tokio::test(flavor = "multi_thread")]
async fn restart_without_store_makes_resume_false() {
    const STORE: &str = "FANFARE_STORE";
    let mut node = node().await;
    let follower = begin(&node, "a").await;
    node.set_environment(STORE, "none");
    node.restart().await;
    publish(&mut Socket::open(&node, "").await, "a", 10..11).await;
    let mut there = Socket::open(&node, "").await;
    let second = there.attach("b").await;
    node.set_environment(STORE, "embedded");
    node.restart().await;
    let mut socket = Socket::open(&node, "").await;
    publish(&mut socket, "a", 11..12).await;
    assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], false);
    assert_eq!(attach_after(&mut socket, "b", &second["serial"]).await["resumed"], false);
}

/// The loss is reported even if the node is killed right after the change, and its next incarnation has the former
/// directory again.
#[tokio::test(flavor = "multi_thread")]
async fn messages_delivered_without_history_make_resume_false() {
    let key = |directory: Directory, name: &str| directory.key(name, "s", directory::ALL);
    let before = key(Directory::default().account("acme"), "k");
    let without = Directory::default().account("acme").channels("pattern = \"*\"\nhistory = false");
    let mut node = Node::start(unlimited().directory(before.clone(), "s.k")).await;
    for round in 0..3 {
        let channel = format!("a{round}");
        let follower = begin(&node, &channel).await;
        let mut publisher = Socket::open(&node, "").await;
        let sign = format!("k{round}");
        node.replace_directory(&key(key(without.clone(), "k"), &sign));
        while !is_known(&node, &format!("s.{sign}")).await {
            tokio::task::yield_now().await;
        }
        publish(&mut publisher, &channel, 10..11).await;
        node.kill();
        node.replace_directory(&before);
        node.restart().await;
        let mut socket = Socket::open(&node, "").await;
        assert_eq!(attach_after(&mut socket, &channel, &follower.serial).await["resumed"], false);
    }
}
