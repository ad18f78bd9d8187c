//! The meter: usage of each account by minute, drained from the counters, stored, and read back.

mod series;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::history::{HistoryStore, StoreError};
use crate::accounts::Accounts;
use crate::model::{AccountId, Amount, Clock, Usage, UsageKind, random_bytes};

pub use series::{SeriesPoint, sum_nodes};

pub const MINUTE_MS: u64 = 60_000;
/// Age after which rows are dropped.
pub const KEPT_MS: u64 = 7 * 24 * 60 * MINUTE_MS;
/// Interval of writes. Together with the duration of a write it bounds how far the store is behind.
const FLUSH_EVERY: Duration = Duration::from_secs(2);
/// Rows that end a page of a series, at the end of their minute.
const PAGE_ROWS: usize = 64;
/// Rows in one write.
const WRITE_ROWS: usize = 4_096;

/// Total that one incarnation of a node counted of one kind in a minute. A later row replaces the earlier one of its key, so a repeated
/// write gives the same row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricRow {
    pub account: AccountId,
    /// Begin of the minute, in epoch milliseconds.
    pub minute_ms: u64,
    pub node_id: Arc<str>,
    /// Random at each start of the node, so that a restart within the minute has rows of its own.
    pub incarnation: u64,
    pub kind: UsageKind,
    pub amount: Amount,
}

/// A part of a series, and the minutes that are left.
#[derive(Debug)]
pub struct SeriesPage {
    pub points: Vec<SeriesPoint>,
    pub rest: Option<Range<u64>>,
}

/// The meter of one node. Counts that it has drained can be read at once; the store has them a few seconds later.
pub struct Meter {
    accounts: Arc<Accounts>,
    store: Arc<dyn HistoryStore>,
    clock: Clock,
    node_id: Arc<str>,
    incarnation: u64,
    /// Minutes over all accounts beyond which the oldest are dropped, if the store fails or keeps none.
    minutes_max: usize,
    state: Mutex<MeterState>,
}

struct MeterState {
    /// Minute to which the counts in the counters belong.
    current_ms: u64,
    /// The running minute and those that the store does not have yet; all minutes if the store keeps none.
    minutes: BTreeMap<u64, HashMap<AccountId, AccountMinute>>,
    /// Number of entries over all maps in `minutes`.
    minute_count: usize,
    /// The store keeps no metric rows.
    off: bool,
    /// The last write failed, which was logged once.
    failing: bool,
}

#[derive(Default)]
struct AccountMinute {
    amounts: [Amount; UsageKind::ALL.len()],
    state: MinuteState,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum MinuteState {
    #[default]
    Changed,
    /// The row is being written, or its write has failed.
    Written,
    Stored,
}

impl Meter {
    pub fn new(
        accounts: Arc<Accounts>,
        store: Arc<dyn HistoryStore>,
        clock: Clock,
        node_id: Arc<str>,
        minutes_max: usize,
    ) -> Self {
        let state = MeterState {
            current_ms: minute_of(clock.line_ms()),
            minutes: BTreeMap::new(),
            minute_count: 0,
            off: false,
            failing: false,
        };
        let incarnation = u64::from_be_bytes(random_bytes());
        let state = Mutex::new(state);
        Self { accounts, store, clock, node_id, incarnation, minutes_max, state }
    }

    /// Drains and stores periodically, and at the end of each minute; never returns. The task that runs it may be dropped at any time.
    pub async fn run(self: Arc<Self>) {
        loop {
            let left_ms = MINUTE_MS - self.clock.line_ms() % MINUTE_MS;
            tokio::time::sleep(FLUSH_EVERY.min(Duration::from_millis(left_ms))).await;
            self.flush().await;
        }
    }

    /// Stores the counts up to now. Rows that the store refused are written again by the next call.
    pub async fn flush(&self) {
        let Some(rows) = self.collect() else { return };
        let mut result = Ok(());
        for rows in rows.chunks(WRITE_ROWS) {
            result = self.store.put_metrics(rows.to_vec()).await;
            if result.is_err() {
                break;
            }
        }
        self.settle(result);
    }

    /// Stores the last counts when a node stops, after the last request and before the store ends. The second write includes acks that
    /// waited for the first one.
    pub async fn finish(&self, within: Duration) {
        let last = async {
            self.flush().await;
            self.flush().await;
        };
        if tokio::time::timeout(within, last).await.is_err() {
            tracing::warn!("usage counts not stored at stop");
        }
    }

    /// Minutes of the last `window_ms`, including the running one, and one that began before the window and ends in it.
    pub fn window(&self, window_ms: u64) -> Range<u64> {
        let now_ms = self.clock.line_ms();
        // A minute is in the window when it ends after the window begins.
        minute_of(now_ms.saturating_sub(window_ms))..minute_of(now_ms) + MINUTE_MS
    }

    /// Reads one page of the account's points in the minutes that begin within `minutes`, in the order of minute, node and kind.
    pub async fn series(&self, account: &AccountId, minutes: Range<u64>) -> Result<SeriesPage, StoreError> {
        let own = self.own_rows(account, minutes.clone());
        let mut rows = match self.store.read_metrics(account.clone(), minutes.start, PAGE_ROWS).await {
            Ok(rows) => rows,
            Err(StoreError::Off) => Vec::new(),
            Err(error) => return Err(error),
        };
        let end_ms = read_to(&own, minutes.end).min(read_to(&rows, minutes.end));
        rows.extend(own);
        rows.retain(|row| row.minute_ms < end_ms);
        let rest = (end_ms < minutes.end).then_some(end_ms..minutes.end);
        Ok(SeriesPage { points: series::points(rows), rest })
    }

