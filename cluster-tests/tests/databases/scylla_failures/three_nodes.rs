//! A database of three nodes, some of which are killed or stalled: a quorum is enough, and one copy is not.

use scylla::statement::{Consistency, Statement};

use super::*;

/// Gives the number of copies of a keyspace's rows.
async fn copies(cassandra: &Cassandra, keyspace: &str) -> String {
    let asked = "SELECT replication['datacenter1'] FROM system_schema.keyspaces WHERE keyspace_name = ?";
    let found = cassandra.session().await.query_unpaged(asked, (keyspace,)).await.expect("read");
    found.into_rows_result().expect("rows").single_row::<(String,)>().expect("a keyspace").0
}

/// Number of channels, whose partitions are spread over all three nodes.
const SPREAD: usize = 24;
/// Greatest number of publishes to these channels that may be late on a busy machine. If one node were waited for, a
/// third of them would be late.
const LATE_MAX: usize = 3;

/// Publishes to these channels while one of three nodes is stalled, and returns the number of refusals. A publisher
/// with ids makes more requests to the database, and may be refused until the connections to that node are closed.
async fn refused_beside_a_stalled_node(cassandra: &Cassandra, node: &Node) -> usize {
    cassandra.signal("STOP", Some(2));
    let mut refused = 0;
    for number in 0..SPREAD {
        let acked = attempt(node, &format!("spread{number}"), &json!({"data": number})).await;
        refused += usize::from(acked.is_none());
    }
    for number in 0..6 {
        let body = json!({"data": number, "id": "own"});
        wait_until(SOON, "an acknowledged publish", async || {
            publish(node, &format!("spread{number}"), body.clone()).await.status == 200
        })
        .await;
    }
    cassandra.signal("CONT", Some(2));
    refused
}

#[tokio::test(flavor = "multi_thread")]
async fn acked_messages_survive_database_nodes_failing_in_turn() {
    let Some(cassandra) = Cassandra::to_kill(3) else { return };
    let load = Load::begin(&cassandra).await;
    load.goes_on("load").await;
    cassandra.signal("STOP", Some(2));
    load.goes_on("load beside a node that stands still").await;
    cassandra.signal("CONT", Some(2));
    load.goes_on("load after the pause").await;
    for dead in [3, 1] {
        cassandra.signal("KILL", Some(dead));
        load.goes_on("load without a node").await;
        cassandra.restart();
        load.goes_on("load with all of them").await;
    }
    load.assert_safe().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn one_of_three_nodes_of_the_database_may_be_gone() {
    let Some(cassandra) = Cassandra::to_kill(3) else { return };
    let keyspace = cassandra.keyspace();
    let node = node_with(&cassandra, &keyspace).await;
    assert_eq!(copies(&cassandra, &keyspace).await, "3");
    for number in 0..10 {
        assert_eq!(publish(&node, "room", json!({"data": number})).await.status, 200);
    }
    let all = |count: i32| (0..count).rev().map(|number| json!(number)).collect::<Vec<_>>();
    let stored = async || {
        let records = history::read_all(node.addr(), KEY, "room", "limit=100").await;
        records.iter().map(|record| record["data"].clone()).collect::<Vec<_>>()
    };
    let refused = refused_beside_a_stalled_node(&cassandra, &node).await;
    assert!(refused <= LATE_MAX, "{refused} of {SPREAD} were refused for one node that stood still");
    until_well(&node).await;
    cassandra.signal("KILL", Some(2));
    for number in 10..20 {
        let body = json!({"data": number, "id": format!("own-{number}")});
        wait_until(MARKED_DOWN, "an acknowledged publish", async || {
            publish(&node, "room", body.clone()).await.status == 200
        })
        .await;
    }
    assert_eq!(stored().await, all(20));

    // One of three copies is no quorum.
    cassandra.signal("KILL", Some(3));
    wait_until(SOON, "a refused publish", async || {
        publish(&node, "probe", json!({"data": 1})).await.status == 503
    })
    .await;
    assert_eq!(status(&node, "/api/channels/room/history").await, 503, "never an empty list");
    cassandra.restart();
    let waited = until_well(&node).await;
    assert!(waited < WELL_WITHIN, "{waited:?}");
    assert_eq!(stored().await, all(20));
    node.assert_no_panic();
}

/// Greatest time of one query to a node of the database.
const ASKED_WITHIN: Duration = Duration::from_millis(250);

/// Waits until a publish is acknowledged. Gives the time since a quorum has answered a client that is connected to that
/// node of the database alone.
async fn until_well_after(cassandra: &Cassandra, by: usize, keyspace: &str, node: &Node) -> Duration {
    let of_a_quorum = async {
        let session = cassandra.session_by(by).await;
        let mut asked = Statement::new(format!("SELECT runs FROM {keyspace}.nodes WHERE node_id = 'n1'"));
        asked.set_consistency(Consistency::LocalQuorum);
        let begun = async || {
            let begun = Instant::now();
            let answered = tokio::time::timeout(ASKED_WITHIN, session.query_unpaged(asked.clone(), ())).await;
            answered.is_ok_and(|answered| answered.is_ok()).then_some(begun)
        };
        wait_for(MARKED_DOWN, "an answer of a quorum", begun).await
    };
    let of_a_publish = async {
        wait_until(MARKED_DOWN, "an acknowledged publish", async || {
            publish(node, "probe", json!({"data": 1})).await.status == 200
        })
        .await;
        Instant::now()
    };
    let (quorum, acknowledged) = tokio::join!(of_a_quorum, of_a_publish);
    acknowledged.saturating_duration_since(quorum)
}

/// A node of the database that accepts connections and is silent must not hold up new sessions.
#[tokio::test(flavor = "multi_thread")]
async fn quorum_restored_beside_a_stalled_database_node_is_noticed() {
    let Some(cassandra) = Cassandra::to_kill(3) else { return };
    let keyspace = cassandra.keyspace();
    let node = node_with(&cassandra, &keyspace).await;
    for (still, killed) in [(2, &[3][..]), (1, &[2, 3])] {
        until_well(&node).await;
        cassandra.signal("STOP", Some(still));
        for killed in killed {
            cassandra.signal("KILL", Some(*killed));
        }
        wait_until(SOON, "the node to miss the database", async || {
            let degraded =
                http::request(node.admin(), "GET", "/ready", &[], "").await.json()["status"] == "degraded";
            degraded && publish(&node, "probe", json!({"data": 1})).await.status == 503
        })
        .await;
        let again: Vec<_> = killed
            .iter()
            .map(|killed| {
                let (server, killed) = (cassandra.clone(), *killed);
                tokio::task::spawn_blocking(move || server.restart_only(killed))
            })
            .collect();
        // A database node that was never away, or one of those that come back.
        let by = if still == 1 { 2 } else { 1 };
        let waited = until_well_after(&cassandra, by, &keyspace, &node).await;
        println!("{still} stood still and {killed:?} were killed: an ack {waited:?} after a quorum");
        assert!(
            waited < WELL_WITHIN,
            "{waited:?} beside {still}, which stands still, after {killed:?} came back"
        );
        for again in again {
            again.await.expect("it starts");
        }
        cassandra.signal("CONT", Some(still));
        // Waits until all nodes see each other again.
        cassandra.restart();
    }
    node.assert_no_panic();
}
