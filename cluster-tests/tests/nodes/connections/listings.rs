//! Listings of connections and channels.

use std::collections::BTreeSet;

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use fanfare_client::sign::{self, JwtParams};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::history::next_of;
use fanfare_cluster_tests::socket::SocketEnd;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Response, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

use super::{KEY, OTHER, SECOND, get, node};

/// Reads the entries of all pages, following the links.
async fn all(node: &Node, path: &str, name: &str, key: &str) -> Vec<Value> {
    let mut entries = Vec::new();
    let mut path = path.to_owned();
    for _ in 0..100 {
        let page = get(node, &path, key).await;
        assert_eq!(page.status, 200, "{:?}", page.body);
        assert_eq!(page.header("x-service-node-id"), Some(node_id(node).as_str()));
        entries.extend(page.json()[name].as_array().expect("a list").iter().cloned());
        match page.header("link") {
            Some(link) => {
                path = link
                    .strip_prefix('<')
                    .and_then(|link| link.strip_suffix(">; rel=\"next\""))
                    .expect("a link")
                    .into();
            }
            None => return entries,
        }
    }
    unreachable!("the pages end")
}

fn node_id(node: &Node) -> String {
    let text = std::fs::read_to_string(node.data_dir().join("node.json")).expect("node.json");
    let file: Value = serde_json::from_str(&text).expect("JSON");
    file["nodeId"].as_str().expect("a node id").into()
}

async fn close(node: &Node, client_id: &str, authorization: &str) -> Response {
    let path = format!("/api/clients/{client_id}/connections/close");
    http::request(node.addr(), "POST", &path, &[("authorization", authorization)], "").await
}

