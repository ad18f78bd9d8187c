//! Client-given ids that several nodes claim, or whose message was never stored.

use std::net::SocketAddr;

use parking_lot::{Condvar, Mutex};
use scylla::errors::{RequestAttemptError, RequestError};
use scylla::observability::history::{AttemptId, HistoryListener, RequestId, SpeculativeId};
use scylla::policies::retry::RetryDecision;

use super::super::Deliveries;
use super::super::ids as given_ids;
use super::*;

fn publish_own(store: &ScyllaStore, key: &ChannelKey, sequence: u64) -> Result<(), StoreError> {
    let (send, receive) = mpsc::channel();
    let done = Box::new(move |result| send.send(result).expect("test waits"));
    let published = with_ids(key, store.shared.clock.now_ms(), &[(sequence, "own")]);
    store.append(published, Some(72), done);
    receive.recv_timeout(PATIENCE).expect("answered")
}

#[test]
fn abandoned_id_is_claimed_by_other_node_and_late_row_ignored() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::manual(Clock::system().now_ms());
    let [one, other] = [(), ()].map(|()| fixture.open_with(KeyspaceFixture::options(), &clock));
    let key = channel("acme", "a");
    assert_eq!(find(&one, &key, "own"), None);
    assert_eq!(find(&other, &key, "own"), None, "the first has claimed it, and nothing came of it");
    assert!(publish_own(&one, &key, 1).is_err(), "it is not its own any more");
    publish_own(&other, &key, 2).expect("stored");
    let stored = Some(Stamp { incarnation: 0xfa_fa, sequence: 2 });
    assert_eq!((find(&one, &key, "own"), find(&other, &key, "own")), (stored, stored));
    assert_eq!(sequences(&wait(one.read(query(&key))).expect("read")), [2]);

    // A claim with a stamp, whose row has not arrived when another node looks the id up.
    let late = channel("acme", "late");
    assert_eq!(find(&one, &late, "own"), None);
    publish_own(&one, &late, 7).expect("stored");
    let keyspace = &fixture.connection.keyspace;
    let position = wait(one.read(query(&late))).expect("read").rows[0].position;
    let database = one.shared.database();
    remove(&one, &late, position);
    let lookup = look_up(&other, &late, "own");
    assert!(lookup.recv_timeout(Duration::from_secs(2)).is_err(), "its owner may still acknowledge it");
    clock.pass_to(position.timestamp_ms + 20_000 + 60_000);
    let found = lookup.recv_timeout(PATIENCE).expect("answered").expect("looked up");
    assert_eq!(found, [None], "there is no row");
    let left = runtime().block_on(async {
        let (scope, statement) = (
            scope(&late),
            format!(
                "SELECT sequence, bucket FROM {keyspace}.message_ids WHERE account = ? \
            AND channel = ? AND key_name = ? AND client_id = ? AND id = ?"
            ),
        );
        let found =
            database.session.query_unpaged(statement, given_ids::names(&scope, "own")).await.expect("asked");
        found.into_rows_result().expect("rows").single_row::<(Option<i64>, Option<i32>)>().expect("the claim")
    });
    assert_eq!(left, (Some(7), Some(-2)), "where that could not be closed it is closed the next time");
    come(&one, &late, position);
    assert!(wait(one.read(query(&late))).expect("read").rows.is_empty(), "it has come too late");
    publish_own(&other, &late, 8).expect("stored");
    assert_eq!(sequences(&wait(one.read(query(&late))).expect("read")), [8]);
}

#[test]
fn a_stamp_that_was_given_up_does_not_count_when_it_comes_late() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let store = fixture.open_with(KeyspaceFixture::options(), &Clock::system());
    let key = channel("acme", "a");
    let (database, keyspace) = (store.shared.database(), &fixture.connection.keyspace);
    let named = "account = ? AND channel = ? AND key_name = ? AND client_id = ? AND id = 'own'";
    let scope = scope(&key);
    let (account, channel, key_name, client_id, _) = given_ids::names(&scope, "own");
    let names = (account, channel, key_name, client_id);
    assert_eq!(find(&store, &key, "own"), None);
    let first: i64 = runtime().block_on(async {
        let statement = format!("SELECT owner FROM {keyspace}.message_ids WHERE {named}");
        let found = database.session.query_unpaged(statement, names).await.expect("asked");
        found.into_rows_result().expect("rows").single_row::<(i64,)>().expect("the claim").0
    });
    // The write got no answer, so the client retries.
    assert_eq!(find(&store, &key, "own"), None);
    publish_own(&store, &key, 2).expect("stored");
    let late = format!("UPDATE {keyspace}.message_ids SET sequence = 1 WHERE {named} IF owner = {first}");
    runtime().block_on(database.session.query_unpaged(late, names)).expect("answered");
    let stored = Some(Stamp { incarnation: 0xfa_fa, sequence: 2 });
    assert_eq!(find(&store, &key, "own"), stored, "it names what was acknowledged");
}

