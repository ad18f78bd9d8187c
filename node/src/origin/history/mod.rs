//! What was published, kept for reading; and what must be remembered to refuse or recognise something later.

#[cfg(test)]
mod contract;
mod copy;
mod embedded;
mod position;
pub(super) mod record;
mod runs;
mod scylla;

use std::collections::HashMap;
use std::fmt;
use std::pin::Pin;
use std::sync::Arc;

use fanfare_proto::serial::Serial;

use super::disk::snapshot::DiskSnapshot;
use super::metering::MetricRow;
use crate::model::{
    AccountId, ChannelKey, FormerMember, KeptNonce, NoncePage, PresenceEvent, Published, Revocation, Stamp,
    StampedIds,
};

pub use crate::model::{IdScope, Nonce};
pub use copy::{CopyError, Progress, Source, copy};
pub use embedded::{Embedded, OpenError, Options, tables};
pub(super) use embedded::{STORE_FORMAT, ends_with_a_restore, is_stored_table, stopped_snapshot};
pub use position::{BadPosition, Position};
pub use scylla::{Connection, Scylla, ScyllaError, ScyllaOptions, apply_schema};

pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Called exactly once, on any thread.
pub type Done = Box<dyn FnOnce(Result<(), StoreError>) + Send>;

/// The answer to `find_ids`: one entry per id that was asked for, in that order.
pub type FoundIds = Box<dyn FnOnce(Result<Vec<Option<Stamp>>, StoreError>) + Send>;

/// The stored messages that the nodes have delivered.
pub trait Deliveries: Send + Sync + 'static {
    /// Resolves when all who are attached to the channel, on each node that can be reached, have the message with this stamp, or were told
    /// of a loss.
    fn delivered(&self, key: ChannelKey, stamp: Stamp) -> BoxFuture<'static, ()>;
}

