//! Server-sent events, as a browser's EventSource uses them.

use std::collections::VecDeque;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::tls::Tls;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Raw, SOON, Socket, http, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";

fn directory(capability: &str, connection_limit: Option<u64>) -> Directory {
    let directory = Directory::default().tenant("acme", connection_limit).account_of_tenant("acme");
    directory.key("k1", "secret", ALL).key("k2", "secret", capability)
}

fn options() -> NodeOptions {
    NodeOptions::default().directory(directory(r#"{ "a" = ["subscribe"] }"#, None), KEY)
}

/// An open stream.
struct Events {
    raw: Raw,
    text: String,
    /// Events that were read and not yet returned.
    waiting: VecDeque<Event>,
}

/// An event with `event`, `id` and `data`, or a comment alone.
#[derive(Debug, Clone, PartialEq)]
struct Event {
    name: String,
    id: String,
    data: Value,
}

impl Events {
    async fn open(node: &Node, query: &str, last_event_id: Option<&str>) -> Self {
        let (status, head, events) = Self::ask(node, query, last_event_id).await;
        assert_eq!(status, 200, "{head}");
        let head = head.to_ascii_lowercase();
        assert!(head.contains("content-type: text/event-stream\r\n"), "{head}");
        assert!(head.contains("access-control-allow-origin: *\r\n"), "{head}");
        events
    }

    async fn ask(node: &Node, query: &str, last_event_id: Option<&str>) -> (u16, String, Self) {
        Self::over(Raw::connect(node.addr()).await, query, last_event_id).await
    }

    async fn over(mut raw: Raw, query: &str, last_event_id: Option<&str>) -> (u16, String, Self) {
        let last = last_event_id.map(|id| format!("last-event-id: {id}\r\n")).unwrap_or_default();
        let head = format!("GET /realtime/sse{query} HTTP/1.1\r\nhost: localhost\r\n{last}\r\n");
        raw.write(head.as_bytes()).await;
        let (status, head) = raw.head(SOON).await.expect("an answer");
        (status, head, Self { raw, text: String::new(), waiting: VecDeque::new() })
    }

    /// Reads the next block, over any chunks; `None` at the end.
    async fn block(&mut self) -> Option<String> {
        loop {
            if let Some((block, rest)) = self.text.split_once("\n\n") {
                let (block, rest) = (block.to_owned(), rest.to_owned());
                self.text = rest;
                return Some(block);
            }
            self.text.push_str(&self.raw.chunk(SOON).await?);
        }
    }

    async fn next(&mut self) -> Option<Event> {
        loop {
            let block = self.block().await?;
            if block.starts_with(':') || block.starts_with("retry:") {
                continue;
            }
            let field = |name: &str| {
                let line = block.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "));
                line.unwrap_or_default().to_owned()
            };
            let data = serde_json::from_str(&field("data")).expect("a frame");
            return Some(Event { name: field("event"), id: field("id"), data });
        }
    }

    /// Gives the next event of a name; earlier events stay.
    async fn find(&mut self, name: &str) -> Event {
        if let Some(place) = self.waiting.iter().position(|event| event.name == name) {
            return self.waiting.remove(place).expect("it stands there");
        }
        loop {
            let event = self.next().await.expect("an event");
            if event.name == name {
                return event;
            }
            self.waiting.push_back(event);
        }
    }
}

async fn publish(node: &Node, channel: &str, data: Value) {
    let path = format!("/api/channels/{channel}/publish");
    let body = json!({"data": data}).to_string();
    let answer =
        http::request(node.addr(), "POST", &path, &[("authorization", &http::basic(KEY))], body).await;
    assert_eq!(answer.status, 200);
}

async fn get(node: &Node, path: &str) -> Value {
    http::request(node.addr(), "GET", path, &[("authorization", &http::basic(KEY))], "").await.json()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_of_two_channels_is_resumed_by_its_last_id() {
    let node = Node::start(options()).await;
    let query = format!("?channel=a&channel=b%3A1&key={KEY}");
    let mut events = Events::open(&node, &query, None).await;
    let attached = [events.find("attached").await, events.find("attached").await];
    assert_eq!(attached.clone().map(|event| event.data["channel"].clone()), [json!("a"), json!("b:1")]);
    assert_eq!(attached[1].data["resumed"], false);
    assert_eq!(attached[0].id, format!("{},", attached[0].data["serial"].as_str().expect("a serial")));
    publish(&node, "a", json!("one\ntwo")).await;
    let message = events.find("message").await;
    assert_eq!(message.data["messages"][0]["data"], "one\ntwo");
    let (a, b) = message.id.split_once(',').expect("a serial for each channel");
    assert_eq!(
        (a, b),
        (
            message.data["serial"].as_str().expect("a serial"),
            attached[1].data["serial"].as_str().expect("a serial"),
        )
    );
    drop(events);

    publish(&node, "b%3A1", json!("missed b")).await;
    publish(&node, "a", json!("missed a")).await;
    let mut events = Events::open(&node, &query, Some(&message.id)).await;
    for _ in 0..2 {
        assert_eq!(events.find("attached").await.data["resumed"], true);
    }
    let mut missed = [events.find("message").await, events.find("message").await]
        .map(|event| event.data["messages"][0]["data"].as_str().expect("a text").to_owned());
    missed.sort();
    assert_eq!(missed, ["missed a", "missed b"]);
    // A reloaded page has only the query, and the browser's own header is newer than that.
    let reloaded = format!("{query}&lastEventId={}", message.id);
    for (last, resumed) in [(None, true), (Some(&*message.id), true), (Some("x,y"), false)] {
        let mut events = Events::open(&node, &reloaded, last).await;
        assert_eq!(events.find("attached").await.data["resumed"], resumed, "{last:?}");
    }
    for nonsense in ["nonsense", "x,y", "a,b,c"] {
        let mut events = Events::open(&node, &query, Some(nonsense)).await;
        assert_eq!(events.find("attached").await.data["resumed"], false, "{nonsense}");
    }
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_refused_as_a_socket_is() {
    let node = Node::start(options()).await;
    let many = |count: usize| -> String { (0..count).map(|number| format!("&channel=a{number}")).collect() };
    for (query, status) in [
        ("?channel=a".to_owned(), 401),
        ("?channel=a&key=wrong.k1".to_owned(), 401),
        ("?channel=a&key=wrong.k1&errors=socket".to_owned(), 401),
        ("?channel=a&key=secret.k2".to_owned(), 200),
        ("?channel=a&channel=b&key=secret.k2".to_owned(), 403),
        (format!("?key={KEY}"), 400),
        (format!("?key={KEY}&channel="), 400),
        (format!("?key={KEY}&channel=%5Bx"), 400),
        (format!("?key={KEY}&channel=a&channel=a"), 400),
        (format!("?key={KEY}&channel=a&clientId=*"), 400),
        (format!("?key={KEY}{}", many(20)), 200),
        (format!("?key={KEY}{}", many(21)), 400),
    ] {
        let (answered, head, _) = Events::ask(&node, &query, None).await;
        assert_eq!(answered, status, "{query}: {head}");
        assert!(head.to_ascii_lowercase().contains("access-control-allow-origin: *\r\n"), "{head}");
    }
    let path = format!("/realtime/sse?channel=a&key={KEY}");
    assert_eq!(http::request(node.addr(), "POST", &path, &[], "").await.status, 405);
}

/// A capability that no longer covers a channel ends the stream, although a socket would keep its other channels.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_ends_when_its_key_may_not_subscribe_any_more() {
    let node = Node::start(NodeOptions::default().directory(directory(ALL, None), KEY)).await;
    for left in
        [r#"{ "*" = ["publish"] }"#, r#"{ "*" = ["publish", "presence"] }"#, r#"{ "b" = ["subscribe"] }"#]
    {
        node.replace_directory(&directory(ALL, None));
        let mut open = None;
        wait_until(SOON, "the wide directory", async || {
            let (status, _, events) = Events::ask(&node, "?channel=a&key=secret.k2", None).await;
            open = Some(events).filter(|_| status == 200);
            open.is_some()
        })
        .await;
        let mut events = open.expect("it was just opened");
        events.find("attached").await;
        let narrowed = std::time::Instant::now();
        node.replace_directory(&directory(left, None));
        assert_eq!(events.next().await, None, "{left}");
        assert!(narrowed.elapsed().as_secs() < 5, "{left}");
        let (status, head, _) = Events::ask(&node, "?channel=a&key=secret.k2", None).await;
        assert_eq!(status, 403, "{head}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_is_a_connection_of_its_tenant() {
    let node = Node::start(NodeOptions::default().directory(directory(ALL, Some(1)), KEY)).await;
    let query = format!("?channel=a&key={KEY}&clientId=ann");
    let mut events = Events::open(&node, &query, None).await;
    events.find("attached").await;
    let listed = get(&node, "/api/connections").await["connections"][0].clone();
    assert_eq!((&listed["transport"], &listed["clientId"]), (&json!("sse"), &json!("ann")));
    assert_eq!(listed["channels"], json!(["a"]));
    let (status, _, _) = Events::ask(&node, &query, None).await;
    assert_eq!(status, 429);
    let path = "/api/clients/ann/connections/close";
    let closed = http::request(node.addr(), "POST", path, &[("authorization", &http::basic(KEY))], "").await;
    assert_eq!(closed.json(), json!({"closed": 1}));
    assert_eq!(events.next().await, None, "the stream has ended");
    assert_eq!(get(&node, "/api/connections/count").await["connections"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_sse_stream_is_kept_by_comments_and_ends_when_dropped() {
    let node = Node::start(options().limit("heartbeat_ms", 200).limit("http_stall_ms", 100)).await;
    let mut events = Events::open(&node, &format!("?channel=a&key={KEY}"), None).await;
    events.find("attached").await;
    // Longer than the timeout of a silent session.
    let began = std::time::Instant::now();
    while began.elapsed().as_millis() < 11_500 {
        assert_eq!(events.block().await.as_deref(), Some(":"));
    }
    publish(&node, "a", json!(1)).await;
    events.find("message").await;
    drop(events);
    wait_until(SOON, "the stream to end", async || {
        get(&node, "/api/connections/count").await["connections"] == 0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_that_closes_its_side_frees_its_quota_slot_at_once() {
    let tls = Tls::default();
    // No comment is written meanwhile, whose failure would end the stream.
    let long = |options: NodeOptions| options.limit("heartbeat_ms", 600_000);
    let one_slot = directory(ALL, Some(1));
    let plain = Node::start(long(NodeOptions::default().directory(one_slot.clone(), KEY))).await;
    let secure = Node::start(long(tls.node().directory(one_slot, KEY))).await;
    let query = format!("?channel=a&key={KEY}");
    for way in ["close", "half close", "more than was asked, and close", "tls", "tls without a word", "last"]
    {
        let node = if way.starts_with("tls") { &secure } else { &plain };
        // The quota slot of the former stream is free.
        let mut open = None;
        wait_until(SOON, way, async || {
            let raw = if way.starts_with("tls") {
                tls.raw(node.addr()).await
            } else {
                Raw::connect(node.addr()).await
            };
            let (status, _, events) = Events::over(raw, &query, None).await;
            open = Some(events).filter(|_| status == 200);
            open.is_some()
        })
        .await;
        let mut events = open.expect("it was just opened");
        events.find("attached").await;
        match way {
            "half close" => {
                events.raw.half_close().await;
                assert_eq!(events.next().await, None, "the answer ends as well");
            }
            "more than was asked, and close" => {
                events.raw.write(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n").await;
                publish(node, "a", json!(1)).await;
                events.find("message").await;
            }
            "tls" => events.raw.half_close().await,
            _ => {}
        }
    }
    plain.assert_well().await;
    secure.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn sse_stream_reports_present_members_and_presence_changes() {
    let node = Node::start(options()).await;
    let mut socket = Socket::open(&node, "").await;
    let change = |action: &str, client_id: &str, data: Value| json!({"op": 12, "channel": "a", "action": action, "clientId": client_id, "data": data});
    assert_eq!(socket.ask(change("enter", "ann", json!("first"))).await["op"], 1);
    let query = format!("?channel=a&channel=b&key={KEY}");
    let mut events = Events::open(&node, &query, None).await;
    let attached = [events.find("attached").await, events.find("attached").await];
    assert_eq!(attached.clone().map(|event| event.data["presence"].clone()), [json!(true), json!(false)]);
    let list = events.find("presence").await;
    assert_eq!((&list.data["op"], &list.data["channel"]), (&json!(14), &json!("a")));
    assert_eq!((members(&list), &list.data["more"]), (vec![("ann", &json!("first"))], &json!(false)));
    for (action, client_id, data) in
        [("enter", "bob", json!(1)), ("update", "ann", json!("second")), ("leave", "bob", json!(2))]
    {
        assert_eq!(socket.ask(change(action, client_id, data.clone())).await["op"], 1);
        let event = events.find("presence").await;
        let received = &event.data["presence"][0];
        assert_eq!((&event.data["op"], &received["action"]), (&json!(12), &json!(action)));
        assert_eq!((&received["clientId"], &received["data"]), (&json!(client_id), &data));
        let (a, b) = event.id.split_once(',').expect("a serial for each channel");
        assert_eq!(Some(a), event.data["serial"].as_str());
        assert_eq!(Some(b), attached[1].data["serial"].as_str());
    }
    publish(&node, "b", json!("seen")).await;
    let last = events.find("message").await.id;
    drop(events);

    assert_eq!(socket.ask(change("enter", "eve", json!(3))).await["op"], 1);
    publish(&node, "a", json!("missed a")).await;
    publish(&node, "b", json!("missed b")).await;
    assert_eq!(socket.ask(change("leave", "ann", json!(4))).await["op"], 1);
    let mut events = Events::open(&node, &query, Some(&last)).await;
    let mut received = Vec::new();
    for _ in 0..5 {
        received.push(events.next().await.expect("the stream goes on"));
    }
    let named = |name: &str| received.iter().filter(move |event| event.name == name).collect::<Vec<_>>();
    assert_eq!(
        named("attached").iter().map(|event| &event.data["resumed"]).collect::<Vec<_>>(),
        [true, true]
    );
    let messages = named("message").into_iter().map(|event| &event.data["messages"][0]["data"]);
    let mut messages: Vec<_> = messages.map(|data| data.as_str().expect("a text")).collect();
    messages.sort_unstable();
    assert_eq!(messages, ["missed a", "missed b"]);
    let lists = named("presence");
    assert_eq!(lists.len(), 1, "{lists:?}");
    assert_eq!(members(lists[0]), [("eve", &json!(3))]);
    publish(&node, "a", json!("the last")).await;
    let last = events.next().await.expect("the stream goes on");
    assert_eq!(last.data["messages"][0]["data"], "the last", "and no change that was missed");

    // The key allows only subscribe on `a`.
    let mut events = Events::open(&node, "?channel=a&key=secret.k2", None).await;
    assert_eq!(events.next().await.expect("an event").data["presence"], false);
    assert_eq!(socket.ask(change("update", "eve", json!(5))).await["op"], 1);
    publish(&node, "a", json!("after it")).await;
    assert_eq!(events.next().await.expect("an event").name, "message", "nothing of presence before it");
}

/// Gives client id and data of the members on a page.
fn members(page: &Event) -> Vec<(&str, &Value)> {
    let members = page.data["members"].as_array().expect("a list");
    members
        .iter()
        .map(|member| (member["clientId"].as_str().expect("a client id"), &member["data"]))
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_that_is_not_read_ends_alone() {
    let options = options().limit("outbox_bytes", 256 * 1024).limit("http_stall_ms", 1_000);
    let node = Node::start(options).await;
    let slow = Raw::connect_slow(node.addr(), 16 * 1024).await;
    let mut slow = Events { raw: slow, text: String::new(), waiting: VecDeque::new() };
    let head = format!("GET /realtime/sse?channel=a&key={KEY} HTTP/1.1\r\nhost: localhost\r\n\r\n");
    slow.raw.write(head.as_bytes()).await;
    assert_eq!(slow.raw.head(SOON).await.expect("an answer").0, 200);
    slow.find("attached").await;
    let mut reader = Events::open(&node, &format!("?channel=a&key={KEY}"), None).await;
    reader.find("attached").await;
    let filler = "x".repeat(60_000);
    let mut sent = 0;
    wait_until(SOON, "the slow stream to be ended", async || {
        publish(&node, "a", json!([sent, filler])).await;
        assert_eq!(
            reader.find("message").await.data["messages"][0]["data"][0],
            sent,
            "in order, none missing"
        );
        sent += 1;
        get(&node, "/api/connections/count").await["connections"] == 1
    })
    .await;
    let closed = async || !slow.raw.write(b"\r\n").await;
    wait_until(SOON, "what it left unread to be given up", closed).await;
    node.assert_well().await;
}