#[test]
fn each_id_of_publish_is_found_in_partition_of_its_row() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let options = || ScyllaOptions { partition_rows: 2, ..KeyspaceFixture::options() };
    let [one, other] = [(), ()].map(|()| fixture.open_with(options(), &clock));
    let key = channel("acme", "a");
    let ids = ["first", "second", "third"];
    ids.iter().for_each(|id| assert_eq!(find(&one, &key, id), None));
    let given: Vec<_> = (1..).zip(ids).collect();
    let (send, receive) = mpsc::channel();
    let done = Box::new(move |result| send.send(result).expect("test waits"));
    one.append(with_ids(&key, clock.now_ms(), &given), Some(72), done);
    receive.recv_timeout(PATIENCE).expect("answered").expect("stored");
    for (sequence, id) in given {
        assert_eq!(find(&other, &key, id), Some(Stamp { incarnation: 0xfa_fa, sequence }), "{id}");
    }
}

/// Removes the row as if it had not arrived yet, with the row's own write time.
fn remove(store: &ScyllaStore, key: &ChannelKey, position: HistoryPosition) {
    let (timestamp_ms, sequence, incarnation) = values::position_values(position);
    let removed = format!(
        "DELETE FROM {}.history USING TIMESTAMP {} WHERE account = 'acme' AND channel = '{}' AND kind = 0 AND day = {} \
         AND bucket = 0 AND timestamp_ms = {timestamp_ms} AND sequence = {sequence} AND incarnation = {incarnation}",
        store.shared.connection.keyspace,
        position.timestamp_ms * 1_000,
        key.channel(),
        position.timestamp_ms / DAY_MS
    );
    runtime().block_on(store.shared.database().session.query_unpaged(removed, ())).expect("removed");
}

/// Writes the row after all, as if it arrived late.
fn come(store: &ScyllaStore, key: &ChannelKey, position: HistoryPosition) {
    let (timestamp_ms, sequence, incarnation) = values::position_values(position);
    let come = format!(
        "INSERT INTO {}.history (account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation, record) \
         VALUES ('acme', '{}', 0, {}, 0, {timestamp_ms}, {sequence}, {incarnation}, 'own') USING TIMESTAMP {}",
        store.shared.connection.keyspace,
        key.channel(),
        position.timestamp_ms / DAY_MS,
        position.timestamp_ms * 1_000 + 1
    );
    runtime().block_on(store.shared.database().session.query_unpaged(come, ())).expect("written");
}

/// Looks the id up until the database answers.
fn find_at_last(store: &ScyllaStore, key: &ChannelKey) -> Option<Stamp> {
    let end = std::time::Instant::now() + PATIENCE;
    loop {
        if let Ok(found) = look_up(store, key, "own").recv_timeout(PATIENCE).expect("answered") {
            return found[0];
        }
        assert!(std::time::Instant::now() < end, "it is never answered");
    }
}

#[test]
fn id_claim_waits_store_timeout_after_missed_row_despite_clocks() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::manual(Clock::system().now_ms());
    let one = fixture.open_with(KeyspaceFixture::options(), &clock);
    let key = channel("acme", "a");
    assert_eq!(find(&one, &key, "own"), None);
    publish_own(&one, &key, 1).expect("stored");
    let position = wait(one.read(query(&key))).expect("read").rows[0].position;
    remove(&one, &key, position);
    // Its clock is half a minute ahead, so by that clock the row could no longer be acknowledged.
    let ahead = Clock::manual(clock.now_ms() + 30_000);
    let waits = Duration::from_secs(4);
    let other = fixture.open_with(ScyllaOptions { wait: waits, ..KeyspaceFixture::options() }, &ahead);
    let begun = std::time::Instant::now();
    assert_eq!(find_at_last(&other, &key), None, "there is no row");
    assert!(begun.elapsed() >= waits, "{:?}: its owner may still acknowledge it", begun.elapsed());
    let stored = (0..20).any(|_| publish_own(&other, &key, 2).is_ok());
    assert!(stored, "it was asked often");
    assert_eq!(sequences(&wait(one.read(query(&key))).expect("read")), [2]);
}

/// Reports no message as delivered until it is released.
#[derive(Default)]
struct BlockedDeliveries {
    waited_for: Mutex<Vec<Stamp>>,
    delivered: tokio::sync::Notify,
}

