//! Resume from a position before the replay buffer, or from before a restart of the node.

use std::time::Duration;

use fanfare_cluster_tests::waits::{throughout, time_passes};
use fanfare_cluster_tests::{Directory, NodeOptions, directory, history, http, wait_until};

use super::*;

pub(crate) const SOON: Duration = Duration::from_secs(10);

/// Gives options of a node whose replay buffers hold only the last few messages.
fn forgetful() -> NodeOptions {
    unlimited().limit("ring_bytes", 2_000)
}

/// Gives a subscriber that has received 0..10 and lost its connection, on a channel without other subscribers.
pub(crate) async fn begin(node: &Node, channel: &str) -> Follower {
    let (mut publisher, mut socket) = (Socket::open(node, "").await, Socket::open(node, "").await);
    let mut follower = Follower::begin(channel, &socket.attach(channel).await);
    publish(&mut publisher, channel, 0..10).await;
    follower.read_to(&mut socket, 9).await;
    cut(socket);
    follower
}

/// Resumes with the follower's position and reads to the last of `numbers`, which are published meanwhile.
pub(crate) async fn resume(node: &Node, follower: &mut Follower, query: &str, numbers: std::ops::Range<u64>) {
    let mut publisher = Socket::open(node, "").await;
    let mut socket = Socket::open(node, query).await;
    let channel = follower.channel.clone();
    let attached = attach_after(&mut socket, &channel, &follower.serial).await;
    assert_eq!(attached["resumed"], true, "{attached}");
    let last = numbers.end - 1;
    publish(&mut publisher, &channel, numbers).await;
    follower.read_to(&mut socket, last).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_beyond_replay_buffer_replays_from_store() {
    let node = Node::start(forgetful()).await;
    for format in ["json", "msgpack"] {
        let mut follower = begin(&node, format).await;
        let mut publisher = Socket::open(&node, "").await;
        publish(&mut publisher, format, 10..3_000).await;
        resume(&node, &mut follower, &format!("?format={format}"), 3_000..3_200).await;
        // The position after the replay can be resumed like any other.
        resume(&node, &mut follower, "", 3_200..3_210).await;
    }
}

/// A replayed message equals the published one, byte for byte, except for the position.
#[tokio::test(flavor = "multi_thread")]
async fn a_stored_message_is_what_it_was() {
    let node = Node::start(forgetful()).await;
    let (mut publisher, mut live) =
        (Socket::open(&node, "?clientId=%C3%A4").await, Socket::open(&node, "").await);
    let attached = live.attach("a").await;
    let drafts = [
        json!({"name": "a\"b", "data": {"z": 1.5, "a": [null, "é"]}, "extras": {"headers": {"x": 1}}}),
        json!({"data": null, "id": "given-1"}),
        json!({}),
    ];
    let ack = publisher.ask(json!({"op": 13, "channel": "a", "messages": drafts})).await;
    assert_eq!(ack["op"], 1);
    let seen = live.message("a").await["messages"].as_array().expect("messages").clone();
    publish(&mut publisher, "a", 0..100).await;
    let mut late = Socket::open(&node, "").await;
    let again = attach_after(&mut late, "a", &attached["serial"]).await;
    assert_eq!((&again["resumed"], &again["serial"]), (&json!(true), &attached["serial"]));
    for message in &seen {
        let frame = late.message("a").await;
        assert_eq!(frame["messages"], json!([message]));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn own_messages_are_not_given_again_from_the_store_either() {
    let node = Node::start(forgetful()).await;
    let mut other = Socket::open(&node, "").await;
    let mut socket = Socket::open(&node, "?echo=false").await;
    let attached = other.attach("a").await;
    for number in 0..40 {
        let publisher = if number % 2 == 0 { &mut socket } else { &mut other };
        publisher.publish("a", json!({"data": number})).await;
    }
    let attached = attach_after(&mut socket, "a", &attached["serial"]).await;
    assert_eq!(attached["resumed"], true);
    for number in (1..40).step_by(2) {
        assert_eq!(socket.message("a").await["messages"][0]["data"], number);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restart_loses_nothing_that_was_acknowledged() {
    for is_killed in [true, false] {
        let mut node = node().await;
        let (mut missed, mut idle) = (begin(&node, "a").await, begin(&node, "idle").await);
        let mut publisher = Socket::open(&node, "").await;
        publish(&mut publisher, "a", 10..1_000).await;
        if !is_killed {
            node.stop().await;
        }
        node.restart().await;
        let mut publisher = Socket::open(&node, "").await;
        publish(&mut publisher, "a", 1_000..1_500).await;
        publish(&mut publisher, "other", 0..5).await;
        publish(&mut publisher, "a", 1_500..2_000).await;
        resume(&node, &mut missed, "", 2_000..2_100).await;
        resume(&node, &mut missed, "", 2_100..2_110).await;
        resume(&node, &mut idle, "", 10..20).await;
        resume(&node, &mut idle, "", 20..30).await;
    }
}

/// The connection id and the position in a channel, both over a restart.
#[tokio::test(flavor = "multi_thread")]
async fn connection_and_channel_are_resumed_after_a_restart() {
    let mut node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let mut follower = Follower::begin("a", &socket.attach("a").await);
    let (id, key) = (socket.connected["connectionId"].clone(), socket.connected["connectionKey"].clone());
    publish(&mut socket, "a", 0..5).await;
    follower.read_to(&mut socket, 4).await;
    node.restart().await;
    let query = format!("?resume={}", key.as_str().expect("a key"));
    let mut socket = Socket::open(&node, &query).await;
    assert_eq!((&socket.connected["resumed"], &socket.connected["connectionId"]), (&json!(true), &id));
    assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], true);
    publish(&mut socket, "a", 5..9).await;
    follower.read_to(&mut socket, 8).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_after_a_restart_and_the_window_gets_resumed_false() {
    let mut node = Node::start(unlimited().limit("resume_window_ms", 200)).await;
    let follower = begin(&node, "a").await;
    node.restart().await;
    // Missed messages are kept for twice the window.
    time_passes(Duration::from_millis(500)).await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], false);
}

/// A client whose missed messages are not in the store does not get `resumed: true`.
#[tokio::test(flavor = "multi_thread")]
async fn channel_without_history_resumes_from_its_replay_buffer() {
    let account = Directory::default().account("acme").channels("pattern = \"off:*\"\nhistory = false");
    let directory = account.key("k", "s", directory::ALL);
    let mut node = Node::start(forgetful().directory(directory, "s.k")).await;
    let follower = begin(&node, "off:a").await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "off:a", 10..200).await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(attach_after(&mut socket, "off:a", &follower.serial).await["resumed"], false);
    node.restart().await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(attach_after(&mut socket, "off:a", &follower.serial).await["resumed"], false);
}

#[tokio::test(flavor = "multi_thread")]
async fn history_off_since_the_restart_gets_resumed_false() {
    let directory =
        |rule: &str| Directory::default().account("acme").channels(rule).key("k", "s", directory::ALL);
    let on = "pattern = \"a\"\nhistory = true";
    let mut node = Node::start(unlimited().directory(directory(on), "s.k")).await;
    let follower = begin(&node, "a").await;
    node.restart().await;
    node.replace_directory(&directory("pattern = \"a\"\nhistory = false"));
    wait_until(SOON, "history is off", async || !has_history(&node).await).await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 10..20).await;
    node.replace_directory(&directory(on));
    wait_until(SOON, "history is on again", async || has_history(&node).await).await;
    let mut socket = Socket::open(&node, "").await;
    assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], false);
}