/// A store of messages, of presence events and members, of client-given message ids, of nonces and of revocations. Every row is
/// scoped to its account.
///
/// No call blocks but `revoked_tokens`, `former_members`, `queues`, `sweep`, `snapshot` and `shutdown`. Queues are bounded; what does not fit is
/// answered `Busy` at once, in which case the callback runs before the call returns.
pub trait HistoryStore: Send + Sync + 'static {
    /// Other nodes have the same rows: what is claimed here is claimed for all of them.
    fn is_shared(&self) -> bool {
        false
    }

    /// Stores the messages under `retention_hours`, or only their client-given ids when that is `None`. It is never `Busy`: whoever
    /// appends asks [`HistoryStore::is_full`] right before, so that nothing is delivered that there is no room for.
    ///
    /// `done(Ok)` means that all of it survives a loss of power. Callbacks of one channel run in the order of the calls, except
    /// the answer to a publish that leaves nothing to store, which comes before the call returns.
    fn append(&self, published: Arc<Published>, retention_hours: Option<u32>, done: Done);

    /// Stores a presence event, as `append` does a message; both share one order of callbacks and one queue. `Busy` comes before
    /// the call returns. `None` leaves the event out. In the same write the member becomes what the event makes of it, for
    /// [`HistoryStore::former_members`].
    fn append_presence(&self, event: Arc<PresenceEvent>, retention_hours: Option<u32>, done: Done);

    /// Who was present, in any order, by the events stored so far. Blocks on the disk; to be called at start.
    fn former_members(&self) -> Result<Vec<FormerMember>, StoreError> {
        Ok(Vec::new())
    }

    /// True when more waits than is good; what would be appended is not begun then.
    fn is_full(&self) -> bool {
        false
    }

    /// What was handed over and is not answered yet.
    fn queued(&self) -> Queued {
        Queued::default()
    }

    /// Where client-given message ids were first stamped within the idempotency window.
    ///
    /// Callbacks of one channel and clientId run one after another in the order of the calls, also for an empty list; only
    /// `Busy` may come early. A lookup begins when the callback before it has returned, and counts what was handed to
    /// `append` by then: an id that is still being written is waited for, so that an answer always speaks of something
    /// stored. Nobody else waits for it.
    fn find_ids(&self, scope: IdScope, ids: Vec<Box<str>>, found: FoundIds);

    /// From now on an id is found only when its message was delivered, where the store is one that nodes share.
    fn set_deliveries(&self, _deliveries: Arc<dyn Deliveries>) {}

    /// Remembers ids under which another node has published, as [`HistoryStore::append`] does those of its messages. `Busy` comes before
    /// the call returns.
    fn keep_ids(&self, _scope: IdScope, _ids: StampedIds, done: Done) {
        done(Ok(()));
    }

    /// Resolves to true if nobody claimed this nonce within `nonce_memory_ms`; then the claim is durable.
    /// `Busy` also while as many are remembered as may be.
    fn claim_nonce(&self, nonce: Nonce) -> BoxFuture<'static, Result<bool, StoreError>>;

    /// The nonces that this store remembers, page by page: those after the place that the page before says.
    fn nonces(&self, _after: Option<Box<[u8]>>) -> BoxFuture<'static, Result<NoncePage, StoreError>> {
        Box::pin(std::future::ready(Ok(NoncePage::default())))
    }

    /// Resolves when these are remembered too, durably, for what is left of their time.
    fn keep_nonces(&self, _nonces: Vec<KeptNonce>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(std::future::ready(Ok(())))
    }

    /// Resolves when the revocation is durable. It is kept for `Limits::revocation_kept_ms` from its moment on; of those with the
    /// same key and clientId the latest counts.
    fn revoke_tokens(&self, revocation: Revocation) -> BoxFuture<'static, Result<(), StoreError>>;

    /// All revocations that are kept, in any order. Those of clientIds may be missing where a later one of their whole key
    /// says as much. Blocks on the disk; to be called at start.
    fn revoked_tokens(&self) -> Result<Vec<Revocation>, StoreError>;

    /// Says that the rows of this node are of `incarnation` from now on, and gives the runs that they were of before, the
    /// latest first; none where the store knows of none, and no more than a few. To be called before anything is appended, and
    /// again when what is said of the run changes.
    fn begin(
        &self,
        _incarnation: u64,
        _kept: Kept,
    ) -> BoxFuture<'static, Result<Vec<FormerRun>, StoreError>> {
        Box::pin(std::future::ready(Ok(Vec::new())))
    }

    /// What the runs of all nodes have said of which channels keep history, by incarnation, where they may have delivered under it within
    /// twice the resume window; of one whose policies have changed, each. It is what is stored after this call. `Off`: no other
    /// node is told.
    fn lately_kept(&self) -> BoxFuture<'static, Result<KeptBy, StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// What others are told there of the present run, for that long from now on. None: nothing.
    fn told_policies(&self) -> Option<u64> {
        None
    }

    /// Resolves when a `read` gives all that was handed to `append` before this call and did not fail.
    fn settled(&self) -> BoxFuture<'static, Result<(), StoreError>>;

    /// One page. It may hold fewer rows than `limit` although more follow: `next` alone says whether they do.
    fn read(&self, query: HistoryQuery) -> BoxFuture<'static, Result<HistoryPage, StoreError>>;

    /// Stores the rows as one, each in the place of an earlier one of its key. `Off`: the store keeps none.
    fn put_metrics(&self, _rows: Vec<MetricRow>) -> BoxFuture<'static, Result<(), StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// The rows of the account from the minute that begins at `from_ms` on, of every node and incarnation, oldest first. They end
    /// with the minute that brings them to `rows_max`: only then there may be more.
    fn read_metrics(
        &self,
        _account: AccountId,
        _from_ms: u64,
        _rows_max: usize,
    ) -> BoxFuture<'static, Result<Vec<MetricRow>, StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// The queues of all accounts whose revision is not the `known` one, a row for each. `Off`: the store keeps none. Blocks on the disk or
    /// the database, and costs little more than the revisions where few have changed.
    fn queues(&self, _known: &HashMap<AccountId, u64>) -> Result<Vec<StoredQueues>, StoreError> {
        Err(StoreError::Off)
    }

    /// Puts the row in the place of that of the revision before, or where there is none if its revision is 1. False: there is another
    /// revision, and nothing is changed.
    fn put_queues(&self, _row: StoredQueues) -> BoxFuture<'static, Result<bool, StoreError>> {
        Box::pin(std::future::ready(Err(StoreError::Off)))
    }

    /// Drops what has outlived its retention at `now_ms`. Blocks on the disk; to be called every few minutes.
    fn sweep(&self, now_ms: u64) -> Result<(), StoreError>;

    /// All rows at this moment, with all that was answered before; none: the store is not on the disk of this node. Blocks on the disk.
    fn snapshot(&self) -> Result<Option<DiskSnapshot>, StoreError> {
        Ok(None)
    }

    /// `Failed` while the store does not write: it cannot any more, it hangs, or it did not take the last rows.
    fn health(&self) -> Result<(), StoreError>;

    /// Writes what is queued, runs the callbacks and stops. Blocks. Later calls are answered `Failed`.
    fn shutdown(&self);
}

