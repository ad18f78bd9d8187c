//! Publishes that a client repeats under the id of a stored message. The first publish may have been at a node that ended before it
//! forwarded the message. So the client gets no ack before all subscribers have the message or were told of a loss: otherwise its next
//! message would come first.

use std::time::Duration;

use tokio::time::Instant;

use super::super::inbound::PeerRequest;
use super::{Routing, hash_of};
use crate::hub::Channel;
use crate::model::{ChannelKey, IncarnationStatus, Stamp};

/// A message on its way from a living incarnation arrives within this time. After it the node reads the store.
const ARRIVES_WITHIN: Duration = Duration::from_millis(100);
/// Time for a message that is in no store to arrive, before clients are told of a loss.
const LOSS_AFTER: Duration = Duration::from_secs(1);
const LOOK: Duration = Duration::from_millis(10);

impl Routing {
    /// Resolves when all subscribers of the channel, here and on each reachable node, have the message or were told of a loss.
    pub async fn deliver_on_all_nodes(&self, key: &ChannelKey, stamp: Stamp) {
        let to = self.peers_interested_in(key).into_iter().filter(|peer| self.is_up(*peer)).collect();
        // Sent on the stream of the channel, behind all that this node has forwarded there.
        let mut answers = self.ask(to, hash_of(key), &PeerRequest::Deliver { key: key.clone(), stamp });
        let others = async { while answers.next().await.is_some() {} };
        tokio::join!(self.deliver(key, stamp), others);
    }

    /// Resolves when all subscribers at this node have the message or were told of a loss.
    pub(super) async fn deliver(&self, key: &ChannelKey, stamp: Stamp) {
        let Some(channel) = self.hub.live(key) else { return };
        let (begun, incarnation) = (Instant::now(), stamp.incarnation);
        if self.is_yet_to_confirm(&channel, incarnation) {
            return self.hub.lose_message(&channel);
        }
        let arrives = async |within: Duration| {
            while channel.lacks(stamp)
                && self.node_failures.lock().has_open_streams(incarnation)
                && begun.elapsed() < within
            {
                tokio::time::sleep(LOOK).await;
            }
            !channel.lacks(stamp)
        };
        if arrives(ARRIVES_WITHIN).await {
            return;
        }
        let since = self.node_failures.lock().troubled_for(incarnation).max(self.hub.retention());
        // More messages may come of an incarnation that is not down.
        self.deliver_stored(&channel, incarnation, since, || true).await;
        if !arrives(LOSS_AFTER).await {
            self.hub.lose_message(&channel);
        }
    }

    /// True if the incarnation is alive and has not confirmed the channel, so that its messages do not come here.
    fn is_yet_to_confirm(&self, channel: &Channel, incarnation: u64) -> bool {
        let own = self.local_interest.lock();
        let is_unconfirmed =
            own.get(&channel.number()).is_some_and(|own| !own.confirmed.contains(&incarnation));
        drop(own);
        is_unconfirmed
            && self.node_failures.lock().incarnation_status(incarnation) == Some(IncarnationStatus::Alive)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::Ordering;

    use super::super::super::inbound::Inbound as _;
    use super::super::super::inbound::PeerAnswer;
    use super::super::super::link::PeerItem;
    use super::super::LocalNode;
    use super::super::fixture::{PEER, RoutingTestNode, row};
    use super::*;
    use crate::cluster::routing::StoreBackfillQuery;
    use crate::hub::ResumeStart;
    use crate::model::ForwardedParts;
    use crate::testing::SharedLocal;

    /// A node with a subscriber of a channel that the peer forwards, over a store with these messages.
    fn node(stored: fn(&StoreBackfillQuery) -> Option<Vec<ForwardedParts>>) -> RoutingTestNode {
        let node = RoutingTestNode::new();
        node.routing.set_local(SharedLocal::new(0, stored) as Arc<dyn LocalNode>);
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
    async fn repeat_of_ended_incarnation_is_read_from_store_first() {
        let node =
            node(|behind| Some(((behind.sequence + 1)..=3).map(|sequence| row(PEER, sequence)).collect()));
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        assert!(channel.lacks(stamp(2)));
        node.routing.request_received(
            &node.peer,
            4,
            Some(PeerRequest::Deliver { key: node.key.clone(), stamp: stamp(2) }),
        );
        while node.says() != [PeerItem::answer(4, &PeerAnswer::Done)] {
            tokio::task::yield_now().await;
        }
        assert_eq!(channel.received_sequence(PEER), 3);
    }

    #[tokio::test(start_paused = true)]
    async fn unavailable_repeat_is_reported_as_a_loss() {
        let node = node(|_| None);
        let before = node.routing.hub.live(&node.key).expect("it is attached to").position().serial();
        node.routing.stream_opened(&node.peer, 0);
        let begun = Instant::now();
        node.routing.deliver(&node.key, stamp(2)).await;
        assert!(begun.elapsed() >= LOSS_AFTER, "it may be on its way");
        assert_eq!(node.routing.hub.resume_start(&node.key, &before), ResumeStart::Unknown);
    }

    #[tokio::test(start_paused = true)]
    async fn repeat_is_acked_once_all_interested_peers_have_it() {
        let node = node(|_| None);
        node.receives_interest();
        let key = node.key.clone();
        let own = Stamp { incarnation: node.routing.hub.incarnation(), sequence: 0 };
        let mut delivered = Box::pin(node.routing.deliver_on_all_nodes(&key, own));
        assert!(
            tokio::time::timeout(2 * LOSS_AFTER, &mut delivered).await.is_err(),
            "the peer is waited for"
        );
        node.routing.answer_received(
            &node.peer,
            node.routing.last_number.load(Ordering::Relaxed),
            PeerAnswer::Done,
        );
        delivered.await;
    }
}
