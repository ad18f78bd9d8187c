//! Resume from a position on one running node.

use std::time::Duration;

use fanfare_cluster_tests::SOON;
use fanfare_cluster_tests::waits::pace;
use tokio::task::JoinSet;

use super::*;

#[tokio::test(flavor = "multi_thread")]
async fn missed_messages_are_replayed_once_and_join_live_ones() {
    let node = node().await;
    for format in ["json", "msgpack"] {
        let query = format!("?format={format}");
        let (mut publisher, mut socket) = (Socket::open(&node, "").await, Socket::open(&node, &query).await);
        let attached = socket.attach(format).await;
        assert_eq!(attached["resumed"], false);
        let mut follower = Follower::begin(format, &attached);
        publish(&mut publisher, format, 0..10).await;
        follower.read_to(&mut socket, 9).await;
        cut(socket);
        publish(&mut publisher, format, 10..3_000).await;
        let mut socket = Socket::open(&node, &query).await;
        let attached = attach_after(&mut socket, format, &follower.serial).await;
        assert_eq!((&attached["resumed"], &attached["serial"]), (&json!(true), &follower.serial));
        publish(&mut publisher, format, 3_000..3_100).await;
        follower.read_to(&mut socket, 3_099).await;
        let other = socket.attach("other").await;
        assert_eq!(other["resumed"], false);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_serial_of_any_ack_is_a_position() {
    let node = node().await;
    let mut publisher = Socket::open(&node, "").await;
    publisher.attach("a").await;
    let serials = publish(&mut publisher, "a", 0..20).await;
    for (number, serial) in serials.iter().enumerate() {
        let mut socket = Socket::open(&node, "").await;
        let attached = attach_after(&mut socket, "a", serial).await;
        assert_eq!(attached["resumed"], true, "{number}");
        let mut follower = Follower::begin("a", &attached);
        follower.next = Some(number as u64 + 1);
        if number < 19 {
            follower.read_to(&mut socket, 19).await;
            assert_eq!(&follower.serial, &serials[19]);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn unusable_serial_gets_resumed_false() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    let foreign = fanfare_proto::serial::Serial::single(7, 1).to_string();
    let long = "A".repeat(513);
    for serial in ["", "nonsense", "0", &foreign, &long] {
        let attached = attach_after(&mut socket, "a", &json!(serial)).await;
        assert_eq!(attached["resumed"], false, "{serial}");
        socket.ask(json!({"op": 10, "channel": "a"})).await;
    }
    let mut publisher = Socket::open(&node, "").await;
    let early = publish(&mut publisher, "b", 0..3).await;
    socket.attach("b").await;
    let mut other = Socket::open(&node, "").await;
    let attached = attach_after(&mut other, "b", &json!(format!("{}0", early[2].as_str().unwrap()))).await;
    assert_eq!(attached["resumed"], false, "a position ahead of the channel");
}

#[tokio::test(flavor = "multi_thread")]
async fn replay_skips_own_messages_of_a_client_without_echo() {
    let node = node().await;
    let mut socket = Socket::open(&node, "?echo=false").await;
    let mut other = Socket::open(&node, "").await;
    let attached = other.attach("a").await;
    for number in 0..6 {
        let publisher = if number % 2 == 0 { &mut socket } else { &mut other };
        publisher.publish("a", json!({"data": number})).await;
    }
    let attached = attach_after(&mut socket, "a", &attached["serial"]).await;
    assert_eq!(attached["resumed"], true);
    for number in [1, 3, 5] {
        assert_eq!(socket.message("a").await["messages"][0]["data"], number);
    }
}

/// The missed messages are more than an outbox holds, and another channel goes on meanwhile.
#[tokio::test(flavor = "multi_thread")]
async fn replay_larger_than_outbox_goes_at_the_pace_of_the_socket() {
    let options = unlimited().limit("outbox_bytes", 200_000).limit("ring_bytes", 64 << 20);
    let node = Node::start(options).await;
    let mut publisher = Socket::open(&node, "").await;
    let attached = publisher.attach("large").await;
    publisher.ask(json!({"op": 10, "channel": "large"})).await;
    let text = "x".repeat(60_000);
    for number in 0..200 {
        let draft = json!({"name": text[..200], "data": number, "extras": {"text": text}});
        publisher.publish("large", draft).await;
    }
    let mut socket = Socket::open(&node, "").await;
    socket.attach("small").await;
    let answer = attach_after(&mut socket, "large", &attached["serial"]).await;
    assert_eq!(answer["resumed"], true);
    publisher.publish("small", json!({"data": "live"})).await;
    let mut follower = Follower::begin("large", &answer);
    follower.next = Some(0);
    let mut live = 0;
    while follower.next != Some(200) || live == 0 {
        let frame = socket.next().await;
        live += usize::from(frame["op"] == 13 && frame["channel"] == "small");
        follower.take(&frame);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_detach_ends_a_replay() {
    let node = node().await;
    let mut publisher = Socket::open(&node, "").await;
    let attached = publisher.attach("a").await;
    publish(&mut publisher, "a", 0..5_000).await;
    let mut socket = Socket::open(&node, "").await;
    let attach = json!({"op": 8, "channel": "a", "serial": attached["serial"]});
    socket.send(&attach).await;
    socket.ask(json!({"op": 10, "channel": "a"})).await;
    let again = attach_after(&mut socket, "a", &attached["serial"]).await;
    assert_eq!(again["resumed"], true);
    let mut follower = Follower::begin("a", &again);
    // The messages of the first replay came before the answer to the detach.
    let mut frames = vec![socket.next().await];
    while frames.last().is_some_and(|frame| frame["messages"][99]["data"] != 4_999) {
        frames.push(socket.next().await);
    }
    let begun = frames.iter().rposition(|frame| frame["messages"][0]["data"] == 0).expect("all of it");
    frames[begun..].iter().for_each(|frame| follower.take(frame));
    assert_eq!(follower.next, Some(5_000));
}

/// The socket of a slow reader becomes writable only after a good part of the kernel's buffer is read. That takes
/// longer than the outbox timeout.
#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_that_goes_on_reading_is_not_given_up() {
    let node = Node::start(unlimited().limit("outbox_stall_ms", 700).limit("ring_bytes", 256 << 20)).await;
    let mut publisher = Socket::open(&node, "").await;
    let attached = publisher.attach("large").await;
    publisher.ask(json!({"op": 10, "channel": "large"})).await;
    let text = "x".repeat(60_000);
    for number in 0..400 {
        publisher.publish("large", json!({"data": number, "extras": {"text": text}})).await;
    }
    let mut socket = Socket::open(&node, "").await;
    let answer = attach_after(&mut socket, "large", &attached["serial"]).await;
    let mut follower = Follower::begin("large", &answer);
    follower.next = Some(0);
    for _ in 0..60 {
        follower.take(&socket.next().await);
        pace(Duration::from_millis(100)).await;
    }
    follower.read_to(&mut socket, 399).await;
}

/// A presence event during a replay has the position of the replay, not that of the channel.
#[tokio::test(flavor = "multi_thread")]
async fn the_serial_of_a_presence_event_skips_nothing() {
    for ring_bytes in [256 << 20, 2_000] {
        let node = Node::start(unlimited().limit("ring_bytes", ring_bytes)).await;
        let mut publisher = Socket::open(&node, "").await;
        let attached = publisher.attach("a").await;
        publisher.ask(json!({"op": 10, "channel": "a"})).await;
        let text = "x".repeat(16_000);
        for number in 0..1_000 {
            publisher
                .start(json!({"op": 13, "channel": "a", "data": number, "extras": {"text": text}}))
                .await;
        }
        for _ in 0..1_000 {
            assert_eq!(publisher.next().await["op"], 1);
        }
        let mut members = JoinSet::new();
        members.spawn(async move {
            for number in 0_u64.. {
                let update =
                    json!({"op": 12, "channel": "a", "action": "update", "clientId": "m", "data": number});
                assert_eq!(publisher.ask(update).await["op"], 1);
            }
        });
        let (mut events, end) = (0, tokio::time::Instant::now() + SOON);
        while events < 20 {
            let mut follower = Follower::begin("a", &attached);
            follower.next = Some(0);
            while follower.next != Some(1_000) {
                let mut socket = Socket::open(&node, "").await;
                assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], true);
                loop {
                    let frame = socket.next().await;
                    assert!(
                        tokio::time::Instant::now() < end,
                        "{:?} is next and does not come",
                        follower.next
                    );
                    follower.take(&frame);
                    let is_event = frame["op"] == 12;
                    events += usize::from(is_event);
                    if is_event && events % 3 == 0 || follower.next == Some(1_000) {
                        break;
                    }
                }
            }
        }
    }
}
