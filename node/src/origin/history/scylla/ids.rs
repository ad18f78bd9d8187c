//! Client-given ids, claimed in the database, so that a message is stored once whichever node receives it.
//!
//! Before a message is numbered, the node claims its id for its incarnation. Before the row is written, the claim gets the message's
//! stamp, unless another node has taken the claim over. A node that finds a claim of another owner decides by it:
//!
//! - With a stamp and a row, the message is a repeat.
//! - Without a row, once that write can no longer be acknowledged, the node takes the claim over and deletes the row, in case the write
//!   still arrives.
//!
//! A superseded stamp stays in the claim until a new one replaces it. So a late row does not count, and if the delete fails, a later
//! lookup repeats it. Each take-over has an owner of its own. So a late stamp that was given up finds another owner, even if the
//! incarnation is the same.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use scylla::client::session::Session;
use scylla::serialize::row::SerializeRow;
use scylla::statement::prepared::PreparedStatement;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use super::buckets::{HistoryBucket, day_of};
use super::values::{
    ConditionalResult, conditional, kind_value, natural, number, ordered, unordered, written_at,
};
use super::{ScyllaShared, failed};
use crate::model::{ChannelKey, ClientId, Stamp, random_bytes};
use crate::origin::history::{Deliveries, HistoryPosition, IdScope, RowKind, StoreError};
use crate::tasks::OnStop;

/// Time that another node may take between a claim and its stamp before the claim is taken over; at most half of the store's time limit.
const OTHERS_WAIT: Duration = Duration::from_secs(1);
/// Pause before the first check of another node's claim. It doubles with each check, since many lookups may wait.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const LOOK_AGAIN_MAX: Duration = Duration::from_millis(400);
/// Concurrent requests of ids at the database.
const UNDER_WAY_MAX: usize = 256;
/// Time that a claim outlives the window: the allowed clock difference.
pub(super) const SLACK_MS: u64 = 60_000;
/// Stored in place of a partition: the channel has no history.
pub(super) const NO_ROW: i32 = -1;
/// Stored in place of a partition: the claim was taken over. The partition of the superseded row is subtracted.
const SUPERSEDED: i32 = -2;
/// Owner of a claim that was taken from an owner that can no longer acknowledge its message. The next lookup may take it.
const UNOWNED: i64 = 0;
/// Claims whose missing row the node still waits for after the lookup was answered.
const LATE_MAX: usize = 1_024;
/// Ids of which something is remembered. If a take-over is forgotten before its stamp is written, its claim counts as another's and
/// nothing is stored. If the time of a missing row is forgotten, the wait starts again.
const REMEMBERED_MAX: usize = 16_384;

/// An id with the stamp of its message.
#[derive(Clone)]
pub(super) struct StampedClientId {
    pub(super) scope: IdScope,
    pub(super) id: Box<str>,
    pub(super) stamp: Stamp,
    pub(super) timestamp_ms: u64,
}

/// An id with the scope in which it is unique.
pub(super) type ScopedId = (IdScope, Box<str>);

pub(super) struct ScyllaIdClaims {
    /// Owner in claims that this incarnation made first.
    owner: i64,
    /// Owners in claims that this incarnation has taken over.
    taken_over: Mutex<BoundedIdMap<i64>>,
    /// Claims with a stamp whose row is missing.
    missed: Mutex<BoundedIdMap<MissingRow>>,
    late: Arc<Semaphore>,
    deliveries: OnceLock<Arc<dyn Deliveries>>,
    window_ms: u64,
    /// Ids whose write has not ended, with the lookups that wait for them.
    pending: Mutex<HashMap<ScopedId, ScyllaPendingId>>,
    pub(super) permits: Semaphore,
}

/// A claim with a stamp, and the time since which this node has missed its row.
#[derive(Debug, Clone, Copy, PartialEq)]
struct MissingRow {
    owner: i64,
    stamped: ClaimStamp,
    since: Instant,
}

