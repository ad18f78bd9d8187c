//! Ids given by clients, claimed in the database, so that a message is stored once whichever node it comes to.
//!
//! Before a message is numbered its id is claimed for this run of the node. Before its row is written the claim is given its
//! stamp, unless another node has taken it over meanwhile. So whoever meets a claim can tell what became of it: with a stamp and a row
//! it is a repeat; without a row, once nobody can acknowledge that write any more, the claim is taken over and the place of the row
//! closed, in case the write is still on its way. The stamp stays, as one that was left, until there is another one: what comes to its place
//! does not count any more, and who could not close it does so later. Each take-over has an owner of its own, so that a stamp that was
//! given up and comes late finds the claim to be another's, also where it was this run's.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use parking_lot::Mutex;
use scylla::client::session::Session;
use scylla::serialize::row::SerializeRow;
use scylla::statement::prepared::PreparedStatement;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::Instant;

use super::buckets::{Bucket, day_of};
use super::values::{Applied, conditional, kind_value, natural, number, ordered, unordered, written_at};
use super::{Shared, failed};
use crate::model::{ChannelKey, ClientId, Stamp, random_bytes};
use crate::origin::history::{Deliveries, IdScope, Position, RowKind, StoreError};
use crate::tasks::OnStop;

/// How long another node may take between a claim and its stamp before the claim is taken over; half of the wait for the store where that is less.
const OTHERS_WAIT: Duration = Duration::from_secs(1);
/// Before the first look at what became of another node's claim. The pause doubles with each, since many may wait.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const LOOK_AGAIN_MAX: Duration = Duration::from_millis(400);
/// Requests of ids at the database at a time.
const UNDER_WAY_MAX: usize = 256;
/// A claim outlives the window by this, since clocks differ: by no more.
pub(super) const SLACK_MS: u64 = 60_000;
/// In the place of a partition: of a channel without history.
pub(super) const NO_ROW: i32 = -1;
/// And of a claim that was taken over: less the partition that its row was to be in.
const LEFT: i32 = -2;
/// The owner of a claim that was taken from an owner that cannot acknowledge its message any more, for whoever asks next.
const NOBODY: i64 = 0;
/// Claims whose row a node goes on to wait for when the question has its answer.
const LATE_MAX: usize = 1_024;
/// Ids of which something is remembered. A take-over that is forgotten before its stamp is written is another's then, and nothing is
/// stored; who forgets since when a row is missed waits for it anew.
const REMEMBERED_MAX: usize = 16_384;

/// An id, and what its message was numbered.
#[derive(Clone)]
pub(super) struct GivenId {
    pub(super) scope: IdScope,
    pub(super) id: Box<str>,
    pub(super) stamp: Stamp,
    pub(super) timestamp_ms: u64,
}

/// An id where it counts.
pub(super) type Name = (IdScope, Box<str>);

pub(super) struct GivenIds {
    /// What stands in a claim of this run that was nobody's before.
    owner: i64,
    /// What stands in claims that were taken over.
    taken: Mutex<Latest<i64>>,
    /// Claims with a stamp whose row is not there.
    missed: Mutex<Latest<Missed>>,
    late: Arc<Semaphore>,
    deliveries: OnceLock<Arc<dyn Deliveries>>,
    window_ms: u64,
    /// Ids whose write has not ended, with who waits for that.
    pending: Mutex<HashMap<Name, Pending>>,
    pub(super) permits: Semaphore,
}

/// A claim with a stamp, and since when this node misses its row.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Missed {
    owner: i64,
    stamped: Stamped,
    since: Instant,
}

/// Of the ids that were put last.
struct Latest<T> {
    known: HashMap<Name, T>,
    by_age: VecDeque<(Name, T)>,
}

impl<T> Default for Latest<T> {
    fn default() -> Self {
        Self { known: HashMap::new(), by_age: VecDeque::new() }
    }
}