#[tokio::test(flavor = "multi_thread")]
async fn channels_are_listed_with_connections_and_subscribers() {
    let node = node(None).await;
    assert_eq!(get(&node, "/api/channels", KEY).await.json(), json!({"channels": []}));
    let mut open = Vec::new();
    for (query, channels) in [
        ("?clientId=ann", &["a", "b"][..]),
        ("?clientId=ann&format=msgpack", &["a"]),
        ("?clientId=bob", &["a"]),
        ("", &["a", "c"]),
        ("", &["c"]),
    ] {
        let mut socket = Socket::open_as(&node, query, &http::basic(KEY)).await;
        for channel in channels {
            socket.attach(channel).await;
        }
        open.push(socket);
    }
    let mut second_account = Socket::open_as(&node, "", &http::basic(SECOND)).await;
    second_account.attach("a").await;
    let expected = json!([
        {"name": "a", "connections": 4, "subscribers": 2},
        {"name": "b", "connections": 1, "subscribers": 1},
        {"name": "c", "connections": 2, "subscribers": 2},
    ]);
    assert_eq!(json!(all(&node, "/api/channels", "channels", KEY).await), expected);
    for limit in 1..=2 {
        let mut paged = all(&node, &format!("/api/channels?limit={limit}"), "channels", KEY).await;
        paged.sort_by_key(|entry| entry["name"].to_string());
        assert_eq!(json!(paged), expected, "limit {limit}");
    }
    let second = all(&node, "/api/channels", "channels", SECOND).await;
    assert_eq!(json!(second), json!([{"name": "a", "connections": 1, "subscribers": 1}]));
    assert_eq!(open[0].ask(json!({"op": 10, "channel": "b"})).await["op"], 11);
    drop(open.remove(1));
    wait_until(SOON, "what was left to be gone", async || {
        let channels = get(&node, "/api/channels", KEY).await.json()["channels"].clone();
        channels[0]["connections"] == 3 && channels[1]["name"] == "c"
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cursor_names_no_account_and_no_channel() {
    let node = node(None).await;
    let names = ["payroll:2026", "payroll:2025", "payroll:2024"];
    let mut socket = Socket::open_as(&node, "", &http::basic(KEY)).await;
    for name in names {
        socket.attach(name).await;
        let request = json!({"op": 12, "channel": name, "action": "enter", "clientId": "ann"});
        assert_eq!(socket.ask(request).await["op"], 1);
    }
    for (path, list, named) in
        [("/api/channels", "channels", "name"), ("/api/presence", "channels", "channel")]
    {
        let mut path = format!("{path}?limit=1");
        let mut listed = BTreeSet::new();
        loop {
            let page = get(&node, &path, KEY).await;
            listed.insert(page.json()[list][0][named].as_str().expect("a name").to_owned());
            let Some(link) = page.header("link") else { break };
            path = next_of(link);
            let (_, cursor) = path.split_once("cursor=").expect("a cursor");
            let position =
                String::from_utf8_lossy(&URL_SAFE_NO_PAD.decode(cursor).expect("base64")).into_owned();
            for text in ["payroll", "acme"] {
                assert!(!position.contains(text), "{path}: {position}");
            }
        }
        assert!(listed.iter().eq(names.iter().rev()), "{path}: {listed:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_are_listed_newest_first_and_page_by_page() {
    let node = node(None).await;
    let mut open = Vec::new();
    let mut ids = Vec::new();
    for number in 0..7 {
        let query = if number % 2 == 0 { format!("?clientId=c{number}") } else { String::new() };
        let mut socket = Socket::open_as(&node, &query, &http::basic(KEY)).await;
        for channel in 0..number {
            socket.attach(&format!("ch:{channel}")).await;
        }
        ids.push(socket.connected["connectionId"].clone());
        open.push(socket);
    }
    let _other_account = Socket::open_as(&node, "", &http::basic(OTHER)).await;
    let whole = all(&node, "/api/connections", "connections", KEY).await;
    assert_eq!(whole.len(), 7);
    let times: Vec<_> = whole.iter().map(|row| row["connectedAt"].as_u64().expect("a time")).collect();
    assert!(times.is_sorted_by(|a, b| a >= b), "{times:?}");
    for (number, id) in ids.iter().enumerate() {
        let row = whole.iter().find(|row| row["connectionId"] == *id).expect("every connection");
        let channels: Vec<_> = (0..number).map(|channel| format!("ch:{channel}")).collect();
        let mut expected = json!({
            "connectionId": id, "channels": channels, "channelCount": number, "transport": "websocket",
            "authenticated": true, "connectedAt": row["connectedAt"],
        });
        if number % 2 == 0 {
            expected["clientId"] = json!(format!("c{number}"));
        }
        assert_eq!(*row, expected);
    }
    for limit in [1, 3, 7] {
        let paged = all(&node, &format!("/api/connections?limit={limit}"), "connections", KEY).await;
        assert_eq!(paged, whole, "limit {limit}");
    }
    let page = get(&node, "/api/connections?limit=3", KEY).await;
    assert_eq!(page.json()["connections"].as_array().map(Vec::len), Some(3));
    assert_eq!(all(&node, "/api/connections", "connections", OTHER).await.len(), 1);
    for bad in ["cursor=%21", "cursor=AAAA", "cursor="] {
        assert_eq!(get(&node, &format!("/api/connections?{bad}"), KEY).await.status, 400, "{bad}");
    }
    for path in ["/api/connections", "/api/channels"] {
        assert_eq!(http::request(node.addr(), "GET", path, &[], "").await.status, 401);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_walk_over_many_connections_misses_none() {
    const MANY: usize = 400;
    let node = node(None).await;
    let mut open = Vec::new();
    for number in 0..MANY {
        let mut socket = Socket::open_as(&node, &format!("?clientId=u{number}"), &http::basic(KEY)).await;
        socket.attach("one").await;
        open.push(socket);
    }
    let whole = all(&node, "/api/connections?limit=150", "connections", KEY).await;
    let ids: BTreeSet<_> = whole.iter().map(|row| row["connectionId"].to_string()).collect();
    assert_eq!((whole.len(), ids.len()), (MANY, MANY));
    let channels = all(&node, "/api/channels", "channels", KEY).await;
    assert_eq!(json!(channels), json!([{"name": "one", "connections": MANY, "subscribers": MANY}]));
}

#[tokio::test(flavor = "multi_thread")]
async fn closing_a_client_ends_all_its_connections_and_no_other() {
    let node = node(None).await;
    let mut text = Socket::open_as(&node, "?clientId=a/b", &http::basic(KEY)).await;
    let mut binary = Socket::open_as(&node, "?clientId=a/b&format=msgpack", &http::basic(KEY)).await;
    let mut other_client = Socket::open_as(&node, "?clientId=a", &http::basic(KEY)).await;
    let mut anonymous = Socket::open_as(&node, "", &http::basic(KEY)).await;
    let mut other_account = Socket::open_as(&node, "?clientId=a/b", &http::basic(SECOND)).await;
    let answer = close(&node, "a%2Fb", &http::basic(KEY)).await;
    assert_eq!((answer.status, answer.json()), (200, json!({"closed": 2})));
    for socket in [&mut text, &mut binary] {
        let (frames, ended) = socket.to_end(SOON).await;
        let [frame] = &frames[..] else { unreachable!("one frame: {frames:?}") };
        assert_eq!((&frame["op"], &frame["code"]), (&json!(7), &json!(40160)));
        assert_eq!(ended, SocketEnd::Closed(4003));
    }
    for socket in [&mut other_client, &mut anonymous, &mut other_account] {
        assert_eq!(socket.ask(json!({"op": 0})).await["op"], 0);
    }
    assert_eq!(close(&node, "a%2Fb", &http::basic(KEY)).await.json(), json!({"closed": 0}));
    assert_eq!(get(&node, "/api/connections/count", KEY).await.json()["connections"], 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn key_without_subscribe_and_presence_on_all_closes_no_client() {
    let directory = Directory::default()
        .account("acme")
        .key("k1", "secret-one", ALL)
        .key("enough", "secret", r#"{ "*" = ["subscribe", "presence"] }"#)
        .key("no-presence", "secret", r#"{ "*" = ["subscribe", "publish", "history"] }"#)
        .key("prefix", "secret", r#"{ "a*" = ["subscribe", "presence"], "**" = ["subscribe", "presence"] }"#);
    let node = Node::start(NodeOptions::default().directory(directory, KEY)).await;
    let mut socket = Socket::open_as(&node, "?clientId=ann", &http::basic(KEY)).await;
    let everything = r#"{"*":["subscribe","publish","presence","history","amqp-subscribe"]}"#;
    let params = JwtParams { capability: everything.into(), client_id: None, issued_s: None, ttl_s: 60 };
    let token = sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token");
    for (authorization, status) in [
        (http::bearer(&token), 403),
        (http::basic("secret.no-presence"), 403),
        (http::basic("secret.prefix"), 403),
        (http::basic("wrong.k1"), 401),
    ] {
        assert_eq!(close(&node, "ann", &authorization).await.status, status, "{authorization}");
    }
    assert_eq!(close(&node, "%2A", &http::basic(KEY)).await.status, 400, "* is no client id");
    assert_eq!(close(&node, "%zz", &http::basic(KEY)).await.status, 400);
    assert_eq!(get(&node, "/api/clients/ann/connections/close", KEY).await.status, 405);
    assert_eq!(socket.ask(json!({"op": 0})).await["op"], 0, "nobody closed it");
    assert_eq!(close(&node, "ann", &http::basic("secret.enough")).await.json(), json!({"closed": 1}));
}