/// Map with the most recently added ids.
struct BoundedIdMap<T> {
    known: HashMap<ScopedId, T>,
    by_age: VecDeque<(ScopedId, T)>,
}

impl<T> Default for BoundedIdMap<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), by_age: VecDeque::new() }
    }
}

impl<T: Copy + PartialEq> BoundedIdMap<T> {
    fn put(&mut self, name: ScopedId, value: T) {
        self.known.insert(name.clone(), value);
        self.by_age.push_back((name, value));
        if self.by_age.len() > REMEMBERED_MAX
            && let Some((name, value)) = self.by_age.pop_front()
            && self.known.get(&name) == Some(&value)
        {
            self.known.remove(&name);
        }
    }
}

#[derive(Default)]
struct ScyllaPendingId {
    writes: usize,
    waiting: Vec<oneshot::Sender<()>>,
}

impl ScyllaIdClaims {
    pub(super) fn new(window_ms: u64) -> Self {
        let owner = i64::from_be_bytes(random_bytes());
        let permits = Semaphore::new(UNDER_WAY_MAX);
        Self {
            owner,
            taken_over: Mutex::default(),
            missed: Mutex::default(),
            late: Arc::new(Semaphore::new(LATE_MAX)),
            deliveries: OnceLock::new(),
            window_ms,
            pending: Mutex::default(),
            permits,
        }
    }

    /// Records that the ids are about to be written.
    pub(super) fn begin(&self, given: &[StampedClientId]) {
        if given.is_empty() {
            return;
        }
        let mut pending = self.pending.lock();
        for StampedClientId { scope, id, .. } in given {
            pending.entry((scope.clone(), id.clone())).or_default().writes += 1;
        }
    }

