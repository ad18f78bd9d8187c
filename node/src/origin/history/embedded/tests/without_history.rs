//! A store of a node that keeps no history.

use super::*;

#[test]
fn without_history_ids_and_nonces_are_still_kept() {
    let folder = folder();
    let options = EmbeddedOptions { history: false, ..options() };
    let store = EmbeddedStore::open(folder.path(), &options, Clock::system()).expect("opens");
    let (key, now_ms) = (channel("acme", "a"), Clock::system().now_ms());
    append(&store, with_ids(&key, now_ms, &[(1, "x")])).expect("remembered");
    assert_eq!(wait(store.read(query(&key))), Err(StoreError::Off));
    let (send, receive) = mpsc::channel();
    store.find_ids(
        scope(&key),
        vec!["x".into()],
        Box::new(move |found| send.send(found).expect("test waits")),
    );
    let found = receive.recv_timeout(PATIENCE).expect("answered").expect("looked up");
    assert_eq!(found[0].expect("remembered").sequence, 1);
    let claimed = nonce("k1", now_ms, "0123456789abcdef");
    assert_eq!(wait(store.claim_nonce(claimed.clone())), Ok(true));
    assert_eq!(wait(store.claim_nonce(claimed)), Ok(false));
}

#[test]
fn ids_of_peers_are_kept_for_idempotency_window_across_reopen() {
    let (folder, now_ms) = (folder(), 1_800_000_000_000);
    let clock = Clock::manual(now_ms);
    let options = EmbeddedOptions { history: false, ..options() };
    let open = || EmbeddedStore::open(folder.path(), &options, clock.clone()).expect("opens");
    let key = channel("acme", "a");
    let find = |store: &EmbeddedStore| {
        let (send, receive) = mpsc::channel();
        let found = Box::new(move |found| drop(send.send(found)));
        store.find_ids(scope(&key), vec!["x".into(), "y".into()], found);
        receive.recv_timeout(PATIENCE).expect("answered").expect("looked up")
    };
    let store = open();
    let stamp = Stamp { incarnation: 77, sequence: 5 };
    let (send, kept) = mpsc::channel();
    store.keep_ids(scope(&key), vec![("x".into(), stamp)], Box::new(move |kept| drop(send.send(kept))));
    assert_eq!(find(&store), [Some(stamp), None], "also while it is being written");
    assert_eq!(kept.recv_timeout(PATIENCE), Ok(Ok(())));
    drop(store);
    let store = open();
    assert_eq!(find(&store), [Some(stamp), None]);
    clock.pass_to(now_ms + options.idempotency_window_ms + 1);
    assert_eq!(find(&store), [None, None]);
}

#[test]
fn incarnation_without_history_matches_none_and_is_incomplete() {
    let folder = folder();
    let begin = |history, incarnation| {
        let options = EmbeddedOptions { history, ..options() };
        let store = EmbeddedStore::open(folder.path(), &options, Clock::system()).expect("opens");
        let kept = HistoryCoverage {
            policies: 7,
            has_changed: false,
            is_complete: true,
            outlasts_resume_window: false,
        };
        let previous = wait(store.begin_incarnation(incarnation, kept)).expect("begun");
        previous.iter().map(|one| (one.coverage.policies, one.coverage.is_complete)).collect::<Vec<_>>()
    };
    begin(true, 1);
    assert_eq!(begin(false, 2), [(7, true)]);
    assert_eq!(begin(true, 3), [(HistoryCoverage::UNMATCHED_POLICIES, false), (7, true)]);
}
