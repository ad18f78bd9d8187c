//! `fanfare sub` and `pub` against a real node: only messages on stdout, and the state of the channels on stderr.

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, Node, NodeOptions, Proxy, RunningCommand, SOON, Socket, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";

async fn node() -> Node {
    let directory = Directory::default().account("acme").key("k1", "secret", ALL);
    Node::start(NodeOptions::default().directory(directory, KEY)).await
}

fn follow(url: &str, key: &str, more: &[&str]) -> RunningCommand {
    RunningCommand::start(&[&["sub", "--url", url, "--key", key], more].concat())
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
    following.wait_for_stderr("fanfare: attached to invoices", 0).await;
    let reported = following.stderr();
    assert_eq!(reported[0], "fanfare: attached to orders");
    assert!(reported[1].starts_with("fanfare: not attached to hidden: code 40160: "), "{reported:?}");
    assert_eq!(reported.len(), 3, "{reported:?}");
    let mut publisher = Socket::open(&node, "").await;
    publisher.publish("orders", json!({"name": "paid", "data": {"n": 1}})).await;
    publisher.publish("invoices", json!({"data": 2})).await;
    let lines = following.wait_for_stdout(2).await;
    let (first, second) = (json_of(&lines[0]), json_of(&lines[1]));
    assert_eq!((&first["channel"], &first["data"]), (&json!("orders"), &json!({"n": 1})));
    assert_eq!((&second["channel"], &second["data"]), (&json!("invoices"), &json!(2)));
    following.interrupt();
    assert_eq!(following.ended().await.code(), Some(130));
    assert_eq!(following.stdout().len(), 2);

    let mut refused = follow(&node.url(), "other.k2", &["hidden"]);
    assert_eq!(refused.ended().await.code(), Some(1));
    refused.wait_for_stderr("no channel is left to follow", 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_prints_presence_only_when_asked() {
    let node = node().await;
    let mut ann = Socket::open(&node, "?clientId=ann").await;
    let enter = json!({"op": 12, "channel": "room", "action": "enter", "data": "here"});
    assert_eq!(ann.ask(enter).await["op"], 1);
    let with = follow(&node.url(), KEY, &["room", "--presence"]);
    let without = follow(&node.url(), KEY, &["room"]);
    with.wait_for_stdout(1).await;
    without.wait_for_stderr("attached to room", 0).await;
    let update = json!({"op": 12, "channel": "room", "action": "update", "data": "busy"});
    assert_eq!(ann.ask(update).await["op"], 1);
    ann.publish("room", json!({"data": "hello"})).await;
    assert_eq!(ann.ask(json!({"op": 12, "channel": "room", "action": "leave"})).await["op"], 1);
    let lines = with.wait_for_stdout(4).await;
    let mut actions: Vec<Value> = lines.iter().map(|line| json_of(line)["action"].clone()).collect();
    // A message and a presence event are handled separately, so their order is not fixed.
    actions.retain(|action| !action.is_null());
    assert_eq!(actions, ["present", "update", "leave"]);
    let first = json_of(&lines[0]);
    assert_eq!((&first["clientId"], &first["data"]), (&json!("ann"), &json!("here")));
    let lines = without.wait_for_stdout(1).await;
    assert_eq!((lines.len(), &json_of(&lines[0])["data"]), (1, &json!("hello")));
    assert_eq!(with.stderr(), ["fanfare: attached to room"]);

    let empty = follow(&node.url(), KEY, &["room", "hall", "--presence"]);
    let all = empty.wait_for_stderr("fanfare: nobody is present on hall", 0).await;
    let empty_lines =
        ["attached to room", "nobody is present on room", "attached to hall", "nobody is present on hall"];
    assert_eq!((all, empty.stderr()), (4, empty_lines.map(|line| format!("fanfare: {line}")).to_vec()));
}

#[tokio::test(flavor = "multi_thread")]
async fn occupancy_is_shown_where_it_is_asked_for() {
    let node = node().await;
    let with = follow(&node.url(), KEY, &["room", "--occupancy"]);
    let without = follow(&node.url(), KEY, &["room"]);
    without.wait_for_stderr("attached to room", 0).await;
    let mut ann = Socket::open(&node, "?clientId=ann").await;
    ann.attach("room").await;
    assert_eq!(ann.ask(json!({"op": 12, "channel": "room", "action": "enter"})).await["op"], 1);
    let counts = json!({"connections": 3, "publishers": 3, "subscribers": 3, "members": 1});
    let expected = json!({"channel": "room", "occupancy": counts, "source": "cluster"});
    wait_until(SOON, "the counts", async || with.stdout().iter().any(|line| json_of(line) == expected)).await;
    // Only the counts are requested, and no members.
    assert!(with.stdout().iter().all(|line| json_of(line).get("occupancy").is_some()), "{:?}", with.stdout());
    ann.publish("room", json!({"data": "hello"})).await;
    assert_eq!(without.wait_for_stdout(1).await.len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_connection_is_printed_with_whether_messages_are_missing() {
    let mut node = Node::start(NodeOptions::default().environment("FANFARE_STORE", "none")).await;
    let proxy = Proxy::to(node.addr()).await;
    let following = follow(&proxy.url(), &node.key(), &["orders"]);
    let mut reported = following.wait_for_stderr("attached to orders", 0).await;
    let mut publisher = Socket::open(&node, "").await;
    publisher.publish("orders", json!({"data": 0})).await;
    following.wait_for_stdout(1).await;
    for number in 1..4 {
        proxy.cut();
        publisher.publish("orders", json!({"data": number})).await;
        reported =
            following.wait_for_stderr("fanfare: the connection is lost, trying again in ", reported).await;
        reported = following.wait_for_stderr("fanfare: connected again", reported).await;
        reported = following.wait_for_stderr("fanfare: attached to orders again", reported).await;
        let last = following.stderr()[reported - 1].clone();
        assert!(last.ends_with("nothing is missing (resumed: true)"), "{last}");
    }
    let numbers: Vec<Value> =
        following.wait_for_stdout(4).await.iter().map(|line| json_of(line)["data"].clone()).collect();
    assert_eq!(numbers, [0, 1, 2, 3]);

    proxy.turn_away();
    let exit = node.stop().await;
    assert!(exit.success(), "{exit}");
    reported = following.wait_for_stderr("the node says to come back later, code 50003", reported).await;
    node.restart().await;
    proxy.turn_to(node.addr());
    reported = following.wait_for_stderr("messages may be missing here (resumed: false)", reported).await;
    Socket::open(&node, "").await.publish("orders", json!({"data": "after"})).await;
    assert_eq!(json_of(&following.wait_for_stdout(5).await[4])["data"], "after");
    assert_eq!(following.stderr().len(), reported);
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
    let mut reported = following.wait_for_stderr("attached to orders", 0).await;
    following.wait_for_stdout(2).await;

    proxy.turn_away();
    proxy.cut();
    reported = following.wait_for_stderr("the connection is lost", reported).await;
    publisher.publish("orders", json!({"data": 5})).await;
    node.restart().await;
    Socket::open(&node, "").await.publish("orders", json!({"data": 6})).await;
    proxy.turn_to(node.addr());
    following.wait_for_stderr("attached to orders again, nothing is missing (resumed: true)", reported).await;
    let numbers: Vec<Value> =
        following.wait_for_stdout(4).await.iter().map(|line| json_of(line)["data"].clone()).collect();
    assert_eq!(numbers, [3, 4, 5, 6]);

    let mut wrong = follow(&node.url(), &node.key(), &["orders", "--rewind", "1h"]);
    wrong.wait_for_stderr("a time in seconds or minutes such as 30s or 5m; 1h is 60m", 0).await;
    assert_eq!(wrong.ended().await.code(), Some(2));
    let mut wrong = follow(&node.url(), &node.key(), &["orders", "--rewind", "101"]);
    let refused = "not attached to orders: code 40000: rewind must be a count of 1 to 100, or a time in seconds or minutes";
    wrong.wait_for_stderr(refused, 0).await;
    assert_eq!(wrong.ended().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn lines_are_published_once_over_lost_links() {
    let node = node().await;
    let proxy = Proxy::to(node.addr()).await;
    let following = follow(&node.url(), KEY, &["orders"]);
    following.wait_for_stderr("attached to orders", 0).await;
    let mut publishing = RunningCommand::start(&["pub", "--url", &proxy.url(), "--key", KEY, "orders", "-"]);
    let mut reported = 0;
    for number in 0..5 {
        publishing.write(&number.to_string());
        publishing.wait_for_stdout(number + 1).await;
        proxy.cut();
        reported =
            publishing.wait_for_stderr("fanfare: the connection is lost, trying again in ", reported).await;
        reported = publishing.wait_for_stderr("fanfare: connected again", reported).await;
    }
    publishing.end_stdin();
    assert_eq!(publishing.ended().await.code(), Some(0));
    let lines = following.wait_for_stdout(5).await;
    let numbers: Vec<Value> = lines.iter().map(|line| json_of(line)["data"].clone()).collect();
    assert_eq!(numbers, [0, 1, 2, 3, 4]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_stands_in_for_a_key_as_a_flag_and_as_a_variable() {
    let node = node().await;
    let url = node.url();
    let sign = async |capability: &str, client_id: &str| {
        let signing = ["token", "--jwt", "--key", KEY, "--capability", capability, "--client-id", client_id];
        RunningCommand::start(&signing).wait_for_stdout(1).await[0].clone()
    };
    let (reading, writing) =
        (sign(r#"{"orders":["subscribe"]}"#, "ada").await, sign(r#"{"orders":["publish"]}"#, "bob").await);
    // A flag takes precedence over the environment.
    let (wrong_key, url_and_reading) =
        ([("FANFARE_KEY", "wrong.k1")], [("FANFARE_URL", &*url), ("FANFARE_TOKEN", &*reading)]);
    let by_flag =
        RunningCommand::start_with(&wrong_key, &["sub", "--url", &url, "--token", &reading, "orders"]);
    let by_variable = RunningCommand::start_with(&url_and_reading, &["sub", "orders", "hidden"]);
    by_flag.wait_for_stderr("fanfare: attached to orders", 0).await;
    let reported = by_variable.wait_for_stderr("fanfare: attached to orders", 0).await;
    by_variable.wait_for_stderr("fanfare: not attached to hidden: code 40160", reported).await;
    let mut publishing =
        RunningCommand::start_with(&url_and_reading, &["pub", "--token", &writing, "orders", "1"]);
    assert_eq!(publishing.ended().await.code(), Some(0));
    for following in [&by_flag, &by_variable] {
        let message = json_of(&following.wait_for_stdout(1).await[0]);
        assert_eq!((&message["clientId"], &message["data"]), (&json!("bob"), &json!(1)));
    }
    let mut refused = RunningCommand::start_with(&url_and_reading, &["pub", "orders", "1"]);
    refused.wait_for_stderr("code 40160", 0).await;
    assert_eq!(refused.ended().await.code(), Some(1));
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_refuses_several_credentials_and_non_token_unprinted() {
    // Address without a listener; the commands fail before they connect.
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
        let mut refused = RunningCommand::start_with(environment, &arguments);
        refused.wait_for_stderr(expected, 0).await;
        assert_eq!(refused.ended().await.code(), Some(2), "{given:?}");
        assert!(!refused.stderr().concat().contains("hidden"), "{:?}", refused.stderr());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn follow_refuses_another_url_scheme_before_seeking_credentials() {
    for url in ["ftp://node.example", "localhost:1", "node.example"] {
        let mut refused = RunningCommand::start(&["sub", "--url", url, "orders"]);
        refused.wait_for_stderr("the address of the node begins with http:// or ws://", 0).await;
        assert_eq!(refused.ended().await.code(), Some(2), "{url}");
    }
}