    /// Records that the write of the ids has ended, with any outcome.
    pub(super) fn end<'a>(&self, given: impl IntoIterator<Item = &'a StampedClientId>) {
        for StampedClientId { scope, id, .. } in given {
            let mut pending = self.pending.lock();
            let name = (scope.clone(), id.clone());
            let Some(entry) = pending.get_mut(&name) else { continue };
            entry.writes -= 1;
            if entry.writes == 0 {
                // Dropping the sender wakes the waiting lookups.
                pending.remove(&name);
            }
        }
    }

    async fn wait_for(&self, scope: &IdScope, id: &str) {
        loop {
            let ended = {
                let mut pending = self.pending.lock();
                let Some(entry) = pending.get_mut(&(scope.clone(), Box::from(id))) else { return };
                let (waiting, ended) = oneshot::channel();
                entry.waiting.push(waiting);
                ended
            };
            ended.await.ok();
        }
    }

    /// Writes the stamp into the claim. `Failed` if another owner has the claim by now, in which case nothing may be stored.
    pub(super) async fn stamp(
        &self,
        shared: &ScyllaShared,
        given: &StampedClientId,
        bucket: Option<HistoryBucket>,
    ) -> Result<(), StoreError> {
        let StampedClientId { scope, id, stamp, timestamp_ms } = given;
        let database = shared.database();
        let (session, statements) = (&database.session, &database.statements);
        let (names, owner) = (names(scope, id), self.owner_of(&(scope.clone(), id.clone())));
        let stamped = (ordered(stamp.incarnation), number(stamp.sequence), number(*timestamp_ms));
        let bucket = bucket.map_or(NO_ROW, |bucket| bucket.number);
        let values = (
            self.ttl_s(),
            owner,
            stamped.0,
            stamped.1,
            stamped.2,
            bucket,
            names.0,
            names.1,
            names.2,
            names.3,
            names.4,
            owner,
        );
        let answer = self.conditional(session, &statements.stamp_id, values).await?;
        if answer.applied {
            return Ok(());
        }
        if answer.number("owner").is_none() {
            // The claim has expired, or was never made.
            let values = (
                names.0,
                names.1,
                names.2,
                names.3,
                names.4,
                owner,
                stamped.0,
                stamped.1,
                stamped.2,
                bucket,
                self.ttl_s(),
            );
            let answer = self.conditional(session, &statements.insert_id, values).await?;
            // The request may have been sent twice.
            if answer.applied || StoredIdClaim::read(&answer).is_some_and(|claim| claim.is(owner, *stamp)) {
                return Ok(());
            }
        }
        Err(failed("the id of a message was taken over by another node"))
    }

    fn ttl_s(&self) -> i32 {
        i32::try_from((self.window_ms + SLACK_MS).div_ceil(1_000)).unwrap_or(i32::MAX)
    }

    /// Owner in this incarnation's claim of the id.
    fn owner_of(&self, name: &ScopedId) -> i64 {
        self.taken_over.lock().known.get(name).copied().unwrap_or(self.owner)
    }

    /// Time since which this node knows the stamp and has missed its row.
    fn missed_since(&self, name: &ScopedId, stamp: Stamp) -> Option<Instant> {
        let missed = self.missed.lock();
        missed.known.get(name).filter(|missed| missed.stamped.stamp == stamp).map(|missed| missed.since)
    }

    fn record_missing_row(&self, name: &ScopedId, owner: i64, stamped: ClaimStamp) {
        if self.missed_since(name, stamped.stamp).is_none() {
            let since = Instant::now();
            self.missed.lock().put(name.clone(), MissingRow { owner, stamped, since });
        }
    }

    /// Sets the delivery tracker: from then on an id counts as published once its message was delivered.
    pub(super) fn set_deliveries(&self, deliveries: Arc<dyn Deliveries>) {
        self.deliveries.set(deliveries).ok();
    }

    /// Keeps waiting for missing rows after the lookup had to be answered. Otherwise the client retries at another node, which would wait
    /// again from the beginning.
    pub(super) fn keep_waiting(shared: &Arc<ScyllaShared>, names: &[ScopedId]) {
        for name in names {
            let missed = shared.ids.missed.lock().known.get(name).copied();
            let Some(missed) = missed else { continue };
            let Ok(permit) = Arc::clone(&shared.ids.late).try_acquire_owned() else { return };
            let (waiting, name) = (Arc::clone(shared), name.clone());
            shared.tasks.spawn("store ids", OnStop::Cancel, async move {
                if let Err(error) = waiting.ids.release_without_row(&waiting, &name, missed).await {
                    tracing::debug!(%error, "stale message id claim not deleted");
                }
                drop(permit);
            });
        }
    }

    /// Takes the claim from its owner once the owner can no longer acknowledge the message.
    async fn release_without_row(
        &self,
        shared: &ScyllaShared,
        name: &ScopedId,
        missed: MissingRow,
    ) -> Result<(), StoreError> {
        tokio::time::sleep_until(missed.since + shared.options.wait).await;
        let (scope, _) = name;
        // This check is after the last moment at which the row may be acknowledged.
        if !missed.stamped.is_stored(shared, &scope.key).await?
            && self.take_over(shared, name, (missed.owner, Some(&missed.stamped)), UNOWNED).await?
        {
            missed.stamped.close(shared, &scope.key).await?;
        }
        Ok(())
    }

    /// Moves the claim of `previous` to `owner`. False if the claim has changed by now.
    async fn take_over(
        &self,
        shared: &ScyllaShared,
        (scope, id): &ScopedId,
        previous: (i64, Option<&ClaimStamp>),
        owner: i64,
    ) -> Result<bool, StoreError> {
        let database = shared.database();
        let (account, channel, key_name, client_id, id) = names(scope, id);
        let (previous, stamped) = previous;
        let of = stamped.map(|stamped| stamped.stamp);
        let (incarnation, sequence) =
            (of.map(|stamp| ordered(stamp.incarnation)), of.map(|stamp| number(stamp.sequence)));
        let left = stamped.map(|stamped| SUPERSEDED - stamped.bucket.unwrap_or(0));
        let values = (
            self.ttl_s(),
            owner,
            left,
            account,
            channel,
            key_name,
            client_id,
            id,
            previous,
            incarnation,
            sequence,
        );
        Ok(self.conditional(&database.session, &database.statements.take_id, values).await?.applied)
    }

    /// Returns the stamp of the id, or `None` if it is now claimed for this incarnation.
    pub(super) async fn find(
        &self,
        shared: &ScyllaShared,
        scope: &IdScope,
        id: &str,
    ) -> Result<Option<Stamp>, StoreError> {
        self.wait_for(scope, id).await;
        let name = (scope.clone(), Box::from(id));
        let patient_until = Instant::now() + OTHERS_WAIT.min(shared.options.wait / 2);
        let mut look_again = LOOK_AGAIN;
        loop {
            let database = shared.database();
            let (session, statements) = (&database.session, &database.statements);
            let (account, channel, key_name, client_id, id) = names(scope, id);
            let values = (account, channel, key_name, client_id, id, self.owner, self.ttl_s());
            let answer = self.conditional(session, &statements.claim_id, values).await?;
            if answer.applied {
                self.taken_over.lock().known.remove(&name);
                return Ok(None);
            }
            let Some(previous) = StoredIdClaim::read(&answer) else { continue };
            let now_ms = shared.clock.now_ms();
            let is_known = |stamped: &&ClaimStamp| stamped.is_within(self.window_ms, now_ms);
            let closes = previous.stamped.as_ref().filter(is_known);
            let mut may_come = Instant::now() < patient_until;
            if let Some(stamped) = closes.filter(|stamped| !stamped.is_superseded) {
                // Read before the check, which sees every row that was acknowledged by then.
                let missed = self.missed_since(&name, stamped.stamp);
                let has_expired = missed.is_some_and(|since| since.elapsed() >= shared.options.wait)
                    || now_ms >= stamped.acknowledged_until_ms(shared);
                if stamped.is_stored(shared, &scope.key).await? {
                    if let Some(deliveries) = self.deliveries.get() {
                        deliveries.wait_delivered(scope.key.clone(), stamped.stamp).await;
                    }
                    return Ok(Some(stamped.stamp));
                }
                self.record_missing_row(&name, previous.owner, *stamped);
                may_come |= !has_expired;
            }
            let is_free =
                [self.owner, self.owner_of(&name), UNOWNED].into_iter().any(|owner| owner == previous.owner);
            if may_come && !is_free {
                let patience = patient_until.saturating_duration_since(Instant::now());
                let pause = if patience.is_zero() { look_again } else { look_again.min(patience) };
                tokio::time::sleep(pause).await;
                look_again = (2 * look_again).min(LOOK_AGAIN_MAX);
                continue;
            }
            let owner = i64::from_be_bytes(random_bytes());
            // Recorded before the request, since its answer may be lost.
            self.taken_over.lock().put(name.clone(), owner);
            if self.take_over(shared, &name, (previous.owner, previous.stamped.as_ref()), owner).await? {
                if let Some(closes) = closes {
                    closes.close(shared, &scope.key).await?;
                }
                return Ok(None);
            }
        }
    }

    async fn conditional(
        &self,
        session: &Session,
        statement: &PreparedStatement,
        values: impl SerializeRow,
    ) -> Result<ConditionalResult, StoreError> {
        // The semaphore is never closed.
        let _permit = self.permits.acquire().await;
        conditional(session, statement, values).await
    }
}

