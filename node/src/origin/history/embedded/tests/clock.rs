//! Tests with a system clock that is set, or wrong for a moment.

use super::*;

const HOUR_MS: u64 = 3_600_000;
const FIVE_DAYS_MS: u64 = 5 * DAY_MS;

fn clock() -> (Clock, u64) {
    let base_ms = Clock::system().now_ms();
    let clock = Clock::manual(base_ms);
    clock.begin(None, HOUR_MS);
    (clock, base_ms)
}

/// Clock readings five days ahead and five days behind.
fn wrong(now_ms: u64) -> [u64; 2] {
    [now_ms + FIVE_DAYS_MS, now_ms - FIVE_DAYS_MS]
}

fn rows(store: &EmbeddedStore, clock: &Clock) -> usize {
    let oldest_ms = clock.expiry_ms().saturating_sub(2 * HOUR_MS);
    let request = HistoryQuery { oldest_ms, ..query(&channel("acme", "a")) };
    wait(store.read(request)).expect("read").rows.len()
}

#[test]
fn a_sweep_drops_nothing_before_a_step_has_held() {
    let (folder, (clock, base_ms)) = (folder(), clock());
    let store = EmbeddedStore::open(folder.path(), &options(), clock.clone()).expect("opens");
    append_for(&store, messages(&channel("acme", "a"), base_ms, 1..=3), 2).expect("stored");
    let sweep = || store.sweep(clock.expiry_ms()).expect("swept");
    for wrong_ms in wrong(base_ms) {
        clock.set(wrong_ms);
        sweep();
        assert_eq!(rows(&store, &clock), 3, "{wrong_ms}");
        clock.set(base_ms);
        sweep();
        assert_eq!(rows(&store, &clock), 3, "after {wrong_ms}");
    }
    clock.set(base_ms + FIVE_DAYS_MS);
    sweep();
    clock.pass_to(base_ms + FIVE_DAYS_MS + HOUR_MS);
    sweep();
    assert_eq!(rows(&store, &clock), 0, "it has held");
    let all = HistoryQuery { oldest_ms: 0, ..query(&channel("acme", "a")) };
    assert_eq!(wait(store.read(all)).expect("read").rows.len(), 0, "they are gone");
}

#[test]
fn ids_and_nonces_outlive_a_wrong_reading() {
    let (folder, (clock, base_ms)) = (folder(), clock());
    let options = options();
    let store = EmbeddedStore::open(folder.path(), &options, clock.clone()).expect("opens");
    let key = channel("acme", "a");
    let find = |id: &str| {
        let (send, receive) = mpsc::channel();
        let found = Box::new(move |found| drop(send.send(found)));
        store.find_ids(scope(&key), vec![id.into()], found);
        receive.recv_timeout(PATIENCE).expect("answered").expect("looked up")[0].is_some()
    };
    let claim = |of: u64| wait(store.claim_nonce(nonce("k1", of, "0123456789abcdef"))).expect("answered");
    let ids = ["right", "ahead", "behind"];
    append(&store, with_ids(&key, base_ms, &[(1, ids[0])])).expect("stored");
    assert!(claim(0));
    for (number, wrong_ms) in (1..).zip(wrong(base_ms)) {
        clock.set(wrong_ms);
        let id = ids[usize::try_from(number).expect("small")];
        append(&store, with_ids(&key, wrong_ms.max(base_ms), &[(1 + number, id)])).expect("stored");
        assert!(claim(number));
        for known in 0..=number {
            assert!(find(ids[usize::try_from(known).expect("small")]), "{known} of {number}");
            assert!(!claim(known), "{known} of {number}");
        }
        let handed = wait(store.nonces(None)).expect("read").nonces;
        assert!(handed.iter().all(|kept| kept.age_ms < options.nonce_memory_ms), "{handed:?}");
        clock.set(base_ms);
    }
    for (known, id) in (0..).zip(ids) {
        assert!(find(id), "{id}");
        // By the system clock, a claim made five days before belongs to a request that is refused anyway for its age.
        assert_eq!(claim(known), id == "behind", "{id}");
    }
    clock.pass_to(base_ms + options.idempotency_window_ms + 1);
    assert!(ids.iter().all(|id| !find(id)), "the window has passed");
}
