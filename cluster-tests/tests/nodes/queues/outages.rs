//! Queues while their broker fails: their events wait in the outbox.

use fanfare_cluster_tests::{Node, NodeOptions, Proxy, RabbitMq, RunningCommand, SOON, wait_until};
use serde_json::{Value, json};

use super::{KEY, RECOVERED, call, data, directory, make, node, publish};

/// Starts a node that reaches AMQP through the relay, and the management API directly.
pub(super) async fn behind(relay: &Proxy, broker: &RabbitMq, options: NodeOptions) -> Node {
    let url = broker.url().replace(&broker.addr().to_string(), &relay.addr().to_string());
    let options = broker.queues(options.directory(directory(), KEY));
    Node::start(options.environment("FANFARE_AMQP_URL", &url)).await
}

#[tokio::test(flavor = "multi_thread")]
async fn queues_and_their_undelivered_messages_survive_a_kill() {
    let Some(broker) = tokio::task::spawn_blocking(|| RabbitMq::start(None)).await.expect("started") else {
        return;
    };
    let mut node = node(&broker).await;
    let id = make(&node, "q").await;
    broker.until_kept().await;
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
async fn node_without_a_broker_keeps_undelivered_queue_messages() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let mut node = node(&broker).await;
    make(&node, "q").await;
    let addresses = ["FANFARE_AMQP_URL", "FANFARE_AMQP_MANAGEMENT_URL"];
    let given = [broker.url(), broker.management().to_owned()];
    addresses.iter().for_each(|name| node.set_environment(name, ""));
    node.stop().await;
    node.restart().await;
    wait_until(SOON, "the line", async || node.log().contains("this node has no broker")).await;
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

#[tokio::test(flavor = "multi_thread")]
async fn outbox_of_a_down_node_is_drained_into_its_queue() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let relay = Proxy::to(broker.addr()).await;
    let mut node = behind(&relay, &broker, NodeOptions::default()).await;
    make(&node, "q").await;
    relay.turn_away();
    relay.cut();
    for number in 0..5 {
        publish(&node, "a", json!({"data": number})).await;
    }
    wait_until(SOON, "the events", async || {
        node.metric("fanfare_outbox_events{kind=\"queue\"}").await == 5.0
    })
    .await;
    node.kill();
    let folder = node.data_dir().to_str().expect("a path in UTF-8");
    let url = broker.url();
    let addresses = [("FANFARE_AMQP_URL", &*url), ("FANFARE_AMQP_MANAGEMENT_URL", broker.management())];
    let drain = async |environment: &[(&str, &str)]| {
        let of_folder = [("FANFARE_DATA_DIR", folder)];
        let arguments = ["outbox", "drain", "--patience", "30s"];
        let mut drain = RunningCommand::start_with(&[&of_folder[..], environment].concat(), &arguments);
        (drain.ended_within(RECOVERED).await.code(), drain.stdout(), drain.stderr())
    };
    let (code, _, errors) = drain(&[]).await;
    assert_eq!(code, Some(1), "without a broker");
    assert!(errors.concat().contains("--amqp-url"), "{errors:?}");
    let (code, lines, errors) = drain(&addresses).await;
    assert_eq!(code, Some(0), "{lines:?} {errors:?}");
    let mut consumer = broker.consume("acme:q").await;
    for number in 0..5 {
        assert_eq!(data(&consumer.next().await), number);
    }
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn node_that_stops_drains_into_a_queue() {
    let Some(broker) = tokio::task::spawn_blocking(|| RabbitMq::start(None)).await.expect("started") else {
        return;
    };
    let mut node = node(&broker).await;
    make(&node, "q").await;
    publish(&node, "a", json!({"data": 0})).await;
    // The node is connected now.
    assert_eq!(data(&broker.consume("acme:q").await.next().await), 0);
    broker.signal("STOP");
    for number in 1..20 {
        publish(&node, "a", json!({"data": number})).await;
    }
    node.terminate();
    broker.signal("CONT");
    assert!(node.ended().await.success());
    let mut consumer = broker.consume("acme:q").await;
    let mut next = 1;
    while next < 20 {
        let number = data(&consumer.next().await).as_u64().expect("a number");
        assert!(number <= next, "{number} came before {next}");
        next = next.max(number + 1);
    }
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn dead_letters_of_a_deleted_queue_are_not_sent_again() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let relay = Proxy::to(broker.addr()).await;
    let options = NodeOptions::default().limit("integration_retry_ms", 1_000);
    let node = behind(&relay, &broker, options).await;
    let id = make(&node, "q").await;
    relay.turn_away();
    relay.cut();
    publish(&node, "a", json!({"data": 0})).await;
    let is_dead = async || node.metric("fanfare_outbox_dead_letters_total").await == 1.0;
    wait_until(RECOVERED, "a dead letter", is_dead).await;
    let target = format!("/outbox/acme/queue:{id}");
    assert_eq!(node.operate("GET", &target).await.json()["events"][0]["item"]["data"], 0);
    assert_eq!(call(&node, "DELETE", &format!("/api/queues/{id}"), Value::Null).await.status, 200);
    let refused = node.operate("POST", &format!("{target}/retry")).await;
    assert_eq!(refused.status, 409, "{}", refused.error());
    assert!(refused.error().contains("the queue was deleted"), "{}", refused.error());
    assert_eq!(node.operate("GET", &target).await.json()["events"][0]["state"], "dead");
    node.assert_no_panic();
}
