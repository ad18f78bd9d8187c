//! Incarnations that are alive and cannot be sent the interest of this node. Their messages are missing in channels that they do not
//! forward yet, so no client is resumed there until they forward the channel or are retired.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::{GossipStatus, Routing};
use crate::model::ChannelKey;

/// Time within which a new or renewed link is up.
const LINKED_WITHIN: Duration = Duration::from_secs(5);
/// Time after which a node accepts clients although it has not met the others.
const ALONE_WITHIN: Duration = Duration::from_secs(15);
/// Time within which a live node has answered.
const ANSWERED_WITHIN: Duration = Duration::from_millis(500);

/// Incarnations of other nodes that are alive, also if only peers see them.
#[derive(Debug, Default)]
pub(super) struct UnreachablePeers {
    incarnations: HashMap<u64, PeerReachability>,
}

#[derive(Debug)]
struct PeerReachability {
    status: GossipStatus,
    since: Instant,
    /// Time since which there is no link to the incarnation.
    down: Option<Instant>,
    is_unreachable: bool,
    /// True if its messages may be missing in some channels.
    is_in_doubt: bool,
}

impl PeerReachability {
    fn is_late(&self, now: Instant) -> bool {
        let Some(down) = self.down else { return false };
        let linked_within = if self.status.has_clients { LINKED_WITHIN } else { ALONE_WITHIN };
        self.status.is_down || now.saturating_duration_since(down) >= linked_within
    }
}

impl UnreachablePeers {
    /// Sets the members, and returns the incarnations in doubt that are no longer alive.
    fn live(&mut self, members: &[GossipStatus], now: Instant) -> Vec<u64> {
        let lives = |member: &&GossipStatus| !member.is_down || member.is_seen_by_others;
        let living: HashMap<u64, GossipStatus> =
            members.iter().filter(lives).map(|member| (member.incarnation, *member)).collect();
        let ended = self.incarnations.extract_if(|incarnation, _| !living.contains_key(incarnation));
        let ended =
            ended.filter(|(_, reach)| reach.is_in_doubt).map(|(incarnation, _)| incarnation).collect();
        for (incarnation, status) in living {
            let new = || PeerReachability {
                status,
                since: now,
                down: None,
                is_unreachable: false,
                is_in_doubt: false,
            };
            self.incarnations.entry(incarnation).or_insert_with(new).status = status;
        }
        ended
    }

    /// Updates the reachability, and returns the incarnations that have become unreachable.
    fn look(&mut self, is_up: impl Fn(u64) -> bool, now: Instant) -> Vec<u64> {
        let mut begun = Vec::new();
        for (incarnation, reach) in &mut self.incarnations {
            reach.down = if is_up(*incarnation) { None } else { Some(reach.down.unwrap_or(now)) };
            let is_unreachable = reach.is_late(now);
            if is_unreachable && !reach.is_unreachable {
                reach.is_in_doubt = true;
                begun.push(*incarnation);
            }
            reach.is_unreachable = is_unreachable;
        }
        begun
    }

    fn mark_in_doubt(&mut self, incarnation: u64) {
        if let Some(reach) = self.incarnations.get_mut(&incarnation) {
            reach.is_in_doubt = true;
        }
    }

    pub(super) fn unreachable(&self) -> impl Iterator<Item = u64> {
        self.incarnations
            .iter()
            .filter(|(_, reach)| reach.is_unreachable)
            .map(|(incarnation, _)| *incarnation)
    }

    fn is_asking(&self, alive: &[u64], now: Instant) -> bool {
        let is_asked = |(incarnation, reach): (&u64, &PeerReachability)| {
            !alive.contains(incarnation)
                && !reach.status.is_draining
                && now.saturating_duration_since(reach.since) < ANSWERED_WITHIN
        };
        self.incarnations.iter().any(is_asked)
    }
}

impl Routing {
    /// Takes the current members. If an incarnation in doubt is no longer alive, earlier positions end in its channels.
    pub(super) fn update_reachability(&self, members: &[GossipStatus]) {
        let is_there = |member: &&GossipStatus| !self.leaving.has_left(member.incarnation);
        let members: Vec<GossipStatus> = members.iter().filter(is_there).copied().collect();
        let ended = self.unreachable.lock().live(&members, Instant::now());
        ended.into_iter().for_each(|incarnation| self.hub.abandon_where_in_doubt(incarnation));
    }

    /// True while a new member that may be alive has had no time to answer.
    pub fn is_asking(&self) -> bool {
        let alive = self.expected.lock().clone();
        self.unreachable.lock().is_asking(&alive, Instant::now())
    }

