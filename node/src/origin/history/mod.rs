//! The history store: published messages, and the ids, nonces and revocations that must be remembered to refuse or recognise later
//! requests.

#[cfg(test)]
mod contract;
mod copy;
mod embedded;
mod incarnations;
mod position;
pub(super) mod record;
mod scylla;

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::disk::snapshot::DiskSnapshot;
use super::metering::MetricRow;
use crate::model::{
    AccountId, ChannelKey, ClaimedNonce, NoncePage, PresenceEvent, PublishedMessages, RestoredMember,
    Revocation, Stamp, StampedIds,
};

pub use crate::model::{IdScope, Nonce};
pub use copy::{CopyError, CopyProgress, CopySource, copy};
pub use embedded::{EmbeddedOptions, EmbeddedStore, StoreOpenError, tables};
pub(super) use embedded::{STORE_FORMAT, is_dropped_by_restore, is_stored_table, stopped_snapshot};
pub use position::{HistoryPosition, InvalidCursor};
pub use scylla::{ScyllaConnection, ScyllaError, ScyllaOptions, ScyllaStore, apply_schema};

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Callback with the outcome of a write, called exactly once, on any thread.
pub type StoreCallback = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// Callback with the answer to `find_ids`: one entry for each requested id, in the same order.
pub type IdLookupCallback = Box<dyn FnOnce(Result<Vec<Option<Stamp>>, StoreError>) + Send>;

/// Deliveries of stored messages on all nodes.
pub trait Deliveries: Send + Sync + 'static {
    /// Resolves when all clients attached to the channel, on each reachable node, have the message with this stamp, or were told of a
    /// continuity loss.
    fn wait_delivered(&self, key: ChannelKey, stamp: Stamp) -> BoxFuture<'static, ()>;
}

