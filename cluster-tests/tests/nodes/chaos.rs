//! Random faults under load: each subscriber gets all acknowledged messages in order, or a reported loss, and each is
//! stored once.
//!
//! `FANFARE_CHAOS_SECONDS` makes a course longer, `FANFARE_CHAOS_SEED` makes another one.

use fanfare_cluster_tests::Cassandra;
use fanfare_cluster_tests::chaos::{Fault, Plan, run};
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::network::isolated;

const SECONDS: u64 = 30;

#[test]
fn chaos_without_a_store_loses_nothing_silently() {
    isolated(async |network| {
        let plan = Plan::of(&[Fault::Kill, Fault::Terminate, Fault::Stop, Fault::Blink, Fault::Cut], SECONDS);
        let mut cluster = Cluster::apart(&network, 3).await;
        let report = run(&mut cluster, Some(&network), &plan, false).await;
        assert!(report.published > 100, "{report:?}");
    });
}

#[tokio::test(flavor = "multi_thread")]
async fn chaos_over_scylla_has_no_silent_loss_and_stores_once() {
    let Some(cassandra) = Cassandra::shared() else { return };
    let keyspace = cassandra.keyspace();
    let mut cluster = Cluster::linked_with(3, |options| cassandra.store(options, &keyspace)).await;
    // No cuts: after a cut the order of a publisher that changes nodes is not promised, and with a store no loss is
    // reported for it.
    let plan = Plan::of(&[Fault::Kill, Fault::Terminate, Fault::Stop, Fault::Blink], SECONDS);
    let report = run(&mut cluster, None, &plan, true).await;
    assert!(report.published > 100, "{report:?}");
}
