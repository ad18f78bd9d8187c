//! Contract of every history store, as tests over any implementation: `contract_tests!(make_a_place)`.

mod bench;
mod incarnations;
mod metrics;
mod presence;
mod queues;
mod revocations;

use std::sync::{Arc, mpsc};

use fanfare_proto::serial::Serial;

use super::{Direction, HistoryPage, HistoryPosition, HistoryQuery, HistoryStore, IdScope, StoreError};
use crate::model::{ClientId, Clock, ConnectionId, KeyName, Message, PublishedMessages, Stamp};

use bench::ContractStore;
pub(super) use bench::{
    PATIENCE, channel, message, messages, nonce, published, query, raw, scope, sequences, stamp, wait,
    with_ids,
};
pub(super) use incarnations::{pages_in_bytes, the_runs_before_are_known};
pub(super) use metrics::{
    metric_rows_after_shutdown, metric_rows_are_kept_for_their_time, metric_rows_begin_at_their_minute,
    metric_rows_end_with_a_whole_minute, metric_rows_of_accounts_never_meet,
    metric_rows_replace_those_of_their_key,
};
pub(super) use presence::{
    members_are_known_until_they_leave, members_that_change_at_once, presence_beside_messages,
    presence_outlives_only_its_retention,
};
pub(super) use queues::{of_changes_at_once_one_is_made, queues_change_by_their_revision};
pub(super) use revocations::{
    revocations_end_with_the_last_token, revocations_merge_and_survive_reopening, revocations_of_many_at_once,
};

/// Storage location of a store; a store opened again on it finds the rows.
pub(super) trait StoreFixture {
    /// Opens the store with an idempotency window of `WINDOW_MS`. The store opened before has been shut down.
    fn open(&self, clock: &Clock) -> Arc<dyn HistoryStore>;
}

macro_rules! contract_tests {
    ($fixture:expr) => {
        $crate::origin::history::contract::contract_tests!($fixture;
            append_then_read, newest_first_within_one_millisecond, pages_stay_stable_while_writing,
            pages_forwards, pages_in_bytes, the_runs_before_are_known, start_and_end, across_days_and_retentions, retention_cut, until_leaves_out_what_is_live, what_is_settled_is_read,
            reads_have_no_side_effects, accounts_never_meet, history_survives_reopening,
            the_clock_is_raised_over_what_is_stored, callbacks_come_in_order,
            ids_within_the_window, ids_belong_to_their_scope, ids_without_history, ids_while_being_written,
            lookups_are_first_in_first_out, presence_beside_messages, presence_outlives_only_its_retention,
            members_are_known_until_they_leave, members_that_change_at_once,
            nonce_twice, nonce_over_reopening, nonce_claimed_by_many_at_once,
            revocations_merge_and_survive_reopening, revocations_of_many_at_once, revocations_end_with_the_last_token,
            queues_change_by_their_revision, of_changes_at_once_one_is_made,
            metric_rows_replace_those_of_their_key, metric_rows_begin_at_their_minute, metric_rows_end_with_a_whole_minute,
            metric_rows_of_accounts_never_meet, metric_rows_are_kept_for_their_time, metric_rows_after_shutdown,
            after_shutdown_nothing_is_taken);
    };
    ($fixture:expr; $($name:ident),* $(,)?) => {
        $(#[test]
        fn $name() {
            let fixture = $fixture;
            $crate::origin::history::contract::$name(&fixture);
        })*
    };
}
pub(super) use contract_tests;

pub(super) const WINDOW_MS: u64 = 120_000;
const DAY_MS: u64 = 24 * 3_600_000;
pub(super) const INCARNATION: u64 = 0xfa_fa;

