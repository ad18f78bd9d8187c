//! A release of the chart, and clients of it.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_cluster_tests::control_plane::chart;
use fanfare_cluster_tests::kubernetes::Kubernetes;
use fanfare_cluster_tests::roaming::{Load, Members, NodeSelector, Subscriber};
use fanfare_cluster_tests::{SOON, wait_until};

/// Values for nodes without a store, which stop and start faster than by default.
pub(crate) const VALUES: &str = "store.kind=none,drainSeconds=10,preStopSeconds=2,minReadySeconds=1";

const MEMBERS: usize = 4;

/// Installs or upgrades the release `fanfare`, with [`VALUES`] and these.
pub(crate) async fn helm(kubernetes: &Kubernetes, command: &str, values: &str) {
    let (chart, values) = (chart(), format!("{VALUES},{values}"));
    let chart = chart.to_str().expect("a path");
    kubernetes.helm(&[command, "fanfare", chart, "--wait", "--timeout", "110s", "--set", &values]).await;
}

/// Runs `helm test`, the operators' check of a release.
pub(crate) async fn test(kubernetes: &Kubernetes) {
    kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
}

/// Waits until a pod has restarted its container and is ready.
pub(crate) async fn restarted(kubernetes: &Kubernetes, pod: &str) {
    wait_until(3 * SOON, "a pod to restart", async || {
        let status =
            "jsonpath={.status.containerStatuses[0].restartCount} {.status.containerStatuses[0].ready}";
        let status = kubernetes.kubectl(&["get", "pod", pod, "--output", status]).await;
        status.split_once(' ').is_some_and(|(restarts, ready)| restarts != "0" && ready == "true")
    })
    .await;
}

/// Gives host and port of the load balancer.
pub(crate) async fn balancer(kubernetes: &Kubernetes, port: u16) -> String {
    let address = "jsonpath={.status.loadBalancer.ingress[0].ip}";
    let address = kubernetes.kubectl(&["get", "service", "fanfare", "--output", address]).await;
    format!("{address}:{port}")
}

/// Gives the key that the chart has generated.
pub(crate) async fn key(kubernetes: &Kubernetes) -> String {
    let key = ["get", "secret", "fanfare-directory", "--output", "jsonpath={.data.key}"];
    let key = STANDARD.decode(kubernetes.kubectl(&key).await).expect("base64");
    String::from_utf8(key).expect("text")
}

/// Selector of the load balancer, with the key that the chart has generated.
pub(crate) async fn door(kubernetes: &Kubernetes) -> NodeSelector {
    let address = balancer(kubernetes, 80).await.parse().expect("an address");
    NodeSelector::to(&[address], &key(kubernetes).await)
}

/// Publishers, subscribers and members of one channel.
pub(crate) struct Traffic {
    members: Members,
    load: Load,
}

impl Traffic {
    pub(crate) async fn begin(door: &NodeSelector) -> Self {
        let members = Members::enter(door, MEMBERS).await;
        let load = Load::begin(door, 3, 6, Duration::from_millis(5)).await;
        Self { members, load }
    }

    /// Ends the traffic. The subscribers have received all messages in order, and seen no member leave or enter.
    pub(crate) async fn end(self) -> Vec<Subscriber> {
        let subscribers = self.load.end().await;
        self.members.end().await;
        for subscriber in &subscribers {
            assert!(subscriber.seen.is_empty(), "{:?}", subscriber.seen);
        }
        subscribers
    }
}
