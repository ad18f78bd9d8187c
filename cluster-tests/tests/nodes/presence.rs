//! Presence on one node: members, events, and leaves after a lost connection.

use std::time::{Duration, Instant};

use fanfare_client::sign::{self, JwtParams};
use fanfare_client::{Client, Credential, Event, Options};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::socket::{Socket, SocketEnd};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, SOON, http, wait_until};
use serde_json::value::RawValue;
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const EVERYTHING: &str = r#"{"*":["subscribe","publish","presence","history"]}"#;

fn options() -> NodeOptions {
    NodeOptions::default().directory(Directory::default().account("acme").key("k1", "secret", ALL), KEY)
}

async fn node() -> Node {
    Node::start(options()).await
}

async fn open(node: &Node, client_id: &str) -> Socket {
    Socket::open(node, &format!("?clientId={client_id}")).await
}

async fn ask(socket: &mut Socket, action: &str, channel: &str, more: Value) -> Value {
    let mut request = json!({"op": 12, "channel": channel, "action": action});
    request.as_object_mut().expect("an object").extend(more.as_object().cloned().unwrap_or_default());
    socket.ask(request).await
}

async fn done(socket: &mut Socket, action: &str, channel: &str, more: Value) {
    let answer = ask(socket, action, channel, more).await;
    assert_eq!(answer["op"], 1, "{answer}");
    assert!(answer.get("serials").is_none(), "{answer}");
}

async fn event(socket: &mut Socket) -> Value {
    let frame = socket.find("a presence event", |frame| frame["op"] == 12).await;
    assert!(frame["serial"].is_string(), "{frame}");
    assert_eq!(frame["presence"].as_array().map(Vec::len), Some(1), "{frame}");
    frame["presence"][0].clone()
}

fn action_and_client(event: &Value) -> (&str, &str) {
    (event["action"].as_str().unwrap_or_default(), event["clientId"].as_str().unwrap_or_default())
}

/// Reads all pages of a member list; gives the frames that came between them.
async fn synced(socket: &mut Socket, channel: &str) -> Vec<Value> {
    let mut members = Vec::new();
    loop {
        let page = socket.find("a page of members", |frame| frame["op"] == 14 || frame["op"] == 12).await;
        assert_eq!(
            (&page["op"], &page["channel"]),
            (&json!(14), &json!(channel)),
            "no event before the list"
        );
        assert!(page.to_string().len() <= 64 * 1024);
        members.extend(page["members"].as_array().expect("members").iter().cloned());
        if page["more"] == false {
            return members;
        }
    }
}

/// Makes a token of the key for a minute.
fn token(capability: &str, client_id: Option<&str>) -> String {
    let params = JwtParams {
        capability: capability.into(),
        client_id: client_id.map(Into::into),
        issued_s: None,
        ttl_s: 60,
    };
    sign::jwt(&KEY.parse().expect("a key"), &params).expect("a token")
}

