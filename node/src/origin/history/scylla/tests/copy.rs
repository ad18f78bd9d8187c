//! Copies of a node's embedded store.

use std::path::Path;

use super::*;
use crate::model::{ClientId, ConnectionId, MemberId, PresenceAction, PresenceStamp, UsageKind};
use crate::origin::history::contract::{INCARNATION, nonce, stamp};
use crate::origin::history::copy::{CopyCheckpoint, DedupWindows, ExportedPiece};
use crate::origin::history::scylla::buckets::HistoryBucket;
use crate::origin::history::scylla::connection::PreparedSession;
use crate::origin::history::{CopyProgress, CopySource, EmbeddedOptions, EmbeddedStore, RowKind, copy};
use crate::origin::metering::MetricRow;

/// Creates a store in the folder, fills it and closes it. Returns the time of its latest rows.
fn filled(data: &Path, clock: &Clock) -> u64 {
    let store = open(data, clock);
    let now_ms = clock.now_ms();
    wait(store.begin_incarnation(
        7,
        HistoryCoverage { policies: 3, has_changed: false, is_complete: true, outlasts_resume_window: false },
    ))
    .expect("begun");
    let channels = [channel("acme", "a"), channel("acme", "b"), channel("other", "a")];
    let mut sequence = 0;
    for day in (0..3).rev() {
        for key in &channels {
            for step in 0..9 {
                sequence += 1;
                // Two retentions in one day; the shorter one has expired after the first day.
                let hours = if step % 3 == 0 { 1 } else { 240 };
                let timestamp_ms = now_ms - day * DAY_MS - 100 + step;
                publish(&store, messages(key, timestamp_ms, sequence..=sequence), hours);
            }
        }
    }
    publish(&store, with_ids(&channels[0], now_ms, &[(sequence + 1, "own")]), 240);
    for (sequence, action) in (1..).zip([PresenceAction::Enter, PresenceAction::Update]) {
        let (send, receive) = mpsc::channel();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        store.append_presence(event(&channels[0], now_ms, sequence, action), Some(240), done);
        receive.recv_timeout(PATIENCE).expect("answered").expect("stored");
    }
    assert_eq!(wait(store.claim_nonce(nonce("k1", now_ms, "0123456789abcdef"))), Ok(true));
    wait(store.revoke_tokens(revocation(now_ms))).expect("durable");
    wait(store.put_metrics(counts(now_ms))).expect("stored");
    store.shutdown();
    now_ms
}

fn open(data: &Path, clock: &Clock) -> EmbeddedStore {
    let limits = Limits { idempotency_window_ms: WINDOW_MS, ..Limits::default() };
    EmbeddedStore::open(&data.join("store"), &EmbeddedOptions::new(true, &limits), clock.clone())
        .expect("it opens")
}

fn publish(store: &EmbeddedStore, published: Arc<PublishedMessages>, hours: u32) {
    let (send, receive) = mpsc::channel();
    store.append(published, Some(hours), Box::new(move |result| send.send(result).expect("test waits")));
    receive.recv_timeout(PATIENCE).expect("answered").expect("stored");
}

fn event(key: &ChannelKey, timestamp_ms: u64, sequence: u64, action: PresenceAction) -> Arc<PresenceEvent> {
    let member =
        MemberId { connection_id: ConnectionId::from_bytes([7; 16]), client_id: ClientId::of("ann") };
    let position = Stamp { incarnation: INCARNATION, sequence: 0 };
    let stamp = PresenceStamp { timestamp_ms, incarnation: INCARNATION, sequence, position };
    PresenceEvent::new(key.clone(), member, 9, action, None, stamp)
}

fn revocation(now_ms: u64) -> Revocation {
    Revocation { key_name: "k1".into(), client_id: None, issued_before_ms: now_ms }
}

fn counts(now_ms: u64) -> Vec<MetricRow> {
    let row = |back: u64| MetricRow {
        account: AccountId::new("acme"),
        minute_ms: (now_ms / 60_000 - back) * 60_000,
        node_id: "former".into(),
        incarnation: u64::MAX,
        kind: UsageKind::Publish,
        amount: crate::model::Amount { count: 1 + back, bytes: 10 },
    };
    (0..2_000).rev().step_by(7).map(row).collect()
}

fn copied(data: &Path, target: &ScyllaStore) -> CopyProgress {
    let source = CopySource::open(data).expect("no node has it");
    runtime().block_on(copy(source, target, |_| {})).expect("copied")
}