impl Deliveries for Arc<BlockedDeliveries> {
    fn wait_delivered(&self, _: ChannelKey, stamp: Stamp) -> BoxFuture<'static, ()> {
        self.waited_for.lock().push(stamp);
        let undelivered = Arc::clone(self);
        Box::pin(async move { undelivered.delivered.notified().await })
    }
}

#[test]
fn repeat_is_found_when_its_message_is_delivered() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let [one, other] = [(), ()].map(|()| fixture.open_with(KeyspaceFixture::options(), &Clock::system()));
    let undelivered = Arc::new(BlockedDeliveries::default());
    other.set_deliveries(Arc::new(Arc::clone(&undelivered)));
    let key = channel("acme", "a");
    assert_eq!(find(&one, &key, "own"), None);
    publish_own(&one, &key, 1).expect("stored");
    let lookup = look_up(&other, &key, "own");
    let stamp = Stamp { incarnation: 0xfa_fa, sequence: 1 };
    assert!(lookup.recv_timeout(Duration::from_secs(2)).is_err(), "the nodes do not have it yet");
    assert_eq!(*undelivered.waited_for.lock(), [stamp]);
    undelivered.delivered.notify_one();
    assert_eq!(lookup.recv_timeout(PATIENCE).expect("answered"), Ok(vec![Some(stamp)]));
}

#[test]
fn client_that_changes_nodes_waits_once_for_a_missing_row() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let wait = Duration::from_secs(4);
    let open = || fixture.open_with(ScyllaOptions { wait, ..KeyspaceFixture::options() }, &clock);
    let [one, other, third] = [open(), open(), open()];
    let key = channel("acme", "a");
    assert_eq!(find(&one, &key, "own"), None);
    publish_own(&one, &key, 1).expect("stored");
    let position = super::wait(one.read(query(&key))).expect("read").rows[0].position;
    remove(&one, &key, position);
    let begun = std::time::Instant::now();
    let mut stores = [&other, &third].into_iter().cycle();
    let found =
        stores.find_map(|store| look_up(store, &key, "own").recv_timeout(PATIENCE).expect("answered").ok());
    let took = begun.elapsed();
    assert_eq!(found, Some(vec![None]), "there is no row");
    assert!(took >= wait, "{took:?}: its owner may still acknowledge it");
    assert!(took < wait + wait / 2, "{took:?}: the second node waits anew");
    come(&one, &key, position);
    assert!(publish_own(&third, &key, 2).is_ok() || publish_own(&other, &key, 3).is_ok());
    assert_eq!(
        super::wait(one.read(query(&key))).expect("read").rows.len(),
        1,
        "the late row does not count"
    );
}

/// Holds back the answers of requests.
#[derive(Debug, Default)]
struct ResponseGate {
    state: Mutex<ResponseGateState>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct ResponseGateState {
    holds: bool,
    is_holding: bool,
}

impl ResponseGate {
    /// Holds the next answer.
    fn hold(&self) {
        *self.state.lock() = ResponseGateState { holds: true, is_holding: false };
    }

    /// Returns whether an answer was held by the deadline.
    fn holds_until(&self, deadline: std::time::Instant) -> bool {
        let mut state = self.state.lock();
        while !state.is_holding {
            if self.changed.wait_until(&mut state, deadline).timed_out() {
                return false;
            }
        }
        true
    }

    fn release(&self) {
        self.state.lock().holds = false;
        self.changed.notify_all();
    }
}

impl HistoryListener for ResponseGate {
    fn log_request_success(&self, _: RequestId) {
        tokio::task::block_in_place(|| {
            let mut state = self.state.lock();
            state.is_holding |= state.holds;
            self.changed.notify_all();
            self.changed.wait_while_for(&mut state, |state| state.holds, PATIENCE);
        });
    }

    fn log_request_start(&self) -> RequestId {
        RequestId(0)
    }

    fn log_new_speculative_fiber(&self, _: RequestId) -> SpeculativeId {
        SpeculativeId(0)
    }

    fn log_attempt_start(&self, _: RequestId, _: Option<SpeculativeId>, _: SocketAddr) -> AttemptId {
        AttemptId(0)
    }

    fn log_request_error(&self, _: RequestId, _: &RequestError) {}

    fn log_attempt_success(&self, _: AttemptId) {}