pub(super) fn append_then_read(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "orders:1");
    let published = PublishedMessages::new(
        key.clone(),
        INCARNATION,
        bench.base_ms,
        ConnectionId::from_bytes([7; 16]),
        Some(ClientId::of("an\"a")),
        KeyName::from("k1"),
        vec![Message {
            id: "m-1".into(),
            id_given: false,
            sequence: 4,
            name: Some("a\\b".into()),
            data: raw("1.0"),
            extras: raw(r#"{"h":1e400}"#),
        }],
    );
    bench.append(published, Some(72)).expect("stored");
    let page = bench.read(query(&key));
    let connection = ConnectionId::from_bytes([7; 16]);
    let expected = format!(
        r#"{{"channel":"orders:1","name":"a\\b","data":1.0,"id":"m-1","clientId":"an\"a","connectionId":"{connection}","extras":{{"h":1e400}},"timestamp":{}}}"#,
        bench.base_ms
    );
    assert_eq!(page.rows.len(), 1);
    assert_eq!(&*page.rows[0].json, expected);
    let position = HistoryPosition { timestamp_ms: bench.base_ms, sequence: 4, incarnation: INCARNATION };
    assert_eq!(page.rows[0].position, position);
    assert_eq!(page.next, None);
    assert_eq!(bench.read(query(&channel("acme", "orders:2"))), HistoryPage::default());
}

pub(super) fn newest_first_within_one_millisecond(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    bench.append(messages(&key, bench.base_ms, 1..=3), Some(72)).expect("stored");
    bench.append(messages(&key, bench.base_ms, 4..=4), Some(72)).expect("stored");
    bench.append(messages(&key, bench.base_ms + 1, 5..=300), Some(72)).expect("stored");
    let newest_first: Vec<u64> = (1..=300).rev().collect();
    assert_eq!(sequences(&bench.read(query(&key))), newest_first);
}

pub(super) fn pages_stay_stable_while_writing(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    bench.append(messages(&key, bench.base_ms, 1..=5), Some(72)).expect("stored");
    let first = bench.read(HistoryQuery { limit: 2, ..query(&key) });
    assert_eq!(sequences(&first), [5, 4]);
    bench.append(messages(&key, bench.base_ms, 6..=9), Some(72)).expect("stored");
    let second = bench.read(HistoryQuery { limit: 2, cursor: first.next, ..query(&key) });
    assert_eq!(sequences(&second), [3, 2]);
    let third = bench.read(HistoryQuery { limit: 2, cursor: second.next, ..query(&key) });
    assert_eq!(sequences(&third), [1]);
    assert_eq!(third.next, None);
    let exact = bench.read(HistoryQuery { limit: 3, cursor: first.next, ..query(&key) });
    assert_eq!((sequences(&exact), exact.next), (vec![3, 2, 1], None), "no empty page at the end");
    assert_eq!(bench.read(HistoryQuery { limit: 0, ..query(&key) }), HistoryPage::default());
}

