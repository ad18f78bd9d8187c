//! The contract of a history store, over a real database.

use std::sync::{Arc, OnceLock};

use tokio::runtime::Runtime;

use super::*;
use crate::origin::history::contract::{Place, WINDOW_MS, contract_tests};

/// All stores of the tests work on it.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let build = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    RUNTIME.get_or_init(|| build().expect("a runtime"))
}

/// A keyspace of a test's own, gone with it.
struct Keyspace {
    connection: Connection,
}

impl Keyspace {
    /// None: there is no database to test with, which `CI=true` forbids.
    fn new() -> Option<Self> {
        let points = std::env::var("FANFARE_TEST_CQL").unwrap_or_default();
        if points.is_empty() {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no database to test with");
            eprintln!("NOT CHECKED: run it through cluster-tests/cassandra/with");
            return None;
        }
        let connection = Connection {
            nodes: points.split(',').map(str::to_owned).collect(),
            keyspace: format!("t_{:016x}", u64::from_be_bytes(crate::model::random_bytes())),
            replication: Some(1),
            credentials: None,
            wait: Duration::from_secs(20),
        };
        Some(Self { connection })
    }

    fn options() -> ScyllaOptions {
        let limits = Limits { idempotency_window_ms: WINDOW_MS, ..Limits::default() };
        ScyllaOptions { wait: Duration::from_secs(20), ..ScyllaOptions::new("n1".into(), &limits) }
    }

    fn open_with(&self, options: ScyllaOptions, clock: &Clock) -> Arc<Scylla> {
        let opened = runtime().block_on(Scylla::open(self.connection.clone(), options, clock.clone()));
        Arc::new(opened.expect("the store opens"))
    }
}

impl Place for Keyspace {
    fn open(&self, clock: &Clock) -> Arc<dyn HistoryStore> {
        self.open_with(Self::options(), clock)
    }
}

impl Drop for Keyspace {
    fn drop(&mut self) {
        runtime().block_on(async {
            let session = self.connection.session().await.expect("a session");
            let dropped = format!("DROP KEYSPACE IF EXISTS {}", self.connection.keyspace);
            // The server ends with the tests.
            session.query_unpaged(dropped, ()).await.ok();
        });
    }
}

contract_tests!(match Keyspace::new() {
    Some(place) => place,
    None => return,
});
