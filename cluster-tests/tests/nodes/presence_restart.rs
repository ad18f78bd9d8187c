//! Members of a node that is killed or stopped, and restarted: a client that resumes never left, any other leaves once.

use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, SOON, Socket, clock, http, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
/// Presence timeout, long enough for a reconnect on a busy machine.
const PRESENCE_TIMEOUT_MS: u64 = 4_000;
const ROOMS: [&str; 2] = ["room", "off:room"];

fn directory() -> Directory {
    Directory::default().account("acme").channels("pattern = \"off:*\"\nhistory = false")
}

fn options() -> NodeOptions {
    NodeOptions::default()
        .directory(directory().key("k1", "secret", ALL), KEY)
        .limit("presence_grace_ms", PRESENCE_TIMEOUT_MS)
}

async fn open(node: &Node, client_id: &str) -> Socket {
    Socket::open(node, &format!("?clientId={client_id}")).await
}

async fn present(socket: &mut Socket, action: &str, channel: &str, data: Value) {
    let answer = socket.ask(json!({"op": 12, "channel": channel, "action": action, "data": data})).await;
    assert_eq!(answer["op"], 1, "{answer}");
}

/// A connection that is a member of both rooms.
async fn member(node: &Node, client_id: &str) -> Socket {
    let mut socket = open(node, client_id).await;
    for channel in ROOMS {
        present(&mut socket, "enter", channel, json!(1)).await;
        present(&mut socket, "update", channel, json!({"of": client_id})).await;
    }
    socket
}

/// Resumes the connection on the restarted node.
async fn back(node: &Node, client_id: &str, previous: &Socket) -> Socket {
    let key = previous.connected["connectionKey"].as_str().expect("a key");
    let socket = open(node, &format!("{client_id}&resume={key}")).await;
    assert_eq!(socket.connected["resumed"], true);
    assert_eq!(socket.connected["connectionId"], previous.connected["connectionId"]);
    socket
}

/// Attaches to both rooms; gives the members of each list.
async fn watcher(node: &Node) -> (Socket, Vec<Vec<Value>>) {
    let mut socket = Socket::open(node, "").await;
    let mut lists = Vec::new();
    for channel in ROOMS {
        let mut members = Vec::new();
        if socket.attach(channel).await["presence"] == true {
            let page =
                socket.find("the list", |frame| frame["op"] == 14 && frame["channel"] == channel).await;
            assert_eq!(page["more"], false);
            members.extend(page["members"].as_array().expect("members").iter().cloned());
        }
        lists.push(members);
    }
    (socket, lists)
}

/// Reads the next two presence events, one of each room, as action, name and data.
async fn events(watcher: &mut Socket) -> [String; 2] {
    let mut seen = Vec::new();
    for _ in ROOMS {
        let frame = watcher.find("a presence event", |frame| frame["op"] == 12).await;
        let event = &frame["presence"][0];
        let (action, name) = (event["action"].as_str(), event["clientId"].as_str());
        let channel = frame["channel"].as_str().map(str::to_owned);
        let text = [action, name].map(Option::unwrap_or_default).join(" ");
        seen.push((channel, format!("{text} {}", event["data"])));
    }
    seen.sort();
    let channels: Vec<_> = seen.iter().filter_map(|(channel, _)| channel.as_deref()).collect();
    assert_eq!(channels, ["off:room", "room"]);
    [seen[0].1.clone(), seen[1].1.clone()]
}

async fn get(node: &Node, path: &str) -> Value {
    let answer =
        http::request(node.addr(), "GET", path, &[("authorization", &http::basic(&node.key()))], "").await;
    assert_eq!(answer.status, 200, "{path}");
    answer.json()
}

async fn members(node: &Node, channel: &str) -> Vec<Value> {
    let path = format!("/api/channels/{}/presence", fanfare_proto::path::encode_channel(channel));
    get(node, &path).await["members"].as_array().expect("members").clone()
}

/// Gives the stored events of a name, oldest first, as action and data.
async fn stored(node: &Node, channel: &str, client_id: &str) -> Vec<String> {
    let path = format!("/api/channels/{}/presence/history", fanfare_proto::path::encode_channel(channel));
    let body = get(node, &format!("{path}?direction=forwards")).await;
    let events = body["events"].as_array().expect("events").iter();
    let events = events.filter(|event| event["clientId"] == client_id);
    events
        .map(|event| format!("{} {}", event["action"].as_str().unwrap_or_default(), event["data"]))
        .collect()
}

