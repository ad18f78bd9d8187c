//! Queues from other threads into a shard.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::Mutex;

/// Items inspected at most under the lock, on which every pusher waits.
const LOOKED_AT_MAX: usize = 64;

/// A queue into one thread that sleeps in its poll. A sender wakes the thread only when it sleeps.
///
/// Pushing never blocks and never fails. Beyond `bytes_max` the inbox is [congested](Inbox::congested): every shard
/// stops reading from its sockets and HTTP publishers wait until it is not, so at most the reads of one turn still
/// arrive.
#[derive(Debug)]
pub struct Inbox<T> {
    waiting: Mutex<Vec<T>>,
    bytes: AtomicUsize,
    bytes_max: usize,
    asleep: AtomicBool,
    waker: Arc<mio::Waker>,
}

impl<T> Inbox<T> {
    pub fn new(waker: Arc<mio::Waker>, bytes_max: usize) -> Self {
        Self {
            waiting: Mutex::new(Vec::new()),
            bytes: AtomicUsize::new(0),
            bytes_max,
            asleep: AtomicBool::new(false),
            waker,
        }
    }

    /// Queues an item. `bytes` is the memory of the item beyond shared data.
    pub fn push(&self, item: T, bytes: usize) {
        {
            let mut waiting = self.waiting.lock();
            waiting.push(item);
            self.bytes.fetch_add(bytes, Ordering::Relaxed);
        }
        if self.asleep.swap(false, Ordering::SeqCst)
            && let Err(error) = self.waker.wake()
        {
            tracing::error!(%error, "shard wake-up failed");
        }
    }

    /// Memory of the waiting items, in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes.load(Ordering::Relaxed)
    }

    pub fn congested(&self) -> bool {
        self.bytes() > self.bytes_max
    }

    /// Swaps the waiting items with the empty `items`; called by the owner alone.
    pub fn take(&self, items: &mut Vec<T>) {
        debug_assert!(items.is_empty());
        let mut waiting = self.waiting.lock();
        std::mem::swap(&mut *waiting, items);
        self.bytes.store(0, Ordering::Relaxed);
    }

    /// Whether few items wait, at least one, and `is_so` holds for each of them.
    pub fn holds_only(&self, is_so: impl Fn(&T) -> bool) -> bool {
        let waiting = self.waiting.lock();
        (1..=LOOKED_AT_MAX).contains(&waiting.len()) && waiting.iter().all(is_so)
    }

    /// Declares the owner about to sleep; false when something waits, and then it must not.
    pub fn may_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        if self.waiting.lock().is_empty() {
            return true;
        }
        self.asleep.store(false, Ordering::SeqCst);
        false
    }

    pub fn woke(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_sleeping_owner_is_woken_and_a_busy_one_is_not_disturbed() {
        let mut poll = mio::Poll::new().expect("a poll");
        let waker = Arc::new(mio::Waker::new(poll.registry(), mio::Token(0)).expect("a waker"));
        let inbox = Inbox::new(waker, 10);
        let mut events = mio::Events::with_capacity(4);

        assert!(!inbox.holds_only(|_| true), "nothing waits");
        inbox.push(1, 4);
        assert!(inbox.holds_only(|item| *item == 1) && !inbox.holds_only(|item| *item != 1));
        poll.poll(&mut events, Some(Duration::ZERO)).expect("polled");
        assert!(events.is_empty(), "an awake owner gets no event");
        assert!(!inbox.may_sleep(), "something waits");

        let mut items = Vec::new();
        inbox.take(&mut items);
        assert_eq!(items, [1]);
        assert!(inbox.may_sleep());
        inbox.push(2, 11);
        poll.poll(&mut events, Some(Duration::from_secs(5))).expect("polled");
        assert!(!events.is_empty());
        assert!(inbox.congested());
    }
}
