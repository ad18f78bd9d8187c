//! `fanfare sub` and `pub` against a real node: messages alone on stdout, and on stderr how their channels stand.

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Proxy, Running, SOON, Socket, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";

async fn node() -> Node {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    Node::start(NodeOptions::default().directory(directory, KEY)).await
}

fn follow(url: &str, key: &str, more: &[&str]) -> Running {
    Running::start(&[&["sub", "--url", url, "--key", key], more].concat())
}

fn json_of(line: &str) -> Value {
    serde_json::from_str(line).expect("a line is an object")
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_reports_attached_or_refused_and_prints_only_messages() {
    let only = r#"{ "orders" = ["subscribe"], "invoices" = ["subscribe"] }"#;
    let directory = Directory::default().account("acme").key("k1", "secret", ALL).key("k2", "other", only);
    let node = Node::start(NodeOptions::default().directory(directory, KEY)).await;
    let mut following = follow(&node.url(), "other.k2", &["orders", "hidden", "invoices"]);
    following.told("fanfare: attached to invoices", 0).await;
    let told = following.stderr();
    assert_eq!(told[0], "fanfare: attached to orders");
    assert!(told[1].starts_with("fanfare: not attached to hidden: code 40160: "), "{told:?}");
    assert_eq!(told.len(), 3, "{told:?}");
    let mut publisher = Socket::open(&node, "").await;
    publisher.publish("orders", json!({"name": "paid", "data": {"n": 1}})).await;
    publisher.publish("invoices", json!({"data": 2})).await;
    let lines = following.printed(2).await;
    let (first, second) = (json_of(&lines[0]), json_of(&lines[1]));
    assert_eq!((&first["channel"], &first["data"]), (&json!("orders"), &json!({"n": 1})));
    assert_eq!((&second["channel"], &second["data"]), (&json!("invoices"), &json!(2)));
    following.interrupt();
    assert_eq!(following.ended().await.code(), Some(130));
    assert_eq!(following.stdout().len(), 2);

    let mut refused = follow(&node.url(), "other.k2", &["hidden"]);
    assert_eq!(refused.ended().await.code(), Some(1));
    refused.told("no channel is left to follow", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_prints_presence_only_when_asked() {
    let node = node().await;
    let mut ann = Socket::open(&node, "?clientId=ann").await;
    let enter = json!({"op": 12, "channel": "room", "action": "enter", "data": "here"});
    assert_eq!(ann.ask(enter).await["op"], 1);
    let with = follow(&node.url(), KEY, &["room", "--presence"]);
    let without = follow(&node.url(), KEY, &["room"]);
    with.printed(1).await;
    without.told("attached to room", 0).await;
    let update = json!({"op": 12, "channel": "room", "action": "update", "data": "busy"});
    assert_eq!(ann.ask(update).await["op"], 1);
    ann.publish("room", json!({"data": "hello"})).await;
    assert_eq!(ann.ask(json!({"op": 12, "channel": "room", "action": "leave"})).await["op"], 1);
    let lines = with.printed(4).await;
    let mut actions: Vec<Value> = lines.iter().map(|line| json_of(line)["action"].clone()).collect();
    // A message and an event of presence go their own ways.
    actions.retain(|action| !action.is_null());
    assert_eq!(actions, ["present", "update", "leave"]);
    let first = json_of(&lines[0]);
    assert_eq!((&first["clientId"], &first["data"]), (&json!("ann"), &json!("here")));
    let lines = without.printed(1).await;
    assert_eq!((lines.len(), &json_of(&lines[0])["data"]), (1, &json!("hello")));
    assert_eq!(with.stderr(), ["fanfare: attached to room"]);

    let empty = follow(&node.url(), KEY, &["room", "hall", "--presence"]);
    let all = empty.told("fanfare: nobody is present on hall", 0).await;
    let nobody =
        ["attached to room", "nobody is present on room", "attached to hall", "nobody is present on hall"];
    assert_eq!((all, empty.stderr()), (4, nobody.map(|line| format!("fanfare: {line}")).to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn occupancy_is_shown_where_it_is_asked_for() {
    let node = node().await;
    let with = follow(&node.url(), KEY, &["room", "--occupancy"]);
    let without = follow(&node.url(), KEY, &["room"]);
    without.told("attached to room", 0).await;
    let mut ann = Socket::open(&node, "?clientId=ann").await;
    ann.attach("room").await;
    assert_eq!(ann.ask(json!({"op": 12, "channel": "room", "action": "enter"})).await["op"], 1);
    let counts = json!({"connections": 3, "publishers": 3, "subscribers": 3, "members": 1});
    let expected = json!({"channel": "room", "occupancy": counts, "source": "cluster"});
    wait_until(SOON, "the counts", async || with.stdout().iter().any(|line| json_of(line) == expected)).await;
    // Nothing but counts: members are not asked for.
    assert!(with.stdout().iter().all(|line| json_of(line).get("occupancy").is_some()), "{:?}", with.stdout());
    ann.publish("room", json!({"data": "hello"})).await;
    assert_eq!(without.printed(1).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_lost_link_is_told_with_whether_anything_is_missing() {
    let mut node = Node::start(NodeOptions::default().environment("FANFARE_STORE", "none")).await;
    let proxy = Proxy::to(node.addr()).await;
    let following = follow(&proxy.url(), &node.key(), &["orders"]);
    let mut told = following.told("attached to orders", 0).await;
    let mut publisher = Socket::open(&node, "").await;
    publisher.publish("orders", json!({"data": 0})).await;
    following.printed(1).await;
    for number in 1..4 {
        proxy.cut();
        publisher.publish("orders", json!({"data": number})).await;
        told = following.told("fanfare: the connection is lost, trying again in ", told).await;
        told = following.told("fanfare: connected again", told).await;
        told = following.told("fanfare: attached to orders again", told).await;
        let last = following.stderr()[told - 1].clone();
        assert!(last.ends_with("nothing is missing (resumed: true)"), "{last}");
    }
    let numbers: Vec<Value> =
        following.printed(4).await.iter().map(|line| json_of(line)["data"].clone()).collect();
    assert_eq!(numbers, [0, 1, 2, 3]);

    proxy.turn_away();
    let exit = node.stop().await;
    assert!(exit.success(), "{exit}");
    told = following.told("the node says to come back later, code 50003", told).await;
    node.restart().await;
    proxy.turn_to(node.addr());
    told = following.told("messages may be missing here (resumed: false)", told).await;
    Socket::open(&node, "").await.publish("orders", json!({"data": "after"})).await;
    assert_eq!(json_of(&following.printed(5).await[4])["data"], "after");
    assert_eq!(following.stderr().len(), told);
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_starts_with_rewind_and_continues_over_node_restart() {
    let mut node = Node::start(NodeOptions::default()).await;
    let mut publisher = Socket::open(&node, "").await;
    for number in 0..5 {
        publisher.publish("orders", json!({"data": number})).await;
    }
    let proxy = Proxy::to(node.addr()).await;
    let following = follow(&proxy.url(), &node.key(), &["orders", "--rewind", "2"]);
    let mut told = following.told("attached to orders", 0).await;
    following.printed(2).await;

    proxy.turn_away();
    proxy.cut();
    told = following.told("the connection is lost", told).await;
    publisher.publish("orders", json!({"data": 5})).await;
    node.restart().await;
    Socket::open(&node, "").await.publish("orders", json!({"data": 6})).await;
    proxy.turn_to(node.addr());
    following.told("attached to orders again, nothing is missing (resumed: true)", told).await;
    let numbers: Vec<Value> =
        following.printed(4).await.iter().map(|line| json_of(line)["data"].clone()).collect();
    assert_eq!(numbers, [3, 4, 5, 6]);

    let mut wrong = follow(&node.url(), &node.key(), &["orders", "--rewind", "1h"]);
    wrong.told("a time in seconds or minutes such as 30s or 5m; 1h is 60m", 0).await;
    assert_eq!(wrong.ended().await.code(), Some(2));
    let mut wrong = follow(&node.url(), &node.key(), &["orders", "--rewind", "101"]);
    let refused = "not attached to orders: code 40000: rewind must be a count of 1 to 100, or a time in seconds or minutes";
    wrong.told(refused, 0).await;
    assert_eq!(wrong.ended().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_are_published_once_over_lost_links() {
    let node = node().await;
    let proxy = Proxy::to(node.addr()).await;
    let following = follow(&node.url(), KEY, &["orders"]);
    following.told("attached to orders", 0).await;
    let mut publishing = Running::start(&["pub", "--url", &proxy.url(), "--key", KEY, "orders", "-"]);
    let mut told = 0;
    for number in 0..5 {
        publishing.write(&number.to_string());
        publishing.printed(number + 1).await;
        proxy.cut();
        told = publishing.told("fanfare: the connection is lost, trying again in ", told).await;
        told = publishing.told("fanfare: connected again", told).await;
    }
    publishing.end_stdin();
    assert_eq!(publishing.ended().await.code(), Some(0));
    let lines = following.printed(5).await;
    let numbers: Vec<Value> = lines.iter().map(|line| json_of(line)["data"].clone()).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_stands_in_for_a_key_as_a_flag_and_as_a_variable() {
    let node = node().await;
    let url = node.url();
    let sign = async |capability: &str, client_id: &str| {
        let signing = ["token", "--jwt", "--key", KEY, "--capability", capability, "--client-id", client_id];
        Running::start(&signing).printed(1).await[0].clone()
    };
    let (reading, writing) =
        (sign(r#"{"orders":["subscribe"]}"#, "ada").await, sign(r#"{"orders":["publish"]}"#, "bob").await);
    // A flag beats the environment.
    let (wrong_key, url_and_reading) =
        ([("FANFARE_KEY", "wrong.k1")], [("FANFARE_URL", &*url), ("FANFARE_TOKEN", &*reading)]);
    let by_flag = Running::start_with(&wrong_key, &["sub", "--url", &url, "--token", &reading, "orders"]);
    let by_variable = Running::start_with(&url_and_reading, &["sub", "orders", "hidden"]);
    by_flag.told("fanfare: attached to orders", 0).await;
    let told = by_variable.told("fanfare: attached to orders", 0).await;
    by_variable.told("fanfare: not attached to hidden: code 40160", told).await;
    let mut publishing = Running::start_with(&url_and_reading, &["pub", "--token", &writing, "orders", "1"]);
    assert_eq!(publishing.ended().await.code(), Some(0));
    for following in [&by_flag, &by_variable] {
        let message = json_of(&following.printed(1).await[0]);
        assert_eq!((&message["clientId"], &message["data"]), (&json!("bob"), &json!(1)));
    }
    let mut refused = Running::start_with(&url_and_reading, &["pub", "orders", "1"]);
    refused.told("code 40160", 0).await;
    assert_eq!(refused.ended().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_refuses_several_credentials_and_non_token_unprinted() {
    // Nobody listens there, and nobody is asked.
    let url = "http://127.0.0.1:1";
    let both = [("FANFARE_KEY", "hidden.k1"), ("FANFARE_TOKEN", "hidden.b.c")];
    let no_jwt = "what was given as the token is no service JWT";
    type Case<'a> = (&'a [(&'a str, &'a str)], &'a [&'a str], &'a str);
    let cases: [Case<'_>; 6] = [
        (&[], &["--token", "hidden.b.c", "--key", "hidden.k1"], "cannot be used with"),
        (&[], &["--token", "hidden.b.c", "--no-key"], "cannot be used with"),
        (&both, &[], "FANFARE_KEY and FANFARE_TOKEN are both set"),
        (&[], &["--token", "hidden.k1"], no_jwt),
        (&[], &["--token", r#"{"keyName":"k1","mac":"hidden"}"#], no_jwt),
        (&[("FANFARE_KEY", "hidden.k1")], &["--token", ""], no_jwt),
    ];
    for (environment, given, expected) in cases {
        let arguments = [&["sub", "--url", url, "orders"], given].concat();
        let mut refused = Running::start_with(environment, &arguments);
        refused.told(expected, 0).await;
        assert_eq!(refused.ended().await.code(), Some(2), "{given:?}");
        assert!(!refused.stderr().concat().contains("hidden"), "{:?}", refused.stderr());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_refuses_another_url_scheme_before_seeking_credentials() {
    for url in ["ftp://node.example", "localhost:1", "node.example"] {
        let mut refused = Running::start(&["sub", "--url", url, "orders"]);
        refused.told("the address of the node begins with http:// or ws://", 0).await;
        assert_eq!(refused.ended().await.code(), Some(2), "{url}");
    }
}