async fn restart(node: &mut Node, is_killed: bool) {
    if !is_killed {
        assert!(node.stop().await.success());
    }
    node.restart().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_kill_resumed_member_stays_and_absent_one_leaves_once() {
    come_back_or_leave(true).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn after_stop_resumed_member_stays_and_absent_one_leaves_once() {
    come_back_or_leave(false).await;
}

async fn come_back_or_leave(is_killed: bool) {
    let mut node = Node::start(options()).await;
    let (mut ann, _bob) = (member(&node, "ann").await, member(&node, "bob").await);
    let mut before = members(&node, "room").await;
    before.extend(members(&node, "off:room").await);
    assert_eq!(before.len(), 4);
    // Two rounds, so that a resumed member is resumed again.
    for is_bob_there in [true, false] {
        restart(&mut node, is_killed).await;
        let (mut watcher, lists) = watcher(&node).await;
        let mut after = members(&node, "room").await;
        after.extend(members(&node, "off:room").await);
        let there = if is_bob_there { 4 } else { 2 };
        assert_eq!((after.len(), lists.concat().len()), (there, there));
        assert!(!is_bob_there || after == before, "names, connections, data and times are as before");
        ann = back(&node, "ann", &ann).await;
        for channel in ROOMS {
            present(&mut ann, "enter", channel, json!({"of": "ann"})).await;
        }
        if is_bob_there {
            let left = r#"leave bob {"of":"bob"}"#;
            assert_eq!(events(&mut watcher).await, [left, left], "and nothing of ann before");
        }
        for channel in ROOMS {
            present(&mut ann, "update", channel, json!({"of": "ann"})).await;
        }
        let updated = r#"update ann {"of":"ann"}"#;
        assert_eq!(events(&mut watcher).await, [updated, updated], "the grace is over, and she is there");
    }
    ann.send(&json!({"op": 5})).await;
    wait_until(SOON, "ann to leave", async || stored(&node, "room", "ann").await.len() == 5).await;
    restart(&mut node, is_killed).await;
    let (of_ann, of_bob) = (stored(&node, "room", "ann").await, stored(&node, "room", "bob").await);
    let (ann, bob) = (r#"{"of":"ann"}"#, r#"{"of":"bob"}"#);
    let updates = || (0..3).map(|_| format!("update {ann}"));
    let expected: Vec<String> =
        ["enter 1".into()].into_iter().chain(updates()).chain([format!("leave {ann}")]).collect();
    assert_eq!(of_ann, expected);
    assert_eq!(of_bob, ["enter 1".into(), format!("update {bob}"), format!("leave {bob}")]);
    for channel in ROOMS {
        assert_eq!(members(&node, channel).await, Vec::<Value>::new(), "who has left is not there again");
    }
    assert_eq!(get(&node, "/api/channels/off%3Aroom/presence/history").await["events"], json!([]));
    node.assert_well().await;
}

/// The node is killed within the presence timeout, once more, and right after it.
#[tokio::test(flavor = "multi_thread")]
async fn leave_is_stored_once_over_repeated_kills_of_the_node() {
    let mut node = Node::start(options()).await;
    let (ann, _bob) = (member(&node, "ann").await, member(&node, "bob").await);
    for _ in 0..2 {
        node.restart().await;
        assert_eq!(members(&node, "room").await.len(), 2, "still in the grace");
        let (_, lists) = watcher(&node).await;
        assert_eq!(lists.iter().map(Vec::len).collect::<Vec<_>>(), [2, 2]);
    }
    let (mut watcher, _) = watcher(&node).await;
    let mut ann = back(&node, "ann", &ann).await;
    let left = r#"leave bob {"of":"bob"}"#;
    assert_eq!(events(&mut watcher).await, [left, left]);
    for channel in ROOMS {
        present(&mut ann, "update", channel, json!({"of": "ann"})).await;
    }
    let updated = r#"update ann {"of":"ann"}"#;
    assert_eq!(events(&mut watcher).await, [updated, updated], "she was away over two kills");
    node.restart().await;
    let of_ann = async || stored(&node, "room", "ann").await.last().cloned();
    let ann_left = Some(r#"leave {"of":"ann"}"#.to_owned());
    wait_until(SOON, "ann's leave to be stored", async || of_ann().await == ann_left).await;
    let of_bob = ["enter 1", r#"update {"of":"bob"}"#, r#"leave {"of":"bob"}"#];
    wait_until(SOON, "and bob's", async || stored(&node, "room", "bob").await == of_bob).await;
    node.restart().await;
    assert_eq!(members(&node, "room").await, Vec::<Value>::new());
    assert_eq!(stored(&node, "room", "bob").await, of_bob);
}

/// The leaves of clients that closed before the stop are all made, however many they are.
#[tokio::test(flavor = "multi_thread")]
async fn members_that_close_right_before_a_stop_have_left() {
    const CONNECTIONS: usize = 8;
    const MEMBERS: usize = 500;
    let mut node = Node::start(options().limit("controls_per_second", 0)).await;
    let mut sockets = Vec::new();
    for n in 0..CONNECTIONS {
        let mut socket = Socket::open(&node, "").await;
        let mut last = String::new();
        for m in 0..MEMBERS {
            let client_id = format!("c{n}-{m}");
            let enter = json!({"op": 12, "channel": "room", "action": "enter", "clientId": client_id});
            last = socket.start(enter).await;
        }
        let answer = socket.find("the last answer", |frame| frame["id"] == *last).await;
        assert_eq!(answer["op"], 1);
        sockets.push(socket);
    }
    for socket in &mut sockets {
        socket.send(&json!({"op": 5})).await;
    }
    for socket in &mut sockets {
        socket.find("closed", |frame| frame["op"] == 6).await;
    }
    restart(&mut node, false).await;
    assert_eq!(members(&node, "room").await, Vec::<Value>::new());
    let newest = get(&node, "/api/channels/room/presence/history?limit=1000").await;
    let newest = newest["events"].as_array().expect("events");
    assert!(newest.len() == 1_000 && newest.iter().all(|event| event["action"] == "leave"));
}

/// A member that the directory does not allow any more when the node restarts leaves at once.
#[tokio::test(flavor = "multi_thread")]
async fn member_that_no_key_lets_be_present_leaves_at_once_at_restart() {
    let full = directory().key("k1", "secret", ALL).key("k2", "secret", ALL);
    let full = full.account("gone").key("k3", "secret", ALL);
    let options = NodeOptions::default().directory(full.clone(), KEY);
    let mut node = Node::start(options.limit("presence_grace_ms", 600_000)).await;
    let mut sockets = Vec::new();
    for key in ["k1", "k2", "k3"] {
        let authorization = http::basic(&format!("secret.{key}"));
        let mut socket = Socket::open_as(&node, &format!("?clientId={key}"), &authorization).await;
        for channel in ["room", "hall"] {
            present(&mut socket, "enter", channel, json!(key)).await;
        }
        sockets.push(socket);
    }
    node.kill();
    let narrow = r#"{ "hall" = ["presence"], "*" = ["history"] }"#;
    node.replace_directory(&directory().key("k1", "secret", narrow).revoked_key("k2", "secret"));
    node.restart().await;
    for name in ["k1", "k2"] {
        let events = [format!("enter \"{name}\""), format!("leave \"{name}\"")];
        wait_until(SOON, "the leave to be stored", async || stored(&node, "room", name).await == events)
            .await;
    }
    let members = members(&node, "hall").await;
    let mut names: Vec<_> = members.iter().map(|member| member["clientId"].to_string()).collect();
    names.sort();
    assert_eq!(names, [r#""k1""#, r#""k2""#], "who may have come to use the other key has the grace");
    node.replace_directory(&full);
    let other = ("authorization", &*http::basic("secret.k3"));
    wait_until(SOON, "the account to be there again", async || {
        http::request(node.addr(), "GET", "/api/channels/room/presence", &[other], "").await.status == 200
    })
    .await;
    let answer = http::request(node.addr(), "GET", "/api/channels/room/presence", &[other], "").await;
    assert_eq!(answer.json()["members"], json!([]));
    let path = "/api/channels/room/presence/history";
    let answer = http::request(node.addr(), "GET", path, &[other], "").await.json();
    let actions: Vec<_> =
        answer["events"].as_array().expect("events").iter().map(|event| &event["action"]).collect();
    assert_eq!(actions, ["leave", "enter"]);
}

/// The key with which the member entered is revoked, and its client has changed to another key before.
#[tokio::test(flavor = "multi_thread")]
async fn member_that_changed_key_stays_when_its_old_key_is_revoked() {
    let full = directory().key("k1", "secret", ALL).key("k2", "secret", ALL);
    let mut node = Node::start(NodeOptions::default().directory(full, "secret.k2")).await;
    let token = |key: &str| {
        let params = JwtParams {
            capability: r#"{"*":["presence"]}"#.into(),
            client_id: Some("ann".into()),
            issued_s: Some(clock::now_s()),
            ttl_s: 600,
        };
        sign::jwt(&key.parse().expect("a key"), &params).expect("a token")
    };
    let mut ann = Socket::open_as(&node, "", &http::bearer(&token("secret.k1"))).await;
    present(&mut ann, "enter", "room", json!(1)).await;
    let renewed = ann.ask(json!({"op": 15, "accessToken": token("secret.k2")})).await;
    assert_eq!(renewed["op"], 1, "{renewed}");
    let connected = ann.find("the connection with its new key", |frame| frame["op"] == 3).await;
    assert!(node.stop().await.success());
    node.replace_directory(&directory().revoked_key("k1", "secret").key("k2", "secret", ALL));
    node.restart().await;
    let resume = format!("?resume={}", connected["connectionKey"].as_str().expect("a key"));
    let mut ann = Socket::open_as(&node, &resume, &http::bearer(&token("secret.k2"))).await;
    assert_eq!(ann.connected["resumed"], true);
    present(&mut ann, "update", "room", json!(2)).await;
    assert_eq!(stored(&node, "room", "ann").await, ["enter 1", "update 2"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn restart_without_a_store_forgets_all_members() {
    let mut node = Node::start(options().environment("FANFARE_STORE", "none")).await;
    let _ann = member(&node, "ann").await;
    node.restart().await;
    for channel in ROOMS {
        assert_eq!(members(&node, channel).await, Vec::<Value>::new());
    }
}
