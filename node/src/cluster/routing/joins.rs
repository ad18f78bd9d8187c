//! From when on a peer forwards a channel that is wanted here, and what it had numbered before.

use std::collections::HashSet;

use fanfare_proto::serial::Serial;
use tokio::time::Instant;

use super::{JOIN_WAIT, Routing};
use crate::model::{ChannelKey, Stamp};

/// Runs that are taken from peers for one channel. So many do not end within the time for which they count; what is named of a further one
/// in a position is not known here, so that whoever has it is told that something may be missing.
const GONE_MAX: usize = 1024;

impl Routing {
    /// Of what is known of other runs, that of those which are not there any more, or leave: who asks may have heard their goodbye.
    pub(super) fn gone(&self, known: &Serial) -> Vec<Stamp> {
        let mut gone: Vec<Stamp> = Stamp::all_of(known).collect();
        self.keep_gone(&mut gone);
        let deaths = self.deaths.lock();
        let leaves = |one: &Stamp| deaths.is_draining(one.incarnation) && !gone.contains(one);
        let leaving: Vec<Stamp> = Stamp::all_of(known).filter(leaves).collect();
        drop(deaths);
        gone.extend(leaving);
        gone
    }

    fn keep_gone(&self, stamps: &mut Vec<Stamp>) {
        if !stamps.is_empty() {
            let (own, expected) = (self.hub.incarnation(), self.expected.lock());
            stamps.retain(|stamp| stamp.incarnation != own && !expected.contains(&stamp.incarnation));
        }
    }

    pub(super) fn joined(
        &self,
        from: u64,
        key: &ChannelKey,
        number: u64,
        (sequence, round): (u64, u64),
        mut gone: Vec<Stamp>,
    ) {
        self.told_one(from, round);
        gone.truncate(GONE_MAX);
        let mut own = self.own.lock();
        let Some(channel) = own.get_mut(&number).filter(|channel| channel.key == *key) else { return };
        let is_first = !channel.confirmed.contains(&from);
        if is_first {
            channel.confirmed.push(from);
        }
        let waited = channel.waits.len();
        self.keep_gone(&mut gone);
        gone.retain(|stamp| {
            let is_known = channel.gone.sequence_of(stamp.incarnation).is_some();
            let is_taken = is_known || channel.gone.entries().len() < GONE_MAX;
            if is_taken {
                channel.gone.advance(stamp.incarnation, stamp.sequence);
            }
            is_taken
        });
        drop(own);
        let stamp = Stamp { incarnation: from, sequence };
        if is_first {
            self.hub.heard_of(key, number, &gone);
            self.hub.heard(key, number, stamp);
        } else {
            self.hub.caught_up(key, number, stamp);
        }
        if let Some(channel) = self.own.lock().get_mut(&number) {
            for one in channel.rounds.iter_mut().filter(|one| one.number == round) {
                one.waits.retain(|peer| *peer != from);
            }
            for done in channel.rounds.extract_if(.., |one| one.waits.is_empty()) {
                done.done.send(()).ok();
            }
        }
        if waited > 0 {
            self.wait_no_more(number, from);
        }
    }

    /// The channel does not wait for the peer any more.
    pub(super) fn wait_no_more(&self, number: u64, peer: u64) {
        let mut own = self.own.lock();
        let Some(channel) = own.get_mut(&number).filter(|channel| !channel.waits.is_empty()) else { return };
        channel.waits.retain(|waited| *waited != peer);
        let key = channel.waits.is_empty().then(|| channel.key.clone());
        channel.let_in = key.is_some().then(Instant::now);
        let is_whole = !channel.is_passed;
        drop(own);
        if let Some(key) = key {
            self.hub.joined(&key, number, is_whole);
        }
    }

    /// The link to the peer has ended. Where all its lanes to this node are about to, whoever attaches waits for that: then it is known
    /// that they came after all that the peer had said, if it has died.
    pub(super) fn unlinked(&self, peer: u64) {
        self.deaths.lock().linked(peer, false);
        if !self.deaths.lock().is_ending(peer) {
            self.pass_by(peer);
        }
        if !self.deaths.lock().has_lanes(peer) {
            self.end_rounds(peer);
        }
    }

    /// The members whose lanes are about to end, as far as that is known.
    pub(super) fn ending(&self) -> Vec<u64> {
        let mut down: Vec<u64> =
            self.peers.read().keys().copied().filter(|peer| !self.is_up(*peer)).collect();
        let deaths = self.deaths.lock();
        down.retain(|peer| deaths.is_ending(*peer));
        down
    }

