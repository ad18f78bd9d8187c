//! The meter with a manual clock and a store that can fail, lag, lose its answer or keep nothing.

mod series;

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::testing::FakeStore;

/// Twenty seconds into a minute.
const NOW_MS: u64 = 1_767_225_620_000;
const MINUTE: u64 = 1_767_225_600_000;
const MINUTES_MAX: usize = 100;
const LONG: Duration = Duration::from_secs(10);

const DIRECTORY: &str = r#"
[[tenants]]
id = "acme"
[[tenants.accounts]]
id = "acme"
[[tenants.accounts]]
id = "other"
"#;

#[derive(Default)]
struct MeterTestStore {
    rows: Mutex<Vec<MetricRow>>,
    /// Answer to the next writes. A failing write stores nothing, or everything with `stores_all_the_same`.
    error: Mutex<Option<StoreError>>,
    stores_all_the_same: Mutex<bool>,
    written: AtomicUsize,
}

impl FakeStore for MeterTestStore {
    fn put_metrics(&self, rows: Vec<MetricRow>) -> Result<(), StoreError> {
        let error = self.error.lock().clone();
        if error.is_none() || *self.stores_all_the_same.lock() {
            self.written.fetch_add(rows.len(), Ordering::Relaxed);
            let mut stored = self.rows.lock();
            for row in rows {
                let same_key = |stored: &MetricRow| MetricRow { amount: row.amount, ..stored.clone() } == row;
                stored.retain(|stored| !same_key(stored));
                stored.push(row);
            }
        }
        error.map_or(Ok(()), Err)
    }

    fn read_metrics(
        &self,
        account: AccountId,
        from_ms: u64,
        rows_max: usize,
    ) -> Result<Vec<MetricRow>, StoreError> {
        let error = self.error.lock().clone();
        let mut rows = self.rows.lock().clone();
        rows.retain(|row| row.account == account && row.minute_ms >= from_ms);
        rows.sort_by_key(|row| row.minute_ms);
        let last = rows.get(rows_max - 1).map(|row| row.minute_ms);
        rows.retain(|row| last.is_none_or(|last| row.minute_ms <= last));
        error.map_or(Ok(rows), Err)
    }
}

struct MeterTestNode {
    store: Arc<MeterTestStore>,
    accounts: Arc<Accounts>,
    clock: Clock,
    meter: Meter,
}

impl MeterTestNode {
    fn new() -> Self {
        Self::started_on(Arc::default(), NOW_MS)
    }

    /// Starts a node at `now_ms` on the rows that are stored.
    fn started_on(store: Arc<MeterTestStore>, now_ms: u64) -> Self {
        let accounts = Accounts::from_text(DIRECTORY).unwrap();
        let clock = Clock::manual(now_ms);
        let known = Arc::clone(&store) as Arc<dyn HistoryStore>;
        let meter = Meter::new(Arc::clone(&accounts), known, clock.clone(), "n1".into(), MINUTES_MAX);
        Self { store, accounts, clock, meter }
    }

    fn count(&self, account: &str, kind: UsageKind, count: u64) {
        let directory = self.accounts.current();
        directory.account(&AccountId::new(account)).unwrap().usage.count(kind, count, 10 * count);
    }

    /// Moves the clock to so many minutes after the first one began, and flushes.
    async fn begin_minute(&self, number: u64) {
        self.clock.pass_to(MINUTE + number * MINUTE_MS);
        self.meter.flush().await;
    }

    /// One publish in the first minute, written in it and at its end, and two in the second.
    async fn publish_over_a_minute(&self) {
        self.count("acme", UsageKind::Publish, 1);
        self.meter.flush().await;
        self.begin_minute(1).await;
        self.count("acme", UsageKind::Publish, 2);
    }

    /// Reads an account's usage as minute, kind and count; the bytes are ten times the count.
    async fn read(&self, account: &str, window_ms: u64) -> Vec<(u64, &'static str, u64)> {
        let mut seen = Vec::new();
        let mut rest = Some(self.meter.window(window_ms));
        while let Some(minutes) = rest {
            let page = self.meter.series(&AccountId::new(account), minutes).await.expect("a page");
            let points_max = 2 * (PAGE_ROWS + UsageKind::ALL.len());
            assert!(page.points.len() < points_max, "a page of the store's and one of its own");
            seen.extend(page.points.iter().map(|point| {
                assert_eq!((&*point.node_id, point.amount.bytes), ("n1", 10 * point.amount.count));
                (point.minute_ms, point.kind.as_str(), point.amount.count)
            }));
            rest = page.rest;
        }
        seen
    }