/// Reads all rows of the channels, without those that have outlived their retention.
fn all(
    store: &dyn HistoryStore,
    now_ms: u64,
) -> Vec<(ChannelKey, RowKind, Vec<crate::origin::history::HistoryRow>)> {
    let mut all = Vec::new();
    for key in [channel("acme", "a"), channel("acme", "b"), channel("other", "a")] {
        for kind in [RowKind::Messages, RowKind::Presence] {
            let mut rows = wait(store.read(HistoryQuery { kind, ..query(&key) })).expect("read").rows;
            rows.retain(|row| {
                row.position.timestamp_ms > now_ms - DAY_MS / 2 || row.position.sequence % 9 % 3 != 1
            });
            all.push((key.clone(), kind, rows));
        }
    }
    all
}

async fn count(database: &PreparedSession, keyspace: &str) -> i64 {
    let statement = format!("SELECT count(record) FROM {keyspace}.history");
    let counted = database.session.query_unpaged(statement, ()).await.expect("counted");
    counted.into_rows_result().expect("rows").first_row::<(i64,)>().expect("a count").0
}

#[test]
fn repeated_copy_of_embedded_store_yields_same_rows() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let (data, clock) = (tempfile::tempdir().expect("a folder"), Clock::system());
    let now_ms = filled(data.path(), &clock);
    // Bounds so small that each channel has partitions of several widths.
    let options = ScyllaOptions { partition_rows: 2, ..KeyspaceFixture::options() };
    let target = fixture.open_with(options, &clock);
    let first = copied(data.path(), &target);
    assert_eq!(first.before, 0);
    let there = |target: &ScyllaStore| {
        let database = target.shared.database();
        runtime().block_on(async { count(&database, &fixture.connection.keyspace).await })
    };
    // 3 channels with 9 rows on 3 days, of which 3 have expired on 2 days; one with an id; two events.
    assert_eq!(there(&target), 3 * (9 + 2 * 6) + 1 + 2);
    let again = copied(data.path(), &target);
    assert_eq!((again.rows, again.before), (first.rows, first.rows), "nothing of it is read again");
    std::fs::remove_file(data.path().join("history-copy.json")).expect("it is there");
    assert_eq!(copied(data.path(), &target).before, 0);
    assert_eq!(there(&target), 3 * (9 + 2 * 6) + 1 + 2, "the same rows");

    // State that a node finds when it starts on the copied store.
    target.shutdown();
    let target = fixture.open_with(KeyspaceFixture::options(), &clock);
    let previous = wait(target.begin_incarnation(
        8,
        HistoryCoverage { policies: 3, has_changed: false, is_complete: true, outlasts_resume_window: false },
    ))
    .expect("begun");
    let [one] = previous[..] else { unreachable!("one run: {previous:?}") };
    assert_eq!((one.incarnation, one.last_ms), (7, now_ms));
    assert_eq!(target.stored_members().expect("read").len(), 1);
    assert_eq!(find(&target, &channel("acme", "a"), "own"), Some(stamp(82)));
    assert_eq!(wait(target.claim_nonce(nonce("k1", now_ms, "0123456789abcdef"))), Ok(false));
    assert_eq!(target.revoked_tokens(), Ok(vec![revocation(now_ms)]));
    let rows = wait(target.read_metrics(AccountId::new("acme"), 0, usize::MAX)).expect("read");
    assert_eq!(rows, counts(now_ms));
    let source = open(data.path(), &clock);
    assert_eq!(all(&*target, now_ms), all(&source, now_ms));
    source.shutdown();
}

/// Saves the progress of a copy that was interrupted at the checkpoint.
fn save_checkpoint(data: &Path, checkpoint: &CopyCheckpoint) {
    let file = data.join("history-copy.json");
    let text = std::fs::read_to_string(&file).expect("a copy was made");
    let mut progress: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    progress["mark"] = serde_json::to_value(checkpoint).expect("JSON");
    std::fs::write(file, progress.to_string()).expect("the folder is writable");
}