#[tokio::test(flavor = "multi_thread")]
async fn subscribers_get_enter_update_and_leave_events() {
    let node = node().await;
    for query in ["", "?format=msgpack"] {
        let channel = format!("room:{}", query.len());
        let mut watcher = Socket::open(&node, query).await;
        assert_eq!(watcher.attach(&channel).await["presence"], false, "nobody is there");
        let mut ann = open(&node, "ann").await;
        done(&mut ann, "enter", &channel, json!({"data": {"n": 1.0}})).await;
        let entered = event(&mut watcher).await;
        assert_eq!((action_and_client(&entered), &entered["data"]), (("enter", "ann"), &json!({"n": 1.0})));
        assert_eq!(entered["connectionId"], ann.connected["connectionId"]);
        assert!(entered["timestamp"].is_u64());
        done(&mut ann, "enter", &channel, json!({"data": {"n": 1.0}})).await;
        done(&mut ann, "enter", &channel, json!({"data": {"n": 2}})).await;
        assert_eq!(
            action_and_client(&event(&mut watcher).await),
            ("update", "ann"),
            "an equal enter is no event"
        );
        done(&mut ann, "update", &channel, json!({})).await;
        let updated = event(&mut watcher).await;
        assert_eq!((action_and_client(&updated), updated.get("data")), (("update", "ann"), None));
        done(&mut ann, "leave", &channel, json!({"data": "bye"})).await;
        let left = event(&mut watcher).await;
        assert_eq!((action_and_client(&left), &left["data"]), (("leave", "ann"), &json!("bye")));
        done(&mut ann, "leave", &channel, json!({})).await;
        done(&mut ann, "update", &channel, json!({"data": null})).await;
        let entered = event(&mut watcher).await;
        assert_eq!(
            (action_and_client(&entered), entered.get("data")),
            (("enter", "ann"), Some(&Value::Null))
        );
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn members_map_connections_and_client_ids_many_to_many() {
    let node = node().await;
    let (mut first, mut second) = (Socket::open(&node, "").await, Socket::open(&node, "").await);
    for name in ["ann", "bob"] {
        done(&mut first, "enter", "room", json!({"clientId": name, "data": 1})).await;
    }
    done(&mut second, "enter", "room", json!({"clientId": "ann", "data": 2})).await;
    let mut watcher = Socket::open(&node, "").await;
    assert_eq!(watcher.attach("room").await["presence"], true);
    let members = synced(&mut watcher, "room").await;
    let mut seen: Vec<String> = members
        .iter()
        .map(|member| format!("{} {} {}", member["clientId"], member["connectionId"], member["data"]))
        .collect();
    let (one, two) = (first.connected["connectionId"].clone(), second.connected["connectionId"].clone());
    let mut expected =
        [format!("\"ann\" {one} 1"), format!("\"bob\" {one} 1"), format!("\"ann\" {two} 2")].to_vec();
    seen.sort();
    expected.sort();
    assert_eq!(seen, expected);
    done(&mut first, "leave", "room", json!({"clientId": "ann"})).await;
    let left = event(&mut watcher).await;
    assert_eq!((action_and_client(&left), &left["connectionId"]), (("leave", "ann"), &one));
    assert_eq!(left["data"], 1, "a leave without data has the last");
}

#[tokio::test(flavor = "multi_thread")]
async fn paged_member_list_is_whole_and_events_come_after_its_end() {
    let options = options().limit("controls_per_second", 0);
    let node = Node::start(options).await;
    let mut crowd = Socket::open(&node, "").await;
    let data = "x".repeat(16_000);
    for n in 0..40 {
        done(&mut crowd, "enter", "room", json!({"clientId": format!("c{n}"), "data": data})).await;
    }
    let mut watcher = Socket::open(&node, "").await;
    watcher.send(&json!({"op": 8, "id": "a", "channel": "room"})).await;
    done(&mut crowd, "update", "room", json!({"clientId": "c0", "data": "new"})).await;
    let attached = watcher.next().await;
    assert_eq!((&attached["op"], &attached["presence"]), (&json!(9), &json!(true)));
    let members = synced(&mut watcher, "room").await;
    assert_eq!(members.len(), 40);
    let listed = members.iter().find(|member| member["clientId"] == "c0").expect("c0");
    if listed["data"] != "new" {
        assert_eq!(action_and_client(&event(&mut watcher).await), ("update", "c0"));
    }
    done(&mut crowd, "leave", "room", json!({"clientId": "c1"})).await;
    assert_eq!(action_and_client(&event(&mut watcher).await), ("leave", "c1"), "nothing came twice");
}

#[tokio::test(flavor = "multi_thread")]
async fn attach_modes_decide_presence_and_each_grant_sends_members() {
    let node = node().await;
    let mut ann = open(&node, "ann").await;
    done(&mut ann, "enter", "room", json!({})).await;
    let mut watcher = Socket::open(&node, "").await;
    let attach = |modes: Value| json!({"op": 8, "channel": "room", "modes": modes});
    let attached = watcher.ask(attach(json!(["subscribe"]))).await;
    assert_eq!(attached["presence"], false);
    done(&mut ann, "update", "room", json!({"data": 1})).await;
    ann.publish("room", json!({"data": "m1"})).await;
    assert_eq!(watcher.next().await["op"], 13, "no presence was asked for");
    let attached = watcher.ask(attach(json!(["presence"]))).await;
    assert_eq!((&attached["presence"], &attached["resumed"]), (&json!(true), &json!(true)));
    assert_eq!(synced(&mut watcher, "room").await[0]["data"], 1);
    ann.publish("room", json!({"data": "m2"})).await;
    done(&mut ann, "update", "room", json!({"data": 2})).await;
    let frame = watcher.next().await;
    assert_eq!((&frame["op"], &frame["presence"][0]["data"]), (&json!(12), &json!(2)), "no messages");
    let attached = watcher.ask(json!({"op": 8, "channel": "room"})).await;
    assert_eq!(attached["presence"], true, "an attach that still grants it repeats the list");
    assert_eq!(synced(&mut watcher, "room").await.len(), 1);
    ann.publish("room", json!({"data": "m3"})).await;
    assert_eq!(watcher.message("room").await["messages"][0]["data"], "m3");
    let detached = watcher.ask(json!({"op": 10, "channel": "room"})).await;
    assert_eq!(detached["op"], 11);
    done(&mut ann, "update", "room", json!({"data": 3})).await;
    watcher.send(&json!({"op": 0, "id": "h"})).await;
    assert_eq!(watcher.next().await["op"], 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn resume_for_presence_alone_replays_no_messages() {
    let node = node().await;
    let mut ann = open(&node, "ann").await;
    let serial = Socket::open(&node, "").await.attach("room").await["serial"].clone();
    for n in 0..3 {
        ann.publish("room", json!({"data": n})).await;
    }
    done(&mut ann, "enter", "room", json!({})).await;
    let mut watcher = Socket::open(&node, "").await;
    let attach = json!({"op": 8, "channel": "room", "modes": ["presence"], "serial": serial});
    let attached = watcher.ask(attach).await;
    assert_eq!((&attached["resumed"], &attached["presence"]), (&json!(true), &json!(true)));
    assert_eq!(watcher.next().await["op"], 14);
    let attached = watcher.ask(json!({"op": 8, "channel": "room"})).await;
    assert_eq!(attached["op"], 9);
    assert_eq!(watcher.next().await["op"], 14);
    ann.publish("room", json!({"data": "new"})).await;
    let frame = watcher.next().await;
    assert_eq!((&frame["op"], &frame["messages"][0]["data"]), (&json!(13), &json!("new")));
}

#[tokio::test(flavor = "multi_thread")]
async fn member_stays_after_detach_and_sees_own_events_without_echo() {
    let node = node().await;
    let mut ann = Socket::open(&node, "?clientId=ann&echo=false").await;
    ann.attach("room").await;
    done(&mut ann, "enter", "room", json!({})).await;
    assert_eq!(action_and_client(&event(&mut ann).await), ("enter", "ann"));
    assert_eq!(ann.ask(json!({"op": 10, "channel": "room"})).await["op"], 11);
    let mut watcher = Socket::open(&node, "").await;
    assert_eq!(watcher.attach("room").await["presence"], true);
    assert_eq!(synced(&mut watcher, "room").await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn clean_end_leaves_at_once_and_loss_after_presence_timeout() {
    let node = Node::start(options().limit("presence_grace_ms", 1_500)).await;
    let mut watcher = Socket::open(&node, "").await;
    watcher.attach("room").await;
    let mut clean = open(&node, "clean").await;
    done(&mut clean, "enter", "room", json!({"data": 7})).await;
    event(&mut watcher).await;
    clean.send(&json!({"op": 5})).await;
    let begun = Instant::now();
    let left = event(&mut watcher).await;
    assert_eq!(
        (action_and_client(&left), &left["data"]),
        (("leave", "clean"), &json!(7)),
        "with its last data"
    );
    assert!(begun.elapsed() < Duration::from_millis(1_000), "{:?}", begun.elapsed());

    let mut cut = open(&node, "cut").await;
    done(&mut cut, "enter", "room", json!({})).await;
    event(&mut watcher).await;
    let begun = Instant::now();
    drop(cut);
    assert_eq!(watcher.next_within(Duration::from_millis(1_000)).await, Err(SocketEnd::Silence));
    assert_eq!(action_and_client(&event(&mut watcher).await), ("leave", "cut"));
    assert!(begun.elapsed() >= Duration::from_millis(1_400), "{:?}", begun.elapsed());
}

#[tokio::test(flavor = "multi_thread")]
async fn session_takeover_keeps_members_without_leave_or_enter() {
    let node = Node::start(options().limit("presence_grace_ms", 1_500)).await;
    let mut watcher = Socket::open(&node, "").await;
    watcher.attach("room").await;
    let mut ann = open(&node, "ann").await;
    done(&mut ann, "enter", "room", json!({"data": 1})).await;
    event(&mut watcher).await;
    let key = ann.connected["connectionKey"].as_str().expect("a key").to_owned();
    drop(ann);
    let mut again = open(&node, &format!("ann&resume={key}")).await;
    assert_eq!(again.connected["resumed"], true);
    done(&mut again, "enter", "room", json!({"data": 1})).await;
    assert_eq!(watcher.next_within(Duration::from_millis(2_500)).await, Err(SocketEnd::Silence));
    again.send(&json!({"op": 5})).await;
    assert_eq!(action_and_client(&event(&mut watcher).await), ("leave", "ann"));
}

#[tokio::test(flavor = "multi_thread")]
async fn members_not_granted_by_the_new_token_leave_on_takeover() {
    let node = node().await;
    let mut watcher = Socket::open(&node, "").await;
    watcher.attach("room").await;
    let mut ann = Socket::open_as(&node, "", &http::bearer(&token(EVERYTHING, Some("ann")))).await;
    done(&mut ann, "enter", "room", json!({})).await;
    event(&mut watcher).await;
    let query = format!("?resume={}", ann.connected["connectionKey"].as_str().expect("a key"));
    let narrow = token(r#"{"*":["subscribe"]}"#, Some("ann"));
    let again = Socket::open_as(&node, &query, &http::bearer(&narrow)).await;
    assert_eq!(again.connected["resumed"], true);
    assert_eq!(action_and_client(&event(&mut watcher).await), ("leave", "ann"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_that_takes_presence_away_makes_members_leave_at_once() {
    let node = node().await;
    let mut watcher = Socket::open(&node, "").await;
    watcher.attach("room:1").await;
    watcher.attach("hall").await;
    let mut ann = Socket::open_as(&node, "", &http::bearer(&token(EVERYTHING, Some("ann")))).await;
    done(&mut ann, "enter", "room:1", json!({})).await;
    done(&mut ann, "enter", "hall", json!({})).await;
    event(&mut watcher).await;
    event(&mut watcher).await;
    let narrow = token(r#"{"*":["subscribe"],"hall":["presence"]}"#, Some("ann"));
    let ack = ann.ask(json!({"op": 15, "accessToken": narrow})).await;
    assert_eq!(ack["op"], 1);
    let frame = watcher.find("a leave", |frame| frame["op"] == 12).await;
    assert_eq!((&frame["channel"], &frame["presence"][0]["action"]), (&json!("room:1"), &json!("leave")));
    let refused = ask(&mut ann, "enter", "room:1", json!({})).await;
    assert_eq!(refused["code"], 40160);
    done(&mut ann, "update", "hall", json!({})).await;
    assert_eq!(action_and_client(&event(&mut watcher).await), ("update", "ann"), "and stays where it may be");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_revoked_key_takes_its_members_with_it() {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL).key("k2", "other", ALL);
    let node = Node::start(NodeOptions::default().directory(directory, KEY)).await;
    let mut watcher = Socket::open(&node, "").await;
    watcher.attach("room").await;
    let mut ann = Socket::open_as(&node, "?clientId=ann", &http::basic("other.k2")).await;
    done(&mut ann, "enter", "room", json!({})).await;
    event(&mut watcher).await;
    let revoked = Directory::default().account("acme").key("k1", "secret", ALL).revoked_key("k2", "other");
    node.replace_directory(&revoked);
    assert_eq!(action_and_client(&event(&mut watcher).await), ("leave", "ann"));
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_requests_without_name_or_permission_are_refused() {
    let node = node().await;
    let mut anonymous = Socket::open(&node, "").await;
    assert_eq!(ask(&mut anonymous, "enter", "room", json!({})).await["code"], 40000, "nobody is named");
    assert_eq!(ask(&mut anonymous, "join", "room", json!({"clientId": "ann"})).await["code"], 40000);
    assert_eq!(ask(&mut anonymous, "enter", "room", json!({"clientId": "*"})).await["code"], 40000);
    assert_eq!(ask(&mut anonymous, "enter", "[room", json!({"clientId": "ann"})).await["code"], 40003);
    let mut forced = Socket::open_as(&node, "", &http::bearer(&token(EVERYTHING, Some("ann")))).await;
    assert_eq!(ask(&mut forced, "enter", "room", json!({"clientId": "bob"})).await["code"], 40160);
    done(&mut forced, "enter", "room", json!({"clientId": "ann"})).await;
    let without = token(r#"{"*":["subscribe","publish"]}"#, Some("bob"));
    let mut without = Socket::open_as(&node, "", &http::bearer(&without)).await;
    assert_eq!(ask(&mut without, "enter", "room", json!({})).await["code"], 40160);
    let attached = without.attach("room").await;
    assert_eq!((&attached["presence"], attached["modes"].as_array().map(Vec::len)), (&json!(false), Some(2)));
}

#[tokio::test(flavor = "multi_thread")]
async fn data_and_members_at_their_limit_and_one_past() {
    let node = Node::start(options().limit("controls_per_second", 0)).await;
    let mut crowd = Socket::open(&node, "?clientId=ann").await;
    let text = |bytes: usize| json!({"data": "x".repeat(bytes - 2)});
    done(&mut crowd, "enter", "big", text(16_384)).await;
    assert_eq!(ask(&mut crowd, "update", "big", text(16_385)).await["code"], 40009);

    let mut ids = Vec::new();
    for n in 0..5_001 {
        let request = json!({"op": 12, "channel": "room", "action": "enter", "clientId": format!("c{n}")});
        ids.push(crowd.start(request).await);
    }
    let mut refused = Vec::new();
    for id in &ids {
        let answer = crowd.find("an answer", |frame| frame["id"] == **id).await;
        if answer["op"] != 1 {
            refused.push((id.clone(), answer["code"].clone()));
        }
    }
    assert_eq!(refused, [(ids[5_000].clone(), json!(42900))]);
    let mut watcher = Socket::open(&node, "").await;
    assert_eq!(watcher.attach("room").await["presence"], true);
    assert_eq!(synced(&mut watcher, "room").await.len(), 5_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_does_not_move_the_position_of_the_messages() {
    let node = node().await;
    let mut watcher = open(&node, "ann").await;
    let before = watcher.attach("room").await["serial"].clone();
    done(&mut watcher, "enter", "room", json!({})).await;
    let frame = watcher.find("an event", |frame| frame["op"] == 12).await;
    assert_eq!(frame["serial"], before);
}

#[tokio::test(flavor = "multi_thread")]
async fn unread_member_lists_are_bounded_and_a_late_reader_gets_all() {
    let node = Node::start(options().limit("controls_per_second", 0).limit("outbox_bytes", 100_000)).await;
    let mut crowd = Socket::open(&node, "").await;
    let data = "x".repeat(16_000);
    for n in 0..1_000 {
        crowd
            .start(json!({"op": 12, "channel": "room", "action": "enter", "clientId": format!("c{n}"), "data": data}))
            .await;
    }
    wait_until(SOON, "all to be present", async || {
        let mut late = Socket::open(&node, "").await;
        late.attach("room").await["presence"] == true && synced(&mut late, "room").await.len() == 1_000
    })
    .await;
    let resident = node.resident_bytes();
    let mut idle = Vec::new();
    for _ in 0..30 {
        let mut socket = Socket::open(&node, "").await;
        socket.attach("room").await;
        idle.push(socket);
    }
    let grown = node.resident_bytes().saturating_sub(resident);
    assert!(grown < 40 * 1024 * 1024, "30 lists of 16 MB that nobody reads take {grown} bytes");
    assert_eq!(synced(&mut idle[0], "room").await.len(), 1_000, "a list is not held against the outbox");
    node.assert_well().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn client_library_delivers_presence_lists_and_events() {
    let node = node().await;
    let credential = || Credential::Token(token(EVERYTHING, None));
    let mut watcher = Client::connect(Options::new(node.url(), credential())).await.expect("connected");
    let named = Options { client_id: Some("ann".into()), ..Options::new(node.url(), credential()) };
    let ann = Client::connect(named).await.expect("connected");
    let data = |text: &str| Some(RawValue::from_string(text.into()).expect("JSON"));
    ann.enter("room", data("1.0")).await.expect("entered");
    assert!(watcher.attach("room").await.expect("attached").presence);
    let Some(Event::Members(list)) = watcher.next().await else { unreachable!("the list") };
    assert_eq!((list.members[0].client_id.as_str(), list.members.len()), ("ann", 1));

    ann.update("room", data("2.0")).await.expect("updated");
    ann.leave("room", None).await.expect("left");
    for expected in [("update", "2.0"), ("leave", "2.0")] {
        let Some(Event::Presence(presence)) = watcher.next().await else { unreachable!("an event") };
        let event = &presence.events[0];
        assert_eq!((event.action.as_str(), event.data.as_ref().map_or("", |data| data.get())), expected);
    }
    assert!(!watcher.attach("room").await.expect("attached").presence, "nobody is left");
}