impl<T: Copy + PartialEq> Latest<T> {
    fn put(&mut self, name: Name, value: T) {
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
struct Pending {
    writes: usize,
    waiting: Vec<oneshot::Sender<()>>,
}

impl GivenIds {
    pub(super) fn new(window_ms: u64) -> Self {
        let owner = i64::from_be_bytes(random_bytes());
        let permits = Semaphore::new(UNDER_WAY_MAX);
        Self {
            owner,
            taken: Mutex::default(),
            missed: Mutex::default(),
            late: Arc::new(Semaphore::new(LATE_MAX)),
            deliveries: OnceLock::new(),
            window_ms,
            pending: Mutex::default(),
            permits,
        }
    }

    /// They are about to be written.
    pub(super) fn begin(&self, given: &[GivenId]) {
        if given.is_empty() {
            return;
        }
        let mut pending = self.pending.lock();
        for GivenId { scope, id, .. } in given {
            pending.entry((scope.clone(), id.clone())).or_default().writes += 1;
        }
    }

    /// Their write has ended, whatever came of it.
    pub(super) fn end<'a>(&self, given: impl IntoIterator<Item = &'a GivenId>) {
        for GivenId { scope, id, .. } in given {
            let mut pending = self.pending.lock();
            let name = (scope.clone(), id.clone());
            let Some(entry) = pending.get_mut(&name) else { continue };
            entry.writes -= 1;
            if entry.writes == 0 {
                // Who waits is told by dropping the other end.
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

    /// Writes the stamp into the claim. `Failed` when the claim is another's by now, and nothing may be stored.
    pub(super) async fn stamp(
        &self,
        shared: &Shared,
        given: &GivenId,
        bucket: Option<Bucket>,
    ) -> Result<(), StoreError> {
        let GivenId { scope, id, stamp, timestamp_ms } = given;
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
            // There is no claim any more, or it was never asked for.
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
            // It may have been sent twice.
            if answer.applied || Claim::read(&answer).is_some_and(|claim| claim.is(owner, *stamp)) {
                return Ok(());
            }
        }
        Err(failed("the id of a message was taken over by another node"))
    }

    fn ttl_s(&self) -> i32 {
        i32::try_from((self.window_ms + SLACK_MS).div_ceil(1_000)).unwrap_or(i32::MAX)
    }

    /// What stands in the claim of this run.
    fn owner_of(&self, name: &Name) -> i64 {
        self.taken.lock().known.get(name).copied().unwrap_or(self.owner)
    }

    /// Since when this node knows of the stamp and has missed its row.
    fn missed_since(&self, name: &Name, stamp: Stamp) -> Option<Instant> {
        let missed = self.missed.lock();
        missed.known.get(name).filter(|missed| missed.stamped.stamp == stamp).map(|missed| missed.since)
    }

    fn miss(&self, name: &Name, owner: i64, stamped: Stamped) {
        if self.missed_since(name, stamped.stamp).is_none() {
            let since = Instant::now();
            self.missed.lock().put(name.clone(), Missed { owner, stamped, since });
        }
    }

    /// From now on an id counts as published when its message was delivered.
    pub(super) fn set_deliveries(&self, deliveries: Arc<dyn Deliveries>) {
        self.deliveries.set(deliveries).ok();
    }

    /// Goes on to wait for rows that these ids miss, where the question had to be answered before. A client asks the next node then,
    /// which would wait anew.
    pub(super) fn wait_on(shared: &Arc<Shared>, names: &[Name]) {
        for name in names {
            let missed = shared.ids.missed.lock().known.get(name).copied();
            let Some(missed) = missed else { continue };
            let Ok(permit) = Arc::clone(&shared.ids.late).try_acquire_owned() else { return };
            let (waiting, name) = (Arc::clone(shared), name.clone());
            shared.tasks.spawn("store ids", OnStop::Cancel, async move {
                if let Err(error) = waiting.ids.give_up(&waiting, &name, missed).await {
                    tracing::debug!(%error, "a claim of an id without a row was not given up");
                }
                drop(permit);
            });
        }
    }

    /// Takes the claim from its owner once that cannot acknowledge the message any more.
    async fn give_up(&self, shared: &Shared, name: &Name, missed: Missed) -> Result<(), StoreError> {
        tokio::time::sleep_until(missed.since + shared.options.wait).await;
        let (scope, _) = name;
        // The look is behind the last moment in which the row may be acknowledged.
        if !missed.stamped.is_stored(shared, &scope.key).await?
            && self.take(shared, name, (missed.owner, Some(&missed.stamped)), NOBODY).await?
        {
            missed.stamped.close(shared, &scope.key).await?;
        }
        Ok(())
    }

    /// Gives the claim of `former` to `owner`. False where it is another one by now.
    async fn take(
        &self,
        shared: &Shared,
        (scope, id): &Name,
        former: (i64, Option<&Stamped>),
        owner: i64,
    ) -> Result<bool, StoreError> {
        let database = shared.database();
        let (account, channel, key_name, client_id, id) = names(scope, id);
        let (former, stamped) = former;
        let of = stamped.map(|stamped| stamped.stamp);
        let (incarnation, sequence) =
            (of.map(|stamp| ordered(stamp.incarnation)), of.map(|stamp| number(stamp.sequence)));
        let left = stamped.map(|stamped| LEFT - stamped.bucket.unwrap_or(0));
        let values = (
            self.ttl_s(),
            owner,
            left,
            account,
            channel,
            key_name,
            client_id,
            id,
            former,
            incarnation,
            sequence,
        );
        Ok(self.conditional(&database.session, &database.statements.take_id, values).await?.applied)
    }

    /// None: it is claimed for this run.
    pub(super) async fn find(
        &self,
        shared: &Shared,
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
                self.taken.lock().known.remove(&name);
                return Ok(None);
            }
            let Some(former) = Claim::read(&answer) else { continue };
            let now_ms = shared.clock.now_ms();
            let is_known = |stamped: &&Stamped| stamped.is_within(self.window_ms, now_ms);
            let closes = former.stamped.as_ref().filter(is_known);
            let mut may_come = Instant::now() < patient_until;
            if let Some(stamped) = closes.filter(|stamped| !stamped.is_left) {
                // Before the look, which sees whatever was acknowledged by then.
                let missed = self.missed_since(&name, stamped.stamp);
                let is_over = missed.is_some_and(|since| since.elapsed() >= shared.options.wait)
                    || now_ms >= stamped.acknowledged_until_ms(shared);
                if stamped.is_stored(shared, &scope.key).await? {
                    if let Some(deliveries) = self.deliveries.get() {
                        deliveries.delivered(scope.key.clone(), stamped.stamp).await;
                    }
                    return Ok(Some(stamped.stamp));
                }
                self.miss(&name, former.owner, *stamped);
                may_come |= !is_over;
            }
            let is_free =
                [self.owner, self.owner_of(&name), NOBODY].into_iter().any(|owner| owner == former.owner);
            if may_come && !is_free {
                let patience = patient_until.saturating_duration_since(Instant::now());
                let pause = if patience.is_zero() { look_again } else { look_again.min(patience) };
                tokio::time::sleep(pause).await;
                look_again = (2 * look_again).min(LOOK_AGAIN_MAX);
                continue;
            }
            let owner = i64::from_be_bytes(random_bytes());
            // Before, since the answer may be lost.
            self.taken.lock().put(name.clone(), owner);
            if self.take(shared, &name, (former.owner, former.stamped.as_ref()), owner).await? {
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
    ) -> Result<Applied, StoreError> {
        // Never closed.
        let _permit = self.permits.acquire().await;
        conditional(session, statement, values).await
    }
}

/// What stands in the database of an id.
struct Claim {
    owner: i64,
    stamped: Option<Stamped>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
struct Stamped {
    stamp: Stamp,
    timestamp_ms: u64,
    /// None: the channel keeps no history.
    bucket: Option<i32>,
    /// The claim was taken over from who has stamped it.
    is_left: bool,
}

impl Claim {
    /// None: it has gone meanwhile.
    fn read(answer: &Applied) -> Option<Self> {
        let owner = answer.number("owner")?;
        let stamped = || {
            let noted = i32::try_from(answer.number("bucket")?).ok()?;
            let is_left = noted <= LEFT;
            let bucket = if is_left { LEFT - noted } else { noted };
            Some(Stamped {
                stamp: Stamp {
                    incarnation: unordered(answer.number("incarnation")?),
                    sequence: natural(answer.number("sequence")?),
                },
                timestamp_ms: natural(answer.number("timestamp_ms")?),
                bucket: Some(bucket).filter(|bucket| *bucket != NO_ROW),
                is_left,
            })
        };
        Some(Self { owner, stamped: stamped() })
    }

    fn is(&self, owner: i64, stamp: Stamp) -> bool {
        self.owner == owner && self.stamped.as_ref().is_some_and(|stamped| stamped.stamp == stamp)
    }
}

impl Stamped {
    /// By the clock of this node, however far it is from that of the one that has stamped it.
    /// The claim ends by the time of the database soon after the window. One that seems much older is of a node whose clock is
    /// behind, or this one's is ahead.
    fn is_within(&self, window_ms: u64, now_ms: u64) -> bool {
        let age_ms = now_ms.saturating_sub(self.timestamp_ms);
        age_ms <= window_ms || age_ms > window_ms + 2 * SLACK_MS
    }

    fn acknowledged_until_ms(&self, shared: &Shared) -> u64 {
        let wait_ms = u64::try_from(shared.options.wait.as_millis()).unwrap_or(u64::MAX);
        self.timestamp_ms.saturating_add(wait_ms).saturating_add(SLACK_MS)
    }

    fn position(&self) -> (i64, i64, i64) {
        let Stamp { incarnation, sequence } = self.stamp;
        super::values::position_values(Position { timestamp_ms: self.timestamp_ms, sequence, incarnation })
    }

    async fn is_stored(&self, shared: &Shared, key: &ChannelKey) -> Result<bool, StoreError> {
        let Some(bucket) = self.bucket else { return Ok(true) };
        let database = shared.database();
        let kind = kind_value(RowKind::Messages);
        let (timestamp_ms, sequence, incarnation) = self.position();
        let day = day_of(self.timestamp_ms);
        let (account, channel) = (key.account().as_str(), key.channel());
        let values = (account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation);
        // Never closed.
        let _permit = shared.ids.permits.acquire().await;
        let found = database.session.execute_unpaged(&database.statements.find_row, values).await;
        let rows = found.map_err(failed)?.into_rows_result().map_err(failed)?;
        Ok(rows.rows_num() > 0)
    }

    /// Nothing that is written to the place of the row by the former owner counts from now on.
    async fn close(&self, shared: &Shared, key: &ChannelKey) -> Result<(), StoreError> {
        let Some(bucket) = self.bucket else { return Ok(()) };
        let database = shared.database();
        let kind = kind_value(RowKind::Messages);
        let (timestamp_ms, sequence, incarnation) = self.position();
        let later = written_at(self.timestamp_ms) + 1;
        let day = day_of(self.timestamp_ms);
        let (account, channel) = (key.account().as_str(), key.channel());
        let values = (later, account, channel, kind, day, bucket, timestamp_ms, sequence, incarnation);
        // Never closed.
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
