//! The contract of a history store, over a real database.

mod blocking;
mod continuations;
mod copy;
mod ids;
mod panics;
mod policies;
mod replicas;

use std::sync::{Arc, OnceLock, mpsc};

use tokio::runtime::Runtime;

use super::buckets::HistoryBucket;
use super::connection::Statements;
use super::rows::{BucketedRow, NewRow};
use super::*;
use crate::model::{ChannelKey, ClientId, ConnectionId, MemberId, PresenceStamp, SessionOwner, Stamp};
use crate::origin::history::contract::{
    PATIENCE, StoreFixture, WINDOW_MS, channel, contract_tests, messages, query, scope, sequences, wait,
    with_ids,
};
use crate::origin::history::{Direction, HistoryPosition, RowKind};

/// Runtime of all stores in the tests.
fn runtime() -> &'static Runtime {
    static RUNTIME: OnceLock<Runtime> = OnceLock::new();
    let build = || tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    RUNTIME.get_or_init(|| build().expect("a runtime"))
}

/// Keyspace of a single test, dropped at its end.
struct KeyspaceFixture {
    connection: ScyllaConnection,
}

impl KeyspaceFixture {
    /// Returns `None` if there is no database to test with, which `CI=true` forbids.
    fn new() -> Option<Self> {
        let points = std::env::var("FANFARE_TEST_CQL").unwrap_or_default();
        if points.is_empty() {
            assert!(std::env::var("CI").as_deref() != Ok("true"), "no database to test with");
            eprintln!("NOT CHECKED: run it through cluster-tests/cassandra/with");
            return None;
        }
        let connection = ScyllaConnection {
            nodes: points.split(',').map(str::to_owned).collect(),
            keyspace: format!("t_{:016x}", u64::from_be_bytes(crate::model::random_bytes())),
            replication: None,
            datacenter: None,
            credentials: None,
            wait: Duration::from_secs(20),
        };
        Some(Self { connection })
    }

    fn options() -> ScyllaOptions {
        let limits = Limits { idempotency_window_ms: WINDOW_MS, ..Limits::default() };
        ScyllaOptions { wait: Duration::from_secs(20), ..ScyllaOptions::new("n1".into(), &limits) }
    }

    fn open_with(&self, options: ScyllaOptions, clock: &Clock) -> Arc<ScyllaStore> {
        let opened = runtime().block_on(ScyllaStore::open(self.connection.clone(), options, clock.clone()));
        Arc::new(opened.expect("the store opens"))
    }
}

impl StoreFixture for KeyspaceFixture {
    fn open(&self, clock: &Clock) -> Arc<dyn HistoryStore> {
        self.open_with(Self::options(), clock)
    }
}

impl Drop for KeyspaceFixture {
    fn drop(&mut self) {
        runtime().block_on(async {
            let session = self.connection.session().await.expect("a session");
            let dropped = format!("DROP KEYSPACE IF EXISTS {}", self.connection.keyspace);
            // Errors are ignored: the server ends with the tests.
            session.query_unpaged(dropped, ()).await.ok();
        });
    }
}

contract_tests!(match KeyspaceFixture::new() {
    Some(fixture) => fixture,
    None => return,
});

/// Appends a message with this sequence and timestamp.
fn append(store: &ScyllaStore, key: &ChannelKey, timestamp_ms: u64, sequence: u64) {
    let (send, receive) = mpsc::channel();
    let done = Box::new(move |result| send.send(result).expect("test waits"));
    store.append(messages(key, timestamp_ms, sequence..=sequence), Some(240), done);
    receive.recv_timeout(PATIENCE).expect("answered").expect("stored");
}

fn find(store: &ScyllaStore, key: &ChannelKey, id: &str) -> Option<Stamp> {
    look_up(store, key, id).recv_timeout(PATIENCE).expect("answered").expect("looked up")[0]
}

type IdLookupReceiver = mpsc::Receiver<Result<Vec<Option<Stamp>>, StoreError>>;

fn look_up(store: &ScyllaStore, key: &ChannelKey, id: &str) -> IdLookupReceiver {
    let (send, receive) = mpsc::channel();
    let found = Box::new(move |found| send.send(found).expect("test waits"));
    store.find_ids(scope(key), vec![id.into()], found);
    receive
}

/// Changes the prepared statements for a test.
fn change_statements(store: &ScyllaStore, change: impl FnOnce(&mut Statements)) {
    let connection = &store.shared.connection;
    let database = runtime().block_on(async {
        let session = connection.session().await.expect("a session");
        let mut database =
            PreparedSession::from_session(session, &connection.keyspace).await.expect("prepared");
        change(&mut database.statements);
        database
    });
    *store.shared.database.write() = Arc::new(database);
}

