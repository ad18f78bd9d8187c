//! Backfill of missed messages from a peer with subscribers of the channel: requests and answers.

use std::sync::Arc;
use std::time::Duration;

use fanfare_proto::serial::Serial;
use futures_util::future::join_all;
use tokio::sync::oneshot;
use tokio::time::Instant;

use super::super::inbound::{InterestMessage, PeerAnswer, PeerRequest};
use super::super::link::PeerItem;
use super::handoff::RETRY_AFTER;
use super::{JOIN_WAIT, Routing, StoreBackfillQuery, hash_of};
use crate::hub::{Channel, MessageDelivery};
use crate::model::{ChannelKey, ForwardedMessages, Stamp};
use crate::tasks::OnStop;

/// Longest time for which a node waits for a backfill.
const BACKFILL_WAIT: Duration = Duration::from_secs(3);
/// Backfill requests that are answered at a time, so that the answers leave space in the peer queues.
pub(super) const BACKFILLS_MAX: usize = 8;
/// Most bytes of memory of one backfill; a larger one is not sent.
const BACKFILL_BYTES_MAX: usize = 1024 * 1024;
/// Backfill requests that wait for their turn; a further one is answered with nothing.
pub(super) const BACKFILLS_WAITING_MAX: usize = 16_384;

/// Settle round of a channel: waits until each peer has confirmed once more that it forwards the channel. Everything that the peer
/// forwarded before is here then.
pub(super) struct SettleRound {
    pub(super) number: u64,
    pub(super) waits: Vec<u64>,
    pub(super) done: oneshot::Sender<()>,
}

impl Routing {
    /// Asks the peers with subscribers of the channel for all messages after the position `after`. None if no peer has them all in time.
    /// An answer includes all that this node and the others had forwarded before the request.
    pub async fn backfill_from_peers(
        &self,
        key: &ChannelKey,
        after: &Serial,
        back_ms: u64,
    ) -> Option<Vec<ForwardedMessages>> {
        let to: Vec<u64> =
            self.peers_interested_in(key).into_iter().filter(|peer| self.is_up(*peer)).collect();
        let request = PeerRequest::Backfill { key: key.clone(), after: after.clone(), back_ms };
        let mut answers = self.ask(to, hash_of(key), &request);
        let first = async {
            while let Some(answer) = answers.next().await {
                if let PeerAnswer::Backfill(Some(missed)) = answer {
                    return Some(missed);
                }
            }
            None
        };
        let missed = tokio::time::timeout(BACKFILL_WAIT, first).await.ok()??;
        // The answer may hold messages in transit to this node, which would be delivered twice.
        let is_all = self.settled(key).await && self.has_received(key, after, &missed);
        if is_all {
            self.learn_retired(key, after, &missed);
        }
        is_all.then_some(missed)
    }

    /// Adds the last sequences of ended incarnations that the client has after the backfill to the channel position of this node, so that
    /// no other node sends these messages again. The peer that answered has received them all.
    fn learn_retired(&self, key: &ChannelKey, after: &Serial, missed: &[ForwardedMessages]) {
        let Some(channel) = self.hub.live(key) else { return };
        let mut position = after.clone();
        missed.iter().for_each(|one| position.advance(one.incarnation, one.last));
        position.retain(self.have_ended());
        channel.learn_sequences(&Stamp::all_of(&position).collect::<Vec<_>>());
    }

    /// Learns the last sequences of ended incarnations, after no node could resume a client at the position `after`. Applies if `after`
    /// names an ended incarnation of which nothing was received here. The sequences of such incarnations at peers enter the channel
    /// position of this node: the client begins here behind their messages, and must not receive them from the next node either. An
    /// incarnation of which something was received here is left out, since its messages may still come from the store.
    pub async fn learn_retired_incarnations(&self, key: &ChannelKey, after: &Serial) {
        let Some(channel) = self.hub.live(key) else { return };
        let unreceived = || {
            let (channel, have_ended) = (&channel, self.have_ended());
            move |incarnation| !channel.knows_incarnation(incarnation) && have_ended(incarnation)
        };
        let is_lacking = || Stamp::all_of(after).map(|stamp| stamp.incarnation).any(unreceived());
        if !is_lacking() {
            return;
        }
        let mut turn = self.leaving.learning.turn(key).await;
        let was_asked = turn.is_some_and(|(of, at)| of == channel.number() && at.elapsed() < RETRY_AFTER);
        if !was_asked && is_lacking() {
            // Settling makes the reachable peers report them, if they know of the failure by then.
            self.settled(key).await;
            let is_unreceived = unreceived();
            let unreceived = Stamp::all_of(after).filter(|stamp| is_unreceived(stamp.incarnation)).collect();
            self.learn_stored(&channel, unreceived).await;
            *turn = Some((channel.number(), Instant::now()));
        }
        drop(turn);
        let Some(mut retired) =
            self.local_interest.lock().get(&channel.number()).map(|own| own.retired.clone())
        else {
            return;
        };
        retired.retain(unreceived());
        channel.learn_sequences(&Stamp::all_of(&retired).collect::<Vec<_>>());
    }

