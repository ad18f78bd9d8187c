//! What waits for one lane and what is on its way over it. No I/O: the lane's stream pulls.

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

/// A batch is closed at either; an item that is longer goes alone.
pub(super) const BATCH_BYTES: usize = 256 * 1024;
const BATCH_ITEMS: usize = 4096;
/// What comes first within so long after a batch gathers before it goes, since each batch costs both nodes several calls of the kernel;
/// at rest it goes at once.
pub(super) const BUSY: Duration = Duration::from_millis(3);
/// The same after a batch of one item: what comes less often would gather nothing.
pub(super) const BUSY_AFTER_ONE: Duration = Duration::from_millis(2);
/// How long, from the first that comes. A wait of tokio ends with a whole millisecond of its clock, so this is one or two of them.
pub(super) const GATHER: Duration = Duration::from_micros(500);
/// Of whose publishes it is kept who comes back, in a batch of no more: of larger ones enough gathers by itself.
pub(super) const AWAITED_MAX: usize = 16;
/// Sent and not confirmed: when it is full the lane waits, and what follows waits in its queue.
const SENT_BYTES_MAX: usize = 4 * 1024 * 1024;
/// No publish that a node forwards is longer, by its configuration; the peer takes no frame beyond [`super::FRAME_BYTES_MAX`].
pub(super) const ITEM_BYTES_MAX: usize = FORWARD_BYTES_MAX;

/// What one lane may hold, sent or not. When it is full all of it is lost: the lane is cut, its receipts fail, the
/// peer sees the gap when the lane is back, and whoever publishes has not waited.
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

/// Resolves when the peer has taken the item. Its caller sets the deadline. It wakes nobody while it is polled, and no lock of the
/// queue is held when it wakes somebody.
pub struct Receipt(Option<Unconstrained<oneshot::Receiver<()>>>);

/// The item did not reach the peer, or nobody knows whether it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Lost;

impl Receipt {
    pub(in crate::cluster) fn lost() -> Self {
        Self(None)
    }

    /// There was nobody to send it to.
    pub(in crate::cluster) fn is_lost(&self) -> bool {
        self.0.is_none()
    }
}

impl Future for Receipt {
    type Output = Result<(), Lost>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match &mut self.0 {
            None => Poll::Ready(Err(Lost)),
            Some(receiver) => Pin::new(receiver).poll(cx).map_err(|_| Lost),
        }
    }
}

#[derive(Debug)]
pub(in crate::cluster) struct Queue {
    bounds: QueueBounds,
    state: Mutex<State>,
    changed: Notify,
    hurried: Notify,
}

#[derive(Debug, Default)]
struct State {
    waiting: VecDeque<Waiting>,
    /// In rising order of sequence, without a gap between them.
    sent: VecDeque<Sent>,
    /// Of both, and of `sent` alone.
    bytes: usize,
    items: usize,
    sent_bytes: usize,
    /// The sequence of the last batch that was made, or left out.
    last: u64,
    /// How many of `sent` went over the stream that is open.
    on_stream: usize,
    /// The stream that is open; an older one gets nothing more.
    stream: u64,
    /// Somebody cannot go on before what waits has come.
    hurries: bool,
    /// When the last batch was made, and of how many items.
    made: Option<(Instant, usize)>,
    /// Whose publishes the last batch had, once for each of them that has not published again since all was confirmed. None: it had
    /// something else, or many.
    awaited: Option<Vec<ConnectionId>>,
}

#[derive(Debug)]
struct Waiting {
    item: Bytes,
    /// Of a publish.
    publisher: Option<ConnectionId>,
    since: Instant,
    receipt: oneshot::Sender<()>,
}

#[derive(Debug)]
struct Sent {
    batch: v1::Batch,
    /// Since when its first item waits.
    since: Instant,
    receipts: Vec<oneshot::Sender<()>>,
}

pub(in crate::cluster) enum Pull {
    Batch(v1::Batch),
    Nothing,
    /// The stream is not the lane's any more.
    Over,
}

impl Queue {
    pub(in crate::cluster) fn new(bounds: QueueBounds) -> Self {
        Self { bounds, state: Mutex::default(), changed: Notify::new(), hurried: Notify::new() }
    }

    /// `publisher`: whose publish it is, if it is one.
    pub(in crate::cluster) fn push(&self, item: Bytes, publisher: Option<ConnectionId>) -> Receipt {
        let (receipt, receiver) = oneshot::channel();
        let mut state = self.state.lock();
        let bytes = state.bytes + item.len();
        if item.len() > ITEM_BYTES_MAX || bytes > self.bounds.bytes || state.items >= self.bounds.items {
            let lost = state.lose_all();
            drop(state);
            drop(lost);
            metrics::counter!("fanfare_peer_queue_overflows_total").increment(1);
            self.changed.notify_one();
            return Receipt::lost();
        }
        state.bytes = bytes;
        state.items += 1;
        state.waiting.push_back(Waiting { item, publisher, since: Instant::now(), receipt });
        let hurries = state.comes_back(publisher);
        state.hurries |= hurries;
        drop(state);
        self.changed.notify_one();
        if hurries {
            self.hurried.notify_waiters();
        }
        Receipt(Some(unconstrained(receiver)))
    }

    /// Lets what waits go without gathering more.
    pub(super) fn hurry(&self) {
        let mut state = self.state.lock();
        state.hurries = !state.waiting.is_empty();
        drop(state);
        self.hurried.notify_waiters();
    }

    /// Resolves when something that waits is in a hurry, or at that time.
    pub(super) async fn gathered(&self, until: Instant) {
        let hurried = self.hurried.notified();
        tokio::pin!(hurried);
        // From here on it is told.
        hurried.as_mut().enable();
        if !self.state.lock().hurries {
            tokio::time::timeout_at(until, hurried).await.ok();
        }
    }