    /// No channel waits for the peer any more, which has not answered.
    pub(super) fn pass_by(&self, peer: u64) {
        let waiting: Vec<u64> = {
            let mut own = self.own.lock();
            let waiting = own.iter_mut().filter(|(_, own)| own.waits.contains(&peer));
            let passes = waiting.map(|(number, own)| {
                own.is_passed |= !own.confirmed.contains(&peer);
                *number
            });
            passes.collect()
        };
        waiting.into_iter().for_each(|number| self.wait_no_more(number, peer));
    }

    pub(super) fn give_up_waiting(&self) {
        self.deaths.lock().looked(Instant::now());
        let waiting: Vec<(u64, Vec<u64>)> = {
            let own = self.own.lock();
            let waiting = own.iter().filter(|(_, own)| !own.waits.is_empty());
            waiting.map(|(number, own)| (*number, own.waits.clone())).collect()
        };
        let waited: HashSet<u64> = waiting.iter().flat_map(|(_, peers)| peers.iter().copied()).collect();
        for peer in waited {
            if !self.is_up(peer) && !self.deaths.lock().is_ending(peer) {
                self.pass_by(peer);
            }
        }
        let late: Vec<_> = {
            let own = self.own.lock();
            let still = waiting.iter().filter_map(|(number, _)| Some((*number, own.get(number)?)));
            let late = still.filter(|(_, own)| !own.waits.is_empty() && own.since.elapsed() > JOIN_WAIT);
            late.map(|(number, own)| (number, own.key.clone(), own.waits.clone())).collect()
        };
        for (number, key, peers) in late {
            for peer in peers {
                self.doubt_unconfirmed(peer, &key, number);
                self.wait_no_more(number, peer);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::task::Poll;
    use std::time::Duration;

    use futures_util::poll;

    use super::super::super::inbound::{Inbound as _, Interest, Peer};
    use super::super::super::link::Item;
    use super::super::fixture::{Node, PEER};
    use super::*;
    use crate::hub::Start;

    /// Of a run, its number.
    fn stamp(incarnation: u64, sequence: u64) -> Stamp {
        Stamp { incarnation, sequence }
    }

    #[tokio::test]
    async fn retired_incarnations_in_joins_are_bounded_and_never_live() {
        let node = Node::new();
        node.finds_the_peer();
        node.is_attached_to();
        let told = || node.routing.own.lock()[&node.number()].gone.entries().to_vec();
        let own = node.routing.hub.incarnation();
        node.says_joined(5, 0, vec![stamp(99, 4), stamp(own, 9), stamp(PEER, 9)]);
        assert_eq!(told(), [(99, 4)]);
        node.says_joined(5, 0, vec![stamp(99, 3), stamp(98, 1)]);
        assert_eq!(told(), [(98, 1), (99, 4)], "as far as anybody has heard them");
        node.says_joined(5, 0, (1_000..).take(2 * GONE_MAX).map(|run| stamp(run, 1)).collect());
        assert_eq!(told().len(), GONE_MAX);
        node.says_joined(5, 0, vec![stamp(99, 5), stamp(97, 1)]);
        assert_eq!((told().len(), told()[1]), (GONE_MAX, (99, 5)), "of those that it knows it takes more");
    }

    #[tokio::test]
    async fn peer_sequence_before_forwarding_enters_channel_position() {
        let node = Node::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        let channel = node.routing.hub.live(&node.key).expect("it is attached to");
        let elsewhere = Interest::Joined {
            key: node.key.clone(),
            number: node.number() + 1,
            sequence: 9,
            round: 0,
            gone: vec![stamp(99, 4)],
        };
        node.routing.interest(&node.peer, elsewhere);
        assert_eq!(channel.mark().serial().sequence_of(PEER), None, "of a channel that was forgotten");
        assert!(node.routing.owed(&channel).is_empty());
        node.says_joined(5, 0, vec![stamp(99, 4)]);
        let serial = channel.mark().serial();
        assert_eq!((serial.sequence_of(PEER), serial.sequence_of(99)), (Some(5), Some(4)));
        assert_eq!(node.routing.owed(&channel), [PEER]);
    }

    /// So that who is brought on by this node, or comes from there, misses nothing.
    #[tokio::test]
    async fn joining_peer_learns_sequence_gaps_of_retired_incarnations() {
        const GONE: u64 = 9;
        let node = Node::new();
        let gone = Peer { node_id: "n9".into(), incarnation: GONE };
        node.finds(&[&node.peer, &gone]);
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.says_joined_as(&gone, 0, 0, Vec::new());
        let wanted = Interest::Wanted { key: node.key.clone(), number: 1, round: 0, sequence: 3 };
        node.routing.interest(&gone, wanted);
        let told = || {
            node.says();
            node.is_told_a_want();
            node.says().pop()
        };
        let joined = |gone| {
            let (key, sequence) = (node.key.clone(), 0);
            Some(Item::interest(&Interest::Joined { key, number: 1, sequence, round: 0, gone }))
        };
        assert_eq!(told(), joined(Vec::new()));
        node.finds_the_peer();
        assert_eq!(told(), joined(vec![Stamp { incarnation: GONE, sequence: 3 }]));
    }

    /// Of the peer's own numbers, and of those given here.
    #[tokio::test]
    async fn numbers_without_a_message_are_told_and_taken() {
        let node = Node::new();
        node.finds_the_peer();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        let start = |there| {
            let mut position = node.routing.hub.position(&node.key).serial();
            position.advance(PEER, there);
            node.routing.hub.look_after(&node.key, &position)
        };
        let wanted = Interest::Wanted { key: node.key.clone(), number: 1, round: 0, sequence: 3 };
        node.routing.interest(&node.peer, wanted);
        assert_eq!([3, 4].map(start), [Start::Live, Start::Unknown]);
        let number = node.number();
        let told = |sequence| {
            let key = node.key.clone();
            let is_told = |item: &Item| {
                let wanted = |round| Interest::Wanted { key: key.clone(), number, round, sequence };
                (0..9).any(|round| *item == Item::interest(&wanted(round)))
            };
            node.says().iter().any(is_told)
        };
        assert!(told(0), "with the wish");
        node.routing.hub.gone_in(PEER, &HashSet::from([number]));
        let is_told = async {
            while !told(1) {
                node.routing.tell_what_is_numbered();
                tokio::task::yield_now().await;
            }
        };
        tokio::time::timeout(JOIN_WAIT, is_told).await.expect("the peer is told");
    }

    /// Its link ends before its lanes do. Whether somebody is let in before it has said how far it is, whoever had all that was here may
    /// lack what it published last, to others alone.
    #[tokio::test]
    async fn attach_during_peer_loss_waits_for_stream_end_and_is_in_doubt() {
        for (begins, (answers, resumes)) in
            [("before", (true, true)), ("before", (false, false)), ("between", (false, false))]
        {
            let node = Node::new();
            node.finds_the_peer();
            node.has_a_link();
            node.routing.lane_opened(&node.peer, 0);
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
            let is_let_in = || node.routing.own.lock()[&node.number()].let_in.is_some();
            assert_eq!(is_let_in(), answers, "{begins}");
            node.routing.lane_ended(&node.peer, 0, true);
            assert!(is_let_in());
            let start = node.routing.hub.look_after(&node.key, &position);
            assert_eq!(start == Start::Live, resumes, "{begins} {answers}: {start:?}");
        }
    }

    #[tokio::test]
    async fn attach_does_not_wait_long_for_a_partitioned_peer() {
        let node = Node::new();
        node.finds_the_peer();
        node.has_a_link();
        node.routing.lane_opened(&node.peer, 0);
        node.is_attached_to();
        node.loses_its_links();
        let is_let_in = async {
            while node.routing.own.lock()[&node.number()].let_in.is_none() {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(JOIN_WAIT, is_let_in).await.expect("it is given up");
        assert!(node.routing.ending().is_empty());
    }

    #[tokio::test]
    async fn all_is_here_when_each_peer_has_said_so_since_it_was_asked() {
        let (node, other) = Node::of_three();
        let mut settled = Box::pin(node.routing.settled(&node.key));
        assert!(poll!(&mut settled).is_pending());
        let round = node.routing.own.lock()[&node.number()].rounds[0].number;
        node.says_joined_as(&node.peer, 0, round, Vec::new());
        node.says_joined_as(&other, 0, round + 1, Vec::new());
        assert!(poll!(&mut settled).is_pending(), "it answers another one");
        node.says_joined_as(&other, 0, round, Vec::new());
        assert!(settled.await);
        assert!(!node.routing.settled(&node.key).await, "nobody answers");
        assert!(node.routing.own.lock()[&node.number()].rounds.is_empty());
        node.routing.lane_opened(&node.peer, 0);
        let mut settled = Box::pin(node.routing.settled(&node.key));
        assert!(poll!(&mut settled).is_pending());
        node.loses_its_links();
        assert!(poll!(&mut settled).is_pending());
        node.routing.lane_ended(&node.peer, 0, true);
        assert_eq!(poll!(&mut settled), Poll::Ready(false), "there is nobody to wait for");
        assert!(!node.routing.settled(&node.key).await, "nobody can be reached");
    }
}
