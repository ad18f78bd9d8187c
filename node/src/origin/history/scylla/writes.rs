//! Write queues of channels: each channel has one write at a time, with everything that waits.
//!
//! So the acknowledged messages of a channel at the beginning of a read are always a contiguous first part of its messages, however many
//! channels are written concurrently.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use futures_util::FutureExt as _;
use parking_lot::Mutex;
use tokio::sync::{Semaphore, SemaphorePermit, oneshot};
use tokio::time::Instant;

use super::rows::{self, AppendContent};
use super::{ScyllaShared, failed};
use crate::model::ChannelKey;
use crate::origin::history::{StoreCallback, StoreError, StoreQueueUsage};
use crate::telemetry::StoreOperation;

/// Concurrent writes at the database.
const UNDER_WAY_MAX: usize = 256;
/// Publishes of a channel in one write.
const GROUP_MAX: usize = 256;
const GROUP_BYTES_MAX: usize = 512 * 1024;

/// Size of a write, in publishes, from which the next one waits for publishers that publish again once they are answered. Without the wait
/// these would form a second, alternating write, and each write would have half the rows.
const COALESCE_FROM: usize = 8;
/// Interval at which the wait checks for further publishes. The wait ends when no more arrive, or after `1 / COALESCE_PART` of the
/// duration of the last write, at most `COALESCE_MAX`.
const COALESCE_LOOK: Duration = Duration::from_millis(1);
const COALESCE_PART: u32 = 8;
const COALESCE_MAX: Duration = Duration::from_millis(5);

pub(super) struct WriteQueues {
    queues: Mutex<HashMap<ChannelKey, VecDeque<QueuedAppend>>>,
    rows_max: usize,
    bytes_max: usize,
    rows: AtomicUsize,
    bytes: AtomicUsize,
    order: Mutex<AppendOrder>,
    pub(super) permits: Semaphore,
}

struct QueuedAppend {
    content: AppendContent,
    pending: PendingCallback,
}

/// Callback of an append, with the time by which it must be answered.
struct PendingCallback {
    done: StoreCallback,
    number: u64,
    deadline: Instant,
    rows: usize,
    bytes: usize,
}

/// Appends without an answer, and callers that wait for all of them before a number.
#[derive(Default)]
struct AppendOrder {
    next: u64,
    open: BTreeSet<u64>,
    waiting: BTreeMap<u64, Vec<oneshot::Sender<()>>>,
}

/// Wait of a queue before its next write.
struct CoalescingWait {
    until: Instant,
    expected: usize,
    waiting: Option<usize>,
}

impl CoalescingWait {
    /// Starts the wait after a write of so many publishes that took so long.
    fn behind(written: usize, took: Duration, now: Instant) -> Self {
        let expected = if written < COALESCE_FROM { 0 } else { written };
        Self { until: now + (took / COALESCE_PART).min(COALESCE_MAX), expected, waiting: None }
    }

    /// Returns whether to check again, given the number of publishes that wait now.
    fn continues(&mut self, waiting: usize, now: Instant) -> bool {
        let is_growing = self.waiting.replace(waiting).is_none_or(|before| before < waiting);
        waiting < self.expected && is_growing && now + COALESCE_LOOK <= self.until
    }
}

impl WriteQueues {
    pub(super) fn new(rows_max: usize, bytes_max: usize) -> Self {
        Self {
            queues: Mutex::default(),
            rows_max,
            bytes_max,
            rows: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            order: Mutex::default(),
            permits: Semaphore::new(UNDER_WAY_MAX),
        }
    }

    /// Returns whether more than seven eighths of a bound are used. Publishes that are admitted at one moment may still exceed the bound,
    /// but only by their number.
    pub(super) fn is_nearly_full(&self) -> bool {
        self.rows.load(Ordering::Relaxed) > self.rows_max / 8 * 7
            || self.bytes.load(Ordering::Relaxed) > self.bytes_max / 8 * 7
    }

    pub(super) fn queued(&self) -> StoreQueueUsage {
        let [rows, bytes] = [&self.rows, &self.bytes].map(|count| count.load(Ordering::Relaxed));
        StoreQueueUsage { rows, bytes }
    }

    pub(super) fn is_full(&self) -> bool {
        self.rows.load(Ordering::Relaxed) >= self.rows_max
            || self.bytes.load(Ordering::Relaxed) >= self.bytes_max
    }