/// What waits for the disk or the database.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Queued {
    pub rows: usize,
    pub bytes: usize,
}

/// The queues of one account.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredQueues {
    pub account: AccountId,
    /// From 1, one more with each change.
    pub revision: u64,
    /// JSON; what it means is up to `origin::queues`.
    pub definitions: Box<str>,
}

/// Runs and their [`Kept::policies`].
pub type KeptBy = Vec<(u64, u64)>;

/// What a run says of the rows that it leaves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kept {
    /// Which channels keep history: it is only compared. [`Kept::UNLIKE_ALL`] is that of no run that can be followed.
    pub policies: u64,
    /// It has not been so all the time.
    pub has_changed: bool,
    /// Whatever it has delivered on these channels has its row, but for what was on its way when it ended.
    pub is_all: bool,
    /// It has outlasted the time in which clients of the runs before it may come back; these are forgotten.
    pub outlasts: bool,
}

impl Kept {
    /// Of a run whose channels did not all keep history, or not all the time.
    pub const UNLIKE_ALL: u64 = 0;
}

/// A run of this node before the present one. Times are epoch milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FormerRun {
    pub incarnation: u64,
    /// As it said last.
    pub kept: Kept,
    pub began_ms: u64,
    /// The timestamp of its last row, of any channel; before it began when it has none.
    pub last_ms: u64,
}

impl FormerRun {
    /// How long it ran at least.
    pub fn lasted_ms(&self) -> u64 {
        self.last_ms.saturating_sub(self.began_ms)
    }

    /// Runs, the latest first, each with the time that the node ran after its end and before the present run: at least so
    /// much of the resume window of its clients has passed.
    pub fn with_passed_ms(runs: &[Self]) -> impl Iterator<Item = (&Self, u64)> {
        runs.iter().scan(0, |passed_ms, run| {
            let before_ms = *passed_ms;
            *passed_ms += run.lasted_ms();
            Some((run, before_ms))
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

/// Which rows of a channel. Their positions are counted apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum RowKind {
    #[default]
    Messages,
    Presence,
}

/// Times are epoch milliseconds of the rows' timestamps.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct HistoryQuery {
    pub key: ChannelKey,
    pub kind: RowKind,
    pub limit: usize,
    /// A page ends with the row that brings its texts to this size, so that it has at least one.
    pub bytes_max: usize,
    /// Inclusive.
    pub start_ms: Option<u64>,
    /// Exclusive.
    pub end_ms: Option<u64>,
    /// The retention cut: rows before it are not given even if they are still there.
    pub oldest_ms: u64,
    /// Continues behind this row, in the same direction.
    pub cursor: Option<Position>,
    pub direction: Direction,
    /// Leaves out rows that an attach with this serial receives live: those of its incarnations beyond its
    /// sequences. Rows of other incarnations stay, since a serial forgets who has long been silent.
    pub until: Option<Serial>,
}

impl HistoryQuery {
    /// The oldest and the newest position that it may give, of which the cursor is not given again. None: no row can be between.
    fn ends(&self) -> Option<(Position, Position)> {
        let from_ms = self.oldest_ms.max(self.start_ms.unwrap_or(0));
        let to_ms = self.end_ms.map_or(Some(u64::MAX), |end_ms| end_ms.checked_sub(1))?;
        let mut oldest = Position { timestamp_ms: from_ms, sequence: 0, incarnation: 0 };
        let mut newest = Position { timestamp_ms: to_ms, sequence: u64::MAX, incarnation: u64::MAX };
        match (self.cursor, self.direction) {
            (Some(cursor), Direction::Backwards) => newest = newest.min(cursor),
            (Some(cursor), Direction::Forwards) => oldest = oldest.max(cursor),
            (None, _) => {}
        }
        (self.limit > 0 && oldest <= newest).then_some((oldest, newest))
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Row {
    pub position: Position,
    /// The history record: a JSON object, compact.
    pub json: Box<str>,
}

#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HistoryPage {
    pub rows: Vec<Row>,
    /// The cursor of the next page, if there may be one.
    pub next: Option<Position>,
}

/// Why the store did not do it. After `Failed` the outcome is unknown.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StoreError {
    /// A queue is full: try again.
    Busy,
    /// This node keeps no history.
    Off,
    /// The node stops, and the store has.
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