/// The former incarnation delivered messages while the channel kept no history. They are not in the store, whenever
/// history was turned on again.
#[tokio::test(flavor = "multi_thread")]
async fn history_off_in_previous_incarnation_gets_resumed_false() {
    let directory =
        |rule: &str| Directory::default().account("acme").channels(rule).key("k", "s", directory::ALL);
    let (on, off) = ("pattern = \"a\"\nhistory = true", "pattern = \"a\"\nhistory = false");
    for ends_while_running in [false, true] {
        let mut node = Node::start(unlimited().directory(directory(on), "s.k")).await;
        let follower = begin(&node, "a").await;
        node.replace_directory(&directory(off));
        wait_until(SOON, "history is off", async || !has_history(&node).await).await;
        let mut publisher = Socket::open(&node, "").await;
        publish(&mut publisher, "a", 10..20).await;
        // The node checks for changes every tenth of a second.
        time_passes(Duration::from_secs(1)).await;
        if ends_while_running {
            node.replace_directory(&directory(on));
            wait_until(SOON, "history is on again", async || has_history(&node).await).await;
        } else {
            node.kill();
            node.replace_directory(&directory(on));
        }
        node.restart().await;
        let mut socket = Socket::open(&node, "").await;
        assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], false);
    }
}

/// Whether messages that were published before can be read.
async fn has_history(node: &Node) -> bool {
    !history::read_all(node.addr(), &node.key(), "a", "").await.is_empty()
}

/// History up to an attach and the deliveries after it together have every message, also over a restart.
#[tokio::test(flavor = "multi_thread")]
async fn list_and_live_join_over_a_restart() {
    let mut node = node().await;
    let mut follower = begin(&node, "a").await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 10..15).await;
    node.restart().await;
    let mut publisher = Socket::open(&node, "").await;
    publish(&mut publisher, "a", 15..20).await;
    let mut socket = Socket::open(&node, "").await;
    let attached = attach_after(&mut socket, "a", &follower.serial).await;
    follower.read_to(&mut socket, 19).await;
    assert_eq!(listed_until(&node, &attached["serial"]).await, (0..10).collect::<Vec<_>>());
    let mut socket = Socket::open(&node, "").await;
    let attached = socket.ask(json!({"op": 8, "channel": "a", "rewind": "8"})).await;
    follower.next = Some(12);
    follower.read_to(&mut socket, 19).await;
    assert_eq!(listed_until(&node, &attached["serial"]).await, (0..12).collect::<Vec<_>>());
}