    fn minute_count(&self) -> usize {
        let state = self.meter.state.lock();
        assert_eq!(state.minute_count, state.minutes.values().map(HashMap::len).sum::<usize>());
        state.minute_count
    }
}

#[tokio::test]
async fn metering_counts_are_read_at_once_by_their_account_only() {
    let node = MeterTestNode::new();
    assert_eq!(node.read("acme", KEPT_MS).await, []);
    node.count("acme", UsageKind::Publish, 2);
    node.count("other", UsageKind::Publish, 5);
    node.count("acme", UsageKind::Api, 1);
    assert_eq!(node.read("acme", KEPT_MS).await, [(MINUTE, "api", 1), (MINUTE, "publish", 2)]);
    node.count("acme", UsageKind::Publish, 1);
    assert_eq!(node.read("acme", KEPT_MS).await[1], (MINUTE, "publish", 3));
    assert_eq!(node.read("other", KEPT_MS).await, [(MINUTE, "publish", 5)]);
    assert_eq!(node.store.written.load(Ordering::Relaxed), 0);
}

#[tokio::test]
async fn a_write_repeated_is_the_same_row() {
    let node = MeterTestNode::new();
    node.count("acme", UsageKind::Publish, 2);
    node.meter.flush().await;
    assert_eq!(node.store.rows.lock().len(), 1);
    node.meter.flush().await;
    assert_eq!(node.store.written.load(Ordering::Relaxed), 1, "what has not changed is not written again");
    node.count("acme", UsageKind::Publish, 1);
    node.meter.flush().await;
    assert_eq!(node.store.rows.lock()[0].amount, Amount { count: 3, bytes: 30 });
    assert_eq!(node.store.rows.lock().len(), 1);
    assert_eq!(node.read("acme", KEPT_MS).await, [(MINUTE, "publish", 3)]);
}

#[tokio::test]
async fn counts_belong_to_the_minute_in_which_they_were_made() {
    let node = MeterTestNode::new();
    node.count("acme", UsageKind::Publish, 1);
    node.clock.pass_to(MINUTE + MINUTE_MS);
    node.meter.flush().await;
    node.count("acme", UsageKind::Publish, 2);
    node.count("other", UsageKind::Publish, 7);
    node.clock.pass_to(MINUTE + 2 * MINUTE_MS + 1);
    let expected = [(MINUTE, "publish", 1), (MINUTE + MINUTE_MS, "publish", 2)];
    assert_eq!(node.read("acme", KEPT_MS).await, expected);
    assert_eq!(node.read("other", KEPT_MS).await, [(MINUTE + MINUTE_MS, "publish", 7)], "by another's read");
}

#[tokio::test]
async fn minutes_that_have_passed_are_left_to_the_store() {
    let node = MeterTestNode::new();
    for minute in 1..=5 {
        node.count("acme", UsageKind::Publish, 1);
        node.meter.flush().await;
        assert_eq!(node.minute_count(), 1, "the running one is still counted");
        node.begin_minute(minute).await;
        assert_eq!(node.minute_count(), 0);
    }
    assert_eq!(node.read("acme", KEPT_MS).await.len(), 5);
}

#[tokio::test]
async fn a_store_that_fails_gets_the_rows_later() {
    for stored in [false, true] {
        let node = MeterTestNode::new();
        *node.store.error.lock() = Some(StoreError::Failed("disk gone".into()));
        *node.store.stores_all_the_same.lock() = stored;
        node.publish_over_a_minute().await;
        node.meter.flush().await;
        let read = node.meter.series(&AccountId::new("acme"), node.meter.window(KEPT_MS)).await;
        assert!(read.is_err(), "never a part of it");
        *node.store.error.lock() = None;
        node.meter.flush().await;
        let counts: Vec<_> = node.store.rows.lock().iter().map(|row| row.amount.count).collect();
        assert_eq!(counts, [1, 2], "stored by the failed write: {stored}");
        assert_eq!(node.read("acme", KEPT_MS).await.len(), 2);
    }
}

#[tokio::test]
async fn a_write_that_was_given_up_is_made_again() {
    let node = MeterTestNode::new();
    node.count("acme", UsageKind::Publish, 1);
    drop(node.meter.collect());
    node.meter.finish(LONG).await;
    assert_eq!(node.store.rows.lock().len(), 1);
}

