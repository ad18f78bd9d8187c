//! Runs of other nodes that live and cannot be told what is wanted here. What they publish in a channel that they do not forward yet is
//! missing, so nobody is resumed there, until they do or are gone.

use std::collections::HashMap;
use std::time::Duration;

use tokio::time::Instant;

use super::{Routing, Standing};
use crate::model::ChannelKey;

/// A link that is to be made, or made anew, is there by then.
const LINKED_WITHIN: Duration = Duration::from_secs(5);
/// Clients come to a node by then although it has not met the others.
const ALONE_WITHIN: Duration = Duration::from_secs(15);
/// Who lives has answered by then.
const ANSWERED_WITHIN: Duration = Duration::from_millis(500);

/// The runs of other nodes that live, whoever hears them.
#[derive(Debug, Default)]
pub(super) struct Unreached {
    runs: HashMap<u64, Reach>,
}

#[derive(Debug)]
struct Reach {
    standing: Standing,
    since: Instant,
    /// Since when there is no link to it.
    down: Option<Instant>,
    is_unreached: bool,
    /// There may be channels in which something of it is missing.
    is_doubted: bool,
}

impl Reach {
    fn is_late(&self, now: Instant) -> bool {
        let Some(down) = self.down else { return false };
        let linked_within = if self.standing.has_clients { LINKED_WITHIN } else { ALONE_WITHIN };
        self.standing.is_dead || now.saturating_duration_since(down) >= linked_within
    }
}

impl Unreached {
    /// The members as they are now. Gives those that were doubted, and live no more.
    fn live(&mut self, members: &[Standing], now: Instant) -> Vec<u64> {
        let lives = |member: &&Standing| !member.is_dead || member.is_elsewhere;
        let living: HashMap<u64, Standing> =
            members.iter().filter(lives).map(|member| (member.incarnation, *member)).collect();
        let ended = self.runs.extract_if(|run, _| !living.contains_key(run));
        let ended = ended.filter(|(_, reach)| reach.is_doubted).map(|(run, _)| run).collect();
        for (run, standing) in living {
            let new = || Reach { standing, since: now, down: None, is_unreached: false, is_doubted: false };
            self.runs.entry(run).or_insert_with(new).standing = standing;
        }
        ended
    }

    /// Gives those that cannot be reached, and could be until now.
    fn look(&mut self, is_up: impl Fn(u64) -> bool, now: Instant) -> Vec<u64> {
        let mut begun = Vec::new();
        for (run, reach) in &mut self.runs {
            reach.down = if is_up(*run) { None } else { Some(reach.down.unwrap_or(now)) };
            let is_unreached = reach.is_late(now);
            if is_unreached && !reach.is_unreached {
                reach.is_doubted = true;
                begun.push(*run);
            }
            reach.is_unreached = is_unreached;
        }
        begun
    }

    fn doubt(&mut self, run: u64) {
        if let Some(reach) = self.runs.get_mut(&run) {
            reach.is_doubted = true;
        }
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = u64> {
        self.runs.iter().filter(|(_, reach)| reach.is_unreached).map(|(run, _)| *run)
    }

    fn is_asking(&self, alive: &[u64], now: Instant) -> bool {
        let is_asked = |(run, reach): (&u64, &Reach)| {
            !alive.contains(run)
                && !reach.standing.is_draining
                && now.saturating_duration_since(reach.since) < ANSWERED_WITHIN
        };
        self.runs.iter().any(is_asked)
    }
}

impl Routing {
    /// The members as they are now.
    pub(super) fn look_for_unreached(&self, members: &[Standing]) {
        let is_there = |member: &&Standing| !self.leaving.has_left(member.incarnation);
        let members: Vec<Standing> = members.iter().filter(is_there).copied().collect();
        let ended = self.unreached.lock().live(&members, Instant::now());
        ended.into_iter().for_each(|run| self.hub.give_up(run));
    }

    /// Somebody is a member since just now, and may live.
    pub fn is_asking(&self) -> bool {
        let alive = self.expected.lock().clone();
        self.unreached.lock().is_asking(&alive, Instant::now())
    }