/// Claim of an id in the database.
struct StoredIdClaim {
    owner: i64,
    stamped: Option<ClaimStamp>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct ClaimStamp {
    stamp: Stamp,
    timestamp_ms: u64,
    /// Partition of the row; `None` if the channel keeps no history.
    bucket: Option<i32>,
    /// The claim was taken over from the owner of this stamp.
    is_superseded: bool,
}

impl StoredIdClaim {
    /// Returns `None` if the claim has expired meanwhile.
    fn read(answer: &ConditionalResult) -> Option<Self> {
        let owner = answer.number("owner")?;
        let stamped = || {
            let stored_bucket = i32::try_from(answer.number("bucket")?).ok()?;
            let is_left = stored_bucket <= SUPERSEDED;
            let bucket = if is_left { SUPERSEDED - stored_bucket } else { stored_bucket };
            Some(ClaimStamp {
                stamp: Stamp {
                    incarnation: unordered(answer.number("incarnation")?),
                    sequence: natural(answer.number("sequence")?),
                },
                timestamp_ms: natural(answer.number("timestamp_ms")?),
                bucket: Some(bucket).filter(|bucket| *bucket != NO_ROW),
                is_superseded: is_left,
            })
        };
        Some(Self { owner, stamped: stamped() })
    }

    fn is(&self, owner: i64, stamp: Stamp) -> bool {
        self.owner == owner && self.stamped.as_ref().is_some_and(|stamped| stamped.stamp == stamp)
    }
}

impl ClaimStamp {
    /// Returns whether the stamp is within the window by this node's clock, which may differ from that of the stamping node.
    ///
    /// The claim expires by the database's time soon after the window. A stamp that looks much older counts too: its node's clock is
    /// behind, or this node's clock is ahead.
    fn is_within(&self, window_ms: u64, now_ms: u64) -> bool {
        let age_ms = now_ms.saturating_sub(self.timestamp_ms);
        age_ms <= window_ms || age_ms > window_ms + 2 * SLACK_MS
    }