#[tokio::test]
async fn a_restart_within_the_minute_loses_and_doubles_nothing() {
    let store = Arc::new(MeterTestStore::default());
    for start in 0..3 {
        let node = MeterTestNode::started_on(Arc::clone(&store), NOW_MS + start);
        node.count("acme", UsageKind::Publish, 2);
        node.meter.finish(LONG).await;
        assert_eq!(node.read("acme", KEPT_MS).await, [(MINUTE, "publish", 2 * (start + 1))]);
    }
    assert_eq!(store.rows.lock().len(), 3);
}

#[tokio::test]
async fn without_a_store_rows_are_kept_in_memory_for_their_time() {
    let node = MeterTestNode::new();
    *node.store.error.lock() = Some(StoreError::Off);
    node.publish_over_a_minute().await;
    let expected = [(MINUTE, "publish", 1), (MINUTE + MINUTE_MS, "publish", 2)];
    assert_eq!(node.read("acme", KEPT_MS).await, expected);
    node.clock.pass_to(MINUTE + MINUTE_MS + KEPT_MS);
    node.meter.flush().await;
    assert_eq!(node.read("acme", KEPT_MS).await, expected[1..]);
    assert_eq!(node.minute_count(), 1);
}

#[tokio::test]
async fn memory_is_bounded_and_the_oldest_go_first() {
    let node = MeterTestNode::new();
    *node.store.error.lock() = Some(StoreError::Off);
    for minute in 1..=MINUTES_MAX as u64 {
        node.count("acme", UsageKind::Publish, minute);
        node.count("other", UsageKind::Api, 1);
        node.begin_minute(minute).await;
        assert!(node.minute_count() <= MINUTES_MAX);
    }
    let counts = node.read("acme", KEPT_MS).await.into_iter().map(|(_, _, count)| count);
    assert_eq!(counts.collect::<Vec<_>>(), (51..=100).collect::<Vec<_>>());
}

#[tokio::test]
async fn usage_pages_join_rows_of_the_store_and_memory() {
    let kinds = UsageKind::ALL.map(UsageKind::as_str);
    // Minute from which on the store refuses writes, so that further counts stay in memory.
    for fails_from in [0, 1, 9, 10, 30, 60] {
        let node = MeterTestNode::new();
        let mut expected = Vec::new();
        for minute in 0..60 {
            if minute == fails_from {
                *node.store.error.lock() = Some(StoreError::Off);
            }
            // All kinds, some, and none.
            let kinds_counted = [UsageKind::ALL.len(), 3, 0, 1][minute as usize % 4];
            for kind in &UsageKind::ALL[..kinds_counted] {
                node.count("acme", *kind, minute + 1);
            }
            let mut names = kinds[..kinds_counted].to_vec();
            names.sort_unstable();
            expected.extend(names.into_iter().map(|name| (MINUTE + minute * MINUTE_MS, name, minute + 1)));
            if minute != 59 {
                node.begin_minute(minute + 1).await;
            }
        }
        *node.store.error.lock() = None;
        assert_eq!(node.read("acme", KEPT_MS).await, expected, "{fails_from}");
    }
}

#[tokio::test]
async fn minute_overlapping_window_start_is_included() {
    let node = MeterTestNode::new();
    for minute in 1..=10 {
        node.count("acme", UsageKind::Publish, minute);
        node.begin_minute(minute).await;
    }
    let first = async |window_ms| node.read("acme", window_ms).await.first().map(|(at, _, _)| *at);
    // Ten minutes after the first minute began.
    let minute = |number: u64| Some(MINUTE + number * MINUTE_MS);
    assert_eq!(first(MINUTE_MS).await, minute(9));
    assert_eq!(first(2 * MINUTE_MS).await, minute(8));
    node.clock.pass_to(MINUTE + 10 * MINUTE_MS + 1);
    assert_eq!(first(MINUTE_MS).await, minute(9));
    assert_eq!(first(2 * MINUTE_MS - 2).await, minute(8), "a part of it is within");
    node.count("acme", UsageKind::Publish, 11);
    let running = node.read("acme", MINUTE_MS).await;
    assert_eq!(running.last(), Some(&(MINUTE + 10 * MINUTE_MS, "publish", 11)));
}
