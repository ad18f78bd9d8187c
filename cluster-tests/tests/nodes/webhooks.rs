//! Webhooks of real nodes: each acknowledged message reaches the target at least once, in the order of its channel, signed.

use std::collections::HashMap;
use std::time::Duration;

use fanfare_cluster_tests::attempts::{assert_whole_batches, until_sent};
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::receiver::{Answer, ReceivedRequest, Receiver};
use fanfare_cluster_tests::{Directory, Node, NodeOptions, SOON, Socket, hostile, http, wait_until};
use fanfare_proto::path::encode_channel;
use fanfare_proto::webhook::{EVENT_ID, is_signed};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const SECRET: &str = "hush";
const SAFE: Duration = Duration::from_secs(60);

fn hook(receiver: &Receiver, more: &str) -> String {
    format!("kind = \"webhook\"\nurl = \"{}\"\nsecret = \"{SECRET}\"\n{more}", receiver.url())
}

/// Options of a node with one account and these integrations, which may connect to the receivers.
fn options(integrations: &[(&str, String)]) -> NodeOptions {
    let account = Directory::default().account("acme");
    let with_targets =
        integrations.iter().fold(account, |directory, (id, fields)| directory.integration(id, fields));
    let directory = with_targets.key("k1", "secret", ALL);
    let options = NodeOptions::default().directory(directory, KEY);
    options.environment("FANFARE_WEBHOOK_ALLOW", "127.0.0.1")
}

async fn publish(node: &Node, channel: &str, body: Value) -> u16 {
    let path = format!("/api/channels/{channel}/publish");
    let authorization = http::basic(KEY);
    let headers = [("authorization", authorization.as_str())];
    http::request(node.addr(), "POST", &path, &headers, body.to_string()).await.status
}