    fn acknowledged_until_ms(&self, shared: &ScyllaShared) -> u64 {
        let wait_ms = u64::try_from(shared.options.wait.as_millis()).unwrap_or(u64::MAX);
        self.timestamp_ms.saturating_add(wait_ms).saturating_add(SLACK_MS)
    }

    fn position(&self) -> (i64, i64, i64) {
        let Stamp { incarnation, sequence } = self.stamp;
        super::values::position_values(HistoryPosition {
            timestamp_ms: self.timestamp_ms,
            sequence,
            incarnation,
        })
    }

    async fn is_stored(&self, shared: &ScyllaShared, key: &ChannelKey) -> Result<bool, StoreError> {
        let Some(bucket) = self.bucket else { return Ok(true) };
        let database = shared.database();
        let kind = kind_value(RowKind::Messages);
        let (timestamp_ms, sequence, incarnation) = self.position();
        let day = day_of(self.timestamp_ms);
        let (account, channel) = (key.account().as_str(), key.channel());
        let values = (account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation);
        // The semaphore is never closed.
        let _permit = shared.ids.permits.acquire().await;
        let found = database.session.execute_unpaged(&database.statements.find_row, values).await;
        let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
        Ok(rows.rows_num() > 0)
    }

    /// Deletes the row of this stamp, so that a late write by the previous owner does not count.
    async fn close(&self, shared: &ScyllaShared, key: &ChannelKey) -> Result<(), StoreError> {
        let Some(bucket) = self.bucket else { return Ok(()) };
        let database = shared.database();
        let kind = kind_value(RowKind::Messages);
        let (timestamp_ms, sequence, incarnation) = self.position();
        let later = written_at(self.timestamp_ms) + 1;
        let day = day_of(self.timestamp_ms);
        let (account, channel) = (key.account().as_str(), key.channel());
        let values = (later, account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation);
        // The semaphore is never closed.
        let _permit = shared.ids.permits.acquire().await;
        let closed = database.session.execute_unpaged(&database.statements.delete_row, values).await;
        closed.map(drop).map_err(failed)
    }
}

pub(super) fn names<'a>(scope: &'a IdScope, id: &'a str) -> (&'a str, &'a str, &'a str, &'a str, &'a str) {
    // No client id is empty, so an empty one says that there is none.
    let client_id = scope.client_id.as_ref().map_or("", ClientId::as_str);
    (scope.key.account().as_str(), scope.key.channel(), &scope.key_name, client_id, id)
}
