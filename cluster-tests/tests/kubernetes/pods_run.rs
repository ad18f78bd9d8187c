//! The test's Kubernetes itself: pods run, are replaced, and are reachable through a load balancer.

use fanfare_cluster_tests::kubernetes::{Kubernetes, in_cluster};
use fanfare_cluster_tests::{RunningCommand, SOON, wait_until};

const NODES: &str = include_str!("nodes.yaml");

#[test]
fn pods_serve_clients_while_they_are_replaced() {
    in_cluster(3, async |kubernetes| {
        kubernetes.apply(NODES).await;
        kubernetes.rolled_out("statefulset/fanfare").await;
        let (first, second) =
            (kubernetes.pod_address("fanfare-0").await, kubernetes.pod_address("fanfare-1").await);
        is_received(&format!("http://{first}:8080"), &format!("http://{second}:8080")).await;
        // A service with the name of the product gives each pod variables that look like settings.
        let environment = kubernetes.environment("fanfare-0");
        assert!(environment.iter().any(|entry| entry.starts_with("FANFARE_PORT=tcp://")), "{environment:?}");

        let balancer = balancer(&kubernetes).await;
        kubernetes.kubectl(&["delete", "pod", "fanfare-1"]).await;
        is_received(&balancer, &balancer).await;
        kubernetes.rolled_out("statefulset/fanfare").await;

        kubernetes.kubectl(&["rollout", "restart", "statefulset/fanfare"]).await;
        kubernetes.rolled_out("statefulset/fanfare").await;
        is_received(&balancer, &balancer).await;

        let node =
            kubernetes.kubectl(&["get", "pod", "fanfare-2", "--output", "jsonpath={.spec.nodeName}"]).await;
        kubernetes.kubectl(&["drain", &node, "--timeout", "60s"]).await;
        is_received(&balancer, &balancer).await;
        kubernetes.kubectl(&["uncordon", &node]).await;
        kubernetes.rolled_out("statefulset/fanfare").await;
    });
}

async fn balancer(kubernetes: &Kubernetes) -> String {
    let address = ["get", "service", "fanfare", "--output", "jsonpath={.status.loadBalancer.ingress[0].ip}"];
    format!("http://{}", kubernetes.kubectl(&address).await)
}

/// Asserts that a message published at one address reaches a subscriber at another.
async fn is_received(published: &str, subscribed: &str) {
    let subscriber = RunningCommand::start(&["sub", "--url", subscribed, "--no-key", "news"]);
    // A message from before the subscription is not received, so it publishes again and again.
    wait_until(SOON, "a message", async || {
        let mut publisher = RunningCommand::start(&["pub", "--url", published, "--no-key", "news", "hello"]);
        publisher.ended().await.success() && !subscriber.stdout().is_empty()
    })
    .await;
    assert!(subscriber.stdout()[0].contains("hello"), "{:?}", subscriber.stdout());
}