/// Gives the `data` of all items of a channel that the receiver accepted, in the order of arrival.
fn data(received: &[ReceivedRequest], channel: &str) -> Vec<Value> {
    let taken = received.iter().filter(|request| request.is_taken).map(ReceivedRequest::envelope);
    let of_channel = taken.filter(|envelope| envelope["channel"] == channel);
    of_channel
        .flat_map(|envelope| envelope["items"].as_array().cloned().unwrap_or_default())
        .map(|item| item["data"].clone())
        .collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_published_message_arrives_signed_with_its_record() {
    let receiver = Receiver::start().await;
    let node = Node::start(options(&[("orders", hook(&receiver, "channels = [\"orders:*\"]"))])).await;
    assert_eq!(
        publish(&node, "orders%3A1", json!({"name": "new", "data": {"n": 1}, "extras": {"a": 1}})).await,
        200
    );
    assert_eq!(publish(&node, "other", json!({"data": 2})).await, 200);
    wait_until(SOON, "the webhook", async || !receiver.received().is_empty()).await;
    let request = receiver.received().remove(0);
    let signature = request.header("x-service-signature");
    assert!(is_signed(SECRET.as_bytes(), request.header("x-service-timestamp"), &request.body, signature));
    for (name, value) in [
        ("x-service-account-id", "acme"),
        ("x-service-channel", "orders%3A1"),
        ("x-service-source", "channel.message"),
        ("x-service-rule-id", "orders"),
        ("content-type", "application/json"),
    ] {
        assert_eq!(request.header(name), value, "{name}");
    }
    let envelope = request.envelope();
    assert_eq!(envelope["accountId"], "acme");
    let authorization = http::basic(KEY);
    let headers = [("authorization", authorization.as_str())];
    let history =
        http::request(node.addr(), "GET", "/api/channels/orders%3A1/history", &headers, "").await.json();
    assert_eq!(envelope["items"], history["messages"], "the record of the history");
    wait_until(SOON, "an empty outbox", async || {
        node.metric("fanfare_integration_events_total").await == 1.0
    })
    .await;
    assert_eq!(receiver.received().len(), 1, "the other channel is not for it");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn hostile_names_reach_their_target_alone() {
    let names = hostile::channels();
    let (all, mut named) = (Receiver::start().await, Vec::new());
    let mut integrations = vec![("all".to_owned(), hook(&all, ""))];
    for (index, name) in names.iter().enumerate() {
        let receiver = Receiver::start().await;
        // A single star matches every channel, and two stars match names that begin with a star.
        let pattern = if name == "*" { "**" } else { name };
        let fields = hook(&receiver, &format!("channels = [{}]", hostile::toml(pattern)));
        integrations.push((format!("t{index}"), fields));
        named.push(receiver);
    }
    let integrations: Vec<_> = integrations.iter().map(|(id, fields)| (&**id, fields.clone())).collect();
    let node = Node::start(options(&integrations)).await;
    let mut socket = Socket::open(&node, "").await;
    for name in hostile::refused_channels() {
        let answer = socket.ask(json!({"op": 13, "channel": name, "data": "refused"})).await;
        assert_eq!((&answer["op"], &answer["code"]), (&json!(2), &json!(40003)), "{name:?}: {answer}");
        if !name.is_empty() {
            assert_eq!(
                publish(&node, &encode_channel(&name), json!({"data": "refused"})).await,
                400,
                "{name:?}"
            );
        }
    }
    for name in &names {
        let answer = socket.ask(json!({"op": 13, "channel": name, "data": name})).await;
        assert_eq!(answer["op"], 1, "{name:?}: {answer}");
        assert_eq!(publish(&node, &encode_channel(name), json!({"data": name})).await, 200, "{name:?}");
    }
    until_sent(&node).await;
    for (name, receiver) in names.iter().zip(&named) {
        let own = receiver.received();
        assert_eq!(data(&own, name), [json!(name), json!(name)], "{name:?}");
        for request in own {
            assert_eq!(request.envelope()["channel"], **name);
            assert_eq!(request.header("x-service-channel"), encode_channel(name));
        }
        assert_eq!(data(&all.received(), name), [json!(name), json!(name)], "{name:?}");
    }
    let is_known =
        |request: &ReceivedRequest| names.iter().any(|name| request.envelope()["channel"] == **name);
    assert!(all.received().iter().all(is_known), "a refused name was sent");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn presence_and_messages_reach_their_target_alone() {
    let (messages, presence) = (Receiver::start().await, Receiver::start().await);
    let node = Node::start(options(&[
        ("messages", hook(&messages, "events = [\"message\"]")),
        ("presence", hook(&presence, "events = [\"presence\"]\nchannels = [\"room:*\"]")),
    ]))
    .await;
    let mut socket = Socket::open(&node, "?clientId=ann").await;
    for channel in ["room:1", "other"] {
        socket.attach(channel).await;
        let entered =
            socket.ask(json!({"op": 12, "channel": channel, "action": "enter", "data": "hi"})).await;
        assert_eq!(entered["op"], 1, "{entered}");
        let sent = socket.ask(json!({"op": 13, "channel": channel, "data": channel})).await;
        assert_eq!(sent["op"], 1, "{sent}");
    }
    wait_until(SOON, "all webhooks", async || {
        messages.received().len() >= 2 && !presence.received().is_empty()
    })
    .await;
    until_sent(&node).await;
    let [entered] = &presence.received()[..] else { unreachable!("one event: {:?}", presence.received()) };
    let envelope = entered.envelope();
    assert_eq!((&envelope["source"], &envelope["channel"]), (&json!("channel.presence"), &json!("room:1")));
    let [item] = &envelope["items"].as_array().expect("items")[..] else { unreachable!("{envelope}") };
    assert_eq!((&item["action"], &item["clientId"]), (&json!("enter"), &json!("ann")));
    for channel in ["room:1", "other"] {
        assert_eq!(data(&messages.received(), channel), [json!(channel)]);
    }
    assert!(
        messages.received().iter().all(|request| request.header("x-service-source") == "channel.message")
    );
    node.assert_no_panic();
}

/// Publishes these numbers on three channels, and records the acknowledged ones.
async fn publish_for(
    node: &Node,
    numbers: std::ops::Range<u64>,
    acknowledged: &mut HashMap<String, Vec<u64>>,
) {
    for number in numbers {
        for channel in ["a", "b", "c"] {
            if publish(node, channel, json!({"data": number, "id": format!("{channel}{number}")})).await
                == 200
            {
                acknowledged.entry(channel.to_owned()).or_default().push(number);
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_failing_target_gets_all_in_order_over_two_kills() {
    let (failing, steady) = (Receiver::start().await, Receiver::start().await);
    let mut node = Node::start(options(&[
        ("failing", hook(&failing, "timeout_ms = 500\nbatch_events = 3")),
        ("steady", hook(&steady, "")),
    ]))
    .await;
    let mut acknowledged = HashMap::new();
    failing.answer(Answer::Status(500));
    publish_for(&node, 0..10, &mut acknowledged).await;
    node.kill();
    node.restart().await;
    failing.answer(Answer::Hang);
    publish_for(&node, 10..20, &mut acknowledged).await;
    wait_until(SAFE, "an attempt that hangs", async || {
        failing.received().iter().any(|request| !request.is_taken)
    })
    .await;
    node.kill();
    node.restart().await;
    failing.answer(Answer::Slow(Duration::from_millis(100)));
    publish_for(&node, 20..30, &mut acknowledged).await;
    failing.answer(Answer::Status(204));
    for receiver in [&failing, &steady] {
        for (channel, numbers) in &acknowledged {
            wait_until(SAFE, "all that was acknowledged", async || {
                let data = data(&receiver.received(), channel);
                numbers.iter().all(|number| data.contains(&json!(number)))
            })
            .await;
            let mut first = Vec::new();
            for number in data(&receiver.received(), channel) {
                if !first.contains(&number) {
                    first.push(number);
                }
            }
            let in_order: Vec<Value> = numbers.iter().map(|number| json!(number)).collect();
            first.retain(|number| in_order.contains(number));
            assert_eq!(first, in_order, "{channel}");
        }
    }
    for (target, receiver) in [("failing", &failing), ("steady", &steady)] {
        let received = receiver.received();
        assert_whole_batches(
            target,
            received.iter().map(|request| (request.header(EVENT_ID), &*request.body)),
        );
    }
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_inside_is_not_connected_to_unless_allowed() {
    let receiver = Receiver::start().await;
    let directory = Directory::default()
        .account("acme")
        .integration("inside", &hook(&receiver, ""))
        .key("k1", "secret", ALL);
    let node = Node::start(NodeOptions::default().directory(directory.clone(), KEY)).await;
    let warning = format!("leads to 127.0.0.1 on port {}, to which", receiver.addr().port());
    let is_logged =
        |event: &str| node.log().lines().any(|line| line.contains(event) && line.contains(&warning));
    assert!(is_logged("configuration warning"), "{}", node.log());
    node.replace_directory(&directory.account("other"));
    wait_until(SOON, "the warning again", async || is_logged("directory applied with a warning")).await;
    assert_eq!(publish(&node, "a", json!({"data": 1})).await, 200);
    let failed = r#"fanfare_integration_events_total{kind="webhook",outcome="failed"}"#;
    wait_until(SOON, "a failed attempt", async || node.metric(failed).await >= 1.0).await;
    assert!(receiver.received().is_empty());
    wait_until(SOON, "its reason in the log", async || node.log().contains("not allowed")).await;
}