/// A store of messages, presence events and members, client-given message ids, nonces and revocations. Every row is scoped to its account.
///
/// Only `revoked_tokens`, `stored_members`, `queues`, `sweep`, `snapshot` and `shutdown` block. Queues are bounded; a call that does not
/// fit is answered `Busy` at once, in which case the callback runs before the call returns.
pub trait HistoryStore: Send + Sync + 'static {
    /// Returns whether other nodes share these rows. A claim made here then holds for all of them.
    fn is_shared(&self) -> bool {
        false
    }

    /// Stores the messages under `retention_hours`, or only their client-given ids if that is `None`. Never answers `Busy`: the caller
    /// checks [`HistoryStore::is_full`] right before, so that no message is delivered that the queue has no space for.
    ///
    /// `done(Ok)` means that all rows survive a loss of power. Callbacks of one channel run in the order of the calls, except the answer
    /// to a publish that leaves nothing to store, which comes before the call returns.
    fn append(&self, published: Arc<PublishedMessages>, retention_hours: Option<u32>, done: StoreCallback);

    /// Stores a presence event, as `append` does a message; both share one order of callbacks and one queue. `Busy` comes before the call
    /// returns. With `None` the event is not stored. The same write updates the member's row, for [`HistoryStore::stored_members`].
    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: StoreCallback);

    /// Reads the members that were present according to the stored events, in any order. Blocks on the disk; to be called at start.
    fn stored_members(&self) -> Result<Vec<RestoredMember>, StoreError> {
        Ok(Vec::new())
    }

    /// Returns whether the write queue is nearly full; new publishes are then refused.
    fn is_full(&self) -> bool {
        false
    }

    /// Load of the write queue: rows and bytes that are not answered yet.
    fn queued(&self) -> StoreQueueUsage {
        StoreQueueUsage::default()
    }

    /// Finds the stamps under which client-given message ids were first published within the idempotency window.
    ///
    /// Callbacks of one channel and clientId run one after another in the order of the calls, also for an empty list; only `Busy` may come
    /// early. A lookup begins when the callback before it has returned, and counts everything handed to `append` by then. It waits for an
    /// id that is still being written, so that an answer always refers to a stored message. Other lookups do not wait for that id.
    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: IdLookupCallback);

    /// Sets the delivery tracker. From then on a shared store finds an id only if its message was delivered.
    fn set_deliveries(&self, _deliveries: Arc<dyn Deliveries>) {}

    /// Stores ids under which another node has published, as [`HistoryStore::append`] does those of its messages. `Busy` comes before the
    /// call returns.
    fn keep_ids(&self, _scope: IdScope, _ids: StampedIds, done: StoreCallback) {
        done(Ok(()));
    }

    /// Claims a nonce. Resolves to true if it was not claimed within `nonce_memory_ms`; the claim is then durable. Answers `Busy` also
    /// while the store remembers as many nonces as it may.
    fn claim_nonce(&self, nonce: Nonce) -> BoxFuture<'static, Result<bool, StoreError>>;

    /// Reads one page of the remembered nonces: those after the key that the page before returned.
    fn nonces(&self, _after: Option<Box<[u8]>>) -> BoxFuture<'static, Result<NoncePage, StoreError>> {
        Box::pin(std::future::ready(Ok(NoncePage::default())))
    }

    /// Stores nonces that another node has claimed, durably, for the rest of their time.
    fn keep_nonces(&self, _nonces: Vec<ClaimedNonce>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Stores a revocation durably. It is kept for `Limits::revocation_kept_ms` from its own time on; of several with the same key and
    /// clientId the latest counts.
    fn revoke_tokens(&self, revocation: Revocation) -> BoxFuture<'static, Result<(), StoreError>>;

    /// Reads all revocations that are kept, in any order. The revocation of a clientId may be missing if a later one of its whole key
    /// includes it. Blocks on the disk; to be called at start.
    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError>;

    /// Records that the rows of this node belong to `incarnation` from now on. Returns the previous incarnations, the latest first; none
    /// if the store knows none, and never more than a few. To be called before the first append, and again whenever the coverage of the
    /// incarnation changes.
    fn begin_incarnation(
        &self,
        _incarnation: u64,
        _kept: HistoryCoverage,
    ) -> BoxFuture<'static, Result<Vec<PreviousIncarnation>, StoreError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// Reads the history policies that the incarnations of all nodes have announced, as far as they may have delivered under them within
    /// twice the resume window. An incarnation whose policies have changed has an entry for each. The read begins after this call. `Off`
    /// if no other node shares the store.
    fn recent_policies(&self) -> BoxFuture<'static, Result<IncarnationPolicies, StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// History policies that other nodes read for the present incarnation, for twice the resume window from now on. `None` if nothing is
    /// announced.
    fn announced_policies(&self) -> Option<u64> {
        None
    }

    /// Resolves when a `read` returns everything that was handed to `append` before this call and did not fail.
    fn flush(&self) -> BoxFuture<'static, Result<(), StoreError>>;

    /// Reads one page. It may hold fewer rows than `limit` although more follow: only `next` says whether they do.
    fn read(&self, query: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>>;

    /// Stores the rows atomically; each replaces an earlier one of its key. `Off` if the store keeps no metrics.
    fn put_metrics(&self, _rows: Vec<MetricRow>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// Reads the metric rows of the account from the minute that begins at `from_ms` on, of every node and incarnation, oldest first. They
    /// end with the minute that brings them to `rows_max`: only then there may be more.
    fn read_metrics(
        &self,
        _account: AccountId,
        _from_ms: u64,
        _rows_max: usize,
    ) -> BoxFuture<'static, Result<Vec<MetricRow>, StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// Reads the queues of all accounts whose revision differs from the `known` one, a row for each. `Off` if the store keeps none. Blocks
    /// on the disk or the database; costs little more than the revisions if few have changed.
    fn queues(&self, _known: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        Err(StoreError::Off)
    }

    /// Replaces the row of the previous revision, or inserts it if its revision is 1. Resolves to false, without a change, if the stored
    /// revision is another one.
    fn put_queues(&self, _row: StoredQueues) -> BoxFuture<'static, Result<bool, StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// Drops rows that have outlived their retention at `now_ms`. Blocks on the disk; to be called every few minutes.
    fn sweep(&self, now_ms: u64) -> Result<(), StoreError>;

    /// Takes a snapshot of all rows, including everything answered before; `None` if the store is not on the disk of this node. Blocks on
    /// the disk.
    fn snapshot(&self) -> Result<Option<DiskSnapshot>, StoreError> {
        Ok(None)
    }

    /// Returns `Failed` while the store does not write: it is broken, it hangs, or it refused the last rows.
    fn health(&self) -> Result<(), StoreError>;

    /// Writes the queued rows, runs the callbacks and stops. Blocks. Later calls are answered `Failed`.
    fn shutdown(&self);
}

/// Rows and bytes that wait for the disk or the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StoreQueueUsage {
    pub rows: usize,
    pub bytes: usize,
}

/// The queues of one account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredQueues {
    pub account: AccountId,
    /// Revision of the definitions: 1 at first, increased by 1 with each change.
    pub revision: u64,
    /// JSON, interpreted by `origin::queues`.
    pub definitions: Box<str>,
}

/// Incarnations and their [`HistoryCoverage::policies`].
pub type IncarnationPolicies = Vec<(u64, u64)>;

