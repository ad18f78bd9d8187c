//! The contract over the embedded store, and tests of its own features: folders, full queues, refused writes.

mod clock;
mod nonces;
mod without_history;

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::time::Instant;

use tempfile::TempDir;

use super::ids::IdRow;
use super::{DAY_MS, EmbeddedOptions, EmbeddedStore, StoreOpenError, keys, tables};
use crate::model::{Clock, Limits, Message, PublishedMessages, Revocation, Stamp};
use crate::origin::history::contract::{
    PATIENCE, StoreFixture, WINDOW_MS, channel, contract_tests, message, messages, nonce, published, query,
    raw, scope, wait, with_ids,
};
use crate::origin::history::{HistoryCoverage, HistoryQuery, HistoryStore, StoreError};

struct EmbeddedFixture(TempDir);

impl StoreFixture for EmbeddedFixture {
    fn open(&self, clock: &Clock) -> Arc<dyn HistoryStore> {
        let options = EmbeddedOptions { idempotency_window_ms: WINDOW_MS, ..options() };
        Arc::new(EmbeddedStore::open(self.0.path(), &options, clock.clone()).expect("opens"))
    }
}

contract_tests!(EmbeddedFixture(folder()));

fn folder() -> TempDir {
    tempfile::tempdir().expect("a folder")
}

fn options() -> EmbeddedOptions {
    EmbeddedOptions::new(true, &Limits::default())
}

fn open(folder: &TempDir) -> Result<EmbeddedStore, StoreOpenError> {
    EmbeddedStore::open(folder.path(), &options(), Clock::system())
}

#[test]
fn second_process_is_refused_as_store_in_use() {
    let folder = folder();
    let _first = open(&folder).expect("opens");
    let error = open(&folder).expect_err("locked");
    assert!(matches!(error, StoreOpenError::Locked(_)), "{error}");
    assert!(error.to_string().contains("in use by another process"), "{error}");
}

#[test]
fn a_foreign_folder_is_refused_and_left_alone() {
    let folder = folder();
    std::fs::write(folder.path().join("thesis.txt"), "years of work").expect("written");
    assert!(matches!(open(&folder), Err(StoreOpenError::Foreign(_))));
    assert_eq!(std::fs::read_dir(folder.path()).expect("read").count(), 1);
}

#[test]
fn another_programs_database_is_refused() {
    let folder = folder();
    let database = fjall::Database::builder(folder.path()).open().expect("opens");
    database.keyspace("theirs", Default::default).expect("made");
    drop(database);
    assert!(matches!(open(&folder), Err(StoreOpenError::Foreign(_))));
}

#[test]
fn damage_is_an_error_and_no_panic() {
    let folder = folder();
    drop(open(&folder).expect("opens"));
    std::fs::remove_dir_all(folder.path().join("keyspaces").join("0")).expect("removed");
    std::fs::create_dir(folder.path().join("keyspaces").join("0")).expect("made");
    std::fs::write(folder.path().join("keyspaces").join("0").join("current"), "x").expect("written");
    let error = open(&folder).expect_err("damaged");
    assert!(matches!(error, StoreOpenError::Damaged { .. } | StoreOpenError::Io { .. }), "{error}");
}

#[test]
fn interrupted_creation_of_the_store_begins_again() {
    let folder = folder();
    std::fs::write(folder.path().join("lock"), "").expect("written");
    std::fs::write(folder.path().join("0.jnl"), "").expect("written");
    std::fs::create_dir(folder.path().join("keyspaces")).expect("made");
    open(&folder).expect("opens");
}

#[test]
fn acked_messages_are_readable_after_crash() {
    let (running, crashed) = (folder(), folder());
    let store = open(&running).expect("opens");
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    append(&store, messages(&key, now_ms, 1..=500)).expect("stored");
    append(&store, with_ids(&key, now_ms, &[(501, "x")])).expect("stored");
    copy(running.path(), crashed.path());
    let store = open(&crashed).expect("opens");
    assert_eq!(wait(store.read(query(&key))).expect("read").rows.len(), 501);
}

