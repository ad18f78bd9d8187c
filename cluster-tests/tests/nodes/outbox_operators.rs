//! `fanfare outbox` with a running node, and with the data folder of a stopped one.

use std::time::Duration;

use fanfare_cluster_tests::command::RunningCommand;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::receiver::{Answer, Receiver};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, SOON, http, wait_until};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const TARGET: &str = "acme/orders";

async fn node(receiver: &Receiver) -> Node {
    let hook = format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"hush\"", receiver.url());
    let directory = Directory::default().account("acme").integration("orders", &hook);
    let options = NodeOptions::default().directory(directory.key("k1", "secret", ALL), KEY);
    Node::start(options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")).await
}

async fn publish(node: &Node, data: u64) {
    let authorization = http::basic(KEY);
    let headers = [("authorization", authorization.as_str())];
    let body = json!({ "data": data }).to_string();
    let answer = http::request(node.addr(), "POST", "/api/channels/a/publish", &headers, body).await;
    assert_eq!(answer.status, 200);
}

/// Runs the command; gives the exit code and the lines of stdout.
async fn outbox(node: &Node, arguments: &[&str]) -> (Option<i32>, Vec<String>) {
    let folder = node.data_dir().to_str().expect("a path in UTF-8");
    let environment = [("FANFARE_WEBHOOK_ALLOW", "127.0.0.1"), ("FANFARE_DATA_DIR", folder)];
    let mut running = RunningCommand::start_with(&environment, &[&["outbox"], arguments].concat());
    let ended = running.ended_within(Duration::from_secs(60)).await;
    (ended.code(), running.stdout())
}