/// Coverage of an incarnation's history: which of its deliveries have stored rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct HistoryCoverage {
    /// Hash of the policies that say which channels keep history, only compared for equality. [`HistoryCoverage::UNMATCHED_POLICIES`]
    /// never matches, so clients of such an incarnation are not resumed from the store.
    pub policies: u64,
    /// The policies have changed during the incarnation.
    pub has_changed: bool,
    /// Every message delivered on these channels has its row, except for those on their way when the incarnation ended.
    pub is_complete: bool,
    /// The incarnation has lasted longer than clients of earlier incarnations may wait to resume; those incarnations are forgotten.
    pub outlasts_resume_window: bool,
}

impl HistoryCoverage {
    /// Policies of an incarnation whose channels did not all keep history, or not all the time.
    pub const UNMATCHED_POLICIES: u64 = 0;
}

/// A previous incarnation of this node. Times are epoch milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PreviousIncarnation {
    pub incarnation: u64,
    /// Last coverage that the incarnation recorded.
    pub coverage: HistoryCoverage,
    pub began_ms: u64,
    /// Timestamp of its last row in any channel; before `began_ms` if it has none.
    pub last_ms: u64,
}

impl PreviousIncarnation {
    /// Minimum lifetime of the incarnation, in milliseconds.
    pub fn lasted_ms(&self) -> u64 {
        self.last_ms.saturating_sub(self.began_ms)
    }

    /// Iterates over incarnations, the latest first, each with the time that the node ran after its end and before the present
    /// incarnation. At least this much of the resume window of its clients has passed.
    pub fn with_passed_ms(previous: &[Self]) -> impl Iterator<Item = (&Self, u64)> {
        previous.iter().scan(0, |passed_ms, incarnation| {
            let before_ms = *passed_ms;
            *passed_ms += incarnation.lasted_ms();
            Some((incarnation, before_ms))
        })
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Direction {
    /// Newest first.
    #[default]
    Backwards,
    Forwards,
}

/// Kind of a channel's rows. Each kind has positions of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RowKind {
    #[default]
    Messages,
    Presence,
}

/// A query for one page of history. Times are epoch milliseconds of the rows' timestamps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HistoryQuery {
    pub key: ChannelKey,
    pub kind: RowKind,
    pub limit: usize,
    /// Size of texts in bytes that ends a page; the row that reaches it is included, so a page has at least one row.
    pub bytes_max: usize,
    /// First timestamp, inclusive.
    pub start_ms: Option<u64>,
    /// Last timestamp, exclusive.
    pub end_ms: Option<u64>,
    /// Retention limit: older rows are not returned even if they are still stored.
    pub oldest_ms: u64,
    /// Continues after this row, in the same direction.
    pub cursor: Option<HistoryPosition>,
    pub direction: Direction,
    /// Leaves out rows that an attach with this serial receives live: those of its incarnations beyond its sequences. Rows of other
    /// incarnations are included, since a serial drops incarnations that have long been silent.
    pub until: Option<Serial>,
}

impl HistoryQuery {
    /// Returns the oldest and the newest possible position of a result; the cursor itself is not returned again. `None` if no row can
    /// match.
    fn ends(&self) -> Option<(HistoryPosition, HistoryPosition)> {
        let from_ms = self.oldest_ms.max(self.start_ms.unwrap_or(0));
        let to_ms = self.end_ms.map_or(Some(u64::MAX), |end_ms| end_ms.checked_sub(1))?;
        let mut oldest = HistoryPosition { timestamp_ms: from_ms, sequence: 0, incarnation: 0 };
        let mut newest = HistoryPosition { timestamp_ms: to_ms, sequence: u64::MAX, incarnation: u64::MAX };
        match (self.cursor, self.direction) {
            (Some(cursor), Direction::Backwards) => newest = newest.min(cursor),
            (Some(cursor), Direction::Forwards) => oldest = oldest.max(cursor),
            (None, _) => {}
        }
        (self.limit > 0 && oldest <= newest).then_some((oldest, newest))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HistoryRow {
    pub position: HistoryPosition,
    /// The history record as compact JSON.
    pub json: Box<str>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HistoryPage {
    pub rows: Vec<HistoryRow>,
    /// The cursor of the next page, if there may be one.
    pub next: Option<HistoryPosition>,
}

/// Error of a store call. After `Failed` the outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreError {
    /// A queue is full; the call can be retried.
    Busy,
    /// This node keeps no history.
    Off,
    /// The node stops and has shut down the store.
    ShutDown,
    Failed(String),
}

impl StoreError {
    pub(super) fn failed(error: impl fmt::Display) -> Self {
        Self::Failed(error.to_string())
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Busy => f.write_str("store is busy"),
            Self::Off => f.write_str("history is off on this node"),
            Self::ShutDown => f.write_str("the store has been shut down"),
            Self::Failed(text) => write!(f, "store failed: {text}"),
        }
    }
}

impl std::error::Error for StoreError {}