pub(super) fn pages_forwards(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    for sequence in 1..=7 {
        bench
            .append(messages(&key, bench.base_ms + sequence, sequence..=sequence), Some(72))
            .expect("stored");
    }
    let mut cursor = None;
    let mut seen = Vec::new();
    loop {
        let direction = Direction::Forwards;
        let page = bench.read(HistoryQuery { limit: 3, cursor, direction, ..query(&key) });
        seen.extend(sequences(&page));
        cursor = page.next;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(seen, [1, 2, 3, 4, 5, 6, 7]);
}

pub(super) fn start_and_end(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    for sequence in 0..10 {
        bench
            .append(messages(&key, bench.base_ms + sequence, sequence..=sequence), Some(72))
            .expect("stored");
    }
    let between = |start: Option<u64>, end: Option<u64>, direction| {
        let at = |offset: Option<u64>| offset.map(|offset| bench.base_ms + offset);
        let request = HistoryQuery { start_ms: at(start), end_ms: at(end), direction, ..query(&key) };
        sequences(&bench.read(request))
    };
    assert_eq!(between(Some(3), Some(6), Direction::Backwards), [5, 4, 3]);
    assert_eq!(between(Some(3), Some(6), Direction::Forwards), [3, 4, 5]);
    assert_eq!(between(Some(8), None, Direction::Backwards), [9, 8]);
    assert_eq!(between(None, Some(2), Direction::Backwards), [1, 0]);
    assert!(between(Some(6), Some(6), Direction::Backwards).is_empty());
    assert!(between(Some(7), Some(6), Direction::Forwards).is_empty());
    let none = bench.read(HistoryQuery { end_ms: Some(0), ..query(&key) });
    assert_eq!(none, HistoryPage::default());
    let cursor =
        Some(HistoryPosition { timestamp_ms: bench.base_ms + 5, sequence: 5, incarnation: INCARNATION });
    let cut = bench.read(HistoryQuery { cursor, start_ms: Some(bench.base_ms + 4), ..query(&key) });
    assert_eq!(sequences(&cut), [4]);
    let outside = bench.read(HistoryQuery { cursor, start_ms: Some(bench.base_ms + 6), ..query(&key) });
    assert_eq!(outside, HistoryPage::default());
}

pub(super) fn across_days_and_retentions(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let midnight_ms = bench.base_ms - bench.base_ms % DAY_MS;
    let rows = [
        (midnight_ms - 2 * DAY_MS, 1, 72),
        (midnight_ms - 1, 2, 72),
        (midnight_ms - 1, 3, 96),
        (midnight_ms, 4, 72),
        (midnight_ms, 5, 96),
        (midnight_ms, 6, 72),
    ];
    for (timestamp_ms, sequence, retention_hours) in rows {
        bench
            .append(messages(&key, timestamp_ms, sequence..=sequence), Some(retention_hours))
            .expect("stored");
    }
    assert_eq!(sequences(&bench.read(query(&key))), [6, 5, 4, 3, 2, 1]);
    let forwards = HistoryQuery { direction: Direction::Forwards, ..query(&key) };
    assert_eq!(sequences(&bench.read(forwards)), [1, 2, 3, 4, 5, 6]);
    let first = bench.read(HistoryQuery { limit: 3, ..query(&key) });
    let second = bench.read(HistoryQuery { limit: 3, cursor: first.next, ..query(&key) });
    assert_eq!((sequences(&first), sequences(&second)), (vec![6, 5, 4], vec![3, 2, 1]));
}

pub(super) fn retention_cut(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let old_ms = bench.base_ms - 2 * DAY_MS;
    bench.append(messages(&key, old_ms, 1..=1), Some(1)).expect("stored");
    bench.append(messages(&key, bench.base_ms, 2..=2), Some(72)).expect("stored");
    let oldest_ms = bench.base_ms;
    assert_eq!(sequences(&bench.read(HistoryQuery { oldest_ms, ..query(&key) })), [2]);
    if bench.store.is_shared() {
        // Rows of a shared store expire by themselves once the time has passed.
        return;
    }
    bench.store.sweep(bench.base_ms).expect("swept");
    assert_eq!(sequences(&bench.read(query(&key))), [2], "what has expired is gone, what has not is not");
    let bench = bench.reopen();
    assert_eq!(sequences(&bench.read(query(&key))), [2], "and does not come back");
}

pub(super) fn until_leaves_out_what_is_live(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let of_another = PublishedMessages::new(
        key.clone(),
        INCARNATION + 1,
        bench.base_ms,
        ConnectionId::random(),
        None,
        KeyName::from("k1"),
        vec![message(50, "m", false)],
    );
    bench.append(of_another, Some(72)).expect("stored");
    bench.append(messages(&key, bench.base_ms + 1, 1..=9), Some(72)).expect("stored");
    let until = Some(Serial::single(INCARNATION, 4));
    let page = bench.read(HistoryQuery { limit: 3, until: until.clone(), ..query(&key) });
    assert_eq!(sequences(&page), [4, 3, 2]);
    let page = bench.read(HistoryQuery { limit: 3, until: until.clone(), cursor: page.next, ..query(&key) });
    assert_eq!((sequences(&page), page.next), (vec![1, 50], None));
    let forwards = HistoryQuery { until, direction: Direction::Forwards, ..query(&key) };
    assert_eq!(sequences(&bench.read(forwards)), [50, 1, 2, 3, 4]);
    let nothing_yet = HistoryQuery { until: Some(Serial::single(INCARNATION, 0)), ..query(&key) };
    assert_eq!(sequences(&bench.read(nothing_yet)), [50]);
}

pub(super) fn what_is_settled_is_read(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    wait(bench.store.flush()).expect("nothing to wait for");
    for round in 0..50 {
        let sequences = round * 20 + 1..=round * 20 + 20;
        bench.store.append(messages(&key, bench.base_ms, sequences), Some(72), Box::new(|_| {}));
        wait(bench.store.flush()).expect("settled");
        assert_eq!(bench.read(query(&key)).rows.len() as u64, round * 20 + 20);
    }
}

pub(super) fn reads_have_no_side_effects(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    bench.append(messages(&key, bench.base_ms, 1..=4), Some(72)).expect("stored");
    let before = bench.read(query(&key));
    bench.read(HistoryQuery { limit: 1, direction: Direction::Forwards, ..query(&key) });
    bench.read(query(&channel("acme", "nobody")));
    assert_eq!(bench.read(query(&key)), before);
}

pub(super) fn accounts_never_meet(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let keys = [
        channel("a", "b:c"),
        channel("a:b", "c"),
        channel("a", "b"),
        channel("ab", "c"),
        channel("a", "bc"),
        channel("a\0b", "c"),
        channel("a", "\u{7f}b\u{80}c"),
        channel("", "abc"),
        channel("abc", "a"),
        channel("a", &"b".repeat(255)),
        channel("a", &"b".repeat(256)),
        channel("a", &"b".repeat(512)),
    ];
    for (sequence, key) in (1..).zip(&keys) {
        bench.append(messages(key, bench.base_ms, sequence..=sequence), Some(72)).expect("stored");
    }
    for (sequence, key) in (1..).zip(&keys) {
        assert_eq!(sequences(&bench.read(query(key))), [sequence], "{key:?}");
        let forwards = HistoryQuery { direction: Direction::Forwards, ..query(key) };
        assert_eq!(sequences(&bench.read(forwards)), [sequence], "{key:?}");
    }
}

pub(super) fn history_survives_reopening(fixture: &dyn StoreFixture) {
    let key = channel("acme", "a");
    let bench = ContractStore::new(fixture);
    let base_ms = bench.base_ms;
    bench.append(messages(&key, base_ms, 1..=3), Some(72)).expect("stored");
    let before = bench.read(query(&key));
    let bench = bench.reopen();
    assert_eq!(bench.read(query(&key)), before);
    bench.append(messages(&key, base_ms, 4..=4), Some(72)).expect("stored");
    assert_eq!(sequences(&bench.reopen().read(query(&key))), [4, 3, 2, 1]);
}

pub(super) fn the_clock_is_raised_over_what_is_stored(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let (future_ms, key) = (bench.base_ms + DAY_MS, channel("acme", "a"));
    bench.append(messages(&key, future_ms, 1..=1), Some(72)).expect("stored");
    bench.append(messages(&key, bench.base_ms, 2..=2), Some(72)).expect("stored");
    let bench = ContractStore { clock: Clock::manual(1_000), ..bench }.reopen();
    assert!(bench.clock.stamp_ms(&key) > future_ms);
}

pub(super) fn callbacks_come_in_order(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let (send, receive) = mpsc::channel();
    for sequence in 1..=2_000 {
        let send = send.clone();
        let published = messages(&key, bench.base_ms, sequence..=sequence);
        let done = Box::new(move |result| send.send((sequence, result)).expect("test waits"));
        bench.store.append(published, Some(72), done);
    }
    for sequence in 1..=2_000 {
        assert_eq!(receive.recv_timeout(PATIENCE).expect("answered"), (sequence, Ok(())));
    }
    assert_eq!(bench.read(HistoryQuery { limit: 5_000, ..query(&key) }).rows.len(), 2_000);
}

pub(super) fn ids_within_the_window(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    bench.append(with_ids(&key, bench.base_ms, &[(1, "x"), (2, "y")]), Some(72)).expect("stored");
    let (x, y) = (Some(stamp(1)), Some(stamp(2)));
    assert_eq!(bench.find(scope(&key), &["y", "z", "x"]), [y, None, x]);
    let bench = bench.reopen();
    assert_eq!(bench.find(scope(&key), &["x", "y"]), [x, y], "over reopening");
    bench.clock.pass_to(bench.base_ms + WINDOW_MS);
    assert_eq!(bench.find(scope(&key), &["x"]), [x]);
    bench.clock.pass_to(bench.base_ms + WINDOW_MS + 1);
    assert_eq!(bench.find(scope(&key), &["x"]), [None]);
    bench.append(with_ids(&key, bench.clock.now_ms(), &[(3, "x")]), Some(72)).expect("stored");
    assert_eq!(bench.find(scope(&key), &["x"]), [Some(stamp(3))], "forgotten ids can be used again");
    bench.store.sweep(bench.clock.now_ms() + DAY_MS).expect("swept");
    assert_eq!(sequences(&bench.read(query(&key))), [3, 2, 1], "ids are swept, messages stay");
}

pub(super) fn ids_belong_to_their_scope(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    bench.append(with_ids(&key, bench.base_ms, &[(1, "x")]), Some(72)).expect("stored");
    let own = scope(&key);
    let others = [
        IdScope { key: channel("acme", "b"), ..own.clone() },
        IdScope { key: channel("other", "a"), ..own.clone() },
        IdScope { key_name: KeyName::from("k2"), ..own.clone() },
        IdScope { client_id: None, ..own.clone() },
        IdScope { client_id: Some(ClientId::of("bob")), ..own.clone() },
    ];
    for other in others {
        assert_eq!(bench.find(other.clone(), &["x"]), [None], "{other:?}");
    }
    assert_eq!(bench.find(own, &["x"]), [Some(stamp(1))]);
}

pub(super) fn ids_without_history(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "cursor:1");
    bench.append(with_ids(&key, bench.base_ms, &[(1, "x")]), None).expect("remembered");
    bench.append(messages(&key, bench.base_ms, 2..=2), None).expect("nothing to store");
    assert_eq!(bench.find(scope(&key), &["x"]), [Some(stamp(1))]);
    assert_eq!(bench.read(query(&key)), HistoryPage::default());
}