#[test]
fn full_queues_are_busy_and_every_callback_runs_once() {
    let folder = folder();
    let options =
        EmbeddedOptions { write_queue_rows: 8, find_queue: 8, read_queue: 1, read_threads: 1, ..options() };
    let store = EmbeddedStore::open(folder.path(), &options, Clock::system()).expect("opens");
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    let (send, receive) = mpsc::channel();
    for sequence in 1..=2_000 {
        let send = send.clone();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        store.append(messages(&key, now_ms, sequence..=sequence), Some(72), done);
    }
    for _ in 0..2_000 {
        let send = send.clone();
        let found = Box::new(move |found: Result<_, _>| send.send(found.map(|_| ())).expect("test waits"));
        store.find_ids(scope(&key), vec!["x".into()], found);
    }
    let reads: Vec<_> = (0..200).map(|_| store.read(query(&key))).collect();
    let answers: Vec<_> = (0..4_000).map(|_| receive.recv_timeout(PATIENCE).expect("answered")).collect();
    drop(send);
    assert_eq!(
        receive.recv_timeout(PATIENCE),
        Err(mpsc::RecvTimeoutError::Disconnected),
        "no further answer"
    );
    assert!(answers.contains(&Ok(())) && answers.contains(&Err(StoreError::Busy)));
    let reads: Vec<_> = reads.into_iter().map(wait).collect();
    assert!(reads.iter().any(Result::is_ok) && reads.contains(&Err(StoreError::Busy)));
    append(&store, messages(&key, now_ms, 3_000..=3_099)).expect("one that is larger than the queue");
}

#[test]
fn append_begun_with_room_is_stored_whole_past_queue_bound() {
    let folder = folder();
    let store = EmbeddedStore::open(
        folder.path(),
        &EmbeddedOptions { write_queue_rows: 8, ..options() },
        Clock::system(),
    )
    .expect("opens");
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    let (go_on, held) = mpsc::channel::<()>();
    let (began, begun) = mpsc::channel();
    let hold = Box::new(move |_| {
        began.send(()).expect("test waits");
        let _ = held.recv_timeout(PATIENCE);
    });
    store.append(messages(&key, now_ms, 1..=1), Some(72), hold);
    begun.recv_timeout(PATIENCE).expect("from here on nothing is released, since answers wait for this one");
    let (send, receive) = mpsc::channel();
    let append = |sequences: std::ops::RangeInclusive<u64>| {
        let send = send.clone();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        store.append(messages(&key, now_ms, sequences), Some(72), done);
    };
    append(2..=6);
    assert!(!store.is_full(), "there is room for three");
    append(7..=106);
    assert!(store.is_full());
    let claimed = wait(store.claim_nonce(nonce("k1", now_ms, "0123456789abcdef")));
    assert_eq!(claimed, Err(StoreError::Busy), "the bound holds for all else");
    drop(go_on);
    for _ in 0..2 {
        assert_eq!(receive.recv_timeout(PATIENCE), Ok(Ok(())));
    }
    assert_eq!(wait(store.read(query(&key))).expect("read").rows.len(), 106);
}

/// An id that stays pending until this guard is dropped.
struct UnwrittenId<'a>(&'a EmbeddedStore, [IdRow; 1]);

impl<'a> UnwrittenId<'a> {
    fn new(store: &'a EmbeddedStore, channel_name: &str, id: &str) -> Self {
        let mut key = Vec::new();
        keys::id_prefix(&scope(&channel("acme", channel_name)), &mut key);
        key.extend_from_slice(id.as_bytes());
        let ids = [IdRow { key: key.into(), stamp: Stamp { incarnation: 1, sequence: 1 } }];
        store.pending.add(&ids);
        Self(store, ids)
    }
}

impl Drop for UnwrittenId<'_> {
    fn drop(&mut self) {
        self.0.pending.settle(&self.1);
    }
}

