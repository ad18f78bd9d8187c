//! Queues of accounts on a real RabbitMQ: the calls under `/api/queues`, and the events of a queue.

mod consumers;
mod outages;
mod upkeep;

use std::collections::HashMap;
use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::rabbitmq::ConsumedMessage;
use fanfare_cluster_tests::{
    Cassandra, Directory, Node, NodeOptions, RabbitMq, Response, SOON, Socket, http, wait_until,
};
use lapin::options::{BasicGetOptions, BasicRejectOptions};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const NARROW: &str = "secret.narrow";
const LACKING: &str = "secret.lacking";
const OTHER: &str = "secret.other";
/// Wait for the store: several nodes of a database are slow on a busy machine.
const STORE_WAIT_MS: u64 = 8_000;
/// Greatest time until the first attempt after an outage.
const RECOVERED: Duration = Duration::from_secs(60);

fn directory() -> Directory {
    Directory::default()
        .account("acme")
        .key("k1", "secret", ALL)
        .key("narrow", "secret", r#"{ "orders:*" = ["amqp-subscribe", "publish"] }"#)
        .key("lacking", "secret", r#"{ "*" = ["subscribe", "publish"] }"#)
        .account("other")
        .queue_limit(1)
        .key("other", "secret", ALL)
}

async fn node(broker: &RabbitMq) -> Node {
    Node::start(broker.queues(NodeOptions::default().directory(directory(), KEY))).await
}

async fn call_as(key: &str, node: &Node, method: &str, path: &str, body: &Value) -> Response {
    let authorization = http::basic(key);
    let headers = [("authorization", authorization.as_str())];
    let body = if body.is_null() { String::new() } else { body.to_string() };
    http::request(node.addr(), method, path, &headers, body).await
}

async fn call(node: &Node, method: &str, path: &str, body: Value) -> Response {
    call_as(KEY, node, method, path, &body).await
}

/// Makes a queue and gives its id.
async fn make(node: &Node, name: &str) -> String {
    let answer = call(node, "POST", "/api/queues", json!({"name": name})).await;
    assert_eq!(answer.status, 200, "{}", answer.error());
    answer.json()["queue"]["id"].as_str().expect("an id").to_owned()
}

async fn add_rule(node: &Node, id: &str, rule: Value) -> String {
    let answer = call(node, "POST", &format!("/api/queues/{id}/rules"), rule).await;
    assert_eq!(answer.status, 200, "{}", answer.error());
    answer.json()["rule"]["id"].as_str().expect("an id").to_owned()
}

async fn publish(node: &Node, channel: &str, message: Value) {
    let mut socket = Socket::open(node, "").await;
    let mut frame = message;
    frame["op"] = json!(13);
    frame["channel"] = json!(channel);
    let answer = socket.ask(frame).await;
    assert_eq!(answer["op"], 1, "{channel}: {answer}");
}

fn data(message: &ConsumedMessage) -> Value {
    message.envelope["items"][0]["data"].clone()
}

#[tokio::test(flavor = "multi_thread")]
async fn queue_is_fed_every_message_of_its_account() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let node = node(&broker).await;
    let made = call(&node, "POST", "/api/queues", json!({"name": "jobs.1", "maxLength": 1000})).await.json();
    let id = made["queue"]["id"].as_str().expect("an id").to_owned();
    let expected =
        json!({"id": id, "accountId": "acme", "name": "jobs.1", "maxLength": 1000, "enabled": true});
    assert_eq!(made, json!({"queue": expected, "physical": "acme:jobs.1"}));
    assert_eq!(call(&node, "GET", "/api/queues", Value::Null).await.json(), json!({"queues": [expected]}));

    let mut consumer = broker.consume("acme:jobs.1").await;
    let path = "/api/channels/orders%3A1/publish";
    let body = json!({"name": "new", "data": {"n": 1}, "extras": {"a": 1}});
    assert_eq!(call(&node, "POST", path, body.clone()).await.status, 200);
    assert_eq!(call_as(OTHER, &node, "POST", path, &json!({"data": "other"})).await.status, 200);
    let message = consumer.next().await;
    for (name, value) in [
        ("x-service-account-id", "acme"),
        ("x-service-channel", "orders%3A1"),
        ("x-service-source", "channel.message"),
        ("x-service-rule-id", &id),
        ("x-service-event-id", &message.message_id),
    ] {
        assert_eq!(message.header(name), value, "{name}");
    }
    let history = call(&node, "GET", "/api/channels/orders%3A1/history", Value::Null).await.json();
    assert_eq!(message.envelope["items"], history["messages"], "the record of the history");
    assert_eq!(
        (&message.envelope["source"], &message.envelope["ruleId"], &message.envelope["channel"]),
        (&json!("channel.message"), &json!(id), &json!("orders:1"))
    );

    let state = call(&node, "GET", &format!("/api/queues/{id}"), Value::Null).await.json();
    assert_eq!((&state["queue"], &state["ready"], &state["consumers"]), (&expected, &json!(0), &json!(1)));
    // If the queue got this message, it would be the next one.
    assert_eq!(call(&node, "POST", path, json!({"data": "last"})).await.status, 200);
    assert_eq!(data(&consumer.next().await), "last");
    wait_until(SOON, "the metric", async || {
        let rows = call(&node, "GET", "/api/metrics/series?aggregate=sum", Value::Null).await.json();
        let queue = |row: &Value| row["kind"] == "queue" && row["count"] == 2;
        rows["series"].as_array().is_some_and(|rows| rows.iter().any(queue))
    })
    .await;
    assert_eq!(
        call(&node, "DELETE", &format!("/api/queues/{id}"), Value::Null).await.json(),
        json!({"deleted": "jobs.1"})
    );
    wait_until(SOON, "the end of the consumer", async || consumer.try_next().await.is_none()).await;
    assert_eq!(call(&node, "GET", &format!("/api/queues/{id}"), Value::Null).await.status, 404);
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn counts_tell_of_unacknowledged_messages_and_dead_letters() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let node = node(&broker).await;
    let id = make(&node, "q").await;
    for number in 0..6 {
        publish(&node, "a", json!({"data": number})).await;
    }
    let counts = async || {
        let state = call(&node, "GET", &format!("/api/queues/{id}"), Value::Null).await.json();
        ["ready", "unacknowledged", "deadLetters"].map(|field| state[field].as_u64())
    };
    wait_until(SOON, "the messages", async || counts().await[0] == Some(6)).await;
    let channel = broker.connect().await.create_channel().await.expect("a channel");
    let take = async || {
        let taken = channel.basic_get("acme:q".into(), BasicGetOptions::default()).await.expect("an answer");
        taken.expect("a message")
    };
    let _held = [take().await, take().await];
    let rejected = take().await.reject(BasicRejectOptions { requeue: false }).await;
    assert!(rejected.is_ok(), "{rejected:?}");
    let expected = [Some(3), Some(2), Some(1)];
    wait_until(SOON, "the counts", async || counts().await == expected).await;
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn rules_choose_events_also_of_hostile_channels() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let node = node(&broker).await;
    let long = "n".repeat(512);
    let names = ["#", "a.b", "*", "\"quoted\"", "\u{1f600}", "a%2Fb", "a/b", "acme:q0", &long];
    let mut consumers = HashMap::new();
    for (number, name) in names.iter().enumerate() {
        let id = make(&node, &format!("q{number}")).await;
        // A star at the end would match every name.
        let rule = if *name == "*" { json!({"sourcePattern": "**"}) } else { json!({"sourcePattern": name}) };
        let rule_id = add_rule(&node, &id, rule).await;
        consumers.insert(*name, (broker.consume(&format!("acme:q{number}")).await, rule_id));
    }
    for name in names {
        publish(&node, name, json!({"data": name})).await;
    }
    for (name, (consumer, rule_id)) in &mut consumers {
        let message = consumer.next().await;
        assert_eq!((data(&message), &message.envelope["channel"]), (json!(name), &json!(name)));
        assert_eq!(message.header("x-service-rule-id"), *rule_id);
    }
    for name in names {
        publish(&node, name, json!({"data": "last"})).await;
    }
    for (name, (consumer, _)) in &mut consumers {
        assert_eq!(data(&consumer.next().await), "last", "{name}: nothing of another channel");
    }
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn filter_chooses_by_name_and_source() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let node = node(&broker).await;
    let named = make(&node, "named").await;
    let rules = json!({"sourcePattern": "room", "filter": "paid*"});
    add_rule(&node, &named, rules).await;
    let rules = call(&node, "GET", &format!("/api/queues/{named}/rules"), Value::Null).await.json();
    assert_eq!(rules["rules"][0]["filter"], json!({"name": "paid*"}));
    assert_eq!(rules["rules"][0]["queueName"], "named");
    let presence = make(&node, "presence").await;
    add_rule(&node, &presence, json!({"sourcePattern": "room", "filter": {"source": ["presence"]}})).await;
    let [mut named, mut presence] =
        [broker.consume("acme:named").await, broker.consume("acme:presence").await];
    let mut socket = Socket::open(&node, "?clientId=ann").await;
    socket.attach("room").await;
    let entered = socket.ask(json!({"op": 12, "channel": "room", "action": "enter", "data": "hi"})).await;
    assert_eq!(entered["op"], 1, "{entered}");
    for name in ["new", "paid-late", "late", "paid"] {
        publish(&node, "room", json!({"name": name, "data": name})).await;
    }
    publish(&node, "room", json!({"data": "unnamed"})).await;
    let left = socket.ask(json!({"op": 12, "channel": "room", "action": "leave"})).await;
    assert_eq!(left["op"], 1, "{left}");
    assert_eq!([data(&named.next().await), data(&named.next().await)], ["paid-late", "paid"]);
    for action in ["enter", "leave"] {
        let event = presence.next().await;
        assert_eq!(event.envelope["source"], "channel.presence");
        assert_eq!(event.envelope["items"][0]["action"], action);
        assert_eq!(event.envelope["items"][0]["clientId"], "ann");
    }
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_are_refused_with_status_and_field() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let node = node(&broker).await;
    let id = make(&node, "q").await;
    let rule = format!("/api/queues/{id}/rules");
    for (key, method, path, body, status, error) in [
        (LACKING, "GET", "/api/queues", Value::Null, 403, "amqp-subscribe"),
        (NARROW, "GET", &format!("/api/queues/{id}"), Value::Null, 403, "every channel"),
        (NARROW, "POST", "/api/queues", json!({"name": "mine"}), 403, "every channel"),
        (NARROW, "DELETE", &format!("/api/queues/{id}"), Value::Null, 403, "every channel"),
        (OTHER, "GET", &format!("/api/queues/{id}"), Value::Null, 404, "no such queue"),
        (KEY, "GET", "/api/queues/x", Value::Null, 404, "no such queue"),
        (KEY, "GET", "/api/queues/x/y", Value::Null, 404, "not found"),
        (KEY, "PUT", "/api/queues", Value::Null, 405, "method"),
        (KEY, "POST", &format!("/api/queues/{id}"), Value::Null, 405, "method"),
        (KEY, "POST", "/api/queues", json!({}), 400, "name is missing"),
        (KEY, "POST", "/api/queues", json!({"name": "a:b"}), 400, "name must be"),
        (KEY, "POST", "/api/queues", json!({"name": "a", "maxLength": -1}), 400, "maxLength"),
        (KEY, "PATCH", &format!("/api/queues/{id}"), json!({"name": "b"}), 400, "name is not known"),
        (KEY, "POST", &rule, json!({"filter": "a"}), 400, "sourcePattern is missing"),
        (KEY, "POST", &rule, json!({"sourcePattern": "a", "filter": {"source": "x"}}), 400, "filter.source"),
        (KEY, "DELETE", &format!("{rule}/x"), Value::Null, 404, "no such rule"),
    ] {
        let answer = call_as(key, &node, method, path, &body).await;
        assert_eq!(answer.status, status, "{key} {method} {path} {body}: {}", answer.error());
        assert!(answer.error().contains(error), "{key} {method} {path} {body}: {}", answer.error());
    }
    assert_eq!(http::request(node.addr(), "GET", "/api/queues", &[], "").await.status, 401);
    let made = async |name| call_as(OTHER, &node, "POST", "/api/queues", &json!({"name": name})).await;
    assert_eq!(made("one").await.status, 200);
    let refused = made("two").await;
    assert_eq!((refused.status, &refused.json()["reason"]), (429, &json!("queue_limit")));
    assert_eq!(made("one").await.status, 200, "an edit is no further queue");

    add_rule(&node, &id, json!({"sourcePattern": "orders:eu:*"})).await;
    let listed = call_as(NARROW, &node, "GET", "/api/queues", &Value::Null).await.json();
    assert_eq!(listed["queues"][0]["name"], "q", "its rule is covered now");
    let widened = call_as(NARROW, &node, "POST", &rule, &json!({"sourcePattern": "*"})).await;
    assert_eq!(widened.status, 403);
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn paused_bounded_or_missing_queue_loses_no_due_message() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let node = node(&broker).await;
    let id = make(&node, "q").await;
    let path = format!("/api/queues/{id}");
    publish(&node, "a", json!({"data": 0})).await;
    let paused = call(&node, "PATCH", &path, json!({"enabled": false})).await.json();
    assert_eq!(paused["queue"]["enabled"], false);
    assert_eq!(call(&node, "GET", "/api/queues", Value::Null).await.json(), json!({"queues": []}));
    let all = call(&node, "GET", "/api/queues?all=1", Value::Null).await.json();
    assert_eq!(all["queues"][0]["id"], json!(id));
    publish(&node, "a", json!({"data": "while paused"})).await;
    assert_eq!(call(&node, "PATCH", &path, json!({"enabled": true, "maxLength": 2})).await.status, 200);
    for number in 1..4 {
        publish(&node, "a", json!({"data": number})).await;
    }
    let ready = async || call(&node, "GET", &path, Value::Null).await.json()["ready"].clone();
    let mut dead = broker.consume("acme:q:dead").await;
    assert_eq!([data(&dead.next().await), data(&dead.next().await)], [json!(0), json!(1)]);
    wait_until(SOON, "the bound", async || ready().await == 2).await;
    let mut consumer = broker.consume("acme:q").await;
    assert_eq!([data(&consumer.next().await), data(&consumer.next().await)], [json!(2), json!(3)]);
    let unbound = call(&node, "PATCH", &path, json!({"maxLength": null})).await.json();
    assert!(unbound["queue"].get("maxLength").is_none(), "{unbound}");

    let vhost = broker.url();
    let vhost = vhost.rsplit('/').next().expect("a vhost");
    let deleted = broker.call("DELETE", &format!("/api/queues/{vhost}/acme%3Aq"), &json!({})).await;
    assert_eq!(deleted.status, 204);
    publish(&node, "a", json!({"data": "after its end"})).await;
    wait_until(RECOVERED, "the queue anew", async || ready().await == 1).await;
    assert_eq!(data(&broker.consume("acme:q").await.next().await), "after its end");
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn scylla_three_nodes_feed_a_queue_once_each() {
    let (Some(broker), Some(cassandra)) = (RabbitMq::shared().await, Cassandra::shared()) else { return };
    let keyspace = cassandra.keyspace();
    let stored = |options: NodeOptions| {
        let options = cassandra.store(options.directory(directory(), KEY), &keyspace);
        broker.queues(options).limit("store_wait_ms", STORE_WAIT_MS)
    };
    let mut cluster = Cluster::linked_with(3, stored).await;
    let nodes = cluster.nodes();
    let id = make(&nodes[0], "q").await;
    let rule_id = add_rule(&nodes[1], &id, json!({"sourcePattern": "fed:*"})).await;
    let mut consumer = broker.consume("acme:q").await;
    // Attached on every node, so that each message is forwarded to both others.
    let mut sockets = Vec::new();
    for node in &*nodes {
        let mut socket = Socket::open(node, "").await;
        socket.attach("fed:1").await;
        sockets.push(socket);
    }
    for number in 0..30 {
        publish(&nodes[number % 3], "fed:1", json!({"data": number})).await;
        publish(&nodes[number % 3], "other", json!({"data": "other"})).await;
    }
    let mut numbers = Vec::new();
    for _ in 0..30 {
        let message = consumer.next().await;
        assert_eq!(message.header("x-service-rule-id"), rule_id);
        numbers.push(data(&message).as_u64().expect("a number"));
    }
    numbers.sort_unstable();
    assert_eq!(numbers, (0..30).collect::<Vec<_>>());
    // The change is in force on every node when the call is answered.
    assert_eq!(
        call(&nodes[2], "PATCH", &format!("/api/queues/{id}"), json!({"enabled": false})).await.status,
        200
    );
    for node in &*nodes {
        publish(node, "fed:1", json!({"data": "while paused"})).await;
    }
    assert_eq!(
        call(&nodes[0], "PATCH", &format!("/api/queues/{id}"), json!({"enabled": true})).await.status,
        200
    );
    publish(&nodes[1], "fed:1", json!({"data": "last"})).await;
    assert_eq!(data(&consumer.next().await), "last");
    for node in nodes {
        node.assert_no_panic();
    }
}