    fn log_attempt_error(&self, _: AttemptId, _: &RequestAttemptError, _: &RetryDecision) {}
}

#[test]
fn node_stalled_after_missing_row_looks_up_row_again() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::manual(Clock::system().now_ms());
    let one = fixture.open_with(KeyspaceFixture::options(), &clock);
    let options = ScyllaOptions { wait: Duration::from_secs(6), ..KeyspaceFixture::options() };
    let other = fixture.open_with(options, &clock);
    // The machine may stall too.
    let looked = ["a", "b", "c"].iter().any(|name| looks_again(&one, &other, &channel("acme", name)));
    assert!(looked, "the machine always stood still");
}

/// Returns false if the times of the test were not met.
fn looks_again(one: &ScyllaStore, other: &ScyllaStore, key: &ChannelKey) -> bool {
    assert_eq!(find(one, key, "own"), None);
    publish_own(one, key, 7).expect("stored");
    let row = wait(one.read(query(key))).expect("read").rows.remove(0);
    remove(one, key, row.position);
    let hold_up = Arc::new(ResponseGate::default());
    change_statements(other, |statements| {
        statements.find_row.set_history_listener(Arc::clone(&hold_up) as _);
    });
    let begun = std::time::Instant::now();
    let until =
        |seconds| std::thread::sleep(Duration::from_secs_f64(seconds).saturating_sub(begun.elapsed()));
    hold_up.hold();
    let lookup = look_up(other, key, "own");
    until(4.0);
    let is_held = hold_up.holds_until(begun);
    hold_up.release();
    if !is_held {
        return false;
    }
    assert!(lookup.recv_timeout(PATIENCE).expect("answered").is_err(), "it may still come");
    // The row has been missing since the fourth second, so the lookup waits only until the tenth.
    let lookup = look_up(other, key, "own");
    until(7.5);
    hold_up.hold();
    if !hold_up.holds_until(begun + Duration::from_secs(10)) {
        hold_up.release();
        return false;
    }
    come(one, key, row.position);
    until(10.5);
    hold_up.release();
    let found = lookup.recv_timeout(PATIENCE).expect("answered");
    let found = found.map_or_else(|_| find_at_last(other, key), |found| found[0]);
    assert_eq!(found, Some(Stamp { incarnation: 0xfa_fa, sequence: 7 }));
    assert_eq!(sequences(&wait(one.read(query(key))).expect("read")), [7]);
    true
}

#[test]
fn message_with_unknown_partition_is_absent_and_stored_on_retry() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let store = fixture.open_with(KeyspaceFixture::options(), &Clock::system());
    let key = channel("acme", "a");
    assert_eq!(find(&store, &key, "own"), None);
    let execute = |statement: &str| {
        let statement = statement.replace("{}", &fixture.connection.keyspace);
        runtime().block_on(store.shared.database().session.query_unpaged(statement, ())).expect("done");
    };
    execute("DROP TABLE {}.days");
    assert!(publish_own(&store, &key, 1).is_err());
    execute(
        "CREATE TABLE {}.days (account text, channel text, kind tinyint, day int, bucket int, \
         PRIMARY KEY ((account, channel, kind), day, bucket)) WITH CLUSTERING ORDER BY (day DESC, bucket DESC)",
    );
    assert_eq!(find_at_last(&store, &key), None, "who is told of it finds it");
    let stored = (0..20).any(|_| publish_own(&store, &key, 2).is_ok());
    assert!(stored, "it was asked often");
    assert_eq!(sequences(&wait(store.read(query(&key))).expect("read")), [2]);
}

#[test]
fn many_abandoned_ids_are_claimed_together_and_in_order() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let [one, other] = [(), ()].map(|()| fixture.open_with(KeyspaceFixture::options(), &clock));
    let key = channel("acme", "a");
    let ids: Vec<_> = (0..256).map(|number| number.to_string()).collect();
    let claims: Vec<_> = ids.iter().map(|id| look_up(&one, &key, id)).collect();
    for claimed in claims {
        let found = claimed.recv_timeout(PATIENCE).expect("answered");
        assert_eq!(found, Ok(vec![None]), "nothing comes of it");
    }
    let begun = std::time::Instant::now();
    let (send, receive) = mpsc::channel();
    let fresh = "fresh".to_owned();
    for id in ids.iter().chain([&fresh]) {
        let (send, own) = (send.clone(), id.clone());
        let found = Box::new(move |found| send.send((own, found)).expect("test waits"));
        other.find_ids(scope(&key), vec![id.as_str().into()], found);
    }
    for id in ids.into_iter().chain([fresh]) {
        assert_eq!(receive.recv_timeout(PATIENCE).expect("answered"), (id, Ok(vec![None])));
    }
    assert!(begun.elapsed() < Duration::from_secs(6), "{:?}: each takes a second", begun.elapsed());
}
