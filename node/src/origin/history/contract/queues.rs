//! The queues of accounts.

use std::collections::HashMap;

use super::StoreFixture;
use super::bench::{ContractStore, wait};
use crate::model::AccountId;
use crate::origin::history::StoredQueues;

fn row(account: &str, revision: u64, definitions: &str) -> StoredQueues {
    StoredQueues { account: AccountId::new(account), revision, definitions: definitions.into() }
}

fn stored(bench: &ContractStore<'_>) -> Vec<StoredQueues> {
    changed(bench, &[])
}

/// Rows whose revisions are not these.
fn changed(bench: &ContractStore<'_>, known: &[(&str, u64)]) -> Vec<StoredQueues> {
    let known: HashMap<_, _> =
        known.iter().map(|(account, revision)| (AccountId::new(account), *revision)).collect();
    let mut rows = bench.store.queues(&known).expect("read");
    rows.sort_by(|one, other| one.account.cmp(&other.account));
    rows
}

pub(crate) fn queues_change_by_their_revision(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    assert_eq!(stored(&bench), []);
    let put = |bench: &ContractStore<'_>, row| wait(bench.store.put_queues(row)).expect("durable");
    assert!(!put(&bench, row("a", 2, "early")), "there is no revision 1");
    assert!(put(&bench, row("a", 1, "one")));
    assert!(!put(&bench, row("a", 1, "again")), "there is a revision 1");
    assert!(put(&bench, row("b", 1, "other \u{1f600}")));
    let bench = bench.reopen();
    assert!(put(&bench, row("a", 2, "two")));
    assert!(!put(&bench, row("a", 2, "again")));
    assert!(!put(&bench, row("a", 4, "early")));
    let expected = [row("a", 2, "two"), row("b", 1, "other \u{1f600}")];
    assert_eq!(stored(&bench), expected);
    let bench = bench.reopen();
    assert_eq!(stored(&bench), expected);
    assert_eq!(changed(&bench, &[("a", 2), ("b", 1)]), []);
    assert_eq!(changed(&bench, &[("a", 1), ("b", 1)]), expected[..1]);
    assert_eq!(changed(&bench, &[("a", 2), ("c", 1)]), expected[1..]);
    assert_eq!(changed(&bench, &[("c", 1)]), expected);
}

pub(crate) fn of_changes_at_once_one_is_made(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let texts: Vec<String> = (0..8).map(|number| format!("change {number}")).collect();
    let puts: Vec<_> = texts.iter().map(|text| bench.store.put_queues(row("a", 1, text))).collect();
    let made: Vec<bool> = puts.into_iter().map(|put| wait(put).expect("durable")).collect();
    assert_eq!(made.iter().filter(|is_made| **is_made).count(), 1, "{made:?}");
    let first = made.iter().position(|is_made| *is_made).expect("one is made");
    assert_eq!(stored(&bench), [row("a", 1, &texts[first])]);
}