/// Returns a function that looks ids up, and the receiver of `<channel> <id>` for each answer, with the error if there was one.
fn looker_up(store: &EmbeddedStore) -> (impl Fn(&str, &str), mpsc::Receiver<String>) {
    let (send, receive) = mpsc::channel();
    let look_up = move |channel_name: &str, id: &str| {
        let (send, answer) = (send.clone(), format!("{channel_name} {id}"));
        let found = move |found: Result<_, StoreError>| {
            let error = found.err().map_or_else(String::new, |error| format!(": {error}"));
            send.send(format!("{answer}{error}")).expect("test waits");
        };
        store.find_ids(scope(&channel("acme", channel_name)), vec![id.into()], Box::new(found));
    };
    (look_up, receive)
}

#[test]
fn id_lookup_does_not_wait_for_write_of_another_channel() {
    let folder = folder();
    let store = open(&folder).expect("opens");
    let unwritten = UnwrittenId::new(&store, "slow", "x");
    let (look_up, answers) = looker_up(&store);
    for (channel_name, id) in [("slow", "x"), ("slow", "y"), ("fast", "x"), ("slow", "z"), ("fast", "y")] {
        look_up(channel_name, id);
    }
    let next = || answers.recv_timeout(PATIENCE).expect("answered");
    assert_eq!([next(), next()], ["fast x", "fast y"]);
    drop(unwritten);
    assert_eq!([next(), next(), next()], ["slow x", "slow y", "slow z"], "in the order of the calls");
}

#[test]
fn waiting_lookups_of_a_channel_do_not_fill_the_queue() {
    let folder = folder();
    let options = EmbeddedOptions { find_queue: 32, ..options() };
    let store = EmbeddedStore::open(folder.path(), &options, Clock::system()).expect("opens");
    let unwritten = UnwrittenId::new(&store, "slow", "x");
    let (look_up, answers) = looker_up(&store);
    let next = || answers.recv_timeout(PATIENCE).expect("answered");
    look_up("slow", "x");
    look_up("slow", "y");
    for _ in 0..64 {
        look_up("slow", "z");
        assert_eq!(next(), "slow z: store is busy");
        look_up("fast", "x");
        assert_eq!(next(), "fast x");
    }
    drop(unwritten);
    assert_eq!([next(), next()], ["slow x", "slow y"]);
}

#[test]
fn a_stop_answers_lookups_that_wait() {
    let folder = folder();
    let store = open(&folder).expect("opens");
    let unwritten = UnwrittenId::new(&store, "slow", "x");
    let (look_up, answers) = looker_up(&store);
    look_up("slow", "x");
    look_up("slow", "y");
    look_up("fast", "x");
    let next = || answers.recv_timeout(PATIENCE).expect("answered");
    assert_eq!(next(), "fast x", "the others wait by now");
    std::thread::scope(|threads| {
        let unwritten = unwritten;
        threads.spawn(|| store.shutdown());
        let until = Instant::now() + PATIENCE;
        let is_closed = || {
            look_up("fast", "y");
            next().contains("shut down")
        };
        while !is_closed() {
            assert!(Instant::now() < until, "the shutdown does not begin");
        }
        drop(unwritten);
        assert_eq!([next(), next()], ["slow x", "slow y"]);
    });
}

#[test]
fn nonce_and_revocation_are_kept_for_configured_time() {
    let folder = folder();
    let base_ms = Clock::system().now_ms();
    let clock = Clock::manual(base_ms);
    let options = EmbeddedOptions { nonce_memory_ms: 90_000, revocation_kept_ms: 1_000, ..options() };
    let store = EmbeddedStore::open(folder.path(), &options, clock.clone()).expect("opens");
    let claimed = nonce("k1", base_ms, "0123456789abcdef");
    let claim = || wait(store.claim_nonce(claimed.clone()));
    assert_eq!(claim(), Ok(true));
    clock.pass_to(base_ms + 90_000);
    assert_eq!(claim(), Ok(false));
    clock.pass_to(base_ms + 90_001);
    assert_eq!(claim(), Ok(true));

    let revocation = Revocation { key_name: "k1".into(), client_id: None, issued_before_ms: base_ms };
    wait(store.revoke_tokens(revocation)).expect("durable");
    // The rest of the day, and the time that a partition outlives its rows.
    let end_ms = base_ms - base_ms % DAY_MS + DAY_MS + 1_000 + 600_000;
    for (now_ms, kept) in [(end_ms - 1, 1), (end_ms, 0)] {
        store.sweep(now_ms).expect("swept");
        assert_eq!(store.revoked_tokens().map(|all| all.len()), Ok(kept));
    }
}

