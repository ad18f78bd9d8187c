//! What is to be stored of each channel, in its order: one write at a time, with everything that waits.
//!
//! So what was acknowledged of a channel when a read begins is a beginning of what was published, however many channels are written
//! at once.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::Instant;

use super::rows::{self, Content};
use super::{Shared, failed};
use crate::model::ChannelKey;
use crate::origin::history::{Done, Queued, StoreError};
use crate::telemetry::StoreOperation;

/// Writes that the database has at a time.
const UNDER_WAY_MAX: usize = 256;
/// Publishes of a channel in one write.
const GROUP_MAX: usize = 256;
const GROUP_BYTES_MAX: usize = 512 * 1024;

/// After a write of so many publishes the next one waits for those who publish again once they are answered: else they would be a
/// write of their own behind that of the others, and so on, with half as much in each.
const GATHERS_FROM: usize = 8;
/// Until no more come in so long, or for this part of the time that the write took.
const GATHER_LOOK: Duration = Duration::from_millis(1);
const GATHER_PART: u32 = 8;
const GATHER_MAX: Duration = Duration::from_millis(5);

pub(super) struct Writes {
    lanes: Mutex<HashMap<ChannelKey, VecDeque<Append>>>,
    rows_max: usize,
    bytes_max: usize,
    rows: AtomicUsize,
    bytes: AtomicUsize,
    order: Mutex<Order>,
    pub(super) permits: Semaphore,
}

struct Append {
    content: Content,
    owed: Owed,
}

/// An answer that is due by then.
struct Owed {
    done: Done,
    number: u64,
    deadline: Instant,
    rows: usize,
    bytes: usize,
}

/// Which appends are not answered yet, and who waits for those before some number.
#[derive(Default)]
struct Order {
    next: u64,
    open: BTreeSet<u64>,
    waiting: BTreeMap<u64, Vec<oneshot::Sender<()>>>,
}

/// What a lane waits for before its next write.
struct Gathering {
    until: Instant,
    wanted: usize,
    waiting: Option<usize>,
}

impl Gathering {
    /// Behind a write of so many publishes that took so long.
    fn behind(written: usize, took: Duration, now: Instant) -> Self {
        let wanted = if written < GATHERS_FROM { 0 } else { written };
        Self { until: now + (took / GATHER_PART).min(GATHER_MAX), wanted, waiting: None }
    }

    /// So many wait now: whether it is to look once more.
    fn goes_on(&mut self, waiting: usize, now: Instant) -> bool {
        let is_growing = self.waiting.replace(waiting).is_none_or(|before| before < waiting);
        waiting < self.wanted && is_growing && now + GATHER_LOOK <= self.until
    }
}

impl Writes {
    pub(super) fn new(rows_max: usize, bytes_max: usize) -> Self {
        Self {
            lanes: Mutex::default(),
            rows_max,
            bytes_max,
            rows: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            order: Mutex::default(),
            permits: Semaphore::new(UNDER_WAY_MAX),
        }
    }