#[test]
fn interrupted_copy_continues_with_same_rows_from_any_mark() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let (data, clock) = (tempfile::tempdir().expect("a folder"), Clock::system());
    filled(data.path(), &clock);
    let target = fixture.open_with(ScyllaOptions { partition_rows: 2, ..KeyspaceFixture::options() }, &clock);
    copied(data.path(), &target);
    let there = || {
        let database = target.shared.database();
        runtime().block_on(async { count(&database, &fixture.connection.keyspace).await })
    };
    let expected = there();
    let mut checkpoints = Vec::new();
    let source = CopySource::open(data.path()).expect("no node has it");
    let memory = DedupWindows { ids_ms: WINDOW_MS, nonces_ms: WINDOW_MS, now_ms: clock.now_ms() };
    let mut give = |read: ExportedPiece| {
        checkpoints.extend(read.checkpoint);
        true
    };
    source.export.walk(&CopyCheckpoint::default(), memory, &mut give).expect("walked");
    drop(source);
    assert!(checkpoints.len() > 12, "one for each channel and day: {}", checkpoints.len());
    for checkpoint in checkpoints {
        save_checkpoint(data.path(), &checkpoint);
        copied(data.path(), &target);
        assert_eq!(there(), expected, "from {checkpoint:?} on");
    }
}

#[test]
fn a_source_that_has_changed_is_copied_from_its_beginning() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let (data, clock) = (tempfile::tempdir().expect("a folder"), Clock::system());
    filled(data.path(), &clock);
    let target = fixture.open_with(KeyspaceFixture::options(), &clock);
    copied(data.path(), &target);
    let store = open(data.path(), &clock);
    let key = channel("acme", "a");
    publish(&store, messages(&key, clock.now_ms(), 1_000..=1_000), 240);
    store.shutdown();
    assert_eq!(copied(data.path(), &target).before, 0);
    assert_eq!(sequences(&wait(target.read(query(&key))).expect("read"))[0], 1_000);
    // The same for a copy into another keyspace.
    let Some(other_keyspace) = KeyspaceFixture::new() else { return };
    let target = other_keyspace.open_with(KeyspaceFixture::options(), &clock);
    assert_eq!(copied(data.path(), &target).before, 0);
    assert_eq!(sequences(&wait(target.read(query(&key))).expect("read"))[0], 1_000);
}

#[test]
fn copy_refuses_missing_store_and_store_in_use() {
    let (data, clock) = (tempfile::tempdir().expect("a folder"), Clock::system());
    let opened = |data: &Path| CopySource::open(data).map(drop).map_err(|error| error.to_string());
    let missing = opened(data.path()).expect_err("there is nothing");
    assert!(missing.ends_with("/store holds no store"), "{missing}");
    assert!(!data.path().join("store").exists(), "and nothing is made");
    let store = open(data.path(), &clock);
    let used = opened(data.path()).expect_err("it is in use");
    assert!(used.contains("is in use by another process"), "{used}");
    store.shutdown();
    drop(store);
    assert_eq!(opened(data.path()), Ok(()));
}

/// Retentions may differ between nodes for a moment, and rows of one day may be copied in any order.
#[test]
fn the_index_lasts_as_long_as_what_lasts_longest() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let clock = Clock::system();
    let store = fixture.open_with(KeyspaceFixture::options(), &clock);
    let (key, keyspace) = (channel("acme", "a"), &fixture.connection.keyspace);
    let database = store.shared.database();
    let now_ms = clock.now_ms();
    let (lasting, passing) =
        (HistoryBucket { day: 20_000, number: 0 }, HistoryBucket { day: 20_001, number: 0 });
    let index_bucket = async |bucket: HistoryBucket, for_ms: u64| {
        let until_ms = Some(now_ms + for_ms);
        let kind = RowKind::Messages;
        rows::write_index(&store.shared, &database, &key, (kind, bucket), until_ms).await.expect("told");
    };
    let days = async || {
        let statement = format!("SELECT day FROM {keyspace}.days");
        let found = database.session.query_unpaged(statement, ()).await.expect("read");
        let found = found.into_rows_result().expect("rows");
        let mut days: Vec<i32> =
            found.rows::<(i32,)>().expect("days").map(|day| day.expect("a day").0).collect();
        days.sort_unstable();
        days
    };
    runtime().block_on(async {
        index_bucket(lasting, 600_000).await;
        index_bucket(lasting, 3_000).await;
        index_bucket(passing, 3_000).await;
        let until = tokio::time::Instant::now() + PATIENCE;
        while days().await.contains(&passing.day) {
            assert!(tokio::time::Instant::now() < until, "it does not end");
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        assert_eq!(days().await, [lasting.day]);
    });
}
