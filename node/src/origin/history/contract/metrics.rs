//! Metric rows: replaced by key, separated by account, removed when they expire.

use std::sync::Arc;

use super::bench::{ContractStore, wait};
use super::{DAY_MS, StoreError, StoreFixture};
use crate::model::{AccountId, Amount, UsageKind};
use crate::origin::metering::{KEPT_MS, MINUTE_MS, MetricRow};

impl ContractStore<'_> {
    fn put(&self, rows: &[MetricRow]) -> Result<(), StoreError> {
        wait(self.store.put_metrics(rows.to_vec()))
    }

    /// Reads the rows of an account, sorted for the test.
    fn rows(&self, account: &str, from_ms: u64) -> Vec<MetricRow> {
        let mut rows =
            wait(self.store.read_metrics(AccountId::new(account), from_ms, usize::MAX)).expect("read");
        rows.sort_by_key(|row| (row.minute_ms, row.node_id.clone(), row.incarnation, row.kind));
        rows
    }

    fn minute(&self, back: u64) -> u64 {
        self.base_ms - self.base_ms % MINUTE_MS - back * MINUTE_MS
    }
}

fn row(account: &str, minute_ms: u64, node_id: &str, incarnation: u64, count: u64) -> MetricRow {
    let (account, node_id): (_, Arc<str>) = (AccountId::new(account), node_id.into());
    let amount = Amount { count, bytes: 10 * count };
    MetricRow { account, minute_ms, node_id, incarnation, kind: UsageKind::Publish, amount }
}

pub(in super::super) fn metric_rows_replace_those_of_their_key(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let at = bench.minute(0);
    let first = row("acme", at, "n1", 1, 5);
    let others = [
        MetricRow { kind: UsageKind::Deliver, ..first.clone() },
        row("acme", at, "n1", u64::MAX, 7),
        row("acme", at, "n2", 1, 8),
        row("acme", at + MINUTE_MS, "n1", 1, 9),
    ];
    bench.put(std::slice::from_ref(&first)).expect("stored");
    bench.put(&others).expect("stored");
    bench.put(&[first]).expect("stored again");
    let later = row("acme", at, "n1", 1, 6);
    bench.put(std::slice::from_ref(&later)).expect("stored");
    let expected = [&[later], &others[..]].concat();
    assert_eq!(bench.rows("acme", 0), expected);
    bench.put(&[]).expect("nothing to store");
    assert_eq!(bench.reopen().rows("acme", 0), expected);
}

pub(in super::super) fn metric_rows_begin_at_their_minute(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let rows: Vec<_> = (0..3 * 24 * 60)
        .step_by(97)
        .map(|back| row("acme", bench.minute(3 * 24 * 60 - back), "n1", 1, back + 1))
        .collect();
    bench.put(&rows).expect("stored");
    for index in [0, 1, rows.len() / 2, rows.len() - 1] {
        let from_ms = rows[index].minute_ms;
        assert_eq!(bench.rows("acme", from_ms), rows[index..], "that minute and what follows");
        assert_eq!(bench.rows("acme", from_ms + 1), rows[index + 1..]);
    }
}

pub(in super::super) fn metric_rows_end_with_a_whole_minute(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    // Two rows and one row in turn, over more than a day, so that they span several tables.
    let rows: Vec<_> = (0..30)
        .flat_map(|number| {
            let at = bench.minute(60 * (30 - number));
            let both = [row("acme", at, "n1", 1, 1 + number), row("acme", at, "n2", 1, 1 + number)];
            both.into_iter().take(2 - number as usize % 2)
        })
        .collect();
    bench.put(&rows).expect("stored");
    bench.put(&[row("acmf", bench.minute(1), "n1", 1, 1)]).expect("stored");
    for rows_max in [1, 2, 3, 4, 44, 45, 46] {
        let (mut read, mut from_ms) = (Vec::new(), 0);
        loop {
            let next = bench.store.read_metrics(AccountId::new("acme"), from_ms, rows_max);
            let next = wait(next).expect("read");
            assert!(next.len() <= rows_max + 1, "at most the rest of a minute more");
            let Some(last) = next.last().filter(|_| next.len() >= rows_max) else {
                read.extend(next);
                break;
            };
            from_ms = last.minute_ms + MINUTE_MS;
            read.extend(next);
        }
        assert_eq!(read, rows, "{rows_max} at a time");
    }
}

pub(in super::super) fn metric_rows_of_accounts_never_meet(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let at = bench.minute(0);
    let long = "n".repeat(300);
    for account in ["a", "aa", "b", "a-b"] {
        bench.put(&[row(account, at, "n1", 1, account.len() as u64)]).expect("stored");
        bench.put(&[row(account, at, &long, 1, 100)]).expect("stored");
    }
    for account in ["a", "aa", "b", "a-b"] {
        let expected = [row(account, at, "n1", 1, account.len() as u64), row(account, at, &long, 1, 100)];
        assert_eq!(bench.rows(account, 0), expected);
    }
    assert_eq!(bench.rows("c", 0), []);
}

pub(in super::super) fn metric_rows_are_kept_for_their_time(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let kept = row("acme", bench.minute(KEPT_MS / MINUTE_MS), "n1", 1, 1);
    let expired = row("acme", bench.minute((KEPT_MS + 2 * DAY_MS) / MINUTE_MS), "n1", 1, 1);
    bench.put(&[kept.clone(), expired]).expect("stored");
    bench.store.sweep(bench.base_ms).expect("swept");
    assert_eq!(bench.rows("acme", 0), [kept]);
}

pub(in super::super) fn metric_rows_after_shutdown(fixture: &dyn StoreFixture) {
    let bench = ContractStore::new(fixture);
    let rows = [row("acme", bench.minute(0), "n1", 1, 1)];
    let queued = bench.store.put_metrics(rows.to_vec());
    bench.store.shutdown();
    assert_eq!(wait(queued), Ok(()), "what was queued is written");
    assert_eq!(bench.put(&rows), Err(StoreError::ShutDown));
    let read = wait(bench.store.read_metrics(AccountId::new("acme"), 0, usize::MAX));
    assert_eq!(read, Err(StoreError::ShutDown));
}
