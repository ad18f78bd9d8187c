//! Consumers of queues, which log in at a real RabbitMQ with keys of accounts.

use std::path::Path;
use std::time::Duration;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::python::PIKA;
use fanfare_cluster_tests::rabbitmq::QueueConsumer;
use fanfare_cluster_tests::{
    Directory, Node, NodeOptions, Proxy, RabbitMq, RunningCommand, SOON, python, wait_until,
};
use lapin::options::{BasicPublishOptions, ConfirmSelectOptions, QueueDeclareOptions};
use lapin::types::FieldTable;
use lapin::{BasicProperties, Connection, ConnectionProperties};
use serde_json::{Value, json};

use super::{KEY, OTHER, add_rule, call, call_as, data, directory, make, publish};

/// A slash must be percent-encoded in the path.
const ADMIN_TOKEN: &str = "an/admin-token-of-the-tests";

/// Starts a broker that asks the node behind the relay about keys, with the admin token of the folder.
async fn asking(folder: &Path) -> Option<(RabbitMq, Proxy)> {
    std::fs::write(folder.join("admin-token"), format!("{ADMIN_TOKEN}\n")).expect("a writable folder");
    let relay = Proxy::to(([127, 0, 0, 1], 1).into()).await;
    let url = format!("http://{}/broker/{}", relay.addr(), ADMIN_TOKEN.replace('/', "%2F"));
    let broker = tokio::task::spawn_blocking(move || RabbitMq::start(Some(&url))).await.expect("started")?;
    Some((broker, relay))
}

async fn consume_as(broker: &RabbitMq, user: &str, queue: &str) -> lapin::Result<QueueConsumer> {
    let connection = Connection::connect(&broker.url_as(user), ConnectionProperties::default()).await?;
    QueueConsumer::from(connection, queue).await
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
    assert_refusals_logged(&node).await;
    let log = node.log();
    assert!(
        !log.contains(ADMIN_TOKEN) && !log.contains("secret.k1") && !log.contains("guest:guest"),
        "{log}"
    );
    let state = async || call(&node, "GET", &format!("/api/queues/{all}"), Value::Null).await.json();
    wait_until(SOON, "the end of the consumers", async || state().await["consumers"] == 0).await;
    node.assert_no_panic();
}

/// Asserts that a node reports each reason for which it has refused users of the broker.
async fn assert_refusals_logged(node: &Node) {
    for (reason, key) in [
        ("bad_secret", "k1"),
        ("revoked_key", "gone"),
        ("no_capability", "lacking"),
        ("not_covered", "narrow"),
        ("other_account", "k1"),
        ("unknown_queue", "k1"),
        ("not_reading", "k1"),
    ] {
        let counter = format!("fanfare_broker_refusals_total{{reason=\"{reason}\"}}");
        assert!(node.metric(&counter).await >= 1.0, "{reason}");
        let parts = ["broker user refused", reason, key];
        let is_logged = async || node.log().lines().any(|line| parts.iter().all(|part| line.contains(part)));
        wait_until(SOON, &format!("the line of {reason} and {key}"), is_logged).await;
    }
    let counter = "fanfare_broker_refusals_total{reason=\"other_vhost\"}";
    assert_eq!(node.metric(counter).await, 0.0);
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
    let run = |user: &str| RunningCommand::other(&python, &[program, &broker.url_as(user), "acme:jobs"]);
    let consumer = run("k1:secret");
    publish(&node, "orders:1", json!({"data": {"total": 7}})).await;
    let printed = async |total: u64| {
        let expected = format!("orders:1 {{\"total\": {total}}}");
        let is_printed = async || consumer.stdout().contains(&expected);
        wait_until(6 * SOON, &format!("{expected}, but {:?}", consumer.stderr()), is_printed).await;
    };
    printed(7).await;
    // The consumer cannot process this message, and goes on with the next.
    let channel = broker.connect().await.create_channel().await.expect("a channel");
    let (options, none) = (BasicPublishOptions::default(), BasicProperties::default());
    channel.basic_publish("".into(), "acme:jobs".into(), options, b"{}", none).await.expect("sent");
    assert_eq!(broker.consume("acme:jobs:dead").await.next().await.body, b"{}");
    publish(&node, "orders:1", json!({"data": {"total": 8}})).await;
    printed(8).await;
    assert!(consumer.stderr().concat().contains("rejected"), "{:?}", consumer.stderr());
    // Over a restart of the broker.
    broker.until_kept().await;
    let again = broker.clone();
    let restarted = move || {
        again.signal("KILL");
        again.restart();
    };
    tokio::task::spawn_blocking(restarted).await.expect("restarted");
    publish(&node, "orders:1", json!({"data": {"total": 9}})).await;
    printed(9).await;
    let mut refused = run("other:secret");
    assert!(!refused.ended_within(2 * SOON).await.success());
    assert!(refused.stderr().concat().contains("ACCESS_REFUSED"), "{:?}", refused.stderr());
    node.assert_no_panic();
}
