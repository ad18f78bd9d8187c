//! Faults at random under load: what was acknowledged comes to everybody in its order, or it is told, and it is stored once.
//!
//! `FANFARE_CHAOS_SECONDS` makes a course longer, `FANFARE_CHAOS_SEED` makes another one.

use fanfare_cluster_tests::Cassandra;
use fanfare_cluster_tests::chaos::{Plan, run};
use fanfare_cluster_tests::cluster::Cluster;
use fanfare_cluster_tests::network::isolated;

const SECONDS: u64 = 30;

#[test]
fn without_a_store_nothing_is_missed_silently() {
    isolated(async |network| {
        let mut cluster = Cluster::apart(&network, 3).await;
        let report = run(&mut cluster, &network, &Plan::of(SECONDS), false).await;
        assert!(report.published > 100, "{report:?}");
    });
}

#[test]
fn over_scylla_nothing_is_missed_silently_and_all_is_stored_once() {
    Cassandra::fetch();
    isolated(async |network| {
        let Some(cassandra) = Cassandra::start_on(&network.host()) else { return };
        let keyspace = cassandra.keyspace();
        let mut cluster =
            Cluster::apart_with(&network, 3, |options| cassandra.store(options, &keyspace)).await;
        let report = run(&mut cluster, &network, &Plan::of(SECONDS), true).await;
        assert!(report.published > 100, "{report:?}");
    });
}