    /// To be called several times a second.
    pub(in crate::cluster) fn doubt_the_unreached(&self, now: Instant) {
        let begun = self.unreached.lock().look(|run| self.is_up(run), now);
        begun.into_iter().for_each(|run| self.doubt_all_unconfirmed(run));
    }

    /// What was told of its end may have taken the doubt away in channels that it had never confirmed.
    pub(super) fn doubt_again(&self, run: u64) {
        if self.unreached.lock().runs().any(|unreached| unreached == run) {
            self.doubt_all_unconfirmed(run);
        }
    }

    fn doubt_all_unconfirmed(&self, run: u64) {
        let unconfirmed: Vec<(u64, ChannelKey)> = {
            let own = self.own.lock();
            let unconfirmed = own.iter().filter(|(_, own)| !own.confirmed.contains(&run));
            unconfirmed.map(|(number, own)| (*number, own.key.clone())).collect()
        };
        unconfirmed.into_iter().for_each(|(number, key)| self.doubt_unconfirmed(run, &key, number));
    }

    /// Unless the peer has said how far it is in the channel: that is noted before it is heard there.
    pub(super) fn doubt_unconfirmed(&self, run: u64, key: &ChannelKey, number: u64) {
        self.unreached.lock().doubt(run);
        let is_owed = || self.own.lock().get(&number).is_some_and(|own| !own.confirmed.contains(&run));
        self.hub.doubt_in(key, number, run, is_owed);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use fanfare_proto::serial::Serial;

    use super::super::super::inbound::{Inbound as _, Interest, Peer};
    use super::super::JOIN_WAIT;
    use super::super::fixture::{Node, PEER};
    use super::*;
    use crate::hub::Start;

    const STANDING: Standing = Standing {
        incarnation: PEER,
        is_dead: false,
        is_draining: false,
        is_elsewhere: false,
        has_clients: true,
    };

    impl Node {
        /// So long after it was for the first time.
        fn sees(&self, standing: &[Standing], later: Duration) {
            self.routing.look_for_unreached(standing);
            self.routing.doubt_the_unreached(Instant::now() + later);
        }

        /// Of this run, as far as it has come.
        fn position(&self) -> Serial {
            let own = self.routing.hub.live(&self.key).expect("it is attached to").mark().own;
            Serial::single(own.incarnation, own.sequence)
        }

        fn resumes(&self) -> bool {
            self.routing.hub.look_after(&self.key, &self.position()) == Start::Live
        }
    }

    fn found() -> Node {
        let node = Node::new();
        node.finds_the_peer();
        node.sees(&[STANDING], Duration::ZERO);
        node
    }

    #[tokio::test]
    async fn unlinked_live_peer_blocks_resume_until_it_tells_position() {
        let node = found();
        node.is_attached_to();
        assert!(node.resumes(), "it may be linked to at any moment");
        node.sees(&[STANDING], LINKED_WITHIN);
        assert!(!node.resumes());
        node.has_a_link();
        node.sees(&[STANDING], LINKED_WITHIN);
        assert!(!node.resumes(), "it has not said so yet");
        node.says_joined(0, 0, Vec::new());
        assert!(node.resumes());
    }

    #[tokio::test]
    async fn unreachable_peer_counts_as_recently_unreachable_for_a_while() {
        let node = found();
        let is_torn = || node.routing.is_torn_lately();
        let is_so_for_long =
            || node.routing.torn.lock().values_mut().for_each(|since| *since -= 2 * LINKED_WITHIN);
        assert!(is_torn(), "there is no link to it");
        is_so_for_long();
        assert!(!is_torn());
        node.has_a_link();
        assert!(!is_torn());
        node.routing.look_for_deaths(&[STANDING]);
        node.routing.lane_opened(&node.peer, 0);
        assert!(!is_torn());
        node.routing.lane_ended(&node.peer, 0, true);
        assert!(is_torn(), "its lanes have ended, and the link may yet");
        is_so_for_long();
        assert!(!is_torn());
        node.finds(&[&node.peer, &Peer { node_id: "n8".into(), incarnation: 8 }]);
        node.loses_its_links();
        assert!(is_torn(), "another one, since just now");
    }

    #[tokio::test]
    async fn new_channel_is_in_doubt_until_unreachable_peer_is_down() {
        let node = found();
        node.sees(&[STANDING], LINKED_WITHIN);
        node.is_attached_to();
        assert!(!node.resumes());
        let before = node.position();
        node.sees(&[Standing { is_dead: true, ..STANDING }], LINKED_WITHIN);
        assert!(node.resumes(), "who is there now has all that follows");
        assert_eq!(node.routing.hub.look_after(&node.key, &before), Start::Unknown);
    }

    #[tokio::test]
    async fn down_peer_is_in_doubt_only_if_other_nodes_still_hear_it() {
        for is_elsewhere in [true, false] {
            let node = found();
            node.is_attached_to();
            node.sees(&[Standing { is_dead: true, is_elsewhere, ..STANDING }], Duration::ZERO);
            assert_eq!(node.resumes(), !is_elsewhere);
        }
    }

    #[tokio::test]
    async fn peer_that_forwards_channel_already_is_not_put_in_doubt() {
        let node = found();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.loses_its_links();
        node.sees(&[STANDING], Duration::ZERO);
        node.sees(&[STANDING], LINKED_WITHIN);
        assert!(node.resumes());
    }

    #[tokio::test]
    async fn peer_without_clients_is_in_doubt_only_after_longer_wait() {
        let node = found();
        node.is_attached_to();
        let standing = Standing { has_clients: false, ..STANDING };
        for (later, resumes) in [(Duration::ZERO, true), (LINKED_WITHIN, true), (ALONE_WITHIN, false)] {
            node.sees(&[standing], later);
            assert_eq!(node.resumes(), resumes, "{later:?}");
        }
    }

    #[tokio::test]
    async fn live_peer_is_doubted_again_after_false_word_of_its_end() {
        let node = found();
        node.sees(&[STANDING], LINKED_WITHIN);
        node.is_attached_to();
        node.routing.hub.gone_in(PEER, &HashSet::from([node.number()]));
        assert!(node.resumes());
        node.routing.doubt_again(PEER + 1);
        assert!(node.resumes());
        node.routing.doubt_again(PEER);
        assert!(!node.resumes());
    }

    #[tokio::test]
    async fn peer_that_told_its_position_is_not_doubted_late() {
        let node = found();
        node.has_a_link();
        node.is_attached_to();
        node.says_joined(0, 0, Vec::new());
        node.routing.doubt_unconfirmed(PEER, &node.key, node.number());
        assert!(node.resumes());
    }

    #[test]
    fn found_peer_counts_as_being_asked_for_a_limited_time() {
        let (mut unreached, now) = (Unreached::default(), Instant::now());
        unreached.live(&[STANDING], now);
        assert!(unreached.is_asking(&[], now) && !unreached.is_asking(&[PEER], now));
        unreached.live(&[STANDING], now + ANSWERED_WITHIN);
        assert!(!unreached.is_asking(&[], now + ANSWERED_WITHIN));
        unreached.live(&[Standing { incarnation: 8, is_draining: true, ..STANDING }], now);
        assert!(!unreached.is_asking(&[], now), "it leaves");
    }

    #[tokio::test]
    async fn left_peer_does_not_block_resume() {
        let node = found();
        node.routing.interest(&node.peer, Interest::Left { lanes: 1, is_all: true });
        node.is_attached_to();
        for later in [Duration::ZERO, LINKED_WITHIN] {
            // As gossip has it.
            node.finds_the_peer();
            node.sees(&[STANDING], later);
            assert!(node.resumes());
        }
        assert!(node.routing.is_known(PEER) && node.routing.known_of(PEER).has_left);
    }

    #[tokio::test]
    async fn leave_of_peer_before_its_position_is_told_loses_resume() {
        for is_told in [false, true] {
            let node = found();
            node.is_attached_to();
            if is_told {
                node.says_joined(0, 0, Vec::new());
            }
            let before = node.position();
            node.routing.interest(&node.peer, Interest::Left { lanes: 1, is_all: true });
            let resumes = node.routing.hub.look_after(&node.key, &before) == Start::Live;
            assert_eq!(resumes, is_told);
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
        node.routing.own.lock().values_mut().for_each(|own| own.since -= 2 * JOIN_WAIT);
        node.routing.give_up_waiting();
        assert!(!node.resumes());
        node.says_joined_as(&other, 0, 0, Vec::new());
        assert!(node.resumes());
    }
}