async fn shown(node: &Node, arguments: &[&str]) -> Vec<Value> {
    let (code, lines) = outbox(node, &[&["show", TARGET], arguments].concat()).await;
    assert_eq!(code, Some(0));
    lines.iter().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

fn data(receiver: &Receiver) -> Vec<Value> {
    let taken = receiver.received().into_iter().filter(|request| request.is_taken);
    taken
        .flat_map(|request| request.envelope()["items"].as_array().cloned().expect("items"))
        .map(|item| item["data"].clone())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn running_node_shows_and_resends_its_dead_letters() {
    let receiver = Receiver::start().await;
    let node = node(&receiver).await;
    let (code, lines) = outbox(&node, &["list"]).await;
    assert_eq!((code, lines.len()), (Some(0), 1), "{lines:?}");
    receiver.answer(Answer::Status(400));
    for number in 0..3 {
        publish(&node, number).await;
    }
    let dead = async || node.metric("fanfare_outbox_dead_letters_total").await == 3.0;
    wait_until(SOON, "dead letters", dead).await;
    let (_, lines) = outbox(&node, &["list"]).await;
    let columns: Vec<_> = lines[1].split_whitespace().collect();
    assert_eq!(columns, [TARGET, "webhook", "0", "0", "3", "sending", "status", "400"]);
    let (_, lines) = outbox(&node, &["list", "--json"]).await;
    let target: Value = serde_json::from_str(&lines[0]).expect("JSON");
    assert_eq!((&target["target"], &target["deadEvents"]), (&json!(TARGET), &json!(3)));
    let events = shown(&node, &[]).await;
    assert_eq!(events.len(), 3);
    assert_eq!((&events[1]["item"]["data"], &events[1]["state"]), (&json!(1), &json!("dead")));
    assert!(events[1]["reason"].as_str().is_some_and(|reason| reason.contains("400")), "{}", events[1]);
    assert_eq!(shown(&node, &["--count", "2"]).await.len(), 2);
    assert_eq!(shown(&node, &["--state", "waiting"]).await.len(), 0);
    receiver.answer(Answer::Status(200));
    let (code, lines) = outbox(&node, &["retry", TARGET, "--event", &events[1]["event"].to_string()]).await;
    assert_eq!((code, &*lines[0]), (Some(0), "1 events are sent again; 2 dead letters are left"));
    wait_until(SOON, "the one", async || data(&receiver) == [json!(1)]).await;
    let (_, lines) = outbox(&node, &["retry", TARGET]).await;
    assert_eq!(lines, ["2 events are sent again"]);
    wait_until(SOON, "all", async || data(&receiver) == [json!(1), json!(0), json!(2)]).await;
    assert_eq!(outbox(&node, &["drain"]).await.0, Some(1), "it sends by itself");
    assert_eq!(outbox(&node, &["retry", TARGET]).await.0, Some(1), "none is left");
    assert_eq!(outbox(&node, &["retry", "acme"]).await.0, Some(2));
    for (method, path, body, status) in [
        ("GET", "/outbox/acme/orders?state=all", "", 400),
        ("POST", "/outbox/acme/orders/retry", "[]", 400),
        ("POST", "/outbox/acme/orders/retry", "{\"event\":1}", 400),
        ("GET", "/outbox/acme/orders", "", 200),
        ("GET", "/outbox/acme/other", "", 404),
        ("POST", "/outbox/acme/other/retry", "", 404),
        ("POST", "/outbox/acme/queue:%22/retry", "", 404),
    ] {
        let token = std::fs::read_to_string(node.data_dir().join("admin-token")).expect("a token");
        let authorization = format!("Bearer {}", token.trim());
        let headers = [("authorization", authorization.as_str())];
        let answer = http::request(node.admin(), method, path, &headers, body).await;
        assert_eq!(answer.status, status, "{path}");
        if status == 404 {
            let (_, named) = path.trim_end_matches("/retry").rsplit_once('/').expect("a target");
            let named = named.replace("%22", "\"");
            assert!(answer.error().contains(&format!("acme/{named}")), "{path}: {}", answer.error());
        }
        assert_eq!(http::request(node.admin(), method, path, &[], body).await.status, 401, "{path}");
    }
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn outbox_folder_of_a_killed_node_is_drained() {
    let receiver = Receiver::start().await;
    let mut node = node(&receiver).await;
    receiver.answer(Answer::Status(400));
    publish(&node, 0).await;
    let dead = async || node.metric("fanfare_outbox_dead_letters_total").await == 1.0;
    wait_until(SOON, "a dead letter", dead).await;
    receiver.answer(Answer::Status(500));
    for number in 1..4 {
        publish(&node, number).await;
    }
    node.kill();
    let (code, lines) = outbox(&node, &["list"]).await;
    let columns: Vec<_> = lines[1].split_whitespace().collect();
    assert_eq!((code, columns[2], columns[4], columns[5]), (Some(0), "3", "1", "stopped"), "{lines:?}");
    let states: Vec<_> = shown(&node, &[]).await.iter().map(|event| event["state"].clone()).collect();
    assert_eq!(states, ["dead", "waiting", "waiting", "waiting"]);
    let (code, lines) = outbox(&node, &["drain", "--patience", "1s"]).await;
    assert_eq!(code, Some(1), "the receiver takes nothing: {lines:?}");
    let (_, lines) = outbox(&node, &["retry", TARGET]).await;
    assert_eq!(lines, ["1 events are sent again after the next start"]);
    receiver.answer(Answer::Status(200));
    let (code, lines) = outbox(&node, &["drain"]).await;
    assert_eq!((code, lines.len()), (Some(0), 1), "{lines:?}");
    let mut received = data(&receiver);
    received.dedup();
    assert_eq!(received, [json!(1), json!(2), json!(3), json!(0)]);
    node.restart().await;
    publish(&node, 4).await;
    wait_until(SOON, "the next one", async || data(&receiver).last() == Some(&json!(4))).await;
    node.assert_no_panic();
    node.kill();
    let directory = node.data_dir().join("directory.toml");
    std::fs::remove_file(&directory).expect("the node has a directory");
    assert_eq!(outbox(&node, &["drain"]).await.0, Some(1));
    assert!(!directory.exists(), "it is not made");
}

#[tokio::test(flavor = "multi_thread")]
async fn folder_without_an_outbox_is_said_to_have_none() {
    let mut node = Node::start(NodeOptions::default()).await;
    node.kill();
    let (code, lines) = outbox(&node, &["list"]).await;
    assert_eq!((code, lines), (Some(1), Vec::<String>::new()));
    assert!(!node.data_dir().join("outbox").exists(), "it is not made");
}
