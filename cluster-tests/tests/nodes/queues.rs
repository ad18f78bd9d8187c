//! Queues of accounts on a real RabbitMQ: the calls under `/api/queues`, what feeds a queue, and what a broker's end does.

use std::collections::HashMap;
use std::path::Path;
use std::time::Duration;

use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::python::PIKA;
use fanfare_cluster_tests::rabbitmq::{Taken, TakenMessage};
use fanfare_cluster_tests::{
    Cassandra, Directory, Node, NodeOptions, Proxy, RabbitMq, Response, Running, SOON, Socket, http, python,
    wait_until,
};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::{Value, json};

const KEY: &str = "secret.k1";
const NARROW: &str = "secret.narrow";
const LACKING: &str = "secret.lacking";
const OTHER: &str = "secret.other";
/// A slash must be percent-encoded in the path.
const ADMIN_TOKEN: &str = "an/admin-token-of-the-tests";
/// Several nodes of a database on a busy machine take their time.
const STORE_WAIT_MS: u64 = 8_000;
/// A first attempt after an outage comes within this time.
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

fn data(message: &TakenMessage) -> Value {
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
    assert_eq!(state, json!({"queue": expected, "ready": 0, "consumers": 1}));
    // It would be the next one, if it came here.
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
async fn pause_bound_and_missing_queue_lose_nothing_owed() {
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
async fn queues_and_what_they_are_owed_survive_a_kill() {
    let Some(broker) = tokio::task::spawn_blocking(|| RabbitMq::start(None)).await.expect("started") else {
        return;
    };
    let mut node = node(&broker).await;
    let id = make(&node, "q").await;
    broker.until_kept("acme:q").await;
    broker.signal("KILL");
    for number in 0..20 {
        publish(&node, "a", json!({"data": number})).await;
    }
    let refused = call(&node, "POST", "/api/queues", json!({"name": "other"})).await;
    assert_eq!(refused.status, 503, "{}", refused.error());
    node.kill();
    node.restart().await;
    publish(&node, "a", json!({"data": 20})).await;
    let listed = call(&node, "GET", "/api/queues", Value::Null).await.json();
    assert_eq!(listed["queues"][0]["id"], json!(id), "{listed}");
    let again = broker.clone();
    tokio::task::spawn_blocking(move || again.restart()).await.expect("restarted");
    let mut consumer = broker.consume("acme:q").await;
    let mut next = 0;
    while next <= 20 {
        let number = data(&consumer.next().await).as_u64().expect("a number");
        assert!(number <= next, "{number} came before {next}");
        next = next.max(number + 1);
    }
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
    // Attached everywhere, so that each message is forwarded to both others.
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
    // In force on every node when the call is answered.
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

/// A broker that asks the node behind the relay about keys, by the admin token of the folder.
async fn asking(folder: &Path) -> Option<(RabbitMq, Proxy)> {
    std::fs::write(folder.join("admin-token"), format!("{ADMIN_TOKEN}\n")).expect("a writable folder");
    let relay = Proxy::to(([127, 0, 0, 1], 1).into()).await;
    let url = format!("http://{}/broker/{}", relay.addr(), ADMIN_TOKEN.replace('/', "%2F"));
    let broker = tokio::task::spawn_blocking(move || RabbitMq::start(Some(&url))).await.expect("started")?;
    Some((broker, relay))
}

async fn consume_as(broker: &RabbitMq, user: &str, queue: &str) -> lapin::Result<Taken> {
    let connection = Connection::connect(&broker.url_as(user), ConnectionProperties::default()).await?;
    Taken::from(connection, queue).await
}

#[tokio::test(flavor = "multi_thread")]
async fn key_consumes_its_own_queues_and_nothing_else() {
    let folder = tempfile::tempdir().expect("a folder");
    let Some((broker, relay)) = asking(folder.path()).await else { return };
    let of_keys = |narrow: &str| {
        Directory::default()
            .account("acme")
            .key("k1", "secret", ALL)
            .key("narrow", "secret", narrow)
            .key("lacking", "secret", r#"{ "*" = ["subscribe", "publish"] }"#)
            .revoked_key("gone", "secret")
            .account("other")
            .key("other", "secret", ALL)
    };
    let orders = r#"{ "orders:*" = ["amqp-subscribe"] }"#;
    let token_file = folder.path().join("admin-token");
    let options = NodeOptions::default().directory(of_keys(orders), KEY);
    let options = options.environment("FANFARE_ADMIN_TOKEN_FILE", &token_file.to_string_lossy());
    let node = Node::start(broker.queues(options)).await;
    relay.turn_to(node.admin());
    let all = make(&node, "all").await;
    let some = make(&node, "some").await;
    add_rule(&node, &some, json!({"sourcePattern": "orders:*"})).await;
    assert_eq!(call_as(OTHER, &node, "POST", "/api/queues", &json!({"name": "all"})).await.status, 200);

    publish(&node, "orders:1", json!({"data": 1})).await;
    for (user, queue) in [("k1:secret", "acme:all"), ("narrow:secret", "acme:some")] {
        let mut consumer = consume_as(&broker, user, queue).await.expect(queue);
        assert_eq!(data(&consumer.next().await), 1, "{queue}");
    }
    for (user, queue) in [
        ("k1:wrong", "acme:all"),
        ("k1:secret.k1", "acme:all"),
        ("gone:secret", "acme:all"),
        ("lacking:secret", "acme:all"),
        ("narrow:secret", "acme:all"),
        ("k1:secret", "other:all"),
        ("k1:secret", "acme:missing"),
    ] {
        let refused = consume_as(&broker, user, queue).await.err().map(|error| error.to_string());
        let refused = refused.unwrap_or_else(|| panic!("{user} consumes {queue}"));
        assert!(refused.contains("ACCESS_REFUSED"), "{user} {queue}: {refused}");
    }
    let attempt = async || {
        let url = broker.url_as("k1:secret");
        let connection = Connection::connect(&url, ConnectionProperties::default()).await.expect("logged in");
        connection.create_channel().await.expect("a channel")
    };
    let declared = attempt().await;
    let declared =
        declared.queue_declare("mine".into(), QueueDeclareOptions::default(), FieldTable::default());
    assert!(declared.await.is_err_and(|error| error.to_string().contains("ACCESS_REFUSED")), "no declare");
    let published = attempt().await;
    published.confirm_select(ConfirmSelectOptions::default()).await.expect("confirms");
    let (options, none) = (BasicPublishOptions::default(), BasicProperties::default());
    let published = published.basic_publish("".into(), "acme:all".into(), options, b"{}", none).await;
    let refused = match published {
        Ok(confirm) => confirm.await.err(),
        Err(error) => Some(error),
    };
    assert!(refused.is_some_and(|error| error.to_string().contains("ACCESS_REFUSED")), "no publish");

    let mut narrow = consume_as(&broker, "narrow:secret", "acme:some").await.expect("a consumer");
    let guest = broker.consume("acme:some").await;
    node.replace_directory(&of_keys(r#"{ "bills:*" = ["amqp-subscribe"] }"#));
    let narrowed = async { while narrow.try_next().await.is_some() {} };
    tokio::time::timeout(Duration::from_secs(60), narrowed).await.expect("it loses its consumer within 60 s");
    assert!(guest.is_connected(), "a user of the broker itself stays");
    let counted = async || node.metric("fanfare_queue_connections_closed_total").await >= 1.0;
    wait_until(SOON, "the count of closed connections", counted).await;
    assert!(node.metric("fanfare_broker_checks_total").await >= 10.0);
    let log = node.log();
    assert!(
        !log.contains(ADMIN_TOKEN) && !log.contains("secret.k1") && !log.contains("guest:guest"),
        "{log}"
    );
    assert_eq!(call(&node, "GET", &format!("/api/queues/{all}"), Value::Null).await.json()["consumers"], 0);
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn program_of_the_guide_consumes_with_a_key() {
    let python = tokio::task::spawn_blocking(|| python(PIKA)).await.expect("fetched");
    let Some(python) = python else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let Some((broker, relay)) = asking(folder.path()).await else { return };
    let token_file = folder.path().join("admin-token");
    let options = NodeOptions::default().directory(directory(), KEY);
    let options = options.environment("FANFARE_ADMIN_TOKEN_FILE", &token_file.to_string_lossy());
    let node = Node::start(broker.queues(options)).await;
    relay.turn_to(node.admin());
    make(&node, "jobs").await;
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/guides/consume/consume.py");
    let run = |user: &str| Running::other(&python, &[program, &broker.url_as(user), "acme:jobs"]);
    let consumer = run("k1:secret");
    publish(&node, "orders:1", json!({"data": {"total": 7}})).await;
    let printed = async || consumer.stdout().iter().any(|line| line == "orders:1 {\"total\": 7}");
    wait_until(SOON, "the line of the event", printed).await;
    let mut refused = run("other:secret");
    assert!(!refused.ended_within(2 * SOON).await.success());
    assert!(refused.stderr().concat().contains("ACCESS_REFUSED"), "{:?}", refused.stderr());
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn node_without_a_broker_keeps_what_queues_are_owed() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let mut node = node(&broker).await;
    make(&node, "q").await;
    let addresses = ["FANFARE_AMQP_URL", "FANFARE_AMQP_MANAGEMENT_URL"];
    let given = [broker.url(), broker.management().to_owned()];
    addresses.iter().for_each(|name| node.set_environment(name, ""));
    node.stop().await;
    node.restart().await;
    assert!(node.log().contains("this node has no broker"), "{}", node.log());
    publish(&node, "a", json!({"data": "owed"})).await;
    assert_eq!(call(&node, "GET", "/api/queues", Value::Null).await.status, 503);
    for (name, value) in addresses.iter().zip(&given) {
        node.set_environment(name, value);
    }
    node.stop().await;
    node.restart().await;
    assert_eq!(data(&broker.consume("acme:q").await.next().await), "owed");
    node.assert_no_panic();
}