async fn listed_until(node: &Node, serial: &Value) -> Vec<u64> {
    let serial = serial.as_str().expect("a serial");
    let query = format!("direction=forwards&until={}", fanfare_proto::path::encode_channel(serial));
    let listed = history::read_all(node.addr(), &node.key(), "a", &query).await;
    listed.iter().map(|message| message["data"].as_u64().expect("a number")).collect()
}

/// Store reads of one account do not delay the clients of another.
#[tokio::test(flavor = "multi_thread")]
async fn an_account_waits_for_its_own_questions_alone() {
    let directory = Directory::default().account("one").key("one", "s", directory::ALL);
    let directory = directory.account("two").key("two", "s", directory::ALL);
    let mut node = Node::start(unlimited().directory(directory, "s.one")).await;
    let mut publisher = Socket::open(&node, "").await;
    let serial = publisher.attach("a").await["serial"].clone();
    for number in 0..200 {
        publish(&mut publisher, &format!("c{number}"), 0..1).await;
    }
    node.restart().await;
    let mut flood = Vec::new();
    for _ in 0..20 {
        let mut socket = Socket::open(&node, "").await;
        for number in 0..200 {
            let attach = json!({"op": 8, "channel": format!("c{number}"), "serial": serial});
            socket.start(attach).await;
        }
        flood.push(socket);
    }
    let mut other = Socket::open_as(&node, "", &http::basic("s.two")).await;
    let begun = tokio::time::Instant::now();
    assert_eq!(attach_after(&mut other, "b", &serial).await["resumed"], true);
    let alone = begun.elapsed();
    let last = flood.last_mut().expect("sockets");
    for _ in 0..200 {
        last.find("an answer", |frame| frame["op"] == 9).await;
    }
    let all = begun.elapsed();
    assert!(alone < all / 4, "{alone:?} of {all:?}");
}

/// A slow reader takes no more memory for a long replay than its socket and its outbox hold.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_replay_waits_for_its_reader() {
    let node = Node::start(forgetful()).await;
    let mut follower = begin(&node, "large").await;
    let mut publisher = Socket::open(&node, "").await;
    let text = "x".repeat(30_000);
    for number in 10..2_010 {
        let draft = json!({"name": "n", "data": number, "extras": {"text": text}});
        publisher.start(json!({"op": 13, "channel": "large", "messages": [draft]})).await;
        if number % 50 == 9 {
            for _ in 0..50 {
                assert_eq!(publisher.next().await["op"], 1);
            }
        }
    }
    let before = node.resident_bytes();
    let mut sockets = Vec::new();
    for _ in 0..20 {
        let mut socket = Socket::open(&node, "").await;
        assert_eq!(attach_after(&mut socket, "large", &follower.serial).await["resumed"], true);
        sockets.push(socket);
    }
    throughout(Duration::from_millis(500), async || {
        let grown = node.resident_bytes().saturating_sub(before);
        // A whole replay would take 60 MB for each reader.
        assert!(grown < 100 << 20, "{grown} bytes for 20 readers that do not read");
    })
    .await;
    let mut socket = sockets.pop().expect("one of them");
    follower.read_to(&mut socket, 2_009).await;
}

/// All clients reconnect at once after a restart. Each has missed messages on some channels and none on others.
#[tokio::test(flavor = "multi_thread")]
async fn connection_storm_after_a_restart_is_resumed() {
    const SOCKETS: usize = 200;
    const CHANNELS: usize = 10;
    let mut node = node().await;
    let mut sockets = Vec::new();
    for _ in 0..SOCKETS {
        sockets.push(Socket::open(&node, "").await);
    }
    let mut serials = Vec::new();
    for (place, socket) in sockets.iter_mut().enumerate() {
        for channel in 0..CHANNELS {
            let attached = socket.attach(&format!("{}:{channel}", place % 50)).await;
            serials.push(attached["serial"].clone());
        }
    }
    let mut publisher = Socket::open(&node, "").await;
    drop(sockets);
    for group in 0..50 {
        publish(&mut publisher, &format!("{group}:0"), 0..3).await;
    }
    node.restart().await;
    let mut sockets = Vec::new();
    for place in 0..SOCKETS {
        let mut socket = Socket::open(&node, "").await;
        for channel in 0..CHANNELS {
            let serial = &serials[place * CHANNELS + channel];
            let name = format!("{}:{channel}", place % 50);
            socket.start(json!({"op": 8, "channel": name, "serial": serial})).await;
        }
        sockets.push(socket);
    }
    for socket in &mut sockets {
        let (mut attached, mut missed) = (0, 0);
        while attached < CHANNELS || missed < 3 {
            let frame = socket.next().await;
            match frame["op"].as_u64() {
                Some(9) => {
                    assert_eq!(frame["resumed"], true, "{frame}");
                    attached += 1;
                }
                Some(13) => {
                    assert_eq!(frame["messages"][0]["data"], missed);
                    missed += 1;
                }
                _ => {}
            }
        }
    }
}