#[test]
fn a_data_centre_that_the_database_does_not_have_is_named() {
    let Some(mut fixture) = KeyspaceFixture::new() else { return };
    fixture.connection.datacenter = Some("north".to_owned());
    let opened = runtime().block_on(apply_schema(&fixture.connection));
    let message = "the database has no data centre north (--scylla-datacenter), but datacenter1";
    assert_eq!(opened.expect_err("there is none").to_string(), message);
    fixture.connection.datacenter = Some("datacenter1".to_owned());
    fixture.open_with(KeyspaceFixture::options(), &Clock::system());
}

#[test]
fn a_row_that_follows_does_not_tell_the_index_again() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let store = fixture.open_with(KeyspaceFixture::options(), &clock);
    let key = channel("acme", "a");
    let midnight_ms = clock.now_ms() / DAY_MS * DAY_MS;
    append(&store, &key, midnight_ms, 1);
    let is_indexed = |timestamp_ms| {
        let kept_until_ms = timestamp_ms + 240 * HOUR_MS;
        store.shared.buckets.assign(&key, RowKind::Messages, timestamp_ms, 1, kept_until_ms).1.is_some()
    };
    assert!(!is_indexed(midnight_ms + 1) && !is_indexed(midnight_ms + DAY_MS - 1));
    assert!(is_indexed(midnight_ms + DAY_MS), "another day is another partition");
}

#[test]
fn rows_of_several_partitions_are_several_writes() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let store = fixture.open_with(ScyllaOptions { partition_rows: 3, ..KeyspaceFixture::options() }, &clock);
    let (key, midnight_ms) = (channel("acme", "a"), clock.now_ms() / DAY_MS * DAY_MS);
    let mut parts = Vec::new();
    for (sequence, timestamp_ms) in (1..).zip(midnight_ms - 5..midnight_ms + 5) {
        let position = HistoryPosition { timestamp_ms, sequence, incarnation: 1 };
        let row = NewRow { position, id: "id".into(), record: "{}".into() };
        let kept_until_ms = timestamp_ms + DAY_MS;
        let (bucket, index_until_ms) =
            store.shared.buckets.assign(&key, RowKind::Messages, timestamp_ms, row.bytes(), kept_until_ms);
        let placed = BucketedRow::new(
            &store.shared,
            &rows::names(&key),
            (RowKind::Messages, bucket),
            &row,
            60,
            index_until_ms,
        );
        rows::add(&mut parts, placed);
    }
    let partitions: Vec<_> = parts.iter().map(rows::BucketRowBatch::partitions).collect();
    assert!(partitions.iter().all(|partitions| partitions.len() == 1), "{partitions:?}");
    assert!(partitions.len() > 2, "{partitions:?}");
}

#[test]
fn a_page_is_the_same_over_partitions_of_every_width() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let options = ScyllaOptions { partition_rows: 4, ..KeyspaceFixture::options() };
    let store = fixture.open_with(options, &clock);
    let key = channel("acme", "a");
    let midnight_ms = clock.now_ms() / DAY_MS * DAY_MS;
    // Around midnight, dense and sparse, so that partitions of all widths are written.
    let steps = [1, 1, 1, 1, 1, 400, 1, 1_000, 30_000, 1, 1, 3_600_000, 1, 1, 1, 1, 61_000, 5, 5, 5];
    let mut timestamp_ms = midnight_ms - 6 * HOUR_MS;
    let mut sequence = 0;
    for _ in 0..3 {
        for step_ms in steps {
            (timestamp_ms, sequence) = (timestamp_ms + step_ms, sequence + 1);
            append(&store, &key, timestamp_ms, sequence);
        }
    }
    timestamp_ms = timestamp_ms.max(midnight_ms);
    for _ in 0..20 {
        (timestamp_ms, sequence) = (timestamp_ms + 1, sequence + 1);
        append(&store, &key, timestamp_ms, sequence);
    }
    // Another node that has written less uses wider partitions at the same time.
    let other = fixture.open_with(KeyspaceFixture::options(), &clock);
    append(&other, &key, timestamp_ms, sequence + 1);
    append(&store, &key, timestamp_ms + 1, sequence + 2);
    let all: Vec<u64> = (1..=sequence + 2).collect();
    for direction in [Direction::Forwards, Direction::Backwards] {
        for limit in [1, 7, 1_000] {
            let (mut seen, mut cursor) = (Vec::new(), None);
            loop {
                let request = HistoryQuery { limit, cursor, direction, ..query(&key) };
                let page = wait(store.read(request)).expect("read");
                seen.extend(sequences(&page));
                cursor = page.next;
                if cursor.is_none() {
                    break;
                }
            }
            if direction == Direction::Backwards {
                seen.reverse();
            }
            assert_eq!(seen, all, "{direction:?}, {limit} at a time");
        }
    }
    let partitions = partitions(&fixture, &store);
    let rows: usize = partitions.iter().map(|(_, rows)| rows).sum();
    assert_eq!(rows, all.len());
    for (bucket, rows) in partitions {
        let times = bucket.times();
        let is_narrowest = times.end - times.start == 1_000;
        // One of the rows is the other node's.
        assert!(rows <= 4 + 1 || is_narrowest, "{bucket:?} has {rows}");
    }
}

