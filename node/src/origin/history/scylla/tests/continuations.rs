//! Requests for a page of the newest rows, and rows that they must not miss.

use scylla::observability::history::HistoryCollector;

use super::*;

/// Returns noon of the present day, and a clock set to it.
fn noon() -> (u64, Clock) {
    let noon_ms = Clock::system().now_ms() / DAY_MS * DAY_MS + DAY_MS / 2;
    (noon_ms, Clock::manual(noon_ms))
}

fn execute(store: &ScyllaStore, statement: String) {
    runtime().block_on(store.shared.database().session.query_unpaged(statement, ())).expect("done");
}

fn newest(store: &ScyllaStore, key: &ChannelKey) -> Vec<u64> {
    sequences(&wait(store.read(HistoryQuery { limit: 5, ..query(key) })).expect("read"))
}

/// Reads until the store knows that one partition is enough.
fn read_repeatedly(store: &ScyllaStore, key: &ChannelKey) {
    for _ in 0..2 {
        assert_eq!(newest(store, key), [10, 9, 8, 7, 6]);
    }
}

/// Records the page requests for the newest rows from now on.
fn listen(store: &ScyllaStore) -> Arc<HistoryCollector> {
    let collector = Arc::new(HistoryCollector::new());
    change_statements(store, |statements| {
        for statement in [&mut statements.backwards, &mut statements.days_backwards] {
            statement.set_history_listener(Arc::clone(&collector) as _);
        }
    });
    collector
}

#[test]
fn the_newest_rows_are_read_with_one_request() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let (noon_ms, clock) = noon();
    let store = fixture.open_with(KeyspaceFixture::options(), &clock);
    let key = channel("acme", "a");
    append(&store, &key, noon_ms - DAY_MS, 0);
    (1..=10).for_each(|sequence| append(&store, &key, noon_ms + sequence, sequence));
    read_repeatedly(&store, &key);
    let requests = listen(&store);
    assert_eq!(newest(&store, &key), [10, 9, 8, 7, 6]);
    assert_eq!(requests.clone_structured_history().requests.len(), 1);
    // A read of the index would find nothing of this day.
    let today = noon_ms / DAY_MS;
    let keyspace = &fixture.connection.keyspace;
    let names = "account = 'acme' AND channel = 'a' AND kind = 0";
    execute(&store, format!("DELETE FROM {keyspace}.days WHERE {names} AND day = {today}"));
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let request = HistoryQuery { limit: 5, cursor, ..query(&key) };
        let page = wait(store.read(request)).expect("read");
        seen.extend(sequences(&page));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, (0..=10).rev().collect::<Vec<_>>(), "and the day before is found behind it");
}

#[test]
fn days_without_a_row_are_not_asked_for() {
    const DAYS: u64 = 9;
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let (noon_ms, clock) = noon();
    let store = fixture.open_with(KeyspaceFixture::options(), &clock);
    let key = channel("acme", "a");
    append(&store, &key, noon_ms - DAYS * DAY_MS, 1);
    append(&store, &key, noon_ms, 2);
    let log = listen(&store);
    assert_eq!(newest(&store, &key), [2, 1]);
    // Requests: the partition of the day, the index, and the partition that the index lists.
    let requests = log.clone_structured_history().requests.len();
    assert!(requests <= 4, "{requests} requests for two rows that are {DAYS} days apart");
}

#[test]
fn newest_rows_found_in_any_partition_written_by_another_node() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let (noon_ms, clock) = noon();
    let store = fixture.open_with(KeyspaceFixture::options(), &clock);
    let other = fixture.open_with(ScyllaOptions { partition_rows: 3, ..KeyspaceFixture::options() }, &clock);
    let [narrower, later] = ["narrower", "later"].map(|name| channel("acme", name));
    for key in [&narrower, &later] {
        (1..=10).for_each(|sequence| append(&store, key, noon_ms + sequence, sequence));
        read_repeatedly(&store, key);
    }
    (11..=14).for_each(|sequence| append(&other, &narrower, noon_ms + sequence, sequence));
    assert_eq!(newest(&store, &narrower), [14, 13, 12, 11, 10]);
    let statement = format!(
        "SELECT writetime(is_continued) FROM {}.history WHERE account = 'acme' AND channel = 'narrower' \
         AND kind = 0 AND day = {} AND bucket = 0 LIMIT 1",
        fixture.connection.keyspace,
        noon_ms / DAY_MS
    );
    let found =
        runtime().block_on(store.shared.database().session.query_unpaged(statement, ())).expect("asked");
    let marked = found.into_rows_result().expect("rows").single_row::<(Option<i64>,)>().expect("a mark");
    let midnight_ms = noon_ms / DAY_MS * DAY_MS;
    assert_eq!(
        marked,
        (Some(values::written_at(midnight_ms)),),
        "older, no table of the day could be dropped"
    );
    // The clock of the other node is ahead.
    append(&other, &later, noon_ms + DAY_MS / 2, 11);
    assert_eq!(newest(&store, &later), [11, 10, 9, 8, 7]);
}

/// Rows of an incarnation of the version before, which writes no marks.
#[test]
fn no_mark_is_trusted_while_unmarking_incarnation_may_write() {
    let Some(fixture) = KeyspaceFixture::new() else { return };
    let (noon_ms, clock) = noon();
    let (key, keyspace) = (channel("acme", "a"), &fixture.connection.keyspace);
    let earlier =
        fixture.open_with(ScyllaOptions { partition_rows: 3, ..KeyspaceFixture::options() }, &clock);
    assert_eq!(earlier.shared.continuations.from(), 0, "a keyspace that is new");
    let today = noon_ms / DAY_MS;
    let insert_policies = |has_ended: bool| {
        let columns = "part, node_id, incarnation, policies, is_over";
        execute(
            &earlier,
            format!("INSERT INTO {keyspace}.policies ({columns}) VALUES ('all', 'n0', 5, 7, {has_ended})"),
        );
    };
    execute(&earlier, format!("DELETE FROM {keyspace}.schema_version WHERE part = 'marked'"));
    insert_policies(false);
    let store =
        fixture.open_with(ScyllaOptions { node_id: "n1".into(), ..KeyspaceFixture::options() }, &clock);
    let kept =
        HistoryCoverage { policies: 7, has_changed: false, is_complete: true, outlasts_resume_window: false };
    wait(store.begin_incarnation(1, kept)).expect("begun");
    assert_eq!(store.shared.continuations.from(), i32::MAX);
    (1..=10).for_each(|sequence| append(&store, &key, noon_ms + sequence, sequence));
    read_repeatedly(&store, &key);
    (11..=14).for_each(|sequence| append(&earlier, &key, noon_ms + sequence, sequence));
    let partition =
        format!("account = 'acme' AND channel = 'a' AND kind = 0 AND day = {today} AND bucket = 0");
    execute(&earlier, format!("DELETE is_continued FROM {keyspace}.history WHERE {partition}"));
    assert_eq!(newest(&store, &key), [14, 13, 12, 11, 10]);

    insert_policies(true);
    wait(store.begin_incarnation(1, kept)).expect("said");
    let from = i32::try_from(today).expect("a day") + 2;
    assert_eq!(store.shared.continuations.from(), from, "it may have written before it ended");
    assert_eq!(newest(&store, &key), [14, 13, 12, 11, 10]);
    assert_eq!(fixture.open_with(KeyspaceFixture::options(), &clock).shared.continuations.from(), from);
}
