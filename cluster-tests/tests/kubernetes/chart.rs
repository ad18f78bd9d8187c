//! The chart, whose pods run: what operators do to a release, under load.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_cluster_tests::control_plane::chart;
use fanfare_cluster_tests::kubernetes::{Kubernetes, in_cluster};
use fanfare_cluster_tests::roaming::{Door, Load};
use fanfare_cluster_tests::{SOON, http, wait_until};
use serde_json::json;

/// Three nodes without a store, which stop and start sooner than by default.
const VALUES: &str = "store.kind=none,drainSeconds=10,preStopSeconds=2,minReadySeconds=1";

async fn helm(kubernetes: &Kubernetes, command: &str, values: &str) {
    let (chart, values) = (chart(), format!("{VALUES},{values}"));
    let chart = chart.to_str().expect("a path");
    kubernetes.helm(&[command, "fanfare", chart, "--wait", "--timeout", "110s", "--set", &values]).await;
}

/// The load balancer, with the key that the chart has made.
async fn door(kubernetes: &Kubernetes) -> Door {
    let address = "jsonpath={.status.loadBalancer.ingress[0].ip}";
    let address = kubernetes.kubectl(&["get", "service", "fanfare", "--output", address]).await;
    let key = ["get", "secret", "fanfare-directory", "--output", "jsonpath={.data.key}"];
    let key = STANDARD.decode(kubernetes.kubectl(&key).await).expect("base64");
    let key = String::from_utf8(key).expect("text");
    Door::to(&[format!("{address}:80").parse().expect("an address")], &key)
}

#[test]
fn upgrade_drain_and_scaling_under_load_lose_nothing() {
    in_cluster(3, async |kubernetes| {
        helm(&kubernetes, "install", "replicas=3").await;
        kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
        let door = door(&kubernetes).await;
        let load = Load::begin(&door, 3, 6, Duration::from_millis(5)).await;
        helm(&kubernetes, "upgrade", "replicas=3,config.log=debug").await;
        let node = ["get", "pod", "fanfare-2", "--output", "jsonpath={.spec.nodeName}"];
        let node = kubernetes.kubectl(&node).await;
        kubernetes.kubectl(&["drain", &node, "--ignore-daemonsets", "--timeout", "100s"]).await;
        kubernetes.kubectl(&["uncordon", &node]).await;
        kubernetes.rolled_out("statefulset/fanfare").await;
        for replicas in [5, 2] {
            helm(&kubernetes, "upgrade", &format!("replicas={replicas},config.log=debug")).await;
        }
        for subscriber in load.end().await {
            assert!(subscriber.moves > 0, "every pod was replaced");
        }
        kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
    });
}

#[test]
fn release_without_a_value_is_a_node_that_works() {
    in_cluster(1, async |kubernetes| {
        let chart = chart();
        let chart = chart.to_str().expect("a path");
        kubernetes.helm(&["install", "fanfare", chart, "--wait", "--timeout", "100s"]).await;
        kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
    });
}

#[test]
fn changed_directory_holds_without_a_restart() {
    in_cluster(1, async |kubernetes| {
        let directory = |key: &str| {
            format!(
                "[[tenants]]\nid = \"acme\"\n[[tenants.accounts]]\nid = \"acme\"\n[[tenants.accounts.keys]]\nname = \"{key}\"\n\
                 secret = \"hush\"\ncapability = {{ \"*\" = [\"subscribe\", \"publish\"] }}\n"
            )
        };
        let secret = |key: &str| {
            let objects = json!({
                "apiVersion": "v1", "kind": "Secret", "metadata": {"name": "accounts"},
                "stringData": {"directory.toml": directory(key), "key": format!("hush.{key}")},
            });
            objects.to_string()
        };
        kubernetes.apply(&secret("k1")).await;
        let values = "replicas=1,directory.existingSecret=accounts,test.keySecret.name=accounts";
        helm(&kubernetes, "install", values).await;
        kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
        let pod = [
            "get",
            "pod",
            "fanfare-0",
            "--output",
            "jsonpath={.metadata.uid} {.status.containerStatuses[0].restartCount}",
        ];
        let before = kubernetes.kubectl(&pod).await;
        let admin =
            format!("{}:8081", kubernetes.pod_address("fanfare-0").await).parse().expect("an address");
        kubernetes.apply(&secret("k2")).await;
        wait_until(SOON, "the changed directory", async || {
            let page = http::request(admin, "GET", "/metrics", &[], "").await;
            String::from_utf8_lossy(&page.body).contains("fanfare_directory_generation 2\n")
        })
        .await;
        kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
        assert_eq!(kubernetes.kubectl(&pod).await, before);
    });
}
