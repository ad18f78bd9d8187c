//! Pods and machines that fail under load.

use fanfare_cluster_tests::Cassandra;
use fanfare_cluster_tests::kubernetes::{HOST, in_cluster};

use crate::release::{self, Traffic, helm};

#[test]
fn killed_pod_and_crashed_machine_lose_nothing_over_a_store() {
    // The network of the cluster has no access to downloads.
    Cassandra::fetch();
    in_cluster(3, async |kubernetes| {
        let Some(database) = Cassandra::start_at(HOST) else { return };
        let nodes = database.points().join(",");
        helm(&kubernetes, "install", &format!("replicas=3,store.kind=scylla,store.scylla.nodes={{{nodes}}}"))
            .await;
        let traffic = Traffic::begin(&release::door(&kubernetes).await).await;
        kubernetes.kill("fanfare-1");
        release::restarted(&kubernetes, "fanfare-1").await;
        release::test(&kubernetes).await;

        let node = ["get", "pod", "fanfare-2", "--output", "jsonpath={.spec.nodeName}"];
        let node = kubernetes.kubectl(&node).await;
        let number = node.strip_prefix("worker-").and_then(|number| number.parse().ok());
        let number = number.expect("worker and a number");
        kubernetes.crash(number);
        kubernetes.revive(number);
        release::restarted(&kubernetes, "fanfare-2").await;
        release::test(&kubernetes).await;
        let subscribers = traffic.end().await;
        assert!(subscribers.iter().any(|subscriber| subscriber.moves > 0), "none was at a pod that failed");
    });
}
