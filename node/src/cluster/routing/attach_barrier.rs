//! Attach barriers: wait until each peer forwards a channel with subscribers here, and learn its sequence from before.

use std::collections::HashSet;

use fanfare_proto::serial::Serial;
use tokio::time::Instant;

use super::{JOIN_WAIT, Routing};
use crate::model::{ChannelKey, Stamp};

/// Most retired incarnations that are taken from peers for one channel. Fewer end within the time for which they count. A client whose
/// position names a further one is told of a continuity loss.
const RETIRED_MAX: usize = 1024;

impl Routing {
    /// Stamps in `known` of incarnations that are retired or draining. The asking peer may have received the goodbye of a draining one
    /// already.
    pub(super) fn retired_stamps(&self, known: &Serial) -> Vec<Stamp> {
        let mut retired: Vec<Stamp> = Stamp::all_of(known).collect();
        self.retain_retired(&mut retired);
        let node_failures = self.node_failures.lock();
        let leaves = |one: &Stamp| node_failures.is_draining(one.incarnation) && !retired.contains(one);
        let leaving: Vec<Stamp> = Stamp::all_of(known).filter(leaves).collect();
        drop(node_failures);
        retired.extend(leaving);
        retired
    }

    fn retain_retired(&self, stamps: &mut Vec<Stamp>) {
        if !stamps.is_empty() {
            let (own, expected) = (self.hub.incarnation(), self.expected.lock());
            stamps.retain(|stamp| stamp.incarnation != own && !expected.contains(&stamp.incarnation));
        }
    }

    pub(super) fn forwarding_confirmed(
        &self,
        from: u64,
        key: &ChannelKey,
        number: u64,
        (sequence, round): (u64, u64),
        mut retired: Vec<Stamp>,
    ) {
        self.snapshot_item_answered(from, round);
        retired.truncate(RETIRED_MAX);
        let mut own = self.local_interest.lock();
        let Some(channel) = own.get_mut(&number).filter(|channel| channel.key == *key) else { return };
        let is_first = !channel.confirmed.contains(&from);
        if is_first {
            channel.confirmed.push(from);
        }
        let waited = channel.waits.len();
        self.retain_retired(&mut retired);
        retired.retain(|stamp| {
            let is_known = channel.retired.sequence_of(stamp.incarnation).is_some();
            let is_taken = is_known || channel.retired.entries().len() < RETIRED_MAX;
            if is_taken {
                channel.retired.advance(stamp.incarnation, stamp.sequence);
            }
            is_taken
        });
        drop(own);
        let stamp = Stamp { incarnation: from, sequence };
        if is_first {
            self.hub.learn_retired_sequences(key, number, &retired);
            self.hub.learn_peer_sequence(key, number, stamp);
        } else {
            self.hub.confirm_contiguous(key, number, stamp);
        }
        if let Some(channel) = self.local_interest.lock().get_mut(&number) {
            for one in channel.rounds.iter_mut().filter(|one| one.number == round) {
                one.waits.retain(|peer| *peer != from);
            }
            for done in channel.rounds.extract_if(.., |one| one.waits.is_empty()) {
                done.done.send(()).ok();
            }
        }
        if waited > 0 {
            self.stop_awaiting(number, from);
        }
    }

    /// Removes the peer from the attach barrier of the channel, and opens the barrier if it was the last one.
    pub(super) fn stop_awaiting(&self, number: u64, peer: u64) {
        let mut own = self.local_interest.lock();
        let Some(channel) = own.get_mut(&number).filter(|channel| !channel.waits.is_empty()) else { return };
        channel.waits.retain(|waited| *waited != peer);
        let key = channel.waits.is_empty().then(|| channel.key.clone());
        channel.let_in = key.is_some().then(Instant::now);
        let is_complete = !channel.is_passed;
        drop(own);
        if let Some(key) = key {
            self.hub.pass_barrier(&key, number, is_complete);
        }
    }

    /// Handles the end of the link to a peer. If all streams of the peer are about to end, attaches wait for their end. After a failure
    /// they then come after everything that the peer had sent.
    pub(super) fn unlinked(&self, peer: u64) {
        self.node_failures.lock().linked(peer, false);
        if !self.node_failures.lock().is_ending(peer) {
            self.skip_awaited_peer(peer);
        }
        if !self.node_failures.lock().has_open_streams(peer) {
            self.end_rounds(peer);
        }
    }

    /// Unreachable members whose streams are about to end.
    pub(super) fn ending(&self) -> Vec<u64> {
        let mut down: Vec<u64> =
            self.peers.read().keys().copied().filter(|peer| !self.is_up(*peer)).collect();
        let node_failures = self.node_failures.lock();
        down.retain(|peer| node_failures.is_ending(*peer));
        down
    }