    /// Adds an append. Returns true if the channel had none waiting, so that the caller must [`run`] it.
    fn push(&self, key: &ChannelKey, content: AppendContent, wait: Duration, done: StoreCallback) -> bool {
        let (rows, bytes) = (content.rows_count(), content.bytes);
        self.rows.fetch_add(rows, Ordering::Relaxed);
        self.bytes.fetch_add(bytes, Ordering::Relaxed);
        let mut queues = self.queues.lock();
        let number = self.order.lock().open();
        let pending = PendingCallback { done, number, deadline: Instant::now() + wait, rows, bytes };
        let append = QueuedAppend { content, pending };
        if let Some(queue) = queues.get_mut(key) {
            queue.push_back(append);
            return false;
        }
        queues.insert(key.clone(), VecDeque::from([append]));
        true
    }

    /// Takes the waiting appends of one write. `None` removes the queue.
    fn next_group(&self, key: &ChannelKey) -> Option<(Vec<AppendContent>, VecDeque<PendingCallback>)> {
        let mut queues = self.queues.lock();
        let queue = queues.get_mut(key)?;
        let (mut contents, mut pending, mut bytes) = (Vec::new(), VecDeque::new(), 0);
        while let Some(next) = queue.front() {
            bytes += next.content.bytes;
            if !contents.is_empty() && (bytes > GROUP_BYTES_MAX || contents.len() == GROUP_MAX) {
                break;
            }
            let Some(next) = queue.pop_front() else { break };
            contents.push(next.content);
            pending.push_back(next.pending);
        }
        if contents.is_empty() {
            queues.remove(key);
            return None;
        }
        Some((contents, pending))
    }

    /// Deadline of the first append that is not being written.
    fn next_deadline(&self, key: &ChannelKey) -> Option<Instant> {
        self.queues.lock().get(key)?.front().map(|append| append.pending.deadline)
    }

    fn waiting(&self, key: &ChannelKey) -> usize {
        self.queues.lock().get(key).map_or(0, VecDeque::len)
    }

    fn take_expired(&self, key: &ChannelKey, now: Instant) -> VecDeque<QueuedAppend> {
        let mut queues = self.queues.lock();
        let Some(queue) = queues.get_mut(key) else { return VecDeque::new() };
        let expired = queue.iter().take_while(|append| append.pending.deadline <= now).count();
        queue.drain(..expired).collect()
    }

    /// Answers the append; returns its number, to be closed once its write has ended.
    fn answer(&self, pending: PendingCallback, result: Result<(), StoreError>) -> u64 {
        let PendingCallback { done, number, rows, bytes, .. } = pending;
        self.rows.fetch_sub(rows, Ordering::Relaxed);
        self.bytes.fetch_sub(bytes, Ordering::Relaxed);
        if catch_unwind(AssertUnwindSafe(|| done(result))).is_err() {
            tracing::error!("store callback panicked");
        }
        number
    }

    fn close(&self, number: u64) {
        self.order.lock().close(number);
    }

    /// Resolves when all appends handed over before are stored, or were refused and have no write in progress.
    pub(super) async fn flush(&self) {
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
        // The sender is dropped with the store at the latest, when no append is open any more.
        waited.await.ok();
    }
}

impl AppendOrder {
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
            // A caller may have dropped its receiver.
            for settled in waiting.remove() {
                let _ = settled.send(());
            }
        }
    }
}

pub(super) fn begin(
    shared: &Arc<ScyllaShared>,
    key: &ChannelKey,
    content: AppendContent,
    done: StoreCallback,
) {
    shared.ids.begin(content.client_ids());
    if shared.writes.push(key, content, shared.options.wait, done) {
        shared.spawn("store queue", run(Arc::clone(shared), key.clone()));
    }
}