    /// Less than an eighth of the room is left. What is begun nevertheless is begun at one moment, so it is bounded with that.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.rows.load(Ordering::Relaxed) > self.rows_max / 8 * 7
            || self.bytes.load(Ordering::Relaxed) > self.bytes_max / 8 * 7
    }

    pub(super) fn queued(&self) -> Queued {
        let [rows, bytes] = [&self.rows, &self.bytes].map(|count| count.load(Ordering::Relaxed));
        Queued { rows, bytes }
    }

    pub(super) fn is_full(&self) -> bool {
        self.rows.load(Ordering::Relaxed) >= self.rows_max
            || self.bytes.load(Ordering::Relaxed) >= self.bytes_max
    }

    /// True when the channel had nothing waiting, so that somebody has to [`run`] it.
    fn push(&self, key: &ChannelKey, content: Content, wait: Duration, done: Done) -> bool {
        let (rows, bytes) = (content.rows_count(), content.bytes);
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut lanes = self.lanes.lock();
        let number = self.order.lock().open();
        let owed = Owed { done, number, deadline: Instant::now() + wait, rows, bytes };
        let append = Append { content, owed };
        if let Some(lane) = lanes.get_mut(key) {
            lane.push_back(append);
            return false;
        }
        lanes.insert(key.clone(), VecDeque::from([append]));
        true
    }

    /// What waits, as much as makes one write. None ends the lane.
    fn next_group(&self, key: &ChannelKey) -> Option<(Vec<Content>, VecDeque<Owed>)> {
        let mut lanes = self.lanes.lock();
        let lane = lanes.get_mut(key)?;
        let (mut contents, mut owed, mut bytes) = (Vec::new(), VecDeque::new(), 0);
        while let Some(next) = lane.front() {
            bytes += next.content.bytes;
            if !contents.is_empty() && (bytes > GROUP_BYTES_MAX || contents.len() == GROUP_MAX) {
                break;
            }
            let Some(next) = lane.pop_front() else { break };
            contents.push(next.content);
            owed.push_back(next.owed);
        }
        if contents.is_empty() {
            lanes.remove(key);
            return None;
        }
        Some((contents, owed))
    }

    /// When the first of those is due that are not begun.
    fn next_deadline(&self, key: &ChannelKey) -> Option<Instant> {
        self.lanes.lock().get(key)?.front().map(|append| append.owed.deadline)
    }

    fn waiting(&self, key: &ChannelKey) -> usize {
        self.lanes.lock().get(key).map_or(0, VecDeque::len)
    }

    fn take_expired(&self, key: &ChannelKey, now: Instant) -> VecDeque<Append> {
        let mut lanes = self.lanes.lock();
        let Some(lane) = lanes.get_mut(key) else { return VecDeque::new() };
        let expired = lane.iter().take_while(|append| append.owed.deadline <= now).count();
        lane.drain(..expired).collect()
    }

    /// The number is to be closed when nothing of it is under way any more.
    fn answer(&self, owed: Owed, result: Result<(), StoreError>) -> u64 {
        let Owed { done, number, rows, bytes, .. } = owed;
        self.rows.fetch_sub(rows, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            tracing::error!("a callback of the store panicked");
        }
        number
    }

    fn close(&self, number: u64) {
        self.order.lock().close(number);
    }

    /// Resolves when all that was handed over before is stored, or was refused and is not under way any more.
    pub(super) async fn settled(&self) {
        let waited = {
            let mut order = self.order.lock();
            if order.open.is_empty() {
                return;
            }
            let (settled, waited) = oneshot::channel();
            let next = order.next;
            order.waiting.entry(next).or_default().push(settled);
            waited
        };
        // It is dropped with the store at the latest, when nothing is open any more.
        waited.await.ok();
    }
}

impl Order {
    fn open(&mut self) -> u64 {
        let number = self.next;
        self.next += 1;
        self.open.insert(number);
        number
    }

    fn close(&mut self, number: u64) {
        self.open.remove(&number);
        let first = self.open.first().copied().unwrap_or(self.next);
        while let Some(waiting) = self.waiting.first_entry()
            && *waiting.key() <= first
        {
            // Who has gone needs no word.
            for settled in waiting.remove() {
                let _ = settled.send(());
            }
        }
    }
}

pub(super) fn begin(shared: &Arc<Shared>, key: &ChannelKey, content: Content, done: Done) {
    shared.ids.begin(content.given());
    if shared.writes.push(key, content, shared.options.wait, done) {
        shared.spawn("store lane", run(Arc::clone(shared), key.clone()));
    }
}

