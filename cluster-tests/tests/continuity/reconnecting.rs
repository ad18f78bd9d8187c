//! A subscriber whose link is cut again and again while others publish as fast as they can.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

use super::*;

/// How long it goes on, in seconds; the environment may ask for longer.
const SECONDS: u64 = 20;

fn duration() -> Duration {
    let asked = std::env::var("FANFARE_CONTINUITY_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(asked.unwrap_or(SECONDS))
}

/// Random enough for moments: anywhere from 50 to 500 ms.
fn moment() -> Duration {
    let mut bytes = [0; 2];
    getrandom::fill(&mut bytes).expect("random bytes");
    Duration::from_millis(50 + u64::from(u16::from_be_bytes(bytes)) % 450)
}

/// Publishes numbers one after another, many under way at once, until told to stop; gives how many.
async fn flood(mut publisher: Socket, channel: &str, until: Instant) -> u64 {
    const UNDER_WAY: u64 = 200;
    let (mut sent, mut acked) = (0, 0);
    while acked < sent || Instant::now() < until {
        while sent < acked + UNDER_WAY && Instant::now() < until {
            publisher.start(json!({"op": 13, "channel": channel, "data": sent})).await;
            sent += 1;
        }
        if acked < sent {
            let frame = publisher.next().await;
            assert_eq!(frame["op"], 1, "{frame}");
            acked += 1;
        }
    }
    sent
}

#[tokio::test(flavor = "multi_thread")]
async fn every_message_is_seen_once_and_in_order() {
    // At this rate 4 MiB are half a second, which is no longer than a pause here.
    let node = Node::start(unlimited().limit("ring_bytes", 128 << 20)).await;
    let until = Instant::now() + duration();
    let publisher = Socket::open(&node, "").await;
    let mut socket = Socket::open(&node, "").await;
    let mut follower = Follower::begin("fast", &socket.attach("fast").await);
    let mut publishing = JoinSet::new();
    publishing.spawn(flood(publisher, "fast", until));
    follower.next = Some(0);
    let (mut resumed, mut lost) = (0, 0);
    while Instant::now() < until {
        let cut_at = Instant::now() + moment();
        while let Some(left) = cut_at.checked_duration_since(Instant::now()) {
            match socket.next_within(left).await {
                Ok(frame) => follower.take(&frame),
                Err(_) => break,
            }
        }
        cut(socket);
        if resumed % 4 == 3 {
            sleep(moment()).await;
        }
        socket = Socket::open(&node, "").await;
        let attached = attach_after(&mut socket, "fast", &follower.serial).await;
        follower.take(&attached);
        if attached["resumed"] == true { resumed += 1 } else { lost += 1 }
    }
    let sent = publishing.join_next().await.expect("a publisher").expect("it ends well");
    follower.read_to(&mut socket, sent - 1).await;
    println!("{sent} messages, resumed {resumed} times, lost {lost} times");
    assert!(resumed > 2 && lost == 0, "resumed {resumed}, lost {lost}");
}
