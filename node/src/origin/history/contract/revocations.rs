//! Revocations of tokens.

use super::bench::{ContractStore, wait};
use super::{DAY_MS, StoreFixture};
use crate::model::{ClientId, KeyName, Revocation};

/// Longest lifetime of a token plus the allowed clock skew of a signer.
const KEPT_MS: u64 = 48 * 3_600_000 + 120_000;

fn revocation(key_name: &str, client_id: Option<&str>, issued_before_ms: u64) -> Revocation {
    let client_id = client_id.map(ClientId::of);
    Revocation { key_name: KeyName::from(key_name), client_id, issued_before_ms }
}

fn revoke(bench: &ContractStore<'_>, revocations: &[Revocation]) {
    for revocation in revocations {
        wait(bench.store.revoke_tokens(revocation.clone())).expect("durable");
    }
}

/// Latest revocation that applies to a token of this key and clientId, in milliseconds after `base_ms`.
fn latest(bench: &ContractStore<'_>, key_name: &str, client_id: &str) -> Option<u64> {
    let all = bench.store.revoked_tokens().expect("read");
    let covers = |revocation: &&Revocation| {
        let of = revocation.client_id.as_ref();
        *revocation.key_name == *key_name && of.is_none_or(|id| id.as_str() == client_id)
    };
    let latest = all.iter().filter(covers).map(|revocation| revocation.issued_before_ms).max();
    latest.map(|at_ms| at_ms + DAY_MS - bench.base_ms)
}

pub(crate) fn revocations_merge_and_survive_reopening(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    // Around midnight, so that one key has rows of several days.
    let (old, new) = (bench.base_ms - DAY_MS, bench.base_ms);
    assert_eq!(bench.store.revoked_tokens(), Ok(Vec::new()));
    revoke(&bench, &[revocation("k1", Some("ann"), new), revocation("k1", Some("ann"), old)]);
    revoke(&bench, &[revocation("k1", Some("bob"), old), revocation("k1", Some("bob"), old + 1)]);
    revoke(&bench, &[revocation("k1x", None, old + 5), revocation("k", Some("1ann"), old + 6)]);
    let check = |bench: &ContractStore<'_>| {
        assert_eq!(latest(bench, "k1", "ann"), Some(DAY_MS), "the latest counts, not the last");
        assert_eq!(latest(bench, "k1", "bob"), Some(1));
        assert_eq!(latest(bench, "k1", "eve"), None);
        assert_eq!((latest(bench, "k1x", "ann"), latest(bench, "k", "1ann")), (Some(5), Some(6)));
    };
    check(&bench);
    let bench = bench.reopen();
    check(&bench);
    revoke(&bench, &[revocation("k1", None, old + 2), revocation("k1", Some("bob"), old + 1)]);
    let bench = bench.reopen();
    assert_eq!(latest(&bench, "k1", "ann"), Some(DAY_MS), "one that reaches further stays");
    assert_eq!((latest(&bench, "k1", "bob"), latest(&bench, "k1", "eve")), (Some(2), Some(2)));
    let of_key = bench.store.revoked_tokens().expect("read");
    assert_eq!(of_key.iter().filter(|revocation| *revocation.key_name == *"k1").count(), 2, "{of_key:?}");
    revoke(&bench, &[revocation("k1", None, new + 1)]);
    let of_key = bench.reopen().store.revoked_tokens().expect("read");
    assert_eq!(of_key.iter().filter(|revocation| *revocation.key_name == *"k1").count(), 1, "{of_key:?}");
}

pub(crate) fn revocations_of_many_at_once(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let base_ms = bench.base_ms - DAY_MS;
    let answers: Vec<_> = (0..1_000_u64)
        .map(|i| {
            let client_id = format!("c{}", i % 7);
            let client_id = (i % 10 > 0).then_some(client_id.as_str());
            bench.store.revoke_tokens(revocation("k1", client_id, base_ms + i))
        })
        .collect();
    for answer in answers {
        wait(answer).expect("durable");
    }
    let bench = bench.reopen();
    for client in 0..7 {
        let last = (0..1_000).rev().find(|i| i % 10 == 0 || i % 7 == client);
        assert_eq!(latest(&bench, "k1", &format!("c{client}")), last);
    }
}

pub(crate) fn revocations_end_with_the_last_token(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    revoke(&bench, &[revocation("k1", None, bench.base_ms)]);
    bench.store.sweep(bench.base_ms + KEPT_MS - 1).expect("swept");
    assert_eq!(latest(&bench, "k1", "ann"), Some(DAY_MS));
    if bench.store.is_shared() {
        // Rows of a shared store expire by themselves once the time has passed.
        return;
    }
    bench.store.sweep(bench.base_ms + KEPT_MS + 2 * DAY_MS).expect("swept");
    assert_eq!(bench.store.revoked_tokens(), Ok(Vec::new()));
}
