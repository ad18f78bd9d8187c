//! What an ack waits for at other nodes.

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
use crate::cluster::link::{Item, Receipt};
use crate::model::Published;
use crate::tasks::{OnStop, Tasks};

/// An ack waits no longer for a peer that does not confirm.
const CONFIRM_WAIT: Duration = Duration::from_secs(1);
/// How often it is looked for acks that have waited too long.
const LATE_LOOK: Duration = Duration::from_millis(50);
/// Given ids are told no later, so that this can be confirmed, too.
const TELL_WAIT: Duration = Duration::from_millis(700);

impl Routing {
    /// Runs `done` when each receipt has come, or too late. Where all come, it runs on the task of the lane that has brought the last.
    pub fn after(&self, owed: Vec<Receipt>, done: impl FnOnce() + Send + 'static) {
        let tasks = Arc::clone(&self.tasks);
        let done: Done = Box::new(done);
        let waiting = Mutex::new(Some(Waiting { owed, is_lost: false, done }));
        let ack = Arc::new(Ack { tasks, waiting });
        self.acks.lock().push(&ack);
        ack.wake();
    }

    /// Lets no ack wait for longer than it may.
    pub(super) async fn give_up_receipts(self: Arc<Self>) {
        loop {
            tokio::time::sleep(LATE_LOOK).await;
            let late = self.acks.lock().late(Instant::now());
            late.iter().filter_map(|ack| ack.waiting.lock().take()).for_each(|waiting| give(waiting.done));
        }
    }

    /// The same, and every node has been told the ids that clients gave. Not before the messages are confirmed: should this node
    /// die, what is published again under an id that others know must be where it is wanted.
    pub fn after_with_ids(
        &self,
        owed: Vec<Receipt>,
        published: &Published,
        done: impl FnOnce() + Send + 'static,
    ) {
        let is_alone = owed.is_empty() && self.linked().is_empty();
        let Some(routing) = self.this.upgrade().filter(|_| !is_alone) else { return done() };
        let (item, hash) = (Item::ids_settled(published), hash_of(&published.key));
        self.tasks.spawn("receipts", OnStop::Finish, async move {
            let late = Instant::now() + CONFIRM_WAIT;
            let mut owed = join_all(owed);
            let have_come = tokio::time::timeout(TELL_WAIT, &mut owed).await.is_ok();
            let told = join_all(routing.tell_linked(hash, &item));
            let all = async {
                if have_come {
                    told.await;
                } else {
                    join(owed, told).await;
                }
            };
            tokio::time::timeout_at(late, all).await.ok();
            done();
        });
    }

    /// The receipts are of those that answer.
    fn tell_linked(&self, hash: u64, item: &Item) -> Vec<Receipt> {
        let Some(links) = self.links.get() else { return Vec::new() };
        let answering = self.answering();
        let told = self.linked().into_iter().map(|peer| (peer, links.send(peer, hash, item)));
        told.filter(|(peer, _)| answering.contains(peer)).map(|(_, receipt)| receipt).collect()
    }
}

type Done = Box<dyn FnOnce() + Send>;

/// On a task that is needed for more than this ack.
fn give(done: Done) {
    if catch_unwind(AssertUnwindSafe(done)).is_err() {
        tracing::error!("a callback of an ack panicked");
    }
}

/// The acks that wait, and until when, in the order of that. Some of them have been given since.
#[derive(Default)]
pub(super) struct Acks(VecDeque<(Instant, Weak<Ack>)>);

impl Acks {
    fn push(&mut self, ack: &Arc<Ack>) {
        // Acks are given in about the order in which they began to wait.
        while self.0.front().is_some_and(|(_, ack)| ack.strong_count() == 0) {
            self.0.pop_front();
        }
        self.0.push_back((Instant::now() + CONFIRM_WAIT, Arc::downgrade(ack)));
    }

    fn late(&mut self, now: Instant) -> Vec<Arc<Ack>> {
        let mut late = Vec::new();
        while self.0.front().is_some_and(|(until, ack)| *until <= now || ack.strong_count() == 0) {
            late.extend(self.0.pop_front().and_then(|(_, ack)| ack.upgrade()));
        }
        late
    }
}

/// What waits for receipts. It is woken by whoever confirms them, and goes on there: a task of its own would cost each publish more than its
/// way over the link does.
struct Ack {
    tasks: Arc<Tasks>,
    /// None when it has been given.
    waiting: Mutex<Option<Waiting>>,
}

struct Waiting {
    owed: Vec<Receipt>,
    is_lost: bool,
    done: Done,
}

impl Wake for Ack {
    fn wake(self: Arc<Self>) {
        let waker = Waker::from(Arc::clone(&self));
        let mut place = self.waiting.lock();
        let Some(waiting) = &mut *place else { return };
        waiting.look(&mut Context::from_waker(&waker));
        let given = if waiting.owed.is_empty() { place.take() } else { None };
        drop(place);
        let Some(Waiting { is_lost, done, .. }) = given else { return };
        if is_lost {
            // Whoever has lost it may be publishing, and hold a channel.
            self.tasks.spawn("receipts", OnStop::Finish, async move { done() });
        } else {
            give(done);
        }
    }
}

impl Waiting {
    fn look(&mut self, cx: &mut Context<'_>) {
        let is_lost = &mut self.is_lost;
        self.owed.retain_mut(|receipt| match Pin::new(receipt).poll(cx) {
            Poll::Pending => true,
            Poll::Ready(result) => {
                *is_lost |= result.is_err();
                false
            }
        });
    }
}
