//! A change of the directory applies to open connections.

use std::time::Duration;

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Socket, history, http, wait_until};
use serde_json::json;

use super::KEY;

/// Greatest time until attached channels follow a change of the directory.
const LIVE: Duration = Duration::from_secs(5);
const READ: &str = r#"{ "*" = ["subscribe", "history"], "chat" = ["subscribe", "publish", "presence"] }"#;

fn directory(capability: &str) -> Directory {
    Directory::default().account("acme").key("k1", "secret-one", capability)
}

async fn node() -> Node {
    Node::start(NodeOptions::default().directory(directory(ALL), KEY)).await
}

fn token(capability: &str) -> String {
    let params = JwtParams { capability: capability.into(), client_id: None, issued_s: None, ttl_s: 600 };
    http::bearer(&sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token"))
}

#[tokio::test(flavor = "multi_thread")]
async fn narrowed_key_narrows_attached_channels_and_later_requests() {
    let node = node().await;
    for query in ["", "?format=msgpack"] {
        node.replace_directory(&directory(ALL));
        wait_until(LIVE, "the wide directory", async || {
            let mut probe = Socket::open(&node, "").await;
            probe.ask(json!({"op": 13, "channel": "probe", "data": 1})).await["op"] == 1
        })
        .await;
        let mut socket = Socket::open(&node, query).await;
        for channel in ["chat", "news"] {
            socket.attach(channel).await;
        }
        let publish_only = json!({"op": 8, "channel": "out", "modes": ["publish"]});
        assert_eq!(socket.ask(publish_only).await["op"], 9);
        node.replace_directory(&directory(READ));
        let first = socket.next_within(LIVE).await.expect("news is narrowed");
        assert_eq!((&first["op"], &first["channel"]), (&json!(9), &json!("news")), "{first}");
        assert_eq!((&first["modes"], &first["resumed"]), (&json!(["subscribe"]), &json!(true)));
        assert!(first.get("id").is_none());
        let second = socket.next_within(LIVE).await.expect("out is detached");
        assert_eq!((&second["op"], &second["channel"]), (&json!(11), &json!("out")), "{second}");
        assert_eq!(second["code"], 40160);

        let nack = socket.ask(json!({"op": 13, "channel": "news", "data": 1})).await;
        assert_eq!((&nack["op"], &nack["code"]), (&json!(2), &json!(40160)));
        socket.publish("chat", json!({"data": "still allowed"})).await;
        assert_eq!(socket.message("chat").await["messages"][0]["data"], "still allowed");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_beyond_its_key_is_closed_and_one_within_it_goes_on() {
    let node = node().await;
    let mut within = Socket::open_as(&node, "", &token(r#"{"chat":["publish"],"x":["subscribe"]}"#)).await;
    let mut beyond = Socket::open_as(&node, "", &token(r#"{"news":["publish"]}"#)).await;
    node.replace_directory(&directory(READ));
    let (frames, ended) = beyond.to_end(LIVE).await;
    let [frame] = &frames[..] else { unreachable!("one frame: {frames:?}") };
    assert_eq!((&frame["op"], &frame["code"]), (&json!(7), &json!(40100)));
    assert_eq!(ended, SocketEnd::Closed(4001));
    within.publish("chat", json!({})).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn widened_key_applies_at_once_to_connected_clients() {
    let node = Node::start(NodeOptions::default().directory(directory(READ), KEY)).await;
    let mut socket = Socket::open(&node, "").await;
    let publish = json!({"op": 13, "channel": "news", "data": 1});
    assert_eq!(socket.ask(publish.clone()).await["code"], 40160);
    node.replace_directory(&directory(ALL));
    wait_until(LIVE, "the wider capability", async || socket.ask(publish.clone()).await["op"] == 1).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_broken_file_changes_nothing() {
    let node = node().await;
    let mut socket = Socket::open(&node, "").await;
    socket.attach("news").await;
    let file = node.data_dir().join("directory.toml");
    let broken = format!("{}\n[[tenants.accounts.keys]]\nname = 1\n", directory(READ).toml());
    std::fs::write(file, broken).expect("the data folder is writable");
    wait_until(LIVE, "the refusal in the log", async || node.log().contains("nothing changed")).await;
    socket.publish("news", json!({"data": "as before"})).await;
    assert_eq!(socket.message("news").await["messages"][0]["data"], "as before", "nothing came before it");
    drop(Socket::open(&node, "").await);
}

#[tokio::test(flavor = "multi_thread")]
async fn live_connection_stores_messages_as_new_directory_says() {
    let off = Directory::default().account("acme").channels("pattern = \"news\"\nhistory = false").key(
        "k1",
        "secret-one",
        ALL,
    );
    let node = Node::start(NodeOptions::default().directory(off, KEY)).await;
    let mut socket = Socket::open(&node, "").await;
    socket.publish("news", json!({"data": "not stored"})).await;
    node.replace_directory(&directory(ALL));
    wait_until(LIVE, "what the live connection publishes to be stored", async || {
        socket.publish("news", json!({"data": "perhaps"})).await;
        !history::read_all(node.addr(), KEY, "news", "").await.is_empty()
    })
    .await;
    let stored = history::read_all(node.addr(), KEY, "news", "").await;
    assert!(stored.iter().all(|record| record["data"] == "perhaps"), "{stored:?}");
}
