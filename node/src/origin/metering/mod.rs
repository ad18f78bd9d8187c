//! What was done for each account, by minute: gathered from the counters, stored, and read back.

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

pub use series::{Point, sum_nodes};

pub const MINUTE_MS: u64 = 60_000;
/// Rows older than this are not kept.
pub const KEPT_MS: u64 = 7 * 24 * 60 * MINUTE_MS;
/// With the time of a write, this is how far the store may be behind.
const FLUSH_EVERY: Duration = Duration::from_secs(2);
/// A page of a series ends with the minute that brings the rows that are read for it to so many.
const PAGE_ROWS: usize = 64;
/// Rows in one write.
const WRITE_ROWS: usize = 4_096;

/// All that one incarnation of a node counted of one kind in a minute. A row written later replaces the earlier one of
/// its key, so a write repeated is the same row.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MetricRow {
    pub account: AccountId,
    /// Epoch milliseconds where the minute begins.
    pub minute_ms: u64,
    pub node_id: Arc<str>,
    /// Drawn when the node started, so that a restart within the minute has rows of its own.
    pub incarnation: u64,
    pub kind: UsageKind,
    pub amount: Amount,
}

/// A part of a series, and the minutes of what follows.
#[derive(Debug)]
pub struct SeriesPage {
    pub points: Vec<Point>,
    pub rest: Option<Range<u64>>,
}

/// The meter of one node. What it has gathered can be read at once; the store has it a few seconds later.
pub struct Meter {
    accounts: Arc<Accounts>,
    store: Arc<dyn HistoryStore>,
    clock: Clock,
    node_id: Arc<str>,
    incarnation: u64,
    /// Beyond so many minutes of accounts the oldest are dropped: with a store that fails, or none.
    minutes_max: usize,
    gathered: Mutex<Gathered>,
}

struct Gathered {
    /// What the counters hold was counted in this minute.
    current_ms: u64,
    /// The running minute, those that the store does not have yet, and without a store all.
    minutes: BTreeMap<u64, HashMap<AccountId, Minute>>,
    /// Entries of all maps in `minutes`.
    held: usize,
    /// The store keeps no rows.
    off: bool,
    /// The last write failed; said once.
    failing: bool,
}

#[derive(Default)]
struct Minute {
    amounts: [Amount; UsageKind::ALL.len()],
    state: State,
}

