//! What a page of the newest rows asks for, and what it must not miss by that.

use scylla::observability::history::HistoryCollector;

use super::*;

/// Noon of the present day, and the same for the store.
fn noon() -> (u64, Clock) {
    let noon_ms = Clock::system().now_ms() / DAY_MS * DAY_MS + DAY_MS / 2;
    (noon_ms, Clock::manual(noon_ms))
}

fn execute(store: &Scylla, statement: String) {
    runtime().block_on(store.shared.database().session.query_unpaged(statement, ())).expect("done");
}

fn newest(store: &Scylla, key: &ChannelKey) -> Vec<u64> {
    sequences(&wait(store.read(HistoryQuery { limit: 5, ..query(key) })).expect("read"))
}

/// It is known from then on that one partition is enough.
fn read_often(store: &Scylla, key: &ChannelKey) {
    for _ in 0..2 {
        assert_eq!(newest(store, key), [10, 9, 8, 7, 6]);
    }
}

/// The requests of pages of the newest rows from now on.
fn listen(store: &Scylla) -> Arc<HistoryCollector> {
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
    let Some(place) = Keyspace::new() else { return };
    let (noon_ms, clock) = noon();
    let store = place.open_with(Keyspace::options(), &clock);
    let key = channel("acme", "a");
    append(&store, &key, noon_ms - DAY_MS, 0);
    (1..=10).for_each(|sequence| append(&store, &key, noon_ms + sequence, sequence));
    read_often(&store, &key);
    let asked = listen(&store);
    assert_eq!(newest(&store, &key), [10, 9, 8, 7, 6]);
    assert_eq!(asked.clone_structured_history().requests.len(), 1);
    // Who asked the index would find nothing of this day.
    let today = noon_ms / DAY_MS;
    let keyspace = &place.connection.keyspace;
    let names = "account = 'acme' AND channel = 'a' AND kind = 0";
    execute(&store, format!("DELETE FROM {keyspace}.days WHERE {names} AND day = {today}"));
    let (mut seen, mut cursor) = (Vec::new(), None);
    loop {
        let asked = HistoryQuery { limit: 5, cursor, ..query(&key) };
        let page = wait(store.read(asked)).expect("read");
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
    let Some(place) = Keyspace::new() else { return };
    let (noon_ms, clock) = noon();
    let store = place.open_with(Keyspace::options(), &clock);
    let key = channel("acme", "a");
    append(&store, &key, noon_ms - DAYS * DAY_MS, 1);
    append(&store, &key, noon_ms, 2);
    let asked = listen(&store);
    assert_eq!(newest(&store, &key), [2, 1]);
    // The partition of the day, the index, and the partition that it names.
    let requests = asked.clone_structured_history().requests.len();
    assert!(requests <= 4, "{requests} requests for two rows that are {DAYS} days apart");
}

#[test]
fn newest_rows_found_in_any_partition_written_by_another_node() {
    let Some(place) = Keyspace::new() else { return };
    let (noon_ms, clock) = noon();
    let store = place.open_with(Keyspace::options(), &clock);
    let other = place.open_with(ScyllaOptions { partition_rows: 3, ..Keyspace::options() }, &clock);
    let [narrower, later] = ["narrower", "later"].map(|name| channel("acme", name));
    for key in [&narrower, &later] {
        (1..=10).for_each(|sequence| append(&store, key, noon_ms + sequence, sequence));
        read_often(&store, key);
    }
    (11..=14).for_each(|sequence| append(&other, &narrower, noon_ms + sequence, sequence));
    assert_eq!(newest(&store, &narrower), [14, 13, 12, 11, 10]);
    let asked = format!(
        "SELECT writetime(is_continued) FROM {}.history WHERE account = 'acme' AND channel = 'narrower' \
         AND kind = 0 AND day = {} AND bucket = 0 LIMIT 1",
        place.connection.keyspace,
        noon_ms / DAY_MS
    );
    let found = runtime().block_on(store.shared.database().session.query_unpaged(asked, ())).expect("asked");
    let marked = found.into_rows_result().expect("rows").single_row::<(Option<i64>,)>().expect("a mark");
    let midnight_ms = noon_ms / DAY_MS * DAY_MS;
    assert_eq!(
        marked,
        (Some(values::written_at(midnight_ms)),),
        "older, no table of the day could be dropped"
    );
    // Its clock is ahead.
    append(&other, &later, noon_ms + DAY_MS / 2, 11);
    assert_eq!(newest(&store, &later), [11, 10, 9, 8, 7]);
}

/// What a run of the version before has written, which marks nothing.
#[test]
fn no_mark_is_trusted_while_unmarking_incarnation_may_write() {
    let Some(place) = Keyspace::new() else { return };
    let (noon_ms, clock) = noon();
    let (key, keyspace) = (channel("acme", "a"), &place.connection.keyspace);
    let former = place.open_with(ScyllaOptions { partition_rows: 3, ..Keyspace::options() }, &clock);
    assert_eq!(former.shared.marks.from(), 0, "a keyspace that is new");
    let today = noon_ms / DAY_MS;
    let said = |is_over: bool| {
        let columns = "part, node_id, incarnation, policies, is_over";
        execute(
            &former,
            format!("INSERT INTO {keyspace}.policies ({columns}) VALUES ('all', 'n0', 5, 7, {is_over})"),
        );
    };
    execute(&former, format!("DELETE FROM {keyspace}.schema_version WHERE part = 'marked'"));
    said(false);
    let store = place.open_with(ScyllaOptions { node_id: "n1".into(), ..Keyspace::options() }, &clock);
    let kept = Kept { policies: 7, has_changed: false, is_all: true, outlasts: false };
    wait(store.begin(1, kept)).expect("begun");
    assert_eq!(store.shared.marks.from(), i32::MAX);
    (1..=10).for_each(|sequence| append(&store, &key, noon_ms + sequence, sequence));
    read_often(&store, &key);
    (11..=14).for_each(|sequence| append(&former, &key, noon_ms + sequence, sequence));
    let partition =
        format!("account = 'acme' AND channel = 'a' AND kind = 0 AND day = {today} AND bucket = 0");
    execute(&former, format!("DELETE is_continued FROM {keyspace}.history WHERE {partition}"));
    assert_eq!(newest(&store, &key), [14, 13, 12, 11, 10]);

    said(true);
    wait(store.begin(1, kept)).expect("said");
    let from = i32::try_from(today).expect("a day") + 2;
    assert_eq!(store.shared.marks.from(), from, "it may have written before it ended");
    assert_eq!(newest(&store, &key), [14, 13, 12, 11, 10]);
    assert_eq!(place.open_with(Keyspace::options(), &clock).shared.marks.from(), from);
}