    /// Learns the last sequences that these incarnations have stored, since perhaps no peer has subscribers. A client may send any
    /// position, so its own sequence counts only if the store has that message.
    async fn learn_stored(&self, channel: &Channel, unreceived: Vec<Stamp>) {
        let Some(local) = self.store() else { return };
        let stored = unreceived.into_iter().map(async |Stamp { incarnation, sequence }| {
            let since = self.node_failures.lock().troubled_for(incarnation) + self.hub.retention();
            let (key, sequence) = (channel.key().clone(), sequence.checked_sub(1)?);
            let stored = local.stored(StoreBackfillQuery { key, incarnation, sequence, since }).await?;
            let is_there = stored.first()?.first == sequence + 1;
            is_there.then_some(Stamp { incarnation, sequence: stored.last()?.last })
        });
        let stored: Vec<Stamp> = join_all(stored).await.into_iter().flatten().collect();
        channel.learn_sequences(&stored);
    }

    /// True if no message of the backfill can come here again. An unreachable or down peer may still have messages in transit to this
    /// node that other nodes have received.
    fn has_received(&self, key: &ChannelKey, after: &Serial, missed: &[ForwardedMessages]) -> bool {
        let Some(channel) = self.hub.live(key) else { return false };
        let mut position = after.clone();
        missed.iter().for_each(|one| position.advance(one.incarnation, one.last));
        let position = channel.clamp_position(&position);
        let here = channel.position().serial();
        let own = self.local_interest.lock();
        let Some(interest) = own.get(&channel.number()) else { return false };
        interest
            .confirmed
            .iter()
            .all(|peer| here.includes_one(*peer, position.sequence_of(*peer).unwrap_or(0)))
    }

    /// Resolves when all that live peers have forwarded of the channel so far is here. False if one of them is unreachable or the channel
    /// has no subscribers here.
    pub(super) async fn settled(&self, key: &ChannelKey) -> bool {
        let Some(channel) = self.hub.live(key) else { return false };
        let number = self.next_number();
        let (done, is_done) = oneshot::channel();
        let mut peers = self.peers_alive();
        if !peers.iter().all(|peer| self.is_up(*peer)) {
            return false;
        }
        {
            let mut own = self.local_interest.lock();
            // Checked under the lock: `peer_stream_left` removes a peer only from the rounds that exist by then.
            peers.retain(|peer| !self.leaving.has_left(*peer));
            if peers.is_empty() {
                return true;
            }
            let Some(interest) = own.get_mut(&channel.number()) else { return false };
            interest.rounds.push(SettleRound { number, waits: peers.clone(), done });
        }
        let (of, sequence) = (channel.number(), channel.position().own.sequence);
        for peer in peers {
            let interest = InterestMessage::Added { key: key.clone(), number: of, round: number, sequence };
            self.send(peer, hash_of(key), &interest);
        }
        let settled = matches!(tokio::time::timeout(JOIN_WAIT, is_done).await, Ok(Ok(())));
        if let Some(interest) = self.local_interest.lock().get_mut(&channel.number()) {
            interest.rounds.retain(|round| round.number != number);
        }
        settled
    }

    /// Ends the settle rounds that wait for a peer without a stream to this node.
    pub(super) fn end_rounds(&self, peer: u64) {
        for own in self.local_interest.lock().values_mut() {
            own.rounds.retain(|round| !round.waits.contains(&peer));
        }
    }

    async fn send_backfill(&self, to: u64, number: u64, key: ChannelKey, after: Serial, back_ms: u64) {
        // The asking peer may have noticed a failure earlier than this node.
        self.until_failures_known().await;
        let (Some(links), Ok(_turn)) = (self.links.get(), self.backfills.acquire().await) else { return };
        let missed = match self.settled(&key).await {
            true => self.hub.missed_deliveries(&key, &after, back_ms),
            false => None,
        };
        let bytes = |missed: &Vec<Arc<MessageDelivery>>| {
            missed.iter().map(|delivery| delivery.bytes()).sum::<usize>()
        };
        let missed = missed.filter(|missed| bytes(missed) <= BACKFILL_BYTES_MAX);
        // The permit is held until the peer has confirmed the item, which takes space in the queue until then.
        links.send(to, hash_of(&key), &PeerItem::backfill(number, missed.as_deref())).await.ok();
    }

