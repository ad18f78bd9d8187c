//! Acks of publishes, which wait for the acks of peers.

#[cfg(test)]
mod tests;

use std::collections::VecDeque;
use std::future::Future;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use futures_util::future::{join, join_all};
use parking_lot::Mutex;
use tokio::time::Instant;

use super::{Routing, hash_of};
use crate::cluster::link::{PeerAck, PeerItem};
use crate::model::PublishedMessages;
use crate::tasks::{OnStop, Tasks};

/// Longest time for which an ack waits for peers.
const CONFIRM_WAIT: Duration = Duration::from_secs(1);
/// Interval of the check for acks that have waited too long.
const LATE_LOOK: Duration = Duration::from_millis(50);
/// Latest time at which published ids are sent to peers, so that these can still confirm them.
const TELL_WAIT: Duration = Duration::from_millis(700);

impl Routing {
    /// Runs `done` when every peer ack has come, or after `CONFIRM_WAIT`. If all come, `done` runs on the task of the stream that brought
    /// the last one.
    pub fn on_peer_acks(&self, acks: Vec<PeerAck>, done: impl FnOnce() + Send + 'static) {
        let tasks = Arc::clone(&self.tasks);
        let done: AckCallback = Box::new(done);
        let waiting = Mutex::new(Some(PendingAckState { awaited: acks, is_lost: false, done }));
        let ack = Arc::new(PendingAck { tasks, waiting });
        self.acks.lock().push(&ack);
        ack.wake();
    }

    /// Ends the wait of acks that have waited too long, until it is cancelled.
    pub(super) async fn expire_peer_acks(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LATE_LOOK).await;
            let late = self.acks.lock().late(Instant::now());
            late.iter().filter_map(|ack| ack.waiting.lock().take()).for_each(|waiting| give(waiting.done));
        }
    }

    /// Runs `done` when every peer ack has come and the peers have confirmed the ids that clients gave. The ids are sent after the
    /// messages are confirmed: if this node fails, a message under an id that peers know must be at the nodes with subscribers.
    pub fn on_peer_acks_and_ids(
        &self,
        acks: Vec<PeerAck>,
        published: &PublishedMessages,
        done: impl FnOnce() + Send + 'static,
    ) {
        let is_alone = acks.is_empty() && self.linked().is_empty();
        let Some(routing) = self.this.upgrade().filter(|_| !is_alone) else { return done() };
        let (item, hash) = (PeerItem::ids_settled(published), hash_of(&published.key));
        self.tasks.spawn("peer acks", OnStop::Finish, async move {
            let late = Instant::now() + CONFIRM_WAIT;
            let mut acks = join_all(acks);
            let have_come = tokio::time::timeout(TELL_WAIT, &mut acks).await.is_ok();
            let sent = join_all(routing.send_to_linked(hash, &item));
            let all = async {
                if have_come {
                    sent.await;
                } else {
                    join(acks, sent).await;
                }
            };
            tokio::time::timeout_at(late, all).await.ok();
            done();
        });
    }

    /// Sends an item to all peers with a link, and returns the acks of those that are not left out of claims.
    fn send_to_linked(&self, hash: u64, item: &PeerItem) -> Vec<PeerAck> {
        let Some(links) = self.links.get() else { return Vec::new() };
        let answering = self.answering();
        let sent = self.linked().into_iter().map(|peer| (peer, links.send(peer, hash, item)));
        sent.filter(|(peer, _)| answering.contains(peer)).map(|(_, ack)| ack).collect()
    }
}

type AckCallback = Box<dyn FnOnce() + Send>;

/// Runs a callback on a task that serves other acks, too, so a panic of it must not end the task.
fn give(done: AckCallback) {
    if catch_unwind(AssertUnwindSafe(done)).is_err() {
        tracing::error!("ack callback panicked");
    }
}

/// Waiting acks in the order of their deadlines. Some of them have been given since.
#[derive(Default)]
pub(super) struct AckDeadlines(VecDeque<(Instant, Weak<PendingAck>)>);

impl AckDeadlines {
    fn push(&mut self, ack: &Arc<PendingAck>) {
        // Acks are given in about the order in which they began to wait.
        while self.0.front().is_some_and(|(_, ack)| ack.strong_count() == 0) {
            self.0.pop_front();
        }
        self.0.push_back((Instant::now() + CONFIRM_WAIT, Arc::downgrade(ack)));
    }

    fn late(&mut self, now: Instant) -> Vec<Arc<PendingAck>> {
        let mut late = Vec::new();
        while self.0.front().is_some_and(|(until, ack)| *until <= now || ack.strong_count() == 0) {
            late.extend(self.0.pop_front().and_then(|(_, ack)| ack.upgrade()));
        }
        late
    }
}

/// An ack that waits for peer acks. The task that confirms the last one gives it: a task for each publish would cost more than the way
/// over the link does.
struct PendingAck {
    tasks: Arc<Tasks>,
    /// None once the ack has been given.
    waiting: Mutex<Option<PendingAckState>>,
}

struct PendingAckState {
    awaited: Vec<PeerAck>,
    is_lost: bool,
    done: AckCallback,
}

impl Wake for PendingAck {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut guard = self.waiting.lock();
        let Some(waiting) = &mut *guard else { return };
        waiting.look(&mut Context::from_waker(&waker));
        let given = if waiting.awaited.is_empty() { guard.take() } else { None };
        drop(guard);
        let Some(PendingAckState { is_lost, done, .. }) = given else { return };
        if is_lost {
            // The task that lost the item may be publishing and hold the lock of a channel.
            self.tasks.spawn("peer acks", OnStop::Finish, async move { done() });
        } else {
            give(done);
        }
    }
}

impl PendingAckState {
    fn look(&mut self, cx: &mut Context<'_>) {
        let is_lost = &mut self.is_lost;
        self.awaited.retain_mut(|ack| match Pin::new(ack).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                *is_lost |= result.is_err();
                false
            }
        });
    }
}