    /// Marks incarnations that have become unreachable in doubt. Called several times a second.
    pub(in crate::cluster) fn mark_unreachable_in_doubt(&self, now: Instant) {
        let begun = self.unreachable.lock().look(|incarnation| self.is_up(incarnation), now);
        begun.into_iter().for_each(|incarnation| self.mark_unconfirmed_in_doubt(incarnation));
    }

    /// Marks an unreachable incarnation in doubt again, since the handling of its end may have cleared the doubt in unconfirmed channels.
    pub(super) fn restore_in_doubt(&self, incarnation: u64) {
        if self.unreachable.lock().unreachable().any(|unreachable| unreachable == incarnation) {
            self.mark_unconfirmed_in_doubt(incarnation);
        }
    }

    fn mark_unconfirmed_in_doubt(&self, incarnation: u64) {
        let unconfirmed: Vec<(u64, ChannelKey)> = {
            let own = self.local_interest.lock();
            let unconfirmed = own.iter().filter(|(_, own)| !own.confirmed.contains(&incarnation));
            unconfirmed.map(|(number, own)| (*number, own.key.clone())).collect()
        };
        unconfirmed
            .into_iter()
            .for_each(|(number, key)| self.mark_channel_in_doubt(incarnation, &key, number));
    }

    /// Marks an incarnation in doubt in a channel, unless it has confirmed the channel. A confirmation is recorded before the hub learns
    /// of it.
    pub(super) fn mark_channel_in_doubt(&self, incarnation: u64, key: &ChannelKey, number: u64) {
        self.unreachable.lock().mark_in_doubt(incarnation);
        let is_unconfirmed = || {
            self.local_interest.lock().get(&number).is_some_and(|own| !own.confirmed.contains(&incarnation))
        };
        self.hub.mark_in_doubt_in(key, number, incarnation, is_unconfirmed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use fanfare_proto::serial::Serial;

    use super::super::super::inbound::{Inbound as _, InterestMessage, Peer};
    use super::super::JOIN_WAIT;
    use super::super::fixture::{PEER, RoutingTestNode};
    use super::*;
    use crate::hub::ResumeStart;

    const STATUS: GossipStatus = GossipStatus {
        incarnation: PEER,
        is_down: false,
        is_draining: false,
        is_seen_by_others: false,
        has_clients: true,
    };

    impl RoutingTestNode {
        /// Runs the checks with these members, at a time that is `later` than now.
        fn sees(&self, statuses: &[GossipStatus], later: Duration) {
            self.routing.update_reachability(statuses);
            self.routing.mark_unreachable_in_doubt(Instant::now() + later);
        }

        /// Position with the last sequence of this node's own incarnation.
        fn position(&self) -> Serial {
            let own = self.routing.hub.live(&self.key).expect("it is attached to").position().own;
            Serial::single(own.incarnation, own.sequence)
        }

        fn resumes(&self) -> bool {
            self.routing.hub.resume_start(&self.key, &self.position()) == ResumeStart::Live
        }
    }

    fn found() -> RoutingTestNode {
        let node = RoutingTestNode::new();
        node.finds_the_peer();
        node.sees(&[STATUS], Duration::ZERO);
        node
    }

    #[tokio::test]
    async fn unlinked_live_peer_blocks_resume_until_it_sends_position() {
        let node = found();
        node.is_attached_to();
        assert!(node.resumes(), "it may be linked to at any moment");
        node.sees(&[STATUS], LINKED_WITHIN);
        assert!(!node.resumes());
        node.has_a_link();
        node.sees(&[STATUS], LINKED_WITHIN);
        assert!(!node.resumes(), "it has not said so yet");
        node.says_joined(0, 0, Vec::new());
        assert!(node.resumes());
    }

    #[tokio::test]
    async fn unreachable_peer_counts_as_recently_unreachable_for_a_while() {
        let node = found();
        let is_recently_unreachable = || node.routing.has_recently_unreachable();
        let is_so_for_long = || {
            node.routing.unreachable_since.lock().values_mut().for_each(|since| *since -= 2 * LINKED_WITHIN)
        };
        assert!(is_recently_unreachable(), "there is no link to it");
        is_so_for_long();
        assert!(!is_recently_unreachable());
        node.has_a_link();
        assert!(!is_recently_unreachable());
        node.routing.update_node_failures(&[STATUS]);
        node.routing.stream_opened(&node.peer, 0);
        assert!(!is_recently_unreachable());
        node.routing.stream_ended(&node.peer, 0, true);
        assert!(is_recently_unreachable(), "its lanes have ended, and the link may yet");
        is_so_for_long();
        assert!(!is_recently_unreachable());
        node.finds(&[&node.peer, &Peer { node_id: "n8".into(), incarnation: 8 }]);
        node.loses_its_links();
        assert!(is_recently_unreachable(), "another one, since just now");
    }

    #[tokio::test]
    async fn new_channel_is_in_doubt_until_unreachable_peer_is_down() {
        let node = found();
        node.sees(&[STATUS], LINKED_WITHIN);
        node.is_attached_to();
        assert!(!node.resumes());
        let before = node.position();
        node.sees(&[GossipStatus { is_down: true, ..STATUS }], LINKED_WITHIN);
        assert!(node.resumes(), "who is there now has all that follows");
        assert_eq!(node.routing.hub.resume_start(&node.key, &before), ResumeStart::Unknown);
    }

    #[tokio::test]
    async fn down_peer_is_in_doubt_only_if_other_nodes_still_hear_it() {
        for is_seen_by_others in [true, false] {
            let node = found();
            node.is_attached_to();
            node.sees(&[GossipStatus { is_down: true, is_seen_by_others, ..STATUS }], Duration::ZERO);
            assert_eq!(node.resumes(), !is_seen_by_others);
        }
    }

    #[tokio::test]
    async fn peer_that_forwards_channel_already_is_not_put_in_doubt() {
        let node = found();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.loses_its_links();
        node.sees(&[STATUS], Duration::ZERO);
        node.sees(&[STATUS], LINKED_WITHIN);
        assert!(node.resumes());
    }

    #[tokio::test]
    async fn peer_without_clients_is_in_doubt_only_after_longer_wait() {
        let node = found();
        node.is_attached_to();
        let status = GossipStatus { has_clients: false, ..STATUS };
        for (later, resumes) in [(Duration::ZERO, true), (LINKED_WITHIN, true), (ALONE_WITHIN, false)] {
            node.sees(&[status], later);
            assert_eq!(node.resumes(), resumes, "{later:?}");
        }
    }

    #[tokio::test]
    async fn live_peer_is_doubted_again_after_false_word_of_its_end() {
        let node = found();
        node.sees(&[STATUS], LINKED_WITHIN);
        node.is_attached_to();
        node.routing.hub.abandon_incarnation_in(PEER, &HashSet::from([node.number()]));
        assert!(node.resumes());
        node.routing.restore_in_doubt(PEER + 1);
        assert!(node.resumes());
        node.routing.restore_in_doubt(PEER);
        assert!(!node.resumes());
    }

    #[tokio::test]
    async fn peer_that_sent_its_position_is_not_put_in_doubt_late() {
        let node = found();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.routing.mark_channel_in_doubt(PEER, &node.key, node.number());
        assert!(node.resumes());
    }

    #[test]
    fn found_peer_counts_as_being_asked_for_a_limited_time() {
        let (mut unreachable, now) = (UnreachablePeers::default(), Instant::now());
        unreachable.live(&[STATUS], now);
        assert!(unreachable.is_asking(&[], now) && !unreachable.is_asking(&[PEER], now));
        unreachable.live(&[STATUS], now + ANSWERED_WITHIN);
        assert!(!unreachable.is_asking(&[], now + ANSWERED_WITHIN));
        unreachable.live(&[GossipStatus { incarnation: 8, is_draining: true, ..STATUS }], now);
        assert!(!unreachable.is_asking(&[], now), "it leaves");
    }

    #[tokio::test]
    async fn left_peer_does_not_block_resume() {
        let node = found();
        node.routing.interest(&node.peer, InterestMessage::Goodbye { streams: 1, is_all: true });
        node.is_attached_to();
        for later in [Duration::ZERO, LINKED_WITHIN] {
            // Gossip reports it as alive.
            node.finds_the_peer();
            node.sees(&[STATUS], later);
            assert!(node.resumes());
        }
        assert!(node.routing.is_known(PEER) && node.routing.peer_status(PEER).has_left);
    }

    #[tokio::test]
    async fn leave_of_peer_before_it_sent_its_position_loses_resume() {
        for has_confirmed in [false, true] {
            let node = found();
            node.is_attached_to();
            if has_confirmed {
                node.says_joined(0, 0, Vec::new());
            }
            let before = node.position();
            node.routing.interest(&node.peer, InterestMessage::Goodbye { streams: 1, is_all: true });
            let resumes = node.routing.hub.resume_start(&node.key, &before) == ResumeStart::Live;
            assert_eq!(resumes, has_confirmed);
            assert!(node.resumes(), "who comes later misses nothing");
        }
    }

    #[tokio::test]
    async fn peer_that_does_not_answer_attach_in_time_is_in_doubt() {
        let node = found();
        let other = Peer { node_id: "n8".into(), incarnation: 8 };
        node.finds(&[&node.peer, &other]);
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        assert!(node.resumes());
        node.routing.local_interest.lock().values_mut().for_each(|own| own.since -= 2 * JOIN_WAIT);
        node.routing.expire_attach_barriers();
        assert!(!node.resumes());
        node.says_joined_as(&other, 0, 0, Vec::new());
        assert!(node.resumes());
    }
}
