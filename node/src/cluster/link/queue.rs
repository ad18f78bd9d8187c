//! Queue of one peer stream: items that wait, and batches on their way. No I/O: the stream pulls.

use std::collections::VecDeque;
use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use fanfare_proto::peer::v1;
use parking_lot::Mutex;
use tokio::sync::{Notify, oneshot};
use tokio::task::coop::{Unconstrained, unconstrained};
use tokio::time::Instant;

use crate::model::{ConnectionId, FORWARD_BYTES_MAX};

/// A batch is closed at either limit; a longer item goes alone.
pub(super) const BATCH_BYTES: usize = 256 * 1024;
const BATCH_ITEMS: usize = 4096;
/// An item within this time after a batch waits for more items, since each batch costs both nodes several system calls. On an idle stream
/// an item goes at once.
pub(super) const BUSY: Duration = Duration::from_millis(3);
/// The same limit after a batch of one item, as less frequent items would not be coalesced anyway.
pub(super) const BUSY_AFTER_ONE: Duration = Duration::from_millis(2);
/// Coalescing time, from the first item on. Timers of tokio have a resolution of 1 ms, so the actual wait is 1 to 2 ms.
pub(super) const COALESCE_FOR: Duration = Duration::from_micros(500);
/// Largest batch whose publishers are remembered, to detect that all of them have published again. Larger batches coalesce without that.
pub(super) const AWAITED_MAX: usize = 16;
/// Bytes that are sent and not acknowledged. Above this the stream pauses, and further items wait in its queue.
const SENT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Longest item. The configuration allows no longer forwarded publish; the peer accepts no frame beyond [`super::FRAME_BYTES_MAX`].
pub(super) const ITEM_BYTES_MAX: usize = FORWARD_BYTES_MAX;

/// Bounds of one stream's queue, sent items included. On overflow the whole queue is dropped: the stream is cut, its acks fail, and the
/// peer sees the gap when the stream is open again. Publishers do not block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueBounds {
    pub bytes: usize,
    pub items: usize,
}

impl Default for QueueBounds {
    fn default() -> Self {
        Self { bytes: 32 * 1024 * 1024, items: 262_144 }
    }
}

/// Future that resolves when the peer has received the item. The caller sets the deadline. Polling wakes no task, and wakers run without
/// the lock of the queue.
pub struct PeerAck(Option<Unconstrained<oneshot::Receiver<()>>>);

/// The item did not reach the peer, or it is unknown whether it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LostItem;

impl PeerAck {
    pub(in crate::cluster) fn lost() -> Self {
        Self(None)
    }

    /// True if the item was lost at once, for want of a link or of space.
    pub(in crate::cluster) fn is_lost(&self) -> bool {
        self.0.is_none()
    }
}

impl Future for PeerAck {
    type Output = Result<(), LostItem>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            None => Poll::Ready(Err(LostItem)),
            Some(receiver) => Pin::new(receiver).poll(cx).map_err(|_| LostItem),
        }
    }
}

#[derive(Debug)]
pub(in crate::cluster) struct PeerQueue {
    bounds: QueueBounds,
    state: Mutex<QueueState>,
    changed: Notify,
    hurried: Notify,
}

#[derive(Debug, Default)]
struct QueueState {
    waiting: VecDeque<QueuedPeerItem>,
    /// Unacknowledged batches in rising order of sequence, without a gap.
    sent: VecDeque<SentBatch>,
    /// Bytes of `waiting` and `sent` together. `sent_bytes` counts `sent` alone.
    bytes: usize,
    items: usize,
    sent_bytes: usize,
    /// The sequence of the last batch that was made or skipped.
    last: u64,
    /// Number of batches in `sent` that went over the current attempt.
    on_attempt: usize,
    /// The current attempt of the stream; older ones get nothing more.
    attempt: u64,
    /// True if a caller waits for a queued item, so that it must not be delayed.
    hurries: bool,
    /// Time of the last batch, and its number of items.
    made: Option<(Instant, usize)>,
    /// Publishers of the last batch that have not published again since all batches were acknowledged. None if the batch was large, or held
    /// anything but publishes.
    awaited: Option<Vec<ConnectionId>>,
}

#[derive(Debug)]
struct QueuedPeerItem {
    item: Bytes,
    /// The publishing connection, if the item is a publish.
    publisher: Option<ConnectionId>,
    since: Instant,
    ack: oneshot::Sender<()>,
}