/// Partitions of messages, with the number of rows in each.
fn partitions(fixture: &KeyspaceFixture, store: &ScyllaStore) -> Vec<(HistoryBucket, usize)> {
    let keyspace = &fixture.connection.keyspace;
    let counted = format!(
        "SELECT kind, day, bucket, count(record) FROM {keyspace}.history GROUP BY account, channel, kind, day, bucket"
    );
    let found = runtime().block_on(store.shared.database().session.query_unpaged(counted, ()));
    let found = found.expect("read").into_rows_result().expect("rows");
    let rows = found.rows::<(i8, i32, i32, i64)>().expect("counts").map(|row| row.expect("a count"));
    let messages = rows.filter(|(kind, ..)| *kind == 0);
    messages
        .map(|(_, day, number, rows)| (HistoryBucket { day, number }, usize::try_from(rows).expect("few")))
        .collect()
}

#[test]
fn history_read_sees_all_acked_rows_despite_shared_reads() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let store = fixture.open_with(KeyspaceFixture::options(), &clock);
    let key = channel("acme", "a");
    let mut reads = Vec::new();
    for sequence in 1..=50 {
        append(&store, &key, clock.now_ms(), sequence);
        reads.extend((0..5).map(|_| (sequence, store.read(query(&key)))));
    }
    // With several nodes of the database, one may have a row and not yet the row before it, while both are being written.
    let is_one = store.shared.database().session.get_cluster_state().get_nodes_info().len() == 1;
    for (at_least, read) in reads {
        let seen = sequences(&wait(read).expect("read"));
        let beginning = |newest| (1..=newest).rev().collect::<Vec<u64>>();
        let acknowledged: Vec<u64> = seen.iter().copied().filter(|sequence| *sequence <= at_least).collect();
        assert_eq!(acknowledged, beginning(at_least));
        assert!(seen.is_sorted_by(|later, earlier| later > earlier), "{seen:?}");
        assert!(!is_one || seen == beginning(seen[0]), "a beginning: {seen:?}");
    }
}

#[test]
fn identical_history_reads_share_one_read_after_the_current() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let store = fixture.open_with(KeyspaceFixture::options(), &clock);
    let key = channel("acme", "a");
    (1..=3).for_each(|sequence| append(&store, &key, clock.now_ms(), sequence));
    let reads = &store.shared.reads;
    let all = u32::try_from(reads.permits.available_permits()).expect("few");
    let permits = runtime().block_on(reads.permits.acquire_many(all)).expect("never closed");
    let same: Vec<_> = (0..100).map(|_| store.read(query(&key))).collect();
    let other = store.read(HistoryQuery { limit: 1, ..query(&key) });
    assert_eq!(reads.under_way(), (2, 99));
    drop(permits);
    for read in same {
        assert_eq!(sequences(&wait(read).expect("read")), [3, 2, 1]);
    }
    assert_eq!(sequences(&wait(other).expect("read")), [3]);
    assert_eq!(reads.under_way(), (0, 0));
}

/// Leave of a member whose node is down, as one of the other nodes writes it.
fn leave_event(key: &ChannelKey, by: u64, timestamp_ms: u64, epoch: u64) -> Arc<PresenceEvent> {
    let member =
        MemberId { connection_id: ConnectionId::from_bytes([7; 16]), client_id: ClientId::of("ada") };
    let position = Stamp { incarnation: by, sequence: 0 };
    let stamp = PresenceStamp { timestamp_ms, incarnation: by, sequence: by, position };
    PresenceEvent::delayed_leave(key.clone(), member, SessionOwner { epoch, incarnation: 99 }, None, stamp)
}