#[test]
fn refused_write_is_not_acked_and_next_write_restores_health() {
    let folder = folder();
    let store = open(&folder).expect("opens");
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    append(&store, messages(&key, now_ms, 1..=1)).expect("stored");
    let (keyspaces, away) = (folder.path().join("keyspaces"), folder.path().join("away"));
    std::fs::rename(&keyspaces, &away).expect("renamed");
    let refused = append_for(&store, messages(&key, now_ms, 2..=2), 96);
    assert!(matches!(refused, Err(StoreError::Failed(_))), "{refused:?}");
    assert_eq!(store.health(), refused);
    // Files that the refused write had begun to create.
    std::fs::remove_dir_all(&keyspaces).expect("removed");
    std::fs::rename(&away, &keyspaces).expect("renamed");
    append_for(&store, messages(&key, now_ms, 3..=3), 96).expect("stored");
    assert_eq!(store.health(), Ok(()));
}

#[test]
fn background_flush_failure_is_reported_with_reason_and_folder() {
    let folder = folder();
    let store = open(&folder).expect("opens");
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    append(&store, messages(&key, now_ms, 1..=1)).expect("stored");
    let tables = store.partitions.lock().clone().expect("open").tables();
    std::fs::remove_dir_all(folder.path().join("keyspaces")).expect("removed");
    tables[0].keyspace().rotate_memtable().expect("sealed, and flushed by another thread");
    let until = Instant::now() + PATIENCE;
    let error = (2..)
        .find_map(|sequence| {
            assert!(Instant::now() < until, "the store still takes writes");
            append(&store, messages(&key, now_ms, sequence..=sequence)).err()
        })
        .expect("endless");
    let text = error.to_string();
    assert!(text.contains("No such file"), "{text}");
    assert!(text.contains(&folder.path().display().to_string()), "{text}");
    assert_eq!(store.health(), Err(error));
}

#[test]
fn a_broken_store_refuses_everything_and_says_so() {
    let folder = folder();
    let store = open(&folder).expect("opens");
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    assert_eq!(store.health(), Ok(()));
    let failed = store.status.broke("disk gone");
    assert_eq!(append(&store, messages(&key, now_ms, 1..=1)), Err(failed.clone()));
    assert_eq!(wait(store.claim_nonce(nonce("k1", now_ms, "0123456789abcdef"))), Err(failed.clone()));
    assert_eq!(store.health(), Err(failed));
}

const MIB: u64 = 1024 * 1024;

/// Writes over 96 MiB in messages of 60 KB, spread over 32 retentions. Returns the highest number of unsealed bytes seen.
fn fill_many_partitions(store: &EmbeddedStore, first: u64) -> u64 {
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    let partitions = store.partitions.lock().clone().expect("open");
    let data = raw(&format!("\"{}\"", "x".repeat(60_000)));
    let mut unsealed_max = 0;
    for round in 0..(96 * MIB / 60_000 / 8) {
        let sequence = first + round * 8;
        let message = |sequence: u64| Message {
            data: data.clone(),
            ..message(sequence, &format!("m{sequence}"), false)
        };
        let eight = published(&key, now_ms, (sequence..sequence + 8).map(message).collect());
        let (send, receive) = mpsc::channel();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        store.append(eight, Some(24 + u32::try_from(round % 32).expect("small")), done);
        receive.recv_timeout(PATIENCE).expect("answered").expect("stored");
        let unsealed = partitions.tables().iter().map(tables::Table::unsealed).sum::<u64>();
        unsealed_max = unsealed_max.max(unsealed);
    }
    unsealed_max
}