/// Until nothing of the channel waits.
async fn run(shared: Arc<Shared>, key: ChannelKey) {
    loop {
        // First, so that what nobody waits for any more when its turn comes is not written.
        let permit = permit(&shared, &key).await;
        let Some((contents, mut owed)) = shared.writes.next_group(&key) else { return };
        let mut results = vec![Ok(()); contents.len()];
        let mut expired = Vec::new();
        let (begun, written) = (Instant::now(), contents.len());
        let ended = {
            let write = AssertUnwindSafe(rows::write(&shared, &key, &contents, &mut results)).catch_unwind();
            tokio::pin!(write);
            loop {
                let due = owed.front().map(|owed| owed.deadline);
                let due = due.or_else(|| shared.writes.next_deadline(&key));
                // Nobody waits: a look now and then whether somebody does.
                let due = due.unwrap_or_else(|| Instant::now() + shared.options.wait);
                tokio::select! {
                    ended = &mut write => break ended,
                    () = tokio::time::sleep_until(due) => expired.extend(expire(&shared, &key, &mut owed)),
                }
            }
        };
        if ended.is_err() {
            tracing::error!("a write of the store panicked");
            results.fill(Err(failed("the write panicked")));
        }
        drop(permit);
        shared.times.ended(StoreOperation::Append, begun.into_std());
        // What came too late may have been taken over since, so nobody is told that it is there.
        expired.extend(expire(&shared, &key, &mut owed));
        shared.ids.end(contents.iter().flat_map(Content::given));
        let refused = results.iter().find(|result| result.is_err()).cloned();
        shared.health.wrote(&refused.unwrap_or(Ok(())));
        let skipped = expired.len();
        expired.into_iter().for_each(|number| shared.writes.close(number));
        for (owed, result) in owed.into_iter().zip(results.into_iter().skip(skipped)) {
            let number = shared.writes.answer(owed, result);
            shared.writes.close(number);
        }
        let mut gathering = Gathering::behind(written, begun.elapsed(), Instant::now());
        while gathering.goes_on(shared.writes.waiting(&key), Instant::now()) {
            tokio::time::sleep(GATHER_LOOK).await;
        }
    }
}

/// To write at all. What is due meanwhile is answered.
async fn permit<'a>(shared: &'a Shared, key: &ChannelKey) -> Option<SemaphorePermit<'a>> {
    let permit = shared.writes.permits.acquire();
    tokio::pin!(permit);
    loop {
        let due = shared.writes.next_deadline(key).unwrap_or_else(|| Instant::now() + shared.options.wait);
        tokio::select! {
            // Never closed.
            permit = &mut permit => return permit.ok(),
            () = tokio::time::sleep_until(due) => drop(expire(shared, key, &mut VecDeque::new())),
        }
    }
}

/// Answers what is due and not known; what of it is of the present write, which goes on.
fn expire(shared: &Shared, key: &ChannelKey, owed: &mut VecDeque<Owed>) -> Vec<u64> {
    let (now, wait) = (Instant::now(), shared.options.wait);
    let unknown = || Err(failed(format_args!("the database did not answer for {wait:?}")));
    let mut expired = Vec::new();
    while owed.front().is_some_and(|owed| owed.deadline <= now)
        && let Some(owed) = owed.pop_front()
    {
        expired.push(shared.writes.answer(owed, unknown()));
    }
    for append in shared.writes.take_expired(key, now) {
        shared.ids.end(append.content.given());
        let number = shared.writes.answer(append.owed, unknown());
        shared.writes.close(number);
    }
    expired
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_busy_lane_waits_for_those_who_are_about_to_come() {
        let begun = Instant::now();
        // How many wait at each look, a millisecond apart, and at which it writes.
        let looks = |written, took_ms, waiting: &[usize]| {
            let mut gathering = Gathering::behind(written, Duration::from_millis(took_ms), begun);
            let mut at = waiting.iter().zip((0..).map(|look| begun + GATHER_LOOK * look));
            at.position(|(waiting, now)| !gathering.goes_on(*waiting, now))
        };
        assert_eq!(looks(GATHERS_FROM - 1, 1_000, &[3, 9]), Some(0), "it is not busy");
        assert_eq!(looks(64, 7, &[3, 9]), Some(0), "the database is fast");
        assert_eq!(looks(64, 1_000, &[0, 0, 0]), Some(1), "nobody comes");
        assert_eq!(looks(64, 1_000, &[3, 20, 64, 70]), Some(2), "all have come");
        assert_eq!(looks(64, 24, &[3, 20, 30, 40, 50]), Some(3), "its part of the time");
        assert_eq!(looks(64, 1_000, &[3, 4, 5, 6, 7, 8, 9]), Some(5), "and no longer than that");
    }
}