    /// The sequence that a stream opened now begins with.
    pub(in crate::cluster) fn next(&self) -> u64 {
        let state = self.state.lock();
        state.sent.front().map_or(state.last + 1, |sent| sent.batch.sequence)
    }

    /// Makes a stream the lane's: what the peer has not taken goes over it first. Gives its number.
    pub(in crate::cluster) fn open(&self, taken: u64) -> u64 {
        let mut state = self.state.lock();
        if taken > state.last {
            // A lane of this run that is not there any more was the one it took that from. What that one still had is lost,
            // which the sequence that is left out tells.
            // Of more than any lane comes to, half of what can be counted: there is a next one.
            state.last = state.last.max(taken.min(u64::MAX / 2) + 1);
        }
        let confirmed = state.confirm(taken);
        state.on_stream = 0;
        state.stream += 1;
        let stream = state.stream;
        drop(state);
        tell(confirmed);
        stream
    }

    pub(in crate::cluster) fn pull(&self, stream: u64) -> Pull {
        let mut state = self.state.lock();
        if state.stream != stream {
            // What woke it is for the stream that is open.
            self.changed.notify_one();
            return Pull::Over;
        }
        if let Some(sent) = state.sent.get(state.on_stream) {
            let batch = sent.batch.clone();
            state.on_stream += 1;
            return Pull::Batch(batch);
        }
        if state.waiting.is_empty() || state.sent_bytes > SENT_BYTES_MAX {
            return Pull::Nothing;
        }
        Pull::Batch(state.make_batch())
    }

    /// Until when what waits is to gather. None: it goes at once, as the lane was at rest, or somebody cannot go on before, or there is
    /// enough for a whole batch, or one to be sent again.
    pub(super) fn gathers_until(&self) -> Option<Instant> {
        let state = self.state.lock();
        let (first, (made, items)) = (state.waiting.front()?.since, state.made?);
        let is_whole = state.bytes - state.sent_bytes >= BATCH_BYTES || state.waiting.len() >= BATCH_ITEMS;
        let is_sent_again = state.on_stream < state.sent.len();
        gathers_until(first, made, items).filter(|_| !is_whole && !is_sent_again && !state.hurries)
    }

    pub(in crate::cluster) fn confirm(&self, sequence: u64) {
        let confirmed = self.state.lock().confirm(sequence);
        tell(confirmed);
        // There may be room for a further batch.
        self.changed.notify_one();
    }

    /// Resolves after a push, a confirmation or a loss since it was last awaited.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// How long the oldest item that is not confirmed has waited.
    pub(super) fn waits(&self) -> Duration {
        let state = self.state.lock();
        let first = state.sent.front().map(|sent| sent.since);
        let first = first.or_else(|| state.waiting.front().map(|waiting| waiting.since));
        first.map_or(Duration::ZERO, |since| since.elapsed())
    }

    /// Items that are not confirmed, and their bytes.
    pub(super) fn held(&self) -> (usize, usize) {
        let state = self.state.lock();
        (state.items, state.bytes)
    }

    #[cfg(test)]
    pub(in crate::cluster) fn held_bytes(&self) -> usize {
        self.held().1
    }
}

/// For what comes first at that time, after a batch of so many items.
pub(super) fn gathers_until(first: Instant, made: Instant, items: usize) -> Option<Instant> {
    let busy = if items == 1 { BUSY_AFTER_ONE } else { BUSY };
    let is_busy = first.saturating_duration_since(made) <= busy;
    is_busy.then(|| first + GATHER)
}

impl State {
    /// Whether all whose publishes the last batch had have published again, each as they wait for their acks. Nobody else has come in
    /// that time, so what waits would gather nothing more.
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
        let mut receipts = Vec::with_capacity(count);
        let since = self.waiting.front().map_or_else(Instant::now, |first| first.since);
        let publishers = || self.waiting.iter().take(count).map(|waiting| waiting.publisher);
        self.awaited = (count <= AWAITED_MAX).then(|| publishers().collect()).flatten();
        for waiting in self.waiting.drain(..count) {
            items.extend_from_slice(&waiting.item);
            receipts.push(waiting.receipt);
        }
        self.hurries &= !self.waiting.is_empty();
        self.last += 1;
        self.made = Some((Instant::now(), count));
        self.sent_bytes += bytes;
        self.on_stream += 1;
        let batch = v1::Batch { sequence: self.last, items: items.freeze() };
        self.sent.push_back(Sent { batch: batch.clone(), since, receipts });
        batch
    }

    /// Gives what has to be told, when the lock is given back.
    fn confirm(&mut self, sequence: u64) -> Vec<Sent> {
        let mut confirmed = Vec::new();
        while self.sent.front().is_some_and(|sent| sent.batch.sequence <= sequence) {
            let Some(sent) = self.sent.pop_front() else { break };
            self.bytes -= sent.batch.items.len();
            self.sent_bytes -= sent.batch.items.len();
            self.items -= sent.receipts.len();
            self.on_stream = self.on_stream.saturating_sub(1);
            confirmed.push(sent);
        }
        confirmed
    }

    /// The sequence that is left out tells the peer. Gives what was there: its receipts fail when it is dropped, which is to be
    /// when the lock is given back.
    fn lose_all(&mut self) -> Self {
        let (last, stream) = (self.last + 1, self.stream + 1);
        std::mem::replace(self, Self { last, stream, ..Self::default() })
    }
}

fn tell(confirmed: Vec<Sent>) {
    for receipt in confirmed.into_iter().flat_map(|sent| sent.receipts) {
        // An error is that nobody waits for it any more.
        let _ = receipt.send(());
    }
}
