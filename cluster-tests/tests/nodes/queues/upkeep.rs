//! Queues and policies that are missing on the broker, and accounts that are missing in the directory.

use std::time::Duration;

use fanfare_cluster_tests::directory::ALL;
use fanfare_cluster_tests::{Directory, NodeOptions, Proxy, RabbitMq, SOON, wait_until};
use serde_json::{Value, json};

use super::outages::behind;
use super::{OTHER, call, call_as, data, directory, make, node, publish};

/// Greatest time until the next round of repairs.
const KEPT_UP: Duration = Duration::from_secs(75);

#[tokio::test(flavor = "multi_thread")]
async fn bound_and_queue_are_put_back_without_an_event() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let node = node(&broker).await;
    for name in ["changed", "unbound"] {
        let id = make(&node, name).await;
        let bounded = call(&node, "PATCH", &format!("/api/queues/{id}"), json!({"maxLength": 2})).await;
        assert_eq!(bounded.status, 200, "{}", bounded.error());
    }
    assert_eq!(call_as(OTHER, &node, "POST", "/api/queues", &json!({"name": "q"})).await.status, 200);
    let vhost = broker.url();
    let vhost = vhost.rsplit('/').next().expect("a vhost");
    let policy = |name: &str| format!("/api/policies/{vhost}/fanfare%20acme%3A{name}");
    let [changed, deleted, queue] =
        [policy("changed"), policy("unbound"), format!("/api/queues/{vhost}/other%3Aq")];
    let now = async |path: &str| broker.call("GET", path, &json!({})).await;
    let before = [now(&changed).await.json(), now(&deleted).await.json()];
    let other = json!({"pattern": "^acme:changed$", "definition": {"max-length": 9}, "apply-to": "queues"});
    assert_eq!(broker.call("PUT", &changed, &other).await.status, 204);
    for path in [&deleted, &queue] {
        assert_eq!(broker.call("DELETE", path, &json!({})).await.status, 204, "{path}");
    }
    wait_until(KEPT_UP, "the bound that was changed", async || now(&changed).await.json() == before[0]).await;
    for path in [&deleted, &queue] {
        wait_until(KEPT_UP, path, async || now(path).await.status == 200).await;
    }
    assert_eq!(now(&deleted).await.json(), before[1]);
    let repaired = async |kind| node.metric(&format!("fanfare_queue_repairs_total{{kind=\"{kind}\"}}")).await;
    // Repairs are counted after the broker's answer. A round may begin between two of the changes.
    let are_counted = async || (repaired("policy").await, repaired("queue").await) == (2.0, 1.0);
    wait_until(SOON, "the counts", are_counted).await;
    node.assert_no_panic();
}

#[tokio::test(flavor = "multi_thread")]
async fn events_of_a_removed_account_wait_and_are_logged() {
    let Some(broker) = RabbitMq::shared().await else { return };
    let relay = Proxy::to(broker.addr()).await;
    let node = behind(&relay, &broker, NodeOptions::default()).await;
    make(&node, "q").await;
    relay.turn_away();
    relay.cut();
    for number in 0..3 {
        publish(&node, "a", json!({"data": number})).await;
    }
    let absent = async |expected: f64| {
        let is_so = async || node.metric("fanfare_outbox_absent_events").await == expected;
        wait_until(SOON, &format!("{expected} events of absent targets"), is_so).await;
    };
    absent(0.0).await;
    node.replace_directory(&Directory::default().account("other").key("other", "secret", ALL));
    absent(3.0).await;
    let lines = || {
        let log = node.log();
        log.lines().filter(|line| line.contains("target not in the directory")).count()
    };
    wait_until(SOON, "the line", async || lines() > 0).await;
    relay.turn_to(broker.addr());
    node.replace_directory(&directory());
    let mut consumer = broker.consume("acme:q").await;
    for number in 0..3 {
        let next = tokio::time::timeout(KEPT_UP, consumer.try_next()).await.expect("in time");
        assert_eq!(data(&next.expect("a message")), Value::from(number));
    }
    absent(0.0).await;
    assert_eq!(lines(), 1, "{}", node.log());
    node.assert_no_panic();
}