    /// Returns the rows in memory, with the same end as a page of the store. To be called before the store is read, so that every row is
    /// in one of both.
    fn own_rows(&self, account: &AccountId, minutes: Range<u64>) -> Vec<MetricRow> {
        let now_ms = self.clock.line_ms();
        let mut state = self.state.lock();
        if state.current_ms == minute_of(now_ms) {
            state.add_usage(account, &self.accounts.usages().of(account));
        } else {
            self.drain_counters(&mut state, now_ms);
        }
        let mut rows = Vec::new();
        for (at, accounts) in state.minutes.range(minutes) {
            if rows.len() >= PAGE_ROWS {
                break;
            }
            rows.extend(accounts.get(account).into_iter().flat_map(|minute| self.rows(account, *at, minute)));
        }
        rows
    }

    /// Drains the counters into the minute in which they were drained last.
    fn drain_counters(&self, state: &mut MeterState, now_ms: u64) {
        self.accounts.usages().visit(|account, usage| state.add_usage(account, usage));
        state.current_ms = minute_of(now_ms);
        state.drop_old(now_ms, self.minutes_max);
    }

    /// Returns the rows that the store does not have; `None` if it keeps no metric rows.
    fn collect(&self) -> Option<Vec<MetricRow>> {
        let mut state = self.state.lock();
        self.drain_counters(&mut state, self.clock.line_ms());
        if state.off {
            return None;
        }
        let mut rows = Vec::new();
        for (at, accounts) in &mut state.minutes {
            for (account, minute) in
                accounts.iter_mut().filter(|(_, minute)| minute.state != MinuteState::Stored)
            {
                minute.state = MinuteState::Written;
                rows.extend(self.rows(account, *at, minute));
            }
        }
        Some(rows)
    }

    fn rows<'a>(
        &'a self,
        account: &'a AccountId,
        minute_ms: u64,
        minute: &'a AccountMinute,
    ) -> impl Iterator<Item = MetricRow> + 'a {
        let counted = UsageKind::ALL.into_iter().zip(minute.amounts);
        counted.filter(|(_, amount)| *amount != Amount::default()).map(move |(kind, amount)| MetricRow {
            account: account.clone(),
            minute_ms,
            node_id: Arc::clone(&self.node_id),
            incarnation: self.incarnation,
            kind,
            amount,
        })
    }

    fn settle(&self, result: Result<(), StoreError>) {
        let mut state = self.state.lock();
        match result {
            Ok(()) => state.stored(),
            Err(StoreError::Off) => state.off = true,
            Err(error) if !state.failing => {
                tracing::warn!(%error, "usage counts write failed, kept in memory");
                state.failing = true;
            }
            Err(_) => {}
        }
    }
}

impl MeterState {
    fn add_usage(&mut self, account: &AccountId, usage: &Usage) {
        for (index, kind) in UsageKind::ALL.into_iter().enumerate() {
            let Some(amount) = usage.take(kind) else { continue };
            let accounts = self.minutes.entry(self.current_ms).or_default();
            let minute = accounts.entry(account.clone()).or_insert_with(|| {
                self.minute_count += 1;
                AccountMinute::default()
            });
            minute.amounts[index].add(amount);
            minute.state = MinuteState::Changed;
        }
    }

    /// Marks all written rows as stored, and drops those of minutes that have passed.
    fn stored(&mut self) {
        self.failing = false;
        let current_ms = self.current_ms;
        self.minutes.retain(|at, accounts| {
            for minute in accounts.values_mut().filter(|minute| minute.state == MinuteState::Written) {
                minute.state = MinuteState::Stored;
            }
            if *at < current_ms {
                accounts.retain(|_, minute| minute.state != MinuteState::Stored);
            }
            !accounts.is_empty()
        });
        self.minute_count = self.minutes.values().map(HashMap::len).sum();
    }

    fn drop_old(&mut self, now_ms: u64, minutes_max: usize) {
        let oldest_ms = minute_of(now_ms.saturating_sub(KEPT_MS));
        let mut lost = 0;
        while let Some(first) = self.minutes.first_entry()
            && (*first.key() < oldest_ms
                || (self.minute_count > minutes_max && *first.key() < self.current_ms))
        {
            lost += usize::from(*first.key() >= oldest_ms);
            self.minute_count -= first.remove().len();
        }
        if lost > 0 {
            tracing::warn!(minutes = lost, "usage counts dropped: over metric_minutes");
        }
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("node_id", &self.node_id).finish_non_exhaustive()
    }
}

/// Time up to which a page has all rows: the end of its last row's minute, or `end_ms` if the page is not full.
fn read_to(rows: &[MetricRow], end_ms: u64) -> u64 {
    let last = rows.last().filter(|_| rows.len() >= PAGE_ROWS);
    last.map_or(end_ms, |last| end_ms.min(last.minute_ms + MINUTE_MS))
}

fn minute_of(ms: u64) -> u64 {
    ms - ms % MINUTE_MS
}
