//! A panic in one request of the store.

use std::net::SocketAddr;

use scylla::errors::{RequestAttemptError, RequestError};
use scylla::observability::history::{AttemptId, HistoryListener, RequestId, SpeculativeId};
use scylla::policies::retry::RetryDecision;

use super::*;

#[derive(Debug)]
struct PanickingListener;

impl HistoryListener for PanickingListener {
    fn log_request_start(&self) -> RequestId {
        panic!("as a test wants it")
    }

    fn log_request_success(&self, _: RequestId) {}

    fn log_request_error(&self, _: RequestId, _: &RequestError) {}

    fn log_new_speculative_fiber(&self, _: RequestId) -> SpeculativeId {
        SpeculativeId(0)
    }

    fn log_attempt_start(&self, _: RequestId, _: Option<SpeculativeId>, _: SocketAddr) -> AttemptId {
        AttemptId(0)
    }

    fn log_attempt_success(&self, _: AttemptId) {}

    fn log_attempt_error(&self, _: AttemptId, _: &RequestAttemptError, _: &RetryDecision) {}
}

#[test]
fn panicking_read_is_refused_and_later_same_read_succeeds() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let store = fixture.open_with(KeyspaceFixture::options(), &Clock::system());
    let key = channel("acme", "a");
    append(&store, &key, store.shared.clock.now_ms(), 1);
    let whole = store.shared.database();
    change_statements(&store, |statements| {
        statements.backwards.set_history_listener(Arc::new(PanickingListener))
    });
    let reads: Vec<_> = (0..3).map(|_| store.read(query(&key))).collect();
    for read in reads {
        let refused = wait(read).expect_err("it panicked");
        assert!(matches!(refused, StoreError::Failed(_)), "{refused:?}");
    }
    assert_eq!(store.shared.reads.under_way(), (0, 0));
    *store.shared.database.write() = whole;
    assert_eq!(sequences(&wait(store.read(query(&key))).expect("read")), [1]);
}
