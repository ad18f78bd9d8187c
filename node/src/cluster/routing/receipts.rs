//! What an ack waits for at other nodes.

use std::time::Duration;

use futures_util::future::{join, join_all};
use tokio::time::Instant;

use super::{Routing, hash_of};
use crate::cluster::link::{Item, Receipt};
use crate::model::Published;
use crate::tasks::OnStop;

/// An ack waits no longer for a peer that does not confirm.
const CONFIRM_WAIT: Duration = Duration::from_secs(1);
/// Given ids are told no later, so that this can be confirmed, too.
const TELL_WAIT: Duration = Duration::from_millis(700);

impl Routing {
    /// Runs `done` when each receipt has come, or too late.
    pub fn after(&self, owed: Vec<Receipt>, done: impl FnOnce() + Send + 'static) {
        self.tasks.spawn("receipts", OnStop::Finish, async move {
            have_come(owed, CONFIRM_WAIT).await;
            done();
        });
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

/// Waits for each to come or be lost. False when that is not known of all in time.
pub(super) async fn have_come(receipts: Vec<Receipt>, within: Duration) -> bool {
    tokio::time::timeout(within, join_all(receipts)).await.is_ok()
}