#[derive(Default, Clone, Copy, PartialEq, Eq)]
enum State {
    #[default]
    Changed,
    /// On its way to the store, or lost on it.
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
        let gathered = Gathered {
            current_ms: minute_of(clock.line_ms()),
            minutes: BTreeMap::new(),
            held: 0,
            off: false,
            failing: false,
        };
        let incarnation = u64::from_be_bytes(random_bytes());
        let gathered = Mutex::new(gathered);
        Self { accounts, store, clock, node_id, incarnation, minutes_max, gathered }
    }

    /// Never returns: gathers and stores, also at the end of each minute. The task that runs it may be dropped at any time.
    pub async fn run(self: Arc<Self>) {
        loop {
            let left_ms = MINUTE_MS - self.clock.line_ms() % MINUTE_MS;
            tokio::time::sleep(FLUSH_EVERY.min(Duration::from_millis(left_ms))).await;
            self.flush().await;
        }
    }

    /// Stores what was counted until now. Rows that the store did not take are written again by the next call.
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

    /// For a node that stops, after the last request and before the store ends: also counts the acks that a first
    /// write waits for.
    pub async fn finish(&self, within: Duration) {
        let last = async {
            self.flush().await;
            self.flush().await;
        };
        if tokio::time::timeout(within, last).await.is_err() {
            tracing::warn!("the last counts were not stored in time");
        }
    }

    /// The minutes of the last `window_ms`, the running one included. A minute that has not wholly passed before the window is in it.
    pub fn window(&self, window_ms: u64) -> Range<u64> {
        let now_ms = self.clock.line_ms();
        // A minute is in the window when it ends after the window begins.
        minute_of(now_ms.saturating_sub(window_ms))..minute_of(now_ms) + MINUTE_MS
    }

    /// What was counted for the account in the minutes that begin within `minutes`, in the order of minute, node and kind; as much of it
    /// as makes a page.
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

    /// Before the store is read, so that a row is in one of the two. They end as those of the store do.
    fn own_rows(&self, account: &AccountId, minutes: Range<u64>) -> Vec<MetricRow> {
        let now_ms = self.clock.line_ms();
        let mut gathered = self.gathered.lock();
        if gathered.current_ms == minute_of(now_ms) {
            gathered.take(account, &self.accounts.usages().of(account));
        } else {
            self.gather(&mut gathered, now_ms);
        }
        let mut rows = Vec::new();
        for (at, accounts) in gathered.minutes.range(minutes) {
            if rows.len() >= PAGE_ROWS {
                break;
            }
            rows.extend(accounts.get(account).into_iter().flat_map(|minute| self.rows(account, *at, minute)));
        }
        rows
    }

    /// What was counted since the last call belongs to the minute in which that was.
    fn gather(&self, gathered: &mut Gathered, now_ms: u64) {
        self.accounts.usages().visit(|account, usage| gathered.take(account, usage));
        gathered.current_ms = minute_of(now_ms);
        gathered.drop_old(now_ms, self.minutes_max);
    }

    /// What the store does not have. `None`: it keeps no rows.
    fn collect(&self) -> Option<Vec<MetricRow>> {
        let mut gathered = self.gathered.lock();
        self.gather(&mut gathered, self.clock.line_ms());
        if gathered.off {
            return None;
        }
        let mut rows = Vec::new();
        for (at, accounts) in &mut gathered.minutes {
            for (account, minute) in accounts.iter_mut().filter(|(_, minute)| minute.state != State::Stored) {
                minute.state = State::Written;
                rows.extend(self.rows(account, *at, minute));
            }
        }
        Some(rows)
    }

    fn rows<'a>(
        &'a self,
        account: &'a AccountId,
        minute_ms: u64,
        minute: &'a Minute,
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
        let mut gathered = self.gathered.lock();
        match result {
            Ok(()) => gathered.stored(),
            Err(StoreError::Off) => gathered.off = true,
            Err(error) if !gathered.failing => {
                tracing::warn!(%error, "counts were not stored, and are kept until they are");
                gathered.failing = true;
            }
            Err(_) => {}
        }
    }
}

impl Gathered {
    fn take(&mut self, account: &AccountId, usage: &Usage) {
        for (place, kind) in UsageKind::ALL.into_iter().enumerate() {
            let Some(amount) = usage.take(kind) else { continue };
            let accounts = self.minutes.entry(self.current_ms).or_default();
            let minute = accounts.entry(account.clone()).or_insert_with(|| {
                self.held += 1;
                Minute::default()
            });
            minute.amounts[place].add(amount);
            minute.state = State::Changed;
        }
    }

    /// All that was on its way is stored; of the minutes that have passed nothing more is needed.
    fn stored(&mut self) {
        self.failing = false;
        let current_ms = self.current_ms;
        self.minutes.retain(|at, accounts| {
            for minute in accounts.values_mut().filter(|minute| minute.state == State::Written) {
                minute.state = State::Stored;
            }
            if *at < current_ms {
                accounts.retain(|_, minute| minute.state != State::Stored);
            }
            !accounts.is_empty()
        });
        self.held = self.minutes.values().map(HashMap::len).sum();
    }

    fn drop_old(&mut self, now_ms: u64, minutes_max: usize) {
        let oldest_ms = minute_of(now_ms.saturating_sub(KEPT_MS));
        let mut lost = 0;
        while let Some(first) = self.minutes.first_entry()
            && (*first.key() < oldest_ms || (self.held > minutes_max && *first.key() < self.current_ms))
        {
            lost += usize::from(*first.key() >= oldest_ms);
            self.held -= first.remove().len();
        }
        if lost > 0 {
            tracing::warn!(minutes = lost, "metric rows were dropped from memory: over metric_minutes");
        }
    }
}

impl fmt::Debug for Meter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Meter").field("node_id", &self.node_id).finish_non_exhaustive()
    }
}

/// Where the rows of a page end that were read so far; they are all that there are when they are fewer than a page.
fn read_to(rows: &[MetricRow], end_ms: u64) -> u64 {
    let last = rows.last().filter(|_| rows.len() >= PAGE_ROWS);
    last.map_or(end_ms, |last| end_ms.min(last.minute_ms + MINUTE_MS))
}

fn minute_of(ms: u64) -> u64 {
    ms - ms % MINUTE_MS
}