#[derive(Debug)]
struct SentBatch {
    batch: v1::Batch,
    /// Time at which the first item of the batch was queued.
    since: Instant,
    acks: Vec<oneshot::Sender<()>>,
}

pub(in crate::cluster) enum BatchPull {
    Batch(v1::Batch),
    Nothing,
    /// The attempt is not the current one any more.
    Over,
}

impl PeerQueue {
    pub(in crate::cluster) fn new(bounds: QueueBounds) -> Self {
        Self { bounds, state: Mutex::default(), changed: Notify::new(), hurried: Notify::new() }
    }

    /// Queues an item. `publisher` is the publishing connection, if the item is a publish.
    pub(in crate::cluster) fn push(&self, item: Bytes, publisher: Option<ConnectionId>) -> PeerAck {
        let (ack, receiver) = oneshot::channel();
        let mut state = self.state.lock();
        let bytes = state.bytes + item.len();
        if item.len() > ITEM_BYTES_MAX || bytes > self.bounds.bytes || state.items >= self.bounds.items {
            let lost = state.lose_all();
            drop(state);
            drop(lost);
            metrics::counter!("fanfare_peer_queue_overflows_total").increment(1);
            self.changed.notify_one();
            return PeerAck::lost();
        }
        state.bytes = bytes;
        state.items += 1;
        state.waiting.push_back(QueuedPeerItem { item, publisher, since: Instant::now(), ack });
        let hurries = state.comes_back(publisher);
        state.hurries |= hurries;
        drop(state);
        self.changed.notify_one();
        if hurries {
            self.hurried.notify_waiters();
        }
        PeerAck(Some(unconstrained(receiver)))
    }

    /// Ends the coalescing of queued items.
    pub(super) fn hurry(&self) {
        let mut state = self.state.lock();
        state.hurries = !state.waiting.is_empty();
        drop(state);
        self.hurried.notify_waiters();
    }

    /// Resolves at that time, or earlier when a queued item is urgent.
    pub(super) async fn coalesced(&self, until: Instant) {
        let hurried = self.hurried.notified();
        tokio::pin!(hurried);
        // A notification from here on is not missed.
        hurried.as_mut().enable();
        if !self.state.lock().hurries {
            tokio::time::timeout_at(until, hurried).await.ok();
        }
    }

    /// The sequence with which a new attempt begins.
    pub(in crate::cluster) fn next(&self) -> u64 {
        let state = self.state.lock();
        state.sent.front().map_or(state.last + 1, |sent| sent.batch.sequence)
    }

    /// Opens an attempt of the stream. Batches that the peer has not received go first. Returns the number of the attempt.
    pub(in crate::cluster) fn open(&self, taken: u64) -> u64 {
        let mut state = self.state.lock();
        if taken > state.last {
            // The peer received these batches from an earlier queue of this incarnation. The rest of that queue is lost; a skipped sequence
            // tells the peer. The bound leaves room for a next sequence, whatever number the peer names.
            state.last = state.last.max(taken.min(u64::MAX / 2) + 1);
        }
        let confirmed = state.confirm(taken);
        state.on_attempt = 0;
        state.attempt += 1;
        let stream = state.attempt;
        drop(state);
        resolve_acks(confirmed);
        stream
    }

    pub(in crate::cluster) fn pull(&self, stream: u64) -> BatchPull {
        let mut state = self.state.lock();
        if state.attempt != stream {
            // The wake-up was meant for the current attempt.
            self.changed.notify_one();
            return BatchPull::Over;
        }
        if let Some(sent) = state.sent.get(state.on_attempt) {
            let batch = sent.batch.clone();
            state.on_attempt += 1;
            return BatchPull::Batch(batch);
        }
        if state.waiting.is_empty() || state.sent_bytes > SENT_BYTES_MAX {
            return BatchPull::Nothing;
        }
        BatchPull::Batch(state.make_batch())
    }

    /// End of the coalescing time of queued items. None if they go at once: the stream was idle, an item is urgent, the items fill a batch,
    /// or an earlier batch must be sent again first.
    pub(super) fn coalesces_until(&self) -> Option<Instant> {
        let state = self.state.lock();
        let (first, (made, items)) = (state.waiting.front()?.since, state.made?);
        let is_full = state.bytes - state.sent_bytes >= BATCH_BYTES || state.waiting.len() >= BATCH_ITEMS;
        let is_sent_again = state.on_attempt < state.sent.len();
        coalescing_end(first, made, items).filter(|_| !is_full && !is_sent_again && !state.hurries)
    }