/// Appends the leave; retries while the database is busy.
fn append_leave(store: &ScyllaStore, event: &Arc<PresenceEvent>) {
    let stored = (0..20).any(|_| {
        let (send, receive) = mpsc::channel();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        store.append_presence(Arc::clone(event), Some(72), done);
        receive.recv_timeout(PATIENCE).expect("answered").is_ok()
    });
    assert!(stored, "it was asked often");
}

#[test]
fn a_leave_that_several_nodes_make_is_one_row() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let nodes: Vec<_> = (0..3).map(|_| fixture.open_with(KeyspaceFixture::options(), &clock)).collect();
    let (key, now_ms) = (channel("acme", "a"), clock.now_ms());
    let rows = || {
        let counted = format!(
            "SELECT count(record) FROM {}.history WHERE kind = 1 ALLOW FILTERING",
            fixture.connection.keyspace
        );
        let found = runtime().block_on(nodes[0].shared.database().session.query_unpaged(counted, ()));
        let found = found.expect("read").into_rows_result().expect("rows");
        found.first_row::<(i64,)>().expect("a count").0
    };
    for (by, node) in (1..).zip(&nodes) {
        append_leave(node, &leave_event(&key, by, now_ms + 700 * by, 1));
        append_leave(node, &leave_event(&key, by, now_ms + 700 * by, 1));
    }
    assert_eq!(rows(), 1);
    // The first node has gone down before its event was written.
    let event = leave_event(&key, 1, now_ms, 2);
    let at = HistoryPosition { timestamp_ms: now_ms, sequence: 1, incarnation: 1 };
    let shared = &nodes[0].shared;
    let (bucket, _) = shared.buckets.assign(&key, RowKind::Presence, now_ms, 1, now_ms + DAY_MS);
    let claim = || runtime().block_on(event_claims::claim(shared, &key, &event.id(), (at, bucket)));
    let claimed = std::iter::repeat_with(claim).find_map(Result::ok).expect("it is asked until it answers");
    assert_eq!(claimed, Some((at, bucket)));
    assert_eq!(rows(), 1);
    std::thread::scope(|scope| {
        for (by, node) in (2..).zip(&nodes[1..]) {
            let event = leave_event(&key, by, now_ms + 5_000, 2);
            scope.spawn(move || append_leave(node, &event));
        }
    });
    assert_eq!(rows(), 2);
    append_leave(&nodes[0], &leave_event(&key, 1, now_ms + 9_000, 3));
    assert_eq!(rows(), 3, "it was there again, and lost again");
}

#[test]
fn waiting_writes_and_lookups_bounded_and_callbacks_run_once() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let options = ScyllaOptions { write_queue_rows: 16, keeps_members: false, ..KeyspaceFixture::options() };
    let store = fixture.open_with(options, &clock);
    let (key, now_ms) = (channel("acme", "a"), clock.now_ms());
    // All permits are taken, so no request reaches the database.
    let held = [&store.shared.writes.permits, &store.shared.ids.permits].map(|permits| {
        let all = u32::try_from(permits.available_permits()).expect("few");
        runtime().block_on(permits.acquire_many(all)).expect("never closed")
    });
    let (send, stored) = mpsc::channel();
    for epoch in 0..64 {
        let send = send.clone();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        store.append_presence(leave_event(&key, 1, now_ms, epoch), Some(72), done);
    }
    assert!(store.is_full());
    assert_eq!(stored.try_iter().collect::<Vec<_>>(), vec![Err(StoreError::Busy); 48]);
    let (send, found) = mpsc::channel();
    for number in 0..6_000 {
        let send = send.clone();
        let done = Box::new(move |result: Result<Vec<_>, _>| {
            send.send(result.map(|found| found.len())).expect("test waits");
        });
        let own = (number < 32).then(|| number.to_string().into());
        store.find_ids(scope(&key), own.into_iter().collect(), done);
    }
    let refused = found.try_iter().collect::<Vec<_>>();
    // Lookups that were started do not wait in the queue any more.
    assert!((6_000 - 4_096 - 1_024..=6_000 - 4_096).contains(&refused.len()), "{}", refused.len());
    assert!(refused.iter().all(|result| *result == Err(StoreError::Busy)));
    drop(held);
    for _ in 0..16 {
        assert_eq!(stored.recv_timeout(PATIENCE).expect("answered"), Ok(()));
    }
    for number in 0..6_000 - refused.len() {
        assert_eq!(found.recv_timeout(PATIENCE).expect("answered"), Ok(usize::from(number < 32)));
    }
    assert!(!store.is_full());
    drop(send);
    assert!(stored.try_recv().is_err() && found.try_recv().is_err(), "each once");
}