/// Publishers that publish in the callback of their lookup never store an id twice, however many do so at once.
pub(super) fn ids_while_being_written(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let (send, receive) = mpsc::channel();
    for sequence in 1..=20 {
        let (store, key, send, base_ms) = (bench.store.clone(), key.clone(), send.clone(), bench.base_ms);
        let found = move |found: Result<Vec<Option<Stamp>>, StoreError>| {
            let first = found.expect("looked up")[0];
            if first.is_none() {
                store.append(with_ids(&key, base_ms, &[(sequence, "x")]), Some(72), Box::new(|_| {}));
            }
            send.send(first).expect("test waits");
        };
        bench.store.find_ids(scope(&channel("acme", "a")), vec!["x".into()], Box::new(found));
    }
    assert_eq!(receive.recv_timeout(PATIENCE).expect("answered"), None);
    for _ in 2..=20 {
        assert_eq!(receive.recv_timeout(PATIENCE).expect("answered"), Some(stamp(1)));
    }
    assert_eq!(sequences(&bench.read(query(&key))), [1]);
}

pub(super) fn lookups_are_first_in_first_out(fixture: &dyn StoreFixture) {
    /// Number of lookups. Two of three wait for each other, and a busy database takes a tenth of a second for one.
    const LOOKUPS: usize = 150;
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let (send, receive) = mpsc::channel();
    for number in 0..LOOKUPS {
        let send = send.clone();
        let ids: Vec<Box<str>> = (0..number % 3).map(|i| format!("{i}").into()).collect();
        let found = move |found: Result<Vec<Option<Stamp>>, StoreError>| {
            send.send((number, found.expect("looked up").len())).expect("test waits");
        };
        bench.store.find_ids(scope(&key), ids, Box::new(found));
    }
    for number in 0..LOOKUPS {
        assert_eq!(receive.recv_timeout(PATIENCE).expect("answered"), (number, number % 3));
    }
}