#[test]
fn unsealed_bytes_stay_bounded_across_partitions_and_restarts() {
    let folder = folder();
    let mut first = 1;
    for start in 0..2 {
        let store = open(&folder).expect("opens");
        let unsealed_max = fill_many_partitions(&store, first);
        // Two groups may be written between two checks.
        assert!(unsealed_max < 80 * MIB, "start {start}: {} MiB", unsealed_max / MIB);
        assert!(unsealed_max > 32 * MIB, "start {start}: {} MiB", unsealed_max / MIB);
        first += 10_000;
        let key = channel("acme", "a");
        let page = wait(store.read(query(&key))).expect("read");
        assert!(page.rows[0].json.len() > 60_000, "a large value is read back");
        store.shutdown();
    }
}

#[test]
fn rows_recovered_from_journal_count_as_unsealed() {
    let folder = folder();
    let store = open(&folder).expect("opens");
    append(&store, messages(&channel("acme", "a"), Clock::system().now_ms(), 1..=1_000)).expect("stored");
    let unsealed = |store: &EmbeddedStore| {
        let partitions = store.partitions.lock().clone().expect("open");
        partitions.tables().iter().map(tables::Table::unsealed).sum::<u64>()
    };
    let before = unsealed(&store);
    store.shutdown();
    drop(store);
    let store = open(&folder).expect("opens");
    assert!(before > 100_000 && unsealed(&store) >= before, "{before}, then {}", unsealed(&store));
}

fn append(store: &EmbeddedStore, published: Arc<PublishedMessages>) -> Result<(), StoreError> {
    append_for(store, published, 72)
}

fn append_for(
    store: &EmbeddedStore,
    published: Arc<PublishedMessages>,
    retention_hours: u32,
) -> Result<(), StoreError> {
    let (send, receive) = mpsc::channel();
    store.append(
        published,
        Some(retention_hours),
        Box::new(move |result| send.send(result).expect("test waits")),
    );
    receive.recv_timeout(PATIENCE).expect("answered")
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("read") {
        let entry = entry.expect("read");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("read").is_dir() {
            std::fs::create_dir(&target).expect("made");
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("copied");
        }
    }
}

/// Allocated bytes of the journal files in a folder.
fn journal_bytes(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).expect("read").map(|entry| entry.expect("read"));
    let journals = files.filter(|file| file.path().extension().is_some_and(|ending| ending == "jnl"));
    journals.map(|file| file.metadata().map_or(0, |file| file.blocks() * 512)).sum()
}

/// Writes one row with a long retention, and days that are dropped before their table is full. The node restarts once in so many days.
fn small_days(restart_days: u64) {
    let folder = folder();
    let mut store = open(&folder).expect("opens");
    let now_ms = Clock::system().now_ms();
    append_for(&store, messages(&channel("acme", "rare"), now_ms, 1..=1), 365 * 24).expect("stored");
    // Too short for the journal to compress.
    let data = raw(&format!("\"{}\"", "x".repeat(3_500)));
    let (key, mut written) = (channel("acme", "busy"), 0);
    for day in 0..28 {
        let day_ms = now_ms + day * DAY_MS;
        for part in 0..8 {
            let first = (day * 8 + part) * 300 + 1;
            let message = |sequence: u64| Message {
                data: data.clone(),
                ..message(sequence, &format!("m{sequence}"), false)
            };
            let part = published(&key, day_ms, (first..first + 300).map(message).collect());
            append_for(&store, part, 1).expect("stored");
            written += 300 * 3_500;
        }
        store.sweep(day_ms).expect("swept");
        let kept = journal_bytes(folder.path());
        assert!(kept < 192 * MIB, "day {day}: {} MiB of {} MiB", kept / MIB, written / MIB);
        if day % restart_days == restart_days - 1 {
            store.shutdown();
            drop(store);
            store = open(&folder).expect("opens");
        }
    }
    assert!(written > 220 * MIB);
    let rare = wait(store.read(query(&channel("acme", "rare")))).expect("read");
    assert_eq!(rare.rows.len(), 1, "what held the journals is still there");
}

#[test]
fn journals_do_not_outlive_the_days_that_they_hold() {
    small_days(28);
}

#[test]
fn journals_are_cleared_over_frequent_restarts() {
    small_days(6);
}