/// Writes the channel's appends until none waits.
async fn run(shared: Arc<ScyllaShared>, key: ChannelKey) {
    loop {
        // The permit comes first, so that appends which expire before their turn are not written.
        let permit = permit(&shared, &key).await;
        let Some((contents, mut pending)) = shared.writes.next_group(&key) else { return };
        let mut results = vec![Ok(()); contents.len()];
        let mut expired = Vec::new();
        let (begun, written) = (Instant::now(), contents.len());
        let ended = {
            let write = AssertUnwindSafe(rows::write(&shared, &key, &contents, &mut results)).catch_unwind();
            tokio::pin!(write);
            loop {
                let due = pending.front().map(|pending| pending.deadline);
                let due = due.or_else(|| shared.writes.next_deadline(&key));
                // With no append waiting, the deadlines are checked again after the store's time limit.
                let due = due.unwrap_or_else(|| Instant::now() + shared.options.wait);
                tokio::select! {
                    ended = &mut write => break ended,
                    () = tokio::time::sleep_until(due) => expired.extend(expire(&shared, &key, &mut pending)),
                }
            }
        };
        if ended.is_err() {
            tracing::error!("store write panicked");
            results.fill(Err(failed("the write panicked")));
        }
        drop(permit);
        shared.times.ended(StoreOperation::Append, begun.into_std());
        // Another node may have taken over the ids of expired appends since, so these are never reported as stored.
        expired.extend(expire(&shared, &key, &mut pending));
        shared.ids.end(contents.iter().flat_map(AppendContent::client_ids));
        let refused = results.iter().find(|result| result.is_err()).cloned();
        shared.health.wrote(&refused.unwrap_or(Ok(())));
        let skipped = expired.len();
        expired.into_iter().for_each(|number| shared.writes.close(number));
        for (pending, result) in pending.into_iter().zip(results.into_iter().skip(skipped)) {
            let number = shared.writes.answer(pending, result);
            shared.writes.close(number);
        }
        let mut coalescing = CoalescingWait::behind(written, begun.elapsed(), Instant::now());
        while coalescing.continues(shared.writes.waiting(&key), Instant::now()) {
            tokio::time::sleep(COALESCE_LOOK).await;
        }
    }
}

/// Waits for the permit to write, and answers appends that expire meanwhile.
async fn permit<'a>(shared: &'a ScyllaShared, key: &ChannelKey) -> Option<SemaphorePermit<'a>> {
    let permit = shared.writes.permits.acquire();
    tokio::pin!(permit);
    loop {
        let due = shared.writes.next_deadline(key).unwrap_or_else(|| Instant::now() + shared.options.wait);
        tokio::select! {
            // The semaphore is never closed.
            permit = &mut permit => return permit.ok(),
            () = tokio::time::sleep_until(due) => drop(expire(shared, key, &mut VecDeque::new())),
        }
    }
}

/// Answers expired appends, whose outcome is unknown. Returns the numbers of those in the present write, which goes on.
fn expire(shared: &ScyllaShared, key: &ChannelKey, pending: &mut VecDeque<PendingCallback>) -> Vec<u64> {
    let (now, wait) = (Instant::now(), shared.options.wait);
    let unknown = || Err(failed(format_args!("the database did not answer for {wait:?}")));
    let mut expired = Vec::new();
    while pending.front().is_some_and(|pending| pending.deadline <= now)
        && let Some(pending) = pending.pop_front()
    {
        expired.push(shared.writes.answer(pending, unknown()));
    }
    for append in shared.writes.take_expired(key, now) {
        shared.ids.end(append.content.client_ids());
        let number = shared.writes.answer(append.pending, unknown());
        shared.writes.close(number);
    }
    expired
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn busy_write_queue_waits_for_rows_about_to_come() {
        let begun = Instant::now();
        // The publishes that wait at each check, a millisecond apart, and the check at which the write begins.
        let looks = |written, took_ms, waiting: &[usize]| {
            let mut coalescing = CoalescingWait::behind(written, Duration::from_millis(took_ms), begun);
            let mut at = waiting.iter().zip((0..).map(|look| begun + COALESCE_LOOK * look));
            at.position(|(waiting, now)| !coalescing.continues(*waiting, now))
        };
        assert_eq!(looks(COALESCE_FROM - 1, 1_000, &[3, 9]), Some(0), "it is not busy");
        assert_eq!(looks(64, 7, &[3, 9]), Some(0), "the database is fast");
        assert_eq!(looks(64, 1_000, &[0, 0, 0]), Some(1), "nobody comes");
        assert_eq!(looks(64, 1_000, &[3, 20, 64, 70]), Some(2), "all have come");
        assert_eq!(looks(64, 24, &[3, 20, 30, 40, 50]), Some(3), "its part of the time");
        assert_eq!(looks(64, 1_000, &[3, 4, 5, 6, 7, 8, 9]), Some(5), "and no longer than that");
    }
}
