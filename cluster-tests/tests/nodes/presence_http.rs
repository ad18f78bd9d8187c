//! Presence over HTTP: members of a channel, channels of a member, and the events of the past.

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::history::next_of;
use fanfare_cluster_tests::socket::Socket;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Response, SOON, http, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const OTHER_KEY: &str = "secret.k2";
const HISTORY_ALONE: &str = "secret.k3";
const PRESENCE_ALONE: &str = "secret.k4";

fn options() -> NodeOptions {
    let directory = Directory::default()
        .account("acme")
        .key("k1", "secret", ALL)
        .key("k3", "secret", r#"{ "*" = ["history"] }"#)
        .key("k4", "secret", r#"{ "*" = ["presence"] }"#)
        .account("other")
        .key("k2", "secret", ALL);
    NodeOptions::default().directory(directory, KEY)
}

async fn get(node: &Node, key: &str, path: &str) -> Response {
    http::request(node.addr(), "GET", path, &[("authorization", &http::basic(key))], "").await
}

async fn present(socket: &mut Socket, action: &str, channel: &str, client_id: &str, data: Value) {
    let request =
        json!({"op": 12, "channel": channel, "action": action, "clientId": client_id, "data": data});
    let answer = socket.ask(request).await;
    assert_eq!(answer["op"], 1, "{answer}");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_members_of_a_channel() {
    let node = Node::start(options().limit("controls_per_second", 0)).await;
    let mut socket = Socket::open(&node, "").await;
    let path = "/api/channels/room%3A1/presence";
    let empty = get(&node, KEY, path).await;
    assert_eq!((empty.status, empty.json()), (200, json!({"members": [], "source": "memory"})));
    present(&mut socket, "enter", "room:1", "ann", json!({"n": 1})).await;
    let request = json!({"op": 12, "channel": "room:1", "action": "enter", "clientId": "bob"});
    assert_eq!(socket.ask(request).await["op"], 1);
    let answer = get(&node, PRESENCE_ALONE, path).await;
    assert_eq!(answer.header("content-type"), Some("application/json"));
    let body = answer.json();
    assert_eq!(body["source"], "memory");
    let [ann, bob] = body["members"].as_array().expect("members").as_slice() else {
        unreachable!("two members: {body}")
    };
    assert_eq!((&ann["clientId"], &ann["data"]), (&json!("ann"), &json!({"n": 1})));
    assert_eq!(ann["connectionId"], socket.connected["connectionId"]);
    assert!(ann["updatedAt"].is_u64());
    assert_eq!((&bob["clientId"], bob.get("data")), (&json!("bob"), None));
    for n in 0..300 {
        present(&mut socket, "enter", "room:1", &format!("c{n}"), json!("x".repeat(1_000))).await;
    }
    let many = get(&node, KEY, path).await.json();
    assert_eq!(many["members"].as_array().map(Vec::len), Some(302), "over many pieces");
    assert_eq!(get(&node, OTHER_KEY, path).await.json()["members"], json!([]), "of its own account alone");
    assert_eq!(get(&node, HISTORY_ALONE, path).await.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_channels_with_members_busiest_first_and_in_pages() {
    let node = Node::start(options()).await;
    let mut socket = Socket::open(&node, "").await;
    for (channel, members) in [("b", 2), ("c", 4), ("a", 3), ("d", 1), ("e", 1)] {
        for n in 0..members {
            present(&mut socket, "enter", channel, &format!("c{n}"), Value::Null).await;
        }
    }
    let mut path = "/api/presence?limit=2".to_owned();
    let mut pages = Vec::new();
    loop {
        let answer = get(&node, HISTORY_ALONE, &path).await;
        assert_eq!(answer.status, 200, "any credential of the account");
        assert!(answer.header("x-service-node-id").is_some());
        pages.push(answer.json()["channels"].clone());
        match answer.header("link") {
            Some(link) => path = next_of(link),
            None => break,
        }
    }
    let entry = |channel: &str, members: u64| json!({"channel": channel, "members": members});
    // Channels with equally many members are in any order.
    let (ends, rest) = if pages[1][1]["channel"] == "d" { ("d", "e") } else { ("e", "d") };
    let expected = [
        json!([entry("c", 4), entry("a", 3)]),
        json!([entry("b", 2), entry(ends, 1)]),
        json!([entry(rest, 1)]),
    ];
    assert_eq!(pages, expected);
    assert_eq!(get(&node, OTHER_KEY, "/api/presence").await.json(), json!({"channels": []}));
    assert_eq!(get(&node, KEY, "/api/presence?cursor=x").await.status, 400);
    socket.send(&json!({"op": 5})).await;
    wait_until(SOON, "all to have left", async || {
        get(&node, KEY, "/api/presence").await.json() == json!({"channels": []})
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_history_survives_a_kill_beside_message_history() {
    let mut node = Node::start(options()).await;
    let mut socket = Socket::open(&node, "").await;
    present(&mut socket, "enter", "room", "ann", json!(1.5)).await;
    present(&mut socket, "enter", "room", "ann", json!(1.5)).await;
    present(&mut socket, "update", "room", "ann", json!([2])).await;
    socket.publish("room", json!({"data": "m"})).await;
    present(&mut socket, "leave", "room", "ann", Value::Null).await;
    present(&mut socket, "leave", "room", "ann", Value::Null).await;
    let connection_id = socket.connected["connectionId"].clone();
    node.kill();
    node.restart().await;
    let path = "/api/channels/room/presence/history";
    let answer = get(&node, HISTORY_ALONE, path).await;
    let events = answer.json()["events"].as_array().expect("events").clone();
    let actions: Vec<_> = events.iter().map(|event| event["action"].as_str().unwrap_or_default()).collect();
    assert_eq!(actions, ["leave", "update", "enter"], "newest first, and what changed nothing is no row");
    let enter = &events[2];
    let timestamp = &enter["timestamp"];
    assert!(timestamp.is_u64());
    let expected = json!({"channel": "room", "action": "enter", "clientId": "ann", "connectionId": connection_id,
        "data": 1.5, "timestamp": timestamp});
    assert_eq!(*enter, expected);
    let messages = get(&node, KEY, "/api/channels/room/history").await.json();
    assert_eq!(messages["messages"].as_array().map(Vec::len), Some(1));

    let first = get(&node, KEY, &format!("{path}?limit=2&direction=forwards")).await;
    assert_eq!(first.json()["events"][1]["action"], "update");
    let rest = get(&node, KEY, &next_of(first.header("link").expect("a link"))).await;
    assert_eq!((&rest.json()["events"][0]["action"], rest.header("link")), (&json!("leave"), None));
    assert_eq!(get(&node, OTHER_KEY, path).await.json(), json!({"events": []}));
    assert_eq!(get(&node, PRESENCE_ALONE, path).await.status, 403);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_node_without_a_store_has_members_and_no_history_of_them() {
    let node = Node::start(options().environment("FANFARE_STORE", "none")).await;
    let mut socket = Socket::open(&node, "").await;
    present(&mut socket, "enter", "room", "ann", json!(1)).await;
    let answer = get(&node, KEY, "/api/channels/room/presence/history").await;
    assert_eq!((answer.status, answer.json()), (200, json!({"events": []})));
    let members = get(&node, KEY, "/api/channels/room/presence").await.json();
    assert_eq!(members["members"].as_array().map(Vec::len), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_implied_leave_is_a_row_with_the_last_data() {
    let node = Node::start(options().limit("presence_grace_ms", 100)).await;
    let mut socket = Socket::open(&node, "").await;
    present(&mut socket, "enter", "room", "ann", json!({"n": 1})).await;
    drop(socket);
    let path = "/api/channels/room/presence/history";
    wait_until(SOON, "the lost to have left", async || {
        let events = get(&node, KEY, path).await.json()["events"].clone();
        events.as_array().map(Vec::len) == Some(2)
            && events[0]["action"] == "leave"
            && events[0]["data"] == json!({"n": 1})
    })
    .await;
    assert_eq!(get(&node, KEY, "/api/presence").await.json(), json!({"channels": []}));
}
