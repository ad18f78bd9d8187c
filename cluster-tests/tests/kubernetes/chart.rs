//! Operations on a release of the chart with running pods, under load.

use fanfare_cluster_tests::control_plane::chart;
use fanfare_cluster_tests::kubernetes::in_cluster;
use fanfare_cluster_tests::{SOON, http, wait_until};
use serde_json::json;

use crate::release::{self, Traffic, helm};

#[test]
fn upgrade_drain_and_scaling_under_load_lose_nothing() {
    in_cluster(3, async |kubernetes| {
        helm(&kubernetes, "install", "replicas=3").await;
        release::test(&kubernetes).await;
        let traffic = Traffic::begin(&release::door(&kubernetes).await).await;
        helm(&kubernetes, "upgrade", "replicas=3,config.log=debug").await;
        let node = ["get", "pod", "fanfare-2", "--output", "jsonpath={.spec.nodeName}"];
        let node = kubernetes.kubectl(&node).await;
        kubernetes.kubectl(&["drain", &node, "--ignore-daemonsets", "--timeout", "100s"]).await;
        kubernetes.kubectl(&["uncordon", &node]).await;
        kubernetes.rolled_out("statefulset/fanfare").await;
        for replicas in [5, 2] {
            helm(&kubernetes, "upgrade", &format!("replicas={replicas},config.log=debug")).await;
        }
        for subscriber in traffic.end().await {
            assert!(subscriber.moves > 0, "every pod was replaced");
        }
        release::test(&kubernetes).await;
    });
}

#[test]
fn failed_upgrade_leaves_the_other_pods_as_they_were() {
    in_cluster(3, async |kubernetes| {
        helm(&kubernetes, "install", "replicas=3").await;
        // The chart accepts any text, and a node refuses this one at its start.
        let chart = chart();
        let chart = chart.to_str().expect("a path");
        let values = format!("{},replicas=3,config.log=loud=loud", release::VALUES);
        kubernetes.helm(&["upgrade", "fanfare", chart, "--set", &values]).await;
        wait_until(3 * SOON, "the new pod to fail", async || {
            let restarts = "jsonpath={.status.containerStatuses[0].restartCount}";
            let restarts = kubernetes.kubectl(&["get", "pod", "fanfare-2", "--output", restarts]).await;
            restarts.parse::<u32>().is_ok_and(|restarts| restarts > 0)
        })
        .await;
        kubernetes.kill("fanfare-0");
        release::restarted(&kubernetes, "fanfare-0").await;
        let traffic = Traffic::begin(&release::door(&kubernetes).await).await;
        kubernetes.helm(&["rollback", "fanfare", "1", "--wait", "--timeout", "110s"]).await;
        traffic.end().await;
        release::test(&kubernetes).await;
    });
}

#[test]
fn release_without_a_value_is_a_node_that_works() {
    in_cluster(1, async |kubernetes| {
        let chart = chart();
        let chart = chart.to_str().expect("a path");
        kubernetes.helm(&["install", "fanfare", chart, "--wait", "--timeout", "100s"]).await;
        release::test(&kubernetes).await;
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
        release::test(&kubernetes).await;
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
        release::test(&kubernetes).await;
        assert_eq!(kubernetes.kubectl(&pod).await, before);
    });
}
