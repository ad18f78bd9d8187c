//! Bounds of a resume: a lost connection resumes all messages since its loss and all that it had not read, however old;
//! any other position is bound by the window.

use std::time::{Duration, Instant};

use fanfare_cluster_tests::waits::time_passes;
use fanfare_cluster_tests::{Directory, directory, http, wait_until};

use super::stored::SOON;
use super::*;

async fn connections(node: &Node) -> u64 {
    let headers = [("authorization", &*http::basic(&node.key()))];
    let answer = http::request(node.addr(), "GET", "/api/connections/count", &headers, "").await;
    answer.json()["connections"].as_u64().expect("a count")
}

fn resuming(socket: &Socket) -> String {
    format!("?resume={}", socket.connected["connectionKey"].as_str().expect("a key"))
}

/// The window is counted from the loss of the connection, not from the age of its unread messages.
#[tokio::test(flavor = "multi_thread")]
async fn subscriber_lost_far_behind_resumes_with_all_messages() {
    let node = Node::start(unlimited().limit("resume_window_ms", 1_000)).await;
    let mut publisher = Socket::open(&node, "").await;
    publisher.attach("a").await;
    let before = publish(&mut publisher, "a", 0..5).await;
    let mut readers = Vec::new();
    for _ in 0..3 {
        let mut reader = Socket::open(&node, "").await;
        let follower = Follower::begin("a", &reader.attach("a").await);
        readers.push((reader, follower));
    }
    publish(&mut publisher, "a", 5..15).await;
    // The readers are stalled for longer than messages are kept in replay buffers.
    time_passes(Duration::from_secs(3)).await;
    let mut lost = Vec::new();
    for (reader, follower) in readers {
        lost.push((resuming(&reader), follower));
        cut(reader);
    }
    wait_until(SOON, "the node to notice", async || connections(&node).await == 1).await;

    let mut lost = lost.into_iter();
    let mut next = || lost.next().expect("one of three");
    let ((own, mut follower), (forging, _), (_, stranger)) = (next(), next(), next());
    let mut socket = Socket::open(&node, &own).await;
    assert_eq!(socket.connected["resumed"], true);
    assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], true);
    follower.read_to(&mut socket, 14).await;
    assert_eq!(follower.next, Some(15));

    let mut socket = Socket::open(&node, &forging).await;
    assert_eq!(socket.connected["resumed"], true);
    let answer = attach_after(&mut socket, "a", &before[2]).await;
    assert_eq!(answer["resumed"], false, "it was never let in to what was before its attach");
    let mut socket = Socket::open(&node, "").await;
    let answer = attach_after(&mut socket, "a", &stranger.serial).await;
    assert_eq!(answer["resumed"], false, "nobody knows who it was");
}

/// The node has not noticed the broken link when the client reconnects.
#[tokio::test(flavor = "multi_thread")]
async fn subscriber_far_behind_on_an_open_socket_resumes_with_all() {
    const SOCKETS: usize = 50;
    let node = Node::start(unlimited().limit("resume_window_ms", 1_000)).await;
    let mut publisher = Socket::open(&node, "").await;
    publisher.attach("a").await;
    let mut readers = Vec::new();
    for _ in 0..SOCKETS {
        let mut reader = Socket::open(&node, "").await;
        let follower = Follower::begin("a", &reader.attach("a").await);
        readers.push((reader, follower));
    }
    publish(&mut publisher, "a", 0..10).await;
    time_passes(Duration::from_secs(3)).await;
    for (reader, mut follower) in readers {
        let mut socket = Socket::open(&node, &resuming(&reader)).await;
        let answer = attach_after(&mut socket, "a", &follower.serial).await;
        assert_eq!((&socket.connected["resumed"], &answer["resumed"]), (&json!(true), &json!(true)));
        follower.read_to(&mut socket, 9).await;
    }
}

/// The connection is lost twice: messages that were unread after the first loss can also be resumed after the second.
#[tokio::test(flavor = "multi_thread")]
async fn subscriber_lost_again_before_reading_resumes_with_all() {
    let node = Node::start(unlimited().limit("resume_window_ms", 1_000)).await;
    let mut publisher = Socket::open(&node, "").await;
    publisher.attach("a").await;
    let mut socket = Socket::open(&node, "").await;
    let mut follower = Follower::begin("a", &socket.attach("a").await);
    publish(&mut publisher, "a", 0..10).await;
    for _ in 0..2 {
        time_passes(Duration::from_millis(2_500)).await;
        let query = resuming(&socket);
        cut(socket);
        wait_until(SOON, "the node to notice", async || connections(&node).await == 1).await;
        socket = Socket::open(&node, &query).await;
        assert_eq!(attach_after(&mut socket, "a", &follower.serial).await["resumed"], true);
    }
    follower.read_to(&mut socket, 9).await;
}

/// A client can forge a position, so a position reaches no further back than a rewind.
#[tokio::test(flavor = "multi_thread")]
async fn without_the_history_a_position_reaches_back_to_the_window() {
    const WINDOW: Duration = Duration::from_secs(4);
    let account = Directory::default().account("acme").key("all", "s", directory::ALL);
    let account = account.key("listen", "s", r#"{ "*" = ["subscribe"] }"#);
    for ring_bytes in [0, 1 << 20] {
        let options = unlimited().directory(account.clone(), "s.all").limit("ring_bytes", ring_bytes);
        let mut node = Node::start(options.limit("resume_window_ms", WINDOW.as_millis() as u64)).await;
        let mut publisher = Socket::open(&node, "").await;
        publisher.attach("a").await;
        let serials = publish(&mut publisher, "a", 0..3).await;
        let published = Instant::now();
        let ask = async |node: &Node, key: &str| {
            let mut socket = Socket::open_as(node, "", &http::basic(key)).await;
            (attach_after(&mut socket, "a", &serials[0]).await["resumed"].clone(), socket)
        };
        let (resumed, mut socket) = ask(&node, "s.listen").await;
        assert!(resumed == true || published.elapsed() > WINDOW, "within the window");
        if resumed == true {
            assert_eq!(socket.message("a").await["messages"][0]["data"], 1);
        }
        time_passes((WINDOW + Duration::from_millis(200)).saturating_sub(published.elapsed())).await;
        assert_eq!(ask(&node, "s.listen").await.0, false);
        let (resumed, _socket) = ask(&node, "s.all").await;
        assert!(resumed == true || published.elapsed() > 2 * WINDOW, "the history may be read anyway");

        let serials = publish(&mut publisher, "a", 3..6).await;
        node.restart().await;
        let restarted = Instant::now();
        let mut socket = Socket::open_as(&node, "", &http::basic("s.listen")).await;
        let resumed = attach_after(&mut socket, "a", &serials[0]).await["resumed"].clone();
        assert!(resumed == true || restarted.elapsed() > WINDOW, "counted from when the node is ready");
    }
}