pub(super) fn nonce_twice(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let (claimed, now_ms) = (nonce("k1", bench.base_ms, "0123456789abcdef"), bench.base_ms);
    assert_eq!(bench.claim(&claimed), Ok(true));
    assert_eq!(bench.claim(&claimed), Ok(false));
    assert_eq!(bench.claim(&nonce("k2", now_ms, "0123456789abcdef")), Ok(true));
    assert_eq!(bench.claim(&nonce("k1", now_ms + 1, "0123456789abcdef")), Ok(true));
    assert_eq!(bench.claim(&nonce("k1", now_ms, "0123456789abcdeF")), Ok(true));
    bench.clock.pass_to(bench.base_ms + 10 * 60_000);
    assert_eq!(bench.claim(&claimed), Ok(false), "remembered for ten minutes");
    bench.store.sweep(bench.clock.now_ms()).expect("swept");
    assert_eq!(bench.claim(&claimed), Ok(false), "also after a sweep");
}

pub(super) fn nonce_over_reopening(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let claimed = nonce("k1", bench.base_ms, "0123456789abcdef");
    assert_eq!(bench.claim(&claimed), Ok(true));
    let bench = bench.reopen();
    assert_eq!(bench.claim(&claimed), Ok(false));
}

pub(super) fn nonce_claimed_by_many_at_once(fixture: &dyn StoreFixture) {
    const NONCES: usize = 20;
    let bench = ContractStore::new(fixture);
    let claim = |number: usize| {
        let nonce = nonce("k1", bench.base_ms, &format!("0123456789abcdef{number}"));
        wait(bench.store.claim_nonce(nonce))
    };
    let claims = std::thread::scope(|scope| {
        let claims = (0..16).map(|_| scope.spawn(|| (0..NONCES).map(claim).collect::<Vec<_>>()));
        let claims: Vec<_> = claims.collect();
        claims.into_iter().map(|claims| claims.join().expect("no panic")).collect::<Vec<_>>()
    });
    for number in 0..NONCES {
        let answers = || claims.iter().map(|claims| &claims[number]);
        let winners = answers().filter(|answer| **answer == Ok(true)).count();
        // A caller without an answer may have won, and a shared store may fail to answer.
        let unanswered = answers().find(|answer| answer.is_err());
        assert!(unanswered.is_none() || bench.store.is_shared(), "{unanswered:?}");
        assert!(
            winners == 1 || winners == 0 && unanswered.is_some(),
            "{winners} of {number}, {unanswered:?}"
        );
        let later = (0..20).find_map(|_| claim(number).ok()).expect("it is asked until it answers");
        assert!(!later || winners == 0, "{number} is claimed");
    }
}

pub(super) fn after_shutdown_nothing_is_taken(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let key = channel("acme", "a");
    let (send, receive) = mpsc::channel();
    for sequence in 1..=100 {
        let send = send.clone();
        let done = Box::new(move |result| send.send(result).expect("test waits"));
        bench.store.append(messages(&key, bench.base_ms, sequence..=sequence), Some(72), done);
    }
    bench.store.shutdown();
    assert_eq!(receive.try_iter().collect::<Vec<_>>(), vec![Ok(()); 100], "what was queued is written");
    let late = bench.append(messages(&key, bench.base_ms, 101..=101), Some(72));
    assert_eq!(late, Err(StoreError::ShutDown));
    let late = bench.claim(&nonce("k1", bench.base_ms, "0123456789abcdef"));
    assert_eq!(late, Err(StoreError::ShutDown));
    assert_eq!(wait(bench.store.read(query(&key))), Err(StoreError::ShutDown));
    assert_eq!(wait(bench.store.flush()), Err(StoreError::ShutDown));
    bench.store.shutdown();
}
