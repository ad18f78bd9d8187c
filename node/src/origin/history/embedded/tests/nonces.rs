//! Nonces that one store imports from another, and their bound.

use super::*;
use crate::model::{ClaimedNonce, NoncePage};

const MINUTE_MS: u64 = 60_000;

fn open_at(folder: &TempDir, clock: &Clock, nonces: usize) -> EmbeddedStore {
    let options = EmbeddedOptions { nonces, ..options() };
    EmbeddedStore::open(folder.path(), &options, clock.clone()).expect("opens")
}

fn all(store: &EmbeddedStore) -> Vec<ClaimedNonce> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let NoncePage { nonces, next } = wait(store.nonces(after.take())).expect("read");
        all.extend(nonces);
        after = next;
        if after.is_none() {
            return all;
        }
    }
}

#[test]
fn nonces_given_to_another_store_are_kept_for_remaining_time() {
    let (first, second) = (folder(), folder());
    let base_ms = Clock::system().now_ms();
    let clock = Clock::manual(base_ms);
    let store = open_at(&first, &clock, usize::MAX);
    let claimed = |i: u64| nonce("k1", base_ms + i, "0123456789abcdef");
    // Several pages, over two intervals of the memory.
    let claim = |range: std::ops::Range<u64>| {
        let claims: Vec<_> = range.map(|i| store.claim_nonce(claimed(i))).collect();
        claims.into_iter().for_each(|claim| assert_eq!(wait(claim), Ok(true)));
    };
    claim(0..2_500);
    clock.pass_to(base_ms + 9 * MINUTE_MS);
    claim(2_500..5_000);
    let mut found = all(&store);
    found.sort_by_key(|kept| kept.nonce.timestamp_ms);
    assert_eq!(found.len(), 5_000);
    for (i, kept) in (0..).zip(&found) {
        let age_ms = if i < 2_500 { 9 * MINUTE_MS } else { 0 };
        assert_eq!(*kept, ClaimedNonce { nonce: claimed(i), age_ms });
    }

    let other = open_at(&second, &clock, usize::MAX);
    wait(other.keep_nonces(found)).expect("kept");
    for i in [0, 2_499, 2_500, 4_999] {
        assert_eq!(wait(other.claim_nonce(claimed(i))), Ok(false), "{i}");
    }
    assert_eq!(wait(other.claim_nonce(claimed(5_000))), Ok(true));
    clock.pass_to(base_ms + 11 * MINUTE_MS);
    assert_eq!(wait(other.claim_nonce(claimed(0))), Ok(true), "its time is over");
    assert_eq!(wait(other.claim_nonce(claimed(2_500))), Ok(false));
}

#[test]
fn store_remembers_no_more_nonces_than_its_bound() {
    let folder = folder();
    let base_ms = 1_800_000_000_000;
    let clock = Clock::manual(base_ms);
    let claim = |store: &EmbeddedStore, i: u64| wait(store.claim_nonce(nonce("k1", i, "0123456789abcdef")));
    let store = open_at(&folder, &clock, 3);
    for i in 0..3 {
        assert_eq!(claim(&store, i), Ok(true));
    }
    assert_eq!(claim(&store, 3), Err(StoreError::Busy));
    assert_eq!(claim(&store, 0), Ok(false), "what is remembered is");
    drop(store);
    let store = open_at(&folder, &clock, 3);
    assert_eq!(claim(&store, 3), Err(StoreError::Busy), "a restart does not change that");
    clock.pass_to(base_ms + 10 * MINUTE_MS);
    assert_eq!(claim(&store, 3), Ok(true));
}
