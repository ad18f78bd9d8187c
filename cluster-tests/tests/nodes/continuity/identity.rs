//! Connection id of a client over its sockets.

use std::time::Duration;

use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::waits::time_passes;
use fanfare_cluster_tests::{Directory, NodeOptions, http};

use super::*;

fn resume_of(socket: &Socket) -> String {
    format!("resume={}", socket.connected["connectionKey"].as_str().expect("a key"))
}

fn id_of(socket: &Socket) -> &Value {
    &socket.connected["connectionId"]
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connection_is_resumed_with_its_connection_id() {
    let node = node().await;
    let first = Socket::open(&node, "?clientId=ann").await;
    assert_eq!(first.connected["resumed"], false);
    let (id, resume) = (id_of(&first).clone(), resume_of(&first));
    cut(first);
    let second = Socket::open(&node, &format!("?clientId=ann&{resume}&format=msgpack")).await;
    assert_eq!((id_of(&second), &second.connected["resumed"]), (&id, &json!(true)));
    assert_ne!(resume_of(&second), resume);
    let mut third = Socket::open(&node, &format!("?clientId=ann&{}", resume_of(&second))).await;
    assert_eq!(id_of(&third), &id);
    third.attach("a").await;
    third.publish("a", json!({"data": 1})).await;
    assert_eq!(third.message("a").await["messages"][0]["connectionId"], id);
    third.send(&json!({"op": 5})).await;
    third.to_end(Duration::from_secs(5)).await;
    let fourth = Socket::open(&node, &format!("?clientId=ann&{resume}")).await;
    assert_eq!(fourth.connected["resumed"], false, "it was closed");
    assert_ne!(id_of(&fourth), &id);
}

#[tokio::test(flavor = "multi_thread")]
async fn open_socket_is_notified_and_closed_on_session_takeover() {
    let node = node().await;
    // In one of several rounds the second socket is on another shard than the first.
    for _ in 0..4 {
        let mut first = Socket::open(&node, "").await;
        first.attach("a").await;
        let mut second = Socket::open(&node, &format!("?{}", resume_of(&first))).await;
        assert_eq!((id_of(&second), &second.connected["resumed"]), (id_of(&first), &json!(true)));
        let (frames, ended) = first.to_end(Duration::from_secs(5)).await;
        let last = frames.last().expect("a last word");
        assert_eq!((&last["op"], &last["code"], ended), (&json!(7), &json!(40800), SocketEnd::Closed(4001)));
        let mut third = Socket::open(&node, &format!("?{}", resume_of(&first))).await;
        assert_eq!(id_of(&third), id_of(&first), "a key of an earlier epoch");
        assert_eq!(second.to_end(Duration::from_secs(5)).await.1, SocketEnd::Closed(4001));
        third.attach("a").await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_is_good_for_its_owner_alone() {
    let everything = r#"{ "*" = ["subscribe", "publish", "presence", "history"] }"#;
    let directory =
        Directory::default().account("acme").key("one", "s1", everything).key("two", "s2", everything);
    let node = Node::start(NodeOptions::default().directory(directory, "s1.one")).await;
    let mut holder = Socket::open(&node, "?clientId=ann").await;
    let resume = resume_of(&holder);
    let touched = resume.replace("resume=", "resume=x");
    let one = http::basic("s1.one");
    let two = http::basic("s2.two");
    for (query, authorization) in [
        (format!("?clientId=bob&{resume}"), &one),
        (format!("?{resume}"), &one),
        (format!("?clientId=ann&{resume}"), &two),
        (format!("?clientId=ann&{touched}"), &one),
        ("?clientId=ann&resume=".to_owned(), &one),
        (format!("?clientId=ann&resume={}", "A".repeat(3_000)), &one),
    ] {
        let other = Socket::open_as(&node, &query, authorization).await;
        assert_eq!(other.connected["resumed"], false, "{query}");
        assert_ne!(id_of(&other), id_of(&holder), "{query}");
    }
    holder.attach("a").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn connection_id_is_new_after_the_resume_window() {
    let node = Node::start(NodeOptions::default().limit("resume_window_ms", 200)).await;
    let first = Socket::open(&node, "").await;
    let (id, resume) = (id_of(&first).clone(), resume_of(&first));
    cut(first);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    // Each successful resume opens the connection again, so the delay between attempts must exceed the window.
    let mut pause = Duration::from_millis(250);
    loop {
        time_passes(pause).await;
        pause *= 2;
        let next = Socket::open(&node, &format!("?{resume}")).await;
        if next.connected["resumed"] == false {
            assert_ne!(id_of(&next), &id);
            return;
        }
        assert!(tokio::time::Instant::now() < deadline);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn session_takeover_succeeds_at_the_tenant_ceiling() {
    let everything = r#"{ "*" = ["subscribe", "publish"] }"#;
    let directory =
        Directory::default().tenant("acme", Some(1)).account_of_tenant("acme").key("one", "s1", everything);
    let node = Node::start(NodeOptions::default().directory(directory, "s1.one")).await;
    let mut first = Socket::open(&node, "").await;
    for _ in 0..3 {
        let second = Socket::open(&node, &format!("?{}", resume_of(&first))).await;
        assert_eq!(second.connected["resumed"], true);
        assert_eq!(first.to_end(Duration::from_secs(5)).await.1, SocketEnd::Closed(4001));
        first = second;
    }
}
