//! A message that is stored under an id which a client publishes again. Its first publish may have been at a node that ended before it
//! forwarded the message. So the client has no ack before all who are attached have the message, or were told of a loss: what the client
//! publishes next would come before it.

use std::time::Duration;

use tokio::time::Instant;

use super::super::inbound::Request;
use super::{Routing, hash_of};
use crate::hub::Channel;
use crate::model::{ChannelKey, Run, Stamp};

/// A message on its way from a living incarnation arrives within this time. After it the node reads the store.
const ARRIVES_WITHIN: Duration = Duration::from_millis(100);
/// A message that is in no store has that long to arrive before a loss is told.
const TOLD_AFTER: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(10);

impl Routing {
    /// Resolves when all who are attached to the channel here and on each node that can be reached have the message, or were told of a loss.
    pub async fn delivered(&self, key: &ChannelKey, stamp: Stamp) {
        let to = self.wanting(key).into_iter().filter(|peer| self.is_up(*peer)).collect();
        // On the lane of the channel, so behind all that this node has forwarded there.
        let mut answers = self.ask(to, hash_of(key), &Request::Deliver { key: key.clone(), stamp });
        let others = async { while answers.next().await.is_some() {} };
        tokio::join!(self.deliver(key, stamp), others);
    }

    /// The same of those who are attached here.
    pub(super) async fn deliver(&self, key: &ChannelKey, stamp: Stamp) {
        let Some(channel) = self.hub.live(key) else { return };
        let (begun, run) = (Instant::now(), stamp.incarnation);
        if self.is_yet_to_confirm(&channel, run) {
            return self.hub.miss(&channel);
        }
        let arrives = async |within: Duration| {
            while channel.lacks(stamp) && self.deaths.lock().has_lanes(run) && begun.elapsed() < within {
                tokio::time::sleep(LOOK).await;
            }
            !channel.lacks(stamp)
        };
        if arrives(ARRIVES_WITHIN).await {
            return;
        }
        let since = self.deaths.lock().troubled_for(run).max(self.hub.keeps_for());
        // More may come of a run that is not held for dead.
        self.hand_on_stored(&channel, run, since, || true).await;
        if !arrives(TOLD_AFTER).await {
            self.hub.miss(&channel);
        }
    }

    /// The run lives, and its first word in the channel has not come, so its messages do not come either.
    fn is_yet_to_confirm(&self, channel: &Channel, run: u64) -> bool {
        let own = self.own.lock();
        let is_owed = own.get(&channel.number()).is_some_and(|own| !own.confirmed.contains(&run));
        drop(own);
        is_owed && self.deaths.lock().run(run) == Some(Run::Alive)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::super::super::inbound::Answer;
    use super::super::super::inbound::Inbound as _;
    use super::super::super::link::Item;
    use super::super::Local;
    use super::super::fixture::{Node, PEER, row};
    use super::*;
    use crate::cluster::routing::Behind;
    use crate::hub::Start;
    use crate::model::ForwardedParts;
    use crate::testing::SharedLocal;

    /// Attached to a channel that the peer forwards, over a store with these rows.
    fn node(stored: fn(&Behind) -> Option<Vec<ForwardedParts>>) -> Node {
        let node = Node::new();
        node.routing.set_local(SharedLocal::new(0, stored) as Arc<dyn Local>);
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.says();
        node
    }

    fn stamp(sequence: u64) -> Stamp {
        Stamp { incarnation: PEER, sequence }
    }

    #[tokio::test(start_paused = true)]
    async fn repeat_of_an_ended_run_is_read_from_the_store_first() {
        let node =
            node(|behind| Some(((behind.sequence + 1)..=3).map(|sequence| row(PEER, sequence)).collect()));
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        assert!(channel.lacks(stamp(2)));
        node.routing.asked(&node.peer, 4, Some(Request::Deliver { key: node.key.clone(), stamp: stamp(2) }));
        while node.says() != [Item::answer(4, &Answer::Done)] {
            tokio::task::yield_now().await;
        }
        assert_eq!(channel.reached(PEER), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn repeat_that_is_not_to_be_had_is_told_as_a_loss() {
        let node = node(|_| None);
        let before = node.routing.hub.live(&node.key).expect("it is attached to").mark().serial();
        node.routing.lane_opened(&node.peer, 0);
        let begun = Instant::now();
        node.routing.deliver(&node.key, stamp(2)).await;
        assert!(begun.elapsed() >= TOLD_AFTER, "it may be on its way");
        assert_eq!(node.routing.hub.look_after(&node.key, &before), Start::Unknown);
    }

    #[tokio::test(start_paused = true)]
    async fn repeat_is_acknowledged_when_all_who_want_it_have_it() {
        let node = node(|_| None);
        node.is_told_a_want();
        let key = node.key.clone();
        let own = Stamp { incarnation: node.routing.hub.incarnation(), sequence: 0 };
        let mut delivered = Box::pin(node.routing.delivered(&key, own));
        assert!(
            tokio::time::timeout(2 * TOLD_AFTER, &mut delivered).await.is_err(),
            "the peer is waited for"
        );
        node.routing.answered(&node.peer, node.routing.last_number.load(Ordering::Relaxed), Answer::Done);
        delivered.await;
    }
}
