//! Selection of the database node for a request.

use std::collections::HashSet;
use std::net::SocketAddr;

use scylla::observability::history::HistoryCollector;
use scylla::serialize::row::SerializeRow;
use scylla::statement::prepared::PreparedStatement;

use super::super::connection::batch;
use super::super::reachability::NodeReachability;
use super::*;

/// Number of channels with which each of three nodes has some.
const CHANNELS: usize = 24;

/// Nodes that were contacted first, one for each request.
fn contacted(collector: &HistoryCollector) -> Vec<SocketAddr> {
    let requests = collector.clone_structured_history().requests;
    let first = requests.iter().filter_map(|request| request.non_speculative_fiber.attempts.first());
    first.map(|attempt| attempt.node_addr).collect()
}

/// With one copy of each partition, any other node would have to ask the one that has it.
#[test]
fn a_node_is_asked_that_has_the_partition() {
    let Some(mut fixture) = KeyspaceFixture::new() else { return };
    fixture.connection.replication = Some(1);
    let store = fixture.open_with(KeyspaceFixture::options(), &Clock::system());
    let (database, keyspace) = (store.shared.database(), &fixture.connection.keyspace);
    let (session, state) = (&database.session, database.session.get_cluster_state());
    let owner = |table: &str, partition: &dyn SerializeRow| {
        let owners = state.get_endpoints(keyspace, table, partition).expect("a partition of this table");
        assert_eq!(owners.len(), 1, "{owners:?}");
        SocketAddr::new(owners[0].0.address.ip(), owners[0].0.address.port())
    };
    let mut owners = HashSet::new();
    for number in 0..CHANNELS {
        let channel = format!("channel {number}");
        let (of_days, of_rows) = (Arc::new(HistoryCollector::new()), Arc::new(HistoryCollector::new()));
        let observed_by = |statement: &PreparedStatement, listener: &Arc<HistoryCollector>| {
            let mut statement = statement.clone();
            statement.set_history_listener(Arc::clone(listener) as _);
            statement
        };
        let insert_day = observed_by(&database.statements.insert_day, &of_days);
        let days_backwards = observed_by(&database.statements.days_backwards, &of_days);
        let find_row = observed_by(&database.statements.find_row, &of_rows);
        let mut insert_days = batch(&database.statements.insert_day, 2);
        insert_days.set_history_listener(Arc::clone(&of_days) as _);
        runtime().block_on(async {
            let day = |bucket: i32| ("acme", &*channel, 0_i8, 20_000, bucket, 60, 1_i64);
            session.execute_unpaged(&insert_day, day(0)).await.expect("written");
            session.batch(&insert_days, &[day(1), day(2)][..]).await.expect("written");
            let days = ("acme", &*channel, 0_i8, 0, 30_000, 9);
            session.execute_unpaged(&days_backwards, days).await.expect("read");
            let row = ("acme", &*channel, 0_i8, 20_000, 0, 1_i64, 1_i64, 1_i64);
            session.execute_unpaged(&find_row, row).await.expect("read");
        });
        let has_days = owner("days", &("acme", &*channel, 0_i8));
        assert_eq!(contacted(&of_days), [has_days; 3], "{channel}");
        let has_row = owner("history", &("acme", &*channel, 0_i8, 20_000, 0));
        assert_eq!(contacted(&of_rows), [has_row], "{channel}");
        owners.extend([has_days, has_row]);
    }
    assert_eq!(owners.len(), state.get_nodes_info().len(), "each node of the database has some: {owners:?}");
}

/// Skips one node if there are several; a single node is never skipped.
#[test]
fn a_node_that_was_passed_by_is_connected_to_later() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let store = fixture.open_with(KeyspaceFixture::options(), &Clock::system());
    let database = store.shared.database();
    let state = database.session.get_cluster_state();
    let nodes = state.get_nodes_info().iter();
    let mut answer: HashSet<_> =
        nodes.map(|node| SocketAddr::new(node.address.ip(), node.address.port())).collect();
    let silent: HashSet<_> = answer.iter().copied().skip(1).take(1).collect();
    answer.retain(|node| !silent.contains(node));
    runtime().block_on(async {
        let made = fixture
            .connection
            .session_avoiding_silent(&NodeReachability { answer, silent: silent.clone() })
            .await;
        let (session, passed) = made.expect("a session");
        let database =
            PreparedSession::from_session(session, &fixture.connection.keyspace).await.expect("prepared");
        let is_connected = || {
            let state = database.session.get_cluster_state();
            let mut nodes = state.get_nodes_info().iter();
            nodes.all(|node| node.is_connected())
        };
        assert_eq!(is_connected(), silent.is_empty());
        database.connect_to_all(&passed).await;
        assert!(is_connected());
    });
}
