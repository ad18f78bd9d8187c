//! The chart, whose pods run: what operators do to a release, under load.

use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fanfare_cluster_tests::control_plane::chart;
use fanfare_cluster_tests::kubernetes::{Kubernetes, in_cluster};
use fanfare_cluster_tests::roaming::{Door, Load};

/// Three nodes without a store, which stop and start sooner than by default.
const VALUES: &str = "store.kind=none,drainSeconds=10,preStopSeconds=2,minReadySeconds=1";

async fn helm(kubernetes: &Kubernetes, command: &str, values: &str) {
    let (chart, values) = (chart(), format!("{VALUES},{values}"));
    let chart = chart.to_str().expect("a path");
    kubernetes.helm(&[command, "fanfare", chart, "--wait", "--timeout", "110s", "--set", &values]).await;
}

/// Where clients go, with the key that the chart has made.
async fn door(kubernetes: &Kubernetes) -> Door {
    let address = "jsonpath={.status.loadBalancer.ingress[0].ip}";
    let address = kubernetes.kubectl(&["get", "service", "fanfare", "--output", address]).await;
    let key = ["get", "secret", "fanfare-directory", "--output", "jsonpath={.data.key}"];
    let key = STANDARD.decode(kubernetes.kubectl(&key).await).expect("base64");
    let key = String::from_utf8(key).expect("text");
    Door::to(&[format!("{address}:80").parse().expect("an address")], &key)
}

#[test]
fn upgrade_and_scaling_under_load_lose_nothing() {
    in_cluster(3, async |kubernetes| {
        helm(&kubernetes, "install", "replicas=3").await;
        kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
        let door = door(&kubernetes).await;
        let load = Load::begin(&door, 3, 6, Duration::from_millis(5)).await;
        helm(&kubernetes, "upgrade", "replicas=3,config.log=debug").await;
        for replicas in [5, 2] {
            helm(&kubernetes, "upgrade", &format!("replicas={replicas},config.log=debug")).await;
        }
        for subscriber in load.end().await {
            assert!(subscriber.moves > 0, "every pod was replaced");
        }
        kubernetes.helm(&["test", "fanfare", "--timeout", "60s"]).await;
    });
}