    pub(super) fn serve_backfill(&self, to: u64, number: u64, key: ChannelKey, after: Serial, back_ms: u64) {
        let (Some(links), Some(routing)) = (self.links.get(), self.this.upgrade()) else { return };
        let Ok(permit) = Arc::clone(&self.backfills_waiting).try_acquire_owned() else {
            return drop(links.send(to, 0, &PeerItem::backfill(number, None)));
        };
        self.tasks.spawn("backfill", OnStop::Cancel, async move {
            // The peer waits no longer than this.
            let backfill = routing.send_backfill(to, number, key, after, back_ms);
            tokio::time::timeout(BACKFILL_WAIT, backfill).await.ok();
            drop(permit);
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::inbound::{EndedIncarnation, Inbound as _};
    use super::super::LocalNode;
    use super::super::fixture::{RoutingTestNode, row};
    use super::*;
    use crate::testing::SharedLocal;

    /// An incarnation of which nothing was received here, and one of which something was.
    const ENDED: u64 = 99;
    const KNOWN: u64 = 98;
    const DEADLINE: Duration = Duration::from_secs(10);

    fn stamp(incarnation: u64, sequence: u64) -> Stamp {
        Stamp { incarnation, sequence }
    }

    /// Returns the sequences of both incarnations in the channel position, after a client with the position `after` could not be resumed
    /// and the peer has answered, if it was asked.
    async fn positions_after(node: &RoutingTestNode, after: Serial) -> [Option<u64>; 2] {
        let knowing = node.routing.learn_retired_incarnations(&node.key, &after);
        let answering = async {
            loop {
                let round = node.routing.local_interest.lock()[&node.number()]
                    .rounds
                    .first()
                    .map(|round| round.number);
                if let Some(round) = round {
                    node.says_joined(0, round, vec![stamp(ENDED, 7), stamp(KNOWN, 9)]);
                }
                tokio::task::yield_now().await;
            }
        };
        let known = async {
            tokio::select! {
                () = knowing => {}
                () = answering => {}
            }
        };
        tokio::time::timeout(DEADLINE, known).await.expect("the peer answers");
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        let serial = channel.position().serial();
        [ENDED, KNOWN].map(|incarnation| serial.sequence_of(incarnation))
    }

    #[tokio::test]
    async fn position_gains_ended_incarnation_after_client_names_it() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, vec![stamp(KNOWN, 3)]);
        node.says();
        let names = |incarnation| Serial::single(incarnation, 5);
        assert_eq!(
            positions_after(&node, names(ENDED)).await,
            [None, Some(3)],
            "this node may not have met it yet"
        );
        let ended =
            [ENDED, KNOWN].map(|incarnation| EndedIncarnation { incarnation, ago_ms: 0, has_left: false });
        node.routing
            .interest(&node.peer, InterestMessage::IncarnationsEnded { incarnations: ended.to_vec() });
        assert_eq!(positions_after(&node, names(KNOWN)).await, [None, Some(3)], "what is heard is known");
        assert!(node.says().is_empty(), "nobody was asked");
        let known = [Some(7), Some(3)];
        assert_eq!(
            positions_after(&node, names(ENDED)).await,
            known,
            "as far as others have it, whatever was named"
        );
        assert_eq!(node.says().len(), 1);
        assert_eq!(positions_after(&node, names(ENDED)).await, known);
        assert!(node.says().is_empty(), "it is known");
    }

    /// The store has seven messages of the incarnation.
    #[tokio::test]
    async fn loss_position_follows_what_a_client_has_of_the_store() {
        for (sequence, known) in [(5, Some(7)), (7, Some(7)), (8, None), (0, None)] {
            let node = RoutingTestNode::new();
            let stored = |behind: &StoreBackfillQuery| {
                Some(((behind.sequence + 1)..=7).map(|sequence| row(behind.incarnation, sequence)).collect())
            };
            node.routing.set_local(SharedLocal::new(0, stored) as Arc<dyn LocalNode>);
            node.is_attached_to();
            let ended = EndedIncarnation { incarnation: ENDED, ago_ms: 0, has_left: false };
            node.routing
                .interest(&node.peer, InterestMessage::IncarnationsEnded { incarnations: vec![ended] });
            node.routing.learn_retired_incarnations(&node.key, &Serial::single(ENDED, sequence)).await;
            let serial = node.routing.hub.live(&node.key).expect("it is attached to").position().serial();
            assert_eq!(serial.sequence_of(ENDED), known, "{sequence}");
        }
    }
}