    /// Removes a peer that has not answered from all attach barriers.
    pub(super) fn skip_awaited_peer(&self, peer: u64) {
        let waiting: Vec<u64> = {
            let mut own = self.local_interest.lock();
            let waiting = own.iter_mut().filter(|(_, own)| own.waits.contains(&peer));
            let passes = waiting.map(|(number, own)| {
                own.is_passed |= !own.confirmed.contains(&peer);
                *number
            });
            passes.collect()
        };
        waiting.into_iter().for_each(|number| self.stop_awaiting(number, peer));
    }

    pub(super) fn expire_attach_barriers(&self) {
        self.node_failures.lock().looked(Instant::now());
        let waiting: Vec<(u64, Vec<u64>)> = {
            let own = self.local_interest.lock();
            let waiting = own.iter().filter(|(_, own)| !own.waits.is_empty());
            waiting.map(|(number, own)| (*number, own.waits.clone())).collect()
        };
        let waited: HashSet<u64> = waiting.iter().flat_map(|(_, peers)| peers.iter().copied()).collect();
        for peer in waited {
            if !self.is_up(peer) && !self.node_failures.lock().is_ending(peer) {
                self.skip_awaited_peer(peer);
            }
        }
        let late: Vec<_> = {
            let own = self.local_interest.lock();
            let still = waiting.iter().filter_map(|(number, _)| Some((*number, own.get(number)?)));
            let late = still.filter(|(_, own)| !own.waits.is_empty() && own.since.elapsed() > JOIN_WAIT);
            late.map(|(number, own)| (number, own.key.clone(), own.waits.clone())).collect()
        };
        for (number, key, peers) in late {
            for peer in peers {
                self.mark_channel_in_doubt(peer, &key, number);
                self.stop_awaiting(number, peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;
    use std::time::Duration;

    use futures_util::poll;

    use super::super::super::inbound::{Inbound as _, InterestMessage, Peer};
    use super::super::super::link::PeerItem;
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::*;
    use crate::hub::ResumeStart;

    fn stamp(incarnation: u64, sequence: u64) -> Stamp {
        Stamp { incarnation, sequence }
    }

    #[tokio::test]
    async fn retired_incarnations_in_joins_are_bounded_and_never_live() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.is_attached_to();
        let retired = || node.routing.local_interest.lock()[&node.number()].retired.entries().to_vec();
        let own = node.routing.hub.incarnation();
        node.says_joined(5, 0, vec![stamp(99, 4), stamp(own, 9), stamp(PEER, 9)]);
        assert_eq!(retired(), [(99, 4)]);
        node.says_joined(5, 0, vec![stamp(99, 3), stamp(98, 1)]);
        assert_eq!(retired(), [(98, 1), (99, 4)], "as far as anybody has heard them");
        node.says_joined(
            5,
            0,
            (1_000..).take(2 * RETIRED_MAX).map(|incarnation| stamp(incarnation, 1)).collect(),
        );
        assert_eq!(retired().len(), RETIRED_MAX);
        node.says_joined(5, 0, vec![stamp(99, 5), stamp(97, 1)]);
        assert_eq!(
            (retired().len(), retired()[1]),
            (RETIRED_MAX, (99, 5)),
            "of those that it knows it takes more"
        );
    }

    #[tokio::test]
    async fn peer_sequence_before_forwarding_enters_channel_position() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        let forgotten = InterestMessage::Forwarding {
            key: node.key.clone(),
            number: node.number() + 1,
            sequence: 9,
            round: 0,
            retired: vec![stamp(99, 4)],
        };
        node.routing.interest(&node.peer, forgotten);
        assert_eq!(channel.position().serial().sequence_of(PEER), None, "of a channel that was forgotten");
        assert!(node.routing.confirmed_incarnations(&channel).is_empty());
        node.says_joined(5, 0, vec![stamp(99, 4)]);
        let serial = channel.position().serial();
        assert_eq!((serial.sequence_of(PEER), serial.sequence_of(99)), (Some(5), Some(4)));
        assert_eq!(node.routing.confirmed_incarnations(&channel), [PEER]);
    }

    /// A client that this node resumes, or that moves away from it, must not be told of a loss for these gaps.
    #[tokio::test]
    async fn joining_peer_learns_sequence_gaps_of_retired_incarnations() {
        const RETIRED: u64 = 9;
        let node = RoutingTestNode::new();
        let retired = Peer { node_id: "n9".into(), incarnation: RETIRED };
        node.finds(&[&node.peer, &retired]);
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.says_joined_as(&retired, 0, 0, Vec::new());
        let added = InterestMessage::Added { key: node.key.clone(), number: 1, round: 0, sequence: 3 };
        node.routing.interest(&retired, added);
        let answer = || {
            node.says();
            node.receives_interest();
            node.says().pop()
        };
        let joined = |retired| {
            let (key, sequence) = (node.key.clone(), 0);
            Some(PeerItem::interest(&InterestMessage::Forwarding {
                key,
                number: 1,
                sequence,
                round: 0,
                retired,
            }))
        };
        assert_eq!(answer(), joined(Vec::new()));
        node.finds_the_peer();
        assert_eq!(answer(), joined(vec![Stamp { incarnation: RETIRED, sequence: 3 }]));
    }

    /// Covers the sequence gaps of the peer and those of this node.
    #[tokio::test]
    async fn sequence_gaps_by_design_are_sent_and_received() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        let start = |there| {
            let mut position = node.routing.hub.position(&node.key).serial();
            position.advance(PEER, there);
            node.routing.hub.resume_start(&node.key, &position)
        };
        let added = InterestMessage::Added { key: node.key.clone(), number: 1, round: 0, sequence: 3 };
        node.routing.interest(&node.peer, added);
        assert_eq!([3, 4].map(start), [ResumeStart::Live, ResumeStart::Unknown]);
        let number = node.number();
        let is_announced = |sequence| {
            let key = node.key.clone();
            let announces = |item: &PeerItem| {
                let added = |round| InterestMessage::Added { key: key.clone(), number, round, sequence };
                (0..9).any(|round| *item == PeerItem::interest(&added(round)))
            };
            node.says().iter().any(announces)
        };
        assert!(is_announced(0), "with the wish");
        node.routing.hub.abandon_incarnation_in(PEER, &HashSet::from([number]));
        let announced = async {
            while !is_announced(1) {
                node.routing.announce_skipped_sequences();
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(JOIN_WAIT, announced).await.expect("the peer is told");
    }

    /// The link of the peer ends before its streams. A client that had everything from this node may lack the last messages of the peer,
    /// which only other nodes received, unless the peer has confirmed the channel.
    #[tokio::test]
    async fn attach_during_peer_loss_waits_for_stream_end_and_is_in_doubt() {
        for (begins, (answers, resumes)) in
            [("before", (true, true)), ("before", (false, false)), ("between", (false, false))]
        {
            let node = RoutingTestNode::new();
            node.finds_the_peer();
            node.has_a_link();
            node.routing.stream_opened(&node.peer, 0);
            let position = node.routing.hub.position(&node.key).serial();
            if begins == "between" {
                node.loses_its_links();
            }
            node.is_attached_to();
            if answers {
                node.says_joined(0, 0, Vec::new());
            }
            if begins == "before" {
                node.loses_its_links();
            }
            let is_let_in = || node.routing.local_interest.lock()[&node.number()].let_in.is_some();
            assert_eq!(is_let_in(), answers, "{begins}");
            node.routing.stream_ended(&node.peer, 0, true);
            assert!(is_let_in());
            let start = node.routing.hub.resume_start(&node.key, &position);
            assert_eq!(start == ResumeStart::Live, resumes, "{begins} {answers}: {start:?}");
        }
    }

    #[tokio::test]
    async fn attach_does_not_wait_long_for_a_partitioned_peer() {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.has_a_link();
        node.routing.stream_opened(&node.peer, 0);
        node.is_attached_to();
        node.loses_its_links();
        let is_let_in = async {
            while node.routing.local_interest.lock()[&node.number()].let_in.is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(JOIN_WAIT, is_let_in).await.expect("it is given up");
        assert!(node.routing.ending().is_empty());
    }

    #[tokio::test]
    async fn settle_ends_once_each_peer_has_answered_its_round() {
        let (node, other) = RoutingTestNode::of_three();
        let mut settled = Box::pin(node.routing.settled(&node.key));
        assert!(poll!(&mut settled).is_pending());
        let round = node.routing.local_interest.lock()[&node.number()].rounds[0].number;
        node.says_joined_as(&node.peer, 0, round, Vec::new());
        node.says_joined_as(&other, 0, round + 1, Vec::new());
        assert!(poll!(&mut settled).is_pending(), "it answers another one");
        node.says_joined_as(&other, 0, round, Vec::new());
        assert!(settled.await);
        assert!(!node.routing.settled(&node.key).await, "nobody answers");
        assert!(node.routing.local_interest.lock()[&node.number()].rounds.is_empty());
        node.routing.stream_opened(&node.peer, 0);
        let mut settled = Box::pin(node.routing.settled(&node.key));
        assert!(poll!(&mut settled).is_pending());
        node.loses_its_links();
        assert!(poll!(&mut settled).is_pending());
        node.routing.stream_ended(&node.peer, 0, true);
        assert_eq!(poll!(&mut settled), Poll::Ready(false), "there is nobody to wait for");
        assert!(!node.routing.settled(&node.key).await, "nobody can be reached");
    }
}