    pub(in crate::cluster) fn confirm(&self, sequence: u64) {
        let confirmed = self.state.lock().confirm(sequence);
        resolve_acks(confirmed);
        // There may be space for another batch.
        self.changed.notify_one();
    }

    /// Resolves after a push, an ack or a loss since the last call.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Time that the oldest unacknowledged item has waited.
    pub(super) fn waits(&self) -> Duration {
        let state = self.state.lock();
        let first = state.sent.front().map(|sent| sent.since);
        let first = first.or_else(|| state.waiting.front().map(|waiting| waiting.since));
        first.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Number and bytes of unacknowledged items.
    pub(super) fn held(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.items, state.bytes)
    }

    #[cfg(test)]
    pub(in crate::cluster) fn held_bytes(&self) -> usize {
        self.held().1
    }
}

/// End of the coalescing time of an item queued at `first`, after a batch of `items` items made at `made`. None if the item goes at once.
pub(super) fn coalescing_end(first: Instant, made: Instant, items: usize) -> Option<Instant> {
    let busy = if items == 1 { BUSY_AFTER_ONE } else { BUSY };
    let is_busy = first.saturating_duration_since(made) <= busy;
    is_busy.then(|| first + COALESCE_FOR)
}

impl QueueState {
    /// True if all publishers of the last batch have published again, as publishers that wait for their acks do. No other publisher has
    /// come in that time, so further coalescing would gain nothing.
    fn comes_back(&mut self, publisher: Option<ConnectionId>) -> bool {
        let (true, Some(awaited), Some(publisher)) = (self.sent.is_empty(), &mut self.awaited, publisher)
        else {
            return false;
        };
        let Some(at) = awaited.iter().position(|one| *one == publisher) else { return false };
        awaited.swap_remove(at);
        awaited.is_empty()
    }

    fn make_batch(&mut self) -> v1::Batch {
        let (mut bytes, mut count) = (0, 0);
        for waiting in self.waiting.iter().take(BATCH_ITEMS) {
            if count > 0 && bytes + waiting.item.len() > BATCH_BYTES {
                break;
            }
            bytes += waiting.item.len();
            count += 1;
        }
        let mut items = BytesMut::with_capacity(bytes);
        let mut acks = Vec::with_capacity(count);
        let since = self.waiting.front().map_or_else(Instant::now, |first| first.since);
        let publishers = || self.waiting.iter().take(count).map(|waiting| waiting.publisher);
        self.awaited = (count <= AWAITED_MAX).then(|| publishers().collect()).flatten();
        for waiting in self.waiting.drain(..count) {
            items.extend_from_slice(&waiting.item);
            acks.push(waiting.ack);
        }
        self.hurries &= !self.waiting.is_empty();
        self.last += 1;
        self.made = Some((Instant::now(), count));
        self.sent_bytes += bytes;
        self.on_attempt += 1;
        let batch = v1::Batch { sequence: self.last, items: items.freeze() };
        self.sent.push_back(SentBatch { batch: batch.clone(), since, acks });
        batch
    }

    /// Removes acknowledged batches. The caller notifies their waiters after releasing the lock.
    fn confirm(&mut self, sequence: u64) -> Vec<SentBatch> {
        let mut confirmed = Vec::new();
        while self.sent.front().is_some_and(|sent| sent.batch.sequence <= sequence) {
            let Some(sent) = self.sent.pop_front() else { break };
            self.bytes -= sent.batch.items.len();
            self.sent_bytes -= sent.batch.items.len();
            self.items -= sent.acks.len();
            self.on_attempt = self.on_attempt.saturating_sub(1);
            confirmed.push(sent);
        }
        confirmed
    }

    /// Drops the whole queue and skips a sequence, from which the peer sees the loss. Returns the old queue: dropping it fails its acks,
    /// which must happen after releasing the lock.
    fn lose_all(&mut self) -> Self {
        let (last, stream) = (self.last + 1, self.attempt + 1);
        std::mem::replace(self, Self { last, attempt: stream, ..Self::default() })
    }
}

fn resolve_acks(confirmed: Vec<SentBatch>) {
    for ack in confirmed.into_iter().flat_map(|sent| sent.acks) {
        // An error means that the waiter has gone.
        let _ = ack.send(());
    }
}
